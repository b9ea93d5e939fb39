"""Means, deviations and the t-test, against the standard library and SciPy."""

from __future__ import annotations

import math
import statistics

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from crosel.bench.tables import estimate, paired_t_test

shares = st.floats(0, 100, allow_nan=False)


@given(st.lists(shares, min_size=1, max_size=12))
def test_mean_and_deviation(values: list[float]) -> None:
    mean, deviation, n = estimate(values)
    assert n == len(values)
    assert mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-12)
    if n == 1:
        assert deviation is None
    else:
        assert deviation == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-9)


def test_by_hand() -> None:
    assert estimate([1.0, 2.0, 3.0]) == (2.0, 1.0, 3)
    test = paired_t_test([3.0, 4.0, 5.0], [2.0, 2.0, 2.0])  # differences 1, 2, 3: mean 2, deviation 1
    assert test.t == pytest.approx(2 * math.sqrt(3))
    assert test.p == pytest.approx(1 - test.t / math.sqrt(2 + test.t**2))  # closed form for two degrees of freedom


@given(st.lists(st.tuples(shares, shares), min_size=2, max_size=12))
def test_paired_test_is_scipys(pairs: list[tuple[float, float]]) -> None:
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    if statistics.stdev(x - y for x, y in pairs) < 1e-9:  # next to no deviation; see below
        return
    ours, theirs = paired_t_test(a, b), scipy.stats.ttest_rel(a, b)
    assert ours.n == len(pairs)
    assert ours.t == pytest.approx(theirs.statistic, rel=1e-6)
    assert ours.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ([1.0, 2.0], [1.0, 2.0]),
        ([2.0, 3.0], [1.0, 2.0]),
        ([85.0, 90.0, 80.0], [87.5, 92.5, 82.5]),
        ([0.85, 0.9], [0.825, 0.875]),  # 0.025 twice, but for rounding
    ],
)
def test_the_same_difference_for_every_seed_says_nothing(a: list[float], b: list[float]) -> None:
    test = paired_t_test(a, b)
    assert math.isnan(test.t)
    assert math.isnan(test.p)
    assert test.n == len(a)


def test_what_cannot_be_answered() -> None:
    for call, why in (
        (lambda: estimate([]), "no values"),
        (lambda: paired_t_test([1.0], [2.0]), "two pairs"),
        (lambda: paired_t_test([1.0, 2.0], [2.0]), "2 and 1 values"),
    ):
        with pytest.raises(ValueError, match=why):
            call()
