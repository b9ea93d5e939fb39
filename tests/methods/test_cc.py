"""CC: the loss against its definition, and the method end to end."""

import math

import pytest
import torch
from _toy import (
    assert_finite_at_extremes,
    assert_trains,
    logits_and_sets,
    make,
    softmax,
    train,
)
from hypothesis import given, settings

from crosel.methods.cc import CC
from crosel.methods.losses import cc_loss


def slow_cc(logits, candidates):
    """-log of the probability on S, example by example."""
    total = 0.0
    for row, chosen in zip(logits.tolist(), candidates.tolist(), strict=True):
        total -= math.log(sum(p for p, inside in zip(softmax(row), chosen, strict=True) if inside))
    return total / len(logits)


@settings(max_examples=40)
@given(logits_and_sets())
def test_loss_is_its_definition(drawn):
    logits, candidates = drawn
    assert cc_loss(logits.double(), candidates).item() == pytest.approx(slow_cc(logits, candidates), abs=1e-9)


def test_gradient():
    logits = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    candidates = torch.rand(6, 5) < 0.5
    candidates[:, 2] = True
    assert torch.autograd.gradcheck(lambda f: cc_loss(f, candidates), logits)


def test_full_sets_cost_nothing_and_teach_nothing():
    logits = torch.randn(3, 4, requires_grad=True)
    loss = cc_loss(logits, torch.ones(3, 4, dtype=torch.bool))
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(3, 4))


def test_singletons_give_cross_entropy():
    logits, labels = torch.randn(7, 4), torch.randint(4, (7,))
    candidates = torch.nn.functional.one_hot(labels, 4).bool()
    torch.testing.assert_close(cc_loss(logits, candidates), torch.nn.functional.cross_entropy(logits, labels))


def test_finite_at_extremes():
    assert_finite_at_extremes(cc_loss)


def test_half_precision_is_computed_in_full():
    logits = torch.randn(16, 5).bfloat16()
    candidates = torch.rand(16, 5) < 0.5
    candidates[:, 0] = True
    value = cc_loss(logits, candidates)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, cc_loss(logits.float(), candidates))


def test_trains_and_uses_its_view():
    method = make(CC, view="plain")
    assert method.streams()["all"].views == ("plain",)
    assert_trains(method)


def test_objective_is_the_loss_of_the_batch():
    method = make(CC)

    def look(drawn, losses):
        batch = drawn["all"]
        again = cc_loss(method.networks[0](batch["weak"]), method.candidates[batch.index])
        torch.testing.assert_close(losses.objective, again)

    train(method, epochs=1, each=look)
