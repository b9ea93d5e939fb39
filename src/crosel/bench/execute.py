"""Where cells can be run, and running them: what is done is skipped, Ctrl-C lets every run save its state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from crosel.bench.board import Board
from crosel.bench.cells import CellResult, Executor, Options, standing
from crosel.bench.local import run_local
from crosel.bench.on_ray import find_ray, run_ray
from crosel.bench.suite import Cell
from crosel.errors import Interrupted, UserError, choose_from
from crosel.runs.pipeline import stop_signals
from crosel.utils.files import make_folder

EXECUTORS: dict[str, Executor] = {"local": run_local, "ray": run_ray}


def find_executor(on: str) -> Executor:
    if on not in EXECUTORS:
        raise UserError(f"--on {on}: unknown{choose_from(on, EXECUTORS)}")
    if on == "ray":
        find_ray()  # before a folder is made for it
    return EXECUTORS[on]


def run_cells(cells: Sequence[Cell], options: Options, execute: Executor, board: Board) -> list[CellResult]:
    """Skip what is done, give the rest to the executor, and return results in the order of the cells."""
    if options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: give at least 1")
    make_folder(options.out)
    results: dict[str, CellResult] = {}
    todo = []
    with stop_signals() as stop:
        try:
            for cell in cells:
                result = standing(cell, options.folder(cell))
                if result is None:
                    todo.append(cell)
                else:
                    results[cell.name] = result
                    board.finished(result)
            with closing(execute(todo, options, board, stop)) as ended:  # whatever happens here, it cleans up
                for result in ended:
                    results[result.cell.name] = result
                    board.finished(result)
        finally:
            board.close()
        if stop():
            done = sum(result.status in ("done", "skipped") for result in results.values())
            raise Interrupted(f"stopped with {done} of {len(cells)} cells done; run the same command again to continue")
    return [results[cell.name] for cell in cells]
