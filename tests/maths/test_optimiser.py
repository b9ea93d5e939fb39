"""The optimisers against their update rules, written out; what they keep goes through a checkpoint by name."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

from crosel.config import TrainSettings
from crosel.errors import UserError
from crosel.training.optimiser import Optimiser, optimiser_state, restore_optimiser

CPU = torch.device("cpu")
LR, DECAY, STEPS = 0.1, 0.01, 5
KINDS = {
    "sgd": ["momentum.weight"],
    "adam": ["steps.weight", "momentum.weight", "squares.weight"],
    "adamw": ["steps.weight", "momentum.weight", "squares.weight"],
}


def layer() -> nn.Linear:
    made = nn.Linear(3, 2, bias=False).double()
    made.weight.data.copy_(torch.arange(6.0).view(2, 3) - 2)
    return made


def gradients(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(STEPS, 2, 3))


def stepped(settings: TrainSettings, steps: np.ndarray) -> tuple[nn.Linear, Optimiser]:
    module = layer()
    optimiser = Optimiser(module, settings, CPU)
    walk(module, optimiser, steps)
    return module, optimiser


def walk(module: nn.Linear, optimiser: Optimiser, steps: np.ndarray) -> None:
    for gradient in steps:
        module.weight.grad = torch.from_numpy(gradient.copy())
        optimiser.step()


def by_hand_sgd(beta: float, nesterov: bool) -> np.ndarray:
    w, m = layer().weight.detach().numpy().copy(), np.zeros((2, 3))
    for gradient in gradients():
        g = gradient + DECAY * w
        m = beta * m + g
        w = w - LR * (g + beta * m if nesterov else m)
    return w


def by_hand_adam(beta: float, decoupled: bool) -> np.ndarray:
    w, m, v = layer().weight.detach().numpy().copy(), np.zeros((2, 3)), np.zeros((2, 3))
    for t, gradient in enumerate(gradients(), 1):
        g = gradient + (0 if decoupled else DECAY * w)
        w = w * (1 - LR * DECAY) if decoupled else w
        m = beta * m + (1 - beta) * g
        v = 0.999 * v + 0.001 * g * g
        w = w - LR * (m / (1 - beta**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam", "adamw"])
def test_steps_are_those_of_the_rule(kind: str, beta: float) -> None:
    if kind == "nesterov" and beta == 0:
        with pytest.raises(ValueError, match="nesterov needs a momentum"):
            TrainSettings(nesterov=True, momentum=0)
        return
    name, nesterov = (kind, False) if kind in KINDS else ("sgd", True)
    settings = TrainSettings(optimiser=name, lr=LR, momentum=beta, nesterov=nesterov, weight_decay=DECAY)  # type: ignore[arg-type]
    expected = by_hand_adam(beta, kind == "adamw") if "adam" in kind else by_hand_sgd(beta, nesterov)
    ours = stepped(settings, gradients())[0].weight.detach().numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_goes_through_a_checkpoint(kind: str) -> None:
    settings = TrainSettings(optimiser=kind, lr=LR, weight_decay=DECAY)  # type: ignore[arg-type]
    straight, _ = stepped(settings, gradients())
    first, optimiser = stepped(settings, gradients()[:2])
    saved = {name: t.clone() for name, t in optimiser_state(optimiser, first).items()}
    assert list(saved) == KINDS[kind]
    resumed = layer()
    resumed.load_state_dict(first.state_dict())
    anew = Optimiser(resumed, settings, CPU)
    restore_optimiser(anew, resumed, saved)
    walk(resumed, anew, gradients()[2:])
    assert torch.equal(resumed.weight, straight.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_named(kind: str) -> None:
    module, optimiser = stepped(TrainSettings(optimiser=kind), gradients())  # type: ignore[arg-type]
    saved = optimiser_state(optimiser, module)
    shape = list(module.weight.shape)
    for changed, what in (
        ({"momentum.weight": torch.zeros(3)}, rf"has shape \[3\], but {re.escape(str(shape))} is"),
        ({}, "is missing"),
    ):
        tensors = {name: t for name, t in saved.items() if name != "momentum.weight"} | changed
        with pytest.raises(UserError, match=f"do not fit the networks: momentum.weight {what}"):
            restore_optimiser(optimiser, module, tensors)


class Convolutions(nn.Module):
    """Two convolutions of one shape, a taller one, and what Muon leaves to SGD."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 5, 3), nn.Conv2d(3, 5, 3)
        self.tall = nn.Conv2d(1, 20, 3, bias=False)
        self.pointwise = nn.Conv2d(5, 5, 1, bias=False)
        self.double()


def by_hand_muon(w: np.ndarray, gradients: list[np.ndarray], step: float) -> np.ndarray:
    """By singular values, each through the polynomial five times; one layer after the other."""
    w, m = w.reshape(len(w), -1), np.zeros((len(w), w[0].size))
    length = np.linalg.norm(w)
    for g in gradients:
        g = g.reshape(m.shape)
        m = 0.9 * m + g
        u, s, vt = np.linalg.svd(g + 0.9 * m, full_matrices=False)
        s /= np.linalg.norm(s)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        direction = (u * s) @ vt
        w = w - step * length * direction / np.linalg.norm(direction)
        w *= length / np.linalg.norm(w)
    return w


def test_muon_turns_convolutions_and_leaves_the_rest_to_sgd() -> None:
    module, rng = Convolutions(), np.random.default_rng(1)
    settings = TrainSettings(optimiser="muon", lr=LR, muon_lr=0.05, weight_decay=DECAY, nesterov=True)
    sgd_settings = TrainSettings(lr=LR, weight_decay=DECAY, nesterov=True)
    other = Convolutions()
    optimiser, reference = Optimiser(module, settings, CPU), Optimiser(other, sgd_settings, CPU)
    start = {name: p.detach().numpy().copy() for name, p in module.named_parameters()}
    seen: dict[str, list[np.ndarray]] = {name: [] for name in start}
    for _ in range(STEPS):
        for (name, p), q in zip(module.named_parameters(), other.parameters(), strict=True):
            seen[name].append(rng.normal(size=p.shape))
            p.grad, q.grad = (torch.from_numpy(seen[name][-1].copy()) for _ in range(2))
        for each in (optimiser, reference):
            each.set_lr(LR / 2)
            each.step()
    by_sgd = dict(other.named_parameters())
    for name, p in module.named_parameters():
        ours = p.detach().numpy()
        if name in ("first.weight", "second.weight", "tall.weight"):
            expected = by_hand_muon(start[name], seen[name], 0.05 / 2)
            np.testing.assert_allclose(ours.reshape(expected.shape), expected, rtol=1e-9, atol=1e-12)
        else:
            assert torch.equal(p, by_sgd[name])


def test_muon_without_a_gradient_changes_nothing() -> None:
    module = Convolutions()
    before = {name: t.clone() for name, t in module.state_dict().items()}
    optimiser = Optimiser(module, TrainSettings(optimiser="muon", weight_decay=0), CPU)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    optimiser.step()
    for name, t in module.state_dict().items():
        torch.testing.assert_close(t, before[name], rtol=1e-14, atol=0)


def test_muon_needs_convolutions() -> None:
    with pytest.raises(UserError, match="muon is for convolutions larger than 1x1"):
        Optimiser(layer(), TrainSettings(optimiser="muon"), CPU)
