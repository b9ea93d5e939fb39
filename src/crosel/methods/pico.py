"""PiCO, contrastive label disambiguation.

Haobo Wang et al., "PiCO: Contrastive Label Disambiguation for Partial Label Learning", ICLR 2022.

Legend: x_q, x_k two views of one example, f logits of x_q, p = softmax(f), S candidate set, w weights of the
labels, q and k unit embeddings of x_q by the query network and of x_k by the key network, ŷ pseudo label, μ_c
prototype of class c (a unit vector; 0 until the class is seen), τ temperature, e epochs completed, E epochs.

    ŷ = argmax over S of p                                                       -> `best_candidate`
    key parameters ← m · key + (1 - m) · query, m = .999                         -> `move_towards`
    L_cls = mean of Σ_j w_j (-log p_j), w at the start 1/|S|                     -> `soft_cross_entropy`
    for every example in turn μ_ŷ ← .99 μ_ŷ + .01 q; after the batch μ ← μ/|μ|   -> `prototype_update`
    after `proto_start` epochs, before the loss is taken:
        w ← φ w + (1 - φ) onehot(argmax over S of q·μ), μ of before the batch    -> `disambiguate`
        φ from .95 to .8, linear in e/E                                          -> `phi`
    L_cont until then: the own key against the queue (InfoNCE)                   -> `info_nce_loss`
    L_cont after that: all in {q, k, queue} with the same ŷ attract (SupCon)     -> `supcon_loss`
    L = L_cls + .5 L_cont; then (k, ŷ) enter the queue, first in, first out      -> `enqueue`

The key network's moving average covers parameters only, as in MoCo: its batch normalisation keeps the statistics of
its own passes. Where paper and released code differ: docs/methods/pico.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.methods.base import STAGE, Batch, Losses, Method, MethodSettings, Problem, Stream, register
from crosel.methods.losses import one_hot, restrict, soft_cross_entropy, to_float32
from crosel.methods.proden import uniform_weights
from crosel.nn.casts import Linear
from crosel.nn.networks import embedding_network

View = Literal["plain", "weak", "strong", "autoaugment", "contrast-weak", "contrast-strong"]


def embed(head: nn.Module, features: Tensor) -> Tensor:
    """Unit vectors [B, d] from features, float32 at least."""
    return F.normalize(to_float32(head(features)), dim=1)


def best_candidate(scores: Tensor, candidates: Tensor) -> Tensor:
    """Return the label with the largest score inside each candidate set, int64 [B]."""
    return restrict(scores, candidates).argmax(dim=1)


def disambiguate(weights: Tensor, labels: Tensor, phi: float | Tensor) -> Tensor:
    """Return φ w + (1 - φ) onehot(label)."""
    return phi * weights + (1 - phi) * one_hot(labels, weights.shape[1])


def phi(epoch: int, epochs: int, start: float, end: float) -> float:
    """Return φ in epoch 1, 2, …: linear in the epochs completed, `start` in the first."""
    return start + (end - start) * (epoch - 1) / epochs


@torch.no_grad()
def move_towards(keys: Sequence[Tensor], queries: Sequence[Tensor], momentum: float) -> None:
    """Move parameters in place: key ← m · key + (1 - m) · query."""
    torch._foreach_lerp_(list(keys), list(queries), 1 - momentum)


@torch.no_grad()
def enqueue(queue: Tensor, queue_labels: Tensor, pointer: Tensor, keys: Tensor, labels: Tensor) -> None:
    """Write the batch over the oldest entries, in place; the pointer stays on the device."""
    size = len(queue)
    keys, labels = keys[-size:], labels[-size:]
    places = (pointer + torch.arange(len(keys), device=queue.device)) % size
    queue.index_copy_(0, places, keys.to(queue.dtype))
    queue_labels.index_copy_(0, places, labels)
    pointer.copy_((pointer + len(keys)) % size)


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


class PiCOSettings(MethodSettings):
    name: Literal["pico"] = "pico"
    query_view: View = Field("contrast-weak", description="augmentation for the query network and for classification")
    key_view: View = Field("contrast-strong", description="augmentation for the key network")
    dimensions: int = Field(128, ge=2, description="size of the embedding")
    queue: int = Field(8192, ge=1, description="number of keys remembered, at most the number of examples")
    key_momentum: float = Field(0.999, ge=0, le=1, description="m, decay of the key network's moving average")
    proto_momentum: float = Field(0.99, ge=0, lt=1, description="decay of the moving average of the prototypes")
    proto_start: int = Field(
        1, ge=0, description="epochs before prototypes and SupCon are used", json_schema_extra=STAGE
    )
    phi_start: float = Field(0.95, ge=0, le=1, description="φ in the first epoch")
    phi_end: float = Field(0.8, ge=0, le=1, description="φ at the end of the run")
    temperature: float = Field(0.07, gt=0, description="τ, temperature of the contrastive loss")
    contrast: float = Field(0.5, ge=0, description="weight of the contrastive loss")


@register
class PiCO(Method):
    name = "pico"
    title = "PiCO"
    paper = "Wang et al., PiCO: Contrastive Label Disambiguation for Partial Label Learning, ICLR 2022"
    Settings = PiCOSettings
    tables: ClassVar[Mapping[str, int]] = {"weights": 0}
    many_rows_defaults: ClassVar[Mapping[str, Any]] = {"phi_start": 0.99, "phi_end": 0.95, "queue": 512}
    best_on = "many rows"

    settings: PiCOSettings
    weights: Tensor
    prototypes: Tensor
    queue: Tensor
    queue_labels: Tensor
    queue_pointer: Tensor
    phi: Tensor

    def __init__(self, settings: PiCOSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        super().__init__(settings, problem, make_network)
        width = embedding_network(self.networks[0], "PiCO").feature_size
        self.head = nn.Sequential(Linear(width, width), nn.ReLU(), Linear(width, settings.dimensions))
        # Kept out of `networks`: only the query network learns from gradients and predicts.
        self.key_network = copy.deepcopy(self.networks[0]).requires_grad_(False)
        self.key_head = copy.deepcopy(self.head).requires_grad_(False)
        device, size = problem.candidates.device, min(settings.queue, problem.n)
        self.register_buffer("weights", uniform_weights(problem.own_candidates))
        self.register_buffer("prototypes", torch.zeros(problem.classes, settings.dimensions, device=device))
        self.register_buffer("queue", F.normalize(torch.randn(size, settings.dimensions), dim=1).to(device))
        self.register_buffer("queue_labels", torch.full((size,), -1, device=device))
        self.register_buffer("queue_pointer", torch.zeros((), dtype=torch.int64, device=device))
        self.register_buffer("phi", torch.tensor(settings.phi_start, device=device), persistent=False)

    def begin_epoch(self, epoch: int) -> None:
        self.phase = "warm-up" if epoch <= self.settings.proto_start else "training"
        self.phi.fill_(phi(epoch, self.problem.epochs, self.settings.phi_start, self.settings.phi_end))

    def streams(self) -> dict[str, Stream]:
        return {"all": Stream((self.settings.query_view, f"{self.settings.key_view}#key"))}

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        batch, settings = batches["all"], self.settings
        candidates = self.candidates[batch.index]
        network = embedding_network(self.networks[0], "PiCO")
        features = network.features(batch[settings.query_view])
        logits = network.classify(features)
        queries = embed(self.head, features)
        labels = best_candidate(logits.detach(), candidates)

        weights = self.read(self.weights, batch)
        if self.phase == "training":
            nearest = best_candidate(matmul_float32(queries.detach(), self.prototypes.T), candidates)
            weights = disambiguate(weights, nearest, self.phi)
            self.write(self.weights, batch, weights)
        # Prototypes, queue and SupCon are about the whole batch: from here on, that of all ranks.
        labels, all_queries = self.all_gather(labels, batch), self.all_gather(queries, batch)
        moved = prototype_update(self.prototypes, all_queries.detach(), labels, settings.proto_momentum)
        self.prototypes.copy_(moved)

        keys = self._keys(batch[f"{settings.key_view}#key"])
        all_keys = self.all_gather(keys, batch)
        # A copy: the queue changes below, and the backward pass still needs what it held.
        queue = self.queue.clone()
        if self.phase == "training":
            others, other_labels = torch.cat([all_keys, queue]), torch.cat([labels, self.queue_labels])
            anchors = self.world.local_rows(len(batch.global_index))
            contrast = supcon_loss(all_queries, others, labels, other_labels, settings.temperature, anchors)
        else:
            contrast = info_nce_loss(queries, keys, queue, settings.temperature)
        enqueue(self.queue, self.queue_labels, self.queue_pointer, all_keys, labels)

        classification = soft_cross_entropy(logits, weights)
        loss = classification + settings.contrast * contrast
        return Losses(loss, {"loss_class": classification, "loss_contrast": contrast})

    @torch.no_grad()
    def _keys(self, x: Tensor) -> Tensor:
        """Move the key network, then embed with it."""
        keys = [*self.key_network.parameters(), *self.key_head.parameters()]
        queries = [*self.networks[0].parameters(), *self.head.parameters()]
        move_towards(keys, queries, self.settings.key_momentum)
        return embed(self.key_head, embedding_network(self.key_network, "PiCO").features(x))

    def metrics(self) -> dict[str, float]:
        return {"phi": float(self.phi)}
