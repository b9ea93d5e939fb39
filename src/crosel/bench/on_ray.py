"""Cells as tasks of a Ray cluster: the one that is running, or one of this machine alone.

Workers need not share a disk with us. A cell is trained in a folder of the worker's own; a courier thread beside it
brings every file that has changed to a desk (an actor on our machine), from where we write it into the bench's folder.
A worker that dies costs what it did since its last delivery: the cell is given to another one, files included.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crosel.bench.cells import GRACE, CellResult, Options, Watcher, last_row, run_cell
from crosel.bench.suite import Cell
from crosel.errors import UserError
from crosel.utils.files import TEMPORARY, atomic_write, disk_errors, make_folder
from crosel.utils.system import ask_to_stop

PAUSE = 15.0  # seconds between deliveries of a worker
TICK = 0.5  # seconds between looks at the desk
RETRIES = 3  # how often a cell is begun anew when its worker has died

Files = dict[str, bytes]  # by their path within a run folder


@dataclass(frozen=True)
class Delivery:
    """What a worker brings: files that have changed, and which ones there are."""

    cell: str
    attempt: int
    changed: Files
    present: tuple[str, ...]


class Desk:
    """The actor through which workers reach us, and we them."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.closing = False

    def put(self, delivery: Delivery) -> bool:
        """Take a delivery, and say whether to stop."""
        self.deliveries.append(delivery)
        return self.closing

    def take(self) -> list[Delivery]:
        taken, self.deliveries = self.deliveries, []
        return taken

    def close(self) -> None:
        self.closing = True


# --- on the worker ------------------------------------------------------------------------------------------------


def train_cell(
    cell: Cell, attempt: int, files: Files, device: str, trust_code: bool, desk: Any, pause: float
) -> tuple[str, str, Delivery]:
    """Train a cell in a folder of our own, from the files given: its status, its last word, and all it left."""
    with TemporaryDirectory(prefix="crosel-") as root:
        folder = Path(root) / "run"
        unpack(folder, files)
        courier = Courier(cell.name, attempt, folder, files, desk, pause)
        with courier.under_way():
            result = run_cell(cell, folder, device, trust_code)
        return result.status, result.line, courier.pack()


class Courier:
    """Delivers what changes in a folder, and brings back word when to stop."""

    def __init__(self, cell: str, attempt: int, folder: Path, known: Files, desk: Any, pause: float) -> None:
        self.cell, self.attempt, self.folder, self.desk, self.pause = cell, attempt, folder, desk, pause
        self._known = {name: _stamp(folder / name) for name in known}
        self._over = threading.Event()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        self._deliver(Delivery(self.cell, self.attempt, {}, ()))  # it has begun
        thread = threading.Thread(target=self._walk, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _walk(self) -> None:
        last = time.monotonic()
        while not self._over.wait(min(self.pause, 1.0)):
            due = time.monotonic() - last >= self.pause
            if self._deliver(self.pack() if due else Delivery(self.cell, self.attempt, {}, ())):
                ask_to_stop()  # which the run takes as a wish to save its state and end
                return
            last = time.monotonic() if due else last

    def _deliver(self, delivery: Delivery) -> bool:
        ray = find_ray()
        try:
            return bool(ray.get(self.desk.put.remote(delivery)))
        except ray.exceptions.RayError:  # whoever wanted the result has gone
            return True

    def pack(self) -> Delivery:
        changed, present = {}, []
        for name, path in _files(self.folder):
            with contextlib.suppress(FileNotFoundError):  # an old checkpoint may go while we look
                stamp = _stamp(path)
                if self._known.get(name) != stamp:
                    changed[name] = path.read_bytes()
                    self._known[name] = stamp
                present.append(name)
        return Delivery(self.cell, self.attempt, changed, tuple(present))


def _stamp(path: Path) -> tuple[int, int]:
    now = path.stat()
    return now.st_mtime_ns, now.st_size


# --- both sides ---------------------------------------------------------------------------------------------------


def unpack(folder: Path, files: Mapping[str, bytes], present: Sequence[str] | None = None) -> None:
    """Write files into a run folder, `done` last; with `present`, take away checkpoints that are no more."""
    for name in sorted(files, key=lambda name: (name == "done", name)):
        make_folder((folder / name).parent)
        atomic_write(folder / name, files[name])
    if present:
        with disk_errors(folder):
            for path in (folder / "checkpoints").glob("*.safetensors"):
                if f"checkpoints/{path.name}" not in present:
                    path.unlink(missing_ok=True)


def read_files(folder: Path) -> Files:
    """What a worker needs to go on with a run."""
    return {name: path.read_bytes() for name, path in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Whole files below a folder, with their names there."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(TEMPORARY):
            yield path.relative_to(folder).as_posix(), path


def find_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--on ray needs Ray: pip install 'crosel[ray]'") from None


# --- on our side --------------------------------------------------------------------------------------------------


@dataclass
class Task:
    cell: Cell
    attempt: int = 0
    began: float = field(default_factory=time.monotonic)
    seen: bool = False


@contextmanager
def cluster() -> Iterator[Any]:
    """Connect to the cluster that RAY_ADDRESS names or that runs on this machine; if there is none, start one."""
    ray = find_ray()
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=False, logging_level="error")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"--on ray: no connection to the cluster ({error}); check RAY_ADDRESS") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray puts one in its place that ends us at once
    try:
        yield ray
    finally:
        ray.shutdown()


class Dispatcher:
    """Tasks under way. One resource for each: a share of a GPU where there are any, otherwise one CPU."""

    def __init__(self, ray: Any, options: Options) -> None:
        self.ray, self.options = ray, options
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        self.desk = ray.remote(Desk).options(num_cpus=0, scheduling_strategy=here).remote()
        cards = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        share = 1 / options.jobs if cards else 0
        self.work = ray.remote(train_cell).options(num_cpus=1, num_gpus=share, max_retries=0)
        self.tasks: dict[Any, Task] = {}

    def submit(self, task: Task) -> None:
        options, task.seen = self.options, False
        files = read_files(options.folder(task.cell))
        ref = self.work.remote(task.cell, task.attempt, files, options.device, options.trust_code, self.desk, PAUSE)
        self.tasks[ref] = task

    def receive(self, watch: Watcher) -> None:
        """Write what has been delivered; what comes from a worker that was given up is left aside."""
        current = {(task.cell.name, task.attempt): task for task in self.tasks.values()}
        for delivery in self.ray.get(self.desk.take.remote()):
            task = current.get((delivery.cell, delivery.attempt))
            if task is None:
                continue
            if not task.seen:
                task.seen, task.began = True, time.monotonic()
                watch.started(task.cell)
            unpack(self.options.folder(task.cell), delivery.changed, delivery.present)

    def ended(self, seconds: float, watch: Watcher) -> Iterator[tuple[Task, Any]]:
        """Tasks that are over, with what they returned or the error in its place."""
        if not self.tasks:
            return
        ready, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=seconds)
        self.receive(watch)  # what a task delivered before it ended is on the desk now, and not in what it returned
        for ref in ready:
            try:
                outcome = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                outcome = error
            yield self.tasks.pop(ref), outcome

    def result(self, task: Task, outcome: Any, stopping: bool = False) -> CellResult:
        folder, seconds = self.options.folder(task.cell), time.monotonic() - task.began
        if isinstance(outcome, Exception):
            line = f"{type(outcome).__name__}: {str(outcome).splitlines()[0]}"
            return CellResult(task.cell, folder, "stopped" if stopping else "failed", line, last_row(folder), seconds)
        status, line, delivery = outcome
        unpack(folder, delivery.changed, delivery.present)
        return CellResult(task.cell, folder, status, line, last_row(folder), seconds)

    def close(self) -> None:
        for ref in self.tasks:
            with contextlib.suppress(Exception):
                self.ray.cancel(ref, force=True)
        with contextlib.suppress(Exception):
            self.ray.kill(self.desk)


def run_ray(
    cells: Sequence[Cell], options: Options, watch: Watcher, stop: Callable[[], bool]
) -> Generator[CellResult, None, None]:
    """Give all cells to the cluster; `options.jobs` of them share a GPU."""
    if not cells:
        return
    with cluster() as ray:
        at_work = Dispatcher(ray, options)
        try:
            for cell in cells:
                at_work.submit(Task(cell))
            while at_work.tasks:
                if stop():
                    yield from _stop_all(at_work, watch)
                    return
                for task, outcome in list(at_work.ended(TICK, watch)):
                    if isinstance(outcome, Exception) and task.attempt < RETRIES:
                        task.attempt += 1
                        at_work.submit(task)
                    else:
                        yield at_work.result(task, outcome)
                watch.tick()
        finally:
            at_work.close()


def _stop_all(at_work: Dispatcher, watch: Watcher) -> Iterator[CellResult]:
    """Let what has begun save its state; what waits does not begin."""
    at_work.receive(watch)
    at_work.ray.get(at_work.desk.close.remote())
    for ref, task in list(at_work.tasks.items()):
        if not task.seen:
            at_work.ray.cancel(ref)
    until = time.monotonic() + GRACE
    while at_work.tasks and time.monotonic() < until:
        for task, outcome in list(at_work.ended(TICK, watch)):
            if task.seen:
                yield at_work.result(task, outcome, stopping=True)
    for task in at_work.tasks.values():
        yield CellResult(task.cell, at_work.options.folder(task.cell), "stopped", "the run did not stop in time")
