"""Passes that are recorded, with something in place of CUDA's recording: which chunks are replayed, and whose outputs
come back. What a card records is the business of test_on_a_gpu.py."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from _sessions import make_session
from torch import Tensor

from crosel.errors import UserError
from crosel.nn.cuda import GraphedForward
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import predict_chunks

ROWS = 4


class Recording:
    """Like a CUDA graph: reads and writes the same memory each time, and takes its time."""

    def __init__(self, forward: GraphedForward, inputs: Tensor) -> None:
        self.inputs, self.outputs, self.replays = inputs, forward._outputs, 0

    def replay(self) -> None:
        time.sleep(0.001)
        self.outputs.copy_(double(self.inputs))
        time.sleep(0.001)
        self.replays += 1


class Recorded(GraphedForward):
    def _capture(self, inputs: Tensor) -> Any:
        self._outputs = torch.zeros(2, len(inputs))
        return Recording(self, inputs)


def double(x: Tensor) -> Tensor:
    return torch.stack([2 * x.float().sum(dim=1), x.float().sum(dim=1)])


def chunk(value: float, rows: int = ROWS, width: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows, width), value, dtype=dtype)


def test_full_chunks_are_replayed_from_the_second_on() -> None:
    forward = Recorded(double, ROWS, True)
    outputs = [forward(chunk(i)) for i in range(5)]
    assert [float(out[0, 0]) for out in outputs] == [0, 6, 12, 18, 24], "no outputs are written over by later ones"
    assert forward._graph.replays == 4


@pytest.mark.parametrize(
    "other", [chunk(7, rows=3), chunk(7, rows=5), chunk(7, width=2), chunk(7, dtype=torch.uint8), chunk(7, rows=0)]
)
def test_what_is_not_like_the_first_is_computed_as_it_is(other: Tensor) -> None:
    forward = Recorded(double, ROWS, True)
    for i in range(3):
        forward(chunk(i))
    assert forward(other).equal(double(other))
    assert forward._graph.replays == 2
    assert forward(chunk(9)).equal(double(chunk(9)))


def test_nothing_is_recorded_unless_asked_for() -> None:
    forward = Recorded(double, ROWS, False)
    assert [float(forward(chunk(i))[1, 0]) for i in range(3)] == [0, 3, 6]
    assert forward._graph is None


def test_after_a_recording_that_failed_the_next_one_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Recorded(double, ROWS, True)
    forward(chunk(1))

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Recorded, "_capture", fail)
        with pytest.raises(torch.OutOfMemoryError):
            forward(chunk(2))
    assert forward(chunk(3)).equal(double(chunk(3)))


def test_each_thread_gets_its_own_outputs() -> None:
    forward = Recorded(double, ROWS, True)
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda i: forward(chunk(i)), range(64)))
    assert [float(out[1, 0]) for out in outputs] == [3 * i for i in range(64)]


@pytest.fixture
def _no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_a_session_that_predicted_is_gone_when_nobody_holds_it() -> None:
    """With all its memory, on a card: the garbage collector may take its time."""
    session: Session = make_session("cc")
    assert len(list(predict_chunks(session, session.data.x))) >= 1
    held = weakref.ref(session), weakref.ref(session.method)
    del session
    assert [ref() for ref in held] == [None, None]


def test_a_named_card_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else steps would be recorded on one card and run on another."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert pick_device("cuda") == torch.device("cuda")
    assert current == [1]
    for name in ("cuda:2", "cuda:", "cuda:x", "cuda:-1"):
        with pytest.raises(UserError, match=f"there is no device '{name}'; torch finds 2: cuda:0 to cuda:1"):
            pick_device(name)
    assert current == [1]
