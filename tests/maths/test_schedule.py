"""The learning rate: milestones, cosine, ramp."""

from __future__ import annotations

import itertools
import math

import pytest

from crosel.config import TrainSettings
from crosel.training.trainer import learning_rate


def rates(settings: TrainSettings, steps: int = 4) -> list[float]:
    """The learning rate of every step of the run."""
    return [learning_rate(settings, e, s, steps) for e in range(1, settings.epochs + 1) for s in range(steps)]


def test_the_papers_schedule():
    """0.1, divided by 10 after epochs 100 and 150 of 200, to the step."""
    settings = TrainSettings(epochs=200, lr=0.1, schedule="step")
    by_epoch = {e: {learning_rate(settings, e, s, 782) for s in (0, 1, 400, 781)} for e in range(1, 201)}
    for epoch, found in by_epoch.items():
        expected = 0.1 if epoch <= 100 else 0.01 if epoch <= 150 else 0.001
        assert len(found) == 1
        assert found.pop() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("epochs", "drops"), [(20, [11, 16]), (100, [51, 76]), (60, [31, 46]), (10, [6, 9]), (4, [3, 4]), (2, [2])]
)
def test_milestones_scale_with_the_epochs(epochs, drops):
    settings = TrainSettings(epochs=epochs, lr=1.0, schedule="step")
    found = [learning_rate(settings, e, 0, 5) for e in range(1, epochs + 1)]
    assert [e + 1 for e in range(1, epochs) if found[e] < found[e - 1]] == drops
    assert found[0] == 1.0
    assert found[-1] == pytest.approx(0.1 ** len(drops))


def test_own_milestones_and_decay():
    settings = TrainSettings(epochs=10, lr=1.0, schedule="step", milestones=(0.2, 0.4, 0.9), decay=0.5)
    assert rates(settings, steps=1) == [1, 1, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize(("epochs", "milestones"), [(1, (0.5, 0.75)), (4, (0.1,))])
def test_a_run_starts_at_its_learning_rate_however_short(epochs, milestones):
    settings = TrainSettings(epochs=epochs, lr=1.0, schedule="step", milestones=milestones)
    assert learning_rate(settings, 1, 0, 5) == 1.0


def test_cosine_goes_from_the_start_to_nothing():
    settings = TrainSettings(epochs=30, lr=0.1, schedule="cosine")
    found = rates(settings)
    assert found[0] == 0.1
    assert found[len(found) // 2] == pytest.approx(0.05)
    assert 0 < found[-1] < 1e-4
    assert all(a > b for a, b in itertools.pairwise(found))
    last = 0.1 * 0.5 * (1 + math.cos(math.pi * (1 - 1 / 120)))
    assert found[-1] == pytest.approx(last)
    # Where the run would go on, the rate would be 0.
    assert learning_rate(settings, 31, 0, 4) == pytest.approx(0, abs=1e-12)


def test_cosine_is_the_same_curve_at_any_length_and_step_count():
    short, long = (TrainSettings(epochs=e, lr=0.1, schedule="cosine") for e in (10, 40))
    assert learning_rate(short, 4, 1, 2) == pytest.approx(learning_rate(long, 15, 0, 7))


def test_constant():
    assert set(rates(TrainSettings(epochs=7, lr=0.3, schedule="constant"))) == {0.3}


@pytest.mark.parametrize("schedule", ["constant", "cosine", "step"])
def test_ramp_rises_linearly_and_then_leaves_the_schedule_alone(schedule):
    plain = TrainSettings(epochs=20, lr=0.4, schedule=schedule)
    ramped = TrainSettings(epochs=20, lr=0.4, schedule=schedule, lr_ramp=2)
    without, found = rates(plain), rates(ramped)
    shares = [a / b for a, b in zip(found, without, strict=True)]
    assert shares[:8] == pytest.approx([i / 8 for i in range(1, 9)])
    assert shares[8:] == [1.0] * (len(shares) - 8)
    assert found[0] > 0


def test_a_ramp_of_part_of_an_epoch():
    settings = TrainSettings(epochs=3, lr=1.0, schedule="constant", lr_ramp=0.5)
    assert rates(settings) == [0.5, 1.0, *[1.0] * 10]


def test_every_rate_is_positive():
    for schedule in ("constant", "cosine", "step"):
        for epochs in (1, 2, 5):
            settings = TrainSettings(epochs=epochs, lr=0.1, schedule=schedule, lr_ramp=0.5)
            assert min(rates(settings, steps=3)) > 0
