"""Many runs: a suite of cells, each a run folder. What is done is skipped, what broke is resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

from crosel.bench.board import Board
from crosel.bench.cells import CellResult, Executor, Options, run_cell, standing
from crosel.bench.execute import EXECUTORS, find_executor, run_cells
from crosel.bench.suite import Cell, Suite, expand, parse_suite, read_suite, suites, with_seeds
from crosel.console import percent
from crosel.data.sources import check_there
from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.bench.search import Found

__all__ = [
    "EXECUTORS", "Cell", "CellResult", "Executor", "Options", "Suite", "bench_command", "expand",
    "failure_lines", "list_lines", "parse_suite", "read_suite", "run_cell", "run_cells", "run_suite",
    "search_suite", "suite_lines", "suites",
]  # fmt: skip


def run_suite(
    suite: str | Suite,
    out: Path,
    *,
    seeds: int | Sequence[int] | None = None,
    jobs: int = 1,
    device: str = "auto",
    on: str = "local",
    data_dir: Path | None = None,
    settings: Iterable[str] = (),
    quiet: bool = True,
) -> list[CellResult]:
    """Run all cells of a suite into `out`, and say how each ended; a failing cell does not stop the others.

    Raises Interrupted on Ctrl-C or SIGTERM, when every run under way has saved its state.
    """
    suite = read_suite(suite) if isinstance(suite, str) else suite
    if suite.search is not None:
        raise UserError(f"{suite.place} has a search in it: search_suite runs that")
    cells = expand(suite, seeds, data_dir, settings)
    options, execute = Options(out, device, jobs), find_executor(on)
    if on == "local":  # on a cluster, the data are where the workers are
        _check_data([cell for cell in cells if standing(cell, options.folder(cell)) is None])
    board = Board(cells, options, quiet=quiet)
    board.say(f"{suite.title}: {len(cells)} cells into {out}")
    return run_cells(cells, options, execute, board)


def _check_data(cells: Sequence[Cell]) -> None:
    """Refuse to begin where no cell has its data: each would fail for itself. As long as one has, it is run."""
    first: UserError | None = None
    for source, data_dir in dict.fromkeys((cell.config.source, cell.config.data_dir) for cell in cells):
        try:
            check_there(source, Path(data_dir) if data_dir else None)
            return
        except UserError as error:
            first = first or error
        except OSError:  # it may be there: the cell will see
            return
    if first is not None:
        raise first


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
    quiet: bool = True,
) -> Found:
    """Run the search of a suite into `out`, or go on with it; trials are judged without true labels unless `oracle`."""
    from crosel.bench.search import run_search

    suite = with_seeds(read_suite(suite) if isinstance(suite, str) else suite, seeds)
    if suite.search is None:
        raise UserError(f"{suite.place} has no search in it")
    options = Options(out, device, jobs)
    return run_search(suite, options, find_executor(on), data_dir, settings, oracle, quiet)


def search_lines(found: Found) -> list[str]:
    """The best trials, and what to do with the best one."""
    lines = []
    for trial in found.trials[:5]:
        settings = "  ".join(f"{name}={value}" for name, value in trial.settings.items())
        shown = "failed" if trial.score is None else f"{found.score} {percent(trial.score)}"
        lines.append(f"trial {trial.number:>3}  {shown}  {settings}{f'  ({trial.line})' if trial.line else ''}")
    lines.append(f"{len(found.trials)} trials: {found.table}")
    if found.best is not None:
        lines.append(f"train the best one on all examples: crosel train --config {found.best}")
    return lines


def failure_lines(results: Iterable[CellResult]) -> list[str]:
    """A line for each cell that failed, with the last thing it said."""
    return [f"{result.cell.name}: {result.line or 'no word'}" for result in results if result.status == "failed"]


def list_lines(cells: Sequence[Cell], out: Path | None = None) -> list[str]:
    """A line for each cell: where it stands in `out`, its name, and the command that is this cell alone."""
    return [
        f"{f'{_state(cell, out / cell.name):<6} ' if out else ''}{cell.name}: crosel train {join(cell.arguments)}"
        for cell in cells
    ]


def _state(cell: Cell, folder: Path) -> str:
    result = standing(cell, folder)
    if result is None:
        return "begun" if (folder / "config.yaml").is_file() else "new"
    return "done" if result.status == "skipped" else result.status


def suite_lines() -> list[str]:
    """A line for each suite that comes with the package."""
    found = {name: read_suite(name) for name in suites()}
    width = max(map(len, found))
    return [f"{name:<{width}}  {suite.title} ({suite.size} cells)" for name, suite in found.items()]


def bench_command(
    name: str,
    out: Path | None,
    *,
    on: str,
    seeds: int | None,
    jobs: int,
    settings: Sequence[str],
    data_dir: Path | None,
    only_list: bool,
    device: str,
    oracle: bool,
    echo: Callable[[str], object],
) -> bool:
    """What `crosel bench` does; False if a cell failed, or if no trial of a search came to an end."""
    if name == "list":
        for line in suite_lines():
            echo(line)
        return True
    suite = read_suite(name)
    out = out or Path("bench") / suite.name
    if suite.search is not None and only_list:
        echo(f"{suite.title}: a search of {suite.search.trials} trials over {', '.join(suite.search.space)}")
        return True
    if suite.search is not None:
        found = search_suite(
            suite, out, seeds=seeds, jobs=jobs, device=device, on=on, data_dir=data_dir, settings=settings,
            oracle=oracle, quiet=False,
        )  # fmt: skip
        for line in search_lines(found):
            echo(line)
        return found.best is not None
    if oracle:
        raise UserError("--oracle is for suites with a search in them")
    if only_list:
        for line in list_lines(expand(suite, seeds, data_dir, settings), out):
            echo(line)
        return True
    results = run_suite(
        suite, out, seeds=seeds, jobs=jobs, device=device, on=on, data_dir=data_dir, settings=settings, quiet=False
    )
    failures = failure_lines(results)
    echo(f"{len(results) - len(failures)} of {len(results)} cells done; tables: crosel tables {out}")
    for line in failures:
        echo(f"failed: {line}")
    return not failures
