"""Means, deviations and the paired t-test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from scipy.special import stdtr

# Equal differences of accuracies deviate by no more than rounding leaves, and unequal ones by far more.
_ROUNDING = 1e-12


class Estimate(NamedTuple):
    """A mean over seeds. One seed has no deviation."""

    mean: float
    deviation: float | None
    n: int


class PairedTest(NamedTuple):
    """Student's t of paired differences, its two-sided p-value, and the number of pairs."""

    t: float
    p: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard deviation of a sample (divided by n - 1)."""
    n = len(values)
    if n == 0:
        raise ValueError("cannot take the mean of no values")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)), n)


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Test whether the mean of a - b is 0, pair by pair: NaN where all differences are the same.

    Of few seeds and a small test set they often are, by chance: the test would take that for certainty (p = 0).
    """
    if len(a) != len(b):
        raise ValueError(f"pairs are needed, but there are {len(a)} and {len(b)} values")
    if len(a) < 2:
        raise ValueError("two pairs at least are needed")
    mean, deviation, n = estimate([x - y for x, y in zip(a, b, strict=True)])
    assert deviation is not None
    if deviation < _ROUNDING:
        return PairedTest(math.nan, math.nan, n)
    t = mean / (deviation / math.sqrt(n))
    return PairedTest(t, 2 * float(stdtr(n - 1, -abs(t))), n)
