"""What several methods compute with logits: pure functions. Losses are means over the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def to_float32(values: Tensor) -> Tensor:
    """The values in float32 at least: logarithms and sums of bfloat16 are too coarse. float64 stays, for gradcheck."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def restrict(logits: Tensor, candidates: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """Logits with everything outside the candidate sets, a bool or 0/1 matrix, at minus infinity; inside, with the
    logarithm of the candidates' weights added, if they have any: the logits of w_j p_j."""
    if log_weights is not None:
        logits = logits + log_weights
    return logits.masked_fill(~torch.as_tensor(candidates, device=logits.device).bool(), -torch.inf)


def candidate_probabilities(
    logits: Tensor, candidates: Tensor, temperature: float | Tensor = 1.0, log_weights: Tensor | None = None
) -> Tensor:
    """Return (w p)^(1/T) restricted to S and renormalised: a distribution on each candidate set.

    softmax(f)^(1/T) is softmax(f/T) up to a factor that the renormalisation removes, so one masked softmax
    gives the result without a power, a quotient or an underflow. The maximum goes first: f/T may overflow.
    """
    f = restrict(logits.float(), candidates, log_weights)
    return torch.softmax((f - f.amax(dim=1, keepdim=True)) / temperature, dim=1)


def cc_loss(logits: Tensor, candidates: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """Classifier-consistent loss (Feng et al., 2020): mean of -log Σ_{j in S} w_j p_j; without weights, all w_j are 1.

    Written as logsumexp(f) - logsumexp(f + log w on S), which stays finite where the sum of probabilities underflows.
    """
    logits = to_float32(logits)
    return (logits.logsumexp(dim=1) - restrict(logits, candidates, log_weights).logsumexp(dim=1)).mean()


LEAST_WEIGHT = 0.01  # of the mean weight of a set: whoever listed a label did not rule it out


def log_candidate_weights(weights: Tensor, candidates: Tensor) -> Tensor:
    """Log of the weights relative to what their class has on average, scaled to a mean of 1 on each set; 0 outside.

    Whoever guessed has counted how frequent a class is, and a network learns it, too: it must not count twice. A set
    without any weight has the same for all.
    """
    inside = weights.float() * candidates
    inside = inside / inside.amax(dim=1, keepdim=True)  # before the sum, which may overflow
    shares = inside / inside.sum(dim=1, keepdim=True)
    shares = torch.where(shares.isfinite(), shares, candidates / candidates.sum(dim=1, keepdim=True))
    relative = shares * len(shares) / (shares.sum(dim=0) + 1)  # as if each class had been found once more
    scaled = relative * candidates.sum(dim=1, keepdim=True) / relative.sum(dim=1, keepdim=True)
    return scaled.clamp_min(LEAST_WEIGHT).log().masked_fill(~candidates, 0.0)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of -Σ_j targets_j log p_j, for rows of non-negative weights."""
    logits = to_float32(logits)
    return -(targets * F.log_softmax(logits, dim=1)).sum(dim=1).mean()


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Bool [B, k]. A comparison, because `F.one_hot` may look at the values and wait for the device."""
    return labels.unsqueeze(1) == torch.arange(classes, device=labels.device)


def log_one_minus_probability(logits: Tensor) -> Tensor:
    """Return log(1 - p_j) for every label, finite for any finite logits of two classes or more."""
    logits = to_float32(logits)
    likeliest = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.argmax(dim=1, keepdim=True), True)
    rest = logits.masked_fill(likeliest, -torch.inf).logsumexp(dim=1, keepdim=True)
    of_likeliest = rest - logits.logsumexp(dim=1, keepdim=True)
    # Zero at the likeliest label keeps log1p(-1) and its infinite slope out of the graph.
    of_others = torch.log1p(-torch.softmax(logits, dim=1).masked_fill(likeliest, 0.0))
    return torch.where(likeliest, of_likeliest, of_others)
