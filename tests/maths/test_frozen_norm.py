"""A fine-tuned network's own kernels against PyTorch, by Triton's interpreter on the CPU, and what happens without."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from _timm import BatchNormAct2d, Conv2dSame
from test_fused import _triton_version
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.nn.fine_tuning import _enlarged
from crosel.nn.frozen_norm import FrozenNorm, SameConv2d, use_kernels

CHECK = """
import copy, torch
from _timm import BatchNormAct2d, Conv2dSame
from torch import nn
from crosel.nn import frozen_norm
from crosel.nn.frozen_norm import FrozenNorm, SameConv2d, use_kernels

def results(layer, x, weight, on):
    if on:
        use_kernels(layer).on = True
    else:  # the reference: PyTorch's own, in double precision
        layer, x = layer.double(), x.double()
    x = x.clone().requires_grad_()
    out = layer(x)
    (out * weight(out)).sum().backward()
    return [out, x.grad, *(p.grad for p in layer.parameters())]

def compare(layer, x, weight):
    ours, reference = results(copy.deepcopy(layer), x, weight, True), results(copy.deepcopy(layer), x, weight, False)
    for a, b in zip(ours, reference, strict=True):
        assert float((a.detach() - b.detach()).norm() / b.detach().norm().clamp_min(1e-12)) < 1e-5
    again = results(copy.deepcopy(layer), x, weight, True)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "not the same bits twice"
    assert ours[0].is_contiguous(memory_format=torch.channels_last)

assert frozen_norm.kernels.tl.constexpr and frozen_norm.kernels.triton.knobs.runtime.interpret
torch.manual_seed(0)
seen = []
for name in ("norm_act", "norm_act_gradient", "move_window"):
    kernel = getattr(frozen_norm.kernels, name)
    class Counted:
        def __init__(self, kernel, name): self.kernel, self.name = kernel, name
        def __getitem__(self, grid):
            return lambda *args, **more: (seen.append((self.name, more)), self.kernel[grid](*args, **more))
    setattr(frozen_norm.kernels, name, Counted(kernel, name))

# 24: eight pixels to a row; 20 with an odd number of pixels; 5: a row of less than 64; 160: columns that do not fill
for shape in ((3, 24, 8, 8), (3, 20, 5, 5), (2, 5, 3, 3), (2, 160, 4, 4), (12, 64, 16, 16), (4, 32, 1, 1)):
    frozen_norm._PROGRAMS = 8 if shape[0] == 12 else 2048  # few of them take several steps each
    for act in (nn.Identity(), nn.ReLU(), nn.ReLU6(inplace=True), None):
        layer = nn.BatchNorm2d(shape[1]) if act is None else BatchNormAct2d(shape[1], act)
        with torch.no_grad():
            layer.weight.normal_(), layer.bias.normal_(2)
            layer.running_mean.normal_(), layer.running_var.uniform_(0.5, 2)
        layer.eval()
        x = (2 * torch.randn(shape)).contiguous(memory_format=torch.channels_last)
        w = torch.randn(shape)
        for weight in (w.contiguous(memory_format=torch.channels_last), w, torch.randn(shape[:2] + (1, 1))):
            compare(layer, x, lambda out, weight=weight: weight.to(out.dtype).expand_as(out))
            assert {name for name, _ in seen} == {"norm_act", "norm_act_gradient"}
        assert (max(more.get("STEPS", 0) for _, more in seen) > 1) == (shape[0] == 12)
        seen.clear()

for size, kernel, stride in (((8, 8), 3, 2), ((9, 9), 3, 2), ((7, 10), 5, 2), ((6, 6), 3, 1), ((5, 5), 1, 2)):
    layer = Conv2dSame(6, 6, kernel, stride, groups=6)
    x = torch.randn(2, 6, *size).contiguous(memory_format=torch.channels_last)
    compare(layer, x, lambda out: torch.arange(out.numel(), dtype=out.dtype).view_as(out) / out.numel())
    assert {name for name, _ in seen} == (set() if kernel == 1 else {"move_window"})
    seen.clear()

# In half precision, the activation lets through what it would have let through in PyTorch, where its input was rounded.
# (In float16: the interpreter does not round to bfloat16 as devices do.)
layer = BatchNormAct2d(16, nn.ReLU6()).eval()
x = (6 * torch.rand(64, 16, 8, 8)).half().contiguous(memory_format=torch.channels_last)
x[:, :, 0] = 6 + torch.rand(64, 16, 8) / 64 - 1 / 128
x[:, :, 1] = torch.rand(64, 16, 8) / 16 - 1 / 32
found = []
for on in (True, False):
    own, values = copy.deepcopy(layer), x.clone().requires_grad_()
    if on:
        use_kernels(own).on = True
    out = own(values)
    out.float().sum().backward()
    found.append((out, values.grad))
for a, b in zip(*found, strict=True):
    assert a.dtype == torch.float16
    torch.testing.assert_close(a, b)

# Training mode, another layout, no batch norm of its own numbers, switched off: PyTorch's path.
seen.clear()
layer = BatchNormAct2d(4, nn.ReLU6())
switch = use_kernels(layer)
x = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
layer.eval()(x)
switch.on = True
layer.eval()(x.contiguous()), layer.train()(x), layer.eval()(x[:0])
assert not seen
layer.eval()(x)
assert len(seen) == 1
"""


def test_kernels_agree_with_pytorch() -> None:
    if _triton_version() < (3, 9):
        pytest.skip("the interpreter of Triton before 3.9 does not run with this NumPy")
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", ""))
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_without_kernels_the_layers_are_pytorchs() -> None:
    """Bits, gradients, names of parameters, copies; layers of other kinds stay what they are."""
    torch.manual_seed(0)
    kinds = (nn.Identity, nn.ReLU, nn.ReLU6, nn.SiLU)
    body = nn.Sequential(
        Conv2dSame(3, 8, 3, 2), *(BatchNormAct2d(8, kind()) for kind in kinds), nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.SyncBatchNorm(8), nn.BatchNorm2d(8, affine=False),
    ).eval()  # fmt: skip
    ours = copy.deepcopy(body)
    ours_switch = use_kernels(ours)
    ours_switch.on = True
    changed = [SameConv2d, *[FrozenNorm] * 3, BatchNormAct2d, FrozenNorm, nn.Conv2d, nn.GroupNorm,
               nn.SyncBatchNorm, FrozenNorm]  # fmt: skip
    assert [type(layer) for layer in ours] == changed
    assert ours.state_dict().keys() == body.state_dict().keys()
    again = copy.deepcopy(ours)
    assert len({id(layer.switch) for layer in again.modules() if hasattr(layer, "switch")}) == 1
    x = torch.randn(4, 3, 10, 10)
    found: list[list[Tensor]] = []
    for network in (body, ours, again):
        out = network(x)
        out.square().sum().backward()
        found.append([out, *(p.grad for p in network.parameters() if p.grad is not None)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize(("side", "size", "channels"), [(32, 96, 3), (5, 12, 3), (7, 8, 1)])
def test_enlarging_by_matrices_is_bicubic_interpolation(side: int, size: int, channels: int) -> None:
    x = torch.randn(4, channels, side, side).contiguous(memory_format=torch.channels_last)
    for images in (x, x.contiguous(), x[:, :1].expand(-1, channels, -1, -1)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = _enlarged(images, size)
        expected = F.interpolate(images, (size, size), mode="bicubic")
        assert out.dtype == torch.float32
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out, expected, rtol=0, atol=3e-6)
