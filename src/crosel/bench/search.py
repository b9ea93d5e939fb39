"""A search over settings (Optuna). Trials are ordinary runs, judged by what needs no true labels.

The training examples are split once: trials learn from one part, written to `search/train.npz` without true labels and
without the test set, and are judged by the candidate sets of the other (`search/held-out.npz`). Only `--oracle` puts
true labels into the second file. The study is a journal in the bench's folder: the same command continues it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from crosel.bench.execution import BenchScreen, Options, RunResult, run_all
from crosel.bench.executors import find_executor
from crosel.bench.suite import (
    ORACLE,
    BenchRun,
    Choice,
    Part,
    Range,
    Search,
    Suite,
    check_code,
    check_data,
    expand,
    read_suite,
    with_seeds,
)
from crosel.config import RunConfig, check_config
from crosel.data import Dataset, draw_candidates, load
from crosel.data.dataset import only_rows, random_split
from crosel.data.formats.npz import write_npz
from crosel.errors import UserError
from crosel.runs.folder import load_data, load_run
from crosel.training import metrics
from crosel.training.build import resolve
from crosel.training.devices import pick_device
from crosel.training.trainer import predicted_probabilities
from crosel.utils.files import atomic_write, make_folder
from crosel.utils.text import csv_line

FOLDER, TRAIN, HELD_OUT = "search", "train.npz", "held-out.npz"
JOURNAL, TABLE, BEST = "journal.log", "trials.csv", "best.yaml"


@dataclass(frozen=True)
class Trial:
    number: int
    score: float | None  # None: a run failed
    settings: Mapping[str, Any]
    line: str = ""


@dataclass(frozen=True)
class SearchResult:
    """All trials, best first, and the best one's config (None: no trial came to an end)."""

    trials: tuple[Trial, ...]
    score: str
    table: Path
    best: Path | None


def search_suite(
    suite: str | Suite,
    out: Path,
    *,
    seeds: int | Sequence[int] | None = None,
    jobs: int = 1,
    device: str = "auto",
    on: str = "local",
    data_dir: Path | None = None,
    settings: Iterable[str] = (),
    oracle: bool = False,
    trust_code: bool = False,
    quiet: bool = True,
) -> SearchResult:
    """Run the search of a suite into `out`, `jobs` trials at once, or continue it. Without `oracle`, no trial is judged
    by true labels. Networks of your own are imported only with `trust_code`."""
    suite = with_seeds(read_suite(suite) if isinstance(suite, str) else suite, seeds)
    search, options, execute = suite.search, Options(out, device, jobs, trust_code), find_executor(on)
    if search is None:
        raise UserError(f"{suite.place} has no search; run it with run_suite")
    score, extra = search.judged(oracle), tuple(settings)
    _optuna()  # before a folder is made for it
    folder = options.out / FOLDER
    if len(suite.parts) != 1 or suite.parts[0].axes:
        raise UserError(f"{suite.place}: a search has a space instead of a grid or parts; leave these out")

    def plan(values: Mapping[str, Any]) -> BenchRun:
        """The first run on all examples, with these settings."""
        return _expand_trial(suite, Choice("", values), suite.seeds[:1], data_dir, extra)[0]

    first = plan({})
    networks = search.space.get("network.name")
    proposed = [plan({"network.name": name}) for name in networks] if isinstance(networks, tuple) else [first]
    check_code(suite.place, proposed, options.trust_code)
    if not (folder / HELD_OUT).is_file():
        check_data(suite.place, [first])
    make_folder(folder)
    study = _study(folder, search, score, first.config)
    held_out = prepare(first.config, folder, search, oracle)
    trial_suite = _on_training_part(suite, first.config.source, folder / TRAIN)
    lasting = [item for item in extra if not _tells_how_to_read(item.partition("=")[0].strip())]
    lines: dict[int, str] = {}
    while True:
        trials = _trials(study, lines)
        # With what the trials took from the data: a default in its place would count as asked for in best.yaml.
        best = resolve(plan(trials[0].settings).config, held_out) if trials and trials[0].score is not None else None
        found = _save(trials, search, score, best, options.out)
        batch = _next_trials(study, search, options.jobs)
        if not batch:
            return found
        groups = {
            number: _expand_trial(trial_suite, Choice(f"trial{number:03d}", values), None, None, lasting)
            for number, values in batch.items()
        }
        every = [run for runs in groups.values() for run in runs]
        results = run_all(every, options, execute, BenchScreen(every, options, quiet=quiet))
        by_name = {result.run.name: result for result in results}
        for number, runs in groups.items():
            lines[number] = _tell(study, number, [by_name[run.name] for run in runs], score, held_out, options)


# --- the two parts ------------------------------------------------------------------------------------------------


def prepare(config: RunConfig, folder: Path, search: Search, oracle: bool) -> Dataset:
    """Write the two parts of the training set (unless they are there), and return the one that judges."""
    if not (folder / HELD_OUT).is_file():
        data = draw_candidates(load_data(config), config.candidates, config.seed)
        if oracle and data.y is None:
            raise UserError("--oracle: this data has no true labels to judge trials by; leave it out")
        train, held_out = random_split(data.n, search.held_out, search.seed)
        if len(train) < 2 or not len(held_out):
            share = f"{search.held_out:g} of {data.n} examples"
            raise UserError(f"search: held_out: {share} leaves one side empty; change the share")
        learnt, judging = only_rows(data, train), only_rows(data, held_out)
        write_npz(replace(learnt, y=None, x_test=None, y_test=None), folder / TRAIN)
        write_npz(replace(judging, x_test=None, y_test=None, y=judging.y if oracle else None), folder / HELD_OUT)
    return load(str(folder / HELD_OUT))


def score_of(run: Path, held_out: Dataset, score: str, device: str, trust_code: bool = False) -> float:
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


def _on_training_part(suite: Suite, source: str, train: Path) -> Suite:
    """The suite with the training part as its source: what told how to read or draw has been done."""
    base = {name: value for name, value in suite.parts[0].base.items() if not _tells_how_to_read(name)}
    if "preset" in base:
        base["preset"] = str(base["preset"]).replace("{source}", source)
    return replace(suite, parts=(Part({**base, "source": str(train.absolute())}, ()),))


def _tells_how_to_read(setting: str) -> bool:
    return setting in ("source", "data_dir", "candidates") or setting.startswith("data.")


def _expand_trial(
    suite: Suite, choice: Choice, seeds: Sequence[int] | None, data_dir: Path | None, extra: Sequence[str]
) -> list[BenchRun]:
    part = replace(suite.parts[0], axes=((choice,),))
    return expand(replace(suite, parts=(part,)), seeds, data_dir, extra)


def _next_trials(study: Any, search: Search, jobs: int) -> dict[int, dict[str, Any]]:
    """Settings by trial: first of those that an earlier session left unfinished, then new ones, until there are
    enough."""
    known = study.get_trials(deepcopy=False)
    begun = [trial for trial in known if trial.state == _optuna().trial.TrialState.RUNNING][:jobs]
    if not begun:
        space = {name: _distribution(values) for name, values in search.space.items()}
        begun = [study.ask(space) for _ in range(min(jobs, search.trials - len(known)))]
    return {trial.number: _trial_settings(trial) for trial in begun}


def _distribution(values: Range | tuple[Any, ...]) -> Any:
    kinds = _optuna().distributions
    if isinstance(values, tuple):  # Optuna takes plain values only, YAML has lists as well
        return kinds.CategoricalDistribution([json.dumps(value) for value in values])
    if values.whole:
        return kinds.IntDistribution(int(values.low), int(values.high), log=values.log, step=int(values.step or 1))
    return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log, step=values.step)


def _trial_settings(trial: Any) -> dict[str, Any]:
    """Values of a choice are JSON in the study; numbers of a range are numbers."""
    return {name: json.loads(value) if isinstance(value, str) else value for name, value in trial.params.items()}


def _tell(study: Any, number: int, ended: Sequence[RunResult], score: str, held_out: Dataset, options: Options) -> str:
    failed = [result.line for result in ended if result.status not in ("done", "skipped")]
    if not failed:
        value = fmean(score_of(result.folder, held_out, score, options.device, options.trust_code) for result in ended)
        if isfinite(value):
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


def _study(folder: Path, search: Search, score: str, config: RunConfig) -> Any:
    """The study in this folder, begun or continued; another search is not mixed into it."""
    optuna = _optuna()
    backend = importlib.import_module("optuna.storages.journal").JournalFileBackend(str(folder / JOURNAL))
    storage = optuna.storages.JournalStorage(backend)
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    # A sampler starts afresh with every session: another seed, or it would propose the same again.
    study.sampler = optuna.samplers.TPESampler(seed=search.seed + len(study.get_trials(deepcopy=False)))
    identity = {
        "space": {name: repr(values) for name, values in search.space.items()}, "score": score,
        "held_out": search.held_out, "seed": search.seed, "config": config.model_dump(mode="json"),
    }  # fmt: skip
    if "search" not in study.user_attrs:
        study.set_user_attr("search", json.dumps(identity, sort_keys=True))
    before = json.loads(study.user_attrs["search"])
    before["config"] = check_config(before["config"]).model_dump(mode="json")  # with settings as they are called today
    if before != json.loads(json.dumps(identity)):
        raise UserError(
            f"{folder.parent} contains another search (other settings, space or score); choose another --out"
        )
    return study


def _trials(study: Any, lines: Mapping[int, str]) -> list[Trial]:
    """Best first, and those without a score last."""
    found = [
        Trial(trial.number, trial.value, _trial_settings(trial), lines.get(trial.number, ""))
        for trial in study.get_trials(deepcopy=False)
    ]
    return sorted(found, key=lambda trial: (trial.score is None, -(trial.score or 0.0), trial.number))


def _save(trials: Sequence[Trial], search: Search, score: str, best: RunConfig | None, out: Path) -> SearchResult:
    """The table of all trials, and the best one's config, ready for `crosel train --config`."""
    table = [csv_line(["trial", score, *search.space])]
    for trial in trials:
        shown = "" if trial.score is None else f"{trial.score:.6f}"
        values = (trial.settings.get(name) for name in search.space)
        table.append(
            csv_line([str(trial.number), shown, *(v if isinstance(v, str) else json.dumps(v) for v in values)])
        )
    atomic_write(out / TABLE, b"".join(table))
    if best is not None:
        said = f"# trial {trials[0].number} of a search: {score} {trials[0].score:.4f} on held-out examples\n"
        atomic_write(out / BEST, said + best.to_yaml())
    return SearchResult(tuple(trials), score, out / TABLE, out / BEST if best else None)
