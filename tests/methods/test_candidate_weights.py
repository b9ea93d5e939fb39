"""Weights of candidates in CC's loss, PRODEN's weights and CroSel's warm-up and co-mix, against slow versions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _toy import INPUTS, ToyNetwork, batches, random_sets, softmax, train
from torch import Tensor

from crosel.methods.base import Method, Problem
from crosel.methods.cc import CC
from crosel.methods.crosel import CroSel, comix_targets
from crosel.methods.losses import candidate_probabilities, cc_loss, log_candidate_weights
from crosel.methods.proden import PRODEN, first_weights, proden_weights

N, K = 24, 5


def random_weights(seed: int = 0) -> Tensor:
    """Of any scale, some of them 0, also outside the sets; row 2 has none at all."""
    weights = 7 * torch.rand(N, K, generator=torch.Generator().manual_seed(seed))
    weights[torch.rand(N, K, generator=torch.Generator().manual_seed(seed + 1)) < 0.2] = 0
    weights[2] = 0
    return weights


def slow_weights(weights: Tensor, sets: Tensor) -> list[list[float]]:
    """Scaled to a mean of 1 on each set, at least a hundredth; 1 where there are none, and outside."""
    rows = []
    for row, chosen in zip(weights.tolist(), sets.tolist(), strict=True):
        inside = [w for w, s in zip(row, chosen, strict=True) if s]
        mean = sum(inside) / len(inside)
        scaled = [max(w / mean, 0.01) if mean else 1.0 for w in row]
        rows.append([w if s else 1.0 for w, s in zip(scaled, chosen, strict=True)])
    return rows


def test_equations_against_slow_versions() -> None:
    sets, weights = random_sets(N, K), random_weights()
    logits = 3 * torch.randn(N, K, generator=torch.Generator().manual_seed(5)).double()
    logs, w = log_candidate_weights(weights, sets), slow_weights(weights, sets)
    torch.testing.assert_close(logs.double(), torch.tensor(w, dtype=torch.float64).log(), atol=1e-5, rtol=1e-5)
    p = [softmax(row) for row in logits.tolist()]
    inside = [[w[i][j] * p[i][j] * bool(sets[i, j]) for j in range(K)] for i in range(N)]
    assert float(cc_loss(logits, sets, logs)) == pytest.approx(sum(-math.log(sum(row)) for row in inside) / N, abs=1e-5)
    for temperature in (1.0, 0.5):
        powers = [[value ** (1 / temperature) for value in row] for row in inside]
        expected = torch.tensor([[value / sum(row) for value in row] for row in powers])
        torch.testing.assert_close(comix_targets(logits, sets, temperature, logs), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(proden_weights(logits, sets, logs), torch.tensor([
        [value / sum(row) for value in row] for row in inside
    ]), atol=1e-5, rtol=1e-4)  # fmt: skip
    shares = [[w[i][j] * bool(sets[i, j]) for j in range(K)] for i in range(N)]
    expected = torch.tensor([[value / sum(row) for value in row] for row in shares])
    torch.testing.assert_close(first_weights(sets, logs), expected, atol=1e-6, rtol=1e-5)


def test_gradient() -> None:
    logits = torch.randn(N, K, dtype=torch.float64, requires_grad=True)
    sets = random_sets(N, K)
    logs = log_candidate_weights(random_weights(), sets).double()
    assert torch.autograd.gradcheck(lambda f: cc_loss(f, sets, logs), logits)


def test_equal_weights_change_nothing() -> None:
    logits, sets = torch.randn(N, K), random_sets(N, K)
    logs = log_candidate_weights(torch.full((N, K), 3.0), sets)
    assert not logs.any()
    assert torch.equal(cc_loss(logits, sets, logs), cc_loss(logits, sets))
    assert torch.equal(candidate_probabilities(logits, sets, 0.5, logs), candidate_probabilities(logits, sets, 0.5))


def build(kind: type[Method], weights: Tensor | None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(kind.Settings(**settings), Problem(random_sets(N, K), 4, weights), lambda: ToyNetwork(K))


@pytest.mark.parametrize(("kind", "settings"), [(CC, {}), (PRODEN, {}), (CroSel, {"warmup": 2, "gamma": 0.0})])
def test_methods_learn_from_weights(kind: type[Method], settings: dict[str, Any]) -> None:
    """With equal weights as without, bit for bit; with others, from the first step on and to the last."""
    plain, equal, weighted = (
        train(build(kind, weights, **settings), epochs=4) for weights in (None, torch.ones(N, K), random_weights())
    )
    assert equal == pytest.approx(plain, abs=1e-6)
    assert all(abs(a - b) > 1e-6 for a, b in zip(plain, weighted, strict=True))


def test_the_first_loss_of_each_method() -> None:
    sets, weights = random_sets(N, K), random_weights()
    logs = log_candidate_weights(weights, sets)
    for kind in (CC, PRODEN, CroSel):
        method = build(kind, weights)
        method.train()
        method.begin_epoch(1)
        drawn = batches(method, 8, torch.Generator().manual_seed(3))
        batch = next(iter(drawn.values()))
        logits = method.networks[0](batch["weak"]).detach()
        losses = method.loss(drawn, torch.Generator().manual_seed(4))
        if kind is PRODEN:
            expected = -(first_weights(sets, logs)[batch.index] * logits.log_softmax(dim=1)).sum(dim=1).mean()
            assert float(losses.objective.detach()) == pytest.approx(float(expected), abs=1e-5)
            updated = proden_weights(logits, sets[batch.index], logs[batch.index])
            torch.testing.assert_close(method.weights[batch.index], updated)
        elif kind is CC:
            expected = cc_loss(logits, sets[batch.index], logs[batch.index])
            assert float(losses.objective.detach()) == pytest.approx(float(expected), abs=1e-5)
        else:
            other = drawn["all_1"]
            parts = [
                cc_loss(net(b["weak"]), sets[b.index], logs[b.index])
                for net, b in zip(method.networks, (batch, other), strict=True)
            ]
            assert float(losses.objective.detach()) == pytest.approx(float(sum(parts).detach()), abs=1e-5)
    assert batch["weak"].shape == (8, INPUTS)
