"""Averaged weights (EMA) and the batch-norm statistics that go with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import Interrupted
from crosel.estimator.model import FittedModel
from crosel.runs.folder import load_run
from crosel.runs.pipeline import train_run
from crosel.training.build import build_session, resolve
from crosel.training.checkpoint import Checkpoint
from crosel.training.ema import EmaWeights, recalibrate_batch_norm, spread_rows
from crosel.training.session import Session
from crosel.training.trainer import fit, predict_chunks

CPU = torch.device("cpu")


def made() -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(60, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    return draw_candidates(make_dataset(x, y=y, x_test=x[:20], y_test=y[:20], classes=3), "uniform:q=0.3", 0)


def session(method: str = "crosel", hidden: tuple[int, ...] = (8,), **train: float | str) -> Session:
    values = {
        "source": "made", "method": {"name": method}, "network": {"hidden": hidden, "scaling": "standard"},
        "train": {"epochs": 4, "batch_size": 16, **train},
    }  # fmt: skip
    data = made()
    return build_session(resolve(build_config(settings=[], values=values), data), data, CPU)


def test_average_follows_the_recurrence() -> None:
    network = nn.Linear(2, 2)
    average = EmaWeights(network, 0.9, CPU)
    kept, steps = network.weight.detach().double().clone(), 0
    for epoch in range(4):
        average.begin_epoch(steps)
        for _ in range(3):
            with torch.no_grad():
                network.weight.add_(torch.randn(2, 2))
            average.update()
            weight = max(1 - 0.9, 1 / (epoch * 3 + 1))
            kept += weight * (network.weight.detach().double() - kept)
        steps += 3
    torch.testing.assert_close(average.state_dict()["weight"].double(), kept, atol=1e-5, rtol=1e-5)


def test_first_epoch_forgets_the_starting_weights() -> None:
    network = nn.Linear(2, 2)
    average = EmaWeights(network, 0.999, CPU)
    average.begin_epoch(0)
    with torch.no_grad():
        network.weight.fill_(3.0)
    average.update()
    assert torch.equal(average.state_dict()["weight"], network.weight)


def test_average_stands_in_place_and_gives_the_weights_back() -> None:
    network = nn.Linear(2, 2)
    average = EmaWeights(network, 0.9, CPU)
    trained = torch.full((2, 2), 7.0)
    with torch.no_grad():
        network.weight.copy_(trained)
    kept = average.state_dict()["weight"].clone()
    with average.swapped_in():
        assert torch.equal(network.weight, kept)
        with average.swapped_in():  # once is enough
            assert torch.equal(network.weight, kept)
    assert torch.equal(network.weight, trained)


@pytest.mark.parametrize("method", ["crosel", "proden", "pico"])
def test_predictions_come_from_the_average(method: str) -> None:
    s = session(method, ema_decay=0.9)
    fit(s)
    assert s.ema is not None
    _, outputs = next(iter(predict_chunks(s, s.data.x)))
    s.method.eval()
    with torch.no_grad():
        trained = s.method.outputs(s.normalise(torch.from_numpy(s.data.x)))
        with s.ema.swapped_in():
            averaged = s.method.outputs(s.normalise(torch.from_numpy(s.data.x)))
    torch.testing.assert_close(outputs, averaged)
    assert not torch.allclose(outputs, trained)


def test_average_survives_a_checkpoint() -> None:
    s = session(ema_decay=0.9)
    fit(s)
    tensors, state = s.state()
    again = session(ema_decay=0.9)
    again.restore(Checkpoint({name: t.clone() for name, t in tensors.items()}, state))
    (_, a), (_, b) = (next(iter(predict_chunks(one, s.data.x))) for one in (s, again))
    assert torch.equal(a, b)


def test_a_finished_run_predicts_with_the_average(tmp_path: Path) -> None:
    values = {
        "source": "digits", "candidates": "uniform:q=0.3", "method": {"name": "cc"},
        "network": {"name": "mlp", "hidden": [8]}, "train": {"epochs": 2, "ema_decay": 0.9},
    }  # fmt: skip
    run = tmp_path / "run"
    trained = train_run(build_config(settings=[], values=values), run, CPU)
    opened = load_run(run, CPU)
    (_, a), (_, b) = (next(iter(predict_chunks(one, trained.data.x))) for one in (trained, opened))
    assert torch.equal(a, b)


def test_an_estimator_keeps_the_average() -> None:
    s = session("cc", ema_decay=0.9)
    fit(s)
    model = FittedModel.of(s, None, None)
    _, outputs = next(iter(predict_chunks(s, s.data.x)))
    expected = s.method.combine(outputs).numpy()
    np.testing.assert_allclose(model.probabilities(s.data.x, "cpu"), expected, atol=1e-6)


def test_recalibrated_statistics_are_those_of_the_batches() -> None:
    norm = nn.BatchNorm1d(3).eval()  # as after a pass over the test set
    norm.running_mean.fill_(100.0)
    batches = [torch.randn(8, 3) for _ in range(4)]

    def run(x: torch.Tensor) -> None:
        assert not norm(x).requires_grad, "a graph would take memory for nothing"

    found = recalibrate_batch_norm(norm, batches, run)
    assert [t.data_ptr() for t in found] == [norm.running_mean.data_ptr(), norm.running_var.data_ptr()], "in place"
    expected = torch.stack([b.mean(dim=0) for b in batches]).mean(dim=0)
    spread = torch.stack([b.var(dim=0) for b in batches]).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, expected)
    torch.testing.assert_close(norm.running_var, spread)
    assert norm.momentum == 0.1
    assert not norm.training


def test_the_bank_is_filled_by_the_trained_weights() -> None:
    """With an average or without: what is trained, and what is selected from, is the same."""
    plain, averaged = session(), session(ema_decay=0.99)
    fit(plain)
    fit(averaged)
    for one, other in zip(plain.method.state_dict().values(), averaged.method.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_run_averages_every_step_of_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """kept <- kept + (live - kept) · max(1 - decay, 1 / steps before the epoch + 1), by hand along a run."""
    s = session("cc", ema_decay=0.9)
    assert s.ema is not None
    live = s.method.networks[0].head.weight
    kept, steps, real = live.detach().double().clone(), 0, s.optimiser.step

    def step() -> None:
        nonlocal kept, steps
        real()
        weight = max(1 - 0.9, 1 / (steps // s.steps * s.steps + 1))
        kept = kept + weight * (live.detach().double() - kept)
        steps += 1

    monkeypatch.setattr(s.optimiser, "step", step)
    fit(s)
    assert steps == 4 * s.steps > 4
    found = s.ema.state_dict()["0.head.weight"]
    torch.testing.assert_close(found.double(), kept, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, live)


# --- the statistics of averaged weights ---------------------------------------------------------------------------


def by_hand(s: Session, chunks: int, size: int) -> dict[str, np.ndarray[Any, Any]]:
    """Statistics for the weights in the average: mean and variance over chunks of rows 0, 37, 74 - 60, … of the 60."""
    assert s.ema is not None
    kept = {name: value.double().numpy() for name, value in s.ema.state_dict().items()}
    x = (s.data.x.astype(np.float64) - s.normalise.mean.numpy()) / s.normalise.std.numpy()
    sums: dict[str, Any] = {}
    for network in range(len(s.method.networks)):
        for chunk in range(chunks):
            h = x[[37 * (chunk * size + j) % 60 for j in range(size)]]
            for layer in (0, 3):
                linear, norm = f"{network}.body.{layer}", f"{network}.body.{layer + 1}"
                h = h @ kept[f"{linear}.weight"].T + kept[f"{linear}.bias"]
                for name, value in (("mean", h.mean(axis=0)), ("var", h.var(axis=0, ddof=1))):
                    sums[f"{norm}.running_{name}"] = sums.get(f"{norm}.running_{name}", 0) + value / chunks
                h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)
                h = np.maximum(0, h * kept[f"{norm}.weight"] + kept[f"{norm}.bias"])
    return sums


class Check:
    """After every epoch and where a run stops, the averaged weights have the statistics of so many chunks."""

    def __init__(self, chunks: int, size: int, stopped: int = 1) -> None:
        self.chunks, self.size, self.stopped = chunks, size, stopped
        self.seen: list[int] = []

    def on_checkpoint(self, session: Session) -> None:
        assert session.ema is not None
        self.seen.append(session.progress.step)
        kept = session.ema.state_dict()
        wanted = by_hand(session, self.stopped if session.progress.step else self.chunks, self.size)
        assert len(wanted) == 4 * len(session.method.networks)
        for name, value in wanted.items():
            np.testing.assert_allclose(kept[name].numpy(), value, rtol=1e-4, atol=1e-5, err_msg=name)

    def on_step(self, *args: Any) -> None: ...
    def on_epoch(self, *args: Any) -> None: ...


@pytest.mark.parametrize("method", ["crosel", "cc"])
@pytest.mark.parametrize(
    ("train", "chunks", "size"),
    [
        ({}, 1, 60),  # fewer examples than in a chunk
        ({"eval_batch_size": 16}, 3, 16),  # 12 are left over
        ({"eval_batch_size": 3}, 16, 3),
        ({"eval_batch_size": 1}, 16, 2),  # one example has no variance
        ({"eval_batch_size": 16, "data_on": "host"}, 3, 16),
    ],
)
def test_averaged_weights_get_the_statistics_that_go_with_them(
    method: str, train: dict[str, Any], chunks: int, size: int
) -> None:
    """Also in epochs in which nothing is measured."""
    check = Check(chunks, size)
    fit(session(method, (8, 5), ema_decay=0.9, evaluate_every=4, **train), (check,))
    assert check.seen == [0, 0, 0, 0]


def assert_same_bits(one: Session, other: Session, prefix: str = "") -> None:
    tensors, others = one.state()[0], other.state()[0]
    names = [name for name in tensors if name.startswith(prefix)]
    assert names == [name for name in others if name.startswith(prefix)] != []
    for name in names:
        assert torch.equal(tensors[name], others[name]), name


@pytest.mark.parametrize("method", ["crosel", "cc", "pico"])
def test_training_is_the_same_with_an_average_and_however_often_it_is_evaluated(method: str) -> None:
    """Digit for digit: weights, statistics, tables, momentum, and the random numbers that come next."""
    plain = session(method, eval_batch_size=16)
    fit(plain)
    for every in (1, 3):
        averaged = session(method, ema_decay=0.9, eval_batch_size=16, evaluate_every=every)
        fit(averaged)
        for part in ("method.", "momentum.", "generator"):
            assert_same_bits(plain, averaged, part)


@pytest.mark.parametrize("asked", [3, 6, 5], ids=["first epoch", "second epoch", "between epochs"])
def test_a_stopped_run_predicts_well_and_goes_on_to_the_same_bits(asked: int) -> None:
    settings: dict[str, Any] = {"ema_decay": 0.9, "eval_batch_size": 16, "evaluate_every": 3}
    unbroken, stopped, resumed = (session("crosel", (8, 5), **settings) for _ in range(3))
    fit(unbroken)
    assert unbroken.steps == 4
    times = 0

    def stop() -> bool:  # after each step, and after each epoch
        nonlocal times
        times += 1
        return times >= asked

    check = Check(3, 16)
    with pytest.raises(Interrupted):
        fit(stopped, (check,), stop)
    assert check.seen == {3: [3], 6: [0, 1], 5: [0]}[asked]
    tensors, state = stopped.state()
    resumed.restore(Checkpoint({name: t.clone() for name, t in tensors.items()}, state))
    fit(resumed, (check,))
    assert_same_bits(unbroken, resumed)


def test_nothing_but_batch_norm_is_in_training_mode_for_it() -> None:
    """Dropout would draw random numbers, frozen statistics are meant to stay, and counts are of trained batches."""

    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    frozen, norm, counting = Frozen(3), nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=None)
    network = nn.Sequential(frozen, nn.Dropout(0.5), norm, counting, nn.BatchNorm1d(3, track_running_stats=False))
    frozen.running_mean.fill_(1.0)
    counting.num_batches_tracked.fill_(7)
    x, state = torch.randn(8, 3), torch.get_rng_state()
    found = recalibrate_batch_norm(network, [x], network)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(found) == 4
    assert torch.equal(frozen.running_mean, torch.ones(3))
    torch.testing.assert_close(norm.running_mean, ((x - 1) / (1 + frozen.eps) ** 0.5).mean(dim=0))
    assert (norm.num_batches_tracked, counting.num_batches_tracked) == (0, 7)
    assert (norm.momentum, counting.momentum) == (0.1, None)
    assert not any(module.training for module in network.modules())


def test_a_network_without_batch_norm_has_nothing_to_recalibrate() -> None:
    def batches() -> Iterator[torch.Tensor]:
        raise AssertionError("a batch was made for nothing")
        yield

    network = nn.Linear(2, 2)
    assert recalibrate_batch_norm(network, batches(), network) == []


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 30, 60, 997, 1000, 10240, 50000])
def test_spread_rows_come_once_each(n: int) -> None:
    rows = spread_rows(n, 2 * n)
    assert torch.equal(rows[:n].sort().values, torch.arange(n))
    assert torch.equal(rows[n:], rows[:n])


@pytest.mark.parametrize("n", [9990, 10000, 10240, 16384, 50000, 73257])
@pytest.mark.parametrize("classes", [2, 10, 16])
def test_each_chunk_has_its_share_of_all_classes(n: int, classes: int) -> None:
    """Whether the rows are sorted by class or the classes take turns, one by one or in groups."""
    index = torch.arange(n)
    rows = spread_rows(n, 9 * 1000).view(9, 1000)
    for labels in (index * classes // n, index % classes, index // 10 % classes):
        for chunk in rows:
            shares = torch.bincount(labels[chunk], minlength=classes) * classes / 1000
            assert 0.85 < shares.min() <= shares.max() < 1.15
