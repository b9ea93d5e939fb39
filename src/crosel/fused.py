"""Batch norm and ReLU of a residual network in two kernels instead of four or five, on CUDA with Triton.

    norm_relu(x, norm)               = relu(norm(x))
    add_norm_relu(x, residual, norm) = x + residual, relu(norm(x + residual))

Between two convolutions a tensor is read and written over and over by kernels that compute next to nothing; in a
narrow network each of them costs more to start than to run. Here one kernel adds the residual and takes the batch's
moments, a second one normalises and cuts off below zero; backwards likewise. Sums are float32 in a fixed order, so
that the same inputs give the same bits. Where there is no Triton, or no CUDA, or another layout, the same functions
call PyTorch's batch norm: they compute the same thing, and `use(False)` asks for it anywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.weights import current

try:
    from crosel import fused_kernels as kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds only
    kernels = None  # type: ignore[assignment]

_PROGRAMS, _TILE, _WARPS = 512, 4096, 4  # about four programs for each multiprocessor of a large card; values; warps
_wanted = threading.local()
_tickets: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


@contextmanager
def use(wanted: bool) -> Iterator[None]:
    """Take the kernels (where there are any) inside this block, or leave them alone."""
    before = getattr(_wanted, "value", False)
    _wanted.value = wanted
    try:
        yield
    finally:
        _wanted.value = before


def norm_relu(x: Tensor, norm: nn.Module) -> Tensor:
    """relu(norm(x))."""
    return add_norm_relu(x, None, norm)[1]


def add_norm_relu(x: Tensor, residual: Tensor | None, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The sum x + residual, and relu(norm(sum))."""
    if not _fits(x, norm):
        total = x if residual is None else x + residual
        return total, F.relu(norm(total))
    assert isinstance(norm, nn.BatchNorm2d)
    if not norm.training:
        total = x if residual is None else x + residual
        return total, _apply(total, norm.running_mean, norm.running_var, norm)
    total, out = _Fused.apply(x, residual, norm, current(norm.weight), current(norm.bias))  # type: ignore[no-untyped-call]
    return (x if residual is None else total), out


def _fits(x: Tensor, norm: nn.Module) -> bool:
    return (
        kernels is not None
        and getattr(_wanted, "value", False)
        and (x.is_cuda or kernels.INTERPRETED)
        and type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.is_contiguous(memory_format=torch.channels_last)
    )


class _Fused(torch.autograd.Function):
    """Training mode: the batch's own moments."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, norm: nn.BatchNorm2d, weight: Tensor, bias: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        total, mean, var = _moments(x, residual, norm)
        out = _apply(total, mean, var, norm)
        ctx.save_for_backward(total, mean, var, weight, bias)
        ctx.norm, ctx.has_residual = norm, residual is not None
        return (total if residual is not None else None), out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> Any:
        total, mean, var, weight, bias = ctx.saved_tensors
        if grad_out is None:
            return grad_total, grad_total if ctx.has_residual else None, None, None, None
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        if grad_total is not None:
            grad_total = grad_total.contiguous(memory_format=torch.channels_last)
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        grad = torch.empty_like(total)
        rows, channels, grid, how = _plan(total)
        partial = torch.empty(2, grid[0], channels, device=total.device)
        common = (total, grad_out, mean, var, weight, bias)
        kernels.gradient_sums[grid](
            *common,
            partial,
            _ticket(ctx.norm),
            grad_weight,
            grad_bias,
            rows,
            channels,
            ctx.norm.eps,
            **_adding(grid, how),
        )
        kernels.gradient_input[grid](
            *common, grad_total, grad_weight, grad_bias, grad, rows, channels, ctx.norm.eps,
            HAS_SKIP=grad_total is not None, **how,
        )  # fmt: skip
        return grad, grad if ctx.has_residual else None, None, grad_weight, grad_bias


def _moments(x: Tensor, residual: Tensor | None, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual and its mean and variance for each channel; moves the running statistics."""
    rows, channels, grid, how = _plan(x)
    if rows == 1:
        raise ValueError("batch norm needs more than one value a channel in training")
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    total = x if residual is None else torch.empty_like(x)
    mean, var = torch.empty(2, channels, device=x.device).unbind()
    partial = torch.empty(2, grid[0], channels, device=x.device)
    kernels.moments[grid](
        x, residual, total, partial, _ticket(norm), mean, var, norm.running_mean, norm.running_var,
        rows, channels, norm.momentum, rows / (rows - 1), HAS_RESIDUAL=residual is not None, **_adding(grid, how),
    )  # fmt: skip
    return total, mean, var


def _apply(x: Tensor, mean: Tensor | None, var: Tensor | None, norm: nn.BatchNorm2d) -> Tensor:
    out = torch.empty_like(x)
    rows, channels, grid, how = _plan(x)
    kernels.normalise_relu[grid](x, mean, var, norm.weight, norm.bias, out, rows, channels, norm.eps, **how)
    return out


def _plan(x: Tensor) -> tuple[int, int, tuple[int, int], dict[str, int]]:
    """Rows and channels of x as a matrix, the grid of programs, and what each of them takes of it."""
    channels = x.shape[1]
    rows = x.numel() // channels
    block_c = 16 if channels <= 16 else 64 if channels % 64 == 0 else 32
    block_r = _TILE // block_c
    columns = -(-channels // block_c)
    blocks = -(-rows // block_r)
    steps = -(-blocks // max(1, _PROGRAMS // columns))
    programs = -(-blocks // steps)
    how = {"STEPS": steps, "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": _WARPS}
    return rows, channels, (programs, columns), how


def _adding(grid: tuple[int, int], how: dict[str, int]) -> dict[str, int]:
    """For kernels that add up what all programs found."""
    return how | {"PROGRAMS": 1 << (grid[0] - 1).bit_length()}


def _ticket(norm: nn.Module) -> Tensor:
    """Counters by which the last program of a kernel knows that it is the last; it sets them back to zero.

    One set for each layer: layers of different networks may run side by side, one layer never beside itself.
    """
    ticket = _tickets.get(norm)
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if ticket is None or ticket.device != weight.device:
        ticket = _tickets[norm] = torch.zeros(-(-len(weight) // 16), dtype=torch.int32, device=weight.device)
    return ticket
