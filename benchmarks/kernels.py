"""Where a step of CroSel spends its time, kernel by kernel, and how fast each of its convolutions could be.

    python benchmarks/kernels.py --case "wrn-34-10 64" --out results/speed/kernels-wrn-34-10.json

Five parts, each of which can be left out with --parts:

- profile: the recorded step as it is trained, and with one network after the other, so that no kernel disturbs
  another. Every kernel with its count and time, groups of kernels, how long how many kernels run at once, and the
  batch-norm kernels beside the bytes that they must move.
- convolutions: each convolution of the network by itself, forward, gradient of the input (dgrad) and of the weights
  (wgrad), at the batch sizes of the step; deterministic or not, with channels padded, with batches joined. Ways in
  which cuDNN may choose its kernel (its second heuristic, a search) run in processes of their own, because torch keeps
  a choice until the process ends.
- norms: the batch-norm kernels by themselves, shared out among programs in several ways.
- triton: 3x3 convolutions as `implicit_gemm.py` computes them.
- steps: the whole step with cuDNN's other choices, and with Triton's convolutions where they were faster.

Every time is of graph replays over several sets of random inputs, as many as do not fit into the card's cache. On a
CPU (a small network: --case "wrn-10-1 4" --device cpu) there is no profile, and times mean nothing.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import statistics
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from record import Arguments, chosen, count, end_with, save
from speed import FAST, Steps, images, matrix_rate, open_session, seconds, views_seconds, wait
from torch import Tensor, nn
from variants import off

from crosel.data import Dataset
from crosel.errors import UserError
from crosel.nn import fused
from crosel.nn.casts import shared_cast
from crosel.nn.convolution import Conv3x3
from crosel.nn.networks import ResidualNetwork
from crosel.training.devices import pick_device

PARTS = ("profile", "convolutions", "norms", "triton", "steps")
PASSES = ("forward", "backward")
REPLAYS = 5  # of a step, in a profile
SETS_BYTES, MOST_SETS = 192 << 20, 6  # inputs to take turns, three times the cache of a large card
HEURISTIC_B = {"TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1"}  # torch reads it once in a process
SEARCHED = 20  # kernels that cuDNN tries for one convolution, where it searches
GROUPS = (  # the first that fits
    ("batch norm: moments", r"^moments"),
    ("batch norm: normalise", r"^normalise_relu"),
    ("batch norm: gradient sums", r"^gradient_sums"),
    ("batch norm: gradient of input", r"^gradient_input"),
    ("layout and padding", r"nchwToNhwc|nhwcToNchw|tensorTransform|transpose|[pP]ad(Kernel|ding)|scalePackedTensor"),
    ("convolution: wgrad", r"wgrad|bwd_filter|backward_filter"),
    ("convolution: dgrad", r"dgrad|bwd_data|backward_data"),
    ("matrix products", r"nvjet|xmma_gemm|cublas|gemv|splitKreduce"),
    ("convolution: forward", r"fprop|convol|implicit|cudnn|xmma"),
    ("optimiser", r"FusedSgd|fused_sgd|FusedAdam|sgd"),
    ("casts and sums of gradients", r"multi_tensor_apply"),
    ("other matrix products", r"gemm|cutlass"),
    ("memory", r"^Mem(cpy|set)"),
    ("reductions", r"reduce|[sS]oftmax|[sS]ort|scan|Scan"),
    ("other", r""),
)


# --- the profile --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # microseconds
    end: float
    grid: tuple[int, ...] = ()
    stream: int = 0
    registers: int = 0

    @property
    def us(self) -> float:
        return self.end - self.start


def traced(profile: Any) -> tuple[list[Kernel], dict[str, tuple[float, float]]]:
    """Kernels and copies of a profile in order, and when what `record_function` names began and ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    kernels, names = [], {}
    for event in events:
        kind, begin = event.get("cat"), event.get("ts", 0.0)
        if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            about = event["args"]
            where = tuple(about.get("grid", ())), about.get("stream", 0), about.get("registers per thread", 0)
            kernels.append(Kernel(event["name"], begin, begin + event["dur"], *where))
        elif kind == "user_annotation":
            names[event["name"]] = (begin, begin + event["dur"])
    return sorted(kernels, key=lambda kernel: kernel.start), names


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS if re.search(pattern, name))


def at_once(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Milliseconds in which no kernel runs, one, two, and so on, from the first start to the last end."""
    marks = sorted([(k.start, 1) for k in kernels] + [(k.end, -1) for k in kernels])
    running, lasting = 0, Counter[int]()
    for (at, change), (then, _) in pairwise(marks):
        running += change
        lasting[running] += then - at
    return {str(number): us / 1e3 for number, us in sorted(lasting.items())}


def per_step(kernels: Sequence[Kernel], replays: int) -> dict[str, Any]:
    """What a profile of so many steps says of one."""
    groups: dict[str, list[Kernel]] = defaultdict(list)
    names: dict[tuple[str, tuple[int, ...]], list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[group_of(kernel.name)].append(kernel)
        names[kernel.name, kernel.grid].append(kernel)

    def sums(some: Sequence[Kernel]) -> dict[str, float]:
        total = sum(kernel.us for kernel in some)
        return {"count": len(some) / replays, "ms": total / replays / 1e3, "mean_us": total / len(some)}

    rows = [
        {"name": name, "grid": list(grid), "registers": some[0].registers, "group": group_of(name), **sums(some)}
        for (name, grid), some in names.items()
    ]
    span = max(k.end for k in kernels) - min(k.start for k in kernels)
    running = at_once(kernels)
    order = {name: number for number, name in enumerate(dict.fromkeys(kernel.name for kernel in kernels))}
    zero = kernels[0].start
    return {
        "kernels": len(kernels) / replays,
        "span_ms": span / replays / 1e3,
        "busy_ms": sum(ms for number, ms in running.items() if number != "0") / replays,
        "sum_ms": sum(kernel.us for kernel in kernels) / replays / 1e3,
        "at_once_ms": {number: ms / replays for number, ms in running.items()},
        "streams": dict(Counter(str(kernel.stream) for kernel in kernels)),
        "groups": {group: sums(groups[group]) for group, _ in GROUPS if group in groups},
        "by_kernel": sorted(rows, key=lambda row: -row["ms"]),
        "names": list(order),
        "first_step": [  # name's number, grid, start and length in microseconds, stream
            f"{order[k.name]} {'x'.join(map(str, k.grid))} {k.start - zero:.1f} {k.us:.1f} {k.stream}"
            for k in kernels[: len(kernels) // replays + 20]
        ],
    }


def profile(run: Callable[[int], object], device: torch.device) -> list[Kernel]:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities):  # the first one starts the profiler
        seconds(run, device, 1)
    with torch.profiler.profile(activities=activities) as found:
        seconds(run, device, REPLAYS)
    return traced(found)[0]


def profiled_steps(data: Dataset, network: str, batch: int, device: torch.device) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for form in ("as trained", "lanes"):
        steps = Steps(open_session(data, network, batch, "crosel", FAST, device))
        start = time.perf_counter()
        with off(form):
            for i in range(6):  # choice of kernels, compilation, recording
                steps(i)
        wait(device)
        first = time.perf_counter() - start
        out[form] = {"first_steps_s": first, "ms": 1e3 * seconds(steps, device, 20)}
        if device.type == "cuda":
            out[form] |= per_step(profile(steps, device), REPLAYS)
        if form == "lanes":
            out["views_ms"] = 1e3 * views_seconds(steps, device)
        del steps
        free(device)
    return out


def free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- what the network consists of -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conv:
    """A convolution of a network. All are square, of odd size, and padded so that stride 1 keeps the image's side."""

    inputs: int
    outputs: int
    size: int
    stride: int
    side: int

    def __str__(self) -> str:
        strided = f" /{self.stride}" if self.stride > 1 else ""
        return f"{self.inputs}->{self.outputs} {self.size}x{self.size}{strided} at {self.side}"

    def gflop(self, batch: int) -> float:
        pixels = batch * (self.side // self.stride) ** 2
        return 2 * pixels * self.inputs * self.outputs * self.size**2 / 1e9

    def padded(self, to: int) -> Conv:
        return replace(self, inputs=-(-self.inputs // to) * to, outputs=-(-self.outputs // to) * to)


@dataclass(frozen=True)
class Norm:
    channels: int
    side: int
    residual: bool  # added before the normalisation
    skip: bool  # whether a gradient comes around it, too


def layers(network: ResidualNetwork, device: torch.device, side: int = 32) -> tuple[Counter[Conv], Counter[Norm]]:
    """The distinct convolutions and batch norms of a network, and how many of each there are."""
    convs, norms = Counter[Conv](), Counter[Norm]()
    summed = {block.norm1 for block in list(network.blocks)[1:]} | {network.norm}
    around = {block.norm1 for block in list(network.blocks)[1:] if block.shortcut is None}

    def see(module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        channels, side = inputs[0].shape[1:3]
        if isinstance(module, nn.Conv2d):
            convs[Conv(channels, out.shape[1], module.kernel_size[0], module.stride[0], side)] += 1
        else:
            norms[Norm(channels, side, module in summed, module in around)] += 1

    seen = [m.register_forward_hook(see) for m in network.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    network.eval()
    with torch.no_grad(), fused.enable(False):
        network(torch.randn(2, 3, side, side, device=device))
    for hook in seen:
        hook.remove()
    return convs, norms


def norm_bytes(norms: Counter[Norm], batch: int) -> dict[str, float]:
    """GB that the batch-norm kernels of a step must move for both networks: the target pass of two batches, forward,
    and the pass of three batches, forward and backward. Each tensor is read or written once by each kernel."""
    moved: dict[str, float] = defaultdict(float)
    for norm, number in norms.items():
        tensor = 2 * number * 2 * batch * norm.channels * norm.side**2 / 1e9  # two networks, two bytes a value
        moved["batch norm: moments"] += 5 * tensor * (3 if norm.residual else 1)
        moved["batch norm: normalise"] += 5 * tensor * 2
        moved["batch norm: gradient sums"] += 3 * tensor * 2
        moved["batch norm: gradient of input"] += 3 * tensor * (4 if norm.skip else 3)
    return dict(moved)


def copy_rate(device: torch.device) -> float:
    """TB/s of a large copy, reading and writing."""
    size = 1 << 30 if device.type == "cuda" else 1 << 24
    a, b = (
        torch.randint(255, (size,), dtype=torch.uint8, device=device),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    seconds(lambda _: b.copy_(a), device, 3)
    return 2 * size / seconds(lambda _: b.copy_(a), device, 20) / 1e12


# --- convolutions by themselves -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One way to compute one thing."""

    conv: Conv
    what: str  # forward, dgrad, wgrad
    batch: int
    deterministic: bool = True
    padded: int = 1  # channels are padded to multiples of this


def uses(conv: Conv, batch: int) -> list[tuple[str, int]]:
    """What a step after the warm-up asks of a convolution, for each network. No gradient goes to images."""
    backward = [("wgrad", 3 * batch)] if conv.inputs == 3 else [("dgrad", 3 * batch), ("wgrad", 3 * batch)]
    return [("forward", 2 * batch), ("forward", 3 * batch), *backward]


def trials(convs: Counter[Conv], batch: int) -> list[Trial]:
    """The most telling first: there may be no time for all."""
    large = sorted(convs, key=lambda conv: -convs[conv] * conv.gflop(1))
    plain = [Trial(conv, *use) for conv in large for use in uses(conv, batch)]
    main = large[:3]  # nearly all of the arithmetic of a wide residual network
    padded = [
        Trial(conv, *use, padded=to)
        for conv in main for to in (64, 128) if conv.padded(to) != conv
        for use in uses(conv, batch)
    ]  # fmt: skip
    joined = [Trial(conv, "forward", 5 * batch) for conv in main]
    joined += [Trial(conv, what, 6 * batch) for conv in main for what in ("forward", "dgrad", "wgrad")]
    freely = [replace(trial, deterministic=False) for trial in plain if trial.what != "forward"]
    warmup = [Trial(conv, what, batch) for conv in main for what in ("forward", "dgrad", "wgrad")]
    return list(dict.fromkeys([*plain, *freely, *padded, *joined, *warmup]))


def tensors(conv: Conv, batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weights and gradient of the output."""
    side = conv.side // conv.stride
    shapes = (
        (batch, conv.inputs, conv.side, conv.side),
        (conv.outputs, conv.inputs, conv.size, conv.size),
        (batch, conv.outputs, side, side),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, weight, grad = (
        torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last) for shape in shapes
    )
    return x, weight / (conv.inputs * conv.size**2) ** 0.5, grad


def computed(conv: Conv, what: str, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    """By torch, which means cuDNN on a card."""
    stride, padding = [conv.stride] * 2, [conv.size // 2] * 2
    how = (stride, padding, [1, 1], False, [0, 0], 1)
    if what == "forward":
        return torch.ops.aten.convolution(x, weight, None, *how)
    mask = [what == "dgrad", what == "wgrad", False]
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, *how, mask)
    return found[0] if what == "dgrad" else found[1]


def timed(run: Callable[[int], object], sets: int, device: torch.device) -> float:
    """Milliseconds of one call, whose argument says which set of inputs it takes."""
    if device.type != "cuda":
        return 1e3 * seconds(lambda i: run(i % sets), device, 1)
    run(0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(0)
    torch.cuda.synchronize()
    calls = sets * max(1, min(20, round(2e-3 / max(1e-5, time.perf_counter() - start) / sets)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            run(i % sets)
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / calls


def input_sets(conv: Conv, batch: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    first = tensors(conv, batch, device)
    size = sum(t.numel() * t.element_size() for t in first)
    number = min(MOST_SETS, max(2, -(-SETS_BYTES // size))) if device.type == "cuda" else 1
    return [first, *(tensors(conv, batch, device) for _ in range(number - 1))]


def flags(trial: Trial, search: bool) -> Any:
    """As `deterministic_cudnn`, but for what the trial wants otherwise."""
    return torch.backends.cudnn.flags(
        enabled=True, benchmark=search, benchmark_limit=SEARCHED, deterministic=trial.deterministic
    )


def try_all(wanted: Sequence[Trial], chosen_by: str, limit: float, device: torch.device) -> list[dict[str, Any]]:
    """Time each, and name the kernels that it ran, until the time is over."""
    rows: list[dict[str, Any]] = []
    end = time.perf_counter() + limit
    done: list[Trial] = []
    for trial in wanted:
        if time.perf_counter() > end:
            break
        done.append(trial)
        conv = trial.conv.padded(trial.padded)
        row = asdict(trial) | {"conv": str(trial.conv), "chosen_by": chosen_by}
        rows.append(row)
        try:
            sets = input_sets(conv, trial.batch, device)
            with flags(trial, chosen_by == "search"):
                start = time.perf_counter()
                computed(conv, trial.what, *sets[0])
                wait(device)
                row["first_call_s"] = time.perf_counter() - start
                row["ms"] = timed(lambda i: computed(conv, trial.what, *sets[i]), len(sets), device)  # noqa: B023
            row["tflops"] = trial.conv.gflop(trial.batch) / row["ms"]  # what padding computes does not count
        except RuntimeError as error:
            row["error"] = (str(error).splitlines() or [type(error).__name__])[0]
    if device.type == "cuda":
        name_kernels(done, rows, chosen_by, device)
    for trial in wanted[len(done) :]:
        rows.append(asdict(trial) | {"conv": str(trial.conv), "chosen_by": chosen_by, "error": "no time left"})
    return rows


def name_kernels(done: Sequence[Trial], rows: Sequence[dict[str, Any]], chosen_by: str, device: torch.device) -> None:
    """Run each once more in one profile."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as found:
        for number, trial in enumerate(done):
            if "error" in rows[number]:
                continue
            conv = trial.conv.padded(trial.padded)
            inputs = tensors(conv, trial.batch, device)
            wait(device)
            with flags(trial, chosen_by == "search"), torch.profiler.record_function(f"trial {number}"):
                computed(conv, trial.what, *inputs)
                wait(device)
    kernels, names = traced(found)
    for number, row in enumerate(rows):
        start, end = names.get(f"trial {number}", (0.0, 0.0))
        row["kernels"] = [
            {"name": k.name, "grid": list(k.grid), "registers": k.registers, "us": k.us}
            for k in kernels if start <= k.start <= end
        ]  # fmt: skip


def elsewhere(work: Callable[..., Any], *arguments: Any, environment: dict[str, str] | None = None) -> Any:
    """The result of a function in a process of its own, where cuDNN has chosen nothing yet and a faulty kernel does no
    harm; or its error."""
    environment = environment or {}
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(work, *arguments).result()
    except Exception as error:
        return "".join(traceback.format_exception_only(error)).strip()
    finally:
        for name in environment:
            os.environ.pop(name, None)


def convolutions(convs: Counter[Conv], batch: int, limit: float, device: torch.device) -> list[dict[str, Any]]:
    wanted = trials(convs, batch)
    rows = try_all(wanted, "first choice", 0.4 * limit, device)
    free(device)
    in_step = {use for conv in convs for use in uses(conv, batch)}
    as_is = [t for t in wanted if t.padded == 1 and (t.what, t.batch) in in_step]
    others = {
        "heuristic B": ([trial for trial in as_is if trial.deterministic], 0.2 * limit, HEURISTIC_B),
        "search": (as_is, 0.4 * limit, {}),
    }
    for chosen_by, (some, seconds_left, environment) in others.items():
        found = elsewhere(try_all, some, chosen_by, seconds_left, device, environment=environment)
        rows += [{"chosen_by": chosen_by, "error": found}] if isinstance(found, str) else found
    return rows


# --- batch norm by itself -------------------------------------------------------------------------------------------

LAUNCHES: dict[str, dict[str, Any]] = {  # what is set in crosel.nn.fused
    "as trained": {},
    "rows in order": {"_LAST_FIRST": False},
    "256 programs": {"_PROGRAMS": 256},
    "1024 programs": {"_PROGRAMS": 1024},
    "2048 programs": {"_PROGRAMS": 2048},
    "8 warps": {"_WARPS": 8},
    "8 warps, 8192 values": {"_WARPS": 8, "_TILE": 8192},
    "2048 values, 1024 programs": {"_TILE": 2048, "_PROGRAMS": 1024},
}


def norm_calls(norm: Norm, batch: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Forward and backward pass of the two kernels each, on inputs of their own."""
    shape = (3 * batch, norm.channels, norm.side, norm.side)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x, residual, grad, skip = (
        torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last) for _ in range(4)
    )
    module = nn.BatchNorm2d(norm.channels).to(device)
    plan = fused._plan_launch(x, (batch, 2 * batch))
    added = residual if norm.residual else None
    total, mean, var = fused._moments(x, added, module, plan)

    def forward() -> None:
        found = fused._moments(x, added, module, plan)
        fused._apply(*found, module, plan)

    def backward() -> None:
        context = SimpleNamespace(
            saved_tensors=(total, mean, var, module.weight.detach(), module.bias.detach()),
            norm=module, has_residual=norm.residual, plan=plan,
        )  # fmt: skip
        fused._FusedNormReLU.backward(context, skip if norm.skip else None, grad)

    return {"forward": forward, "backward": backward}


def try_norm(norm: Norm, batch: int, launch: str, copies: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of both passes; with 0 copies they are only compiled."""
    row: dict[str, Any] = {**asdict(norm), "batch": 3 * batch, "launch": launch}
    moved = {"forward": 5 if norm.residual else 3, "backward": 6 if norm.skip else 5}  # tensors read or written
    try:
        with ExitStack() as stack, torch.no_grad():
            for name, value in LAUNCHES[launch].items():
                stack.enter_context(mock.patch.object(fused, name, value))
            sets = [norm_calls(norm, batch, device) for _ in range(max(1, copies))]
            for what in PASSES:
                calls = [some[what] for some in sets]
                calls[0]()
                wait(device)
                if copies:
                    ms = timed(lambda i: calls[i](), copies, device)  # noqa: B023
                    gb = moved[what] * 2 * 3 * batch * norm.channels * norm.side**2 / 1e9
                    row[what] = {"ms": ms, "tb_s": gb / ms}
    except Exception as error:  # of Triton's compiler, say
        row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
    return row


def norms_alone(norms: Counter[Norm], batch: int, device: torch.device) -> list[dict[str, Any]]:
    if not (fused.kernels is not None and (device.type == "cuda" or fused.kernels.INTERPRETED)):
        return [{"error": "no Triton, or no card"}]
    wanted = [norm for norm, number in norms.items() if number > 1]
    jobs = [(norm, launch) for launch in LAUNCHES for norm in wanted]
    if device.type == "cuda":
        with in_parallel() as pool:
            for job in [pool.submit(try_norm, norm, batch, launch, 0, device) for norm, launch in jobs]:
                job.result()  # errors are in rows, and come again below
    copies = 3 if device.type == "cuda" else 1
    return [try_norm(norm, batch, launch, copies, device) for norm, launch in jobs]


def in_parallel() -> ProcessPoolExecutor:
    """Processes that compile what is timed later: compiled kernels stay on the disk."""
    return ProcessPoolExecutor(min(12, os.cpu_count() or 1), mp_context=multiprocessing.get_context("spawn"))


# --- Triton ---------------------------------------------------------------------------------------------------------


def by_triton(convs: Counter[Conv], batch: int, limit: float, device: torch.device) -> list[dict[str, Any]]:
    """3x3 convolutions of stride 1 as matrix products, each with several tiles."""
    import implicit_gemm

    if not implicit_gemm.usable(device):
        return [{"error": "no Triton, or no card"}]
    large = sorted(convs, key=lambda conv: -convs[conv] * conv.gflop(1))
    wanted = [conv for conv in large if (conv.size, conv.stride) == (3, 1) and conv.inputs % 16 == 0][:3]
    passes = ("forward", "dgrad", "wgrad")
    if device.type == "cuda":
        jobs = [
            (what, conv.inputs, conv.outputs, conv.side, tiles)
            for what in passes for conv in wanted for tiles in implicit_gemm.tilings(what, conv.inputs, conv.outputs)
        ]  # fmt: skip
        with in_parallel() as pool:
            list(pool.map(implicit_gemm.compile_one, jobs))  # errors come again below
    end = time.perf_counter() + limit
    rows: list[dict[str, Any]] = []
    for what in passes:
        for conv in wanted:
            sets = input_sets(conv, 3 * batch, device)
            expected = computed(conv, what, *sets[0]).float()
            for tiles in implicit_gemm.tilings(what, conv.inputs, conv.outputs):
                row = {"conv": str(conv), "what": what, "batch": 3 * batch, "tiles": tiles}
                rows.append(row)
                if time.perf_counter() > end:
                    row["error"] = "no time left"
                    continue
                try:
                    start = time.perf_counter()
                    out = implicit_gemm.compute(what, *sets[0], tiles)
                    wait(device)
                    row["compile_s"] = time.perf_counter() - start
                    row["difference"] = float((out.float() - expected).norm() / expected.norm())
                    if not row["difference"] < 1e-3:  # another order of the same sums: up to 5e-4
                        row["error"] = "not the same result"
                        continue
                    row["ms"] = timed(lambda i: implicit_gemm.compute(what, *sets[i], tiles), len(sets), device)  # noqa: B023
                    row["tflops"] = conv.gflop(3 * batch) / row["ms"]
                except Exception as error:  # of Triton's compiler, say: registers, shared memory
                    row["error"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
    return rows


# --- whole steps ----------------------------------------------------------------------------------------------------


def step_ms(network: str, batch: int, device: torch.device, search: bool, deterministic: bool) -> dict[str, float]:
    """Milliseconds of a step as trained, but for how cuDNN chooses."""

    def choice(_: torch.device) -> Any:
        return flags(Trial(Conv(0, 0, 0, 1, 0), "", 0, deterministic), search)

    with (
        mock.patch("crosel.training.devices.deterministic_cudnn", choice),
        mock.patch("crosel.training.step.deterministic_cudnn", choice),
    ):
        return step_here(network, batch, device)


def step_here(network: str, batch: int, device: torch.device) -> dict[str, float]:
    steps = Steps(open_session(images(None, 50 * batch), network, batch, "crosel", FAST, device))
    start = time.perf_counter()
    turns, repeats = (6, 20) if device.type == "cuda" else (1, 1)
    for i in range(turns):  # choice of kernels, compilation, recording
        steps(i)
    wait(device)
    first = time.perf_counter() - start
    return {"first_steps_s": first, "ms": statistics.median(1e3 * seconds(steps, device, repeats) for _ in range(3))}


def faster_by_triton(convs: Counter[Conv], batch: int, result: dict[str, Any]) -> dict[Conv, dict[str, dict[str, int]]]:
    """The tiles of each convolution for what Triton computes faster than cuDNN's first choice; all that ran, if nothing
    of cuDNN was timed."""
    plans: dict[Conv, dict[str, dict[str, int]]] = {}
    for conv in convs:
        for what in ("forward", "dgrad", "wgrad"):
            rows = [r for r in result.get("triton", []) if "ms" in r and (r["conv"], r["what"]) == (str(conv), what)]
            now = {"padded": 1, "deterministic": True, "chosen_by": "first choice"}
            limit = best(result.get("convolutions", []), conv, what, 3 * batch, **now)
            if rows and (limit is None or min(row["ms"] for row in rows) < limit):
                plans.setdefault(conv, {})[what] = min(rows, key=lambda row: row["ms"])["tiles"]
    return plans


def with_triton(plans: dict[Conv, dict[str, dict[str, int]]]) -> Any:
    """Convolutions go by their plans inside this block."""
    import implicit_gemm

    usual = Conv3x3.forward

    def forward(self: Conv3x3, x: Tensor) -> Tensor:
        plan = plans.get(Conv(self.in_channels, self.out_channels, self.kernel_size[0], self.stride[0], x.shape[2]))
        if plan is None or not x.is_contiguous(memory_format=torch.channels_last):
            return usual(self, x)
        weight = shared_cast(self.weight)
        if x.dtype != weight.dtype or not weight.is_contiguous(memory_format=torch.channels_last):
            raise UserError(f"a weight is {weight.dtype}, {weight.stride()}, and its input {x.dtype}")
        return implicit_gemm.Convolution.apply(x, weight, plan)

    return mock.patch.object(Conv3x3, "forward", forward)


def whole_steps(
    network: str, batch: int, convs: Counter[Conv], result: dict[str, Any], device: torch.device
) -> dict[str, Any]:
    out: dict[str, Any] = {"as trained": step_here(network, batch, device)}
    plans = faster_by_triton(convs, batch, result)
    if plans:
        try:
            with with_triton(plans):
                out["Triton where faster"] = step_here(network, batch, device)
        except Exception as error:
            out["Triton where faster"] = str(error)
        out["plans"] = {str(conv): plan for conv, plan in plans.items()}
    with mock.patch.object(fused, "_LAST_FIRST", False):
        out["batch norm's rows in order"] = step_here(network, batch, device)
    out["as trained, again"] = step_here(network, batch, device)
    case = (network, batch, device)
    out["heuristic B"] = elsewhere(step_ms, *case, False, True, environment=HEURISTIC_B)
    out["first choice, not deterministic"] = elsewhere(step_ms, *case, False, False)
    out["search"] = elsewhere(step_ms, *case, True, True)
    return out


# --- what follows ---------------------------------------------------------------------------------------------------


def best(rows: Iterable[dict[str, Any]], conv: Conv, what: str, batch: int, **fixed: Any) -> float | None:
    """Milliseconds of the fastest that fits."""
    asked = {"conv": str(conv), "what": what, "batch": batch, **fixed}
    fitting = [row["ms"] for row in rows if "ms" in row and all(row.get(k) == v for k, v in asked.items())]
    return min(fitting, default=None)


def predicted(convs: Counter[Conv], batch: int, result: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of both networks' convolutions in a step: as they are, and with the best of several choices. A use
    for which a choice was not timed counts as it is."""
    by_cudnn, by_triton = result.get("convolutions", []), result.get("triton", [])
    now: dict[str, Any] = {"padded": 1, "deterministic": True, "chosen_by": "first choice"}
    same: dict[str, Any] = {"padded": 1, "deterministic": True}
    choices: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "as it is": (by_cudnn, now),
        "first choice, not deterministic": (by_cudnn, now | {"deterministic": False}),
        "heuristic B": (by_cudnn, same | {"chosen_by": "heuristic B"}),
        "search": (by_cudnn, same | {"chosen_by": "search"}),
        "search, not deterministic": (by_cudnn, same | {"chosen_by": "search", "deterministic": False}),
        "padded to 64": (by_cudnn, now | {"padded": 64}),
        "padded to 128": (by_cudnn, now | {"padded": 128}),
        "the best of cuDNN": (by_cudnn, {}),
        "the best of Triton": (by_triton, {}),
        "the best of all": (by_cudnn + by_triton, {}),
    }
    out: dict[str, Any] = {}
    for choice, (rows, fixed) in choices.items():
        total = 0.0
        for conv, number in convs.items():
            for what, size in uses(conv, batch):
                as_is = best(by_cudnn, conv, what, size, **now)
                found = best(rows, conv, what, size, **fixed)
                total += 2 * number * (found or as_is or 0.0)
        out[choice] = total
    steps = result.get("profile", {}).get("lanes", {}).get("groups")
    if steps:
        rest = sum(row["ms"] for group, row in steps.items() if not group.startswith("convolution"))
        out["all other kernels, one after the other"] = rest
        out["floor of the batch-norm kernels"] = sum(result["norm_gb"].values()) / result["copy_tb_s"]
    out["floor of the convolutions"] = (
        sum(2 * number * conv.gflop(size) for conv, number in convs.items() for _, size in uses(conv, batch))
        / result["matrix_tflops"]
    )
    return out


def table(result: dict[str, Any]) -> Iterator[str]:
    """The most important rows."""
    ceiling, copies = result["matrix_tflops"], result["copy_tb_s"]
    yield f"{result['network']} batch {result['batch']}: {ceiling:.0f} TFLOP/s, {copies:.2f} TB/s on {result['device']}"
    for form in ("as trained", "lanes"):
        found = result.get("profile", {}).get(form)
        if not found:
            continue
        yield f"  {form}: {found['ms']:.2f} ms a step of both networks"
        if "groups" in found:
            running = ", ".join(f"{number}: {ms:.2f}" for number, ms in found["at_once_ms"].items())
            yield (
                f"    in the profile {found['span_ms']:.2f} ms, busy {found['busy_ms']:.2f}, sum of kernels "
                f"{found['sum_ms']:.2f}, {found['kernels']:.0f} kernels; ms with so many at once: {running}"
            )
            for group, row in found["groups"].items():
                gb = result["norm_gb"].get(group)
                floor = f", {gb:.1f} GB, {gb / row['ms']:.2f} TB/s" if gb else ""
                yield f"    {group:32s} {row['ms']:7.3f} ms {row['count']:6.0f} kernels {row['mean_us']:8.1f} us{floor}"
    ways: dict[tuple[str, str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for row in result.get("convolutions", []) + result.get("triton", []):
        if "ms" in row:
            known = ways[row["conv"], row["what"], row["batch"]]
            if row["ms"] < known.get(way(row), {"ms": float("inf")})["ms"]:
                known[way(row)] = row
    for (conv, what, batch), known in ways.items():
        first = known.get("first choice") or next(iter(known.values()))
        others = ", ".join(f"{name} {row['ms'] * 1e3:.0f}" for name, row in known.items() if row is not first)
        names = " + ".join(short(kernel["name"]) for kernel in first.get("kernels", []))
        yield (
            f"  {conv:20s} {what:7s} {batch:3d} {first['ms'] * 1e3:6.0f} us {first['tflops']:4.0f} TFLOP/s "
            f"{first['tflops'] / ceiling:4.0%} {way(first)} {names}{'; us: ' if others else ''}{others}"
        )
    for row in result.get("norms", []):
        if "backward" in row:
            rates = ", ".join(f"{what} {row[what]['ms'] * 1e3:.0f} us {row[what]['tb_s']:.2f} TB/s" for what in PASSES)
            added = " sum" if row["residual"] else ""
            yield f"  norm {row['channels']} at {row['side']}{added}: {rates}, {row['launch']}"
    for form, found in result.get("steps", {}).items():
        if form != "plans":
            said = found if isinstance(found, str) else f"{found['ms']:.2f} ms, first {found['first_steps_s']:.0f} s"
            yield f"  a step of both networks, {form}: {said}"
    failed = Counter(row["error"] for part in PARTS[1:4] for row in result.get(part, []) if "error" in row)
    yield from (f"  {part}: {result[f'{part}_error'].splitlines()[-1]}" for part in PARTS if f"{part}_error" in result)
    yield from (f"  {number} failed: {error}" for error, number in failed.most_common(5))
    yield from (f"  {what}: {ms:.2f} ms" for what, ms in result.get("convolutions of a step", {}).items())


def way(row: dict[str, Any]) -> str:
    """How a row of a convolution was computed."""
    if "tiles" in row:
        return "Triton"
    return (
        row["chosen_by"] + ("" if row["deterministic"] else " free") + (f" pad {row['padded']}" * (row["padded"] > 1))
    )


def short(name: str) -> str:
    """A kernel's name without what all of them have."""
    kept = re.sub(
        r"bf16bf16_bf16f32_f32_|_execute\w*|_kernel\w*|nhwckrsc_nhwc_|void |cutlass__5x_cudnn::|\(.*", "", name
    )
    return kept if len(kept) < 60 else f"{kept[:40]}…{kept[-18:]}"


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--case", default="wrn-34-10 64", help="network and batch size, as in 'wrn-34-10 64'")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=";".join(PARTS), help=f"some of {';'.join(PARTS)}")
    parser.add_argument("--seconds", type=count, default=60, help="for the convolutions, and as many for Triton's")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    network, _, batch = options.case.partition(" ")
    parts = chosen(options.parts, PARTS, "--parts")
    if not (batch.isascii() and batch.isdecimal() and int(batch) > 1):
        raise UserError(f"--case {options.case}: write a network and a batch size, as in 'wrn-34-10 64'")
    device = pick_device(options.device)
    data = images(None, 50 * int(batch))
    session = open_session(data, network, int(batch), "crosel", FAST, device)
    first = session.method.networks[0]
    if not isinstance(first, ResidualNetwork):
        raise UserError(f"--case {options.case}: the network must be one of wrn-DEPTH-WIDTH and resnet-18")
    convs, norms = layers(first, device)
    del session, first
    free(device)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores",
        "network": network, "batch": int(batch),
        "cudnn": torch.backends.cudnn.version(),
        "matrix_tflops": matrix_rate(device), "copy_tb_s": copy_rate(device),
        "layers": {str(conv): number for conv, number in convs.items()},
        "norm_gb": norm_bytes(norms, int(batch)),
    }  # fmt: skip
    for part in parts:
        start = time.perf_counter()
        case = (int(batch), device)
        try:
            if part == "profile":
                result[part] = profiled_steps(data, network, *case)
            elif part == "convolutions":
                result[part] = convolutions(convs, int(batch), options.seconds, device)
            elif part == "norms":
                result[part] = elsewhere(norms_alone, norms, *case)
            elif part == "triton":
                result[part] = elsewhere(by_triton, convs, int(batch), options.seconds, device)
            else:
                result[part] = whole_steps(network, int(batch), convs, result, device)
        except Exception as error:  # the other parts are worth having without it
            result[f"{part}_error"] = "".join(traceback.format_exception(error))
        if isinstance(result.get(part), str):
            result[f"{part}_error"] = result.pop(part)
        free(device)
        result[f"{part}_s"] = time.perf_counter() - start
        print(f"{part}: {result[f'{part}_s']:.0f} s", flush=True)
        save(result, options.out)
    result["matrix_tflops_at_the_end"] = matrix_rate(device)
    result["convolutions of a step"] = predicted(convs, int(batch), result)
    save(result, options.out)
    print("\n".join(table(result)), flush=True)


if __name__ == "__main__":
    end_with(main)
