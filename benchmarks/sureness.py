"""How sure CroSel's networks are, and what makes them so. `fall_of_selection.py` measures this after an epoch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from crosel.methods.base import Batch, Stream
from crosel.methods.crosel import CroSel, comix_targets, mix, mixing_weight, selected_loss
from crosel.methods.losses import cc_loss, soft_cross_entropy
from crosel.training.ema import recalibrate_batch_norm
from crosel.training.session import Session


def method_of(session: Session) -> CroSel:
    assert isinstance(session.method, CroSel)
    return session.method


def sureness(p: Tensor) -> dict[str, float]:
    """For probabilities [n, k]: mean of the largest, share of these over 0.9, mean entropy."""
    top = p.amax(1)
    seen = {"top": top, "over_0.9": (top > 0.9).float(), "entropy": torch.special.entr(p).sum(1)}
    return {name: round(value.mean().item(), 4) for name, value in seen.items()}


def calibration(logits: Tensor, y: Tensor) -> dict[str, float]:
    """Accuracy and the mean largest probability. If they differ much, the network is too modest or too sure."""
    top, said = torch.softmax(logits, 1).max(1)
    return {"accuracy": round((said == y).float().mean().item(), 4), "top": round(top.mean().item(), 4)}


def criteria(method: CroSel) -> dict[str, float]:
    """Shares of the examples (mean of the networks) that meet each criterion, and that only this criterion excludes."""
    shares: dict[str, list[float]] = {}
    for bank in method.banks:
        meets = {c: bank.select(method.candidates, method.gamma_used, (c,)).mask for c in (1, 2, 3)}
        for c, mask in meets.items():
            others = torch.stack([m for d, m in meets.items() if d != c]).all(0)
            shares.setdefault(f"meets_{c}", []).append(mask.float().mean().item())
            shares.setdefault(f"only_{c}_rejects", []).append((others & ~mask).float().mean().item())
        shares.setdefault("confidence", []).append(bank.confidence[-1].mean().item())
    return {name: round(sum(values) / len(values), 4) for name, values in shares.items()}


def some_views(session: Session, generator: torch.Generator, of: Tensor | None = None) -> list[Batch]:
    """The same 1,024 training examples each time, in batches of 64; or as many of those given, in cycles."""
    pool = torch.arange(session.data.n) if of is None else of.nonzero().squeeze(1)
    index = pool.repeat(-(-1024 // len(pool)))
    index = index[torch.randperm(len(index), generator=generator)[:1024]]
    streams = {"all": Stream(("plain", "weak", "strong"))}
    return [session.train.batches({"all": rows}, streams, generator)["all"] for rows in torch.split(index, 64)]


@torch.no_grad()
def crossed(network: nn.Module, first: Tensor, second: Tensor, sets: Tensor, temperature: Any) -> tuple[Tensor, Tensor]:
    """Co-mix before MixUp: two views of a batch in turn, each with the target that the other view gives."""
    x = torch.cat([first, second])
    of_first, of_second = network(x).chunk(2)
    return x, torch.cat([comix_targets(f, sets, temperature) for f in (of_second, of_first)])


def mixed(x: Tensor, p: Tensor, alpha: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    weight = mixing_weight(alpha, 1, generator)
    partner = torch.randperm(len(x), generator=generator)
    return mix(x, partner, weight), mix(p, partner, weight)


@torch.no_grad()
def views(session: Session) -> dict[str, Any]:
    """How sure network 1 is of plain, weak and strong views in evaluation mode; of plain ones also with batch norm's
    statistics taken anew from images of one kind alone; what co-mix's targets look like before and after mixing."""
    method, data = method_of(session), session.data
    network = method.networks[0]
    assert data.y is not None
    generator = torch.Generator().manual_seed(5)
    batches, kept = some_views(session, generator), copy.deepcopy(network.state_dict())
    truth = torch.from_numpy(data.y)[torch.cat([b.index for b in batches])]

    def sure_of(view: str) -> dict[str, float]:
        network.eval()
        p = torch.cat([torch.softmax(network(b[view]), 1) for b in batches])
        return sureness(p) | {"accuracy": round((p.argmax(1) == truth).float().mean().item(), 4)}

    seen: dict[str, Any] = {view: sure_of(view) for view in ("plain", "weak", "strong")}
    network.train()
    targets: dict[str, list[Tensor]] = {"weak": [], "strong": [], "mixed": []}
    kinds: dict[str, list[Tensor]] = {view: [b[view] for b in batches] for view in ("plain", "weak", "strong")}
    kinds["mixed"] = []
    for b in batches:
        x, p = crossed(network, b["weak"], b["strong"], method.candidates[b.index], method.temperature)
        mixed_x, mixed_p = mixed(x, p, method.settings.alpha, generator)
        kinds["mixed"].append(mixed_x)
        of_strong, of_weak = p.chunk(2)
        for name, part in (("strong", of_strong), ("weak", of_weak), ("mixed", mixed_p)):
            targets[name].append(part)
    if bool(method.selected[1].any()):
        kinds["selected"] = [b["weak"] for b in some_views(session, generator, method.selected[1])]
    for kind, images in kinds.items():
        network.load_state_dict(kept)
        recalibrate_batch_norm(network, images, network)
        seen[f"plain, statistics of {kind} images"] = sure_of("plain")
    network.load_state_dict(kept)
    return seen | {f"targets, {name}": sureness(torch.cat(rows)) for name, rows in targets.items()}


def pressure(session: Session) -> dict[str, dict[str, float]]:
    """What each loss does to network 1, to first order: the norm of its gradient g, and how fast a step along -g
    changes the mean largest probability of plain images, in evaluation mode."""
    method = method_of(session)
    network = method.networks[0]
    generator = torch.Generator().manual_seed(5)
    batches, kept = some_views(session, generator), copy.deepcopy(network.state_dict())
    weights = list(network.parameters())

    def gradient(loss: Callable[[Batch], Tensor], training: bool) -> list[Tensor]:
        network.train(training)
        total = [torch.zeros_like(w) for w in weights]
        for batch in batches:
            for t, g in zip(total, torch.autograd.grad(loss(batch), weights), strict=True):
                t += g / len(batches)
        network.load_state_dict(kept)
        return total

    def comix(first: str, second: str, temperature: float, alpha: float | None) -> Callable[[Batch], Tensor]:
        def loss(b: Batch) -> Tensor:
            x, p = crossed(network, b[first], b[second], method.candidates[b.index], temperature)
            if alpha is not None:
                x, p = mixed(x, p, alpha, generator)
            return soft_cross_entropy(network(x), p)

        return loss

    def selected(b: Batch) -> Tensor:
        chosen = method.selected[1][b.index]
        return selected_loss(network(b["weak"])[chosen], method.labels[1][b.index][chosen].long())

    terms: dict[str, Callable[[Batch], Tensor]] = {
        "CC, weak": lambda b: cc_loss(network(b["weak"]), method.candidates[b.index]),
        "CC, strong": lambda b: cc_loss(network(b["strong"]), method.candidates[b.index]),
        "co-mix, T 1, weak and weak, no MixUp": comix("weak", "weak", 1.0, None),
        "co-mix, T 1, no MixUp": comix("weak", "strong", 1.0, None),
        "co-mix, T 1, weak and weak": comix("weak", "weak", 1.0, 0.75),
        "co-mix, T 1": comix("weak", "strong", 1.0, 0.75),
        "co-mix, T 0.5, no MixUp": comix("weak", "strong", 0.5, None),
        "co-mix, T 0.5": comix("weak", "strong", 0.5, 0.75),
        "selected": selected,
    }
    rise = gradient(lambda b: torch.softmax(network(b["plain"]), 1).amax(1).mean(), False)
    out = {}
    for name, loss in terms.items():
        g = gradient(loss, True)
        norm = sum((part**2).sum() for part in g) ** 0.5
        slope = -sum((a * b).sum() for a, b in zip(g, rise, strict=True))
        out[name] = {"norm": round(float(norm), 4), "slope": round(float(slope), 4)}
    return out
