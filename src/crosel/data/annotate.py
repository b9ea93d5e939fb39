"""From a dataset to one with candidate sets: its own, made of its annotation, or drawn for its labels."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from crosel.data.candidates import (
    FROM_ANNOTATION,
    Bools,
    Rule,
    apply_rule,
    check_probability,
    parse_rule,
    probabilities,
    row_chunks,
)
from crosel.data.dataset import Dataset
from crosel.errors import UserError

_OTHERWISE = "choose another rule; if a csv file holds them, say so: --set data.format=scores (or wide-votes)"


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
