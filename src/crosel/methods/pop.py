"""PoP, progressive purification of the candidate sets.

Ning Xu et al., "Progressive Purification for Instance-Dependent Partial Label Learning", ICML 2023.

Legend: x_0, x_1, x_2 views of one example (un-augmented, strong, strong), f logits, p = softmax(f), S the
candidate set as purified so far, w weights of the labels, a their mean over the last 5 epochs, θ threshold,
e epochs completed before the present one.

    w at the start: 1/|S| on S                                                   -> `uniform_weights`
    L = mean over v of PRODEN's loss Σ_j w_j (-log p_j(x_v)), one w for all      -> `pop_loss`
    w after that:   p_j(x_0) on S, renormalised, from the same pass              -> `proden_weights`
    at the end of the epochs with e = 20, 25, 30, …:
        drop j from S where a_j / max_{i in S} a_i < θ; w = a on the new S       -> `purify`
        if fewer than 1e-4 n k entries changed and θ < .4: θ ← θ (1 + .001)      -> `raise_threshold`

The likeliest label has the ratio 1 and θ stays under 1, so it is never dropped and no set empties.

The schedule of θ is the released code's, which keeps θ far from the cap. S is kept apart from w, so that an
underflowed weight can return until its label is dropped. The other differences: docs/methods/pop.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from crosel.methods.base import (
    STAGE,
    Batch,
    Losses,
    Method,
    MethodSettings,
    Problem,
    Stream,
    register,
    unique_view_names,
)
from crosel.methods.proden import proden_loss, proden_weights, uniform_weights
from crosel.nn.networks import forward_split_bn

View = Literal["plain", "weak", "strong", "autoaugment"]


def pop_loss(logits: Sequence[Tensor], weights: Tensor) -> Tensor:
    """Mean over the views of PRODEN's loss, with the same weights for all."""
    return torch.stack([proden_loss(view, weights) for view in logits]).mean()


def purify(mean_weights: Tensor, candidates: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
    """Drop every label whose mean weight is under θ times the largest: the new sets, and weights on them.

    Every row of `mean_weights` must hold some weight inside its set.
    """
    inside = mean_weights.masked_fill(~candidates, 0.0)
    # A product instead of the quotient a/max: for θ < 1 no rounding can put a row's maximum under it.
    kept = candidates & ~(inside < threshold * inside.amax(dim=1, keepdim=True))
    inside = inside.masked_fill(~kept, 0.0)
    return kept, inside / inside.sum(dim=1, keepdim=True)


def raise_threshold(threshold: Tensor, changed: Tensor, limit: float, growth: float, cap: float) -> Tensor:
    """Return θ (1 + growth) but at most the cap, if fewer than `limit` entries changed; else θ."""
    raised = (threshold * (1 + growth)).clamp(max=cap)
    return torch.where((changed < limit) & (threshold < cap), raised, threshold)


class PoPSettings(MethodSettings):
    name: Literal["pop"] = "pop"
    views: tuple[View, View, View] = Field(
        ("plain", "autoaugment", "autoaugment"),
        description="augmentations of x_0 (which sets the weights), x_1 and x_2",
    )
    warm_up: int = Field(
        20, ge=0, description="epochs before the first epoch that ends with purification", json_schema_extra=STAGE
    )
    every: int = Field(5, ge=1, description="epochs from one purification to the next")
    history: int = Field(5, ge=1, description="number of epochs over which label weights are averaged")
    threshold: float = Field(1e-3, gt=0, lt=1, description="θ, threshold at the start")
    growth: float = Field(1e-3, ge=0, description="θ grows to θ (1 + growth) when the sets have settled")
    cap: float = Field(0.4, gt=0, lt=1, description="upper limit for the growth of θ")
    settled: float = Field(
        1e-4, gt=0, le=1, description="the sets have settled if fewer than this share of n x k entries changed"
    )

    def remarks(self, epochs: int) -> list[str]:
        lines = super().remarks(epochs)
        if self.cap < self.threshold:
            lines.append(f"method.cap={self.cap} has no effect: method.threshold={self.threshold} is already above it")
        return lines


@register
class PoP(Method):
    name = "pop"
    title = "PoP"
    paper = "Xu et al., Progressive Purification for Instance-Dependent Partial Label Learning, ICML 2023"
    Settings = PoPSettings
    tables: ClassVar[Mapping[str, int]] = {"weights": 0, "purified": 0, "history": 1}

    settings: PoPSettings
    weights: Tensor
    purified: Tensor
    history: Tensor
    threshold: Tensor

    def __init__(self, settings: PoPSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        super().__init__(settings, problem, make_network)
        candidates = problem.own_candidates
        self.register_buffer("weights", uniform_weights(candidates))
        self.register_buffer("purified", candidates.clone())
        # Epochs not yet recorded are 0: they scale a row of the mean, and `purify` does not feel scale.
        history = torch.zeros(settings.history, *candidates.shape, device=candidates.device)
        self.register_buffer("history", history)
        self.register_buffer("threshold", torch.tensor(settings.threshold, device=candidates.device))
        self.views = unique_view_names(settings.views)

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream(self.views)}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch = batches["all"]
        logits = forward_split_bn(self.networks[0], *(batch[view] for view in self.views))
        loss = pop_loss(logits, self.read(self.weights, batch))
        self.write(self.weights, batch, proden_weights(logits[0], self.read(self.purified, batch)))
        return Losses(loss)

    def end_epoch(self, epoch: int) -> None:
        completed = epoch - 1
        self.history[completed % self.settings.history] = self.weights
        if completed < self.settings.warm_up or (completed - self.settings.warm_up) % self.settings.every:
            return
        purified, weights = purify(self.history.mean(dim=0), self.purified, self.threshold)
        changed = self.world.all_reduce((purified != self.purified).sum())
        limit = self.settings.settled * self.problem.candidates.numel()
        self.threshold.copy_(raise_threshold(self.threshold, changed, limit, self.settings.growth, self.settings.cap))
        self.purified.copy_(purified)
        self.weights.copy_(weights)

    def metrics(self) -> dict[str, float]:
        return {
            "threshold": float(self.threshold),
            "purified_set_size": float(self.world.all_reduce(self.purified.sum())) / self.problem.n,
        }
