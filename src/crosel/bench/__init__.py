"""Many runs: a suite of cells, each a run folder. What is done is skipped, what broke is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from crosel.bench.board import Board
from crosel.bench.cells import CellResult, Executor, Options, run_cell, standing
from crosel.bench.execute import EXECUTORS, find_executor, run_cells
from crosel.bench.suite import Cell, Suite, check_code, check_data, expand, parse_suite, read_suite, suites, with_seeds
from crosel.errors import UserError, counted

if TYPE_CHECKING:
    from crosel.bench.search import Found

__all__ = [
    "EXECUTORS", "Cell", "CellResult", "Executor", "Options", "Suite", "expand", "parse_suite", "read_suite",
    "run_cell", "run_cells", "run_suite", "search_suite", "suites",
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
    only: str | Iterable[str] = (),
    trust_code: bool = False,
    quiet: bool = True,
) -> list[CellResult]:
    """Run the cells of a suite into `out`, and return how each ended; a failing cell does not stop the others.

    With `only`, just the cells run whose names match one of these shell-style patterns. Parts of a suite may run on
    different machines; copy their folders into one afterwards.
    Networks of your own (`network.name: module:factory`) are imported only with `trust_code`.
    Raises Interrupted on Ctrl-C or SIGTERM, after every run under way has saved its state.
    """
    suite = read_suite(suite) if isinstance(suite, str) else suite
    if suite.search is not None:
        raise UserError(f"{suite.place} has a search; run it with search_suite")
    cells = expand(suite, seeds, data_dir, settings, only)
    options, execute = Options(out, device, jobs, trust_code), find_executor(on)
    todo = [cell for cell in cells if standing(cell, options.folder(cell)) is None]
    check_code(suite.place, todo, trust_code)
    # On a cluster, the data are where the workers are.
    missing = check_data(suite.place, todo) if on == "local" else []
    board = Board(cells, options, quiet=quiet)
    board.say(f"{suite.title}: {counted(len(cells), 'cell')}, in {out}")
    for line in missing:
        board.say(line)
    return run_cells(cells, options, execute, board)


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
) -> Found:
    """Run the search of a suite into `out`, or continue it. Without `oracle`, no trial is judged by true labels.
    Networks of your own are imported only with `trust_code`."""
    from crosel.bench.search import run_search

    suite = with_seeds(read_suite(suite) if isinstance(suite, str) else suite, seeds)
    if suite.search is None:
        raise UserError(f"{suite.place} has no search; run it with run_suite")
    options = Options(out, device, jobs, trust_code)
    return run_search(suite, options, find_executor(on), data_dir, settings, oracle, quiet)
