"""PRODEN, progressive identification of the true label.

Jiaqi Lv et al., "Progressive Identification of True Labels for Partial-Label Learning", ICML 2020.

Legend: f logits, p = softmax(f), S candidate set, s its 0/1 row, w weights of the labels (a row sums to 1).

    w at the start: s / |S|                                                           -> `uniform_weights`
    L = mean of Σ_j w_j (-log p_j)                                                    -> `proden_loss`
    w after that:   p_j s_j / Σ_{i in S} p_i, from the same forward pass              -> `proden_weights`

The loss of a step uses the weights that the example's previous visit left behind.

The released code reads S off the weights (w > 0); we keep S apart, so that a weight which underflowed can return.
The other differences: docs/methods/proden.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from crosel.methods.base import Batch, Losses, Method, MethodSettings, Problem, Stream, register
from crosel.methods.losses import candidate_probabilities, soft_cross_entropy


def uniform_weights(candidates: Tensor) -> Tensor:
    """Return 1/|S| on each candidate set and 0 elsewhere, float32 [n, k]."""
    sets = candidates.float()
    return sets.div_(sets.sum(dim=1, keepdim=True))  # in place: a row for each example


def first_weights(candidates: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """The weights at the start: the candidates' own, as shares of their set; without any, 1/|S|."""
    if log_weights is None:
        return uniform_weights(candidates)
    return candidate_probabilities(torch.zeros_like(log_weights), candidates, log_weights=log_weights)


def proden_loss(logits: Tensor, weights: Tensor) -> Tensor:
    """Mean over the batch of Σ_j w_j (-log p_j)."""
    return soft_cross_entropy(logits, weights)


def proden_weights(logits: Tensor, candidates: Tensor, log_weights: Tensor | None = None) -> Tensor:
    """Return p_j s_j / Σ_S p without gradient: a distribution on each candidate set, float32. With weights of the
    candidates, p_j becomes v_j p_j."""
    return candidate_probabilities(logits.detach(), candidates, log_weights=log_weights)


class PRODENSettings(MethodSettings):
    name: Literal["proden"] = "proden"
    view: Literal["plain", "weak", "strong"] = Field("weak", description="augmentation of the training batch")


@register
class PRODEN(Method):
    name = "proden"
    title = "PRODEN"
    paper = "Lv et al., Progressive Identification of True Labels for Partial-Label Learning, ICML 2020"
    Settings = PRODENSettings
    tables: ClassVar[Mapping[str, int]] = {"weights": 0}

    settings: PRODENSettings
    weights: Tensor

    def __init__(self, settings: PRODENSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        super().__init__(settings, problem, make_network)
        own_log_weights = None if self.log_weights is None else self.log_weights[self.rows]
        self.register_buffer("weights", first_weights(problem.own_candidates, own_log_weights))

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream((self.settings.view,))}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch = batches["all"]
        logits = self.networks[0](batch[self.settings.view])
        loss = proden_loss(logits, self.read(self.weights, batch))
        # The gathered rows above are a copy, so the table may change before the backward pass.
        log_weights = self.log_weights_of(batch)
        self.write(self.weights, batch, proden_weights(logits, self.candidates[batch.index], log_weights))
        return Losses(loss)
