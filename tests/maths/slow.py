"""Slow versions of the equations, written from the paper, one loop at a time.

Where the paper is unclear, they follow what the head of `crosel/methods/crosel.py` says instead.

Plain Python numbers, which are float64, and no torch: nothing here is shared with the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]
Set = Sequence[bool]
Matrix = Sequence[Row]
Bank = Sequence[Matrix]  # [t][n][k]; the last entry is the newest


def argmax(row: Row) -> int:
    """The first of the largest."""
    best = 0
    for j in range(1, len(row)):
        if row[j] > row[best]:
            best = j
    return best


def softmax(row: Row) -> list[float]:
    top = max(row)
    parts = [math.exp(value - top) for value in row]
    whole = math.fsum(parts)
    return [part / whole for part in parts]


def log_softmax(row: Row) -> list[float]:
    top = max(row)
    whole = top + math.log(math.fsum(math.exp(value - top) for value in row))
    return [value - whole for value in row]


def beta1(bank: Bank, candidates: Sequence[Set]) -> list[bool]:
    """Eq. (1): the predicted label, argmax of the newest q, is one of S."""
    return [bool(candidates[i][argmax(bank[-1][i])]) for i in range(len(candidates))]


def beta2(bank: Bank) -> list[bool]:
    """Eq. (2): for every i from 1 to t-1, argmax q^i = argmax q^(i+1)."""
    stable = []
    for example in range(len(bank[0])):
        ok = True
        for i in range(len(bank) - 1):
            if argmax(bank[i][example]) != argmax(bank[i + 1][example]):
                ok = False
        stable.append(ok)
    return stable


def beta3(bank: Bank, gamma: float) -> list[bool]:
    """Eq. (3): (1/t) Σ max q^i > γ."""
    confident = []
    for example in range(len(bank[0])):
        total = 0.0
        for entry in bank:
            total += max(entry[example])
        confident.append(total / len(bank) > gamma)
    return confident


def d_sel(bank: Bank, candidates: Sequence[Set], gamma: float, criteria: Sequence[int] = (1, 2, 3)) -> dict[int, int]:
    """Eq. (4): the selected examples, each with the argmax of its newest entry."""
    first, second, third = beta1(bank, candidates), beta2(bank), beta3(bank, gamma)
    chosen = {}
    for i in range(len(candidates)):
        if (1 not in criteria or first[i]) and (2 not in criteria or second[i]) and (3 not in criteria or third[i]):
            chosen[i] = argmax(bank[-1][i])
    return chosen


def selected_label_loss(logits: Matrix, labels: Sequence[int]) -> float:
    """Eq. (5): mean of -log softmax(f)[label]."""
    return math.fsum(-log_softmax(row)[label] for row, label in zip(logits, labels, strict=True)) / len(logits)


def average_output(first: Matrix, second: Matrix) -> list[list[float]]:
    """Eq. (6): half the sum of the two outputs."""
    return [[(a + b) / 2 for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]


def pseudo_label(logits: Row, candidates: Set, temperature: float) -> list[float]:
    """Eq. (7), read as p^(1/T) on S, renormalised; 0 elsewhere. Underflows where p does: keep logits mild."""
    sharpened = [p ** (1 / temperature) for p in softmax(logits)]
    whole = math.fsum(value for value, inside in zip(sharpened, candidates, strict=True) if inside)
    return [value / whole if inside else 0.0 for value, inside in zip(sharpened, candidates, strict=True)]


def larger_share(share: float) -> float:
    """Eq. (9): λ' = max(λ, 1-λ)."""
    return share if share >= 1 - share else 1 - share


def mixed(first: Row, second: Row, weight: float) -> list[float]:
    """Eqs. (10), (11): λ' v1 + (1-λ') v2, element by element."""
    return [weight * a + (1 - weight) * b for a, b in zip(first, second, strict=True)]


def soft_cross_entropy(logits: Matrix, targets: Matrix) -> float:
    """Eq. (12): mean of -Σ_j p'_j log softmax(f)_j."""
    total = 0.0
    for row, target in zip(logits, targets, strict=True):
        for log_p, share in zip(log_softmax(row), target, strict=True):
            total -= share * log_p
    return total / len(logits)


def total_loss(selected: float, comix: float, weight: float) -> float:
    """Eq. (13)."""
    return selected + weight * comix


def dynamic_weight(selected_counts: Sequence[int], n: int, lambda_cr: float) -> float:
    """Eq. (14), with r_s the mean of the networks' shares."""
    share = math.fsum(count / n for count in selected_counts) / len(selected_counts)
    return (1 - share) * lambda_cr


def cc_loss(logits: Matrix, candidates: Sequence[Set]) -> float:
    """The warm-up: mean of -log of the probability that falls on S."""
    total = 0.0
    for row, inside in zip(logits, candidates, strict=True):
        total -= math.log(math.fsum(p for p, here in zip(softmax(row), inside, strict=True) if here))
    return total / len(logits)


def covering_rate(probabilities: Matrix, candidates: Sequence[Set]) -> float:
    """Share of predictions inside S."""
    hits = 0
    for row, inside in zip(probabilities, candidates, strict=True):
        hits += bool(inside[argmax(row)])
    return hits / len(probabilities)


def approximated_accuracy(probabilities: Matrix, candidates: Sequence[Set]) -> float:
    """Mean of p renormalised on S, taken at the predicted label; 0 where that lies outside S."""
    total = 0.0
    for row, inside in zip(probabilities, candidates, strict=True):
        predicted = argmax(row)
        if inside[predicted]:
            total += row[predicted] / math.fsum(p for p, here in zip(row, inside, strict=True) if here)
    return total / len(probabilities)
