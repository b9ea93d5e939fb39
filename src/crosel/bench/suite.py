"""Suites: a YAML file with a common base and a grid of settings becomes variants, and with each seed, runs.

    title: CC and CroSel on digits
    seeds: 3                                  # 0, 1, 2; or a list
    base: {source: digits, preset: demo/digits, candidates: "uniform:q=0.3"}
    grid:
      method: [cc, crosel]                    # a setting and its values …
      weight:                                 # … or named choices, each with several settings
        low: {method.lambda_cr: 1}
        fixed: {method.lambda_cr: 4, method.dynamic_lambda: false}

`parts` (a list of further base and grid, over the common ones) joins grids that do not multiply. A preset may name
`{source}` and `{method}`; a setting whose value is `"{seed}"` gets the run's seed (`data.split_seed: "{seed}"`).
In place of a grid there may be a `search` (see `crosel.bench.suite`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from importlib import resources
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from crosel.config import RunConfig, build_config
from crosel.data.sources import check_there
from crosel.errors import UserError
from crosel.nn.factory import check_trust
from crosel.utils.settings import dotted, read_yaml
from crosel.utils.text import choose_from

Settings = dict[str, Any]  # dotted names and their values
_SUITE_KEYS = ("title", "seeds", "base", "grid", "parts", "search")
_PART_KEYS = ("base", "grid")
# What `crosel train` has a flag for, and what is therefore no `--set`.
_FLAGS = ("source", "preset", "candidates", "method")
_MOST_RUNS = 10_000  # of a suite: a few lines of a grid could stand for more than can be counted


@dataclass(frozen=True)
class Choice:
    """One value of an axis of the grid: how it is called in a folder's name (if at all), and what it sets."""

    label: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    base: Mapping[str, Any]
    axes: tuple[tuple[Choice, ...], ...]

    def variants(self) -> Iterator[tuple[Settings, tuple[str, ...]]]:
        """All it sets, and the labels, of each combination of choices."""
        for choices in product(*self.axes):
            settings = dict(self.base)
            for choice in choices:
                settings.update(choice.settings)
            yield settings, tuple(choice.label for choice in choices if choice.label)


@dataclass(frozen=True)
class Suite:
    name: str
    title: str
    seeds: tuple[int, ...]
    parts: tuple[Part, ...]
    place: str = ""  # what to call it in an error: the file, or the name of one that comes with crosel
    search: Search | None = None  # trials in place of a grid

    @property
    def size(self) -> int:
        """How many runs it has."""
        if self.search is not None:
            return len(self.seeds) * self.search.trials
        return len(self.seeds) * sum(math.prod(map(len, part.axes)) for part in self.parts)


@dataclass(frozen=True)
class BenchRun:
    """A variant with a seed. `arguments` are those of `crosel train`, without where and on what it runs."""

    name: str
    arguments: tuple[str, ...]
    config: RunConfig


def suites() -> dict[str, Any]:
    """Names and files of the suites that come with the package."""
    root = resources.files("crosel.bench") / "suites"
    files = sorted((file for file in root.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file for file in files}


def read_suite(name: str) -> Suite:
    """Read a suite by its name, or from a YAML file."""
    known = suites()
    if name in known:
        content = yaml.safe_load(known[name].read_text(encoding="utf-8"))
        return parse_suite(content, name, f"suite '{name}'")
    path = Path(name)
    if path.suffix not in (".yaml", ".yml") and not path.is_file():
        raise UserError(f"unknown suite '{name}'{choose_from(name, known)}, or give a YAML file")
    return parse_suite(read_yaml(path), path.stem, str(path))


def parse_suite(content: Mapping[str, Any], name: str, place: str) -> Suite:
    """Check the shape of a suite. Whether its settings are good ones is found when it is expanded."""
    check_keys(content, _SUITE_KEYS, place)
    listed = [{}] if content.get("parts") is None else content["parts"]
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{place}: 'parts' must be a list of parts, each with a base or a grid")
    base, axes = _flat(content.get("base", {}), place, "base"), _axes(content.get("grid", {}), place, "grid")
    parts = []
    for number, part in enumerate(listed, 1):
        where = f"parts, item {number}"
        if not isinstance(part, Mapping):
            raise UserError(f"{place}: {where} needs a base or a grid")
        check_keys(part, _PART_KEYS, f"{place}: {where}")
        more = _flat(part.get("base", {}), place, f"{where}, base")
        parts.append(Part({**base, **more}, axes + _axes(part.get("grid", {}), place, f"{where}, grid")))
    search = parse_search(content["search"], place) if "search" in content else None
    seeds = _seeds(content.get("seeds", 1), place)
    return Suite(name, str(content.get("title", name)), seeds, tuple(parts), place, search)


def expand(
    suite: Suite,
    seeds: int | Sequence[int] | None = None,
    data_dir: Path | None = None,
    settings: Iterable[str] = (),
    only: str | Iterable[str] = (),
) -> list[BenchRun]:
    """The runs of a suite. `seeds` and `settings` (NAME=VALUE, as of `--set`) go over what the suite says; with
    `only`, a shell-style pattern or several, those whose names match one of them."""
    suite, extra, runs = with_seeds(suite, seeds), tuple(settings), dict[str, BenchRun]()
    if suite.size > _MOST_RUNS:
        raise UserError(f"{suite.place}: more than {_MOST_RUNS} runs; give fewer values or seeds")
    for tree, labels in (variant for part in suite.parts for variant in part.variants()):
        for seed in suite.seeds:
            run = _run(suite.place, tree, labels, seed, data_dir, extra)
            if run.name in runs:
                raise UserError(
                    f"{suite.place}: two runs have the name {run.name}; put the settings that tell them apart in a grid"
                )
            runs[run.name] = run
    wanted = _wanted(suite.place, list(runs), [only] if isinstance(only, str) else list(only))
    by_config: dict[str, str] = {}
    for name in wanted:
        twin = by_config.setdefault(runs[name].config.model_dump_json(), name)
        if twin != name:
            remedy = "leave one of them out"
            if len(extra) == 1:
                remedy = f"--set {extra[0]} overrides what the suite varies, so leave it out"
            raise UserError(f"{suite.place}: {twin} and {name} are the same run; {remedy}")
    return [runs[name] for name in wanted]


def check_code(place: str, runs: Iterable[BenchRun], trust_code: bool) -> None:
    """Refuse runs whose network is code from outside, unless that is trusted."""
    for run in runs:
        try:
            check_trust(run.config.network.name, trust_code)
        except UserError as error:
            raise UserError(f"{place}, run {run.name}: {error}") from None


def check_data(place: str, runs: Iterable[BenchRun]) -> list[str]:
    """Refuse to begin where no run has its data: each would fail by itself. If only some have not, return a line for
    each missing source."""
    first: dict[tuple[str, Path | None], BenchRun] = {}
    for run in runs:
        first.setdefault((run.config.source, run.config.data_folder), run)
    missing = []
    for (source, folder), run in first.items():
        try:
            check_there(source, folder)
        except UserError as error:
            missing.append(f"{place}, run {run.name}: {error}")
        except OSError:  # it may be there: the run will see
            continue
    if missing and len(missing) == len(first):
        raise UserError(missing[0])
    return missing


def _wanted(place: str, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match a pattern, in their own order; without patterns, all."""
    for pattern in patterns:
        if not _matching(pattern, names):
            raise UserError(f"{place}: no run matches --only {quote(pattern)}; {_nearest(pattern, names)}")
    return [name for name in names if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)]


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if fnmatchcase(name, pattern)]


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """What may have been meant by a pattern that matches no name: a part of one, or something like it."""
    part = pattern.strip("*")
    if part and _matching(f"*{part}*", names):
        return f"a pattern is for the whole name: try --only {quote(f'*{part}*')}"

    def alike(name: str) -> int:  # letters in common; ratio() would punish names for being long
        blocks = SequenceMatcher(None, part.lower(), name.lower(), autojunk=False).get_matching_blocks()
        return sum(block.size for block in blocks)

    return f"the nearest are {', '.join(sorted(names, key=alike, reverse=True)[:3])} (--list shows all)"


def with_seeds(suite: Suite, seeds: int | Sequence[int] | None) -> Suite:
    return suite if seeds is None else replace(suite, seeds=_seeds(seeds, "seeds"))


def _run(
    place: str, tree: Settings, labels: Iterable[str], seed: int, data_dir: Path | None, extra: tuple[str, ...]
) -> BenchRun:
    source, method, rule, preset = (tree.get(flag) for flag in ("source", "method", "candidates", "preset"))
    method = str(method or "crosel")
    if not isinstance(source, str):
        raise UserError(f"{place}: 'source' is missing in base; give what to train on, as in source: digits")
    if preset is not None:
        preset = str(preset).replace("{source}", source).replace("{method}", method)
    name = run_name(source, rule, method, labels, seed)
    filled = {key: seed if value == "{seed}" else value for key, value in tree.items() if key not in _FLAGS}
    sets = [f"{key}={_text(value)}" for key, value in filled.items()] + list(extra)
    if not any(item.startswith("train.folds=") for item in sets):
        sets.append("train.folds=0")  # a bench measures classifiers, not the labels that they give
    values = {
        "source": source, "candidates": rule, "seed": seed, "data_dir": str(data_dir) if data_dir else None,
        "method": {"name": method},
    }  # fmt: skip
    try:
        config = build_config(preset=preset, values=values, settings=sets)
    except UserError as error:
        raise UserError(f"{place}, run {name}: {error}") from None
    arguments = [source, "--method", method]
    for flag, value in (("--preset", preset), ("--candidates", rule), ("--data", data_dir)):
        arguments += [flag, str(value)] if value is not None else []
    arguments += ["--seed", str(seed), *(part for item in sets for part in ("--set", item))]
    return BenchRun(name, tuple(arguments), config)


def run_name(source: str, rule: str | None, method: str, labels: Iterable[str], seed: int) -> str:
    """The folder of a run within a bench: `cifar10-q0.5/crosel-gamma=0.8-seed0`."""
    short = re.sub(r"^uniform:", "", rule or "").replace("=", "").replace(":", "-")
    group = "-".join(filter(None, (Path(source).stem, short)))
    return f"{_slug(group)}/{_slug('-'.join((method, *labels)))}-seed{seed}"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+=-]+", "_", text).lstrip(".-") or "_"


def _text(value: Any) -> str:
    """Write a value so that `--set` reads it back, without quotes where they are not needed."""
    if isinstance(value, str):
        try:
            plain = yaml.safe_load(value) == value
        except yaml.YAMLError:
            plain = False
        return value if plain else json.dumps(value)
    return json.dumps(value)


def _label(value: Any) -> str:
    """A value in a folder's name; 1 and 1.0 are the same setting and get the same name."""
    if isinstance(value, list):
        return "+".join(map(_label, value))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _axes(grid: Any, place: str, where: str) -> tuple[tuple[Choice, ...], ...]:
    if not isinstance(grid, Mapping):
        raise UserError(f"{place}: '{where}' needs lines such as method: [cc, crosel]")
    return tuple(_axis(str(name), values, place, where) for name, values in grid.items())


def _axis(name: str, values: Any, place: str, where: str) -> tuple[Choice, ...]:
    if isinstance(values, Mapping) and values:
        choices = []
        for label, settings in values.items():
            inner = _flat(settings, place, f"{where}.{name}.{label}")
            shown = _label(label) if name == "method" else f"{name}={_label(label)}"
            # The method stands in every name already.
            choices.append(Choice("" if shown == inner.get("method") else shown, inner))
        return tuple(choices)
    if not isinstance(values, list) or not values:
        raise UserError(f"{place}: '{where}.{name}' needs a list of values, or named choices with their settings")
    if any(isinstance(value, Mapping) for value in values):
        raise UserError(f"{place}: '{where}.{name}' has settings without a name; write NAME: {{SETTING: VALUE}}")
    setting = "method" if name == "method.name" else name
    # Source, rule and method stand in every name already.
    named = setting not in ("source", "candidates", "method")
    last = setting.rsplit(".", 1)[-1]
    return tuple(Choice(f"{last}={_label(value)}" if named else "", {setting: value}) for value in values)


def _seeds(value: Any, place: str) -> tuple[int, ...]:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _MOST_RUNS:
        return tuple(range(value))
    if isinstance(value, list | tuple) and value:
        whole = all(isinstance(seed, int) and not isinstance(seed, bool) and seed >= 0 for seed in value)
        if whole and len(set(value)) == len(value):
            return tuple(value)
    what = f"a number from 1 to {_MOST_RUNS}, or a list of different seeds"
    raise UserError(f"{place}: 'seeds' must be {what} (given: {value!r})")


def _flat(tree: Any, place: str, where: str) -> Settings:
    """Nested settings by their dotted names; `method: {name: cc}` and `method: cc` are the same."""
    if not isinstance(tree, Mapping):
        raise UserError(f"{place}: '{where}' needs 'name: value' lines")
    out = {"method" if name == "method.name" else name: value for name, value in dotted(tree).items()}
    if "seed" in out:
        raise UserError(f"{place}: '{where}' has a seed; give seeds as 'seeds', next to base and grid")
    return out


# --- the search -------------------------------------------------------------------------------------------------------

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
