"""A 3x3 convolution that takes Triton's kernels where they are faster than cuDNN's, on CUDA.

cuDNN's tiles are powers of two wide. 160 channels (those of the first group of a WRN-n-10) are none, and it computes
more than is asked for. On a Hopper card (H100, H200), kernels with tiles of 128 + 32 take less time for the convolution
and for the gradient of its weights; for the gradient of its input they do not, which stays with cuDNN, as does every
other shape. On other cards nothing was measured, and some have too little shared memory. Sums are float32 in a fixed
order, so that the same inputs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from crosel.nn import fused
from crosel.nn.casts import Conv2d, shared_cast

try:
    from crosel.nn import convolution_kernels as kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds only
    kernels = None  # type: ignore[assignment]

_FIRST, _SECOND = 128, 32  # channels of the two tiles side by side
CHANNELS = _FIRST + _SECOND
_LEAST_ROWS = 1 << 16  # pixels of a batch; with fewer, the tiles do not fill a large card
_MOST_ROWS = 2**31 // CHANNELS  # the kernels' offsets have 32 bits
_FORWARD = {"BLOCK_R": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}
_WEIGHT = {"BLOCK_R": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
_PROGRAMS = 264  # that sum gradients of weights: two for each multiprocessor of a large card


class Conv3x3(Conv2d):
    """Padded so that images keep their size, but for the stride. Without bias."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, 3, stride=stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._compute(x, None, False)[0] if self._is_ours(x) else super().forward(x)

    def add(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The convolution and the residual, as `fused.add_norm_relu` takes them: two terms, or their sum and the
        moments of its tiles."""
        if self.training and self._is_ours(x) and fused.divides_parts(x, _FORWARD["BLOCK_R"]):
            total, tiles = self._compute(x, residual, True)
            return total, None, tiles
        out = self(x)
        return (out, None, None) if residual is None else (residual, out, None)

    def _compute(self, x: Tensor, residual: Tensor | None, moments: bool) -> tuple[Tensor, Tensor | None]:
        weight = shared_cast(self.weight).to(x.dtype)  # autocast's cast, where none is shared
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        found: tuple[Tensor, Tensor | None] = _Convolution.apply(x, weight, residual, moments)  # type: ignore[no-untyped-call]
        return found

    def _is_ours(self, x: Tensor) -> bool:
        return (
            fused.available(x)
            and _is_measured(x.device)
            and self.in_channels == self.out_channels == CHANNELS
            and self.stride == (1, 1)
            and torch.is_autocast_enabled(x.device.type)
            and x.dtype == torch.get_autocast_dtype(x.device.type)
            and _LEAST_ROWS <= x.numel() // CHANNELS <= _MOST_ROWS
            and x.is_contiguous(memory_format=torch.channels_last)
            and self.weight.is_contiguous(memory_format=torch.channels_last)
        )


def _is_measured(device: torch.device) -> bool:
    """Whether it is a Hopper card. (So is the interpreter of the tests.)"""
    if device.type != "cuda":
        return True
    return torch.version.cuda is not None and torch.cuda.get_device_capability(device)[0] == 9


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, residual: Tensor | None, moments: bool
    ) -> tuple[Tensor, Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.has_residual = residual is not None
        rows = x.numel() // CHANNELS
        programs = -(-rows // _FORWARD["BLOCK_R"])
        out = torch.empty_like(x)
        tiles = torch.empty(2, programs, CHANNELS, device=x.device) if moments else None
        kernels.convolution_forward[(programs,)](
            x, weight, residual, out, tiles, rows, HAS_RESIDUAL=residual is not None, MOMENTS=moments,
            **_sizes(x), **_FORWARD,
        )  # fmt: skip
        if tiles is not None:
            ctx.mark_non_differentiable(tiles)
        return out, tiles

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False])
            grad_x = torch.ops.aten.convolution_backward(grad, x, weight, None, *how)[0]
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(x, grad)
        return grad_x, grad_weight, grad if ctx.has_residual else None, None


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """In parts, by a fixed number of programs, and then the sum of the parts."""
    rows, block = x.numel() // CHANNELS, _WEIGHT["BLOCK_R"]
    tiles = -(-9 * CHANNELS // _WEIGHT["BLOCK_K"])
    share = -(-rows // (_PROGRAMS // tiles * block)) * block
    splits = -(-rows // share)
    partial = torch.empty(splits, CHANNELS, 3, 3, CHANNELS, device=x.device)
    kernels.convolution_wgrad[(tiles, splits)](x, grad, partial, rows, share, **_sizes(x), **_WEIGHT)
    return partial.sum(0).to(x.dtype).permute(0, 3, 1, 2)


def _sizes(x: Tensor) -> dict[str, int]:
    return {"HEIGHT": x.shape[2], "WIDTH": x.shape[3], "FIRST": _FIRST, "SECOND": _SECOND}
