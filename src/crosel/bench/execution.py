"""Running what a suite asks for: what is done is skipped, and what stops can be continued. Where runs take place (this
machine, a cluster) is up to an executor."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from crosel.bench.suite import BenchRun
from crosel.errors import Diverged, Interrupted, UserError
from crosel.runs.folder import FREE_TO_CHANGE, RunFolder, first_difference
from crosel.runs.pipeline import stop_signals, train_run
from crosel.training.build import filled_from_data
from crosel.utils.console import Screen
from crosel.utils.files import make_folder
from crosel.utils.settings import dotted
from crosel.utils.text import duration, percent

Status = Literal["done", "skipped", "failed", "stopped"]
GRACE = 120.0  # seconds a run has to finish its step and save its state, once it is asked to stop


@dataclass(frozen=True)
class RunResult:
    """How a run ended. `line` is the last thing it said; `row` the last line of its metrics."""

    run: BenchRun
    folder: Path
    status: Status
    line: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # of this call, not of the whole run


@dataclass(frozen=True)
class Options:
    """How runs are made, whoever makes them."""

    out: Path
    device: str = "auto"
    jobs: int = 1
    trust_code: bool = False  # a network named module:factory may be imported

    def folder(self, run: BenchRun) -> Path:
        return self.out / run.name


# Makes runs and yields each result as it comes. It looks at the last argument often; once that says True, it lets
# every run under way save its state, and yields those as stopped. Closed early, it leaves nothing running.
Executor = Callable[[Sequence[BenchRun], Options, "BenchScreen", Callable[[], bool]], Generator[RunResult, None, None]]


def run_all(runs: Sequence[BenchRun], options: Options, execute: Executor, progress: BenchScreen) -> list[RunResult]:
    """Skip what is done, give the rest to the executor, and return results in the order of the runs. Ctrl-C lets every
    run save its state."""
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give at least 1")
    make_folder(options.out)
    results: dict[str, RunResult] = {}
    todo = []
    with stop_signals() as stop:
        try:
            for run in runs:
                result = existing_result(run, options.folder(run))
                if result is None:
                    todo.append(run)
                else:
                    results[run.name] = result
                    progress.finished(result)
            with closing(execute(todo, options, progress, stop)) as ended:  # whatever happens here, it cleans up
                for result in ended:
                    results[result.run.name] = result
                    progress.finished(result)
        finally:
            progress.close()
        if stop():
            done = sum(result.status in ("done", "skipped") for result in results.values())
            raise Interrupted(f"stopped with {done} of {len(runs)} runs done; run the same command again to continue")
    return [results[run.name] for run in runs]


def existing_result(run: BenchRun, folder: Path) -> RunResult | None:
    """The result of what need not be run: it is done, or a finished run with other settings is in its place."""
    before = RunFolder(folder)
    if not before.exists or not before.is_done:
        return None
    try:
        changed = changed_setting(run, before)
    except UserError as error:
        return RunResult(run, folder, "failed", str(error))
    if changed:
        name, was, now = changed
        line = f"a finished run with other settings is in this folder: {name} was {was!r}, now {now!r}"
        return RunResult(run, folder, "failed", line)
    return RunResult(run, folder, "skipped", row=last_row(folder))


def changed_setting(run: BenchRun, before: RunFolder) -> tuple[str, Any, Any] | None:
    """The first setting in which a run in a folder differs from what is asked; what the data decide is left out."""
    was = dotted(before.read_config(removed="refuse").model_dump(mode="json"))
    now = dotted(run.config.model_dump(mode="json"))
    free = {*FREE_TO_CHANGE, *filled_from_data(run.config), "source"}  # of a file, one has the full path, one the name
    return first_difference(was, now, free)


def last_row(folder: Path) -> Mapping[str, Any]:
    rows = RunFolder(folder).read_metrics()
    return rows[-1] if rows else {}


def run_one(run: BenchRun, folder: Path, device: str = "auto", trust_code: bool = False) -> RunResult:
    """Begin or resume one run in this process; errors become a result. This is the body of a task on a cluster."""
    from crosel.report import write_run_report
    from crosel.training.devices import pick_device

    status: Status = "failed"
    line = ""
    try:
        train_run(
            run.config, folder, pick_device(device), resume=True, trust_code=trust_code, write_report=write_run_report
        )
        status = "done"
    except Interrupted as stopped:
        status, line = "stopped", str(stopped)
    except (UserError, Diverged) as error:
        line = str(error)
    except Exception as error:  # whatever it is, the other runs go on
        line = f"{type(error).__name__}: {error}"
    return RunResult(run, folder, status, line, last_row(folder))


# --- what a person sees: a live table on a terminal, plain lines elsewhere ------------------------------------------


def figures(row: Mapping[str, Any]) -> str:
    """What matters of a line of metrics."""
    shown = (("test_accuracy", "accuracy"), ("selection_ratio", "S-ratio"), ("oracle_selection_accuracy", "S-acc"))
    return "  ".join(f"{name} {percent(row[key])}" for key, name in shown if isinstance(row.get(key), float))


class BenchScreen(Screen):
    """Shows runs as they begin, go on and end."""

    def __init__(
        self, runs: Sequence[BenchRun], options: Options, stream: TextIO | None = None, quiet: bool = False
    ) -> None:
        super().__init__(stream, quiet)
        self.options = options
        self.total = len(runs)
        self.width = max((len(run.name) for run in runs), default=0)
        self.ended: Counter[str] = Counter()
        self.running: dict[str, tuple[BenchRun, float]] = {}

    def started(self, run: BenchRun) -> None:
        self.running[run.name] = (run, time.monotonic())
        if self.live:
            self.tick()
        else:
            self.say(f"{'start':<8} {run.name}")

    def finished(self, result: RunResult) -> None:
        self.running.pop(result.run.name, None)
        self.ended[result.status] += 1
        number = f"{sum(self.ended.values()):>{len(str(self.total))}}/{self.total}"
        rest = result.line if result.status == "failed" else figures(result.row)
        took = duration(result.seconds) if result.seconds else ""
        parts = (f"{result.status:<8} {result.run.name:<{self.width}}", number, rest, took)
        self.say("  ".join(part for part in parts if part))
        self.tick()

    def tick(self) -> None:
        """Draw the live table anew."""
        if self.live:
            from rich.text import Text

            most = max(0, shutil.get_terminal_size().lines - 2)  # so that the summary stays in sight
            running = self._running_lines()[:most]
            self.draw(Text("\n".join((*running, self.summary())), no_wrap=True, overflow="ellipsis"))

    def summary(self) -> str:
        counts = [f"{self.ended[name]} {name}" for name in ("done", "skipped", "failed", "stopped") if self.ended[name]]
        waiting = self.total - sum(self.ended.values()) - len(self.running)
        counts += [f"{n} {name}" for n, name in ((len(self.running), "running"), (waiting, "waiting")) if n]
        return f"{self.total} runs: {', '.join(counts)}"

    def _running_lines(self) -> list[str]:
        lines = []
        for run, since in self.running.values():
            row = last_row(self.options.folder(run))
            epoch = f"epoch {row.get('epoch', 0)}/{run.config.train.epochs}"
            parts = (f"{'running':<8} {run.name:<{self.width}}", epoch, figures(row))
            lines.append("  ".join(part for part in (*parts, duration(time.monotonic() - since)) if part))
        return lines
