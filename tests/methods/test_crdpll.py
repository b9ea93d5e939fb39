"""CRDPLL: losses, targets and the stable log(1-p) against slow versions, the ramp, and the whole method."""

import math
from fractions import Fraction

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

from crosel.methods.crdpll import (
    CRDPLL,
    consistency_loss,
    consistency_weight,
    consistent_targets,
    kl_divergence,
    supervised_loss,
)
from crosel.methods.losses import log_one_minus_probability
from crosel.methods.proden import uniform_weights


def exact_log_one_minus(row, j):
    """log of the other labels' share, from exact sums of the exponentials."""
    top = max(row)
    parts = [Fraction(math.exp(value - top)) for value in row]
    others = sum(part for i, part in enumerate(parts) if i != j)
    return math.log(others / sum(parts))


def slow_supervised(logits, candidates):
    total = 0.0
    for row, chosen in zip(logits.tolist(), candidates.tolist(), strict=True):
        total -= sum(exact_log_one_minus(row, j) for j, s in enumerate(chosen) if not s)
    return total / len(logits)


def slow_consistency(views, targets):
    total = 0.0
    for logits in views:
        for row, w in zip(logits.tolist(), targets.tolist(), strict=True):
            for w_j, p_j in zip(w, softmax(row), strict=True):
                if w_j > 0:
                    total += w_j * (math.log(w_j) - math.log(p_j)) / len(logits)
    return total


def slow_targets(views, candidates):
    rows = []
    for i, chosen in enumerate(candidates.tolist()):
        p = [softmax(logits[i].tolist()) for logits in views]
        product = [math.prod(p_v[j] ** (1 / 3) for p_v in p) if s else 0.0 for j, s in enumerate(chosen)]
        rows.append([value / sum(product) for value in product])
    return torch.tensor(rows, dtype=torch.float64)


def three_views(logits):
    """Three different views out of one table of logits."""
    return [logits, logits.roll(1, dims=1), 0.5 * logits - 1]


@settings(max_examples=60)
@given(logits_and_sets())
def test_log_one_minus_p(drawn):
    logits, _ = drawn
    expected = [[exact_log_one_minus(row, j) for j in range(len(row))] for row in logits.tolist()]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(log_one_minus_probability(logits.double()), expected, atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(log_one_minus_probability(logits).double(), expected, atol=1e-6, rtol=1e-5)


def test_log_one_minus_p_with_a_tie():
    third = log_one_minus_probability(torch.zeros(1, 3))
    torch.testing.assert_close(third, torch.full((1, 3), math.log(2 / 3)))


def test_log_one_minus_p_at_ten_thousand():
    """The plain form gives log(0) here; the value is the logits' distance."""
    value = log_one_minus_probability(torch.tensor([[1e4, -1e4, -1e4]]))
    torch.testing.assert_close(value, torch.tensor([[-2e4 + math.log(2), 0.0, 0.0]]))


@settings(max_examples=40)
@given(logits_and_sets(extreme=10.0))
def test_losses_and_targets_are_their_definitions(drawn):
    logits, candidates = drawn
    views = three_views(logits.double())
    targets = slow_targets(views, candidates)
    expected = slow_supervised(logits, candidates)
    assert supervised_loss(logits.double(), candidates).item() == pytest.approx(expected, abs=1e-9)
    assert consistency_loss(views, targets).item() == pytest.approx(slow_consistency(views, targets), abs=1e-9)
    ours = consistent_targets(three_views(logits), candidates)
    torch.testing.assert_close(ours.double(), targets, atol=1e-5, rtol=1e-4)


@settings(max_examples=40)
@given(logits_and_sets(extreme=1e4))
def test_targets_are_distributions_on_the_sets(drawn):
    logits, candidates = drawn
    targets = consistent_targets(three_views(logits), candidates)
    assert (targets >= 0).all()
    assert (targets[~candidates] == 0).all()
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(len(logits)))


@settings(max_examples=30)
@given(logits_and_sets(), st.randoms(use_true_random=False))
def test_permutations(drawn, random):
    logits, candidates = drawn
    views = [logits, 0.5 * logits - 1, -logits]
    classes = random.sample(range(logits.shape[1]), logits.shape[1])
    examples = random.sample(range(len(logits)), len(logits))

    def permute(table):
        return table[examples][:, classes]

    permuted = consistent_targets([permute(view) for view in views], permute(candidates))
    torch.testing.assert_close(permuted, permute(consistent_targets(views, candidates)))
    torch.testing.assert_close(
        supervised_loss(permute(logits), permute(candidates)), supervised_loss(logits, candidates)
    )


def test_divergence_is_zero_only_from_itself():
    logits = torch.randn(4, 5, dtype=torch.float64)
    assert kl_divergence(torch.softmax(logits, dim=1), logits).item() == pytest.approx(0.0, abs=1e-12)
    assert kl_divergence(torch.softmax(-logits, dim=1), logits).item() > 0.01


def test_full_sets_have_no_supervised_loss():
    logits = torch.randn(4, 5, requires_grad=True)
    loss = supervised_loss(logits, torch.ones(4, 5, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros(4, 5))


def test_gradients():
    candidates = random_sets(5, 4)
    targets = uniform_weights(candidates).double()
    views = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradcheck(log_one_minus_probability, views[0])
    assert torch.autograd.gradcheck(lambda f: supervised_loss(f, candidates), views[0])
    assert torch.autograd.gradcheck(lambda *f: consistency_loss(f, targets), views)


def test_finite_at_extremes():
    assert_finite_at_extremes(supervised_loss)
    assert_finite_at_extremes(lambda f, s: consistency_loss([f, -f, f], uniform_weights(s)))
    assert_finite_at_extremes(lambda f, s: consistency_loss([f, -f, f], consistent_targets([f, -f, f], s)))


def test_a_certain_label_outside_the_set_is_still_pushed_away():
    """Where 1 - p underflows, a bounded form has no gradient left; this one has."""
    logits = torch.tensor([[100.0, 0.0, 0.0]], requires_grad=True)
    supervised_loss(logits, torch.tensor([[False, True, True]])).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[1.0, -0.5, -0.5]]))


@pytest.mark.parametrize(("epoch", "expected"), [(1, 0.0), (2, 0.02), (51, 1.0), (101, 2.0), (102, 2.0), (200, 2.0)])
def test_ramp_of_the_authors(epoch, expected):
    assert consistency_weight(epoch, ramp_epochs=100, consistency=2.0) == pytest.approx(expected)


def test_ramp_scales_with_the_run_and_can_be_left_out():
    method = make(CRDPLL, epochs=8)
    weights = []
    for epoch in range(1, 9):
        method.begin_epoch(epoch)
        weights.append(method.metrics()["consistency_weight"])
    assert weights == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert consistency_weight(1, ramp_epochs=0, consistency=3.0) == 3.0


def test_views_are_told_apart():
    assert make(CRDPLL).streams()["all"].views == ("weak", "autoaugment#1", "autoaugment#2")
    views = make(CRDPLL, views=("plain", "plain", "plain")).streams()["all"].views
    assert len(set(views)) == 3
    assert {view.split("#")[0] for view in views} == {"plain"}


def test_a_run_by_hand():
    """The objective and the table of every step, from the logits that were seen and a table of our own."""
    method = make(CRDPLL, epochs=4)
    table = uniform_weights(method.candidates).double()
    outputs, inputs = [], []
    method.networks[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    method.networks[0].register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    step = [0]

    def look(drawn, losses):
        index = drawn["all"].index
        views = [logits.double() for logits in outputs]
        names = ("weak", "autoaugment#1", "autoaugment#2")
        assert all(torch.equal(x, drawn["all"][view]) for x, view in zip(inputs, names, strict=True))
        outputs.clear()
        inputs.clear()
        weight = min(step[0] // 3 / 2, 1.0)  # three steps an epoch; the ramp takes half of four epochs
        supervised = slow_supervised(views[0], method.candidates[index])
        consistency = slow_consistency(views, table[index])
        assert losses.report["loss_supervised"].item() == pytest.approx(supervised, rel=1e-4)
        assert losses.report["loss_consistency"].item() == pytest.approx(consistency, rel=1e-4)
        assert losses.objective.item() == pytest.approx(supervised + weight * consistency, rel=1e-4)
        table[index] = slow_targets(views, method.candidates[index])
        torch.testing.assert_close(method.weights.double(), table, atol=1e-5, rtol=1e-4)
        step[0] += 1

    train(method, epochs=4, each=look)


def test_trains():
    assert_trains(make(CRDPLL))


def test_state_round_trip():
    assert_round_trip(make(CRDPLL), make(CRDPLL, seed=1), ("weights",))
