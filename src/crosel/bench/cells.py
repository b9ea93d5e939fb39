"""What an executor is given and gives back: where cells stand, and how a single one ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from crosel.bench.suite import Cell
from crosel.errors import Diverged, Interrupted, UserError
from crosel.runs.folder import FREE_TO_CHANGE, RunFolder, first_difference
from crosel.training.build import filled_from_data
from crosel.utils.trees import dotted

Status = Literal["done", "skipped", "failed", "stopped"]
GRACE = 120.0  # seconds a run has to finish its step and save its state, once it is asked to stop


@dataclass(frozen=True)
class CellResult:
    """How a cell ended. `line` is the last thing it said; `row` the last line of its metrics."""

    cell: Cell
    folder: Path
    status: Status
    line: str = ""
    row: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0  # of this call, not of the whole run


@dataclass(frozen=True)
class Options:
    """How cells are run, whoever runs them."""

    out: Path
    device: str = "auto"
    jobs: int = 1
    trust_code: bool = False  # a network named module:factory may be imported

    def folder(self, cell: Cell) -> Path:
        return self.out / cell.name


class Watcher(Protocol):
    """Whoever wants to see cells begin and end; `tick` comes about every second in between."""

    def started(self, cell: Cell) -> None: ...
    def tick(self) -> None: ...


# Runs cells and yields each result as it comes. It looks at the last argument often; once that says True, it lets
# every run under way save its state, and yields those as stopped. Closed early, it leaves nothing running.
Executor = Callable[[Sequence[Cell], Options, Watcher, Callable[[], bool]], Generator[CellResult, None, None]]


def standing(cell: Cell, folder: Path) -> CellResult | None:
    """The result of a cell that needs no run: done before, or in the way of it a run with other settings."""
    run = RunFolder(folder)
    if not run.exists or not run.is_done:
        return None
    try:
        changed = asked_otherwise(cell, run)
    except UserError as error:
        return CellResult(cell, folder, "failed", str(error))
    if changed:
        name, was, now = changed
        return CellResult(
            cell,
            folder,
            "failed",
            f"a finished run with other settings is in this folder: {name} was {was!r}, now {now!r}",
        )
    return CellResult(cell, folder, "skipped", row=last_row(folder))


def asked_otherwise(cell: Cell, run: RunFolder) -> tuple[str, Any, Any] | None:
    """The first setting in which a run there differs from what the cell asks; what the data decide is left out."""
    was = dotted(run.read_config(removed="refuse").model_dump(mode="json"))
    now = dotted(cell.config.model_dump(mode="json"))
    free = {*FREE_TO_CHANGE, *filled_from_data(cell.config), "source"}  # a full path; the cell's has a name
    return first_difference(was, now, free)


def last_row(folder: Path) -> Mapping[str, Any]:
    rows = RunFolder(folder).read_metrics()
    return rows[-1] if rows else {}


def run_cell(cell: Cell, folder: Path, device: str = "auto", trust_code: bool = False) -> CellResult:
    """Run or resume one cell in this process; errors become a result. This is the body of a task on a cluster."""
    from crosel.report import write_run_report
    from crosel.runs.pipeline import train_run
    from crosel.training.devices import pick_device

    status: Status = "failed"
    line = ""
    try:
        train_run(
            cell.config, folder, pick_device(device), resume=True, trust_code=trust_code, write_report=write_run_report
        )
        status = "done"
    except Interrupted as stopped:
        status, line = "stopped", str(stopped)
    except (UserError, Diverged) as error:
        line = str(error)
    except Exception as error:  # whatever it is, the other cells go on
        line = f"{type(error).__name__}: {error}"
    return CellResult(cell, folder, status, line, last_row(folder))
