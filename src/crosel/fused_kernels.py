"""The Triton kernels behind `fused`. A tensor [N, C, H, W] in channels-last layout is a matrix of N·H·W rows.

A program takes `STEPS` times `BLOCK_R` rows of `BLOCK_C` channels. In the kernels that sum over all rows each program
leaves its partial sums in memory and draws a ticket; the one with the last ticket adds the partial sums up, in a fixed
order. How much a program takes is known when a kernel is compiled: forms with a loop of unknown length were slower.
"""

# mypy: ignore-errors

import os

import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own interpreter: the tests run on a CPU


@triton.jit
def _block(step, rows, channels, channel, inside, STEPS: tl.constexpr, BLOCK_R: tl.constexpr):
    """Where the values of a program's next rows lie, and which of them exist."""
    row = ((tl.program_id(0) * STEPS + step) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    return row[:, None] * channels + channel[None, :], (row[:, None] < rows) & inside[None, :]


@triton.jit
def _leave(partial, first, second, channel, inside, channels, ticket, column):
    """Leave both partial sums in memory, draw a ticket, and say whether it was the last."""
    at = tl.program_id(0) * channels + channel
    tl.store(partial + at, tl.sum(first, axis=0), mask=inside)
    tl.store(partial + tl.num_programs(0) * channels + at, tl.sum(second, axis=0), mask=inside)
    tl.debug_barrier()  # every thread's partial sums are written before the ticket is drawn
    return tl.atomic_add(ticket + column, 1) == tl.num_programs(0) - 1


@triton.jit
def _add_up(partial, which, channel, inside, channels, PROGRAMS: tl.constexpr):
    program = tl.arange(0, PROGRAMS)  # all at once: a loop would wait for memory in every round
    at = (which * tl.num_programs(0) + program[:, None]) * channels + channel[None, :]
    mask = (program[:, None] < tl.num_programs(0)) & inside[None, :]
    return tl.sum(tl.load(partial + at, mask=mask, other=0.0, cache_modifier=".cg"), axis=0)


@triton.jit
def moments(
    x, residual, total, partial, ticket, mean, var, running_mean, running_var, rows, channels, momentum, unbias,
    HAS_RESIDUAL: tl.constexpr,
    PROGRAMS: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Add the residual; mean and biased variance of each channel; move the running statistics."""
    column = tl.program_id(1)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    # Measured from the first row, so that a mean far from zero costs no digits of the variance.
    pivot = tl.load(x + channel, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        pivot += tl.load(residual + channel, mask=inside, other=0.0).to(tl.float32)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(STEPS):
        at, mask = _block(step, rows, channels, channel, inside, STEPS, BLOCK_R)
        value = tl.load(x + at, mask=mask, other=0.0)
        if HAS_RESIDUAL:
            value = (value.to(tl.float32) + tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)).to(value.dtype)
            tl.store(total + at, value, mask=mask)
        away = tl.where(mask, value.to(tl.float32) - pivot[None, :], 0.0)
        first += away
        second += away * away
    if _leave(partial, first, second, channel, inside, channels, ticket, column):
        away = _add_up(partial, 0, channel, inside, channels, PROGRAMS) / rows
        spread = _add_up(partial, 1, channel, inside, channels, PROGRAMS) / rows - away * away
        spread = tl.maximum(spread, 0.0)
        centre = pivot + away
        tl.store(mean + channel, centre, mask=inside)
        tl.store(var + channel, spread, mask=inside)
        old = tl.load(running_mean + channel, mask=inside)
        tl.store(running_mean + channel, old + momentum * (centre - old), mask=inside)
        old = tl.load(running_var + channel, mask=inside)
        tl.store(running_var + channel, old + momentum * (spread * unbias - old), mask=inside)
        tl.store(ticket + column, 0)


@triton.jit
def _channel_values(mean, var, weight, bias, channel, inside, eps):
    return (
        tl.load(mean + channel, mask=inside, other=0.0)[None, :],
        (1.0 / tl.sqrt(tl.load(var + channel, mask=inside, other=1.0) + eps))[None, :],
        tl.load(weight + channel, mask=inside, other=0.0)[None, :],
        tl.load(bias + channel, mask=inside, other=0.0)[None, :],
    )


@triton.jit
def normalise_relu(
    x, mean, var, weight, bias, out, rows, channels, eps,
    STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """max(0, (x - mean) / sqrt(var + eps) · weight + bias)."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    centre, scale, w, b = _channel_values(mean, var, weight, bias, channel, inside, eps)
    for step in range(STEPS):
        at, mask = _block(step, rows, channels, channel, inside, STEPS, BLOCK_R)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, tl.maximum((value - centre) * scale * w + b, 0.0), mask=mask)


@triton.jit
def _cut(x, grad_out, at, mask, centre, scale, w, b):
    """The normalised value, and the gradient where the ReLU lets it through."""
    value = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - centre) * scale
    grad = tl.load(grad_out + at, mask=mask, other=0.0).to(tl.float32)
    return value, tl.where(mask & (value * w + b > 0), grad, 0.0)


@triton.jit
def gradient_sums(
    x, grad_out, mean, var, weight, bias, partial, ticket, grad_weight, grad_bias, rows, channels, eps,
    PROGRAMS: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sum over the rows of gradient and of gradient times normalised value: the gradients of bias and weight."""
    column = tl.program_id(1)
    channel = column * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    centre, scale, w, b = _channel_values(mean, var, weight, bias, channel, inside, eps)
    first = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    second = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(STEPS):
        at, mask = _block(step, rows, channels, channel, inside, STEPS, BLOCK_R)
        value, grad = _cut(x, grad_out, at, mask, centre, scale, w, b)
        first += grad
        second += grad * value
    if _leave(partial, first, second, channel, inside, channels, ticket, column):
        tl.store(grad_bias + channel, _add_up(partial, 0, channel, inside, channels, PROGRAMS), mask=inside)
        tl.store(grad_weight + channel, _add_up(partial, 1, channel, inside, channels, PROGRAMS), mask=inside)
        tl.store(ticket + column, 0)


@triton.jit
def gradient_input(
    x, grad_out, mean, var, weight, bias, skip, grad_weight, grad_bias, grad, rows, channels, eps,
    HAS_SKIP: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """weight / sqrt(var + eps) · (gradient - its mean - value · mean(gradient · value)), plus the skip's gradient."""
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    centre, scale, w, b = _channel_values(mean, var, weight, bias, channel, inside, eps)
    mean_grad = tl.load(grad_bias + channel, mask=inside, other=0.0)[None, :] / rows
    mean_product = tl.load(grad_weight + channel, mask=inside, other=0.0)[None, :] / rows
    for step in range(STEPS):
        at, mask = _block(step, rows, channels, channel, inside, STEPS, BLOCK_R)
        value, cut = _cut(x, grad_out, at, mask, centre, scale, w, b)
        out = w * scale * (cut - mean_grad - value * mean_product)
        if HAS_SKIP:
            out += tl.load(skip + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(grad + at, out, mask=mask)
