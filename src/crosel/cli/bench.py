"""`crosel bench`: many runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

import typer

from crosel.cli.options import DataDir, Device, Trust, argument, flag, option, set_option
from crosel.errors import UserError
from crosel.utils.text import counted, percent

if TYPE_CHECKING:
    from crosel.bench import BenchRun, RunResult
    from crosel.bench.search import SearchResult


def bench(
    suite: str = argument(..., "SUITE", "name of a suite (`crosel bench list` lists them), or a YAML file"),
    out: Path | None = option(None, "DIR", "folder for the runs  [default: bench/SUITE]"),
    on: str = option("local", "NAME", "where to make the runs: local or ray"),
    seeds: int | None = option(None, "N", "number of seeds, instead of the suite's own", min=1),
    only: list[str] | None = option(
        None, "PATTERN", "make only runs whose names match, as in '*-seed0'; may be repeated"
    ),
    jobs: int = option(1, "N", "number of runs at once; on Ray, the number that share a GPU", min=1),
    set_: list[str] | None = set_option("a setting for every run"),
    data: DataDir = None,
    list_: bool = flag("--list", "show the runs and their state; start nothing"),
    oracle: bool = flag("--oracle", "let a search judge its trials by true labels"),
    device: Device = "auto",
    trust_code: Trust = False,
) -> None:
    """Make the runs of a suite, or its search. Finished runs are skipped, interrupted ones are resumed."""
    if suite == "list":
        lines, ended_well = suite_lines(), True
    else:
        lines, ended_well = _bench(
            suite, out, oracle, tuple(only or ()), list_,
            seeds=seeds, jobs=jobs, device=device, on=on, data_dir=data, settings=tuple(set_ or ()),
            trust_code=trust_code,
        )  # fmt: skip
    for line in lines:
        typer.echo(line)
    if not ended_well:
        raise SystemExit(1)  # typer.Exit would be lost: main() runs the app without its standalone mode


def _bench(
    name: str, out: Path | None, oracle: bool, only: tuple[str, ...], only_list: bool, **options: Any
) -> tuple[list[str], bool]:
    """What is said in the end; False if a run failed, or if no trial of a search came to an end."""
    from crosel.bench import expand, read_suite, run_suite, search_suite

    suite = read_suite(name)
    out = out or Path("bench") / suite.name
    if suite.search is None:
        if oracle:
            raise UserError("--oracle works only with suites that have a search; leave it out")
        if only_list:
            runs = expand(suite, options["seeds"], options["data_dir"], options["settings"], only)
            return list_lines(runs, out, options["trust_code"]), True
        results = run_suite(suite, out, only=only, quiet=False, **options)
        failures = failure_lines(results)
        done = len(results) - len(failures)
        summary = f"{done} of {len(results)} runs done" + (f"; tables: crosel tables {out}" if done else "")
        return [summary, *(f"failed: {line}" for line in failures)], not failures
    if only:
        raise UserError(
            f"{suite.place} has a search, where each trial depends on earlier ones; --only works only with runs of "
            "a grid"
        )
    if only_list:
        trials = f"search with {suite.search.trials} trials over {', '.join(suite.search.space)}"
        return [f"{suite.title}: {trials}"], True
    found = search_suite(suite, out, oracle=oracle, quiet=False, **options)
    return search_lines(found, options["trust_code"]), found.best is not None


def search_lines(found: SearchResult, trust_code: bool = False) -> list[str]:
    """The best trials, and what to do with the best one."""
    lines = []
    for trial in found.trials[:5]:
        settings = "  ".join(f"{name}={value}" for name, value in trial.settings.items())
        shown = "failed" if trial.score is None else f"{found.score} {percent(trial.score)}"
        lines.append(f"trial {trial.number:>3}  {shown}  {settings}{f'  ({trial.line})' if trial.line else ''}")
    lines.append(f"{counted(len(found.trials), 'trial')}: {found.table}")
    if found.best is not None:
        words = f"crosel train --config {found.best}{' --trust-code' if trust_code else ''}"
        lines.append(f"to train with the best settings on all examples: {words}")
    return lines


def failure_lines(results: Iterable[RunResult]) -> list[str]:
    """A line for each run that failed, with the last thing it said."""
    return [f"{result.run.name}: {result.line or 'no message'}" for result in results if result.status == "failed"]


def list_lines(runs: Sequence[BenchRun], out: Path | None = None, trust_code: bool = False) -> list[str]:
    """A line for each run: where it stands in `out`, its name, and the command that is this run alone."""
    from crosel.nn.factory import is_user_code

    lines = []
    for run in runs:
        state = f"{_state(run, out / run.name):<6} " if out else ""
        trusted = ("--trust-code",) if trust_code and is_user_code(run.config.network.name) else ()
        lines.append(f"{state}{run.name}: crosel train {join((*run.arguments, *trusted))}")
    return lines


def _state(run: BenchRun, folder: Path) -> str:
    from crosel.bench.execution import existing_result

    result = existing_result(run, folder)
    if result is None:
        return "begun" if (folder / "config.yaml").is_file() else "new"
    return "done" if result.status == "skipped" else result.status


def suite_lines() -> list[str]:
    """A line for each suite that comes with the package."""
    from crosel.bench import read_suite, suites

    found = {name: read_suite(name) for name in suites()}
    width = max(map(len, found))
    return [f"{name:<{width}}  {suite.title} ({suite.size} runs)" for name, suite in found.items()]
