"""What keeps a GPU busy: networks side by side on streams of their own, and work replayed as CUDA graphs. And how to
tell that memory has run out, there or on the host.

pool = StreamPool(device)
for v, network in enumerate(networks):
    with pool.stream(v):
        losses.append(f(network))
pool.join()
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from crosel.errors import UserError

_streams: dict[tuple[torch.device, int], Any] = {}


class StreamPool:
    """Side by side: the two networks of a step do not depend on each other, and neither fills the card alone.

    Stream 0 is the current one; every other is a side stream that begins where the pool was made. Autograd runs each
    backward pass on the stream of its forward pass. On any other device a stream is nothing at all.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: dict[int, Any] = {}
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._start = self._main.record_event()

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        if self._device.type != "cuda" or number == 0:
            yield
            return
        key = (self._device, number)
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side = self._used[number] = _streams[key]
        side.wait_event(self._start)
        with torch.cuda.stream(side):
            yield

    def join(self) -> None:
        """What comes next waits for every side stream."""
        for side in self._used.values():
            self._main.wait_stream(side)


@contextmanager
def rejoin_streams() -> Iterator[None]:
    """Around a capture: if it fails, no side stream stays in it. Without that the capture could not even be ended, and
    torch's memory would stay with it for good."""
    try:
        yield
    except BaseException:
        main = torch.cuda.current_stream()
        for side in _streams.values():
            with torch.cuda.stream(side):
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:
                main.wait_stream(side)
        raise


def capture(work: Callable[[], object], generator: torch.Generator | None = None, exclusive: bool = True) -> Any:
    """Capture `work`, which must have run before: kernels are compiled and chosen outside. Returns what has `replay`.

    `exclusive`: other threads must leave the card be meanwhile, as those of the backward pass may be part of it.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    outside = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global" if exclusive else "thread_local"), rejoin_streams():
            work()
    except BaseException as error:
        torch.cuda.set_stream(outside)  # where a capture cannot be ended, torch stays in its stream
        reason = _capture_error(error)
        if reason:
            raise UserError(
                "the network or the method does something that cannot be recorded, such as .item() or a copy to "
                f"the host ({reason}); use --set train.cuda_graphs=false"
            ) from error
        raise
    return graph


def _capture_error(error: BaseException) -> str | None:
    """The first line of what CUDA said of the capture; None where the fault is another one."""
    first: BaseException = error
    while first.__context__ is not None:  # that a capture could not be ended is said last
        first = first.__context__
    lines = str(first).splitlines()
    return lines[0] if isinstance(first, RuntimeError) and lines and "captur" in lines[0].lower() else None


class GraphedForward:
    """Outputs of inputs on the device, without gradient. With `use_graph`, chunks like the first of so many rows are
    captured once and replayed.

    The weights stay where they are when they are trained, restored or averaged, so one capture serves all epochs.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], rows: int, use_graph: bool) -> None:
        self.run, self.rows, self.use_graph = run, rows, use_graph
        self._inputs: Tensor | None = None  # what the graph reads
        self._outputs = torch.empty(0)  # where it writes
        self._graph: Any = None
        self._lock = threading.Lock()  # a graph has one place for inputs and one for outputs

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        if not self.use_graph or len(x) != self.rows:
            return self.run(x)
        with self._lock:
            return self._full_chunk(x)

    def _full_chunk(self, x: Tensor) -> Tensor:
        if self._inputs is None:  # once as it is: kernels are compiled and chosen outside the capture
            self._inputs = torch.empty_like(x)
            return self.run(x)
        if x.shape != self._inputs.shape or x.dtype != self._inputs.dtype:
            return self.run(x)
        self._inputs.copy_(x)
        if self._graph is None:
            self._graph = self._capture(self._inputs)
        self._graph.replay()
        return self._outputs.clone()

    def _capture(self, inputs: Tensor) -> Any:
        def run() -> None:
            self._outputs = self.run(inputs)

        return capture(run, exclusive=False)  # a checkpoint's writer may be at work


# --- out of memory --------------------------------------------------------------------------------------------------

# How torch says it in a RuntimeError: on a CPU; in a recording; by cuBLAS and cuDNN, which want memory of their own.
_OUT_OF = ("can't allocate memory", "out of memory", "_ALLOC_FAILED", "unable to find an engine")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is about memory, or was raised while such an error was handled: a capture that cannot be ended."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def free_frames(error: BaseException | None) -> None:
    """Release the tensors that the failed calls held: keeping the error must not keep the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
