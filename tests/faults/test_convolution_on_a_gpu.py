"""Our convolution on a card, at the sizes at which training uses it. Skipped on others than Hopper's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _on_a_gpu import EAGER, GPU, NEEDS_GPU, RECORDED, assert_same_bits, pictures, trained
from torch import Tensor
from torch.nn import functional as F

from crosel.nn import convolution, fused
from crosel.nn.casts import SharedCasts
from crosel.nn.convolution import Conv3x3, Shortcut
from crosel.nn.cuda import StreamPool, capture
from crosel.training.devices import deterministic_cudnn

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
pytestmark = [NEEDS_GPU, pytest.mark.skipif(not HOPPER, reason="on other cards convolutions are cuDNN's")]


WIDTHS = [(3, 16), (3, 64), (16, 32), (16, 128), (16, 160), (32, 32), (64, 64), (128, 128), (640, 640)]


def layer(inputs: int = 160, outputs: int = 160) -> Conv3x3:
    return Conv3x3(inputs, outputs).to(GPU, memory_format=torch.channels_last)


def images(n: int, side: int = 32, channels: int = 160) -> Tensor:
    x = torch.randn(n, channels, side, side, device=GPU, dtype=torch.bfloat16)
    return x.contiguous(memory_format=torch.channels_last)


def passes(conv: Conv3x3 | Shortcut, x: Tensor, grad: Tensor, on: bool = True) -> list[Tensor]:
    """Output, and the gradients of input and weight."""
    conv.weight.grad = None
    x, casts = x.detach().requires_grad_(), SharedCasts(conv)
    with deterministic_cudnn(GPU), torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), fused.enable(on):
        with casts:
            if isinstance(conv, Shortcut):
                out = conv(x)
            else:
                plan = conv._plan(x)
                assert (plan is not None) == on
                out = conv(x) if plan is None else conv._compute(plan, x, None, False)[0]
        out.backward(grad)
    casts.accumulate_gradients()
    assert x.grad is not None
    assert conv.weight.grad is not None
    return [out.detach(), x.grad, conv.weight.grad]


@pytest.mark.parametrize(("n", "side", "width"), [
    *((n, side, (160, 160)) for n, side in [(64, 32), (128, 32), (192, 32), (129, 32), (257, 16), (21, 57)]),
    *((n, side, width) for n, side in [(64, 32), (65, 8), (21, 57)] for width in WIDTHS),
])  # fmt: skip
def test_it_differs_from_float32_by_one_rounding(n: int, side: int, width: tuple[int, int]) -> None:
    """Value by value: where a few are wrong, the sum over all does not show it."""
    torch.manual_seed(0)
    conv, x, grad = layer(*width), images(n, side, width[0]), images(n, side, width[1])
    found = [passes(conv, x, grad) for _ in range(5)]
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True)), "not the same bits each time"
    cudnn = passes(conv, x, grad, on=False)
    if width != (640, 640):
        assert torch.equal(found[0][1], cudnn[1]), "the gradient of the input is cuDNN's"
    within_one_rounding(conv, x, grad, found[0], cudnn)


@pytest.mark.parametrize("width", [(32, 64), (160, 320)])
@pytest.mark.parametrize(("n", "side"), [(64, 32), (33, 17)])
def test_shortcut(width: tuple[int, int], n: int, side: int) -> None:
    torch.manual_seed(0)
    conv = Shortcut(*width, stride=2).to(GPU, memory_format=torch.channels_last)
    x, grad = images(n, side, width[0]), images(n, -(-side // 2), width[1])
    ours, again, cudnn = (passes(conv, x, grad, on) for on in (True, True, False))
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    within_one_rounding(conv, x, grad, ours, cudnn)


def within_one_rounding(
    conv: Conv3x3 | Shortcut, x: Tensor, grad: Tensor, found: list[Tensor], cudnn: list[Tensor]
) -> None:
    wide = [t.float().requires_grad_() for t in (x, conv.weight.detach().bfloat16())]
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        out = F.conv2d(*wide, stride=conv.stride, padding=conv.padding)
        out.backward(grad.float())
    assert wide[0].grad is not None
    assert wide[1].grad is not None
    for i, true in enumerate((out.detach(), wide[0].grad, wide[1].grad)):
        ours, theirs = found[i], cudnn[i]
        torch.testing.assert_close(ours.float(), true, rtol=2**-8, atol=2e-3 * float(true.std()))
        assert float((ours - true).norm()) <= 1.1 * float((theirs - true).norm())
    assert [t.stride() for t in found] == [t.stride() for t in cudnn]


@pytest.mark.parametrize("sizes", [(32,), (32, 64)])
@pytest.mark.parametrize("width", [width for width, plan in convolution._PLANS.items() if plan.forward is not None])
def test_sums_and_moments_of_tiles(width: tuple[int, int], sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    conv, n = layer(*width), sum(sizes)
    x, residual = images(n, channels=width[0]), images(n, channels=width[1])
    plan = convolution._PLANS[width]
    assert plan.forward is not None
    rows_of_a_tile = plan.forward["BLOCK_R"]
    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False), fused.enable(True), torch.no_grad():
        alone = conv._compute(plan, x, None, False)[0]
        for skip, expected in ((None, alone), (residual, alone + residual)):
            first = None
            for _ in range(5):
                with fused.batch_norm_parts(sizes):
                    total, rest, tiles = conv.add(x, skip)
                assert rest is None
                assert tiles is not None
                assert torch.equal(total, expected)
                assert torch.equal(tiles, tiles if first is None else first), "not the same bits each time"
                first = tiles
            rows = expected.permute(0, 2, 3, 1).reshape(-1, rows_of_a_tile, width[1]).double()
            mean = rows.mean(1)
            torch.testing.assert_close(tiles[0].double(), mean, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(tiles[1].double(), (rows - mean[:, None]).square().sum(1), rtol=1e-5, atol=0.0)


def test_recorded_on_two_streams_the_bits_are_the_same() -> None:
    torch.manual_seed(0)
    convs, inputs, grads = [layer() for _ in range(2)], [images(192) for _ in range(2)], [images(192) for _ in range(2)]
    expected = [passes(*each) for each in zip(convs, inputs, grads, strict=True)]
    found: list[list[Tensor]] = [[], []]

    def work() -> None:
        pool = StreamPool(GPU)
        for v in range(2):
            with pool.stream(v):
                found[v] = passes(convs[v], inputs[v], grads[v])
        pool.join()

    work()
    graph = capture(work)
    for _ in range(20):
        for t in (t for each in found for t in each):
            t.zero_()
        graph.replay()
        for ours, once in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, once, strict=True))


@pytest.mark.parametrize("network", ["wrn-10-10", "wrn-10-2", "resnet-18"])
@pytest.mark.parametrize("name", ["cc", "crosel"])
def test_same_seed_same_bits_recorded_or_not(name: str, network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = convolution._weight_gradient, 0

    def counted(*args: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return real(*args)

    monkeypatch.setattr(convolution, "_weight_gradient", counted)
    data = pictures(side=32)
    settings = (f"network.name={network}", "train.batch_size=64", "train.bf16=true")
    first, again, eager = (trained(name, *settings, graphs, data=data) for graphs in (RECORDED, RECORDED, EAGER))
    assert calls > 0
    assert_same_bits(first, again)
    assert_same_bits(first, eager)
