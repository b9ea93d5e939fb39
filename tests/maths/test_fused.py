"""Fused batch norm and ReLU against PyTorch's own, by Triton's interpreter on the CPU, and what happens without."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crosel.fused import add_norm_relu, norm_relu, use
from crosel.nets import WideResNet

CHECK = """
import copy, torch
from torch import nn
from crosel import fused

def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))

def results(on, norm, x, residual, weights):
    x, residual = x.clone().requires_grad_(), None if residual is None else residual.clone().requires_grad_()
    with fused.use(on):
        total, out = fused.add_norm_relu(x, residual, norm)
        ((out * weights[0]).sum() + (0 if residual is None else (total * weights[1]).sum())).backward()
        norm.eval()
        plain = fused.norm_relu(x.detach(), norm)
    found = [total, out, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var, plain]
    return found + ([] if residual is None else [residual.grad])

torch.manual_seed(0)
worst = 0.0
for shape in ((3, 16, 5, 5), (2, 160, 7, 7), (5, 64, 9, 9), (40, 32, 16, 16), (2, 33, 3, 3)):
    x, r, *weights = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(4))
    x = x * 2 + 30  # a mean far from zero costs no digits
    norm = nn.BatchNorm2d(shape[1])
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    for residual in (None, r):
        pairs = [results(on, copy.deepcopy(norm), x, residual, weights) for on in (True, False)]
        worst = max([worst, *(relative(a, b) for a, b in zip(*pairs, strict=True))])
        again = results(True, copy.deepcopy(norm), x, residual, weights)
        assert all(torch.equal(a, b) for a, b in zip(pairs[0], again, strict=True)), "not the same bits twice"
assert fused.kernels.INTERPRETED
print(worst)
"""


def _triton_version() -> tuple[int, ...]:
    triton = pytest.importorskip("triton", reason="Triton comes with PyTorch's CUDA builds only")
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def test_kernels_agree_with_pytorch() -> None:
    if _triton_version() < (3, 9):
        pytest.skip("the interpreter of Triton before 3.9 does not run with this NumPy")
    env = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2e-5


def test_without_kernels_it_is_batch_norm_and_relu() -> None:
    norm = nn.BatchNorm2d(4)
    x, residual = torch.randn(3, 4, 5, 5), torch.randn(3, 4, 5, 5)
    with use(True):
        total, out = add_norm_relu(x, residual, norm)
        alone = norm_relu(x, norm)
    fresh = nn.BatchNorm2d(4)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, F.relu(fresh(x + residual)))
    assert torch.equal(alone, F.relu(fresh(x)))


def test_wide_resnet_is_the_published_block_by_block() -> None:
    """The sum that blocks hand on as two terms is the plain residual network's."""
    torch.manual_seed(0)
    network = WideResNet(10, 2, 5).eval()
    x = torch.randn(2, 3, 8, 8)
    h = network.stem(x)
    for block in network.blocks:
        activated = F.relu(block.norm1(h))
        residual = block.conv2(F.relu(block.norm2(block.conv1(activated))))
        h = residual + (h if block.shortcut is None else block.shortcut(activated))
    expected = network.head(F.relu(network.norm(h)).mean(dim=(2, 3)))
    torch.testing.assert_close(network(x), expected)
