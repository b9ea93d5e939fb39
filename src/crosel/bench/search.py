"""A search over settings (Optuna). Trials are ordinary runs, judged by what needs no true labels.

The training examples are split once: trials learn from one part, written to `search/train.npz` without true labels and
without the test set, and are judged by the candidate sets of the other (`search/held-out.npz`). Only `--oracle` puts
true labels into the second file. The study is a journal in the bench's folder: the same command goes on with it.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from crosel.bench.board import Board
from crosel.bench.cells import CellResult, Executor, Options
from crosel.bench.execute import run_cells
from crosel.bench.space import ORACLE, Range, Search
from crosel.bench.suite import Cell, Choice, Part, Suite, check_code, check_data, expand
from crosel.config import RunConfig
from crosel.data import Dataset, draw_candidates, load
from crosel.data.dataset import only_rows, random_split
from crosel.data.formats.npz import write_npz
from crosel.errors import UserError
from crosel.runs.folder import load_data, load_run
from crosel.training import metrics
from crosel.training.build import resolve
from crosel.training.devices import pick_device
from crosel.training.trainer import predicted_probabilities
from crosel.utils.csv_cells import csv_line
from crosel.utils.files import atomic_write, make_folder

FOLDER, TRAIN, HELD_OUT = "search", "train.npz", "held-out.npz"
JOURNAL, TABLE, BEST = "journal.log", "trials.csv", "best.yaml"


@dataclass(frozen=True)
class Trial:
    number: int
    score: float | None  # None: a cell failed
    settings: Mapping[str, Any]
    line: str = ""


@dataclass(frozen=True)
class Found:
    """What a search has found: all trials, and the best one's config (None: no trial came to an end)."""

    trials: tuple[Trial, ...]
    score: str
    table: Path
    best: Path | None


def run_search(
    suite: Suite,
    options: Options,
    execute: Executor,
    data_dir: Path | None,
    settings: Iterable[str],
    oracle: bool,
    quiet: bool,
) -> Found:
    """Run trials, `options.jobs` at once, until there are as many as the suite asks for."""
    search = suite.search
    assert search is not None
    score, extra = search.judged(oracle), tuple(settings)
    _optuna()  # before a folder is made for it
    folder = options.out / FOLDER
    _check_no_grid(suite)

    def plan(values: Mapping[str, Any]) -> Cell:
        """The first run on all examples, with these settings."""
        return _expand(suite, Choice("", values), suite.seeds[:1], data_dir, extra)[0]

    first = plan({})
    networks = search.space.get("network.name")
    proposed = [plan({"network.name": name}) for name in networks] if isinstance(networks, tuple) else [first]
    check_code(suite.place, proposed, options.trust_code)
    if not (folder / HELD_OUT).is_file():
        check_data(suite.place, [first])
    make_folder(folder)
    study = _study(folder, search, score, first)
    held_out = prepare(first, folder, search, oracle)
    trial_suite = _on_training_part(suite, first, folder / TRAIN)
    lasting = tuple(item for item in extra if not _tells_how_to_read(item.partition("=")[0].strip()))

    def best_config(values: Mapping[str, Any]) -> RunConfig:
        """With what the trials took from the data. A default in its place would count as asked for in best.yaml."""
        return resolve(plan(values).config, held_out)

    lines: dict[int, str] = {}
    while batch := _next_trials(study, search, options.jobs):
        cells = {number: _cells(trial_suite, number, values, lasting) for number, values in batch.items()}
        every = [cell for group in cells.values() for cell in group]
        results = run_cells(every, options, execute, Board(every, options, quiet=quiet))
        by_name = {result.cell.name: result for result in results}
        for number, group in cells.items():
            ended = [by_name[cell.name] for cell in group]
            lines[number] = _tell(study, number, ended, score, held_out, options)
        _write(study, search, score, best_config, options.out, lines)
    return _write(study, search, score, best_config, options.out, lines)


# --- the two parts ------------------------------------------------------------------------------------------------


def prepare(plan: Cell, folder: Path, search: Search, oracle: bool) -> Dataset:
    """Write the two parts of the training set (unless they are there), and return the one that judges."""
    if not (folder / HELD_OUT).is_file():
        config = plan.config
        data = draw_candidates(load_data(config), config.candidates, config.seed)
        if oracle and data.y is None:
            raise UserError("--oracle: this data has no true labels to judge trials by; leave it out")
        train, held_out = split(data, search.held_out, search.seed)
        write_npz(replace(train, y=None, x_test=None, y_test=None), folder / TRAIN)
        write_npz(replace(held_out, x_test=None, y_test=None, y=held_out.y if oracle else None), folder / HELD_OUT)
    return load(str(folder / HELD_OUT))


def split(data: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Hold out a share of the examples, sets included."""
    train, held_out = random_split(data.n, share, seed)
    if len(train) < 2 or not len(held_out):
        raise UserError(f"search: held_out: {share:g} of {data.n} examples leaves one side empty; change the share")
    return only_rows(data, train), only_rows(data, held_out)


def judge(run: Path, held_out: Dataset, score: str, device: str, trust_code: bool = False) -> float:
    """What a finished run is worth on the examples that it has not seen."""
    session = load_run(run, pick_device(device), trust_code, needs_data=False)
    p = predicted_probabilities(session, held_out.x)
    if score == ORACLE:
        assert held_out.y is not None
        return float(metrics.accuracy(p.argmax(dim=1), torch.from_numpy(held_out.y)))
    assert held_out.candidates is not None
    measure = metrics.covering_rate if score == "covering_rate" else metrics.approximated_accuracy
    return float(measure(p, torch.from_numpy(held_out.candidates)))


# --- trials -------------------------------------------------------------------------------------------------------


def _on_training_part(suite: Suite, plan: Cell, train: Path) -> Suite:
    """The suite with the training part as its source: what told how to read or draw has been done."""
    base = dict(suite.parts[0].base)
    if "preset" in base:
        base["preset"] = str(base["preset"]).replace("{source}", plan.config.source)
    base = {name: value for name, value in base.items() if not _tells_how_to_read(name)}
    return replace(suite, parts=(Part({**base, "source": str(train.absolute())}, ()),), search=None)


def _tells_how_to_read(setting: str) -> bool:
    return setting in ("source", "data_dir", "candidates") or setting.startswith("data.")


def _cells(suite: Suite, number: int, values: Mapping[str, Any], extra: Sequence[str]) -> list[Cell]:
    choice = Choice(f"trial{number:03d}", {name: json.loads(value) for name, value in values.items()})
    return _expand(suite, choice, None, None, extra)


def _expand(
    suite: Suite, choice: Choice, seeds: Sequence[int] | None, data_dir: Path | None, extra: Sequence[str]
) -> list[Cell]:
    part = replace(suite.parts[0], axes=((choice,),))
    return expand(replace(suite, search=None, parts=(part,)), seeds, data_dir, extra)


def _check_no_grid(suite: Suite) -> None:
    if len(suite.parts) != 1 or suite.parts[0].axes:
        raise UserError(f"{suite.place}: a search has a space instead of a grid or parts; leave these out")


def _next_trials(study: Any, search: Search, jobs: int) -> dict[int, dict[str, str]]:
    """Trials that an earlier session left unfinished come first; then new ones, as long as there are to be more."""
    known = study.get_trials(deepcopy=False)
    begun = [trial for trial in known if trial.state == _optuna().trial.TrialState.RUNNING][:jobs]
    if not begun:
        space = {name: _distribution(values) for name, values in search.space.items()}
        begun = [study.ask(space) for _ in range(min(jobs, search.trials - len(known)))]
    return {trial.number: {name: _as_json(value) for name, value in trial.params.items()} for trial in begun}


def _distribution(values: Range | tuple[Any, ...]) -> Any:
    kinds = _optuna().distributions
    if isinstance(values, tuple):  # Optuna takes plain values only, YAML has lists as well
        return kinds.CategoricalDistribution([json.dumps(value) for value in values])
    if values.whole:
        return kinds.IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log, step=values.step)


def _as_json(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _tell(study: Any, number: int, ended: Sequence[CellResult], score: str, held_out: Dataset, options: Options) -> str:
    failed = [result.line for result in ended if result.status not in ("done", "skipped")]
    if not failed:
        scores = [judge(result.folder, held_out, score, options.device, options.trust_code) for result in ended]
        value = math.fsum(scores) / len(scores)
        if math.isfinite(value):
            study.tell(number, value)
            return ""
        failed = [f"the score is {value}"]
    study.tell(number, state=_optuna().trial.TrialState.FAIL)
    return failed[0] or "no message"


# --- the study ----------------------------------------------------------------------------------------------------


def _optuna() -> Any:
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise UserError("a search needs Optuna: pip install 'crosel[search]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _study(folder: Path, search: Search, score: str, plan: Cell) -> Any:
    """The study in this folder, begun or gone on with; another search is not mixed into it."""
    optuna = _optuna()
    backend = importlib.import_module("optuna.storages.journal").JournalFileBackend(str(folder / JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    # A sampler starts afresh with every session: another seed, or it would propose the same again.
    study.sampler = optuna.samplers.TPESampler(seed=search.seed + len(study.get_trials(deepcopy=False)))
    identity = json.dumps({
        "space": {name: repr(values) for name, values in search.space.items()}, "score": score,
        "held_out": search.held_out, "seed": search.seed, "config": plan.config.model_dump(mode="json"),
    }, sort_keys=True)  # fmt: skip
    before = study.user_attrs.get("search")
    if before is None:
        study.set_user_attr("search", identity)
    elif before != identity:
        raise UserError(
            f"{folder.parent} contains another search (other settings, space or score); choose another --out"
        )
    return study


def _write(
    study: Any,
    search: Search,
    score: str,
    config: Callable[[Mapping[str, Any]], RunConfig],
    out: Path,
    lines: Mapping[int, str],
) -> Found:
    """The table of all trials, best first, and the best one's config, ready for `crosel train --config`."""
    trials = []
    for trial in study.get_trials(deepcopy=False):
        settings = {name: json.loads(_as_json(value)) for name, value in trial.params.items()}
        trials.append(Trial(trial.number, trial.value, settings, lines.get(trial.number, "")))
    trials.sort(key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.number))
    table = [csv_line(["trial", score, *search.space])]
    for trial in trials:
        shown = "" if trial.score is None else f"{trial.score:.6f}"
        values = (_as_json(trial.settings.get(name)) for name in search.space)
        table.append(csv_line([str(trial.number), shown, *values]))
    atomic_write(out / TABLE, b"".join(table))
    best = trials[0] if trials and trials[0].score is not None else None
    if best is not None:
        atomic_write(out / BEST, _best_yaml(config(best.settings), best, score))
    return Found(tuple(trials), score, out / TABLE, out / BEST if best else None)


def _best_yaml(config: RunConfig, best: Trial, score: str) -> str:
    return f"# trial {best.number} of a search: {score} {best.score:.4f} on held-out examples\n{config.to_yaml()}"
