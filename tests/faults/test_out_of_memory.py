"""One line when memory was not enough, as torch says it; what to try depends on where it happened."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _runs import assert_same_run, metrics
from _sessions import CPU, NAMES, bits, different, make_session, small_data
from _support import CroselCli, TinyRun, small_arrays

from crosel import CroSelClassifier
from crosel.data.dataset import Dataset
from crosel.errors import Interrupted, UserError
from crosel.nn.cuda import is_out_of_memory
from crosel.training import checkpoint
from crosel.training.devices import (
    OutOfMemoryAdvice,
    advise_while_building,
    advise_while_evaluating,
    advise_while_training,
)
from crosel.training.session import Session
from crosel.training.trainer import fit


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


# --- steps in parts -------------------------------------------------------------------------------------------------


def little_memory(monkeypatch: pytest.MonkeyPatch, session: Session, most: int) -> list[int]:
    """From now on a batch of more than so many examples is too large. Returns the sizes that were tried."""
    real, sizes = type(session.method).loss, []

    def loss(self: Any, batches: Any, generator: torch.Generator) -> Any:
        sizes.append(max(len(batch.index) for batch in batches.values()))
        losses = real(self, batches, generator)
        if sizes[-1] > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return losses

    monkeypatch.setattr(type(session.method), "loss", loss)
    return sizes


PLAIN = ("network.hidden=[]", "augment.weak_feature_noise=0", "train.log_every=1")


def features() -> Dataset:
    return small_data(**{k: v for k, v in small_arrays(images=False).items() if k.startswith("x")})


def test_parts_of_a_batch_learn_what_the_whole_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole, parts = (make_session("cc", *PLAIN, "train.ema_decay=0.9", data=features()) for _ in range(2))
    rows = fit(whole)
    sizes = little_memory(monkeypatch, parts, 10)
    again = fit(parts)
    assert sizes[:7] == [32, 16, 8, 8, 8, 8, 8]
    assert parts.progress.parts == 4
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "out of memory with 32 examples at once", "out of memory with 16 examples at once",
    ]  # fmt: skip
    for row, other in zip(rows, again, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=1e-5)
    for ours, theirs in zip(whole.method.parameters(), parts.method.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_learns_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session(name, "train.bad_batches=skip" if name == "cc" else "train.bad_batches=stop")
    before = [p.detach().clone() for p in session.method.parameters()]
    sizes = little_memory(monkeypatch, session, 16)
    rows = fit(session)
    assert sizes.count(32) == 1
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert any(not now.equal(old) for now, old in zip(session.method.parameters(), before, strict=True))


@pytest.mark.parametrize("scope", ["all", "unselected-once"])
def test_a_resumed_run_keeps_the_parts(scope: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    select_some = (f"method.scope={scope}", "method.warmup=1", "method.bank_length=1", "method.gamma=0.12")
    unbroken = make_session("crosel", *select_some)
    sizes = little_memory(monkeypatch, unbroken, 16)
    fit(unbroken)
    stopped, resumed = (make_session("crosel", *select_some) for _ in range(2))
    with pytest.raises(Interrupted):
        fit(stopped, (), iter([False] * 4 + [True] * 99).__next__)
    checkpoint.save(tmp_path, *stopped.state(), keep=1)
    found = checkpoint.load_newest(tmp_path).checkpoint
    assert found is not None
    sizes.clear()
    resumed.restore(found)
    fit(resumed)
    assert max(sizes) == 16
    assert different(bits(unbroken), bits(resumed)) == []


def test_without_halving_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("cc", "train.out_of_memory=stop")
    little_memory(monkeypatch, session, 16)
    with pytest.raises(UserError, match=r"out of memory with batches of 32; try --set train\.batch_size=16"):
        fit(session)


def test_what_no_part_is_small_enough_for_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("cc", *PLAIN, data=features())
    sizes = little_memory(monkeypatch, session, 1)
    with pytest.raises(UserError, match="out of memory with batches of 32"):
        fit(session)
    assert sizes == [32, 16, 8, 4, 2]


def test_a_step_whose_weights_have_moved_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    session = make_session("cc")

    def after_step(self: Any, batches: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(session.method), "after_step", after_step)
    with pytest.raises(UserError, match="out of memory with batches of 32"):
        fit(session)
    assert session.progress.parts == 1


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
