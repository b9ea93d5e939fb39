"""Candidate sets: statistics against their definitions, hashes that pin them for good, size, rules and errors."""

from __future__ import annotations

import hashlib
import math
import tracemalloc

import numpy as np
import pytest
from scipy import stats

from crosel.data import candidates
from crosel.data.candidates import (
    Rule,
    apply_rule,
    drop_truth,
    instance_dependent,
    parse_rule,
    superclass,
    uniform,
    uniform_sets,
)
from crosel.errors import UserError

N = 20_000


def labels(n: int = N, k: int = 10) -> np.ndarray:
    return np.arange(n) % k


def holds_truth(sets: np.ndarray, y: np.ndarray) -> np.ndarray:
    return sets[np.arange(len(y)), y]


def wrong_counts(sets: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How often each label is a wrong candidate, by true label: [k, k]."""
    k = sets.shape[1]
    return np.stack([sets[y == c].sum(axis=0) for c in range(k)])


def assert_share(found: float, expected: float, draws: int) -> None:
    """Within five standard errors of a share."""
    assert abs(found - expected) <= 5 * math.sqrt(max(expected * (1 - expected), 1e-12) / draws)


# --- uniform ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "q"), [(2, 0.5), (10, 0.1), (10, 0.3), (10, 0.7), (100, 0.05)])
def test_uniform_has_its_mean_size_and_the_truth(k, q):
    y = labels(k=k)
    sets = uniform(y, k, q, seed=1)
    assert sets.shape == (N, k)
    assert sets.dtype == bool
    assert holds_truth(sets, y).all()
    assert_share((sets.sum() - N) / (N * (k - 1)), q, N * (k - 1))
    assert sets.sum(axis=1).mean() == pytest.approx(1 + (k - 1) * q, rel=0.02)


def test_uniform_draws_every_wrong_label_alike():
    y = labels()
    counts = wrong_counts(uniform(y, 10, 0.3, seed=2), y)
    wrong = counts[~np.eye(10, dtype=bool)]
    assert (np.abs(wrong - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7)).all()
    assert stats.chisquare(wrong).pvalue > 1e-3


def test_uniform_sizes_are_binomial():
    sizes = uniform(labels(), 10, 0.3, seed=3).sum(axis=1)
    expected = N * stats.binom(9, 0.3).pmf(np.arange(10))
    observed = np.bincount(sizes - 1, minlength=10)
    keep = expected > 5
    assert stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue > 1e-3


def test_uniform_labels_are_independent_of_each_other():
    sets = uniform(np.zeros(N, dtype=int), 10, 0.5, seed=4)[:, 1:]
    correlation = np.corrcoef(sets.T) - np.eye(9)
    assert np.abs(correlation).max() < 5 / math.sqrt(N)


def test_uniform_at_its_ends():
    y = labels(50)
    assert np.array_equal(uniform(y, 10, 0.0, seed=0), np.eye(10, dtype=bool)[y])
    assert uniform(y, 10, 1.0, seed=0).all()
    assert uniform(np.zeros(5, dtype=int), 1, 0.5, seed=0).all()
    assert uniform(np.zeros(0, dtype=int), 10, 0.5, seed=0).shape == (0, 10)


def test_singletons_and_full_sets_occur():
    sizes = uniform(labels(k=4), 4, 0.5, seed=5).sum(axis=1)
    assert set(sizes) == {1, 2, 3, 4}
    assert_share((sizes == 1).mean(), 1 / 8, N)
    assert_share((sizes == 4).mean(), 1 / 8, N)


def test_at_least_two_fills_up_singletons_and_nothing_else():
    y = labels(k=4)
    plain, filled = uniform(y, 4, 0.2, seed=6), uniform(y, 4, 0.2, seed=6, at_least_two=True)
    lonely = plain.sum(axis=1) == 1
    assert lonely.sum() > 1000
    assert np.array_equal(plain[~lonely], filled[~lonely])
    assert (filled[lonely].sum(axis=1) == 2).all()
    assert holds_truth(filled, y).all()
    added = wrong_counts(filled[lonely], y[lonely])[~np.eye(4, dtype=bool)]
    assert stats.chisquare(added).pvalue > 1e-3


def test_at_least_two_of_one_class_is_the_truth_and_of_two_classes_both():
    assert uniform(np.zeros(3, dtype=int), 1, 0.5, seed=0, at_least_two=True).tolist() == [[True]] * 3
    assert uniform(np.array([0, 1, 0]), 2, 0.0, seed=0, at_least_two=True).all()


# --- uniform sets (USS) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [2, 3, 5, 10])
def test_uniform_sets_have_their_sizes(k):
    y = labels(k=k)
    sets = uniform_sets(y, k, seed=1)
    assert holds_truth(sets, y).all()
    sizes = sets.sum(axis=1)
    assert sizes.min() >= 1
    assert sizes.max() <= k - 1
    shares = np.array([math.comb(k, s) / (2**k - 2) for s in range(1, k)])
    assert shares.sum() == pytest.approx(1)
    observed = np.bincount(sizes, minlength=k)[1:k]
    if k == 2:
        assert observed.tolist() == [N]
    else:
        assert stats.chisquare(observed, N * shares).pvalue > 1e-3


def test_uniform_sets_draw_every_wrong_label_alike():
    y = labels(k=5)
    counts = wrong_counts(uniform_sets(y, 5, seed=2), y)[~np.eye(5, dtype=bool)]
    assert stats.chisquare(counts).pvalue > 1e-3


def test_uniform_sets_of_many_classes():
    """C(1100, s) is beyond floats; the sizes still come out around the half."""
    sizes = uniform_sets(np.zeros(300, dtype=int), 1100, seed=0).sum(axis=1)
    assert sizes.mean() == pytest.approx(550, abs=5)
    assert sizes.std() == pytest.approx(math.sqrt(275), rel=0.25)


def test_uniform_sets_need_two_classes():
    with pytest.raises(UserError, match="at least two classes"):
        uniform_sets([0, 0], 1, seed=0)


def test_no_labels_have_no_sets():
    assert uniform([], 10, 0.5, seed=0).shape == (0, 10)


# --- superclass ---------------------------------------------------------------------------------------------------


def test_superclass_draws_only_from_the_group():
    groups = np.array([0, 0, 0, 1, 1, 1, 1, 2, 0, 3])
    y = labels()
    sets = superclass(y, groups, 0.5, seed=1)
    assert holds_truth(sets, y).all()
    same = groups[y][:, None] == groups[None, :]
    assert not sets[~same].any()
    others = same.sum() - N
    assert_share((sets.sum() - N) / others, 0.5, others)


def test_superclass_of_cifar_has_mean_size_three():
    groups = np.arange(100) % 20
    sizes = superclass(labels(k=100), groups, 0.5, seed=2).sum(axis=1)
    assert sizes.mean() == pytest.approx(3.0, abs=5 / math.sqrt(N))
    assert sizes.max() == 5


def test_superclass_with_one_group_is_uniform_and_names_may_be_words():
    y = labels(200)
    assert np.array_equal(superclass(y, ["a"] * 10, 0.3, seed=3), uniform(y, 10, 0.3, seed=3))
    assert np.array_equal(superclass(y, list("abcdefghij"), 0.9, seed=3), np.eye(10, dtype=bool)[y])


@pytest.mark.parametrize("groups", [[], [[0, 1], [0, 1]], [[0, 1], [2]]])
def test_superclass_needs_a_group_for_each_class(groups):
    with pytest.raises(UserError, match="one superclass for each class"):
        superclass([0], groups, 0.5, seed=0)


# --- instance-dependent -------------------------------------------------------------------------------------------


def slow_chances(scores: np.ndarray, y: np.ndarray, rate: float) -> np.ndarray:
    """Zero the true class, r = g/max g, r = r/mean(r)·rate, clip to 1; the truth always."""
    out = np.zeros_like(scores)
    for i, row in enumerate(scores):
        g = [0.0 if j == y[i] else float(value) for j, value in enumerate(row)]
        r = [value / max(g) for value in g]
        mean = sum(r) / len(r)
        out[i] = [min(1.0, value / mean * rate) for value in r]
        out[i, y[i]] = 1.0
    return out


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_instance_dependent_follows_its_scores(rate):
    rng = np.random.default_rng(0)
    few = rng.gamma(0.7, size=(6, 8))
    kind = np.arange(N) % 6
    y = np.array([0, 3, 7, 2, 2, 5])[kind]
    sets = instance_dependent(y, few[kind], rate, seed=1)
    chances = slow_chances(few, np.array([0, 3, 7, 2, 2, 5]), rate)
    assert (chances == 1).sum() > 6 or rate < 0.4  # some are clipped
    for c in range(6):
        drawn = sets[kind == c]
        for j in range(8):
            assert_share(drawn[:, j].mean(), chances[c, j], len(drawn))


def test_instance_dependent_scale_of_the_scores_does_not_matter():
    rng = np.random.default_rng(1)
    y, g = labels(300), rng.random((300, 10))
    assert np.array_equal(instance_dependent(y, g, 0.3, seed=2), instance_dependent(y, 1024 * g, 0.3, seed=2))


def test_instance_dependent_at_its_ends():
    y = labels(40)
    alone = np.eye(10, dtype=bool)[y]
    assert np.array_equal(instance_dependent(y, np.random.default_rng(0).random((40, 10)), 0.0, seed=0), alone)
    assert np.array_equal(instance_dependent(y, alone.astype(float), 0.5, seed=0), alone)  # no score but the truth's
    assert np.array_equal(instance_dependent(y, np.zeros((40, 10)), 0.5, seed=0), alone)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("rate", [5, 1e300])
def test_instance_dependent_with_a_large_rate_draws_all_that_has_a_score(rate):
    scores = np.array([[0.5, 0.2, 0.0], [0.7, 0.0, 0.0], [0.0, 0.0, 0.0]])
    assert instance_dependent([0, 0, 2], scores, rate, seed=0).tolist() == [
        [True, True, False], [True, False, False], [False, False, True],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("scores", "rate", "message"),
    [
        (np.ones(3), 0.5, "n x k matrix"),
        (np.full((3, 2), np.nan), 0.5, "finite"),
        (-np.ones((3, 2)), 0.5, "of at least 0"),
        (np.ones((3, 2)), -0.1, "rate must be at least 0, not -0.1"),
        (np.ones((2, 2)), 0.5, "3 labels, but scores for 2 examples"),
    ],
)
def test_instance_dependent_errors(scores, rate, message):
    with pytest.raises(UserError, match=message):
        instance_dependent([0, 1, 0], scores, rate, seed=0)


def test_instance_dependent_refuses_a_rate_that_is_no_number():
    with pytest.raises(UserError, match="rate"):
        instance_dependent([0, 1], np.ones((2, 3)), math.nan, seed=0)


# --- missing truth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eta", [0.0, 0.05, 0.6, 1.0])
def test_drop_truth_leaves_it_out_with_its_chance(eta):
    y = labels()
    sets = uniform(y, 10, 0.2, seed=1)
    kept = sets.copy()
    out = drop_truth(sets, y, eta, seed=2)
    assert np.array_equal(sets, kept)  # the argument is left alone
    assert_share(1 - holds_truth(out, y).mean(), eta, N)
    assert out.any(axis=1).all()
    dropped = ~holds_truth(out, y)
    assert np.array_equal(out[~dropped], sets[~dropped])
    lonely = sets.sum(axis=1) == 1
    wrong_before, wrong_after = sets.copy(), out.copy()
    wrong_before[np.arange(N), y] = wrong_after[np.arange(N), y] = False
    assert np.array_equal(wrong_before[~lonely], wrong_after[~lonely])
    assert (out[dropped & lonely].sum(axis=1) == 1).all()


def test_drop_truth_replaces_a_lonely_truth_evenly():
    y = labels(k=4)
    out = drop_truth(np.eye(4, dtype=bool)[y], y, 1.0, seed=3)
    counts = wrong_counts(out, y)
    assert (np.diag(counts) == 0).all()
    assert stats.chisquare(counts[~np.eye(4, dtype=bool)]).pvalue > 1e-3


# --- the same sets for ever ---------------------------------------------------------------------------------------

HASHES = {
    0: "8ec482a2f305bf9b 1fefbc69437dd84d de2dee5e05c2c04f 55c4586b9c9114eb 4dabe61f1f3e81b6 7d099b2ea46d5d40",
    1: "755f22a9645159f3 bfa0e86b0ed16441 fd0bfe724110e4b3 ac76348fcc1eacd3 53bc9eed04b57aa1 40a973ec3bda14a2",
    2**40: "98c63dc95d1d2d4c d5bd14bca02ec441 081d8710a1ef337c 0c37fba4feac3ad5 3d7bbad98e58e1c4 f959d80c1d824332",
}
SCORES = (np.arange(5000).reshape(500, 10) * 7 % 11).astype(float)
RULES = {
    "uniform": lambda y, seed: uniform(y, 10, 0.3, seed),
    "at least two": lambda y, seed: uniform(y, 10, 0.1, seed, at_least_two=True),
    "uniform sets": lambda y, seed: uniform_sets(y, 10, seed),
    "superclass": lambda y, seed: superclass(y, np.arange(10) // 2, 0.5, seed),
    "instance": lambda y, seed: instance_dependent(y, SCORES, 0.3, seed),
    "drop": lambda y, seed: drop_truth(np.ones((500, 10), dtype=bool), y, 0.2, seed),
}


def digest(sets: np.ndarray) -> str:
    return hashlib.sha256(np.packbits(sets).tobytes()).hexdigest()[:16]


@pytest.mark.parametrize("seed", HASHES)
@pytest.mark.parametrize("name", RULES)
def test_sets_never_change(name, seed):
    """Saved runs name their sets by rule and seed: these values must outlive every refactoring."""
    assert digest(RULES[name](labels(500), seed)) == HASHES[seed].split()[list(RULES).index(name)]


@pytest.mark.parametrize("name", RULES)
def test_seeds_differ(name):
    y = labels(500)
    seeds = (0, 1, 2, 3, 2**32, 2**63 - 1)
    assert len({digest(RULES[name](y, seed)) for seed in seeds}) == len(seeds)
    assert digest(RULES[name](y, 5)) == digest(RULES[name](y, 5))


def test_first_draws_are_raw_philox_output():
    """The stream that numpy promises to keep, and nothing of its distributions, which it does not."""
    raw = np.random.Philox(np.random.SeedSequence(7)).random_raw(12)
    expected = [[int(value) >> 11 < 0.5 * 2**53 for value in row] for row in raw.reshape(4, 3)]
    assert uniform([0] * 4, 3, 0.5, seed=7)[:, 1:].tolist() == [row[1:] for row in expected]


@pytest.mark.parametrize("name", [n for n in RULES if n != "uniform sets"])
@pytest.mark.parametrize("chunk", [1, 70, 999])
def test_sets_do_not_depend_on_chunks(name, chunk, monkeypatch):
    whole = RULES[name](labels(500), 4)
    monkeypatch.setattr(candidates, "_CHUNK", chunk)
    assert np.array_equal(RULES[name](labels(500), 4), whole)


@pytest.mark.parametrize("chunk", [1, 70, 999])
def test_uniform_sets_do_not_depend_on_chunks(chunk, monkeypatch):
    whole = uniform_sets(labels(500), 10, 4)
    monkeypatch.setattr(candidates, "_CHUNK", chunk)
    assert np.array_equal(uniform_sets(labels(500), 10, 4), whole)


def test_more_examples_keep_the_first_ones():
    assert np.array_equal(uniform(labels(800), 10, 0.3, seed=0)[:500], uniform(labels(500), 10, 0.3, seed=0))


def test_global_random_state_is_untouched():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    uniform(labels(100), 10, 0.3, seed=0)
    assert np.array_equal(before, np.random.get_state()[1])


def test_a_hundred_thousand_examples_of_a_thousand_classes():
    """A tenth of ImageNet's size in about a second, with no more than 150 MiB beyond the result."""
    y = labels(100_000, 1000)
    tracemalloc.start()
    try:
        sets = uniform(y, 1000, 0.01, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - sets.nbytes < 150 * 2**20
    assert holds_truth(sets, y).all()
    assert sets.sum() / len(y) == pytest.approx(1 + 999 * 0.01, rel=1e-3)


# --- rules and errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "values"),
    [
        ("uniform:q=0.5", "uniform", {"q": 0.5, "at_least_two": 0, "eta": 0}),
        ("uniform:q=.3,at_least_two=1", "uniform", {"q": 0.3, "at_least_two": 1, "eta": 0}),
        ("uniform:eta=0.1,q=1", "uniform", {"q": 1, "at_least_two": 0, "eta": 0.1}),
        ("uniform-sets", "uniform-sets", {"eta": 0}),
        ("uniform-sets:", "uniform-sets", {"eta": 0}),
        ("superclass:q=0.5,eta=1e-3", "superclass", {"q": 0.5, "eta": 1e-3}),
    ],
)
def test_rules_are_parsed(text, name, values):
    rule = parse_rule(text)
    assert (rule.name, rule.values) == (name, values)
    assert parse_rule(str(rule)) == rule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:q=0.5", r"unknown candidate rule 'unifrom' \(did you mean 'uniform'\?\); choose from uniform, "),
        ("", "unknown candidate rule ''"),
        ("uniform", "rule 'uniform' needs q, as in 'uniform:q=0.5'"),
        ("superclass:eta=0.1", "needs q, as in 'superclass:q=0.5'"),
        ("uniform:p=0.5", "unknown value 'p'.*'uniform' takes q, at_least_two, eta"),
        ("uniform:q=0.5,etta=0.1", r"unknown value 'etta' \(did you mean 'eta'\?\)"),
        ("uniform:q=half", "'q=half' needs a number, as in 'q=0.5'"),
        ("uniform:q", "'q' needs a number"),
    ],
)
def test_rule_errors(text, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_rule(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["uniform:q=1.5", "uniform:q=-0.1", "uniform:q=nan", "superclass:q=2"])
def test_rule_values_out_of_range(text):
    with pytest.raises(UserError, match="q must lie between 0 and 1, not "):
        apply_rule(parse_rule(text), labels(20), 10, seed=0, groups=[0] * 10)


@pytest.mark.parametrize("eta", ["1.5", "-1", "nan"])
def test_eta_out_of_range(eta):
    with pytest.raises(UserError, match="eta must lie between 0 and 1, not "):
        apply_rule(parse_rule(f"uniform:q=0.5,eta={eta}"), labels(20), 10, seed=0)


def test_rules_are_applied():
    y, groups = labels(500), [0] * 5 + [1] * 5
    expected = {
        "uniform:q=0.3": uniform(y, 10, 0.3, 7),
        "uniform:q=0.1,at_least_two=1": uniform(y, 10, 0.1, 7, at_least_two=True),
        "uniform-sets": uniform_sets(y, 10, 7),
        "superclass:q=0.5": superclass(y, groups, 0.5, 7),
    }
    for text, sets in expected.items():
        assert np.array_equal(apply_rule(parse_rule(text), y, 10, seed=7, groups=groups), sets)


@pytest.mark.parametrize("text", ["uniform:q=0.3", "uniform-sets", "superclass:q=0.5"])
def test_missing_truth_starts_from_the_same_sets(text):
    y, groups = labels(), [0] * 5 + [1] * 5
    joiner = "," if ":" in text else ":"
    plain = apply_rule(parse_rule(text), y, 10, 7, groups)
    dropped = apply_rule(parse_rule(f"{text}{joiner}eta=0.2"), y, 10, 7, groups)
    gone = ~holds_truth(dropped, y)
    assert_share(gone.mean(), 0.2, N)
    assert np.array_equal(plain[~gone], dropped[~gone])
    assert dropped.any(axis=1).all()


def test_missing_truth_is_drawn_apart_from_the_sets():
    """From one stream, the number that drew the i-th entry of the table would also decide on example i."""
    y = np.zeros(N, dtype=int)
    sets = apply_rule(parse_rule("uniform:q=0.5"), y, 10, 7)
    gone = ~holds_truth(apply_rule(parse_rule("uniform:q=0.5,eta=0.3"), y, 10, 7), y)
    wrong = np.arange(N) % 10 != 0  # entries that are not the truth's
    assert abs(np.corrcoef(sets.ravel()[:N][wrong], gone[wrong])[0, 1]) < 5 / math.sqrt(N)


@pytest.mark.parametrize(("seed", "expected"), [(0, "16488e92d748e4f5"), (1, "b82149895968b04c")])
def test_sets_with_missing_truth_never_change(seed, expected):
    assert digest(apply_rule(parse_rule("uniform:q=0.3,eta=0.2"), labels(500), 10, seed)) == expected


def test_superclass_rule_needs_groups():
    with pytest.raises(UserError, match="needs superclasses, which this data does not have"):
        apply_rule(Rule("superclass", {"q": 0.5, "eta": 0}), [0, 1], 2, seed=0)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([0, 1, 10], "label 10 of example 2 is outside the classes 0 to 9"),
        ([0, -1], "label -1 of example 1 is outside the classes 0 to 9"),
        ([0.0, 1.0], "labels must be integers, not float64"),
        ([[0, 1]], r"one-dimensional, not of shape \(1, 2\)"),
    ],
)
@pytest.mark.parametrize("draw", [lambda y: uniform(y, 10, 0.5, 0), lambda y: uniform_sets(y, 10, 0)])
def test_label_errors(y, message, draw):
    with pytest.raises(UserError, match=message):
        draw(y)


def test_a_seed_below_zero_is_refused():
    with pytest.raises(UserError, match="seed must be at least 0, not -1"):
        uniform([0], 2, 0.5, seed=-1)


@pytest.mark.parametrize("q", [-0.01, 1.01, math.nan, math.inf])
def test_a_chance_outside_its_range_is_refused(q):
    with pytest.raises(UserError, match="q must lie between 0 and 1"):
        uniform([0], 2, q, seed=0)
    with pytest.raises(UserError, match="eta must lie between 0 and 1"):
        drop_truth(np.ones((1, 2)), [0], q, seed=0)


# --- the quick ways are the plain ones ----------------------------------------------------------------------------


@pytest.mark.parametrize("q", [0.0, 5e-324, 2.0**-53, 0.1, 1 / 3, 0.5, 1 - 2.0**-53, 1.0])
def test_draws_below_q_are_those_of_the_floats(q):
    np.testing.assert_array_equal(
        candidates._Draws(3).below(q, 500, 7), candidates._Draws(3)(500, 7) < q, err_msg="nothing may become another"
    )


def test_smallest_keys_with_ties_are_the_first():
    keys = np.array([[0.5, 0.2, 0.5, 0.5], [0.1, 0.1, 0.1, 0.0], [0.4, 0.3, 0.2, 0.1]])
    expected = [[True, True, False, False], [True, True, False, True], [False, False, False, True]]
    assert candidates._smallest(keys, np.array([2, 3, 1])).tolist() == expected


def test_scores_are_taken_in_chunks():
    """Half-precision scores of two million cells: a copy in double precision alone would be 16 MB."""
    scores = np.random.default_rng(0).random((2000, 1000)).astype(np.float16)
    whole = instance_dependent(labels(2000, 1000), scores, 0.4, seed=0)
    tracemalloc.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(candidates, "_CHUNK", 1 << 16)
            sets = instance_dependent(labels(2000, 1000), scores, 0.4, seed=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < sets.nbytes + 4e6
    np.testing.assert_array_equal(sets, whole)


def test_logits_are_softened_by_the_rule():
    logits = np.array([[2.0, 1.0, -5.0], [-1.0, 3.0, 0.0]] * 50)
    y = np.zeros(100, dtype=int)
    by_rule = apply_rule(parse_rule("instance:rate=0.5,temperature=2"), y, 3, seed=1, scores=logits)
    np.testing.assert_array_equal(by_rule, instance_dependent(y, candidates.probabilities(logits, 2.0), 0.5, seed=1))
    with pytest.raises(UserError, match="of at least 0"):
        apply_rule(parse_rule("instance:rate=0.5"), y, 3, seed=1, scores=logits)
