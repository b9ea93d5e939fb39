"""Unit embeddings, for PiCO: what attracts and repels, and the prototypes of classes. Pure functions; losses are means
over the batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from crosel.methods.losses import one_hot


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b outside autocast: divided by τ = .07, the rounding of bf16 would weigh."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


def info_nce_loss(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Mean of -log [exp(q·k/τ) / (exp(q·k/τ) + Σ_queue exp(q·k'/τ))]."""
    own = (queries * keys).sum(dim=1, keepdim=True) / temperature
    logits = torch.cat([own, matmul_float32(queries, queue.T) / temperature], dim=1)
    return (logits.logsumexp(dim=1) - own.squeeze(1)).mean()


def supcon_loss(
    queries: Tensor,
    others: Tensor,
    labels: Tensor,
    other_labels: Tensor,
    temperature: float,
    anchors: slice = slice(None),
) -> Tensor:
    """Mean over queries of the mean over their positives of -log [exp(q·z⁺/τ) / Σ_z exp(q·z/τ)].

    Only the `anchors` among the queries are averaged over; the rest are there to be compared with.
    z runs over all queries but the anchor itself and over `others` (keys and queue), z⁺ over those with the
    anchor's label. The own key is among them, so there is always a positive.
    """
    contrast = torch.cat([queries, others])
    itself = torch.eye(len(queries), len(contrast), dtype=torch.bool, device=queries.device)[anchors]
    logits = (matmul_float32(queries[anchors], contrast.T) / temperature).masked_fill(itself, -torch.inf)
    positive = (labels[anchors].unsqueeze(1) == torch.cat([labels, other_labels])) & ~itself
    negative_log = logits.logsumexp(dim=1, keepdim=True) - logits
    return (negative_log.masked_fill(~positive, 0.0).sum(dim=1) / positive.sum(dim=1)).mean()


def prototype_update(prototypes: Tensor, queries: Tensor, labels: Tensor, momentum: float) -> Tensor:
    """Return the prototypes after μ_ŷ ← m μ_ŷ + (1 - m) q for every example in turn, then normalised.

    Closed form: an example counts (1 - m) m^(later examples of its label), the old prototype m^(all of them).
    """
    member = one_hot(labels, len(prototypes)).to(queries.dtype)
    count = member.sum(dim=0)
    later = count - member.cumsum(dim=0)
    share = (1 - momentum) * torch.pow(momentum, later) * member
    moved = torch.pow(momentum, count).unsqueeze(1) * prototypes + matmul_float32(share.T, queries)
    return F.normalize(moved, dim=1)
