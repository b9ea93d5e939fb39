"""The Triton kernels behind `fused`. A tensor [N, C, H, W] in channels-last layout is a matrix of N·H·W rows.

A program takes `STEPS` times `BLOCK_R` rows of `BLOCK_C` channels. In the kernels that sum over all rows each program
leaves its partial sums in memory and draws a ticket; the one with the last ticket adds the partial sums up, in a fixed
order. How much a program takes is known when a kernel is compiled: forms with a loop of unknown length were slower.
The kernels that then read the same rows again may begin with the last ones (LAST_FIRST), which are still in the cache.

The rows may be up to three parts, each with moments of its own: rows before `row1`, before `row2`, before `rows`. No
program takes rows of two parts: programs before `program1` are the first part's, those before `program2` the second's.
What belongs to parts is stored part after part ([PARTS, channels]).
"""

# mypy: ignore-errors

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own interpreter: the tests run on a CPU


# Divisible by 16 or not: these differ from layer to layer, and are no reason to compile a kernel anew.
_kernel = triton.jit(do_not_specialize=["program1", "program2"])


@triton.jit
def _part_of_program(program1, program2):
    """Which part this program belongs to."""
    program = tl.program_id(0)
    return (program >= program1).to(tl.int32) + (program >= program2).to(tl.int32)


@triton.jit
def _part_bounds(part, row1, row2, rows, program1, program2):
    """A part's first row and the row after its last, its first program and the program after its last."""
    return (
        tl.where(part == 0, 0, tl.where(part == 1, row1, row2)),
        tl.where(part == 0, row1, tl.where(part == 1, row2, rows)),
        tl.where(part == 0, 0, tl.where(part == 1, program1, program2)),
        tl.where(part == 0, program1, tl.where(part == 1, program2, tl.num_programs(0))),
    )


@triton.jit
def _block_offsets(step, begin, end, first, channels, channel, inside, STEPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Where the values of a program's next rows lie, and which of them exist."""
    row = (begin + ((tl.program_id(0) - first) * STEPS + step) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    return row[:, None] * channels + channel[None, :], (row[:, None] < end) & inside[None, :]


@triton.jit
def _store_partial_sums(partial, first, second, channel, inside, channels, ticket, column):
    """Leave both partial sums in memory, draw a ticket, and say whether it was the last."""
    at = tl.program_id(0) * channels + channel
    tl.store(partial + at, tl.sum(first, axis=0), mask=inside)
    tl.store(partial + tl.num_programs(0) * channels + at, tl.sum(second, axis=0), mask=inside)
    tl.debug_barrier()  # every thread's partial sums are written before the ticket is drawn
    return tl.atomic_add(ticket + column, 1) == tl.num_programs(0) - 1


@triton.jit
def _sum_partials(partial, which, first, last, channel, inside, channels, PROGRAMS: tl.constexpr):
    """Over the programs of one part."""
    program = first + tl.arange(0, PROGRAMS)  # all at once: a loop would wait for memory in every round
    at = (which * tl.num_programs(0) + program[:, None]) * channels + channel[None, :]
    mask = (program[:, None] < last) & inside[None, :]
    return tl.sum(tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)


@triton.jit
def _pivot(x, residual, begin, channels, channel, inside, HAS_RESIDUAL: tl.constexpr):
    """The part's first row. Measured from there, a mean far from zero costs no digits of the variance."""
    at = begin.to(tl.int64) * channels + channel
    pivot = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pivot += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return pivot


@_kernel
def moments(
    x, residual, total, partial, ticket, mean, var, running_mean, running_var,
    row1, row2, rows, program1, program2, channels, momentum,
    HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the residual; mean and biased variance of each channel; move the running statistics, part by part."""
    column = tl.program_id(1)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    begin, end, start, _ = _part_bounds(_part_of_program(program1, program2), row1, row2, rows, program1, program2)
    pivot = _pivot(x, residual, begin, channels, channel, inside, HAS_RESIDUAL)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(STEPS):
        at, mask = _block_offsets(step, begin, end, start, channels, channel, inside, STEPS, BLOCK_R)
        value = tl.load(x + at, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            value = (value.to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
            tl.store(total + at, value, mask=mask)
        away = tl.where(mask, value.to(tl.float32) - pivot[None, :], 0.0)
        first += away
        second += away * away
    if _store_partial_sums(partial, first, second, channel, inside, channels, ticket, column):
        long_mean = tl.load(running_mean + channel, mask=inside)
        long_var = tl.load(running_var + channel, mask=inside)
        for part in tl.static_range(PARTS):
            begin, end, start, stop = _part_bounds(part, row1, row2, rows, program1, program2)
            count = end - begin
            away = _sum_partials(partial, 0, start, stop, channel, inside, channels, PROGRAMS) / count
            spread = _sum_partials(partial, 1, start, stop, channel, inside, channels, PROGRAMS) / count - away * away
            spread = tl.maximum(spread, 0.0)
            centre = _pivot(x, residual, begin, channels, channel, inside, HAS_RESIDUAL) + away
            tl.store(mean + part * channels + channel, centre, mask=inside)
            tl.store(var + part * channels + channel, spread, mask=inside)
            long_mean += momentum * (centre - long_mean)
            long_var += momentum * (spread * (count / (count - 1)) - long_var)
        tl.store(running_mean + channel, long_mean, mask=inside)
        tl.store(running_var + channel, long_var, mask=inside)
        tl.store(ticket + column, 0)


@triton.jit(do_not_specialize=["tile1", "tile2", "tiles"])
def combine_tiles(
    partial, mean, var, running_mean, running_var, tile1, tile2, tiles, channels, momentum,
    ROWS: tl.constexpr, PARTS: tl.constexpr, TILES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """What `moments` computes, of the means of tiles of ROWS rows and the squares about them."""
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    long_mean = tl.load(running_mean + channel, mask=inside)
    long_var = tl.load(running_var + channel, mask=inside)
    for part in tl.static_range(PARTS):
        begin, end, _, _ = _part_bounds(part, tile1, tile2, tiles, 0, 0)
        tile = begin + tl.arange(0, TILES)
        at = tile[:, None] * channels + channel[None, :]
        mask = (tile < end)[:, None] & inside[None, :]
        means = tl.load(partial + at, mask=mask, other=0.0)
        count = (end - begin) * ROWS
        centre = tl.sum(means, axis=0) / (end - begin)
        away = tl.where(mask, means - centre[None, :], 0.0)
        squares = tl.load(partial + tiles * channels + at, mask=mask, other=0.0) + ROWS * away * away
        spread = tl.sum(squares, axis=0) / count
        tl.store(mean + part * channels + channel, centre, mask=inside)
        tl.store(var + part * channels + channel, spread, mask=inside)
        long_mean += momentum * (centre - long_mean)
        long_var += momentum * (spread * (count / (count - 1)) - long_var)
    tl.store(running_mean + channel, long_mean, mask=inside)
    tl.store(running_var + channel, long_var, mask=inside)


@triton.jit
def _channel_values(mean, var, weight, bias, part, channels, channel, inside, eps):
    own = part * channels + channel
    return (
        tl.load(mean + own, mask=inside, other=0.0)[None, :],
        (1.0 / tl.sqrt(tl.load(var + own, mask=inside, other=1.0) + eps))[None, :],
        tl.load(weight + channel, mask=inside, other=0.0)[None, :],
        tl.load(bias + channel, mask=inside, other=0.0)[None, :],
    )


@_kernel
def normalise_relu(
    x, mean, var, weight, bias, out, row1, row2, rows, program1, program2, channels, eps,
    LAST_FIRST: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """max(0, (x - mean) / sqrt(var + eps) · weight + bias)."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    part = _part_of_program(program1, program2)
    begin, end, start, _ = _part_bounds(part, row1, row2, rows, program1, program2)
    centre, scale, w, b = _channel_values(mean, var, weight, bias, part, channels, channel, inside, eps)
    for index in range(STEPS):
        step = STEPS - 1 - index if LAST_FIRST else index
        at, mask = _block_offsets(step, begin, end, start, channels, channel, inside, STEPS, BLOCK_R)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, tl.maximum((value - centre) * scale * w + b, 0.0), mask=mask)


@triton.jit
def _relu_gradient(x, grad_out, at, mask, centre, scale, w, b):
    """The normalised value, and the gradient where the ReLU lets it through."""
    value = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - centre) * scale
    grad = tl.load(grad_out + at, mask=mask, other=0.0).to(tl.float32)
    return value, tl.where(mask & (value * w + b > 0), grad, 0.0)


@_kernel
def gradient_sums(
    x, grad_out, mean, var, weight, bias, partial, ticket, sums, grad_weight, grad_bias,
    row1, row2, rows, program1, program2, channels, eps,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum over the rows of gradient and of gradient times normalised value: [2, PARTS, channels], and for all parts
    together: the gradients of bias and weight."""
    column = tl.program_id(1)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    part = _part_of_program(program1, program2)
    begin, end, start, _ = _part_bounds(part, row1, row2, rows, program1, program2)
    centre, scale, w, b = _channel_values(mean, var, weight, bias, part, channels, channel, inside, eps)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(STEPS):
        at, mask = _block_offsets(step, begin, end, start, channels, channel, inside, STEPS, BLOCK_R)
        value, grad = _relu_gradient(x, grad_out, at, mask, centre, scale, w, b)
        first += grad
        second += grad * value
    if _store_partial_sums(partial, first, second, channel, inside, channels, ticket, column):
        of_bias = tl.zeros((BLOCK_C,), tl.float32)
        of_weight = tl.zeros((BLOCK_C,), tl.float32)
        for each in tl.static_range(PARTS):
            _, _, start, stop = _part_bounds(each, row1, row2, rows, program1, program2)
            grad = _sum_partials(partial, 0, start, stop, channel, inside, channels, PROGRAMS)
            product = _sum_partials(partial, 1, start, stop, channel, inside, channels, PROGRAMS)
            tl.store(sums + each * channels + channel, grad, mask=inside)
            tl.store(sums + (PARTS + each) * channels + channel, product, mask=inside)
            of_bias += grad
            of_weight += product
        tl.store(grad_bias + channel, of_bias, mask=inside)
        tl.store(grad_weight + channel, of_weight, mask=inside)
        tl.store(ticket + column, 0)


@_kernel
def gradient_input(
    x, grad_out, mean, var, weight, bias, skip, sums, grad,
    row1, row2, rows, program1, program2, channels, eps,
    HAS_SKIP: tl.constexpr, PARTS: tl.constexpr, LAST_FIRST: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """weight / sqrt(var + eps) · (gradient - its mean - value · mean(gradient · value)), plus the skip's gradient."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    part = _part_of_program(program1, program2)
    begin, end, start, _ = _part_bounds(part, row1, row2, rows, program1, program2)
    centre, scale, w, b = _channel_values(mean, var, weight, bias, part, channels, channel, inside, eps)
    own = part * channels + channel
    mean_grad = tl.load(sums + own, mask=inside, other=0.0)[None, :] / (end - begin)
    mean_product = tl.load(sums + PARTS * channels + own, mask=inside, other=0.0)[None, :] / (end - begin)
    for index in range(STEPS):
        step = STEPS - 1 - index if LAST_FIRST else index
        at, mask = _block_offsets(step, begin, end, start, channels, channel, inside, STEPS, BLOCK_R)
        value, cut = _relu_gradient(x, grad_out, at, mask, centre, scale, w, b)
        out = w * scale * (cut - mean_grad - value * mean_product)
        if HAS_SKIP:
            out += tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad + at, out, mask=mask)
