"""What can be said of the error rate without true labels, from out-of-sample probabilities and candidate sets.

Two error rates: of the *answers*, each the most probable of all classes, and of the *labels*, each the most probable
candidate. That an answer lies outside its set is seen; a wrong one inside the set is not. With e the error of answers
and r the share of wrong answers that lie inside: P(outside) = e (1 - r). So the share outside is a lower bound of e,
and where r is known, e = P(outside) / (1 - r). All of it supposes that sets hold the truth; what it says at the least
leaves out as many answers as there are sets that seem to miss it (missing_truth.py).

**Sets drawn at random** (uniform, superclass): r = q, the chance of each wrong label, which sizes give: q = mean of
|S| - 1 over mean of |U| - 1, with U the labels that could be in the set (all of them, or the superclass). Answers
outside U are wrong for certain.

**Real sets**: the network errs where people do, so r is larger. Sort the labels of each example by probability. The
truth is at rank t with chance π_t, which does not rise with t (a label that the network finds likelier is not the truth
more rarely), and the set is the truth with |S| - 1 other labels, drawn without replacement with weights w by rank. This
is Dawid and Skene's model with two annotators, the network and whoever made the sets: π is the confusion of one, w that
of the other. Given sizes are taken as they are, which allows for examples that are hard for everybody. Were w_1 free, a
wrong answer in the set could not be told from a right one. What ties it down:

    w_1 = c w_2        a wrong first answer is c times as likely a candidate as a wrong second one

Nobody can check c for a new set: the interval holds the estimates for a range of c, and on each side the sampling error
(bootstrap). docs/labels.md says where c comes from.

Networks that learn from labels they select themselves, as CroSel's do, say next to nothing of the second label: a wrong
label that they learned looks like a right one. Their labels are judged by a *witness*, PRODEN's network, trained on the
same folds (`judged_by`): its error rates are estimated as above, and its probabilities within the sets, at the
temperature that goes with them, say how likely each label and each answer of the others is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosel.runs.missing_truth import fit_missing, missing_odds

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

HEAD = 6  # ranks with a weight of their own; the others share one
FIRST_TO_SECOND: tuple[float, ...] = (1.0, 1.5, 4.0)  # c: the least, the best guess, the most
RESAMPLES = 40  # for a standard error
SERIOUS = 0.1  # so many wrong labels, at the least, are something to be warned of
CONVERGED = 1e-7  # of the mean log likelihood
NORMAL_95 = 1.96
_TINY = 1e-12


class OutOfSample(NamedTuple):
    """Probabilities [n, k] of the training examples by networks that did not train on them."""

    probabilities: NDArray[np.float32]
    witness: NDArray[np.float32] | None = None  # the same by another method, where networks select what they learn


class Interval(NamedTuple):
    """A share with its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LabelError:
    """Error rates without true labels. `answers` and `labels` are estimates with intervals.

    `outside` is the share of answers outside their set, with its 95 % interval. `outside.low` is a lower bound of the
    error of answers: less the estimated share of sets that miss the truth, outside of which an answer may be right.
    """

    outside: Interval
    answers: Interval
    labels: Interval
    random_sets: bool  # whether wrong candidates were drawn at random, by a known rule

    def line(self) -> str:
        """For people."""
        value, low, high = (f"{100 * share:.0f}" for share in self.labels)
        outside = f"{100 * self.outside.value:.0f}"
        seen = f"networks that had not seen them give {outside} % of the examples a label outside the set"
        if self.is_serious:
            return f"at least {low} % of these labels are wrong, by estimate {value} % (up to {high} %): {seen}"
        return f"by estimate {value} % of these labels are wrong ({low} to {high} %): {seen}"

    @property
    def is_serious(self) -> bool:
        return self.labels.low >= SERIOUS

    def to_json(self) -> dict[str, Any]:
        return {name: value._asdict() if isinstance(value, Interval) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> LabelError:
        outside, answers, labels = (Interval(**found[name]) for name in ("outside", "answers", "labels"))
        if not all(isinstance(x, int | float) and 0 <= x <= 1 for share in (outside, answers, labels) for x in share):
            raise ValueError("not a share")
        return cls(outside, answers, labels, bool(found["random_sets"]))


def answers_outside(probabilities: NDArray[Any], candidates: Bools) -> Bools:
    """Which examples' most probable label is not among their candidates: [n]."""
    return np.asarray(~candidates[np.arange(len(candidates)), probabilities.argmax(axis=1)])


def wilson(hits: float, n: int) -> Interval:
    """A share and its 95 % interval (Wilson), which does not shrink to nothing at 0 or 1."""
    z2, share = NORMAL_95**2, hits / n
    centre, half = share + z2 / (2 * n), NORMAL_95 * np.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    low, high = (centre - half) / (1 + z2 / n), (centre + half) / (1 + z2 / n)
    return Interval(share, min(share, max(0.0, float(low))), max(share, min(1.0, float(high))))


# --- sets drawn at random -----------------------------------------------------------------------------------------


def wrong_label_rate(candidates: Bools, possible: Bools) -> float:
    """q: how often a wrong label that could be in a set is in it."""
    others = float(possible.sum() - len(possible))
    return float(candidates.sum() - len(candidates)) / others if others else 0.0


def random_sets_error(probabilities: NDArray[Any], candidates: Bools, possible: Bools) -> float:
    """e of answers, for sets drawn at random from `possible`: what is impossible, and P(outside) / (1 - q) of the rest.

    Full sets (q = 1) tell nothing; then only what is impossible counts.
    """
    answer = probabilities.argmax(axis=1)
    rows, q = np.arange(len(candidates)), wrong_label_rate(candidates, possible)
    impossible = ~possible[rows, answer]
    seen = ~candidates[rows, answer] & ~impossible
    return float(min(1.0, impossible.mean() + (seen.mean() / (1 - q) if q < 1 else 0.0)))


# --- sets by rank -------------------------------------------------------------------------------------------------


class Patterns(NamedTuple):
    """Sets in order of rank: the distinct ones, and how many examples have each."""

    head: Bools  # [p, m]: which of the first m ranks are candidates
    tail: NDArray[np.int64]  # [p]: how many of the others
    examples: NDArray[np.int64]  # [p]
    others: NDArray[np.int64]  # [p]: how many ranks there are after the head


def rank_patterns(probabilities: NDArray[Any], candidates: Bools, possible: Bools | None = None) -> Patterns:
    """Bring each example's labels in order of their probability; labels that are not possible have no rank."""
    p = probabilities if possible is None else np.where(possible, probabilities, -1.0)
    m = min(HEAD, p.shape[1])
    first = np.argsort(-p, axis=1, kind="stable")[:, :m]
    head = np.take_along_axis(candidates, first, axis=1)
    size = np.full(len(p), p.shape[1]) if possible is None else possible.sum(axis=1)
    rows = np.column_stack([head, candidates.sum(axis=1) - head.sum(axis=1), np.maximum(size - m, 0)])
    found, count = np.unique(rows.astype(np.int64), axis=0, return_counts=True)
    return Patterns(found[:, :m].astype(bool), found[:, m], count, found[:, m + 1])


@dataclass(frozen=True)
class RankFit:
    """π of the first ranks and of all others together, w likewise, and the error rates that follow."""

    shares: Floats  # [m + 1]
    weights: Floats  # [m + 1]
    answers: float
    labels: float


def fit_ranks(
    patterns: Patterns, odds: float = 1.0, random_sets: bool = False, start: RankFit | None = None, steps: int = 2000
) -> RankFit:
    """Fit π and w by EM. `odds` is w_1 / w_2; with `random_sets` all w are equal, and only π is fitted."""
    m, total = patterns.head.shape[1], patterns.examples.sum()
    shares = np.r_[np.linspace(2.0, 0.1, m), 0.1] if start is None else start.shares
    shares = shares * np.r_[np.ones(m), patterns.others.any()]
    shares = shares / shares.sum()
    weights = np.ones(m + 1) if start is None or random_sets else start.weights.copy()
    if not random_sets and m > 1:
        weights[0] = odds * weights[1]
    last, largest = -np.inf, int((patterns.head.sum(axis=1) + patterns.tail).max())
    for _ in range(steps):
        ways = None if random_sets else log_ways(weights[:m], int(patterns.others[0]), largest)
        truth, likelihood = rank_posterior(patterns, shares, weights, ways, random_sets)
        if likelihood - last < CONVERGED:
            break
        last = likelihood
        shares = in_order((truth * patterns.examples[:, None]).sum(axis=0) / total, int(patterns.others.max()))
        if ways is not None:
            weights = _renewed(weights, patterns, truth, ways, odds)
    label = np.where(patterns.head.any(axis=1), patterns.head.argmax(axis=1), m)
    right = truth[np.arange(len(truth)), label]
    right = np.where(label == m, right / np.maximum(patterns.tail, 1), right)  # one of the candidates in the tail
    return RankFit(shares, weights, 1 - float(shares[0]), 1 - float((right * patterns.examples).sum() / total))


def rank_posterior(
    patterns: Patterns, shares: Floats, weights: Floats, ways: Floats | None = None, random_sets: bool = False
) -> tuple[Floats, float]:
    """P(truth at rank t | set) for each pattern, [p, m + 1] with the tail together; and the mean log likelihood.

    Of sets drawn at random, those of a size are equally likely, wherever the truth is: no weights are needed.
    """
    head, tail, count, others = patterns
    m = head.shape[1]
    log_share = np.log(np.maximum(shares, _TINY))
    score = np.full((len(head), m + 1), -np.inf)
    score[:, :m] = np.where(head, log_share[:m], -np.inf)
    score[:, m] = np.where(tail > 0, log_share[m] + np.log(np.maximum(tail, 1) / np.maximum(others, 1)), -np.inf)
    if not random_sets:
        size = head.sum(axis=1) + tail
        ways = log_ways(weights[:m], int(others[0]), int(size.max())) if ways is None else ways
        score += (head @ np.log(weights[:m]))[:, None] - np.r_[np.log(weights[:m]), 0.0]
        own = ways[:, -1, size - 1].T
        score -= np.where(np.isfinite(own), own, 0.0)  # no way at all: the truth cannot be there either
    top = score.max(axis=1, keepdims=True)
    odds = np.exp(score - top)
    total = odds.sum(axis=1, keepdims=True)
    return odds / total, float((np.log(total) + top)[:, 0] @ count / count.sum())


def log_ways(weights: Floats, others: int, largest: int) -> Floats:
    """Log of the summed products of weights over all sets of s labels without labels t and j: [t, j, s], s from 0.

    t and j are ranks; m is one of the tail, whose `others` labels have the weight 1. The last j leaves out t only.
    """
    m = len(weights)
    t, j = np.arange(m + 1)[:, None], np.arange(m + 2)[None, :]
    rank = np.arange(m)
    left = np.where((rank == t[..., None]) | (rank == j[..., None]), 0.0, weights)  # [t, j, m]
    head = np.zeros((m + 1, m + 2, m + 1))  # elementary symmetric polynomials
    head[..., 0] = 1.0
    for label in range(m):
        head[..., 1:] += left[..., label, None] * head[..., :-1]
    tail = others - (t == m) - (j == m)  # labels left there; below 0 there is no such pair
    drawn = np.arange(largest + 1) - np.arange(m + 1)[:, None]  # from the tail: [h, s]
    with np.errstate(divide="ignore"):
        terms = np.log(head)[..., None] + _log_binomial(tail[..., None, None], drawn)  # [t, j, h, s]
    top = np.maximum(terms.max(axis=2, keepdims=True), -1e300)
    with np.errstate(divide="ignore"):
        found: Floats = np.log(np.exp(terms - top).sum(axis=2)) + top[:, :, 0]
    return found


def _log_binomial(n: NDArray[Any], k: NDArray[Any]) -> Floats:
    factorial = np.r_[0.0, np.cumsum(np.log(np.arange(1, max(1, int(n.max())) + 1)))]
    possible = (k >= 0) & (k <= n)
    n, k = np.where(possible, n, 0), np.where(possible, k, 0)
    return np.where(possible, factorial[n] - factorial[k] - factorial[n - k], -np.inf)


def in_order(shares: Floats, others: int) -> Floats:
    """The likeliest shares [m + 1] that do not rise from rank to rank: those that do are evened out (PAVA).

    The last is the share of `others` labels together.
    """
    parts: list[tuple[float, int, int]] = []  # share, labels, ranks
    for rank, share in enumerate(shares):
        labels, ranks = (others, 1) if rank == len(shares) - 1 else (1, 1)
        while parts and share * parts[-1][1] > parts[-1][0] * labels:
            before = parts.pop()
            share, labels, ranks = share + before[0], labels + before[1], ranks + before[2]
        parts.append((share, labels, ranks))
    each = np.concatenate([np.full(ranks, share / max(labels, 1)) for share, labels, ranks in parts])
    each[-1] *= others
    found: Floats = each
    return found


def _renewed(weights: Floats, patterns: Patterns, truth: Floats, ways: Floats, odds: float) -> Floats:
    """Weights of wrong labels, raised where they are in sets more often than these weights say.

    This is iterative proportional fitting, as for samples drawn without replacement. Half a set more that holds each
    label as often as one of the tail keeps ranks that were never seen from 0.
    """
    head, tail, count, others = patterns
    m, size = head.shape[1], head.sum(axis=1) + tail
    sets = truth * count[:, None]
    seen = ((count[:, None] - sets[:, :m]) * head).sum(axis=0)
    by_size = np.zeros((int(size.max()) + 1, m + 1))  # [s, t]
    np.add.at(by_size, size, sets)
    s = np.arange(2, len(by_size))
    with np.errstate(divide="ignore", invalid="ignore"):
        held = np.exp(ways[:, :m, s - 2] - ways[:, -1:, s - 1]) * weights[:m, None]  # P(j in S | truth t, size s)
    held[np.arange(m), np.arange(m)] = 0
    expected = np.einsum("st,tjs->j", by_size[2:], np.nan_to_num(held))
    if m > 1:
        seen[:2], expected[:2] = seen[:2].sum(), expected[:2].sum()
    new = weights.copy()
    new[:m] *= (seen + 0.5) / (expected + 0.5 * weights[:m])
    if others[0] == 0:
        new[:m] /= new[m - 1]  # only proportions count
    if m > 1:
        new[0] = odds * new[1]
    found: Floats = new
    return found


# --- all of it ----------------------------------------------------------------------------------------------------


def estimate_label_error(
    probabilities: NDArray[Any],
    candidates: Bools,
    random_sets: bool = False,
    possible: Bools | None = None,
    seed: int = 0,
) -> LabelError:
    """Error rates of answers and labels from out-of-sample probabilities [n, k] and candidate sets [n, k].

    `random_sets`: wrong candidates were drawn at random, from `possible` [n, k] (default: all labels).
    """
    n, range_of_c = len(candidates), FIRST_TO_SECOND
    if random_sets:
        range_of_c = range_of_c[1:2]  # it does not matter
    outside = wilson(float(answers_outside(probabilities, candidates).sum()), n)
    missing, _ = fit_missing(missing_odds(probabilities, candidates))  # answers outside such a set may be right
    outside = outside._replace(low=max(0.0, outside.low - missing))
    patterns = rank_patterns(probabilities, candidates, possible)
    fits = [fit_ranks(patterns, c, random_sets) for c in range_of_c]
    found = np.array([(fit.answers, fit.labels) for fit in fits])  # [c, what]
    rng = np.random.default_rng(seed)
    again = []
    for _ in range(RESAMPLES):
        drawn = patterns._replace(examples=rng.multinomial(n, patterns.examples / n))
        refits = [fit_ranks(drawn, c, random_sets, fit, steps=100) for c, fit in zip(range_of_c, fits, strict=True)]
        again.append([(fit.answers, fit.labels) for fit in refits])
    spread = NORMAL_95 * np.std(again, axis=0)
    if candidates.all():  # such sets tell nothing
        spread[:] = 1.0
    low, high = (found - spread).min(axis=0), (found + spread).max(axis=0)
    answers, labels = found[len(found) // 2]
    if random_sets:
        everything = np.ones_like(candidates) if possible is None else possible
        answers = random_sets_error(probabilities, candidates, everything)
    return LabelError(
        outside, _interval(answers, low[0], high[0], n), _interval(labels, low[1], high[1], n), random_sets
    )


def judged_by(witness: NDArray[Any], probabilities: NDArray[Any], candidates: Bools) -> tuple[LabelError, float]:
    """Error rates of the answers and labels that `probabilities` name, and the witness's temperature.

    The intervals also cover what the networks say themselves: they may be better than the witness.
    """
    seen, own = estimate_label_error(witness, candidates), estimate_label_error(probabilities, candidates)
    named, found = [probabilities.argmax(axis=1), np.where(candidates, probabilities, -1.0).argmax(axis=1)], []
    for share in seen.labels:
        chances = within_sets(witness, candidates, temperature_of(witness, candidates, share))
        found.append([1 - chances[np.arange(len(chances)), label].mean() for label in named])
    answers, labels = (
        _interval(value, min(low, before.low), max(high, before.high), len(candidates))
        for (value, low, high), before in zip(np.transpose(found), (own.answers, own.labels), strict=True)
    )
    return LabelError(own.outside, answers, labels, False), confidence_temperature(witness, candidates, seen)


def _interval(value: float, low: float, high: float, n: int) -> Interval:
    """Never narrower than what the true labels of all n examples would give."""
    known = wilson(value * n, n)
    return Interval(float(value), max(0.0, min(float(low), known.low)), min(1.0, max(float(high), known.high)))


def within_sets(probabilities: NDArray[Any], candidates: Bools, temperature: float = 1.0) -> Floats:
    """Probabilities within the candidate set: p^(1/T) on S, renormalised."""
    scores = np.where(candidates, np.log(np.maximum(probabilities, _TINY)) / temperature, -np.inf)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    found: Floats = p / p.sum(axis=1, keepdims=True)
    return found


def confidence_temperature(probabilities: NDArray[Any], candidates: Bools, error: LabelError) -> float:
    """The temperature at which the labels' mean probability within their sets is the estimated share of right ones.

    Or as near as it gets. An estimate that rests on c makes labels less sure than the networks are, but never surer.
    """
    found = temperature_of(probabilities, candidates, error.labels.value)
    return found if error.random_sets else max(1.0, found)


def temperature_of(probabilities: NDArray[Any], candidates: Bools, wrong: float) -> float:
    """The temperature, or the nearest, at which labels seem wrong that often."""
    coldest, hottest = np.log(0.02), np.log(100.0)
    for _ in range(40):  # the hotter, the less sure
        middle = (coldest + hottest) / 2
        sure = within_sets(probabilities, candidates, float(np.exp(middle))).max(axis=1).mean()
        coldest, hottest = (middle, hottest) if sure > 1 - wrong else (coldest, middle)
    return float(np.exp((coldest + hottest) / 2))
