"""Means, deviations and the paired t-test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# Equal differences of accuracies deviate by no more than rounding leaves, and unequal ones by far more.
_ROUNDING = 1e-12


class Estimate(NamedTuple):
    """A mean over seeds, with the standard deviation of a sample. One seed has no deviation."""

    mean: float
    deviation: float | None
    n: int


class PairedTest(NamedTuple):
    """Student's t of paired differences, its two-sided p-value, and the number of pairs."""

    t: float
    p: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    return Estimate(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Test whether the mean of a - b is 0, pair by pair: NaN where all differences are the same.

    With few seeds and a small test set they often are, by chance: the test would take that for certainty (p = 0).
    """
    from scipy.stats import ttest_rel  # takes a third of a second to import

    if stdev(x - y for x, y in zip(a, b, strict=True)) < _ROUNDING:
        return PairedTest(math.nan, math.nan, len(a))
    result = ttest_rel(a, b)
    return PairedTest(float(result.statistic), float(result.pvalue), len(a))
