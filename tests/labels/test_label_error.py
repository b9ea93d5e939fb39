"""Error rates without true labels: each function against a slow version, and on made data whose truth is known."""

import itertools
import math

import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from crosel.candidates import superclass, uniform
from crosel.runs.label_error import (
    FIRST_TO_SECOND,
    Interval,
    LabelError,
    RankFit,
    answers_outside,
    confidence_temperature,
    estimate_label_error,
    fit_ranks,
    in_order,
    judged_by,
    log_ways,
    random_sets_error,
    rank_patterns,
    rank_posterior,
    wilson,
    within_sets,
    wrong_label_rate,
)


def probabilities_with_truth(y, k, error, rng):
    """Random probabilities whose largest is at y, but for a share of the rows."""
    p = rng.dirichlet(np.ones(k), len(y))
    order = np.argsort(-p, axis=1)
    at = np.where(rng.random(len(y)) < error, 1 + rng.integers(0, min(3, k - 1), len(y)), 0)
    rows = np.arange(len(y))
    now = (order == y[:, None]).argmax(axis=1)
    here, there = order[rows, at].copy(), order[rows, now].copy()
    p[rows, here], p[rows, there] = p[rows, there].copy(), p[rows, here].copy()
    return p, at > 0


def sets_by_rank(p, y, weights, sizes, rng):
    """The truth and |S| - 1 others, drawn without replacement so that a set has the product of its weights."""
    n, k = p.shape
    order = np.argsort(-p, axis=1)
    sets = np.zeros((n, k), bool)
    for i in range(n):
        wrong = [rank for rank in range(k) if order[i, rank] != y[i]]
        possible = list(itertools.combinations(wrong, sizes[i] - 1))
        chance = np.array([math.prod(weights[rank] for rank in ranks) for ranks in possible])
        ranks = possible[rng.choice(len(possible), p=chance / chance.sum())]
        sets[i, order[i, list(ranks)]] = True
        sets[i, y[i]] = True
    return sets


def slow_ways(weights, others, t, j, s):
    labels = [("rank", i, w) for i, w in enumerate(weights)] + [("tail", i, 1.0) for i in range(others)]
    for left_out in (t, j):
        kind = ("rank", left_out) if left_out < len(weights) else ("tail",)
        if left_out > len(weights):
            continue
        found = next((label for label in labels if label[: len(kind)] == kind), None)
        if found is None:
            return None if left_out == len(weights) else slow_sum(labels, s)
        labels.remove(found)
    return slow_sum(labels, s)


def slow_sum(labels, s):
    return sum(math.prod(w for *_, w in chosen) for chosen in itertools.combinations(labels, s))


@pytest.mark.parametrize("others", [0, 1, 4])
def test_the_ways_to_draw_a_set_are_those_of_counting_them(others):
    weights = np.array([3.0, 0.5, 2.0])
    found = np.exp(log_ways(weights, others, 4))
    for t, j, s in itertools.product(range(4), range(5), range(5)):
        if (t == 3) + (j == 3) > others or (t == j and t < 3):
            continue  # no such pair; a rank cannot be left out twice
        assert found[t, j, s] == pytest.approx(slow_ways(weights, others, t, j, s)), (t, j, s)


def test_the_posterior_is_bayes_rule_over_all_labels():
    rng = np.random.default_rng(3)
    n, k, m = 40, 9, 6
    p = rng.dirichlet(np.ones(k), n)
    sets = rng.random((n, k)) < 0.4
    sets[np.arange(n), rng.integers(0, k, n)] = True
    shares, weights = np.array([0.4, 0.2, 0.1, 0.1, 0.05, 0.05, 0.1]), np.array([4.0, 3.0, 2.0, 1.5, 0.7, 0.9])
    patterns = rank_patterns(p, sets)
    found, likelihood = rank_posterior(patterns, shares, np.r_[weights, 1.0])
    total = 0.0
    for head, tail, count, posterior in zip(patterns.head, patterns.tail, patterns.examples, found, strict=True):
        full = [*head, *([True] * tail + [False] * (k - m - tail))]
        by_rank, share = [*weights, *[1.0] * (k - m)], [*shares[:m], *[shares[m] / (k - m)] * (k - m)]
        size, joint = sum(full), []
        for t in range(k):
            wrong = [rank for rank in range(k) if rank != t]
            ways = sum(math.prod(by_rank[rank] for rank in ranks) for ranks in itertools.combinations(wrong, size - 1))
            own = math.prod(by_rank[rank] for rank in wrong if full[rank])
            joint.append(share[t] * own / ways if full[t] else 0.0)
        assert posterior == pytest.approx(np.r_[joint[:m], sum(joint[m:])] / sum(joint))
        total += count * math.log(sum(joint))
    assert likelihood == pytest.approx(total / n)


def test_the_fit_finds_how_often_answers_and_labels_are_wrong_in_sets_that_hide_errors():
    rng = np.random.default_rng(0)
    n, k = 4000, 8
    y = rng.integers(0, k, n)
    p, wrong = probabilities_with_truth(y, k, 0.35, rng)
    sets = sets_by_rank(p, y, [6, 6, 2, 1.5, 1, 1, 1, 1], rng.integers(1, 5, n), rng)
    labels = np.where(sets, p, -1).argmax(axis=1)
    fit = fit_ranks(rank_patterns(p, sets))
    assert fit.answers == pytest.approx(wrong.mean(), abs=0.03)
    assert fit.labels == pytest.approx((labels != y).mean(), abs=0.03)
    naive = random_sets_error(p, sets, np.ones_like(sets))
    assert naive < wrong.mean() - 0.05, "taking such sets for random ones says too little"


def test_no_start_near_the_fit_is_more_likely():
    rng = np.random.default_rng(1)
    y = rng.integers(0, 7, 500)
    p, _ = probabilities_with_truth(y, 7, 0.3, rng)
    sets = sets_by_rank(p, y, [3, 3, 2, 1, 1, 1, 1], rng.integers(1, 4, 500), rng)
    patterns = rank_patterns(p, sets)
    fit = fit_ranks(patterns)
    _, best = rank_posterior(patterns, fit.shares, fit.weights)
    for _ in range(50):
        shares = fit.shares * np.exp(rng.normal(0, 0.3, len(fit.shares)))
        weights = fit.weights * np.exp(rng.normal(0, 0.3, len(fit.weights)))
        weights[0], weights[-1] = weights[1], 1.0
        _, other = rank_posterior(patterns, shares / shares.sum(), weights)
        assert other < best + 1e-3


@pytest.mark.parametrize("others", [0, 1, 30])
def test_shares_in_order_of_rank_are_those_of_isotonic_regression(others):
    rng = np.random.default_rng(others)
    widths = np.r_[np.ones(6), others]
    for _ in range(20):
        shares = rng.dirichlet(np.full(7, 0.5)) * (widths > 0)
        held = widths > 0
        slow = IsotonicRegression(increasing=False).fit_transform(
            np.arange(7)[held], shares[held] / widths[held], sample_weight=widths[held]
        )
        assert in_order(shares, others)[held] == pytest.approx(slow * widths[held])
        assert in_order(shares, others).sum() == pytest.approx(shares.sum())


def test_a_fit_does_not_say_that_the_networks_second_guess_is_better_than_their_first():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 8, 1000)
    p, _ = probabilities_with_truth(y, 8, 0.9, rng)
    sets = sets_by_rank(p, y, [6, 3, 2, 1, 1, 1, 1, 1], rng.integers(2, 5, 1000), rng)
    shares = fit_ranks(rank_patterns(p, sets)).shares
    assert (np.diff(shares[:-1]) <= 1e-9).all()
    assert shares[-1] / 2 <= shares[-2] + 1e-9, "two labels share the last"


@pytest.mark.parametrize("q", [0.1, 0.5])
def test_uniform_sets_give_the_error_within_three_points(q):
    rng = np.random.default_rng(2)
    y = rng.integers(0, 10, 3000)
    p, wrong = probabilities_with_truth(y, 10, 0.3, rng)
    sets = uniform(y, 10, q, seed=5)
    labels = np.where(sets, p, -1).argmax(axis=1)
    found = estimate_label_error(p, sets, random_sets=True)
    assert wrong_label_rate(sets, np.ones_like(sets)) == pytest.approx(q, abs=0.02)
    assert found.answers.value == pytest.approx(wrong.mean(), abs=0.03)
    assert found.labels.value == pytest.approx((labels != y).mean(), abs=0.03)
    assert found.outside.value == answers_outside(p, sets).mean() < wrong.mean()
    assert found.answers.low <= wrong.mean() <= found.answers.high


def test_superclass_sets_give_the_error_within_three_points():
    rng = np.random.default_rng(4)
    groups = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    y = rng.integers(0, 8, 3000)
    p, wrong = probabilities_with_truth(y, 8, 0.3, rng)
    sets = superclass(y, groups, 0.5, seed=5)
    possible = groups[None, :] == groups[y][:, None]
    labels = np.where(sets, p, -1).argmax(axis=1)
    found = estimate_label_error(p, sets, random_sets=True, possible=possible)
    assert found.answers.value == pytest.approx(wrong.mean(), abs=0.03)
    assert found.labels.value == pytest.approx((labels != y).mean(), abs=0.03)


def test_the_interval_of_real_sets_holds_what_the_tie_may_hide():
    rng = np.random.default_rng(6)
    y = rng.integers(0, 8, 1500)
    p, wrong = probabilities_with_truth(y, 8, 0.35, rng)
    for first in (6 * FIRST_TO_SECOND[0], 6 * FIRST_TO_SECOND[2] / 1.3):
        sets = sets_by_rank(p, y, [first, 6, 2, 1.5, 1, 1, 1, 1], rng.integers(1, 5, len(y)), rng)
        found = estimate_label_error(p, sets)
        assert found.answers.low <= wrong.mean() <= found.answers.high


@pytest.mark.parametrize("random_sets", [True, False])
@pytest.mark.parametrize(
    "sets",
    [np.ones((6, 4), bool), np.eye(4, dtype=bool)[[0, 1, 2, 3, 0, 1]], np.ones((3, 2), bool), np.ones((3, 1), bool)],
)
def test_sets_that_say_nothing_or_everything(sets, random_sets):
    p = np.random.default_rng(0).dirichlet(np.ones(sets.shape[1]), len(sets))
    found = estimate_label_error(p, sets, random_sets)
    for interval in (found.outside, found.answers, found.labels):
        assert 0 <= interval.low <= interval.value <= interval.high <= 1
    if sets.sum() == len(sets):  # the sets are the truth
        assert found.answers.value == pytest.approx(answers_outside(p, sets).mean(), abs=1e-6)
        assert found.labels.value == pytest.approx(0, abs=1e-6)


def test_wilson_is_where_the_normal_test_turns():
    found = wilson(7, 40)
    for edge in (found.low, found.high):
        assert abs(found.value - edge) == pytest.approx(1.96 * math.sqrt(edge * (1 - edge) / 40))
    assert wilson(0, 40).low == 0
    assert 0 < wilson(0, 40).high < 0.1


def test_probabilities_within_the_set_and_the_temperature():
    rng = np.random.default_rng(0)
    p, sets = rng.dirichlet(np.ones(5), 30), rng.random((30, 5)) < 0.5
    sets[:, 0] = True
    found = within_sets(p, sets, 2.0)
    for row, members, own in zip(p, sets, found, strict=True):
        powers = [value**0.5 if member else 0.0 for value, member in zip(row, members, strict=True)]
        assert own == pytest.approx(np.array(powers) / sum(powers))
    networks = 1 - within_sets(p, sets).max(axis=1).mean()
    for share in (0.05, networks / 2, networks + 0.05, networks + 0.1):
        for random_sets in (True, False):
            each = Interval(share, 0, 1)
            temperature = confidence_temperature(p, sets, LabelError(each, each, each, random_sets))
            said = 1 - within_sets(p, sets, temperature).max(axis=1).mean()
            assert said == pytest.approx(share if random_sets else max(share, networks), abs=1e-3)


def test_a_witness_judges_the_labels_and_answers_of_others():
    """Half of the others' labels are drawn at random, and sure: what they say themselves would not tell."""
    rng = np.random.default_rng(0)
    n, k = 1500, 6
    y = rng.integers(0, k, n)
    witness, _ = probabilities_with_truth(y, k, 0.2, rng)
    sets = sets_by_rank(witness, y, [1.5, 1.0, 1.0, 1.0, 1.0, 1.0], np.full(n, 3), rng)
    seen = estimate_label_error(witness, sets)
    itself, temperature = judged_by(witness, witness, sets)
    assert itself.labels.value == pytest.approx(seen.labels.value, abs=0.005)
    assert itself.outside == seen.outside
    assert temperature == confidence_temperature(witness, sets, seen)

    label = np.where(rng.random(n) < 0.5, rng.integers(0, k, n), witness.argmax(axis=1))
    others = np.full((n, k), 0.001)
    others[np.arange(n), label] = 0.995
    judged, _ = judged_by(witness, others, sets)
    wrong = (np.where(sets, others, -1.0).argmax(axis=1) != y).mean()
    assert judged.labels.value == pytest.approx(wrong, abs=0.05)
    assert judged.answers.value == pytest.approx((label != y).mean(), abs=0.05)
    assert judged.labels.low < wrong < judged.labels.high
    assert judged.outside.value == answers_outside(others, sets).mean()


def test_patterns_count_every_example_once():
    rng = np.random.default_rng(0)
    p, sets = rng.dirichlet(np.ones(9), 200), rng.random((200, 9)) < 0.4
    sets[:, 3] = True
    patterns = rank_patterns(p, sets)
    assert patterns.examples.sum() == 200
    assert ((patterns.head.sum(axis=1) + patterns.tail) * patterns.examples).sum() == sets.sum()
    first = sets[np.arange(200), p.argmax(axis=1)]
    assert (patterns.head[:, 0] * patterns.examples).sum() == first.sum()
    assert isinstance(fit_ranks(patterns), RankFit)
