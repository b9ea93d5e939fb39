"""Means, deviations and the t-test."""

from __future__ import annotations

import math

import pytest

from crosel.bench.tables import estimate, paired_t_test


def test_by_hand() -> None:
    assert estimate([1.0, 2.0, 3.0]) == (2.0, 1.0, 3)
    assert estimate([4.0]) == (4.0, None, 1)
    test = paired_t_test([3.0, 4.0, 5.0], [2.0, 2.0, 2.0])  # differences 1, 2, 3: mean 2, deviation 1
    assert test.n == 3
    assert test.t == pytest.approx(2 * math.sqrt(3))
    assert test.p == pytest.approx(1 - test.t / math.sqrt(2 + test.t**2))  # closed form for two degrees of freedom


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
