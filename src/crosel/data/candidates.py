"""Candidate sets, drawn for plain labels or made of votes and scores; the rules that name them; and data with them.

A seed gives the same sets on every machine and with every version of numpy: the draws use the raw 64-bit output
of the Philox bit generator, whose stream numpy guarantees, and none of numpy's distributions. Rows are drawn in
chunks, so memory beyond the result stays bounded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crosel.data.dataset import Dataset
from crosel.errors import UserError
from crosel.utils.text import choose_from, did_you_mean

Bools = NDArray[np.bool_]
_CHUNK = 1 << 22  # draws held at once: 32 MiB


class _Draws:
    """Uniform numbers in [0, 1) from a guaranteed stream."""

    def __init__(self, seed: int) -> None:
        if seed < 0:
            raise UserError(f"seed must be at least 0, not {seed}")
        self._bits = np.random.Philox(np.random.SeedSequence(seed))

    def __call__(self, *shape: int) -> NDArray[np.float64]:
        return np.asarray(((self._raw(*shape) >> np.uint64(11)) * 2.0**-53), dtype=np.float64)

    def below(self, q: float, *shape: int) -> Bools:
        """Where such numbers are below q: exactly `self(*shape) < q`, quicker, as nothing becomes a float."""
        raw, edge = self._raw(*shape), math.ceil(q * 2.0**53) << 11
        return np.ones(shape, dtype=bool) if edge >= 1 << 64 else raw < np.uint64(edge)

    def _raw(self, *shape: int) -> NDArray[np.uint64]:
        return np.asarray(self._bits.random_raw(math.prod(shape)), dtype=np.uint64).reshape(shape)


def _checked_labels(labels: ArrayLike, classes: int) -> NDArray[np.int64]:
    y = np.asarray(labels)
    if y.ndim != 1:
        raise UserError(f"labels must be one-dimensional, not of shape {y.shape}")
    if len(y) and not np.issubdtype(y.dtype, np.integer):
        raise UserError(f"labels must be integers, not {y.dtype}")
    wrong = np.flatnonzero((y < 0) | (y >= classes))
    if len(wrong):
        raise UserError(f"label {y[wrong[0]]} of example {wrong[0]} is outside the classes 0 to {classes - 1}")
    return y.astype(np.int64)


def check_probability(name: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise UserError(f"{name} must lie between 0 and 1, not {value}")
    return value


def row_chunks(n: int, classes: int) -> list[slice]:
    rows = max(1, _CHUNK // max(1, classes))
    return [slice(start, min(n, start + rows)) for start in range(0, n, rows)]


def _draw_with(labels: NDArray[np.int64], classes: int, draw: Callable[[slice], Bools]) -> Bools:
    """The labels that are drawn for some rows, and the true label always."""
    sets = np.empty((len(labels), classes), dtype=bool)
    for rows in row_chunks(len(labels), classes):
        sets[rows] = draw(rows)
        sets[rows][np.arange(rows.stop - rows.start), labels[rows]] = True
    return sets


def uniform(labels: ArrayLike, classes: int, q: float, seed: int, at_least_two: bool = False) -> Bools:
    """Draw sets that hold the true label, and each other label with probability q: bool [n, k].

    With `at_least_two`, a set that would hold the truth alone gets a random wrong label (as in PRODEN, CRDPLL and PoP).
    """
    y, q, draws = _checked_labels(labels, classes), check_probability("q", q), _Draws(seed)
    sets = _draw_with(y, classes, lambda rows: draws.below(q, rows.stop - rows.start, classes))
    if at_least_two and classes > 1:
        other = (y + 1 + (draws(len(y)) * (classes - 1)).astype(np.int64)) % classes
        lonely = sets.sum(axis=1) == 1
        sets[lonely, other[lonely]] = True
    return sets


def uniform_sets(labels: ArrayLike, classes: int, seed: int) -> Bools:
    """Draw sets that hold the truth but not all labels, as in CC's experiments: bool [n, k].

    The size is s with probability C(k,s)/(2^k-2), s = 1..k-1; then come s-1 random wrong labels. Sets of the same size
    are equally likely. Small sets are likelier than if all sets that hold the truth were equally likely.
    """
    if classes < 2:
        raise UserError("uniform sets need at least two classes")
    y, draws = _checked_labels(labels, classes), _Draws(seed)
    log_weights = np.array([math.lgamma(classes + 1) - math.lgamma(s + 1) - math.lgamma(classes - s + 1)
                            for s in range(1, classes)])  # fmt: skip
    weights = np.exp(log_weights - log_weights.max())
    edges = np.cumsum(weights / weights.sum())
    sets = np.empty((len(y), classes), dtype=bool)
    sizes = 1 + np.minimum(np.searchsorted(edges, draws(len(y)), side="right"), classes - 2)
    for rows in row_chunks(len(y), classes):
        count = rows.stop - rows.start
        size = sizes[rows]
        keys = draws(count, classes)
        keys[np.arange(count), y[rows]] = -1.0  # the truth always comes first
        sets[rows] = _smallest(keys, size)
    return sets


def _smallest(keys: NDArray[np.float64], size: NDArray[np.int64]) -> Bools:
    """The `size[i]` smallest keys of row i; of equal ones the first. (Sorting values is quicker than ranking them.)"""
    last = np.sort(keys, axis=1)[np.arange(len(keys)), size - 1]
    chosen: Bools = keys <= last[:, None]
    tied = np.flatnonzero(chosen.sum(axis=1) != size)  # once in thousands of millions of rows
    rank = keys[tied].argsort(axis=1, kind="stable").argsort(axis=1, kind="stable")
    chosen[tied] = rank < size[tied, None]
    return chosen


def superclass(labels: ArrayLike, groups: ArrayLike, q: float, seed: int) -> Bools:
    """Like `uniform`, with wrong labels from the true label's superclass only; `groups[j]` is that of class j."""
    try:
        group = np.asarray(groups)
    except ValueError:  # lists of different lengths
        group = np.empty(0)
    if group.ndim != 1 or not len(group):
        raise UserError("groups must give one superclass for each class, as in [0, 0, 1, 1]")
    classes = len(group)
    y, q, draws = _checked_labels(labels, classes), check_probability("q", q), _Draws(seed)
    same = group[:, None] == group[None, :]
    return _draw_with(y, classes, lambda rows: draws.below(q, rows.stop - rows.start, classes) & same[y[rows]])


def instance_dependent(labels: ArrayLike, scores: ArrayLike, rate: float, seed: int, temperature: float = 0) -> Bools:
    """Draw wrong labels with probabilities proportional to a score matrix [n, k], `rate` on average (clipped at 1).

    With a temperature, the scores are logits, and their softmax is used.
    """
    g = np.asarray(scores)
    good = g.ndim == 2 and (np.issubdtype(g.dtype, np.number) or g.dtype == bool)
    if not good or any(
        not (np.isfinite(g[rows]) & ((g[rows] >= 0) | (temperature > 0))).all()
        for rows in row_chunks(g.shape[0], g.shape[1])
    ):
        raise UserError("scores must be an n x k matrix of finite numbers of at least 0")
    if not 0 <= rate < math.inf:
        raise UserError(f"rate must be at least 0, not {rate}")
    y = _checked_labels(labels, g.shape[1])
    if len(y) != len(g):
        raise UserError(f"{len(y)} labels, but scores for {len(g)} examples; give one row for each label")

    draws = _Draws(seed)

    def draw(rows: slice) -> Bools:
        r: NDArray[np.float64] = probabilities(g[rows], temperature) if temperature else g[rows].astype(np.float64)
        r[np.arange(len(r)), y[rows]] = 0.0
        r /= np.maximum(r.max(axis=1, keepdims=True), np.finfo(float).tiny)
        mean = r.mean(axis=1, keepdims=True)
        r *= rate / np.where(mean > 0, mean, 1.0)  # no score but the truth's: nothing to draw from
        return np.asarray(draws(*r.shape) < r)

    return _draw_with(y, g.shape[1], draw)


def drop_truth(sets: ArrayLike, labels: ArrayLike, eta: float, seed: int) -> Bools:
    """Remove the true label from a set with probability eta; a set with no other label gets a random wrong one."""
    return _without_truth(np.array(sets, dtype=bool), labels, eta, seed)


def _without_truth(out: Bools, labels: ArrayLike, eta: float, seed: int) -> Bools:
    """`drop_truth` in place: a copy of large tables is large."""
    y, eta, draws = _checked_labels(labels, out.shape[1]), check_probability("eta", eta), _Draws(seed)
    hit = np.flatnonzero(draws(len(y)) < eta)
    other = (y + 1 + (draws(len(y)) * (out.shape[1] - 1)).astype(np.int64)) % out.shape[1]
    out[hit, y[hit]] = False
    emptied = hit[~out[hit].any(axis=1)]
    out[emptied, other[emptied]] = True
    return out


def probabilities(scores: NDArray[Any], temperature: float) -> NDArray[np.float64]:
    """Rows that sum to 1: a softmax at a temperature, or with temperature 0 the scores as shares of their sum."""
    p: NDArray[np.float64] = scores.astype(np.float64)
    if temperature:
        p = np.exp((p - p.max(axis=1, keepdims=True)) / temperature)
    elif (p < 0).any():
        raise UserError("some scores are below 0, so they are not probabilities; add temperature=1 to the rule")
    p /= np.maximum(p.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return p


# --- made of votes and scores --------------------------------------------------------------------------------------


def at_least(votes: ArrayLike, least: int) -> Bools:
    """Return the labels with at least `least` votes, or those with the most votes if there are none: bool [n, k]."""
    v = np.asarray(votes)
    if least < 1:
        raise UserError(f"min must be at least 1, not {least}")
    sets = np.empty(v.shape, dtype=bool)
    for rows in row_chunks(*v.shape):
        sets[rows] = v[rows] >= np.minimum(least, np.maximum(1, v[rows].max(axis=1, keepdims=True)))
    return sets


def top_m(scores: ArrayLike, m: int) -> Bools:
    """Return the m labels with the highest scores; of equal ones, the first: bool [n, k]."""
    g = np.asarray(scores)
    if m < 1:
        raise UserError(f"m must be at least 1, not {m}")
    m = min(m, g.shape[1])
    sets = np.empty(g.shape, dtype=bool)
    for rows in row_chunks(*g.shape):
        bar = np.partition(g[rows], -m, axis=1)[:, -m, None]
        above, level = g[rows] > bar, g[rows] == bar
        room = m - above.sum(axis=1, keepdims=True)
        sets[rows] = above | (level & (level.cumsum(axis=1) <= room))
    return sets


def top_p(scores: ArrayLike, p: float, temperature: float = 0.0) -> Bools:
    """Return the fewest labels, likeliest first, whose probabilities reach p; of equal ones, the first: bool [n, k]."""
    g, p = np.asarray(scores), check_probability("p", p)
    if not 0 <= temperature < math.inf:
        raise UserError(f"temperature must be at least 0, not {temperature}")
    sets = np.empty(g.shape, dtype=bool)
    for rows in row_chunks(*g.shape):
        share = probabilities(g[rows], temperature)
        order = np.argsort(-share, axis=1, kind="stable")
        ranked = np.take_along_axis(share, order, axis=1)
        before = np.cumsum(ranked, axis=1) - ranked  # the mass of everything likelier
        keep = before < p - 1e-9  # sums of shares are only so exact
        keep[:, 0] = True
        sets[rows] = False
        np.put_along_axis(sets[rows], order, keep, axis=1)
    return sets


# --- rules: a name with its values, as on the command line -------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A parsed rule such as `uniform:q=0.5`."""

    name: str
    values: dict[str, float]
    file: str | None = None  # of `tree`

    def __str__(self) -> str:
        values = [f"{k}={v:g}" for k, v in self.values.items()] + ([f"file={self.file}"] if self.file else [])
        return self.name + (":" + ",".join(values) if values else "")


_RULES: dict[str, dict[str, float | None]] = {  # name -> its values, with defaults; None: must be given
    "uniform": {"q": None, "at_least_two": 0, "eta": 0},
    "uniform-sets": {"eta": 0},
    "superclass": {"q": None, "eta": 0},
    "instance": {"rate": None, "temperature": 0, "eta": 0},
    "union": {},
    "votes": {"min": None},
    "top-m": {"m": None},
    "top-p": {"p": None, "temperature": 0},
    "tree": {},
}
FROM_ANNOTATION = ("union", "votes", "top-m", "top-p")
_WHOLE = {"min": 2, "m": 3}  # values that are whole numbers, with an example


def parse_rule(text: str) -> Rule:
    """Parse `name:key=value,key=value`, filling in defaults."""
    name, _, rest = text.partition(":")
    if name not in _RULES:
        raise UserError(f"unknown candidate rule '{name}'{choose_from(name, _RULES)}")
    known = _RULES[name]
    if name == "tree":
        key, _, file = rest.partition("=")
        if key != "file" or not file:
            raise UserError(f"rule '{text}' needs the file with the class tree, as in 'tree:file=classes.yaml'")
        return Rule(name, {}, file)
    given: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            takes = ", ".join(known)
            takes = f"takes {takes}" if takes else "takes no values"
            raise UserError(f"rule '{text}': unknown value '{key}'{did_you_mean(key, known)}; '{name}' {takes}")
        if key in given:
            raise UserError(f"rule '{text}': {key} is given twice")
        try:
            given[key] = float(value)
        except ValueError:
            raise UserError(f"rule '{text}': '{item}' needs a number, as in '{key}={_WHOLE.get(key, 0.5)}'") from None
        if key in _WHOLE and not (given[key].is_integer() and 1 <= given[key] < 2**31):
            raise UserError(f"rule '{text}': '{item}' needs a whole number of at least 1, as in '{key}={_WHOLE[key]}'")
    missing = [key for key, default in known.items() if default is None and key not in given]
    if missing:
        raise UserError(f"rule '{text}' needs {missing[0]}, as in '{name}:{missing[0]}={_WHOLE.get(missing[0], 0.5)}'")
    defaults = {key: value for key, value in known.items() if value is not None}
    return Rule(name, {key: given.get(key, defaults.get(key, 0.0)) for key in known})


def apply_rule(
    rule: Rule,
    labels: ArrayLike,
    classes: int,
    seed: int,
    groups: Sequence[Any] | None = None,
    scores: ArrayLike | None = None,
) -> Bools:
    """Draw candidate sets for plain labels."""
    v = rule.values
    if rule.name == "uniform":
        sets = uniform(labels, classes, v["q"], seed, at_least_two=bool(v["at_least_two"]))
    elif rule.name == "uniform-sets":
        sets = uniform_sets(labels, classes, seed)
    elif rule.name == "superclass":
        if groups is None:
            raise UserError(
                f"rule '{rule}' needs superclasses, which this data does not have ('groups' of an npz file); "
                "choose another"
            )
        sets = superclass(labels, groups, v["q"], seed)
    elif rule.name == "instance":
        if scores is None:
            raise UserError(
                f"rule '{rule}' needs scores [n, k], which this data does not have ('scores' of an npz file); "
                "choose another"
            )
        sets = instance_dependent(labels, scores, v["rate"], seed, v["temperature"])
    else:
        raise UserError(
            f"rule '{rule}' makes sets from annotations, not from plain labels; choose another, such as uniform:q=0.3"
        )
    # A stream of its own, so that η = 0 and η > 0 share the sets they start from.
    return _without_truth(sets, labels, v["eta"], seed + 1_000_003) if v["eta"] else sets


_OTHERWISE = "choose another rule; if a csv file holds them, say so: --set data.format=scores (or wide-votes)"


def apply_annotation_rule(rule: Rule, votes: ArrayLike | None, scores: ArrayLike | None) -> Bools:
    """Make candidate sets of votes or scores; top-m and top-p take votes where there are no scores."""
    v = rule.values
    if rule.name in ("union", "votes"):
        if votes is None:
            instead = _OTHERWISE
            if scores is not None:
                instead = "use top-m or top-p for its scores, or, if they are votes: --set data.format=wide-votes"
            raise UserError(f"rule '{rule}' needs votes, which this data does not have; {instead}")
        return at_least(votes, int(v.get("min", 1)))
    table = scores if scores is not None else votes
    if table is None:
        raise UserError(f"rule '{rule}' needs scores or votes, which this data does not have; {_OTHERWISE}")
    return top_m(table, int(v["m"])) if rule.name == "top-m" else top_p(table, v["p"], v["temperature"])


# --- data with the sets that a rule gives them ----------------------------------------------------------------------


def full_rule(rule: str | None) -> str | None:
    """The rule with the full path of its file, so that a run can be resumed from any working folder."""
    parsed = None if rule is None else parse_rule(rule)
    return rule if parsed is None or parsed.file is None else str(replace(parsed, file=os.path.abspath(parsed.file)))


def with_classes_of(data: Dataset, rule: str | None) -> Dataset:
    """Return the data with the classes that the rule leaves it with: only `tree` changes them.

    Who reads a run's data again, to set them beside the saved candidate sets, needs this and no draw.
    """
    parsed = None if rule is None else parse_rule(rule)
    if parsed is None or parsed.name != "tree":
        return data
    from crosel.data.tree import read_tree, to_leaves

    assert parsed.file is not None
    return to_leaves(data, read_tree(Path(parsed.file)))


def _rule_hint(rule: str) -> str:
    return f"--candidates {rule} (crosel candidates: --rule {rule})"


def with_weights(data: Dataset, rule: str | None) -> Dataset:
    """Return the data with what its votes or scores say of each label, as shares of an example's sum.

    `draw_candidates` leaves of them what is inside the sets. Scores below 0 without a temperature are no shares.
    """
    parsed = parse_rule(rule or "union")
    if data.candidates is not None or data.weights is not None or parsed.name not in (*FROM_ANNOTATION, "tree"):
        return data
    ranked = data.scores is not None and parsed.name in ("top-m", "top-p")
    table, temperature = (data.scores, parsed.values.get("temperature", 0.0)) if ranked else (data.votes, 0.0)
    if table is None or (not temperature and bool((table < 0).any())):
        return data
    weights = np.empty(table.shape, dtype=np.float32)
    for rows in row_chunks(*table.shape):
        weights[rows] = probabilities(table[rows], temperature)
    return replace(data, weights=weights)


def draw_candidates(data: Dataset, rule: str | None, seed: int) -> Dataset:
    """Return the data with candidate sets. Without a rule, votes become the union of what anyone chose."""
    if rule is None:
        if data.candidates is not None:
            return data
        if data.votes is not None:
            return _from_annotation(data, Rule("union", {}))
        if data.scores is not None:
            raise UserError("this data has scores; choose how they become candidate sets: " + _rule_hint("top-p:p=0.9"))
        raise UserError("this data has plain labels; choose how to draw candidate sets: " + _rule_hint("uniform:q=0.3"))
    parsed = parse_rule(rule)
    if parsed.name == "tree":
        return with_classes_of(data, rule)
    if data.candidates is not None:
        raise UserError(f"this data has its own candidate sets; leave out the rule '{rule}'")
    if parsed.name in FROM_ANNOTATION:
        return _from_annotation(data, parsed)
    if data.y is None:
        raise UserError(
            f"rule '{rule}' draws sets for plain labels, which this data does not have; leave it out, or choose "
            f"from {', '.join(FROM_ANNOTATION)}"
        )
    sets = apply_rule(parsed, data.y, len(data.classes), seed, data.groups, data.scores)
    return replace(data, candidates=sets)


def _from_annotation(data: Dataset, rule: Rule) -> Dataset:
    sets = apply_annotation_rule(rule, data.votes, data.scores)
    empty = np.flatnonzero(~sets.any(axis=1))
    if len(empty):
        raise UserError(f"example {data.example_id(int(empty[0]))!r} has no votes ({len(empty)} such); leave it out")
    weights = None if data.weights is None else np.where(sets, data.weights, np.float32(0))
    return replace(data, candidates=sets, weights=weights)
