"""Averaged weights and refreshed batch-norm statistics."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from crosel.averaging import WeightAverage, refresh_statistics
from crosel.build import build_session, resolve
from crosel.checkpoint import Checkpoint
from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.data.dataset import Dataset, make_dataset
from crosel.estimator.model import FittedModel
from crosel.pipeline import train_run
from crosel.run import load_run
from crosel.session import Session
from crosel.train import fit, predict_chunks

CPU = torch.device("cpu")


def made() -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (rng.normal(size=(60, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    return draw_candidates(make_dataset(x, y=y, x_test=x[:20], y_test=y[:20], classes=3), "uniform:q=0.3", 0)


def session(method: str = "crosel", **train: float) -> Session:
    values = {
        "source": "made", "method": {"name": method}, "network": {"hidden": [8]},
        "train": {"epochs": 4, "batch_size": 16, **train},
    }  # fmt: skip
    data = made()
    return build_session(resolve(build_config(settings=[], values=values), data), data, CPU)


def test_average_follows_the_recurrence() -> None:
    network = nn.Linear(2, 2)
    average = WeightAverage(network, 0.9, CPU)
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
    average = WeightAverage(network, 0.999, CPU)
    average.begin_epoch(0)
    with torch.no_grad():
        network.weight.fill_(3.0)
    average.update()
    assert torch.equal(average.state_dict()["weight"], network.weight)


def test_average_stands_in_place_and_gives_the_weights_back() -> None:
    network = nn.Linear(2, 2)
    average = WeightAverage(network, 0.9, CPU)
    trained = torch.full((2, 2), 7.0)
    with torch.no_grad():
        network.weight.copy_(trained)
    kept = average.state_dict()["weight"].clone()
    with average.in_place():
        assert torch.equal(network.weight, kept)
        with average.in_place():  # once is enough
            assert torch.equal(network.weight, kept)
    assert torch.equal(network.weight, trained)


@pytest.mark.parametrize("method", ["crosel", "proden", "pico"])
def test_predictions_come_from_the_average(method: str) -> None:
    s = session(method, average=0.9)
    fit(s)
    assert s.average is not None
    _, outputs = next(iter(predict_chunks(s, s.data.x)))
    s.method.eval()
    with torch.no_grad():
        trained = s.method.outputs(s.normalise(torch.from_numpy(s.data.x)))
        with s.average.in_place():
            averaged = s.method.outputs(s.normalise(torch.from_numpy(s.data.x)))
    torch.testing.assert_close(outputs, averaged)
    assert not torch.allclose(outputs, trained)


def test_average_survives_a_checkpoint() -> None:
    s = session(average=0.9, refresh=1)
    fit(s)
    tensors, state = s.state()
    again = session(average=0.9, refresh=1)
    again.restore(Checkpoint({name: t.clone() for name, t in tensors.items()}, state))
    (_, a), (_, b) = (next(iter(predict_chunks(one, s.data.x))) for one in (s, again))
    assert torch.equal(a, b)


def test_a_finished_run_predicts_with_the_average(tmp_path: Path) -> None:
    values = {
        "source": "digits", "candidates": "uniform:q=0.3", "method": {"name": "cc"},
        "network": {"name": "mlp", "hidden": [8]}, "train": {"epochs": 2, "average": 0.9},
    }  # fmt: skip
    run = tmp_path / "run"
    trained = train_run(build_config(settings=[], values=values), run, CPU)
    opened = load_run(run, CPU)
    (_, a), (_, b) = (next(iter(predict_chunks(one, trained.data.x))) for one in (trained, opened))
    assert torch.equal(a, b)


def test_an_estimator_keeps_the_average() -> None:
    s = session("cc", average=0.9)
    fit(s)
    model = FittedModel.of(s, None, None)
    _, outputs = next(iter(predict_chunks(s, s.data.x)))
    expected = s.method.combine(outputs).numpy()
    np.testing.assert_allclose(model.probabilities(s.data.x, "cpu"), expected, atol=1e-6)


def test_refreshed_statistics_are_those_of_the_batches() -> None:
    norm = nn.BatchNorm1d(3).eval()  # as after a pass over the test set
    norm.running_mean.fill_(100.0)
    batches = [torch.randn(8, 3) for _ in range(4)]

    def run(x: torch.Tensor) -> None:
        assert not norm(x).requires_grad, "a graph would take memory for nothing"

    refresh_statistics(norm, batches, run)
    expected = torch.stack([b.mean(dim=0) for b in batches]).mean(dim=0)
    spread = torch.stack([b.var(dim=0) for b in batches]).mean(dim=0)
    torch.testing.assert_close(norm.running_mean, expected)
    torch.testing.assert_close(norm.running_var, spread)
    assert norm.momentum == 0.1
    assert not norm.training


def test_the_bank_is_filled_by_the_trained_weights() -> None:
    """With an average or without: what is trained, and what is selected from, is the same."""
    plain, averaged = session(), session(average=0.99)
    fit(plain)
    fit(averaged)
    for one, other in zip(plain.method.state_dict().values(), averaged.method.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_a_run_averages_every_step_of_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """kept <- kept + (live - kept) · max(1 - decay, 1 / steps before the epoch + 1), by hand along a run."""
    s = session("cc", average=0.9)
    assert s.average is not None
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
    found = s.average.state_dict()["0.head.weight"]
    torch.testing.assert_close(found.double(), kept, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, live)


def test_statistics_are_refreshed_for_the_weights_that_predict() -> None:
    """One batch holds all 60 examples: the trained weights and their average each get the means they make of these."""
    s = session("cc", average=0.9, refresh=1)
    fit(s)
    assert s.average is not None
    first, norm = s.method.networks[0].body[0], s.method.networks[0].body[1]
    x = s.normalise(torch.from_numpy(s.data.x))
    means = []
    for standing in (nullcontext(), s.average.in_place()):
        with standing, torch.no_grad():
            means.append(norm.running_mean.clone())
            torch.testing.assert_close(means[-1], first(x).mean(dim=0), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(norm.running_var, first(x).var(dim=0), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(*means)
