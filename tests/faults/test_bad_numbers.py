"""Numbers that go wrong: losses and weights that are not finite, and data at the edge of what makes sense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _runs import checkpoints, metrics
from _sessions import NAMES, bits, different, make_session, small_data
from _support import CroselCli, small_arrays

from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import Diverged
from crosel.methods.base import Losses
from crosel.training.session import Session
from crosel.training.step import FINITE_STEPS, SKIPPED_BATCHES, divergence_error, mean_losses
from crosel.training.trainer import draw_epoch, fit

STEPS = 3  # 96 examples in batches of 32


def spoil(session: Session, calls: set[int], value: float = float("nan")) -> None:
    """Make the loss of these steps (from 0, over all epochs) useless, gradients included."""
    real, count = session.method.loss, 0

    def loss(batches: Mapping[str, Any], generator: torch.Generator) -> Losses:
        nonlocal count
        losses = real(batches, generator)
        count += 1
        if count - 1 not in calls:
            return losses
        return Losses(losses.objective * value, {**losses.report, "loss": losses.report["loss"] * value})

    session.method.loss = loss  # type: ignore[method-assign]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_loss_stops_with_step_ids_and_cause(name: str, value: float) -> None:
    data = replace(small_data(), ids=tuple(f"pic-{i}" for i in range(96)))
    session = make_session(name, "train.log_every=1000", data=data)
    spoil(session, {STEPS + 1}, value)
    saved: list[int] = []

    class Saver:
        def on_step(self, *args: Any) -> None: ...
        def on_epoch(self, *args: Any) -> None: ...
        def on_checkpoint(self, session: Session) -> None:
            saved.append(session.progress.epoch)

    with pytest.raises(Diverged) as caught:
        fit(session, (Saver(),))
    text = str(caught.value)
    assert text.startswith("the loss is no longer finite (NaN or infinite) at step 2 of 3 of epoch 2; ")
    assert "Likely cause: a learning rate that is too high; lower train.lr (0.05)" in text
    assert "train.bad_batches=skip" in text
    assert saved == [1], "no state after the last good one"
    looked_at = torch.unique(torch.cat([table[1] for table in session.epoch_indices.values()])).tolist()
    assert caught.value.ids == tuple(f"pic-{i}" for i in looked_at)
    assert f"Examples in the batch: pic-{looked_at[0]}, pic-{looked_at[1]}, " in text
    assert text.endswith(f"and {len(looked_at) - 5} more")
    assert "\n" not in text


class Shown:
    """What is shown of the steps, and after how many steps it is."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, float]] = []
        self.taken: list[int] = []

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        self.seen.append((epoch, step, loss))
        self.taken.append(session.progress.step)

    def on_epoch(self, *args: Any) -> None: ...
    def on_checkpoint(self, *args: Any) -> None: ...


@pytest.mark.parametrize("bad_batches", ["stop", "skip"])
def test_looks_that_are_read_late_show_the_same(bad_batches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: each look is read at the next one, the last of an epoch at once."""
    shown = {}
    for late in (False, True):
        monkeypatch.setattr("crosel.training.trainer.reads_with_delay", lambda device, late=late: late)
        shown[late] = Shown()
        session = make_session("cc", "train.log_every=1", f"train.bad_batches={bad_batches}")
        if bad_batches == "skip":
            spoil(session, {1})
        fit(session, (shown[late],))
    assert shown[True].seen == shown[False].seen
    assert [step for _, step, _ in shown[True].seen] == [1, 2, 3] * 3
    assert shown[False].taken == [1, 2, 3] * 3
    assert shown[True].taken == [2, 3, 3] * 3


def test_a_bad_loss_that_is_read_late_is_of_the_step_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crosel.training.trainer.reads_with_delay", lambda device: True)
    session, shown = make_session("crosel", "train.log_every=1"), Shown()
    spoil(session, {STEPS})
    with pytest.raises(Diverged, match="at step 1 of 3 of epoch 2; "):
        fit(session, (shown,))
    assert session.progress.step == 2, "one step later"
    assert [(epoch, step) for epoch, step, _ in shown.seen] == [(1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(("name", "optimiser"), [*((name, "sgd") for name in NAMES), ("crosel", "adam")])
def test_a_skipped_batch_leaves_no_trace_but_a_count(name: str, optimiser: str) -> None:
    settings = ("train.bad_batches=skip", "train.log_every=1", "train.ema_decay=0.9", f"train.optimiser={optimiser}")
    session = make_session(name, *settings)
    fit(make_session(name, "train.bad_batches=skip"))
    states: list[dict[str, bytes]] = []

    class Watch:
        def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
            assert np.isfinite(loss) or (epoch, step) == (1, 1)
            states.append(bits(session))

        def on_epoch(self, *args: Any) -> None: ...
        def on_checkpoint(self, *args: Any) -> None: ...

    spoil(session, {0, 4, 5})
    rows = fit(session, (Watch(),))
    assert [row["skipped_batches"] for row in rows] == [1, 2, 0]
    assert all(np.isfinite(row["loss"]) for row in rows)
    moved = [name for name in different(states[3], states[4]) if not name.startswith(("sums", "generator"))]
    assert moved == [], "the fifth step was undone, momentum and tables included"
    assert any(n.startswith("method.networks") for n in different(states[4], states[6])), "and the seventh was not"


def test_skipping_changes_nothing_where_nothing_is_skipped() -> None:
    for name in NAMES:
        average = "train.ema_decay=0.9"
        plain, skipping = make_session(name, average), make_session(name, average, "train.bad_batches=skip")
        rows, others = fit(plain), fit(skipping)
        assert different(bits(plain), bits(skipping)) == []
        for row, other in zip(rows, others, strict=True):
            assert other.pop("skipped_batches") == 0
            assert row["loss"] == other["loss"]


def test_the_mean_loss_is_that_of_the_batches_that_count() -> None:
    session = make_session("cc", "train.bad_batches=skip")
    session.progress.sums |= {"loss": torch.tensor(6.0), SKIPPED_BATCHES: torch.tensor(1.0)}
    assert mean_losses(session, 1) == {"loss": 6.0 / (STEPS - 1), SKIPPED_BATCHES: 1}
    session = make_session("cc")
    session.progress.sums |= {"loss": torch.tensor(6.0), FINITE_STEPS: torch.tensor(3.0)}
    assert mean_losses(session, 1) == {"loss": 6.0 / STEPS}


@pytest.mark.parametrize(("good", "named"), [(None, 2), (0, 1), (1, 2), (2, 2)])
def test_the_step_that_is_named_is_the_first_bad_one(good: int | None, named: int) -> None:
    """The last one where no loss was bad, but what the steps made of the weights."""
    session = make_session("cc")
    session.epoch_indices, session.progress.step = {"all": torch.arange(96).view(3, 32)}, 2
    session.progress.sums |= {} if good is None else {FINITE_STEPS: torch.tensor(float(good))}
    first = 32 * (named - 1)
    said = str(divergence_error(session, 1, "the loss is nan"))
    assert f"at step {named} of 3 of epoch 1" in said
    assert f"Examples in the batch: {first}, {first + 1}, " in said


def test_an_epoch_in_which_all_was_skipped_ends_the_run() -> None:
    session = make_session("proden", "train.bad_batches=skip")
    spoil(session, {3, 4, 5})
    with pytest.raises(Diverged, match="none of the 3 batches of epoch 2 had a finite loss: all were skipped"):
        fit(session)


@pytest.mark.parametrize("where", ["gradient", "weight", "table"])
def test_overflow_that_the_loss_does_not_show_is_undone(where: str) -> None:
    """Gradients, weights or tables that overflow while the loss itself is still finite."""
    session = make_session("proden", "train.bad_batches=skip")
    real: Callable[..., None] = session.method.after_step
    calls = 0

    def after_step(batches: Mapping[str, Any]) -> None:
        nonlocal calls
        real(batches)
        calls += 1
        if calls == 2:
            first = next(session.method.parameters())
            if where == "gradient":
                session.optimiser.state[first]["momentum_buffer"].fill_(float("inf"))
                first.data.fill_(float("nan"))
            elif where == "weight":
                first.data.view(-1)[0] = float("inf")
            else:
                next(b for b in session.method.buffers() if b.is_floating_point()).view(-1)[0] = float("-inf")

    session.method.after_step = after_step  # type: ignore[method-assign]
    rows = fit(session)
    assert [row["skipped_batches"] for row in rows] == [1, 0, 0]
    assert all(torch.isfinite(t).all() for t in session.state()[0].values() if t.is_floating_point())


def test_gradient_overflow_by_the_command_line(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    run = tmp_path / "run"
    settings = (
        "--set",
        "train.epochs=6",
        "--set",
        "train.lr=1e30",
        "--set",
        "network.width=4",
        "--set",
        "train.lr_ramp=5",
    )
    result = crosel_cli("train", image_npz, "--method", "cc", *settings, "--out", run)
    assert result.code == 2, result.err
    last = result.err.splitlines()[-1]
    assert " of epoch " in last
    assert "lower train.lr (1e+30)" in last
    told = "no epoch has been saved yet" if " of epoch 1;" in last else "the last checkpoint is intact"
    assert told in last
    assert "Traceback" not in result.err
    for path in checkpoints(run):
        from safetensors.torch import load_file

        assert all(torch.isfinite(t).all() for t in load_file(path).values() if t.is_floating_point())


def test_an_extreme_example_is_named_as_the_likely_cause() -> None:
    arrays = small_arrays(images=False)
    arrays["x"][17, 3] = 1e30
    session = make_session("cc", data=make_dataset(**arrays, classes=10))
    session.epoch_indices = {"all": torch.arange(96).view(3, 32)}
    assert "extreme values in example 17; fix or drop it" in str(divergence_error(session, 1, "the loss is nan", 0))
    assert "learning rate" in str(divergence_error(session, 1, "the loss is nan", 1))


def test_a_setting_of_the_method_that_is_extreme_is_named_beside_the_learning_rate() -> None:
    session = make_session("crosel", "method.lambda_cr=1e9", "method.temperature=0.2", "method.warmup=1")
    with pytest.raises(Diverged) as caught:
        fit(session, ())
    text = str(caught.value)
    assert "Likely cause: method.lambda_cr=1e+09, far from its default 4, or a learning rate that is too high" in text
    assert "temperature" not in text
    assert "\n" not in text
    off = make_session("crosel", "method.lambda_cr=0", "train.lr=0.05")
    off.epoch_indices = {"all": torch.arange(96).view(3, 32)}
    cause = "Likely cause: a learning rate that is too high; lower train.lr (0.05)"
    assert f"{cause} or set train.lr_ramp;" in str(divergence_error(off, 1, "the loss is nan", 0))
    ramped = make_session("crosel", "method.lambda_cr=0", "train.lr=0.05", "train.lr_ramp=2")
    ramped.epoch_indices = off.epoch_indices
    assert f"{cause}; or skip" in str(divergence_error(ramped, 1, "the loss is nan", 0))


def test_skipped_batches_go_on_after_a_stop(tmp_path: Path, crosel_cli: CroselCli, image_npz: Path) -> None:
    """The setting is part of the run, and its count a part of the metrics."""
    run = tmp_path / "run"
    command = ("train", image_npz, "--method", "lws", "--set", "train.epochs=2", "--set", "network.width=4")
    assert crosel_cli(*command, "--set", "train.bad_batches=skip", "--out", run).code == 0
    assert [row["skipped_batches"] for row in metrics(run)] == [0, 0]
    refused = crosel_cli(*command, "--out", run, "--resume")
    assert refused.code == 2
    assert "train.bad_batches was 'skip', now 'stop'" in refused.err


# --- data at the edge -----------------------------------------------------------------------------------------------


def edge(n: int = 40, k: int = 4, seed: int = 0, **changes: Any) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    y = draw.integers(k, size=n)
    sets = draw.random((n, k)) < 0.3
    sets[np.arange(n), y] = True
    x = draw.integers(0, 256, (n, 8, 8), dtype=np.uint8)
    return {"x": x, "candidates": sets, "y": y, "x_test": x[:8], "y_test": y[:8], "classes": k, **changes}


EDGES: dict[str, Callable[[], Dataset]] = {
    "constant images": lambda: make_dataset(**edge(x=np.full((40, 8, 8), 77, np.uint8))),
    "black images": lambda: make_dataset(**edge(x=np.zeros((40, 8, 8), np.uint8))),
    "constant features": lambda: make_dataset(**edge(x=np.ones((40, 5)), x_test=np.ones((8, 5)))),
    "huge features": lambda: make_dataset(**edge(x=np.eye(40, 5) * 3e38, x_test=np.ones((8, 5)))),
    "one class": lambda: make_dataset(**edge(k=1)),
    "k=2": lambda: make_dataset(**edge(k=2)),
    "k=10,000": lambda: make_dataset(**edge(n=24, k=10_000)),
    "n=1": lambda: make_dataset(**edge(n=1)),
    "n=2": lambda: make_dataset(**edge(n=2)),
    "n one above a batch": lambda: make_dataset(**edge(n=33)),
    "all sets full": lambda: make_dataset(**edge(candidates=np.ones((40, 4), bool))),
    "all singletons": lambda: make_dataset(**edge(candidates=np.eye(4, dtype=bool)[np.arange(40) % 4])),
    "one label never a candidate": lambda: make_dataset(**edge(candidates=np.eye(4, dtype=bool)[np.zeros(40, int)])),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", EDGES)
def test_edges(case: str, name: str) -> None:
    """Every method learns or stays put, with finite numbers and probabilities that are some."""
    session = make_session(name, data=EDGES[case]())
    rows = fit(session)
    assert len(rows) == 3
    assert all(np.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    assert all(torch.isfinite(t).all() for t in session.state()[0].values() if t.is_floating_point())
    session.method.eval()
    with torch.no_grad():
        p = session.method.combine(session.method.outputs(session.normalise(session.train.x[:5])))
    torch.testing.assert_close(p.sum(dim=1), torch.ones(len(p)))
    if case == "one class":
        assert rows[-1]["test_accuracy"] == 1.0
    if case == "all sets full":
        assert rows[-1]["covering_rate"] == 1.0
    assert draw_epoch(session, session.method.streams()).keys() == session.method.streams().keys()
