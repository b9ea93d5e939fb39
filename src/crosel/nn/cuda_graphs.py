"""CUDA graphs: work is recorded while it is sent to the card, and from then on sent as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from crosel.errors import UserError
from crosel.nn.streams import back_together


def record(work: Callable[[], object], generator: torch.Generator | None = None, alone: bool = True) -> Any:
    """Record `work`, which must have run before: kernels are compiled and chosen outside. Returns what has `replay`.

    `alone`: other threads must leave the card be while it is recorded, as those of the backward pass may be part of it.
    """
    graph = torch.cuda.CUDAGraph()
    if generator is not None:
        graph.register_generator_state(generator)
    torch.cuda.synchronize()
    outside = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="global" if alone else "thread_local"), back_together():
            work()
    except BaseException as error:
        torch.cuda.set_stream(outside)  # where a recording cannot be ended, torch stays in its stream
        reason = _what_forbids_it(error)
        if reason:
            raise UserError(
                "the network or the method does something that cannot be recorded, such as .item() or a copy to "
                f"the host ({reason}); use --set train.cuda_graphs=false"
            ) from error
        raise
    return graph


def _what_forbids_it(error: BaseException) -> str | None:
    """The first line of what CUDA said of the recording; None where the fault is another one."""
    first: BaseException = error
    while first.__context__ is not None:  # that a recording could not be ended is said last
        first = first.__context__
    lines = str(first).splitlines()
    return lines[0] if isinstance(first, RuntimeError) and lines and "captur" in lines[0].lower() else None
