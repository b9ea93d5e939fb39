"""CroSel: two networks select confident labels for each other from their prediction history.

Shiyu Tian, Hongxin Wei, Yiqun Wang, Lei Feng, "CroSel: Cross Selection of Confident Pseudo Labels for
Partial-Label Learning", CVPR 2024.

Legend: f logits, S candidate set, q^1..q^t a network's last t softmax outputs for an example, x_w and x_s weak and
strong view, B batch size, r_s share of the examples that are selected.

| equation | function |
|---|---|
| (1), (2), (3)  criteria β1, β2, β3 | `methods.bank`: `label_is_candidate`, `label_is_stable`, `confidence_is_high` |
| (4)  D_sel | `crosel.methods.bank.MemoryBank.select` |
| (5)  L_l = mean cross-entropy of x_w against the *other* network's selected label | `selected_loss` |
| (6)  f' = (f1 + f2) / 2 | `average_outputs` |
| (7)  pseudo label: sharpened with T, restricted to S, renormalised | `comix_targets` |
| (8), (9)  λ ~ Beta(α, α), λ' = max(λ, 1-λ) | `mixing_weight` |
| (10), (11)  x' and p' mixed with a random partner | `mix` |
| (12)  L_cr = mean soft cross-entropy over the 2B mixed pairs | `crosel.methods.losses.soft_cross_entropy` |
| (13)  L = L_l + λ_d L_cr | `total_loss` |
| (14)  λ_d = (1 - r_s) λ_cr | `dynamic_weight` |

Targets come from the network itself, without gradient, in train mode (batch statistics; running statistics move),
from one pass over both views. The bank sees every un-augmented example in evaluation mode after every epoch. Where
paper and released code differ, and which settings are ours: docs/methods/crosel.md.

The defaults are for tens of epochs on a few thousand examples, where the paper's settings lose classes
(docs/study.md): two fifths of the epochs are warm-up, T and λ_cr begin at 1, MixUp and the strong view are milder.
The presets `paper/…` have the paper's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from crosel.errors import UserError
from crosel.methods.bank import MemoryBank
from crosel.methods.base import (
    STAGE,
    Batch,
    Losses,
    Method,
    MethodSettings,
    Problem,
    Stream,
    TrainingLabels,
    register,
)
from crosel.methods.losses import candidate_probabilities, cc_loss, soft_cross_entropy, to_float32
from crosel.methods.outside import TREATMENTS, Keep
from crosel.nn.cuda import StreamPool
from crosel.nn.networks import forward_split_bn
from crosel.utils.text import counted

logger = logging.getLogger(__name__)

View = Literal["plain", "weak", "strong"]


def selected_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Eq. (5): mean cross-entropy against the selected labels."""
    return F.cross_entropy(to_float32(logits), labels)


def average_outputs(outputs: Tensor, of: Literal["logits", "probabilities"] = "logits") -> Tensor:
    """Eq. (6): class probabilities [B, k] from the networks' logits [v, B, k]."""
    if of == "logits":
        return torch.softmax(outputs.float().mean(dim=0), dim=1)
    return torch.softmax(outputs.float(), dim=2).mean(dim=0)


def comix_targets(
    logits: Tensor, candidates: Tensor, temperature: float | Tensor, log_weights: Tensor | None = None
) -> Tensor:
    """Eq. (7): (w p)^(1/T) restricted to S and renormalised, with the candidates' weights w, if any. No gradient."""
    return candidate_probabilities(logits.detach(), candidates, temperature, log_weights)


def mixing_weight(alpha: float, count: int, generator: torch.Generator) -> Tensor:
    """Eqs. (8), (9): λ' = max(λ, 1-λ), λ ~ Beta(α, α), on the generator's device: [count].

    A Beta draw is g1 / (g1 + g2) of two Gamma(α) draws, and Gamma(α) is Gamma(α+1) · u^(1/α): in logarithms, which do
    not underflow for small α. `torch._standard_gamma` is what torch's own Beta distribution calls; it is used here
    because that class takes no generator.
    """
    gamma = torch._standard_gamma(torch.full((2, count), alpha + 1, device=generator.device), generator=generator)
    u = 1 - torch.rand(2, count, generator=generator, device=generator.device)
    logs = gamma.log() + u.log() / alpha
    return torch.sigmoid((logs[0] - logs[1]).abs())


def mix(values: Tensor, partner: Tensor, weight: Tensor) -> Tensor:
    """Eqs. (10), (11): λ' v_i + (1-λ') v_partner(i), with one weight [1] for all or one a row [B]."""
    return interpolate(values, values[partner], weight)


def interpolate(values: Tensor, others: Tensor, weight: Tensor) -> Tensor:
    weight = weight.view(-1, *[1] * (values.ndim - 1)).to(values.dtype)
    return weight * values + (1 - weight) * others


def total_loss(selected: Tensor, comix: Tensor, weight: Tensor | float) -> Tensor:
    """Eq. (13)."""
    return selected + weight * comix


def dynamic_weight(selected_share: float, lambda_cr: float) -> float:
    """Eq. (14)."""
    return (1 - selected_share) * lambda_cr


def ramp(start: float | None, end: float, progress: float) -> float:
    """Go linearly from start to end as progress goes from 0 to 1; without a start, stay at the end."""
    return end if start is None else start + (end - start) * min(1.0, max(0.0, progress))


class CroSelSettings(MethodSettings):
    name: Literal["crosel"] = "crosel"
    networks: Literal[1, 2] = Field(
        2, description="number of networks: two select for each other, one selects for itself"
    )
    warmup: int | None = Field(
        None,
        ge=1,
        description="epochs of CC before selection begins; default: two fifths of all",
        json_schema_extra=STAGE,
    )
    warmup_view: View = Field("weak", description="augmentation during warm-up")
    bank_length: int = Field(3, ge=1, description="t, length of the history in epochs")
    gamma: float = Field(0.9, ge=0, le=1, description="γ, threshold for the mean confidence over the history")
    criteria: tuple[Literal[1, 2, 3], ...] = Field((1, 2, 3), description="which of the criteria β1, β2, β3 apply")
    lambda_cr: float = Field(4.0, ge=0, description="λ_cr, weight of the co-mix loss")
    dynamic_lambda: bool = Field(True, description="scale λ_cr by the share of examples not selected (Eq. 14)")
    scope: Literal["all", "unselected", "unselected-once", "none"] = Field(
        "all",
        description="which examples co-mix uses; unselected-once: the unselected in smaller batches, which cost less",
    )
    selected_view: View = Field("weak", description="augmentation of the selected batch")
    least_selected: int = Field(
        1, ge=1, description="if fewer examples are selected, a network learns from co-mix alone"
    )  # batches of a handful, often of one class, lead batch norm's running statistics astray, and with them the bank
    temperature: float = Field(0.5, gt=0, description="T, temperature that sharpens the pseudo labels")
    alpha: float = Field(0.25, gt=0, description="α of the Beta distribution of MixUp; in the paper 0.75")
    mix_per_pair: bool = Field(False, description="draw one λ for each pair instead of one per step")
    target_mode: Literal["train", "eval"] = Field(
        "train", description="mode of batch norm in the pass that makes the pseudo labels"
    )
    ensemble: Literal["logits", "probabilities"] = Field(
        "logits", description="what is averaged over the networks to predict"
    )
    gamma_start: float | None = Field(None, ge=0, le=1, description="γ when selection begins; default: γ itself")
    ramp: int | None = Field(
        None,
        ge=0,
        description="epochs after warm-up in which the *_start values move to their final values; default: half of "
        "the epochs that are left; 0: none, as in the paper",
        json_schema_extra=STAGE,
    )
    temperature_start: float | None = Field(
        None,
        gt=0,
        description="T when selection begins; default: 1, or T itself if it is larger; set to null: T itself",
    )
    lambda_cr_start: float | None = Field(
        None,
        ge=0,
        description="λ_cr when selection begins; default: 1, or λ_cr itself if it is smaller; set to null: λ_cr itself",
    )
    outside: Literal["keep", "drop", "take"] = Field(
        "keep",
        description="examples whose set seems to miss the true label: keep as they are, drop, or take the new label",
    )
    outside_gamma: float | None = Field(
        None, ge=0, le=1, description="confidence needed for `outside`, at most γ; default: γ"
    )

    def filled_in(self, epochs: int) -> CroSelSettings:
        warmup = self.warmup or (max(1, 2 * epochs // 5) if epochs > 1 else None)
        ramp = max(0, epochs - (warmup or 1)) // 2 if self.ramp is None else self.ramp
        gentle = {"temperature_start": self.temperature < 1, "lambda_cr_start": self.lambda_cr > 1}
        starts = {name: 1.0 for name, moves in gentle.items() if ramp and moves and name not in self.model_fields_set}
        filled = self.model_copy(update={"warmup": warmup, "ramp": ramp, **starts})
        nothing_moves = self.ramp is None and not filled._starts()
        return filled.model_copy(update={"ramp": 0}) if nothing_moves else filled

    def _starts(self) -> list[str]:
        names = ("gamma_start", "lambda_cr_start", "temperature_start")
        return [name for name in names if getattr(self, name) is not None]

    def remarks(self, epochs: int) -> list[str]:
        given = self._starts()
        lines = super().remarks(epochs)
        if epochs == 1 and self.warmup is None:
            lines.append("one epoch is a warm-up and selects nothing for CroSel to learn from; raise train.epochs")
        room = epochs - (self.warmup or 1) > 1  # else a ramp was cut away with the epochs of a preset or a file
        if given and self.ramp == 0 and room:
            lines.append(
                f"method.{given[0]} has no effect without method.ramp, the epochs in which it moves to its final value"
            )
        if self.ramp and not given:
            lines.append(
                f"method.ramp={self.ramp} has no effect without a start value: method.gamma_start, "
                "method.lambda_cr_start or method.temperature_start"
            )
        if self.least_selected > 1 and self.scope == "none":
            lines.append(
                f"method.least_selected={self.least_selected} with method.scope=none: while fewer are selected, "
                "a network learns nothing"
            )
        if self.outside_gamma is not None and self.outside_gamma > self.gamma:
            lines.append(f"method.outside_gamma={self.outside_gamma} is above method.gamma; {self.gamma} is used")
        return lines


@register
class CroSel(Method):
    name = "crosel"
    title = "CroSel"
    paper = "Tian et al., CroSel: Cross Selection of Confident Pseudo Labels for Partial-Label Learning, CVPR 2024"
    Settings = CroSelSettings
    tables: ClassVar[Mapping[str, int]] = {"epochs_selected": 1}  # and the banks'
    watches_training_set = True
    view_defaults: ClassVar[Mapping[str, Any]] = {"strong_ops": 1, "cutout": 0.25}
    witness = "proden"
    best_on = "few rows"

    settings: CroSelSettings
    banks: Sequence[MemoryBank]  # an nn.ModuleList; this is how its members are typed
    selected: Tensor
    labels: Tensor
    epochs_selected: Tensor  # int32 [v, n]; only for people to look at
    lambda_d: Tensor
    temperature: Tensor
    gamma_used: Tensor
    outside: Keep  # or another treatment of examples whose set seems to miss the truth

    def __init__(self, settings: CroSelSettings, problem: Problem, make_network: Callable[[], nn.Module]) -> None:
        settings = settings.filled_in(problem.epochs)
        super().__init__(settings, problem, make_network, networks=settings.networks)
        if settings.warmup is not None and settings.warmup >= problem.epochs:
            raise UserError(
                f"method.warmup is {settings.warmup}, but the run has only {counted(problem.epochs, 'epoch')}: nothing "
                "would ever be selected; raise train.epochs or lower method.warmup"
            )
        self.warmup = settings.warmup or 1
        own = len(problem.own_candidates)
        self.banks = cast(
            Sequence[MemoryBank], nn.ModuleList(MemoryBank(settings.bank_length, own) for _ in self.networks)
        )
        self.register_buffer("selected", torch.zeros(settings.networks, problem.n, dtype=torch.bool))
        self.register_buffer("labels", torch.full((settings.networks, problem.n), -1, dtype=torch.int32))
        self.register_buffer("epochs_selected", torch.zeros(settings.networks, own, dtype=torch.int32))
        self.register_buffer("lambda_d", torch.zeros(()), persistent=False)
        self.register_buffer("temperature", torch.ones(()), persistent=False)
        self.register_buffer("gamma_used", torch.tensor(settings.gamma))
        self.outside = TREATMENTS[settings.outside](problem.n)
        self._entry_open = False

    def teacher(self, network: int) -> int:
        """The network whose selection `network` learns from."""
        return len(self.networks) - 1 - network

    def _progress(self, epoch: int) -> float:
        length = self.settings.ramp
        return (epoch - self.warmup - 1) / length if length else 1.0

    def begin_epoch(self, epoch: int) -> None:
        s = self.settings
        self.phase = "warm-up" if epoch <= self.warmup else "selection"
        progress = self._progress(epoch)
        lambda_cr = ramp(s.lambda_cr_start, s.lambda_cr, progress) if s.scope != "none" else 0.0
        share = self.outside.selected_share(self._trained_on()) if s.dynamic_lambda else 0.0
        self.lambda_d.fill_(dynamic_weight(share, lambda_cr) if self.phase == "selection" else 0.0)
        self.temperature.fill_(ramp(s.temperature_start, s.temperature, progress))

    def streams(self) -> dict[str, Stream]:
        s, n, streams = self.settings, self.problem.n, {}
        if self.phase == "warm-up":
            return {
                f"all_{v}": Stream((s.warmup_view,), pool=self.outside.warmup_pool()) for v in range(len(self.networks))
            }
        pools = [self._selection_pools(learnt) for learnt in self._trained_on()]
        most = max(n if mixed is None else len(mixed) for _, mixed in pools)  # one size for both: fewer sizes in all
        share = most / n if s.scope == "unselected-once" else 1.0
        for v, (chosen, mixed) in enumerate(pools):
            if len(chosen):
                streams[f"selected_{v}"] = Stream((s.selected_view,), pool=chosen)
            if s.scope != "none" and (mixed is None or len(mixed)):
                streams[f"all_{v}"] = Stream(("weak", "strong"), pool=mixed, share=share)
        return streams

    def _trained_on(self) -> Tensor:
        """What each network learns with one label, which its teacher chose: bool [v, n]."""
        chosen = self.outside.selected(self.selected[[self.teacher(v) for v in range(len(self.networks))]])
        return chosen & (chosen.sum(dim=1, keepdim=True) >= self.settings.least_selected)

    def _selection_pools(self, learnt: Tensor) -> tuple[Tensor, Tensor | None]:
        """What a network draws from after the warm-up: what it learns with one label, and co-mix (None: all)."""
        mixed = self.outside.mixed(~learnt if self.settings.scope.startswith("unselected") else None)
        return learnt.nonzero().squeeze(1), None if mixed is None else mixed.nonzero().squeeze(1)

    def loss(self, batches: Mapping[str, Batch], generator: torch.Generator) -> Losses:
        pool, parts = StreamPool(self.lambda_d.device), []
        for v in range(len(self.networks)):
            with pool.stream(v):
                if self.phase == "warm-up":
                    parts.append(self._warmup_losses(v, batches))
                else:
                    parts.append(self._selection_losses(v, batches, generator))
        pool.join()
        by_name = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
        return Losses(by_name["loss"].sum(), {name: values.detach().mean() for name, values in by_name.items()})

    def _warmup_losses(self, v: int, batches: Mapping[str, Batch]) -> dict[str, Tensor]:
        """CC's loss, for network v."""
        batch = batches[f"all_{v}"]
        logits = self.networks[v](batch[self.settings.warmup_view])
        sets = self.outside.sets(self.candidates[batch.index], batch.index)
        return {"loss": cc_loss(logits, sets, self.log_weights_of(batch))}

    def _selection_losses(self, v: int, batches: Mapping[str, Batch], generator: torch.Generator) -> dict[str, Tensor]:
        """Eq. (13) and its two parts, for network v."""
        network = self.networks[v]
        chosen, everything = batches.get(f"selected_{v}"), batches.get(f"all_{v}")
        mixed = None if everything is None else self._mixed_views(network, everything, generator)
        passes = [] if chosen is None else [chosen[self.settings.selected_view]]
        logits = forward_split_bn(network, *passes, *([] if mixed is None else [mixed[0]]))
        selected = comix = self.lambda_d.new_zeros(())
        if chosen is not None:
            labels = self.labels[self.teacher(v)][chosen.index].long()
            selected = selected_loss(logits[0], self.outside.labels(labels, chosen.index))
        if everything is not None and mixed is not None:
            comix = soft_cross_entropy(logits[-1], mixed[1])
            comix = comix if everything.weight == 1 else comix * everything.weight
        loss = total_loss(selected, comix, self.lambda_d)
        return {"loss": loss, "loss_selected": selected, "loss_comix": comix}

    @torch.no_grad()
    def _mixed_views(self, network: nn.Module, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Eqs. (7) to (11): both views of a batch with the targets that the network itself makes, mixed."""
        candidates, log_weights = self.candidates[batch.index], self.log_weights_of(batch)
        x = torch.cat([batch["weak"], batch["strong"]])
        network.train(self.settings.target_mode == "train")
        of_weak, of_strong = network(x).chunk(2)
        network.train()
        # Crossed: the weak view learns what the network says of the strong one, and the other way round.
        targets = torch.cat([comix_targets(of_strong, candidates, self.temperature, log_weights),
                             comix_targets(of_weak, candidates, self.temperature, log_weights)])  # fmt: skip
        total = 2 * len(batch.global_index)
        weight = mixing_weight(self.settings.alpha, total if self.settings.mix_per_pair else 1, generator)
        # A random permutation as an argsort: unlike randperm it can be captured in a CUDA graph.
        partner = torch.rand(total, generator=generator, device=generator.device).argsort()
        return self._mixed(x, partner, weight), self._mixed(targets, partner, weight)

    def _mixed(self, values: Tensor, partner: Tensor, weight: Tensor) -> Tensor:
        """Mix with partners from the whole batch, which may be with other ranks."""
        if self.world.size == 1:
            return mix(values, partner, weight)
        weight = self.world.local_shard(weight, 2) if len(weight) > 1 else weight
        return interpolate(values, self.world.fetch_rows(values, partner, 2), weight)

    def observe(self, rows: slice, outputs: Tensor) -> None:
        if not self._entry_open:
            for bank in self.banks:
                bank.shift()
            self._entry_open = True
        ours = slice(rows.start - self.rows.start, rows.stop - self.rows.start)
        for bank, logits in zip(self.banks, outputs, strict=True):
            bank.write(ours, torch.softmax(logits.float(), dim=1))

    def end_epoch(self, epoch: int) -> None:
        self._entry_open = False
        s = self.settings
        gamma = ramp(s.gamma_start, s.gamma, self._progress(epoch + 1))  # of the epoch that will train on it
        self.gamma_used.fill_(gamma)
        for v, bank in enumerate(self.banks):
            chosen = bank.select(self.candidates[self.rows], gamma, s.criteria)
            self.selected[v] = self._of_all_ranks(chosen.mask)
            self.labels[v] = self._of_all_ranks(chosen.labels.to(torch.int32))
        self.epochs_selected += self.selected[:, self.rows]
        stable = torch.stack([self._of_all_ranks(mask) for mask in self._stable()])
        self.outside.update(stable, self.labels, self.candidates)

    def _of_all_ranks(self, values: Tensor) -> Tensor:
        """Values [n] of all examples, from those of this rank's."""
        return self.world.all_gather(values, self.problem.n)

    def _stable(self, outside_gamma: float | None = None) -> Tensor:
        """Where each network is stable and confident (β2, β3), inside S or not: bool [v, n], this rank's examples."""
        gamma, most = self.gamma_used, self.settings.outside_gamma if outside_gamma is None else outside_gamma
        if most is not None:
            gamma = gamma.clamp(max=most)  # never above γ: what is selected is stable, too
        return torch.stack([bank.select(self.candidates, gamma, (2, 3)).mask for bank in self.banks])

    def metrics(self) -> dict[str, float]:
        shares = self.selected.float().mean(dim=1).tolist()
        out = {"lambda_d": float(self.lambda_d), "selection_ratio": sum(shares) / len(shares)}
        if len(shares) > 1:
            out |= {f"selection_ratio_{v + 1}": share for v, share in enumerate(shares)}
        if self.phase == "warm-up":  # which has neither: as in a step where nothing is selected and λ_d = 0
            out |= {"loss_selected": 0.0, "loss_comix": 0.0}
        return out | self.outside.metrics()

    def combine(self, outputs: Tensor) -> Tensor:
        return average_outputs(outputs, self.settings.ensemble)

    def training_labels(self, outside_gamma: float | None = None) -> TrainingLabels:
        if outside_gamma is not None and outside_gamma > (gamma := self.settings.gamma):
            logger.warning(f"--outside-gamma {outside_gamma:g} is above the run's method.gamma; {gamma:g} is used")
        confidence = torch.stack([bank.confidence.mean(dim=0) for bank in self.banks])
        return TrainingLabels(
            self.labels.long(), confidence, self._stable(outside_gamma), self.selected, self.epochs_selected,
            torch.stack([bank.labels for bank in self.banks]), torch.stack([bank.confidence for bank in self.banks]),
        )  # fmt: skip
