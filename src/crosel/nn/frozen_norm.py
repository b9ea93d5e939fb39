"""What a pretrained network does between two convolutions, in one kernel each way, on CUDA with Triton.

A backbone that is fine-tuned keeps the statistics of its pretraining: batch norm scales and shifts each channel, and a
ReLU or ReLU6 often follows. PyTorch takes three kernels forwards and five backwards, one of which writes the gradient
in another layout, for the next one to copy back. Here it is one kernel each way, which computes the same numbers from
the convolution's output again instead of keeping more. Sums are float32 in a fixed order: same inputs, same bits.

    switch = use_kernels(body)        # its batch norms, and convolutions that pad more on one side than on the other
    switch.on = fused.available(x)    # before each pass

Elsewhere (no Triton, no CUDA, another layout, training mode, `train.fused=false`) the layers do what they did before.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

try:
    from crosel.nn import frozen_norm_kernels as kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds only
    kernels = None  # type: ignore[assignment]

_ROWS, _COLUMNS, _GRADIENT_ROWS, _VALUES = 64, 64, 32, 2048  # that a program takes at once
_PROGRAMS = 2048  # at most, of the kernel that sums: about 16 for each multiprocessor of a large card
_BOUNDS = {nn.Identity: (False, 0.0), nn.ReLU: (True, 0.0), nn.ReLU6: (True, 6.0)}  # cut below 0; above this one


class Switch:
    """Whether the layers of a network use the kernels. Each pass says so for all of them, and for what its backward
    pass computes again (checkpointing), which is in another thread."""

    on = False


def use_kernels(body: nn.Module) -> Switch:
    """Let layers of these kinds use the kernels, where there are any. Parameters and their names stay."""
    switch = Switch()
    for module in list(body.modules()):
        kind = type(module).__name__ if type(module).__module__.startswith("timm.") else ""
        if type(module) is nn.BatchNorm2d:
            module.act = nn.Identity()
            module.__class__ = FrozenNorm
        elif kind == "BatchNormAct2d" and type(module.act) in _BOUNDS and type(module.drop) is nn.Identity:
            module.__class__ = FrozenNorm
        elif kind == "Conv2dSame":
            module.__class__ = SameConv2d
        if isinstance(module, FrozenNorm | SameConv2d):
            module.switch = switch
    return switch


def _can_use(switch: Switch, x: Tensor) -> bool:
    usable = kernels is not None and switch.on and x.ndim == 4 and x.numel() > 0
    return usable and x.is_contiguous(memory_format=torch.channels_last)


# --- batch norm and activation ------------------------------------------------------------------------------------


class FrozenNorm(nn.BatchNorm2d):
    """act(batch norm), in one kernel while it is in evaluation mode."""

    act: nn.Module
    switch: Switch

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and self.affine and self.running_mean is not None and _can_use(self.switch, x):
            return _NormAct.apply(x, self.weight, self.bias, self)  # type: ignore[no-untyped-call,no-any-return]
        out: Tensor = self.act(super().forward(x))
        return out


class _NormAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: FrozenNorm) -> Tensor:
        rows, width = _matrix(x)
        lower, upper = ctx.bounds = _BOUNDS[type(norm.act)]
        ctx.eps = norm.eps
        ctx.save_for_backward(x, norm.running_mean, norm.running_var, weight, bias)
        out = torch.empty_like(x)
        kernels.norm_act[(-(-rows // _ROWS) * -(-width // _COLUMNS),)](
            x, norm.running_mean, norm.running_var, weight, bias, out, rows, width, x.shape[1], norm.eps,
            LOWER=lower, UPPER=upper, BLOCK_R=_ROWS, BLOCK_C=_COLUMNS, num_warps=4,
        )  # fmt: skip
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        x, mean, var, weight, bias = ctx.saved_tensors
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        (rows, width), (lower, upper), channels = _matrix(x), ctx.bounds, x.shape[1]
        columns, blocks = -(-width // _COLUMNS), -(-rows // _GRADIENT_ROWS)
        # A power of two: how much a program takes is compiled into the kernel, and each number is a kernel of its own.
        steps = 1 << (-(-blocks * columns // _PROGRAMS) - 1).bit_length()
        programs = -(-blocks // steps)
        grad = torch.empty_like(x)
        partial = torch.empty(2, programs, width, device=x.device)
        kernels.norm_act_gradient[(programs * columns,)](
            x, grad_out, mean, var, weight, bias, grad, partial, rows, width, channels, programs, ctx.eps,
            LOWER=lower, UPPER=upper, STEPS=steps, BLOCK_R=_GRADIENT_ROWS, BLOCK_C=_COLUMNS, num_warps=4,
        )  # fmt: skip
        of_bias, of_weight = partial.view(2, -1, channels).sum(dim=1).unbind()
        return grad, of_weight.to(weight.dtype), of_bias.to(bias.dtype), None


def _matrix(x: Tensor) -> tuple[int, int]:
    """Rows and columns as which the kernels see it: several pixels to a row if that makes it a multiple of 64 wide."""
    channels = x.shape[1]
    pixels = x.numel() // channels
    together = math.gcd(_COLUMNS // math.gcd(channels, _COLUMNS), pixels)
    return pixels // together, channels * together


# --- padding ------------------------------------------------------------------------------------------------------


class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow does, as in timm's `Conv2dSame`: an odd rest at the bottom and right."""

    switch: Switch

    def forward(self, x: Tensor) -> Tensor:
        missing = [
            max((-(-size // stride) - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
            for size, kernel, stride, dilation in zip(
                x.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True
            )
        ]
        (top, bottom), (left, right) = ((m // 2, m - m // 2) for m in missing)
        if any(missing):
            if _can_use(self.switch, x):
                x = _Pad.apply(x, top, bottom, left, right)  # type: ignore[no-untyped-call]
            else:
                x = F.pad(x, (left, right, top, bottom))
        out: Tensor = self._conv_forward(x, self.weight, self.bias)
        return out


class _Pad(torch.autograd.Function):
    """Zeros around an image."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, top: int, bottom: int, left: int, right: int) -> Tensor:
        ctx.size, ctx.start = x.shape[2:], (top, left)
        return _move_window(x, x.shape[2] + top + bottom, x.shape[3] + left + right, top, left)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        (height, width), (top, left) = ctx.size, ctx.start
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        return _move_window(grad_out, height, width, -top, -left), None, None, None, None


def _move_window(x: Tensor, height: int, width: int, top: int, left: int) -> Tensor:
    """An image of another size, in which x begins at row `top` and column `left`."""
    count, channels = x.shape[:2]
    out = torch.empty(count, channels, height, width, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    kernels.move_window[(count * height * -(-width * channels // _VALUES),)](
        x, out, x.shape[2], x.shape[3] * channels, height, width * channels, top, left * channels, BLOCK=_VALUES,
        num_warps=4,
    )  # fmt: skip
    return out
