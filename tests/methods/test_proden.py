"""PRODEN: loss and weights against slow versions, properties of the weights, and the method end to end."""

import math

import pytest
import torch
from _toy import (
    assert_finite_at_extremes,
    assert_follows_permutations,
    assert_round_trip,
    assert_trains,
    batches,
    logits_and_sets,
    make,
    random_sets,
    softmax,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from crosel.methods.proden import PRODEN, proden_loss, proden_weights, uniform_weights


def slow_loss(logits, weights):
    total = 0.0
    for row, w in zip(logits.tolist(), weights.tolist(), strict=True):
        total += sum(w_j * -math.log(p_j) for w_j, p_j in zip(w, softmax(row), strict=True))
    return total / len(logits)


def slow_weights(logits, candidates):
    rows = []
    for row, chosen in zip(logits.tolist(), candidates.tolist(), strict=True):
        inside = [p if s else 0.0 for p, s in zip(softmax(row), chosen, strict=True)]
        rows.append([value / sum(inside) for value in inside])
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=40)
@given(logits_and_sets())
def test_loss_and_weights_are_their_definitions(drawn):
    logits, candidates = drawn
    expected = slow_weights(logits, candidates)
    torch.testing.assert_close(proden_weights(logits, candidates).double(), expected, atol=1e-6, rtol=1e-4)
    assert proden_loss(logits.double(), expected).item() == pytest.approx(slow_loss(logits, expected), abs=1e-9)


@settings(max_examples=40)
@given(logits_and_sets(extreme=1e4))
def test_weights_are_distributions_on_the_sets(drawn):
    logits, candidates = drawn
    weights = proden_weights(logits, candidates)
    assert (weights >= 0).all()
    assert (weights[~candidates] == 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(logits)))


@settings(max_examples=30)
@given(logits_and_sets(), st.randoms(use_true_random=False))
def test_weights_follow_permutations(drawn, random):
    assert_follows_permutations(proden_weights, drawn, random)


def test_weights_start_uniform():
    candidates = random_sets(9, 4)
    weights = uniform_weights(candidates)
    for i in range(9):
        for j in range(4):
            expected = 1 / candidates[i].sum().item() if candidates[i, j] else 0.0
            assert weights[i, j].item() == pytest.approx(expected)
    assert weights.dtype == torch.float32
    assert torch.equal(make(PRODEN).weights, uniform_weights(make(PRODEN).candidates))


def test_gradient():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = uniform_weights(random_sets(5, 4)).double()
    assert torch.autograd.gradcheck(lambda f: proden_loss(f, weights), logits)


def test_weights_carry_no_gradient():
    logits = torch.randn(5, 4, requires_grad=True)
    assert not proden_weights(logits, random_sets(5, 4)).requires_grad


def test_finite_at_extremes():
    assert_finite_at_extremes(lambda f, s: proden_loss(f, uniform_weights(s)))
    assert_finite_at_extremes(lambda f, s: proden_loss(f, proden_weights(f, s)))


def test_an_underflowed_weight_returns():
    """The set is kept apart from the weights: 0 is not for ever."""
    method = make(PRODEN)
    index = torch.tensor([1])  # the full set
    sure = torch.tensor([[200.0, -200.0, -200.0, -200.0, -200.0]])
    method.networks[0] = torch.nn.Identity()
    step = batches(method, 1, torch.Generator())
    for logits, expected in [(sure, [1.0, 0, 0, 0, 0]), (torch.zeros(1, 5), [0.2] * 5)]:
        step["all"] = type(step["all"])(index, {"weak": logits})
        method.loss(step, torch.Generator())
        torch.testing.assert_close(method.weights[1], torch.tensor(expected))


def test_loss_uses_the_old_weights_and_leaves_new_ones():
    """A run by hand: the reference repeats it from the logits it saw, with a table of its own."""
    method = make(PRODEN)
    table = uniform_weights(method.candidates).double()
    outputs = []
    method.networks[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))

    def look(drawn, losses):
        index, logits = drawn["all"].index, outputs.pop()
        assert losses.objective.item() == pytest.approx(slow_loss(logits, table[index]), rel=1e-5)
        table[index] = slow_weights(logits, method.candidates[index])
        torch.testing.assert_close(method.weights.double(), table, atol=1e-6, rtol=1e-5)

    train(method, epochs=3, each=look)
    assert not torch.equal(method.weights, uniform_weights(method.candidates))
    assert not outputs  # one pass a step


def test_trains_and_uses_its_view():
    method = make(PRODEN, view="strong")
    assert method.streams()["all"].views == ("strong",)
    assert_trains(method)
    assert_trains(make(PRODEN))


def test_state_round_trip():
    assert_round_trip(make(PRODEN), make(PRODEN, seed=1), ("weights",))
