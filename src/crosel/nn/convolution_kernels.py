"""The Triton kernels behind `convolution`: 3x3 convolutions of stride 1 as matrix products.

A tensor [N, C, H, W] in channels-last layout is a matrix of N·H·W rows. Each of the nine taps adds the product of rows,
moved by the tap, with the tap's weights; beyond the border there are zeros. Tap and channel together are one index of
9·C values, in the order in which a weight [O, C, 3, 3] in channels-last layout lies in memory.

A program makes all channels of its tile: FIRST + SECOND, both powers of two, because 160 is none.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _moved(x, row, flat, exists, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    """Values of rows moved by a tap. Row, index of tap and channel, and `exists` are of shapes that broadcast."""
    tap, channel = flat // CHANNELS, flat % CHANNELS
    down, right = tap // 3 - 1, tap % 3 - 1
    high, wide = row // WIDTH % HEIGHT + down, row % WIDTH + right
    inside = (high >= 0) & (high < HEIGHT) & (wide >= 0) & (wide < WIDTH) & exists
    return tl.load(x + (row + down * WIDTH + right) * CHANNELS + channel, mask=inside, other=0.0)


@triton.jit
def _finish(
    residual, out, partial, row, column, CHANNELS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Add the residual; each channel's mean, and squares about it, over these rows."""
    at = row * CHANNELS + column
    value = tl.load(out + at)
    if HAS_RESIDUAL:
        value = (value.to(tl.float32) + tl.load(residual + at).to(tl.float32)).to(value.dtype)
        tl.store(out + at, value)
    value = value.to(tl.float32)
    mean = tl.sum(value, axis=0) / BLOCK_R
    away = value - mean[None, :]
    at = tl.program_id(0) * CHANNELS + column
    tl.store(partial + at, mean[None, :])
    tl.store(partial + tl.num_programs(0) * CHANNELS + at, tl.sum(away * away, axis=0)[None, :])


@triton.jit
def convolution_forward(
    x, weight, residual, out, partial, rows,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, MOMENTS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out[row, o] = sum over taps and channels of x[row moved by tap, c] · weight[o, tap, c], plus the residual. A
    program makes BLOCK_R rows."""
    channels: tl.constexpr = FIRST + SECOND
    depth: tl.constexpr = 9 * channels
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    one, two = tl.arange(0, FIRST)[None, :], FIRST + tl.arange(0, SECOND)[None, :]
    total1 = tl.zeros((BLOCK_R, FIRST), tl.float32)
    total2 = tl.zeros((BLOCK_R, SECOND), tl.float32)
    for step in range((depth + BLOCK_K - 1) // BLOCK_K):
        flat = step * BLOCK_K + tl.arange(0, BLOCK_K)
        a = _moved(x, row, flat[None, :], (row < rows) & (flat < depth)[None, :], HEIGHT, WIDTH, channels)
        at, there = flat[:, None], (flat < depth)[:, None]
        total1 = tl.dot(a, tl.load(weight + one * depth + at, mask=there, other=0.0), total1)
        total2 = tl.dot(a, tl.load(weight + two * depth + at, mask=there, other=0.0), total2)
    tl.store(out + row * channels + one, total1, mask=row < rows)
    tl.store(out + row * channels + two, total2, mask=row < rows)
    if MOMENTS:  # then there are no other rows
        tl.debug_barrier()
        for block in tl.static_range(channels // 32):
            column = block * 32 + tl.arange(0, 32)[None, :]
            _finish(residual, out, partial, row, column, channels, HAS_RESIDUAL, BLOCK_R)


@triton.jit
def convolution_wgrad(
    x, grad, partial, rows, share,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """partial[split, o, tap, c] = sum over `share` rows of x[row moved by tap, c] · grad[row, o]. A program makes
    BLOCK_K pairs of tap and channel."""
    channels: tl.constexpr = FIRST + SECOND
    depth: tl.constexpr = 9 * channels
    flat = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)[:, None]
    split = tl.program_id(1)
    one, two = tl.arange(0, FIRST)[None, :], FIRST + tl.arange(0, SECOND)[None, :]
    total1 = tl.zeros((BLOCK_K, FIRST), tl.float32)
    total2 = tl.zeros((BLOCK_K, SECOND), tl.float32)
    begin = split * share
    end = tl.minimum(begin + share, rows)
    for start in range(begin, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        a = _moved(x, row[None, :], flat, (row < end)[None, :] & (flat < depth), HEIGHT, WIDTH, channels)
        at, there = row[:, None] * channels, (row < end)[:, None]
        total1 = tl.dot(a, tl.load(grad + at + one, mask=there, other=0.0), total1)
        total2 = tl.dot(a, tl.load(grad + at + two, mask=there, other=0.0), total2)
    at = partial + split * channels * depth + flat
    tl.store(at + one * depth, total1, mask=flat < depth)
    tl.store(at + two * depth, total2, mask=flat < depth)
