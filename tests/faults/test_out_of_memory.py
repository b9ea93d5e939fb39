"""One line when memory was not enough, as torch says it; what to try depends on where it happened."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _runs import assert_same_run, metrics
from _sessions import CPU, make_session
from _support import CroselCli, TinyRun, small_arrays

from crosel import CroSelClassifier
from crosel.errors import UserError
from crosel.training.session import Session
from crosel.utils.out_of_memory import (
    OutOfMemoryAdvice,
    advise_while_building,
    advise_while_evaluating,
    advise_while_training,
    is_out_of_memory,
)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory"),
        MemoryError(),
    ],
    ids=["GPU", "GPU while recording", "CPU", "Python"],
)
def test_out_of_memory_is_one_line_with_a_batch_size(
    error: BaseException, tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from crosel.training.step import TrainStep

    run, real, calls = tmp_path / "run", TrainStep.__call__, 0

    def step(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise error
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", step)
        result = crosel_cli(*tiny_run.command, "--out", run)
    assert result.code == 2
    last = result.err.splitlines()[-1]
    assert last.startswith("crosel: out of memory with batches of 16; try --set train.batch_size=8.")
    assert "Traceback" not in result.err
    assert metrics(run) == metrics(tiny_run.path)[:1]
    assert crosel_cli("train", "--resume", "--out", run).code == 0  # with memory again the run goes on and ends as ever
    assert_same_run(run, tiny_run.path)


@pytest.mark.parametrize(
    ("data_on", "setting", "expected"),
    [
        (
            "device",
            advise_while_training,
            "out of GPU memory with batches of 32; try --set train.batch_size=16 or --set train.data_on=",
        ),
        (
            "host",
            advise_while_training,
            "out of GPU memory with batches of 32; try --set train.batch_size=16. Saved checkpoints are intact",
        ),
        (
            "host",
            advise_while_evaluating,
            "out of GPU memory with chunks of 96; try --set train.eval_batch_size=48. Saved checkpoints",
        ),
    ],
)
def test_what_to_try_depends_on_where_it_happened(
    data_on: str, setting: Callable[[Session], OutOfMemoryAdvice], expected: str
) -> None:
    session = make_session("cc", f"train.data_on={data_on}")
    session.device = torch.device("cuda")
    with pytest.raises(UserError) as caught, setting(session):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert str(caught.value).startswith(expected)
    with pytest.raises(RuntimeError, match="something else"), setting(session):
        raise RuntimeError("something else")


def test_too_large_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def outputs(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("crosel.methods.cc.CC.outputs", outputs)
    with (
        pytest.raises(UserError, match=r"out of memory for data, networks and tables; use a smaller network or fewer"),
        advise_while_building(CPU, "auto"),
    ):
        make_session("cc")


def test_a_pass_that_runs_out_names_its_own_setting(
    tmp_path: Path, tiny_run: TinyRun, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def training_pass(session: Session) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("crosel.training.trainer.training_pass", training_pass)
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run")
    assert result.code == 2
    assert "crosel: out of memory with chunks of 96; try --set train.eval_batch_size=48. " in result.err


def test_an_error_on_the_way_out_hides_nothing() -> None:
    """A recording that ran out of memory may not even be ended: torch then raises something else on top."""

    def record() -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        finally:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")

    with (
        pytest.raises(UserError, match="out of memory while trying; do less"),
        OutOfMemoryAdvice(CPU, "while trying", "do less"),
    ):
        record()
    for words in ("CUBLAS_STATUS_ALLOC_FAILED when calling", "GET was unable to find an engine to execute"):
        assert is_out_of_memory(RuntimeError(words))


def test_who_keeps_the_error_does_not_keep_the_memory() -> None:
    def large() -> None:
        tensor = torch.zeros(1000)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory")

    kept: list[Any] = []
    with pytest.raises(UserError) as caught, OutOfMemoryAdvice(CPU, "while trying", "do less"):
        large()
    assert caught.value.__context__ is not None, "the error is still there for those who look"
    assert kept[0]() is None


def test_the_estimator_says_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("crosel.training.step.TrainStep.__call__", step)
    data = small_arrays(images=False)
    with pytest.raises(UserError, match=r"out of memory with batches of 32; try --set train.batch_size=16"):
        CroSelClassifier(epochs=2, batch_size=32).fit(data["x"], data["candidates"])
