"""Metrics against their slow versions and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import slow
import torch

from crosel.training.metrics import (
    accuracy,
    approximated_accuracy,
    covering_rate,
    oracle_selection_accuracy,
    predictions_per_class,
    rarely_predicted,
)


def random_case(seed: int, n: int = 60, k: int = 5) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(k, 0.5), n).astype(np.float32)
    sets = rng.random((n, k)) < 0.4
    sets[np.arange(n), rng.integers(k, size=n)] = True
    return p, sets


@pytest.mark.parametrize("seed", range(5))
def test_covering_rate(seed):
    p, sets = random_case(seed)
    expected = slow.covering_rate(p.tolist(), sets.tolist())
    assert 0 < expected < 1
    assert covering_rate(torch.from_numpy(p), torch.from_numpy(sets)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_approximated_accuracy(seed):
    p, sets = random_case(seed)
    expected = slow.approximated_accuracy(p.tolist(), sets.tolist())
    assert 0 < expected < slow.covering_rate(p.tolist(), sets.tolist())
    found = approximated_accuracy(torch.from_numpy(p), torch.from_numpy(sets))
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_measures_by_hand():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
    sets = torch.tensor([[True, True, False], [True, False, True]])
    assert covering_rate(p, sets).item() == 0.5
    assert approximated_accuracy(p, sets).item() == pytest.approx((0.5 / 0.8 + 0) / 2)


def test_singleton_and_full_sets():
    p = torch.tensor([[0.7, 0.2, 0.1]] * 3)
    only = torch.eye(3, dtype=torch.bool)
    assert covering_rate(p, only).item() == pytest.approx(1 / 3)
    assert approximated_accuracy(p, only).item() == pytest.approx(1 / 3)
    full = torch.ones(3, 3, dtype=torch.bool)
    assert covering_rate(p, full).item() == 1
    assert approximated_accuracy(p, full).item() == pytest.approx(0.7)


def test_no_probability_on_the_set_is_finite():
    p = torch.tensor([[1.0, 0.0]])
    assert approximated_accuracy(p, torch.tensor([[False, True]])).item() == 0


def test_accuracy():
    assert accuracy(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 0, 2])).item() == 0.75


def test_selection_accuracy_is_the_mean_over_networks():
    truth = torch.tensor([0, 1, 2, 0])
    labels = torch.tensor([[0, 1, 1, 1], [0, 0, 2, 0]])
    selected = torch.tensor([[True, True, True, False], [False, True, True, False]])
    assert oracle_selection_accuracy(labels, selected, truth) == pytest.approx((2 / 3 + 1 / 2) / 2)


def test_selection_accuracy_leaves_out_a_network_that_selects_nothing():
    truth, labels = torch.tensor([0, 1]), torch.tensor([[0, 0], [1, 1]])
    one = torch.tensor([[True, True], [False, False]])
    assert oracle_selection_accuracy(labels, one, truth) == 0.5
    assert oracle_selection_accuracy(labels, torch.zeros(2, 2, dtype=torch.bool), truth) is None


def test_selection_accuracy_looks_at_the_selected_alone():
    truth, labels = torch.arange(4), torch.tensor([[0, 1, -1, -1]])
    assert oracle_selection_accuracy(labels, torch.tensor([[True, True, False, False]]), truth) == 1.0


# --- classes that are hardly predicted ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_predictions_inside_the_sets_are_counted_by_class(seed: int) -> None:
    p, sets = random_case(seed)
    expected = [0] * 5
    for row, inside in zip(p.tolist(), sets.tolist(), strict=True):
        j = slow.argmax(row)
        expected[j] += inside[j]
    assert predictions_per_class(p, sets).tolist() == expected
    assert 0 < sum(expected) < len(p)


@pytest.mark.parametrize(
    ("held", "predicted", "found"),
    [
        (100, 0, True), (99, 0, True), (99, 1, False), (11, 0, True), (10, 0, False), (100, 1, False), (199, 1, True),
        (200, 2, False), (201, 2, True),
        (1000, 9, True), (1000, 10, False), (0, 0, False),
    ],
)  # fmt: skip
def test_fewer_than_one_in_a_hundred_or_none_of_at_least_ten_even_shares(
    held: int, predicted: int, found: bool
) -> None:
    sets = np.stack([np.arange(1000) < held, np.ones(1000, dtype=bool)], axis=1)
    assert rarely_predicted(np.array([predicted, 500]), sets) == [0] * found


@pytest.mark.parametrize(
    ("held", "predicted", "found"), [(1000, 0, True), (999, 0, False), (1000, 1, False), (2000, 1, True)]
)
def test_for_large_sets_less_than_a_tenth_of_an_even_share(held: int, predicted: int, found: bool) -> None:
    """Sets of 100 labels: one in 1,000 and not one in 100, since one in 100 is healthy."""
    sets = np.ones((4000, 101), dtype=bool)
    sets[held:, 0] = False
    sets[:held, 1] = False  # every set has 100 labels
    counts = np.full(101, 40)
    counts[0] = predicted
    assert rarely_predicted(counts, sets) == [0] * found
