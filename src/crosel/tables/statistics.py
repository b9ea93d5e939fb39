"""Means, deviations and the paired t-test: small, and without SciPy, which is no dependency of ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


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
        raise ValueError("there is no mean of nothing")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, None, 1)
    return Estimate(mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)), n)


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """Test whether the mean of a - b is 0, pair by pair. Two equal samples say nothing: NaN."""
    if len(a) != len(b):
        raise ValueError(f"pairs are needed, but there are {len(a)} and {len(b)} values")
    if len(a) < 2:
        raise ValueError("two pairs at least are needed")
    mean, deviation, n = estimate([x - y for x, y in zip(a, b, strict=True)])
    assert deviation is not None
    if deviation == 0:
        return PairedTest(math.nan, math.nan, n) if mean == 0 else PairedTest(math.copysign(math.inf, mean), 0.0, n)
    t = mean / (deviation / math.sqrt(n))
    return PairedTest(t, t_tails(t, n - 1), n)


def t_tails(t: float, freedom: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution: the regularised incomplete beta function I_x(ν/2, 1/2), x = ν/(ν+t²)."""
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) by its continued fraction (modified Lentz), on the side of the mean where that converges fast."""
    if not 0 <= x <= 1:
        raise ValueError("x lies between 0 and 1")
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    tiny = 1e-300
    c, d = 1.0, 1 / _not_zero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _not_zero(1 + term * d, tiny)
            c = _not_zero(1 + term / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return min(1.0, math.exp(log_front) * fraction / a)


def _not_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
