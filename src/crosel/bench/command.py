"""What `crosel bench` does, and what it says of suites, runs and trials."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from crosel.bench import run_suite, search_suite
from crosel.bench.execution import RunResult, existing_result
from crosel.bench.suite import BenchRun, expand, read_suite, suites
from crosel.errors import UserError, counted
from crosel.nn.networks import is_user_code
from crosel.utils.text import percent

if TYPE_CHECKING:
    from crosel.bench.search import SearchResult


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
    lines = []
    for run in runs:
        state = f"{_state(run, out / run.name):<6} " if out else ""
        trusted = ("--trust-code",) if trust_code and is_user_code(run.config.network.name) else ()
        lines.append(f"{state}{run.name}: crosel train {join((*run.arguments, *trusted))}")
    return lines


def _state(run: BenchRun, folder: Path) -> str:
    result = existing_result(run, folder)
    if result is None:
        return "begun" if (folder / "config.yaml").is_file() else "new"
    return "done" if result.status == "skipped" else result.status


def suite_lines() -> list[str]:
    """A line for each suite that comes with the package."""
    found = {name: read_suite(name) for name in suites()}
    width = max(map(len, found))
    return [f"{name:<{width}}  {suite.title} ({suite.size} runs)" for name, suite in found.items()]


def bench_command(
    name: str,
    out: Path | None,
    *,
    on: str,
    seeds: int | None,
    jobs: int,
    settings: Sequence[str],
    only: Sequence[str],
    data_dir: Path | None,
    only_list: bool,
    device: str,
    oracle: bool,
    trust_code: bool,
    echo: Callable[[str], object],
) -> bool:
    """What `crosel bench` does; False if a run failed, or if no trial of a search came to an end."""
    if name == "list":
        for line in suite_lines():
            echo(line)
        return True
    suite = read_suite(name)
    out = out or Path("bench") / suite.name
    if suite.search is not None and only:
        raise UserError(
            f"{suite.place} has a search, where each trial depends on earlier ones; --only works only with runs of "
            "a grid"
        )
    if suite.search is not None and only_list:
        echo(f"{suite.title}: search with {suite.search.trials} trials over {', '.join(suite.search.space)}")
        return True
    if suite.search is not None:
        found = search_suite(
            suite, out, seeds=seeds, jobs=jobs, device=device, on=on, data_dir=data_dir, settings=settings,
            oracle=oracle, trust_code=trust_code, quiet=False,
        )  # fmt: skip
        for line in search_lines(found, trust_code):
            echo(line)
        return found.best is not None
    if oracle:
        raise UserError("--oracle works only with suites that have a search; leave it out")
    if only_list:
        for line in list_lines(expand(suite, seeds, data_dir, settings, only), out, trust_code):
            echo(line)
        return True
    results = run_suite(
        suite, out, seeds=seeds, jobs=jobs, device=device, on=on, data_dir=data_dir, settings=settings, only=only,
        trust_code=trust_code, quiet=False,
    )  # fmt: skip
    failures = failure_lines(results)
    done = len(results) - len(failures)
    echo(f"{done} of {len(results)} runs done" + (f"; tables: crosel tables {out}" if done else ""))
    for line in failures:
        echo(f"failed: {line}")
    return not failures
