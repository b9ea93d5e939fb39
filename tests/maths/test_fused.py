"""Fused batch norm and ReLU against PyTorch's own, by Triton's interpreter on the CPU, and what happens without."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from crosel.nn.fused import add_norm_relu, batch_norm_parts, enable, norm_relu
from crosel.nn.networks import WideResNet, forward_split_bn

CHECK = """
import copy, torch
from torch import nn
from crosel.nn import fused

def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))

def results(on, norm, x, residual, weights, sizes):
    if not on:  # the reference: PyTorch's own, in double precision
        norm, x, residual = norm.double(), x.double(), None if residual is None else residual.double()
    x, residual = x.clone().requires_grad_(), None if residual is None else residual.clone().requires_grad_()
    with fused.enable(on):
        with fused.batch_norm_parts(sizes):
            total, out = fused.add_norm_relu(x, residual, norm)
        ((out * weights[0]).sum() + (0 if residual is None else (total * weights[1]).sum())).backward()
        norm.eval()
        with fused.batch_norm_parts(sizes):  # which mean nothing then
            plain = fused.norm_relu(x.detach(), norm)
    found = [total, out, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var, plain]
    return found + ([] if residual is None else [residual.grad])

torch.manual_seed(0)
worst = 0.0
cases = {(3, 16, 5, 5): [(1, 2)], (2, 160, 7, 7): [(1, 1)], (5, 64, 9, 9): [(1, 2, 2), (4, 1)],
         (20, 32, 16, 16): [(15, 4, 1), (4, 16)], (2, 33, 3, 3): []}
for shape, sizes in ((shape, sizes) for shape, several in cases.items() for sizes in [(), *several]):
    fused._PROGRAMS = 8 if len(x := torch.empty(shape)) == 20 else 512  # few of them take several steps each
    assert (fused._plan_launch(x, sizes).how["STEPS"] > 1) == (len(x) == 20)
    x, r, *weights = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(4))
    x = x * 2 + 30  # a mean far from zero costs no digits
    if sizes:
        x.split(sizes)[-1].add_(200)  # nor does one far from another part's
    norm = nn.BatchNorm2d(shape[1])
    nn.init.normal_(norm.weight), nn.init.normal_(norm.bias)
    for residual in (None, r):
        pairs = [results(on, copy.deepcopy(norm), x, residual, weights, sizes) for on in (True, False)]
        worst = max([worst, *(relative(a, b) for a, b in zip(*pairs, strict=True))])
        again = results(True, copy.deepcopy(norm), x, residual, weights, sizes)
        assert all(torch.equal(a, b) for a, b in zip(pairs[0], again, strict=True)), "not the same bits twice"
assert fused.kernels.INTERPRETED
few = "more than one value"
for sizes, refused in {(2,): "", (1, 1): few, (0, 2): few, (3, 4): "not a batch of 2"}.items():
    said = ""  # of a batch of 2 at 1x1 pixels: parts with one value a channel, or none, or of another batch
    try:
        with fused.enable(True), fused.batch_norm_parts(sizes):
            fused.norm_relu(torch.ones(2, 16, 1, 1).contiguous(memory_format=torch.channels_last), nn.BatchNorm2d(16))
    except ValueError as error:
        said = str(error)
    assert refused in said and bool(refused) == bool(said), (sizes, said)
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
    with enable(True):
        total, out = add_norm_relu(x, residual, norm)
        alone = norm_relu(x, norm)
    fresh = nn.BatchNorm2d(4)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, F.relu(fresh(x + residual)))
    assert torch.equal(alone, F.relu(fresh(x)))


PARTS = """
import copy, sys, torch
from crosel.nn import fused
from crosel.nn.networks import WideResNet, forward_split_bn

torch.manual_seed(0)
torch.backends.cudnn.allow_tf32 = False
network = WideResNet(10, 1, 5).double().to(sys.argv[1], memory_format=torch.channels_last)
batches = [torch.randn(n, 3, 6, 6).to(network.head.weight, memory_format=torch.channels_last) for n in (3, 5, 2)]
found, seen = [], []
for on in (True, False):
    own = copy.deepcopy(network)
    own.stem.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    with fused.enable(on):
        logits = forward_split_bn(own.float() if on else own, *(x.float() if on else x for x in batches))
        sum((i + 1) * out.square().sum() for i, out in enumerate(logits)).backward()
    found.append([*logits, *(p.grad for p in own.parameters()), *own.buffers()])
assert seen == [10, 3, 5, 2], seen  # one pass of all, and three
for a, b in zip(*found, strict=True):
    if a.is_floating_point():  # not the count of batches, which nothing reads
        torch.testing.assert_close(a.double(), b.double(), rtol=2e-4, atol=2e-5)
"""


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_one_pass_in_parts_is_several_passes(device: str) -> None:
    if device == "cpu" and _triton_version() < (3, 9):
        pytest.skip("the interpreter of Triton before 3.9 does not run with this NumPy")
    env = os.environ | {"TRITON_INTERPRET": str(int(device == "cpu"))}
    done = subprocess.run([sys.executable, "-c", PARTS, device], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", [(2, 5), (3, 2, 2), (2, 1, 2, 2)])
def test_parts_without_kernels(sizes: tuple[int, ...]) -> None:
    """Logits, gradients and running statistics of a network are those of one pass a part."""
    torch.manual_seed(0)
    together = WideResNet(10, 2, 5)
    alone = copy.deepcopy(together)
    x = torch.randn(7, 3, 8, 8)
    with batch_norm_parts(sizes):
        out = together(x)
    expected = torch.cat([alone(part) for part in torch.split(x, sizes)])
    torch.testing.assert_close(out, expected)
    for logits in (out, expected):
        logits.square().sum().backward()
    for (name, p), q in zip(together.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4, msg=name)
    for p, q in zip(together.buffers(), alone.buffers(), strict=True):
        torch.testing.assert_close(p, q)
    together.eval(), alone.eval()
    with batch_norm_parts(sizes):  # nothing of the batch matters
        torch.testing.assert_close(together(x), alone(x))


def test_apart_makes_a_pass_for_each_batch_where_there_are_no_kernels() -> None:
    seen = []
    network = WideResNet(10, 1, 5)
    network.stem.register_forward_hook(lambda module, inputs, out: seen.append(len(out)))
    with enable(True):
        logits = forward_split_bn(network, torch.randn(2, 3, 8, 8), torch.randn(3, 3, 8, 8))
    assert [len(out) for out in logits] == seen == [2, 3]
    assert forward_split_bn(network) == []


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
