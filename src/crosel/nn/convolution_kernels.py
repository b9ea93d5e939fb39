"""The Triton kernels behind `convolution`: 3x3 convolutions of stride 1 as matrix products.

A tensor [N, C, H, W] in channels-last layout is a matrix of N·H·W rows. Each of the nine taps adds the product of rows,
moved by the tap, with the tap's weights. Beyond the border there are zeros. Tap and channel together are one index of
9·C values, in the order in which a weight [O, C, 3, 3] in channels-last layout lies in memory.

A program makes all output channels of its tile: FIRST, or FIRST + SECOND where they are no power of two.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _moved(x, row, tap, channel, exists, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Values of rows moved by a tap. Row, tap, channel and `exists` are of shapes that broadcast."""
    down, right = tap // 3 - 1, tap % 3 - 1
    high, wide = row // WIDTH % HEIGHT + down, row % WIDTH + right
    inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH) & exists
    return tl.load(x + (row + down * WIDTH + right) * CHANNELS + channel, mask=inside, other=0.0)


@triton.jit
def _finish(
    total, residual, out, partial, row, rows, column,
    CHANNELS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Add the residual and store; each channel's mean, and squares about it, over these rows."""
    at = row * CHANNELS + column[None, :]
    value = total.to(out.dtype.element_ty)
    if HAS_RESIDUAL:
        more = tl.load(residual + at, mask=row < rows, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + more).to(value.dtype)
    tl.store(out + at, value, mask=row < rows)
    if MOMENTS:  # then there are no other rows
        value = value.to(tl.float32)
        mean = tl.sum(value, axis=0) / BLOCK_R
        away = value - mean[None, :]
        at = tl.program_id(0) * CHANNELS + column
        tl.store(partial + at, mean)
        tl.store(partial + tl.num_programs(0) * CHANNELS + at, tl.sum(away * away, axis=0))


@triton.jit
def convolution_forward(
    x, weight, residual, out, partial, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row, o] = sum over taps and channels of x[row moved by tap, c] · weight[o, tap, c], plus the residual. A
    program makes BLOCK_R rows."""
    depth: tl.constexpr = 9 * INPUTS
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    one, two = tl.arange(0, FIRST), FIRST + tl.arange(0, SECOND if SECOND else 1)
    total1 = tl.zeros((BLOCK_R, FIRST), tl.float32)
    if SECOND:
        total2 = tl.zeros((BLOCK_R, SECOND), tl.float32)
    for step in range((depth + BLOCK_K - 1) // BLOCK_K):
        flat = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if INPUTS % BLOCK_K == 0:  # one tap
            tap, channel = step // (INPUTS // BLOCK_K), step % (INPUTS // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
            a = _moved(x, row, tap, channel[None, :], row < rows, HEIGHT, WIDTH, INPUTS)
        else:
            tap, channel, exists = (flat // INPUTS)[None, :], (flat % INPUTS)[None, :], (flat < depth)[None, :]
            a = _moved(x, row, tap, channel, (row < rows) & exists, HEIGHT, WIDTH, INPUTS)
        at, there = flat[:, None], (flat < depth)[:, None]
        total1 = tl.dot(a, tl.load(weight + one[None, :] * depth + at, mask=there, other=0.0), total1)
        if SECOND:
            total2 = tl.dot(a, tl.load(weight + two[None, :] * depth + at, mask=there, other=0.0), total2)
    channels: tl.constexpr = FIRST + SECOND
    _finish(total1, residual, out, partial, row, rows, one, channels, HAS_RESIDUAL, MOMENTS, BLOCK_R)
    if SECOND:
        _finish(total2, residual, out, partial, row, rows, two, channels, HAS_RESIDUAL, MOMENTS, BLOCK_R)


@triton.jit
def convolution_wgrad(
    x, grad, partial, rows, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, INPUTS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """partial[split, o, tap, c] = sum over `share` rows of x[row moved by tap, c] · grad[row, o]. A program makes
    BLOCK_K pairs of tap and channel."""
    channels: tl.constexpr = FIRST + SECOND
    depth: tl.constexpr = 9 * INPUTS
    flat = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    split = tl.program_id(1)
    one, two = tl.arange(0, FIRST)[None, :], FIRST + tl.arange(0, SECOND if SECOND else 1)[None, :]
    total1 = tl.zeros((BLOCK_K, FIRST), tl.float32)
    if SECOND:
        total2 = tl.zeros((BLOCK_K, SECOND), tl.float32)
    begin = split * share
    end = tl.minimum(begin + share, rows)
    for start in range(begin, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        exists = (row < end)[None, :] & (flat < depth)
        a = _moved(x, row[None, :], flat // INPUTS, flat % INPUTS, exists, HEIGHT, WIDTH, INPUTS)
        at, there = row[:, None] * channels, (row < end)[:, None]
        total1 = tl.dot(a, tl.load(grad + at + one, mask=there, other=0.0), total1)
        if SECOND:
            total2 = tl.dot(a, tl.load(grad + at + two, mask=there, other=0.0), total2)
    at = partial + split * channels * depth + flat
    tl.store(at + one * depth, total1, mask=flat < depth)
    if SECOND:
        tl.store(at + two * depth, total2, mask=flat < depth)


@triton.jit
def turn_weights(weight, out, inputs, outputs, BLOCK: tl.constexpr):
    """out[c, 8 - tap, o] = weight[o, tap, c]."""
    tap = tl.program_id(0)
    o, c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    exists = (o < outputs)[:, None] & (c < inputs)[None, :]
    value = tl.load(weight + (o[:, None] * 9 + tap) * inputs + c[None, :], mask=exists)
    tl.store(out + (c[:, None] * 9 + 8 - tap) * outputs + o[None, :], value.trans(), mask=exists.trans())
