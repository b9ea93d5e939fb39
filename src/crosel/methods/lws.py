"""LWS, the leveraged weighted loss with the sigmoid.

Hongwei Wen et al., "Leveraged Weighted Loss for Partial Label Learning", ICML 2021.

Legend: f raw logits, σ the logistic function, p = softmax(f), S candidate set, k classes, w weights of all
labels (inside and outside S), β what the labels outside S count, ε = 1e-8.

    L = mean of [ Σ_{j in S} w_j σ(-f_j)  +  β Σ_{j not in S} w_j σ(f_j) ]       -> `lws_terms`
    or, with cross-entropy, -log p_j in place of σ(-f_j) and -log(1 - p_j) in place of σ(f_j)   -> `lwc_terms`
    w at the start: 1/k on every label
    w after a step: p_j / (Σ_{i in A} p_i + k ε), where A is S for the labels    -> `lws_weights`
                    in S, and the complement for the others

After the first update the weights are all but a distribution on S and another on its complement. ε matters
only where one side holds next to no probability; a full set has nothing outside, and its second term is 0.

Of the authors' two programs we follow the one that takes the new weights from one more pass after the step, in
training mode and without gradient. LWS can lose whole classes; LWC (`loss: cross-entropy`) lost none. Where paper
and released code differ: docs/methods/lws.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from crosel.methods.base import Batch, Losses, Method, MethodSettings, Problem, Stream, register
from crosel.methods.losses import log_one_minus_probability, to_float32


def lws_terms(logits: Tensor, candidates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of Σ_{j in S} w_j σ(-f_j) and of Σ_{j not in S} w_j σ(f_j)."""
    logits = to_float32(logits)
    inside = (weights * torch.sigmoid(-logits)).masked_fill(~candidates, 0.0)
    outside = (weights * torch.sigmoid(logits)).masked_fill(candidates, 0.0)
    return inside.sum(dim=1).mean(), outside.sum(dim=1).mean()


def lwc_terms(logits: Tensor, candidates: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means of -Σ_{j in S} w_j log p_j and of -Σ_{j not in S} w_j log(1 - p_j)."""
    logits = to_float32(logits)
    inside = (weights * torch.log_softmax(logits, dim=1)).masked_fill(~candidates, 0.0)
    outside = (weights * log_one_minus_probability(logits)).masked_fill(candidates, 0.0)
    return -inside.sum(dim=1).mean(), -outside.sum(dim=1).mean()


def lws_weights(logits: Tensor, candidates: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Return p renormalised within S and, separately, within its complement, without gradient, float32."""
    p = torch.softmax(logits.detach().float(), dim=1)
    inside, outside = p.masked_fill(~candidates, 0.0), p.masked_fill(candidates, 0.0)
    return inside / (inside + epsilon).sum(dim=1, keepdim=True) + outside / (outside + epsilon).sum(dim=1, keepdim=True)


class LWSSettings(MethodSettings):
    name: Literal["lws"] = "lws"
    view: Literal["plain", "weak", "strong"] = Field("weak", description="augmentation of the training batch")
    loss: Literal["sigmoid", "cross-entropy"] = Field(
        "sigmoid", description="loss of a single label: sigmoid for LWS, cross-entropy for LWC"
    )
    beta: float = Field(1.0, ge=0, description="β, weight of the labels outside the candidate set")
    epsilon: float = Field(1e-8, gt=0, description="added to each term when weights are renormalised")


@register
class LWS(Method):
    name = "lws"
    title = "LWS"
    paper = "Wen et al., Leveraged Weighted Loss for Partial Label Learning, ICML 2021"
    Settings = LWSSettings
    tables: ClassVar[Mapping[str, int]] = {"weights": 0}

    settings: LWSSettings
    weights: Tensor

    def __init__(self, settings: LWSSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        super().__init__(settings, problem, make_network)
        self.register_buffer(
            "weights", torch.full_like(problem.own_candidates, 1 / problem.classes, dtype=torch.float32)
        )

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream((self.settings.view,))}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch = batches["all"]
        logits = self.networks[0](batch[self.settings.view])
        terms = lws_terms if self.settings.loss == "sigmoid" else lwc_terms
        inside, outside = terms(logits, self.candidates[batch.index], self.read(self.weights, batch))
        loss = inside + self.settings.beta * outside
        return Losses(loss, {"loss_candidates": inside, "loss_others": outside})

    @torch.no_grad()
    def after_step(self, batches: Mapping[str, Batch]) -> None:
        batch = batches["all"]
        logits = self.networks[0](batch[self.settings.view])
        self.write(self.weights, batch, lws_weights(logits, self.candidates[batch.index], self.settings.epsilon))
