"""LWS: loss and weights against slow versions, full sets, and the extra pass after the step."""

import math

import pytest
import torch
from _toy import (
    EXTREME_LOGITS,
    EXTREME_SETS,
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
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosel.methods.lws import LWS, lwc_terms, lws_terms, lws_weights


def slow_terms(logits, candidates, weights):
    inside = outside = 0.0
    for row, chosen, w in zip(logits.tolist(), candidates.tolist(), weights.tolist(), strict=True):
        for f, s, w_j in zip(row, chosen, w, strict=True):
            if s:
                inside += w_j / (1 + math.exp(f))  # σ(-f)
            else:
                outside += w_j / (1 + math.exp(-f))  # σ(f)
    return inside / len(logits), outside / len(logits)


def slow_weights(logits, candidates, epsilon=1e-8):
    rows = []
    for row, chosen in zip(logits.tolist(), candidates.tolist(), strict=True):
        p = softmax(row)
        mass = {side: sum((p_j if s == side else 0.0) + epsilon for p_j, s in zip(p, chosen, strict=True))
                for side in (True, False)}  # fmt: skip
        rows.append([p_j / mass[s] for p_j, s in zip(p, chosen, strict=True)])
    return torch.tensor(rows, dtype=torch.float64)


@settings(max_examples=40)
@given(logits_and_sets())
@example((torch.tensor([[18.0, 0.0]]), torch.tensor([[False, True]])))  # as little on the set as ε is
def test_terms_and_weights_are_their_definitions(drawn):
    logits, candidates = drawn
    weights = slow_weights(logits, candidates)
    torch.testing.assert_close(lws_weights(logits, candidates).double(), weights, atol=1e-6, rtol=1e-4)
    inside, outside = slow_terms(logits, candidates, weights)
    ours = lws_terms(logits.double(), candidates, weights)
    assert ours[0].item() == pytest.approx(inside, abs=1e-9)
    assert ours[1].item() == pytest.approx(outside, abs=1e-9)


@settings(max_examples=40)
@given(logits_and_sets(extreme=5.0))
def test_weights_are_a_distribution_on_either_side(drawn):
    logits, candidates = drawn
    weights = lws_weights(logits, candidates)
    assert (weights >= 0).all()
    ones = torch.ones(len(logits))
    torch.testing.assert_close((weights * candidates).sum(dim=1), ones, atol=1e-2, rtol=0)
    some = (~candidates).any(dim=1)
    torch.testing.assert_close((weights * ~candidates).sum(dim=1), some.float(), atol=1e-2, rtol=0)


@settings(max_examples=30)
@given(logits_and_sets(), st.randoms(use_true_random=False))
def test_weights_follow_permutations(drawn, random):
    assert_follows_permutations(lws_weights, drawn, random)


def test_full_sets_have_no_second_term():
    logits, full = torch.randn(4, 5), torch.ones(4, 5, dtype=torch.bool)
    weights = lws_weights(logits, full)
    torch.testing.assert_close(weights, torch.softmax(logits, dim=1))
    inside, outside = lws_terms(logits, full, weights)
    assert outside.item() == 0.0
    assert inside.item() > 0.0


def test_gradient():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    candidates = random_sets(5, 4)
    weights = lws_weights(logits, candidates).double()
    assert torch.autograd.gradcheck(lambda f: lws_terms(f, candidates, weights), logits)


def test_finite_at_extremes():
    assert torch.isfinite(lws_weights(torch.tensor(EXTREME_LOGITS), torch.tensor(EXTREME_SETS))).all()
    assert_finite_at_extremes(lambda f, s: sum(lws_terms(f, s, lws_weights(f, s))))


def test_weights_start_at_one_over_k():
    method = make(LWS, n=7, k=4)
    assert torch.equal(method.weights, torch.full((7, 4), 0.25))


def test_the_force_on_a_label_is_its_weight_times_the_slope():
    """Why LWS can lose a class: σ(f)σ(-f) is next to nothing where f is far below 0, however wrong that is."""
    logits, candidates = 3 * torch.randn(6, 5), random_sets(6, 5)
    weights = lws_weights(logits, candidates)
    logits.requires_grad_()
    inside, outside = lws_terms(logits, candidates, weights)
    (len(logits) * (inside + 2 * outside)).backward()
    for grad, row, chosen, w in zip(*(t.tolist() for t in (logits.grad, logits, candidates, weights)), strict=True):
        slope = [1 / (1 + math.exp(-f)) / (1 + math.exp(f)) for f in row]
        expected = [w_j * d * (-1 if s else 2) for w_j, d, s in zip(w, slope, chosen, strict=True)]
        assert grad == pytest.approx(expected, abs=1e-6)


@settings(max_examples=40)
@given(logits_and_sets())
def test_cross_entropy_is_its_definition(drawn):
    logits, candidates = drawn
    weights = slow_weights(logits, candidates)
    inside = outside = 0.0
    for row, chosen, w in zip(logits.tolist(), candidates.tolist(), weights.tolist(), strict=True):
        p = softmax(row)
        inside -= sum(w_j * math.log(p_j) for p_j, s, w_j in zip(p, chosen, w, strict=True) if s)
        others = [sum(p[:j] + p[j + 1 :]) for j in range(len(p))]  # 1 - p_j would lose digits
        outside -= sum(w_j * math.log(q_j) for q_j, s, w_j in zip(others, chosen, w, strict=True) if not s)
    ours = lwc_terms(logits.double(), candidates, weights)
    assert ours[0].item() == pytest.approx(inside / len(logits), rel=1e-6, abs=1e-9)
    assert ours[1].item() == pytest.approx(outside / len(logits), rel=1e-6, abs=1e-9)


def test_cross_entropy_has_a_gradient_and_stays_finite():
    logits = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    candidates = random_sets(5, 4)
    weights = lws_weights(logits, candidates).double()
    assert torch.autograd.gradcheck(lambda f: sum(lwc_terms(f, candidates, weights)), logits)
    assert_finite_at_extremes(lambda f, s: sum(lwc_terms(f, s, lws_weights(f, s))))


def test_trains_with_cross_entropy():
    method = make(LWS, loss="cross-entropy", beta=2.0)
    drawn = batches(method, 8, torch.Generator())
    index = drawn["all"].index
    losses = method.loss(drawn, torch.Generator())
    inside, outside = lwc_terms(
        method.networks[0](drawn["all"]["weak"]), method.candidates[index], method.weights[index]
    )
    torch.testing.assert_close(losses.objective, inside + 2 * outside)
    assert_trains(method)


def test_the_loss_reads_and_the_extra_pass_writes():
    method = make(LWS, beta=2.0)
    table = torch.full((24, 5), 0.2, dtype=torch.float64)
    outputs = []
    method.networks[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    pending = []

    def settle():
        """After the step: the last pass seen is the extra one."""
        if pending:
            index = pending.pop()
            assert len(outputs) == 2
            assert not torch.equal(outputs[0], outputs[1])  # the step lies between the passes
            table[index] = slow_weights(outputs[1], method.candidates[index])
            torch.testing.assert_close(method.weights.double(), table, atol=1e-6, rtol=1e-5)
            del outputs[:2]

    def look(drawn, losses):
        index = drawn["all"].index
        this = outputs.pop()
        settle()
        outputs.append(this)
        inside, outside = slow_terms(this, method.candidates[index], table[index])
        assert losses.objective.item() == pytest.approx(inside + 2 * outside, rel=1e-5)
        assert losses.report["loss_candidates"].item() == pytest.approx(inside, rel=1e-5)
        assert losses.report["loss_others"].item() == pytest.approx(outside, rel=1e-5)
        pending.append(index)

    train(method, epochs=3, each=look)
    settle()
    assert not outputs


def test_the_extra_pass_is_in_training_mode_without_gradient():
    method = make(LWS)
    method.train()
    drawn = batches(method, 8, torch.Generator())
    seen = []
    method.networks[0].register_forward_hook(
        lambda module, args, output: seen.append((module.training, output.requires_grad))
    )
    tracked = method.networks[0].norm.num_batches_tracked.item()
    method.after_step(drawn)
    assert seen == [(True, False)]
    assert method.networks[0].norm.num_batches_tracked.item() == tracked + 1


def test_settings_are_heeded():
    method = make(LWS, view="strong", epsilon=0.1)
    assert method.streams()["all"].views == ("strong",)
    method.train()
    outputs = []
    method.networks[0].register_forward_hook(lambda module, args, output: outputs.append(output))
    drawn = batches(method, 8, torch.Generator())
    method.after_step(drawn)
    index = drawn["all"].index
    expected = slow_weights(outputs[0], method.candidates[index], epsilon=0.1)
    torch.testing.assert_close(method.weights[index].double(), expected, atol=1e-6, rtol=1e-5)


def test_trains():
    assert_trains(make(LWS))


def test_state_round_trip():
    assert_round_trip(make(LWS), make(LWS, seed=1), ("weights",))
