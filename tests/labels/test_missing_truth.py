"""Sets that miss the truth: each function against a slow version, and η on made data whose truth is known."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from crosel.runs.missing_truth import fit_missing, missed_labels, missing_odds


def slow_chance(p: np.ndarray, candidates: np.ndarray, share: float) -> float:
    """P(the set misses the truth | set), by every truth and every set of this size."""
    k, size = len(p), int(candidates.sum())
    sets = [set(found) for found in combinations(range(k), size)]
    own = {j for j in range(k) if candidates[j]}
    missed = held = 0.0
    for truth in range(k):
        with_it, without = [s for s in sets if truth in s], [s for s in sets if truth not in s]
        held += p[truth] * (1 - share) * with_it.count(own) / max(1, len(with_it))
        missed += p[truth] * share * without.count(own) / max(1, len(without))
    return missed / (missed + held)


def test_chances_against_every_truth_and_set() -> None:
    draw = np.random.default_rng(0)
    p = draw.dirichlet(np.ones(5), 30)
    sets = draw.random((30, 5)) < 0.4
    sets[np.arange(30), draw.integers(0, 5, 30)] = True
    sets[0] = True
    odds = missing_odds(p, sets)
    share, chance = fit_missing(odds)
    assert share == pytest.approx(chance.mean(), abs=1e-6)
    for row in range(30):
        assert chance[row] == pytest.approx(slow_chance(p[row], sets[row], share), abs=1e-5)
    assert chance[0] == 0
    labels = missed_labels(p, sets)
    for row in range(30):
        outside = [j for j in range(5) if not sets[row, j]]
        chances = {j: chance[row] * p[row, j] / sum(p[row, o] for o in outside) for j in outside}
        best = max(chances, key=chances.__getitem__, default=-1)
        assert labels[row] == (best if chances.get(best, 0) > 0.5 else -1)


@pytest.mark.parametrize("missing", [0.0, 0.05, 0.2])
def test_the_share_is_found_without_the_truth(missing: float) -> None:
    draw = np.random.default_rng(1)
    n, k = 4000, 8
    p = draw.dirichlet(np.full(k, 0.1), n)
    truth = (p.cumsum(axis=1) < draw.random((n, 1))).sum(axis=1).clip(max=k - 1)  # as the networks say
    order = draw.random((n, k))  # the labels that are drawn first are candidates, the truth before or after all others
    order[np.arange(n), truth] = np.where(draw.random(n) >= missing, -1, 2)
    sets = order.argsort(axis=1).argsort(axis=1) < draw.integers(1, 5, (n, 1))
    share, _ = fit_missing(missing_odds(p, sets))
    assert share == pytest.approx(missing, abs=0.015)
    found = missed_labels(p, sets)
    assert (found[found >= 0] == truth[found >= 0]).mean() > 0.5 if missing else (found >= 0).mean() < 0.005
