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
from crosel.methods.losses import cc_loss, log_candidate_weights
from crosel.methods.proden import PRODEN, first_weights, proden_weights

N, K = 24, 5


def random_weights(seed: int = 0) -> Tensor:
    """Of any scale, some of them 0, also outside the sets; row 2 has none at all."""
    weights = 7 * torch.rand(N, K, generator=torch.Generator().manual_seed(seed))
    weights[torch.rand(N, K, generator=torch.Generator().manual_seed(seed + 1)) < 0.2] = 0
    weights[2] = 0
    return weights


def slow_weights(weights: Tensor, sets: Tensor) -> list[list[float]]:
    """As shares of each set, even ones where there are none; by the share that the class has on average, counting one
    more row with all of it; scaled to a mean of 1 on each set, at least a hundredth; 1 outside."""
    shares = []
    for row, chosen in zip(weights.tolist(), sets.tolist(), strict=True):
        inside = [w if s else 0.0 for w, s in zip(row, chosen, strict=True)]
        even = [float(s) for s in chosen]
        row = inside if sum(inside) else even
        shares.append([w / sum(row) for w in row])
    usual = [(sum(row[j] for row in shares) + 1) / len(shares) for j in range(K)]
    rows = []
    for share, chosen in zip(shares, sets.tolist(), strict=True):
        relative = [w / u for w, u in zip(share, usual, strict=True)]
        mean = sum(relative) / sum(chosen)
        rows.append([max(w / mean, 0.01) if s else 1.0 for w, s in zip(relative, chosen, strict=True)])
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


def test_equal_weights_of_classes_that_are_listed_equally_often_change_nothing() -> None:
    rows = torch.arange(5 * K)
    sets = (torch.arange(K) - rows[:, None]) % K < 2
    logits = torch.randn(5 * K, K)
    logs = log_candidate_weights(torch.full((5 * K, K), 3.0), sets)
    assert float(logs.abs().max()) < 1e-6
    torch.testing.assert_close(cc_loss(logits, sets, logs), cc_loss(logits, sets))


def test_a_label_that_every_set_has_says_little() -> None:
    """The guesser finds class 0 likely everywhere: what it says beyond that counts."""
    weights = torch.tensor([[0.5, 0.4, 0.1], [0.5, 0.1, 0.4], [0.5, 0.3, 0.2], [0.9, 0.05, 0.05]] * 25)
    logs = log_candidate_weights(weights, torch.ones(100, 3, dtype=torch.bool))
    assert logs.argmax(dim=1).tolist() == [1, 2, 1, 0] * 25


def test_large_weights_do_not_overflow() -> None:
    sets = torch.ones(2, 3, dtype=torch.bool)
    logs = log_candidate_weights(torch.tensor([[3e38, 3e38, 1.0], [1e-38, 0.0, 0.0]]), sets)
    assert logs.isfinite().all()


def build(kind: type[Method], weights: Tensor | None, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(kind.Settings(**settings), Problem(random_sets(N, K), 4, weights), lambda: ToyNetwork(K))


@pytest.mark.parametrize(("kind", "settings"), [(CC, {}), (PRODEN, {}), (CroSel, {"warmup": 2, "gamma": 0.0})])
def test_methods_learn_from_weights(kind: type[Method], settings: dict[str, Any]) -> None:
    """From the first step on and to the last."""
    plain, weighted = (train(build(kind, weights, **settings), epochs=4) for weights in (None, random_weights()))
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
