"""Our convolution against torch's in double precision, by Triton's interpreter on the CPU; and who takes it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from crosel.nn import convolution

CHECK = """
import torch
from torch.nn import functional as F
from crosel.nn import convolution
from crosel.nn.casts import SharedCasts
from crosel.nn.fused import enable

def made(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).contiguous(memory_format=torch.channels_last)

def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())

torch.manual_seed(0)
worst = 0.0
# Every width. Fewer rows than a program takes; a last program with some; images of one row and of one column; several
# splits.
for (inputs, outputs), plan in convolution._PLANS.items():
    for n, height, width in ((1, 3, 5), (3, 7, 7), (2, 1, 9), (2, 9, 1), (5, 8, 8)):
        convolution._PROGRAMS = 24 if n == 5 else 12
        x, weight, grad = made(n, inputs, height, width), made(outputs, inputs, 3, 3), made(n, outputs, height, width)
        pairs = []
        ours = lambda x, w: convolution._Convolution.apply(plan, x, w, None, False)[0]
        for function, dtype in ((ours, torch.float32), (lambda x, w: F.conv2d(x, w, padding=1), torch.float64)):
            leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight)]
            out = function(*leaves)
            out.backward(grad.to(dtype))
            pairs.append([out, *(leaf.grad for leaf in leaves)])
        worst = max([worst, *(relative(a, b) for a, b in zip(*pairs, strict=True))])
        assert all(t.is_contiguous(memory_format=torch.channels_last) for t in pairs[0])
        if plan.wgrad is not None:
            assert torch.equal(convolution._weight_gradient(plan, x, grad), pairs[0][2]), "not the same bits twice"
C = 160
plan = convolution._PLANS[C, C]
for one in ("x", "weight"):  # only what is asked for
    leaves = {"x": made(1, C, 3, 3), "weight": made(C, C, 3, 3)}
    leaves[one].requires_grad_()
    convolution._Convolution.apply(plan, *leaves.values(), None, False)[0].sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is not None] == [one]

# 1x1 with strides of its own for rows and columns; images of odd sizes.
for side in (7, 8):
    x, weight = made(3, 5, side, side + 3), made(4, 5, 1, 1)
    pairs = []
    for function, dtype in ((lambda x, w: convolution._Strided.apply(x, w, (2, 3)), torch.float32),
                            (lambda x, w: F.conv2d(x, w, stride=(2, 3)), torch.float64)):
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight)]
        out = function(*leaves)
        out.backward(torch.arange(out.numel(), dtype=dtype).view(out.shape))
        pairs.append([out, *(leaf.grad for leaf in leaves)])
    worst = max([worst, *(relative(a, b) for a, b in zip(*pairs, strict=True))])

# In a layer, with weights cast once or by autocast in every pass: rounded once, as torch's own. In float16, because
# the interpreter has no products of bfloat16.
convolution._LEAST_ROWS = 50
layer = convolution.Conv3x3(C, C).to(memory_format=torch.channels_last)
x, grad = made(2, C, 5, 5, dtype=torch.float16), made(2, C, 5, 5, dtype=torch.float16)
found = []
for on, shared in ((True, True), (True, False), (False, False)):
    layer.weight.grad = None
    own, casts = x.clone().requires_grad_(), SharedCasts(layer, torch.float16) if shared else None
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False), enable(on):
        assert (layer._plan(own) is not None) == on
        if casts:
            with casts:
                out = layer(own)
        else:
            out = layer(own)
    out.backward(grad)
    if casts:
        casts.accumulate_gradients()
    found.append([out.detach(), own.grad, layer.weight.grad])
assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
assert [t.dtype for t in found[0]] == [torch.float16, torch.float16, torch.float32]
assert max(relative(a, b) for a, b in zip(*found[::2], strict=True)) < 2**-10

# Every other shape, layout and precision goes to torch.
def ours(layer, x, on=True, autocast=True):
    with torch.autocast("cpu", dtype=torch.float16, enabled=autocast), enable(on):
        return layer._plan(x) is not None

x = made(2, C, 5, 5, dtype=torch.float16)
assert ours(layer, x)
assert not ours(layer, x, on=False)
assert not ours(layer, x, autocast=False)
assert ours(layer, x.float())  # autocast's cast is ours, too
assert not ours(layer, x.double())
assert not ours(layer, x[:1])
assert not ours(layer, x.contiguous())
assert not ours(layer, x.transpose(2, 3)[:, :, :, ::2])
assert not ours(convolution.Conv3x3(C, C), x)  # its weight is not channels-last
for inputs, outputs, stride in ((C, C, 2), (C, 2 * C, 1), (2 * C, 2 * C, 1), (3, 32, 1), (64, 64, 2)):
    other = convolution.Conv3x3(inputs, outputs, stride).to(memory_format=torch.channels_last)
    assert not ours(other, made(2, inputs, 9, 9, dtype=torch.float16)), (inputs, outputs, stride)
convolution._MOST_VALUES = 50 * C - 1
assert not ours(layer, x)
print(worst)
"""

NETWORK = """
import copy, torch
from crosel.nn import convolution
from crosel.nn.fused import batch_norm_parts, divides_parts, enable
from crosel.nn.networks import ResidualNetwork

torch.manual_seed(0)
C = 160
real, combined = convolution.fused._combine_tiles, []
convolution.fused._combine_tiles = lambda tiles, *rest: combined.append(tiles) or real(tiles, *rest)
convolution.Conv3x3._plan = lambda self, x: (convolution._PLANS[C, C]  # without autocast
    if self.in_channels == C and x.dtype == torch.float32 and convolution.fused.available(x) else None)
convolution._cast = lambda x, weight: (x, weight)
network = ResidualNetwork(8, (C, C), 1, 5, 3).double().to(memory_format=torch.channels_last)
for norm in (m for m in network.modules() if isinstance(m, torch.nn.BatchNorm2d)):
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
network.blocks[1].conv1.stride = (1, 1)  # the second block of a group, with the sum going around it
assert network.blocks[1].shortcut is None
# Sizes of parts, of images of 8x8; how many of the five norms take the moments of tiles.
for sizes, times in {(4,): 3, (2, 4): 3, (4, 2, 2): 3, (3, 4): 0, (5,): 0}.items():
    x = torch.randn(sum(sizes), 3, 8, 8, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    found = []
    for on in (True, False):
        own = copy.deepcopy(network)
        own = own.float() if on else own
        combined.clear()
        with enable(on), batch_norm_parts(sizes):
            logits = own(x.float() if on else x)
        assert len(combined) == (times if on else 0), (sizes, len(combined))
        logits.square().sum().backward()
        own.eval()
        with enable(on), torch.no_grad():
            plain = own(x.float() if on else x)
        found.append([logits, plain, *(p.grad for p in own.parameters()), *own.buffers()])
    for a, b in zip(*found, strict=True):
        if a.is_floating_point():  # not the count of batches, which nothing reads
            assert float((a.double() - b).norm() / b.norm()) < 2e-5, (sizes, a.shape)
with batch_norm_parts((1, 2)):
    assert divides_parts(x.new_empty(3, 2, 8, 16), 128) and not divides_parts(x.new_empty(3, 2, 8, 8), 128)
"""


def interpreted(code: str) -> str:
    triton = pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9):
        pytest.skip("the interpreter of Triton before 3.9 does not run with this NumPy")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_moments_of_tiles_are_those_of_the_batch() -> None:
    interpreted(NETWORK)


def test_kernels_agree_with_pytorch() -> None:
    assert float(interpreted(CHECK)) < 1e-5


@pytest.mark.parametrize(("capability", "cuda", "ours"), [((9, 0), "13.0", True), ((8, 9), "13.0", False),
                                                          ((12, 0), "13.0", False), ((9, 4), None, False)])  # fmt: skip
def test_only_on_a_hopper_card(
    capability: tuple[int, int], cuda: str | None, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AMD counts 9.4, too."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert convolution._is_measured(torch.device("cuda")) == ours
