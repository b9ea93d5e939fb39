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


def by_hand_adam(beta: float) -> np.ndarray:
    w, m, v = layer().weight.detach().numpy().copy(), np.zeros((2, 3)), np.zeros((2, 3))
    for t, gradient in enumerate(gradients(), 1):
        g = gradient + DECAY * w
        m = beta * m + (1 - beta) * g
        v = 0.999 * v + 0.001 * g * g
        w = w - LR * (m / (1 - beta**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["sgd", "nesterov", "adam"])
def test_steps_are_those_of_the_rule(kind: str, beta: float) -> None:
    if kind == "nesterov" and beta == 0:
        with pytest.raises(ValueError, match="nesterov needs a momentum"):
            TrainSettings(nesterov=True, momentum=0)
        return
    name, nesterov = ("adam", False) if kind == "adam" else ("sgd", kind == "nesterov")
    settings = TrainSettings(optimiser=name, lr=LR, momentum=beta, nesterov=nesterov, weight_decay=DECAY)  # type: ignore[arg-type]
    expected = by_hand_adam(beta) if kind == "adam" else by_hand_sgd(beta, nesterov)
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
