"""The `search:` block of a suite: which settings are tried, how often, and by what a trial is judged.

base: {source: digits, preset: demo/digits, candidates: "uniform:q=0.3"}
search:
  trials: 20
  score: covering_rate                    # or approximated_accuracy: neither needs true labels
  held_out: 0.1                           # share of the training examples that trials do not see
  space:
    method.gamma: {low: 0.7, high: 0.99}
    train.lr: {low: 0.01, high: 0.3, log: true}
    method.bank_length: {low: 1, high: 5} # whole numbers stay whole
    method.scope: [all, unselected]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from crosel.errors import UserError
from crosel.utils.text import choose_from

ORACLE = "oracle_accuracy"  # needs true labels, so it must be asked for by name: --oracle
SCORES = ("covering_rate", "approximated_accuracy", ORACLE)
_KEYS = ("trials", "score", "held_out", "seed", "space")
_RANGE_KEYS = ("low", "high", "log", "step")


@dataclass(frozen=True)
class Range:
    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def whole(self) -> bool:
        return all(isinstance(value, int) for value in (self.low, self.high, self.step) if value is not None)


@dataclass(frozen=True)
class Search:
    space: Mapping[str, Range | tuple[Any, ...]]
    trials: int = 20
    score: str = SCORES[0]
    held_out: float = 0.1
    seed: int = 0

    def judged(self, oracle: bool) -> str:
        """The score that counts; true labels only if the user has said so."""
        if self.score == ORACLE and not oracle:
            raise UserError(f"search: {ORACLE} uses true labels; add --oracle to allow this")
        return ORACLE if oracle else self.score


def parse_search(content: Any, place: str) -> Search:
    """Check the block. Whether its settings are good ones is found when a trial begins."""
    if not isinstance(content, Mapping):
        raise UserError(f"{place}: 'search' needs lines such as trials: 20, and a space")
    check_keys(content, _KEYS, f"{place}: search")
    space = content.get("space")
    if not isinstance(space, Mapping) or not space:
        raise UserError(f"{place}: search: 'space' names settings to try, as in method.gamma: {{low: 0.7, high: 0.99}}")
    score = content.get("score", SCORES[0])
    if score not in SCORES:
        raise UserError(f"{place}: search: unknown score '{score}'{choose_from(str(score), SCORES)}")
    trials, seed = (_whole(content.get(name, default), name, place) for name, default in (("trials", 20), ("seed", 0)))
    if trials < 1:
        raise UserError(f"{place}: search: 'trials' must be at least 1")
    share = content.get("held_out", 0.1)
    if not _is_plain_number(share) or not 0 < share < 1:
        raise UserError(f"{place}: search: 'held_out' must be a share between 0 and 1 (given: {share!r})")
    read = {str(name): _dimension(values, f"{place}: search.space.{name}") for name, values in space.items()}
    return Search(read, trials, score, float(share), seed)


def _dimension(values: Any, where: str) -> Range | tuple[Any, ...]:
    if isinstance(values, list) and values:
        return tuple(values)
    if not isinstance(values, Mapping):
        raise UserError(f"{where}: give a list of values, or {{low: …, high: …}}")
    check_keys(values, _RANGE_KEYS, where)
    low: Any = values.get("low")
    high: Any = values.get("high")
    step, log = values.get("step"), values.get("log", False)
    if not _is_plain_number(low) or not _is_plain_number(high) or not low < high:
        raise UserError(f"{where}: 'low' and 'high' must be numbers, 'low' the smaller one")
    if not isinstance(log, bool) or (log and low <= 0) or (log and step is not None):
        raise UserError(f"{where}: 'log' must be true or false; true needs 'low' above 0, and no 'step'")
    if step is not None and (not _is_plain_number(step) or step <= 0):
        raise UserError(f"{where}: 'step' must be a number above 0")
    return Range(low, high, log, step)


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _whole(value: Any, name: str, place: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise UserError(f"{place}: search: '{name}' must be a whole number (given: {value!r})")
    return value


def check_keys(content: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    for key in content:
        if key not in known:
            raise UserError(f"{where}: unknown key '{key}'{choose_from(str(key), known)}")
