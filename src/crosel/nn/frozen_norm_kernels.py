"""The Triton kernels behind `frozen_norm`. A tensor [N, C, H, W] in channels-last layout is a matrix of rows.

Its rows are pixels, or several pixels one after the other: so many that they are a multiple of 64 values wide, where
the number of pixels allows it. Then every program reads whole lines of the cache, whatever the number of channels is.
"""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _columns_and_values(mean, var, weight, bias, width, channels, eps, BLOCK_C: tl.constexpr):
    """A program's columns, which of them exist, and what their channels are normalised with."""
    column = tl.program_id(0) % tl.cdiv(width, BLOCK_C) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < width
    channel = column % channels
    return (
        column,
        inside,
        tl.load(mean + channel, mask=inside, other=0.0)[None, :],
        (1.0 / tl.sqrt(tl.load(var + channel, mask=inside, other=1.0) + eps))[None, :],
        tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)[None, :],
        tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :],
    )


@triton.jit(do_not_specialize=["rows", "channels"])
def norm_act(
    x, mean, var, weight, bias, out, rows, width, channels, eps,
    LOWER: tl.constexpr, UPPER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """(x - mean) / sqrt(var + eps) · weight + bias, cut off below 0 (LOWER) and above UPPER (if it is not 0)."""
    column, inside, centre, scale, w, b = _columns_and_values(mean, var, weight, bias, width, channels, eps, BLOCK_C)
    row = (tl.program_id(0) // tl.cdiv(width, BLOCK_C)).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    at, mask = row[:, None] * width + column[None, :], (row[:, None] < rows) & inside[None, :]
    value = (tl.load(x + at, mask=mask, other=0.0).to(tl.float32) - centre) * scale * w + b
    if LOWER:  # not by maximum and minimum: what is not a number stays so
        value = tl.where(value < 0, 0.0, value)
    if UPPER > 0:
        value = tl.where(value > UPPER, UPPER, value)
    tl.store(out + at, value, mask=mask)


@triton.jit(do_not_specialize=["rows", "channels", "programs"])
def norm_act_gradient(
    x, grad_out, mean, var, weight, bias, grad, partial, rows, width, channels, programs, eps,
    LOWER: tl.constexpr, UPPER: tl.constexpr, STEPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and this program's sums of those of bias and weight: partial [2, programs, width]."""
    column, inside, centre, scale, w, b = _columns_and_values(mean, var, weight, bias, width, channels, eps, BLOCK_C)
    program = tl.program_id(0) // tl.cdiv(width, BLOCK_C)
    of_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    of_weight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for step in range(STEPS):
        row = (step * programs + program).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
        at, mask = row[:, None] * width + column[None, :], (row[:, None] < rows) & inside[None, :]
        values = tl.load(x + at, mask=mask, other=0.0)
        normed = (values.to(tl.float32) - centre) * scale
        before = (normed * w + b).to(values.dtype).to(tl.float32)  # what the activation would have seen
        cut = tl.load(grad_out + at, mask=mask, other=0.0).to(tl.float32)
        if LOWER:
            cut = tl.where(before <= 0, 0.0, cut)
        if UPPER > 0:
            cut = tl.where(before >= UPPER, 0.0, cut)
        tl.store(grad + at, cut * w * scale, mask=mask)
        of_bias += cut
        of_weight += cut * normed
    at = program.to(tl.int64) * width + column
    tl.store(partial + at, tl.sum(of_bias, axis=0), mask=inside)
    tl.store(partial + programs * width + at, tl.sum(of_weight, axis=0), mask=inside)


@triton.jit(do_not_specialize=["height", "out_height", "top"])
def move_window(x, out, height, width, out_height, out_width, top, left, BLOCK: tl.constexpr):
    """out[n, i, j] = x[n, i - top, j - left], and zero where x has nothing. A row holds `width` values: its pixels
    with all their channels."""
    blocks = tl.cdiv(out_width, BLOCK)
    out_row = tl.program_id(0) // blocks
    j = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = out_row % out_height - top + tl.zeros_like(j)
    inside = (row >= 0) & (row < height) & (j >= left) & (j < left + width)
    start = (out_row // out_height * height + row).to(tl.int64) * width
    value = tl.load(x + start + (j - left), mask=inside, other=0.0)
    tl.store(out + out_row.to(tl.int64) * out_width + j, value, mask=j < out_width)
