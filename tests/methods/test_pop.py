"""PoP: purification against a slow version and its properties, the schedule, and the method end to end."""

import math

import pytest
import torch
from _toy import (
    assert_finite_at_extremes,
    assert_round_trip,
    assert_trains,
    logits_and_sets,
    make,
    random_sets,
    softmax,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from crosel.methods.pop import PoP, PoPSettings, pop_loss, purify, raise_threshold
from crosel.methods.proden import proden_weights, uniform_weights


def slow_loss(views, weights):
    total = 0.0
    for logits in views:
        for row, w in zip(logits.tolist(), weights.tolist(), strict=True):
            total += sum(w_j * -math.log(p_j) for w_j, p_j in zip(w, softmax(row), strict=True))
    return total / len(views) / len(weights)


def slow_purify(mean, candidates, threshold):
    sets, weights = [], []
    for a, chosen in zip(mean.tolist(), candidates.tolist(), strict=True):
        top = max(value for value, s in zip(a, chosen, strict=True) if s)
        kept = [s and value / top >= threshold for value, s in zip(a, chosen, strict=True)]
        mass = sum(value for value, keep in zip(a, kept, strict=True) if keep)
        sets.append(kept)
        weights.append([value / mass if keep else 0.0 for value, keep in zip(a, kept, strict=True)])
    return torch.tensor(sets), torch.tensor(weights, dtype=torch.float64)


thresholds = st.floats(1e-4, 0.99)


@settings(max_examples=60)
@given(logits_and_sets(), thresholds)
def test_purify_is_its_definition(drawn, threshold):
    logits, candidates = drawn
    mean = torch.softmax(logits.double(), dim=1)  # also outside the sets, where it must not matter
    kept, weights = purify(mean, candidates, threshold)
    expected_kept, expected_weights = slow_purify(mean, candidates, threshold)
    assert torch.equal(kept, expected_kept)
    torch.testing.assert_close(weights, expected_weights)


@settings(max_examples=60)
@given(logits_and_sets(), thresholds)
def test_the_likeliest_stays_and_sets_only_shrink(drawn, threshold):
    logits, candidates = drawn
    mean = proden_weights(logits, candidates)
    kept, weights = purify(mean, candidates, threshold)
    assert kept.gather(1, mean.argmax(dim=1, keepdim=True)).all()
    assert kept.any(dim=1).all()
    assert not (kept & ~candidates).any()
    assert (weights[~kept] == 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(len(logits)))
    again, same = purify(weights, kept, threshold)
    assert torch.equal(again, kept)
    torch.testing.assert_close(same, weights)


@settings(max_examples=30)
@given(logits_and_sets(), thresholds, st.randoms(use_true_random=False))
def test_purify_follows_permutations_and_ignores_scale(drawn, threshold, random):
    logits, candidates = drawn
    mean = proden_weights(logits, candidates).double()
    classes = random.sample(range(logits.shape[1]), logits.shape[1])
    kept, weights = purify(mean, candidates, threshold)
    permuted_kept, permuted_weights = purify(mean[:, classes] / 4, candidates[:, classes], threshold)
    assert torch.equal(permuted_kept, kept[:, classes])
    torch.testing.assert_close(permuted_weights, weights[:, classes])


def test_purify_drops_below_and_keeps_at_the_threshold():
    mean = torch.tensor([[0.5, 0.25, 0.2, 0.05]])
    kept, weights = purify(mean, torch.ones(1, 4, dtype=torch.bool), 0.5)
    assert kept.tolist() == [[True, True, False, False]]
    torch.testing.assert_close(weights, torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0]]))


@pytest.mark.parametrize(
    ("theta", "changed", "expected"),
    [
        (0.1, 9, 0.11),  # settled: grows
        (0.1, 10, 0.1),  # as many as the limit: does not
        (0.4, 0, 0.4),  # at the cap
        (0.5, 0, 0.5),  # above it from the start
        (0.39, 0, 0.4),  # never beyond it
    ],
)
def test_threshold(theta, changed, expected):
    raised = raise_threshold(torch.tensor(theta), torch.tensor(changed), limit=10, growth=0.1, cap=0.4)
    assert raised.item() == pytest.approx(expected)


def test_settings_keep_the_threshold_under_one():
    for wrong in ({"threshold": 1.0}, {"cap": 1.0}, {"threshold": 0.0}, {"every": 0}):
        with pytest.raises(ValidationError):
            PoPSettings(**wrong)


@settings(max_examples=30)
@given(logits_and_sets(extreme=10.0))
def test_loss_is_its_definition(drawn):
    logits, candidates = drawn
    weights = uniform_weights(candidates).double()
    views = [logits.double(), -logits.double(), 0.5 * logits.double()]
    assert pop_loss(views, weights).item() == pytest.approx(slow_loss(views, weights), abs=1e-9)


def test_gradient():
    weights = uniform_weights(random_sets(5, 4)).double()
    views = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *f: pop_loss(f, weights), views)


def test_finite_at_extremes():
    assert_finite_at_extremes(lambda f, s: pop_loss([f, -f, f], uniform_weights(s)))


def test_views_are_told_apart():
    assert make(PoP).streams()["all"].views == ("plain", "autoaugment#1", "autoaugment#2")
    assert len(set(make(PoP, views=("weak", "weak", "weak")).streams()["all"].views)) == 3


def test_starts_from_the_given_sets():
    method = make(PoP)
    assert torch.equal(method.purified, method.candidates)
    assert method.purified.data_ptr() != method.candidates.data_ptr()
    assert torch.equal(method.weights, uniform_weights(method.candidates))
    assert method.history.shape == (5, 24, 5)


@pytest.mark.parametrize(
    ("schedule", "expected"), [({}, [21, 26, 31]), ({"warm_up": 18, "every": 5, "history": 4}, [19, 24, 29])]
)
def test_purifies_when_the_authors_do(schedule, expected):
    """Counting epochs from 0: 20, 25, 30, …; ours from 1. Other schedules count from their own warm-up."""
    method = make(PoP, threshold=0.5, **schedule)
    sure = torch.zeros(24, 5)
    purified_in = []
    for epoch in range(1, 33):
        before = method.purified.clone()
        label = method.purified.float().argmax(dim=1)
        sure.zero_()[torch.arange(24), label] = 1.0
        if epoch > 1:  # one label is certain in each set; what is not dropped yet will be
            method.weights.copy_(sure)
        method.end_epoch(epoch)
        if not torch.equal(before, method.purified):
            purified_in.append(epoch)
            method.purified.copy_(method.candidates)  # so that the next purification shows
    assert purified_in == expected


def test_history_holds_the_last_epochs_only():
    method = make(PoP, history=3, warm_up=99)
    weights = []
    for epoch in range(1, 8):
        method.weights.copy_(torch.rand(24, 5))
        weights.append(method.weights.clone())
        method.end_epoch(epoch)
    recorded = {tuple(row.flatten().tolist()) for row in method.history}
    assert recorded == {tuple(row.flatten().tolist()) for row in weights[-3:]}


@pytest.mark.parametrize("start", [0.3, 0.9])
def test_a_run_by_hand(start):
    """Objective, tables, sets and threshold of a whole run, from the logits seen and lists of our own."""
    method = make(PoP, warm_up=1, every=2, history=2, threshold=start, growth=0.5, cap=0.95, settled=0.02)
    sets = method.candidates.clone()
    table = uniform_weights(sets).double()
    theta, history, sizes = start, [], []
    outputs, inputs = [], []
    method.networks[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    method.networks[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))

    def each(drawn, losses):
        index = drawn["all"].index
        views = [logits.double() for logits in outputs]
        names = ("plain", "autoaugment#1", "autoaugment#2")
        assert all(torch.equal(x, drawn["all"][view]) for x, view in zip(inputs, names, strict=True))
        outputs.clear()
        inputs.clear()
        assert losses.objective.item() == pytest.approx(slow_loss(views, table[index]), rel=1e-4)
        for i, row in zip(index.tolist(), views[0].tolist(), strict=True):
            p = [value if s else 0.0 for value, s in zip(softmax(row), sets[i].tolist(), strict=True)]
            table[i] = torch.tensor(p, dtype=torch.float64) / sum(p)
        torch.testing.assert_close(method.weights.double(), table, atol=1e-5, rtol=1e-4)

    def after_epoch(epoch):
        nonlocal sets, table, theta
        history.append(table.clone())
        if epoch in (2, 4, 6):
            new, table = slow_purify((history[-1] + history[-2]) / 2, sets, theta)
            if (new != sets).sum().item() < 0.02 * 24 * 5 and theta < 0.95:
                theta = min(theta * 1.5, 0.95)
            sets = new
        sizes.append(sets.sum().item())
        assert torch.equal(method.purified, sets)
        assert method.threshold.item() == pytest.approx(theta)
        torch.testing.assert_close(method.weights.double(), table, atol=1e-5, rtol=1e-4)

    train(method, epochs=6, each=each, after_epoch=after_epoch)
    assert sizes[-1] < method.candidates.sum().item()
    assert sizes == sorted(sizes, reverse=True)


def test_metrics():
    method = make(PoP)
    metrics = method.metrics()
    assert metrics["threshold"] == pytest.approx(1e-3)
    assert metrics["purified_set_size"] == pytest.approx(method.candidates.float().sum().item() / 24)


def test_trains():
    assert_trains(make(PoP, warm_up=1, every=1))


def test_state_round_trip():
    settings = {"warm_up": 1, "every": 1, "threshold": 0.3, "growth": 0.1, "settled": 1.0}
    tables = ("weights", "purified", "history", "threshold")
    assert_round_trip(make(PoP, **settings), make(PoP, seed=1, **settings), tables)
