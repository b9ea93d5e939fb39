"""Convolutions that take Triton's kernels where they are faster than what cuDNN chooses, on CUDA.

cuDNN's first choice is a good one for most convolutions of a residual network, and a bad one for some: images of three
channels, widths of 32 and of 160 (its tiles are powers of two wide, and 160 is none), 1x1 with stride 2. For those
there are kernels of our own for the convolution and for the gradient of its weights. They also add the residual and
take the moments of their tiles, so that the batch norm behind them reads the tensor once less. The gradient of the
input stays with cuDNN. So does every other shape, but for 640 channels: there the gradient of the input is computed as
a convolution with the weights turned around, which cuDNN does faster. All times were taken on a Hopper card (H100,
H200); other cards may lack the shared memory, and take cuDNN's. Sums are float32 in a fixed order, so that the same
inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from crosel.nn import fused
from crosel.nn.casts import Conv2d, shared_cast

try:
    from crosel.nn import convolution_kernels as kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds only
    kernels = None  # type: ignore[assignment]


@dataclass(frozen=True)
class _Plan:
    """How to compute the 3x3 convolutions of one width. What is None, cuDNN does."""

    outputs: tuple[int, int]  # the two tiles of output channels side by side
    forward: dict[str, int] | None
    wgrad: dict[str, int] | None
    alone: bool = True  # faster than cuDNN's even where no moments are wanted
    most_rows: int = 1 << 31
    turned: bool = False  # the gradient of the input as a convolution


def _tiling(rows: int, depth: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_R": rows, "BLOCK_K": depth, "num_warps": warps, "num_stages": stages}


_PLANS = {  # channels of input and output
    (3, 16): _Plan((16, 0), _tiling(256, 32, 4, 2), _tiling(128, 32, 4, 2)),
    (3, 64): _Plan((64, 0), _tiling(128, 32, 4, 2), _tiling(128, 32, 4, 2)),
    (16, 32): _Plan((32, 0), _tiling(128, 16, 4, 4), _tiling(64, 64, 4, 3)),
    (16, 128): _Plan((128, 0), _tiling(128, 64, 4, 3), _tiling(64, 64, 4, 3)),
    (16, 160): _Plan((128, 32), _tiling(128, 64, 4, 3), _tiling(64, 64, 4, 3)),
    (32, 32): _Plan((32, 0), _tiling(256, 32, 4, 4), _tiling(64, 128, 4, 3)),
    (64, 64): _Plan((64, 0), _tiling(128, 64, 4, 3), None, alone=False),
    (128, 128): _Plan((128, 0), _tiling(128, 64, 4, 3), _tiling(64, 128, 4, 3), alone=False, most_rows=1 << 17),
    (160, 160): _Plan((128, 32), _tiling(128, 64, 4, 3), _tiling(64, 128, 4, 3)),
    (640, 640): _Plan((0, 0), None, None, turned=True),
}
_LEAST_ROWS = 1 << 12  # pixels of a batch; with fewer, the tiles do not fill a large card
_MOST_VALUES = 2**31  # the kernels' offsets have 32 bits
_PROGRAMS = 264  # that sum gradients of weights: two for each multiprocessor of a large card
_HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, and what a convolution has besides


class Conv3x3(Conv2d):
    """Padded so that images keep their size, but for the stride. Without bias."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        plan = self._plan(x)
        return self._compute(plan, x, None, False)[0] if plan is not None and plan.alone else super().forward(x)

    def add(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The convolution and the residual, as `fused.add_norm_relu` takes them: two terms, or their sum and the
        moments of its tiles."""
        plan = self._plan(x)
        if plan is not None and plan.forward is not None:
            moments = self.training and fused.divides_parts(x, plan.forward["BLOCK_R"])
            if moments or plan.alone:
                total, tiles = self._compute(plan, x, residual, moments)
                return total, None, tiles
        out = self(x)
        return (out, None, None) if residual is None else (residual, out, None)

    def _plan(self, x: Tensor) -> _Plan | None:
        """How our kernels compute it, or None if cuDNN does."""
        plan = _PLANS.get((self.in_channels, self.out_channels))
        if plan is None or self.stride != (1, 1) or not _takes_kernels(x, self.weight):
            return None
        rows = x.numel() // self.in_channels  # after that check: an exported network knows no number of rows
        most = min(plan.most_rows, _MOST_VALUES // max(self.in_channels, self.out_channels))
        return plan if _LEAST_ROWS <= rows <= most else None

    def _compute(self, plan: _Plan, x: Tensor, residual: Tensor | None, moments: bool) -> tuple[Tensor, Tensor | None]:
        x, weight = _cast(x, self.weight)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        found: tuple[Tensor, Tensor | None] = _Convolution.apply(plan, x, weight, residual, moments)  # type: ignore[no-untyped-call]
        return found


class Shortcut(Conv2d):
    """A 1x1 convolution, without bias."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == (1, 1) or not (x.is_cuda and _takes_kernels(x, self.weight)):
            return super().forward(x)
        out: Tensor = _Strided.apply(*_cast(x, self.weight), self.stride)  # type: ignore[no-untyped-call]
        return out


def _takes_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether inputs like this one, with weights like these, may go to kernels of ours."""
    return (
        fused.available(x)
        and _is_measured(x.device)
        and torch.is_autocast_enabled(x.device.type)
        and x.dtype in (torch.float32, torch.get_autocast_dtype(x.device.type))
        and x.is_contiguous(memory_format=torch.channels_last)
        and weight.is_contiguous(memory_format=torch.channels_last)
    )


def _is_measured(device: torch.device) -> bool:
    """Whether it is a Hopper card. (So is the interpreter of the tests.)"""
    if device.type != "cuda":
        return True
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """As autocast does, where the weight's cast is not shared."""
    dtype = torch.get_autocast_dtype(x.device.type)
    return x.to(dtype), shared_cast(weight).to(dtype)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, x: Tensor, weight: Tensor, residual: Tensor | None, moments: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.plan, ctx.has_residual = plan, residual is not None
        if plan.forward is None:
            return torch.ops.aten.convolution(x, weight, None, *_HOW), None
        n, _, height, width = x.shape
        rows, outputs = n * height * width, len(weight)
        programs = -(-rows // plan.forward["BLOCK_R"])
        out = x.new_empty(n, height, width, outputs).permute(0, 3, 1, 2)
        tiles = torch.empty(2, programs, outputs, device=x.device) if moments else None
        kernels.convolution_forward[(programs,)](
            x, weight, residual, out, tiles, rows, HAS_RESIDUAL=residual is not None, MOMENTS=moments,
            **_sizes(x, plan), **plan.forward,
        )  # fmt: skip
        if tiles is not None:
            ctx.mark_non_differentiable(tiles)
        return out, tiles

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        plan: _Plan = ctx.plan
        of_x, of_weight = ctx.needs_input_grad[1:3]
        mask = [of_x and not plan.turned, of_weight and plan.wgrad is None, False]
        grad_x = grad_weight = None
        if any(mask):
            grad_x, grad_weight, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *_HOW, mask)
        if of_x and plan.turned:
            grad_x = torch.ops.aten.convolution(grad, _turned(weight), None, *_HOW)
        if of_weight and plan.wgrad is not None:
            grad_weight = _weight_gradient(plan, x, grad)
        return None, grad_x, grad_weight, grad if ctx.has_residual else None, None


class _Strided(torch.autograd.Function):
    """A 1x1 convolution reads every other pixel of every other row; for what was read it is a matrix product. cuDNN
    computes only the gradient of the input without such a detour."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int]) -> Tensor:
        down, right = stride
        read = x[:, :, ::down, ::right].contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x, read, weight)
        ctx.stride = stride
        out: Tensor = torch.ops.aten.convolution(read, weight, None, *_of_1x1((1, 1)))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, read, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            how = _of_1x1(ctx.stride)
            grad_x = torch.ops.aten.convolution_backward(grad, x, weight, None, *how, [True, False, False])[0]
        if ctx.needs_input_grad[1]:
            how = _of_1x1((1, 1))
            grad_weight = torch.ops.aten.convolution_backward(grad, read, weight, None, *how, [False, True, False])[1]
        return grad_x, grad_weight, None


def _of_1x1(stride: tuple[int, int]) -> tuple[Any, ...]:
    return list(stride), [0, 0], *_HOW[2:]


def _turned(weight: Tensor) -> Tensor:
    """Inputs and outputs exchanged, the taps in reverse: with these weights, the gradient of a convolution's input is a
    convolution of the gradient of its output."""
    outputs, inputs = weight.shape[:2]
    out = weight.new_empty(inputs, 3, 3, outputs).permute(0, 3, 1, 2)
    kernels.turn_weights[(9, -(-outputs // 64), -(-inputs // 64))](weight, out, inputs, outputs, BLOCK=64)
    return out


def _weight_gradient(plan: _Plan, x: Tensor, grad: Tensor) -> Tensor:
    """In parts, by a fixed number of programs, and then the sum of the parts."""
    assert plan.wgrad is not None
    inputs, outputs = x.shape[1], grad.shape[1]
    rows, block = x.numel() // inputs, plan.wgrad["BLOCK_R"]
    tiles = -(-9 * inputs // plan.wgrad["BLOCK_K"])
    share = -(-rows // (_PROGRAMS // tiles * block)) * block
    splits = -(-rows // share)
    partial = torch.empty(splits, outputs, 3, 3, inputs, device=x.device)
    kernels.convolution_wgrad[(tiles, splits)](x, grad, partial, rows, share, **_sizes(x, plan), **plan.wgrad)
    return partial.sum(0).to(x.dtype).permute(0, 3, 1, 2)


def _sizes(x: Tensor, plan: _Plan) -> dict[str, int]:
    inputs, height, width = x.shape[1:]
    first, second = plan.outputs
    return {"HEIGHT": height, "WIDTH": width, "INPUTS": inputs, "FIRST": first, "SECOND": second}
