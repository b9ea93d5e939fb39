"""3x3 convolutions of stride 1 as matrix products, in Triton: what cuDNN's are compared with in `kernels.py`.

    python benchmarks/implicit_gemm.py --device cuda

checks them against torch in double precision. (On a CPU: TRITON_INTERPRET=1 and --device cpu.)

Images [N, C, H, W] in channels-last layout are a matrix of N·H·W rows, and each of the nine taps adds the product of
rows, moved by the tap, with the tap's weights. The width of a tile is the sum of two powers of two: 128 + 32 divides
the 160, 320 and 640 channels of WRN-34-10, which no larger power of two than 32 does. Gradients of weights are summed
in parts, by a fixed number of programs, and the parts in a fixed order. With BOXES the copy engine fetches the rows.
"""

# mypy: ignore-errors

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from record import Arguments, end_with
from torch import Tensor

from crosel.errors import UserError
from crosel.training.devices import pick_device

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # it comes with PyTorch's CUDA builds only
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PROGRAMS = 264  # that sum gradients of weights: two for each multiprocessor of a large card


def usable(device: torch.device) -> bool:
    return triton is not None and (device.type == "cuda" or INTERPRETED)


if triton is not None:

    @triton.jit
    def _moved(x, row, tap, channel, exists, SIDE: tl.constexpr, CHANNELS: tl.constexpr):
        """Rows of an image moved by a tap; zero beyond its border. All but `x` are of shapes that broadcast."""
        down, right = tap // 3 - 1, tap % 3 - 1
        high, wide = row // SIDE % SIDE + down, row % SIDE + right
        inside = (high >= 0) & (high < SIDE) & (wide >= 0) & (wide < SIDE) & exists
        return tl.load(x + (row + down * SIDE + right) * CHANNELS + channel, mask=inside, other=0.0)

    @triton.jit
    def _weights(weight, tap, channel, column, exists, TAP: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr):
        return tl.load(weight + tap * TAP + channel * IN + column * OUT, mask=exists, other=0.0)

    @triton.jit
    def products(
        x, weight, out, rows,
        SIDE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
        TAP: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, FLIP: tl.constexpr,
        BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        """out[row, o] = sum over taps and channels of x[row moved by tap, c] · weight(tap, c, o). A program makes
        BLOCK_M rows of FIRST + SECOND columns."""
        tiles: tl.constexpr = (OUTPUTS + FIRST + SECOND - 1) // (FIRST + SECOND)
        steps: tl.constexpr = (9 * INPUTS + BLOCK_K - 1) // BLOCK_K
        program = tl.program_id(0)
        row = program // tiles * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        column = program % tiles * (FIRST + SECOND) + tl.arange(0, FIRST)[None, :]
        total = tl.zeros((BLOCK_M, FIRST), tl.float32)
        if SECOND:
            column2 = program % tiles * (FIRST + SECOND) + FIRST + tl.arange(0, SECOND)[None, :]
            total2 = tl.zeros((BLOCK_M, SECOND), tl.float32)
        for step in range(steps):
            if INPUTS % BLOCK_K == 0:  # one tap
                tap = step // (INPUTS // BLOCK_K)
                channel = step % (INPUTS // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
                a = _moved(x, row, tap, channel[None, :], row < rows, SIDE, INPUTS)
                of_weight, there = (8 - tap if FLIP else tap), channel[:, None] < INPUTS
            else:
                flat = step * BLOCK_K + tl.arange(0, BLOCK_K)
                tap, channel = flat // INPUTS, flat % INPUTS
                exists = (row < rows) & (flat < 9 * INPUTS)[None, :]
                a = _moved(x, row, tap[None, :], channel[None, :], exists, SIDE, INPUTS)
                of_weight, there = (8 - tap if FLIP else tap)[:, None], (flat < 9 * INPUTS)[:, None]
            b = _weights(weight, of_weight, channel[:, None], column, there & (column < OUTPUTS), TAP, IN, OUT)
            total = tl.dot(a, b, total)
            if SECOND:
                b = _weights(weight, of_weight, channel[:, None], column2, there & (column2 < OUTPUTS), TAP, IN, OUT)
                total2 = tl.dot(a, b, total2)
        tl.store(out + row * OUTPUTS + column, total, mask=(row < rows) & (column < OUTPUTS))
        if SECOND:
            tl.store(out + row * OUTPUTS + column2, total2, mask=(row < rows) & (column2 < OUTPUTS))

    @triton.jit
    def products_of_boxes(
        x, weight, weight2, out,
        SIDE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, TRANSPOSED: tl.constexpr,
        IMAGES: tl.constexpr, HIGH: tl.constexpr,
        FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        """The same, where rows are boxes of whole rows of pixels (HIGH of each of IMAGES) that the card's copy engine
        fetches, with zeros beyond the border. TRANSPOSED: the gradient of the input."""
        tiles: tl.constexpr = OUTPUTS // (FIRST + SECOND)
        rows: tl.constexpr = IMAGES * HIGH * SIDE
        boxes: tl.constexpr = SIDE // HIGH
        blocks: tl.constexpr = INPUTS // BLOCK_K
        program = tl.program_id(0)
        box, column = program // tiles, program % tiles * (FIRST + SECOND)
        image, high = box // boxes * IMAGES, box % boxes * HIGH
        total = tl.zeros((rows, FIRST), tl.float32)
        if SECOND:
            total2 = tl.zeros((rows, SECOND), tl.float32)
        for step in range(9 * blocks):
            tap, channel = step // blocks, step % blocks * BLOCK_K
            a = x.load([image, high + tap // 3 - 1, tap % 3 - 1, channel]).reshape(rows, BLOCK_K)
            if TRANSPOSED:
                total = tl.dot(a, weight.load([channel, 8 - tap, column]).reshape(BLOCK_K, FIRST), total)
                if SECOND:
                    total2 = tl.dot(
                        a, weight2.load([channel, 8 - tap, column + FIRST]).reshape(BLOCK_K, SECOND), total2
                    )
            else:
                total = tl.dot(a, weight.load([column, tap, channel]).reshape(FIRST, BLOCK_K).T, total)
                if SECOND:
                    total2 = tl.dot(a, weight2.load([column + FIRST, tap, channel]).reshape(SECOND, BLOCK_K).T, total2)
        at = (box * rows + tl.arange(0, rows))[:, None] * OUTPUTS + column
        tl.store(out + at + tl.arange(0, FIRST)[None, :], total.to(out.dtype.element_ty))
        if SECOND:
            tl.store(out + at + FIRST + tl.arange(0, SECOND)[None, :], total2.to(out.dtype.element_ty))

    @triton.jit
    def weight_gradients(
        x, grad, partial, rows, share,
        SIDE: tl.constexpr, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr,
        BLOCK_M: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_K: tl.constexpr,
    ):  # fmt: skip
        """partial[split, o, tap, c] = sum over `share` rows of x[row moved by tap, c] · grad[row, o]. A program makes
        BLOCK_M pairs of tap and channel for FIRST + SECOND outputs."""
        tiles: tl.constexpr = (OUTPUTS + FIRST + SECOND - 1) // (FIRST + SECOND)
        program, split = tl.program_id(0), tl.program_id(1)
        flat = program // tiles * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        tap, channel = flat // INPUTS, flat % INPUTS
        column = program % tiles * (FIRST + SECOND) + tl.arange(0, FIRST)[None, :]
        total = tl.zeros((BLOCK_M, FIRST), tl.float32)
        if SECOND:
            column2 = program % tiles * (FIRST + SECOND) + FIRST + tl.arange(0, SECOND)[None, :]
            total2 = tl.zeros((BLOCK_M, SECOND), tl.float32)
        begin = split * share
        end = tl.minimum(begin + share, rows)
        for first in range(begin, end, BLOCK_K):
            row = first + tl.arange(0, BLOCK_K)
            exists = (row < end)[None, :] & (flat < 9 * INPUTS)
            a = _moved(x, row[None, :], tap, channel, exists, SIDE, INPUTS)
            at = row[:, None]
            b = tl.load(grad + at * OUTPUTS + column, mask=(at < end) & (column < OUTPUTS), other=0.0)
            total = tl.dot(a, b, total)
            if SECOND:
                b = tl.load(grad + at * OUTPUTS + column2, mask=(at < end) & (column2 < OUTPUTS), other=0.0)
                total2 = tl.dot(a, b, total2)
        there = split * 9 * INPUTS * OUTPUTS + column * 9 * INPUTS + flat
        tl.store(partial + there, total, mask=(flat < 9 * INPUTS) & (column < OUTPUTS))
        if SECOND:
            there = split * 9 * INPUTS * OUTPUTS + column2 * 9 * INPUTS + flat
            tl.store(partial + there, total2, mask=(flat < 9 * INPUTS) & (column2 < OUTPUTS))


def tilings(what: str, inputs: int, outputs: int) -> list[dict[str, int]]:
    """The tiles to try, with warps and stages."""
    width = inputs if what == "dgrad" else outputs
    depth = outputs if what == "dgrad" else inputs

    def boxes(rows: int, first: int, second: int, deep: int, warps: int, stages: int) -> dict[str, int]:
        return {"BOXES": 1, **tiles(rows, first, second, deep, warps, stages)}

    def tiles(rows: int, first: int, second: int, deep: int, warps: int, stages: int) -> dict[str, int]:
        return {
            "BLOCK_M": rows, "FIRST": first, "SECOND": second, "BLOCK_K": deep, "num_warps": warps, "num_stages": stages
        }  # fmt: skip

    widths = [pair for pair in ((128, 32), (256, 64), (256, 0), (128, 0), (64, 0)) if width % sum(pair) == 0]
    found = []
    for first, second in widths or [(32, 0)]:
        found += [tiles(128, first, second, 64, 8, 3), tiles(128, first, second, 64, 8, 4)]
        if first + second <= 160:
            found += [tiles(128, first, second, 64, 4, 3), tiles(256, first, second, 64, 8, 3)]
            found += [tiles(256, first, second, 64, 8, 4)]
        if depth % 64 and what != "wgrad":
            found += [tiles(128, first, second, 32, 8, 6), tiles(256, first, second, 32, 8, 6)]
    if what == "wgrad":
        return found[:10]
    fetched = []
    deep = 64 if depth % 64 == 0 else 32
    for first, second in widths or [(32, 0)]:
        stages = 4 if deep == 64 else 8
        fetched += [boxes(128, first, second, deep, 8, stages), boxes(128, first, second, deep, 8, stages // 2)]
        if first + second <= 160:
            fetched += [boxes(128, first, second, deep, 4, stages // 2), boxes(256, first, second, deep, 8, stages)]
    return fetched[:8] + found[:8]


def compute(what: str, x: Tensor, weight: Tensor, grad: Tensor, tiles: dict[str, int]) -> Tensor:
    """What `torch.ops.aten.convolution` and its backward function compute, without bias. Of x and grad only what is
    needed is looked at."""
    if what == "wgrad":
        return _weight_gradient(x, weight, grad, tiles)
    source = grad if what == "dgrad" else x
    if "BOXES" in tiles:
        return _by_boxes(what, source, weight, tiles)
    outputs, inputs = weight.shape[:2]
    n, depth, side, _ = source.shape
    width = inputs if what == "dgrad" else outputs
    rows = n * side * side
    out = source.new_empty(n, side, side, width).permute(0, 3, 1, 2)
    step = (
        {"IN": 9 * inputs, "OUT": 1, "FLIP": True} if what == "dgrad" else {"IN": 1, "OUT": 9 * inputs, "FLIP": False}
    )
    grid = -(-rows // tiles["BLOCK_M"]) * -(-width // (tiles["FIRST"] + tiles["SECOND"]))
    products[(grid,)](source, weight, out, rows, SIDE=side, INPUTS=depth, OUTPUTS=width, TAP=inputs, **step, **tiles)
    return out


class Convolution(torch.autograd.Function):
    """A 3x3 convolution of stride 1 of which each of forward, dgrad and wgrad has tiles in `plan`, or is torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, plan: dict[str, dict[str, int]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.plan = plan
        if "forward" in plan:
            return compute("forward", x, weight, x, plan["forward"])
        return torch.ops.aten.convolution(x, weight, None, *_HOW)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous(memory_format=torch.channels_last)
        ours = [what in ctx.plan for what in ("dgrad", "wgrad")]
        mask = [ctx.needs_input_grad[i] and not ours[i] for i in range(2)]
        theirs: Sequence[Tensor | None] = (None, None)
        if any(mask):
            theirs = torch.ops.aten.convolution_backward(grad, x, weight, None, *_HOW, [*mask, False])[:2]
        found = [
            compute(what, x, weight, grad, ctx.plan[what]) if ours[i] and ctx.needs_input_grad[i] else theirs[i]
            for i, what in enumerate(("dgrad", "wgrad"))
        ]
        return found[0], found[1], None


_HOW = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _by_boxes(what: str, source: Tensor, weight: Tensor, tiles: dict[str, int]) -> Tensor:
    outputs, inputs = weight.shape[:2]
    n, depth, side, _ = source.shape
    width = inputs if what == "dgrad" else outputs
    first, second, deep = tiles["FIRST"], tiles["SECOND"], tiles["BLOCK_K"]
    high = min(side, tiles["BLOCK_M"] // side)
    images = tiles["BLOCK_M"] // side // high
    if side % high or n % images or width % (first + second) or depth % deep:
        raise UserError(f"tiles {tiles} do not divide {n} images of {side} with {depth} channels, or {width} outputs")
    taps = weight.permute(0, 2, 3, 1).view(outputs, 9, inputs)
    x = TensorDescriptor.from_tensor(source.permute(0, 2, 3, 1), [images, high, side, deep])
    weights = [
        TensorDescriptor.from_tensor(taps, [deep, 1, part] if what == "dgrad" else [part, 1, deep])
        for part in (first, second or first)
    ]
    out = source.new_empty(n, side, side, width).permute(0, 3, 1, 2)
    grid = n // images * (side // high) * (width // (first + second))
    products_of_boxes[(grid,)](
        x, *weights, out, SIDE=side, INPUTS=depth, OUTPUTS=width, TRANSPOSED=what == "dgrad", IMAGES=images, HIGH=high,
        FIRST=first, SECOND=second, BLOCK_K=deep, num_warps=tiles["num_warps"], num_stages=tiles["num_stages"],
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, weight: Tensor, grad: Tensor, tiles: dict[str, int]) -> Tensor:
    outputs, inputs = weight.shape[:2]
    side, rows = x.shape[2], x.shape[0] * x.shape[2] * x.shape[3]
    grid = -(-9 * inputs // tiles["BLOCK_M"]) * -(-outputs // (tiles["FIRST"] + tiles["SECOND"]))
    splits = max(1, min(PROGRAMS // grid, rows // 512))
    share = -(-rows // (splits * 64)) * 64
    splits = -(-rows // share)
    partial = torch.empty(splits, outputs, 3, 3, inputs, device=x.device)
    weight_gradients[(grid, splits)](x, grad, partial, rows, share, SIDE=side, INPUTS=inputs, OUTPUTS=outputs, **tiles)
    return partial.sum(0).to(weight.dtype).permute(0, 3, 1, 2)


def compile_one(job: tuple[str, int, int, int, dict[str, int]]) -> str:
    """Compile a kernel for a shape, into the cache on the disk; the error, if any. Runs in a process of its own."""
    what, inputs, outputs, side, tiles = job
    try:
        compute(
            what, *_random(max(2, 256 // side**2), inputs, outputs, side, torch.device("cuda"), torch.bfloat16), tiles
        )
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _random(n: int, inputs: int, outputs: int, side: int, device: torch.device, dtype: torch.dtype) -> Sequence[Any]:
    shapes = ((n, inputs, side, side), (outputs, inputs, 3, 3), (n, outputs, side, side))
    return [
        torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last) for shape in shapes
    ]


def check(device: torch.device) -> None:
    """Every tile for shapes with all that is special about them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bound = 4e-3 if device.type == "cuda" else 1e-5
    shapes = ((2, 32, 64, 6), (1, 160, 160, 5), (3, 64, 32, 8), (16, 64, 320, 4), (4, 64, 128, 8), (1, 160, 160, 16))
    for n, inputs, outputs, side in shapes:
        x, weight, grad = _random(n, inputs, outputs, side, device, dtype)
        wide = (grad.double(), x.double(), weight.double(), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        dx, dw, _ = torch.ops.aten.convolution_backward(*wide, [True, True, False])
        y = torch.nn.functional.conv2d(x.double(), weight.double(), padding=1)
        for what, expected in (("forward", y), ("dgrad", dx), ("wgrad", dw)):
            for tiles in tilings(what, inputs, outputs):
                if "BOXES" in tiles and (side & (side - 1) or n * side * side % tiles["BLOCK_M"]):
                    continue
                out = compute(what, x, weight, grad, tiles)
                difference = float((out.double() - expected).norm() / expected.norm())
                print(f"{what} {n}x{inputs}->{outputs} at {side}, {tiles}: {difference:.1e}", flush=True)
                if not difference < bound:
                    raise UserError(f"{what} with tiles {tiles} differs by {difference:.1e}")


def check_gradients(device: torch.device) -> None:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight, grad = _random(4, 64, 64, 8, device, dtype)
    passes = ("forward", "dgrad", "wgrad")
    tiles = {what: tilings(what, 64, 64)[0] for what in passes}
    found = []
    for plan in (tiles, {}, {"dgrad": tiles["dgrad"]}, {"wgrad": tiles["wgrad"]}):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        out = Convolution.apply(*leaves, plan)
        out.backward(grad)
        found.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            if not float((a - b).norm() / b.norm()) < 4e-3:
                raise UserError("gradients of the autograd function differ")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = pick_device(options.device)
    if not usable(device):
        raise UserError("there is no Triton here, or no card; with Triton, TRITON_INTERPRET=1 runs it on a CPU")
    check(device)
    check_gradients(device)


if __name__ == "__main__":
    end_with(main)
