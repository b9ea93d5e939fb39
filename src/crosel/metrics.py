"""What is measured. `accuracy`, and what begins with `oracle`, needs true labels and never drives a choice."""

from __future__ import annotations

import torch
from torch import Tensor


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


def oracle_selection_accuracy(labels: Tensor, selected: Tensor, truth: Tensor) -> float | None:
    """S-acc: share of the selected [v, n] whose label is true, mean over networks; None where nothing is selected."""
    shares = [
        float((row_labels[mask] == truth[mask]).float().mean())
        for row_labels, mask in zip(labels, selected, strict=True)
        if bool(mask.any())
    ]
    return sum(shares) / len(shares) if shares else None
