"""Side by side on one GPU: the two networks of a step do not depend on each other, and neither fills the card alone.

    lanes = Lanes(device)
    for v, network in enumerate(networks):
        with lanes.lane(v):
            losses.append(f(network))
    lanes.join()

Lane 0 is the stream at hand, every other lane a stream of its own that begins where the lanes were made. Autograd
runs each backward pass in the lane of its forward pass. On any other device a lane is nothing at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_streams: dict[tuple[torch.device, int], Any] = {}


class Lanes:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._used: dict[int, Any] = {}
        if device.type == "cuda":
            self._main = torch.cuda.current_stream(device)
            self._start = self._main.record_event()

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        if self._device.type != "cuda" or number == 0:
            yield
            return
        key = (self._device, number)
        if key not in _streams:
            _streams[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._used[number] = _streams[key]
        stream.wait_event(self._start)
        with torch.cuda.stream(stream):
            yield

    def join(self) -> None:
        """What comes next waits for every lane."""
        for stream in self._used.values():
            self._main.wait_stream(stream)


@contextmanager
def back_together() -> Iterator[None]:
    """Around what is recorded: if it fails, no lane stays astray. Without that the recording could not even be ended,
    and torch's memory would stay with it for good."""
    try:
        yield
    except BaseException:
        main = torch.cuda.current_stream()
        for stream in _streams.values():
            with torch.cuda.stream(stream):
                astray = torch.cuda.is_current_stream_capturing()
            if astray:
                main.wait_stream(stream)
        raise
