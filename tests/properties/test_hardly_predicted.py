"""Which classes are named as hardly predicted, whatever the sets and the predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from crosel.runs.result import NAMED, rarely_predicted_warning
from crosel.training.metrics import predictions_per_class, rarely_predicted


@st.composite
def cases(draw: Any) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that favour some classes strongly, and sets; classes and predictions as uneven as can be."""
    n, k = draw(st.integers(1, 1500)), draw(st.integers(2, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sets = rng.random((n, k)) < draw(st.sampled_from([0.05, 0.3, 0.9]))
    sets[np.arange(n), rng.integers(k, size=n)] = True
    return rng.random((n, k)) * rng.choice([0.01, 0.7, 0.9, 1.0], size=k), sets


@given(cases())
def test_only_classes_that_are_hardly_predicted_are_found_the_worst_first(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, sets = case
    guesses, size = p.argmax(axis=1), sets.sum() / len(sets)
    found = rarely_predicted(predictions_per_class(p, sets), sets)
    for j in range(sets.shape[1]):
        mine = guesses[sets[:, j]] == j
        if j in found:
            assert len(mine) >= 10 * size
            assert mine.mean() < 0.01
            assert mine.mean() * size < 0.1
        elif len(mine) >= 10 * size:
            assert mine.mean() >= min(0.01, 0.1 / size)
    shares = [(guesses[sets[:, j]] == j).mean() for j in found]
    ranked = list(zip(shares, found, strict=True))
    assert ranked == sorted(ranked)


@given(cases())
def test_at_most_three_are_named_and_all_are_counted(case: tuple[np.ndarray, np.ndarray]) -> None:
    p, sets = case
    predicted = predictions_per_class(p, sets)
    found = rarely_predicted(predicted, sets)
    lines = rarely_predicted_warning(predicted, sets, [f"class {j}" for j in range(sets.shape[1])])
    assert len(lines) == bool(found)
    assume(found)
    line = lines[0]
    assert line.count("class ") == min(NAMED, len(found))
    assert all(f"class {j} ({predicted[j]:,} of {sets[:, j].sum():,}" in line for j in found[:NAMED])
    assert (f" and {len(found) - NAMED} more: " in line) == (len(found) > NAMED)
    assert line.count(" examples whose sets hold it)") == 1
