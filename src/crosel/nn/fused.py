"""Batch norm and ReLU of a residual network in two kernels instead of four or five, on CUDA with Triton.

    norm_relu(x, norm)               = relu(norm(x))
    add_norm_relu(x, residual, norm) = x + residual, relu(norm(x + residual))

Between two convolutions a tensor is read and written over and over by kernels that compute next to nothing; in a
narrow network each of them costs more to start than to run. Here one kernel adds the residual and takes the batch's
moments, a second one normalises and cuts off below zero; backwards likewise. Sums are float32 in a fixed order, so
that the same inputs give the same bits. Where there is no Triton, or no CUDA, or another layout, the same functions
call PyTorch's batch norm: they compute the same thing, and `enable(False)` asks for it anywhere.

    with batch_norm_parts((64, 128)):  # of a batch of 192, batch norm takes the first 64 and the other 128 separately
        network(batch)

What a method sends through a network in two passes, each with batch statistics of its own, fills the card better as
one: `crosel.nn.networks.forward_split_bn`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.nn.casts import shared_cast

try:
    from crosel.nn import fused_kernels as kernels
except ImportError:  # Triton comes with PyTorch's CUDA builds only
    kernels = None  # type: ignore[assignment]

_PROGRAMS, _TILE, _WARPS = 512, 4096, 4  # about four programs for each multiprocessor of a large card; values; warps
_MOST_TILES = 4096  # of a part, whose moments one program adds up
# Of the last program, which adds up, a kernel that sums would take more, and fewer programs would run at once.
_SUMMING = {"maxnreg": 128}
_LAST_FIRST = True  # whether a kernel that reads rows again begins with those that were read last
MAX_PARTS = 3  # that the kernels know of
_all_counters: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


class _Context(threading.local):
    """What the blocks around a pass ask for."""

    wanted = False
    parts: tuple[int, ...] = ()


_context = _Context()


@contextmanager
def enable(wanted: bool) -> Iterator[None]:
    """Use the kernels (if there are any) inside this block, or not."""
    before, _context.wanted = _context.wanted, wanted
    try:
        yield
    finally:
        _context.wanted = before


@contextmanager
def batch_norm_parts(sizes: Sequence[int]) -> Iterator[None]:
    """In training mode, batch norm inside this block takes each part of the batch by itself: so many examples each."""
    before, _context.parts = _context.parts, tuple(sizes)
    try:
        yield
    finally:
        _context.parts = before


def available(x: Tensor) -> bool:
    """Whether kernels are used for tensors on this one's device."""
    return kernels is not None and _context.wanted and (x.is_cuda or kernels.INTERPRETED)


def norm_relu(x: Tensor, norm: nn.Module, tiles: Tensor | None = None) -> Tensor:
    """relu(norm(x))."""
    return add_norm_relu(x, None, norm, tiles)[1]


def add_norm_relu(
    x: Tensor, residual: Tensor | None, norm: nn.Module, tiles: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum x + residual, and relu(norm(sum)). `tiles`: the moments of x that a convolution left (see
    `divides_parts`); then there is no residual."""
    if not _can_fuse(x, norm):
        total = x if residual is None else x + residual
        return total, F.relu(_eager_norm(total, norm))
    assert isinstance(norm, nn.BatchNorm2d)
    if not norm.training:
        total = x if residual is None else x + residual
        return total, _apply(total, norm.running_mean, norm.running_var, norm, _plan_launch(total))
    affine = shared_cast(norm.weight), shared_cast(norm.bias)
    total, out = _FusedNormReLU.apply(x, residual, norm, *affine, tiles)  # type: ignore[no-untyped-call]
    return (x if total is None else total), out


def divides_parts(x: Tensor, rows: int) -> bool:
    """Whether each part of the batch is a number of tiles of so many rows, and not too many. A convolution may then
    leave means, and squares about them, of each tile and channel: [2, tiles, channels]."""
    counts = [size * math.prod(x.shape[2:]) for size in _context.parts or (len(x),)]
    return len(counts) <= MAX_PARTS and all(n % rows == 0 and 0 < n // rows <= _MOST_TILES for n in counts)


def _can_fuse(x: Tensor, norm: nn.Module) -> bool:
    return (
        available(x)
        and len(_context.parts) <= MAX_PARTS
        and type(norm) is nn.BatchNorm2d
        and norm.affine
        and norm.track_running_stats
        and norm.momentum is not None
        and x.is_contiguous(memory_format=torch.channels_last)
    )


def _eager_norm(x: Tensor, norm: nn.Module) -> Tensor:
    if len(_context.parts) > 1 and norm.training:
        return torch.cat([norm(part) for part in torch.split(x, list(_context.parts))])
    out: Tensor = norm(x)
    return out


class _FusedNormReLU(torch.autograd.Function):
    """Training mode: the batch's own moments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        norm: nn.BatchNorm2d,
        weight: Tensor,
        bias: Tensor,
        tiles: Tensor | None,
    ) -> Any:
        ctx.set_materialize_grads(False)
        plan = _plan_launch(x, _context.parts)
        if tiles is None:
            total, mean, var = _moments(x, residual, norm, plan)
        else:
            total, (mean, var) = x, _combine_tiles(tiles, norm, plan)
        out = _apply(total, mean, var, norm, plan)
        ctx.save_for_backward(total, mean, var, weight, bias)
        ctx.norm, ctx.has_residual, ctx.plan = norm, residual is not None, plan
        return (None if residual is None and tiles is None else total), out

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor | None, grad_out: Tensor | None) -> Any:
        total, mean, var, weight, bias = ctx.saved_tensors
        if grad_out is None:
            return grad_total, grad_total if ctx.has_residual else None, None, None, None, None
        grad_out = grad_out.contiguous(memory_format=torch.channels_last)
        if grad_total is not None:
            grad_total = grad_total.contiguous(memory_format=torch.channels_last)
        plan: _Launch = ctx.plan
        grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(bias)
        grad = torch.empty_like(total)
        partial, sums = plan.sums(total.device)
        common = (total, grad_out, mean, var, weight, bias)
        kernels.gradient_sums[plan.grid](
            *common, partial, _counters(ctx.norm), sums, grad_weight, grad_bias, *plan.bounds, ctx.norm.eps,
            **plan.how, **plan.adding, **_SUMMING,
        )  # fmt: skip
        kernels.gradient_input[plan.grid](
            *common, grad_total, sums, grad, *plan.bounds, ctx.norm.eps,
            HAS_SKIP=grad_total is not None, PARTS=len(plan.rows), LAST_FIRST=_LAST_FIRST, **plan.how,
        )  # fmt: skip
        return grad, grad if ctx.has_residual else None, None, grad_weight, grad_bias, None


@dataclass(frozen=True)
class _Launch:
    """How a tensor, as a matrix of rows and channels, is shared out among programs."""

    rows: tuple[int, ...]  # of each part
    bounds: tuple[int, ...]  # row1, row2, rows, program1, program2, channels
    grid: tuple[int, int]
    how: dict[str, int]  # what each program takes
    adding: dict[str, int]  # for kernels that add up what the programs of a part found

    def sums(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for two sums a channel: of each program, and of each part."""
        channels = self.bounds[-1]
        return (
            torch.empty(2, self.grid[0], channels, device=device),
            torch.empty(2, len(self.rows), channels, device=device),
        )


def _plan_launch(x: Tensor, sizes: Sequence[int] = ()) -> _Launch:
    sizes = sizes or (len(x),)
    if sum(sizes) != len(x):
        raise ValueError(f"parts of {tuple(sizes)} examples are not a batch of {len(x)}")
    channels = x.shape[1]
    rows = tuple(size * math.prod(x.shape[2:]) for size in sizes)
    block_c = 16 if channels <= 16 else 64 if channels % 64 == 0 else 32
    block_r = _TILE // block_c
    columns = -(-channels // block_c)
    blocks = sum(-(-count // block_r) for count in rows)
    steps = max(1, -(-blocks // max(1, _PROGRAMS // columns)))
    programs = [-(-count // (block_r * steps)) for count in rows]
    row_ends, program_ends = ([*accumulate(counts)] for counts in (rows, programs))
    missing = MAX_PARTS - len(rows)  # those begin and end at the end
    row_ends, program_ends = (ends + ends[-1:] * missing for ends in (row_ends, program_ends))
    return _Launch(
        rows, (*row_ends, *program_ends[:2], channels), (program_ends[-1], columns),
        {"STEPS": steps, "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": _WARPS},
        {"PARTS": len(rows), "PROGRAMS": 1 << (max(programs) - 1).bit_length()},
    )  # fmt: skip


def _moments(x: Tensor, residual: Tensor | None, norm: nn.BatchNorm2d, plan: _Launch) -> tuple[Tensor, Tensor, Tensor]:
    """x + residual and its mean and variance for each part and channel; moves the running statistics."""
    if min(plan.rows) < 2:
        raise ValueError("batch norm needs more than one value a channel in training")
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    total = x if residual is None else torch.empty_like(x)
    partial, moments = plan.sums(x.device)
    mean, var = moments.unbind()
    kernels.moments[plan.grid](
        x, residual, total, partial, _counters(norm), mean, var, norm.running_mean, norm.running_var,
        *plan.bounds, norm.momentum, HAS_RESIDUAL=residual is not None, **plan.how, **plan.adding, **_SUMMING,
    )  # fmt: skip
    return total, mean, var


def _combine_tiles(tiles: Tensor, norm: nn.BatchNorm2d, plan: _Launch) -> tuple[Tensor, Tensor]:
    """Mean and variance for each part and channel, of those of tiles; moves the running statistics."""
    _, count, channels = tiles.shape
    rows, block = sum(plan.rows) // count, 8
    ends = [end // rows for end in plan.bounds[:3]]
    most = 1 << (max(plan.rows) // rows - 1).bit_length()
    mean, var = torch.empty(2, len(plan.rows), channels, device=tiles.device).unbind()
    kernels.combine_tiles[(-(-channels // block),)](
        tiles, mean, var, norm.running_mean, norm.running_var, *ends, channels, norm.momentum,
        ROWS=rows, PARTS=len(plan.rows), TILES=most, BLOCK_C=block, num_warps=8,
    )  # fmt: skip
    return mean, var


def _apply(x: Tensor, mean: Tensor | None, var: Tensor | None, norm: nn.BatchNorm2d, plan: _Launch) -> Tensor:
    out = torch.empty_like(x)
    kernels.normalise_relu[plan.grid](
        x, mean, var, norm.weight, norm.bias, out, *plan.bounds, norm.eps, LAST_FIRST=_LAST_FIRST, **plan.how
    )
    return out


def _counters(norm: nn.Module) -> Tensor:
    """Counters by which the last program of a kernel knows that it is the last; it sets them back to zero.

    One set for each layer: layers of different networks may run side by side, one layer never beside itself.
    """
    ticket = _all_counters.get(norm)
    weight = norm.weight
    assert isinstance(weight, Tensor)
    if ticket is None or ticket.device != weight.device:
        ticket = _all_counters[norm] = torch.zeros(-(-len(weight) // 16), dtype=torch.int32, device=weight.device)
    return ticket
