"""What is measured. `accuracy`, and what begins with `oracle`, needs true labels and never drives a choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ONE_IN = 100  # a class that is predicted for fewer of the examples whose sets hold it, 1 in this many, …
TIMES_SET = 10  # … or in this many times the mean size of the sets, if that is more, is hardly predicted


def accuracy(predicted: Tensor, labels: Tensor) -> Tensor:
    """Share of predictions that are right."""
    return (predicted == labels).float().mean()


def covering_rate(probabilities: Tensor, candidates: Tensor) -> Tensor:
    """Share of predictions that lie inside the candidate set. Needs no true labels."""
    return candidates.gather(1, probabilities.argmax(dim=1, keepdim=True)).float().mean()


def approximated_accuracy(probabilities: Tensor, candidates: Tensor) -> Tensor:
    """Mean of p renormalised on S at the predicted label (0 where that lies outside S). Needs no true labels."""
    inside = probabilities * candidates
    predicted = probabilities.argmax(dim=1, keepdim=True)
    share = inside.gather(1, predicted).squeeze(1) / inside.sum(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return share.mean()


def predictions_per_class(probabilities: NDArray[Any], candidates: NDArray[np.bool_]) -> NDArray[np.int64]:
    """By class: for how many of the examples whose set holds it, it is the prediction. Needs no true labels."""
    predicted = probabilities.argmax(axis=1)
    inside = candidates[np.arange(len(predicted)), predicted]
    return np.bincount(predicted[inside], minlength=candidates.shape[1]).astype(np.int64)


def rarely_predicted(predicted: NDArray[np.int64], candidates: NDArray[np.bool_]) -> list[int]:
    """Classes that the networks seem to have lost, by `predictions_per_class`; the smallest share first.

    Where all classes are as frequent and wrong labels are in the sets at random, a class is right for one in |S| of the
    examples whose sets hold it. Hardly predicted is less than a tenth of that, and never more than one in a hundred. If
    so few sets hold a class that less than ten predictions would be its even share, nothing is said of it.
    """
    held = candidates.sum(axis=0)
    enough = TIMES_SET * held.sum() / len(candidates)
    few = max(ONE_IN, enough)  # where fewer sets than this hold a class, it is found if it is never predicted
    found = np.flatnonzero((held >= enough) & (predicted * few < held))
    return sorted(found.tolist(), key=lambda j: predicted[j] / held[j])


def oracle_selection_accuracy(labels: Tensor, selected: Tensor, truth: Tensor) -> float | None:
    """S-acc: share of the selected [v, n] whose label is true, mean over networks; None where nothing is selected."""
    shares = [
        float((row_labels[mask] == truth[mask]).float().mean())
        for row_labels, mask in zip(labels, selected, strict=True)
        if bool(mask.any())
    ]
    return sum(shares) / len(shares) if shares else None
