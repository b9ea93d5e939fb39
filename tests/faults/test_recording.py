"""What is said where a step or a pass cannot be recorded, with something in place of CUDA's recording."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from _on_a_gpu import NEEDS_GPU, RECORDED, session_of

from crosel.errors import UserError
from crosel.nn import cuda
from crosel.nn.cuda import capture
from crosel.training.trainer import fit

FORBIDDEN = "CUDA error: operation not permitted when stream is capturing\nCUDA kernel errors might be …"
NOT_ENDED = "CUDA error: operation failed due to a previous error during capture"


class Graph:
    generator: Any = None

    def register_generator_state(self, generator: torch.Generator) -> None:
        self.generator = generator


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A card that records, as far as the host sees; the streams that were set, one after the other."""
    seen: list[str] = []

    @contextmanager
    def graph(_: Graph, capture_error_mode: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError:
            raise RuntimeError(NOT_ENDED)  # noqa: B904  (as torch does: the first error is its context)
        seen.append(capture_error_mode)

    for name, value in {
        "CUDAGraph": Graph, "graph": graph, "synchronize": lambda: None, "current_stream": lambda: "outside",
        "set_stream": seen.append,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "_streams", {})  # on a real card, those of tests that ran before
    return seen


def failing(message: str) -> Any:
    def work() -> None:
        raise RuntimeError(message)

    return work


def test_what_is_recorded_runs_once_with_its_generator(streams: list[str]) -> None:
    ran: list[int] = []
    generator = torch.Generator()
    assert capture(lambda: ran.append(1), generator).generator is generator
    assert capture(lambda: ran.append(2), exclusive=False).generator is None
    assert (ran, streams) == ([1, 2], ["global", "thread_local"])


def test_what_cannot_be_recorded_is_told_in_one_line(streams: list[str]) -> None:
    with pytest.raises(
        UserError, match=r"\.item\(\).*not permitted when stream is capturing\).*train.cuda_graphs=false"
    ) as told:
        capture(failing(FORBIDDEN))
    assert "\n" not in str(told.value)
    assert streams == ["outside"], "later work goes where it went before"


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried to allocate 2 GiB", "size mismatch", ""])
def test_other_faults_stay_what_they_are(message: str, streams: list[str]) -> None:
    with pytest.raises(RuntimeError, match="previous error during capture") as told:
        capture(failing(message))
    assert not isinstance(told.value, UserError)
    assert str(told.value.__context__) == message
    assert streams == ["outside"]


@NEEDS_GPU
@pytest.mark.parametrize("training", [True, False])
def test_a_network_that_looks_at_its_outputs_on_a_gpu(training: bool) -> None:
    """In steps, or in the passes only."""
    session = session_of("cc", RECORDED, "train.eval_batch_size=48")
    network = session.method.networks[0]

    def looks(module: torch.nn.Module, _: Any, out: torch.Tensor) -> None:
        if module.training is training:
            out.sum().item()

    network.register_forward_hook(looks)
    with pytest.raises(UserError, match=r"train\.cuda_graphs=false"):
        fit(session)
