"""CRDPLL, consistency regularisation for deep partial-label learning.

Dong-Dong Wu et al., "Revisiting Consistency Regularization for Deep Partial Label Learning", ICML 2022.

Legend: x_0, x_1, x_2 views of one example (weak, strong, strong), f logits, p = softmax(f), S candidate set,
s its 0/1 row, w the example's target, λ weight of the consistency, e epochs completed, R epochs of ramp.

    w at the start: s / |S|                                                      -> `uniform_weights`
    L_sup = -mean of Σ_{j not in S} log(1 - p_j(x_0))                            -> `supervised_loss`
    L_con = Σ_v mean of KL(w || p(x_v))                                          -> `consistency_loss`
    L = L_sup + min(λ e/R, λ) L_con                                              -> `consistency_weight`
    w after that:   s_j Π_v p_j(x_v)^(1/3), renormalised, from the same passes   -> `consistent_targets`

log(1 - p_j) is a difference of two logsumexps, over all labels but j and over all. It needs no k x k table:
every label but the likeliest has p_j <= 1/2, where log1p(-p_j) is accurate; only the likeliest needs a
logsumexp of its own.

The three views run one after another, so that batch normalisation sees each by itself (`forward_split_bn`). The
released code bounds -log(1 - p) at 16, which kills its gradient where a label outside S should be pushed away
hardest; we do not. The other differences: docs/methods/crdpll.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.methods.base import Batch, Losses, Method, MethodSettings, Problem, Stream, register, unique_view_names
from crosel.methods.losses import log_one_minus_probability, restrict, soft_cross_entropy
from crosel.methods.proden import uniform_weights
from crosel.nn.networks import forward_split_bn

View = Literal["plain", "weak", "strong", "autoaugment"]


def supervised_loss(logits: Tensor, candidates: Tensor) -> Tensor:
    """L_sup: mean over the batch of -Σ_{j not in S} log(1 - p_j)."""
    return -log_one_minus_probability(logits).masked_fill(candidates, 0.0).sum(dim=1).mean()


def kl_divergence(targets: Tensor, logits: Tensor) -> Tensor:
    """Mean over the batch of KL(w || p) = Σ_j w_j (log w_j - log p_j), with 0 log 0 = 0."""
    return soft_cross_entropy(logits, targets) + torch.xlogy(targets, targets).sum(dim=1).mean()


def consistency_loss(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """L_con: the sum over the views of the mean KL(w || p(x_v))."""
    return torch.stack([kl_divergence(targets, view) for view in logits]).sum()


def consistent_targets(logits: Sequence[Tensor], candidates: Tensor) -> Tensor:
    """Return s_j Π_v p_j(x_v)^(1/V) renormalised, without gradient, float32.

    One softmax over S of the views' mean log-probabilities: no product of small numbers, no quotient.
    """
    mean = torch.stack([F.log_softmax(view.detach().float(), dim=1) for view in logits]).mean(dim=0)
    return torch.softmax(restrict(mean, candidates), dim=1)


def consistency_weight(epoch: int, ramp_epochs: float, consistency: float) -> float:
    """Return min(λ e/R, λ) in epoch 1, 2, …, where e = epoch - 1 epochs are completed."""
    return consistency if epoch - 1 >= ramp_epochs else consistency * (epoch - 1) / ramp_epochs


class CRDPLLSettings(MethodSettings):
    name: Literal["crdpll"] = "crdpll"
    views: tuple[View, View, View] = Field(
        ("weak", "autoaugment", "autoaugment"), description="augmentations of x_0 (used by L_sup), x_1 and x_2"
    )
    consistency: float = Field(1.0, ge=0, description="λ, full weight of the consistency loss")
    ramp_share: float = Field(0.5, ge=0, le=1, description="share of the epochs over which λ grows from 0")


@register
class CRDPLL(Method):
    name = "crdpll"
    title = "CRDPLL"
    paper = "Wu et al., Revisiting Consistency Regularization for Deep Partial Label Learning, ICML 2022"
    Settings = CRDPLLSettings
    tables: ClassVar[Mapping[str, int]] = {"weights": 0}

    settings: CRDPLLSettings
    weights: Tensor
    consistency: Tensor

    def __init__(self, settings: CRDPLLSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        super().__init__(settings, problem, make_network)
        self.register_buffer("weights", uniform_weights(problem.own_candidates))
        # Follows from the epoch alone, so checkpoints need not hold it.
        self.register_buffer("consistency", torch.zeros((), device=problem.candidates.device), persistent=False)
        self.views = unique_view_names(settings.views)

    def begin_epoch(self, epoch: int) -> None:
        ramp_epochs = self.settings.ramp_share * self.problem.epochs
        self.consistency.fill_(consistency_weight(epoch, ramp_epochs, self.settings.consistency))

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream(self.views)}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch = batches["all"]
        candidates = self.candidates[batch.index]
        logits = forward_split_bn(self.networks[0], *(batch[view] for view in self.views))
        supervised = supervised_loss(logits[0], candidates)
        consistency = consistency_loss(logits, self.read(self.weights, batch))
        loss = supervised + self.consistency * consistency
        self.write(self.weights, batch, consistent_targets(logits, candidates))
        return Losses(loss, {"loss_supervised": supervised, "loss_consistency": consistency})

    def metrics(self) -> dict[str, float]:
        return {"consistency_weight": float(self.consistency)}
