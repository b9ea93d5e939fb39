"""Where runs are made: on this machine, each in a process of its own (what kills one, kills only one), or on Ray."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from crosel.bench.execution import GRACE, BenchScreen, Executor, Options, RunResult, Status, last_row, run_one
from crosel.bench.suite import BenchRun
from crosel.errors import UserError
from crosel.utils.files import TEMPORARY, atomic_write, disk_errors, make_folder, make_own_folder
from crosel.utils.reading import WRITE, open_plain, read_file, read_run_text
from crosel.utils.system import ask_to_stop, child_environment, memory_limit
from crosel.utils.text import choose_from

POLL = 0.1  # seconds between looks at the processes
TICK = 1.0  # seconds between looks at their progress


@dataclass
class Process:
    run: BenchRun
    popen: subprocess.Popen[bytes]
    log: Path
    device: str
    started: float


def run_local(
    runs: Sequence[BenchRun], options: Options, progress: BenchScreen, stop: Callable[[], bool]
) -> Generator[RunResult, None, None]:
    """One after the other, or `options.jobs` at once, spread over the cards there are."""
    waiting = list(reversed(runs))
    free = devices(options.device, options.jobs)
    running: list[Process] = []
    ticked = 0.0
    try:
        while waiting or running:
            while waiting and free and not stop():
                process = start(waiting.pop(), options, free.pop(0))
                running.append(process)
                progress.started(process.run)
            if stop():
                yield from _stop_processes(running, options)
                return
            for process in [process for process in running if process.popen.poll() is not None]:
                running.remove(process)
                free.append(process.device)
                yield result_of(process, options)
            if time.monotonic() - ticked > TICK:
                ticked = time.monotonic()
                progress.tick()
            time.sleep(POLL)
    finally:  # a second Ctrl-C, or an error of ours: nothing may be left running
        for process in running:
            process.popen.kill()
            process.popen.wait()


def devices(device: str, jobs: int) -> list[str]:
    """One device for each of `jobs` runs at once; several cards are filled in turn."""
    if device in ("auto", "cuda"):
        import torch

        cards = torch.cuda.device_count()
        if cards > 1:
            return [f"cuda:{job % cards}" for job in range(jobs)]
    return [device] * jobs


def command(run: BenchRun, folder: Path, device: str, trust_code: bool = False) -> list[str]:
    flags = ["--device", device, "--resume", "--out", str(folder), *(["--trust-code"] if trust_code else [])]
    return [sys.executable, "-m", "crosel", "train", *run.arguments, *flags]


def start(run: BenchRun, options: Options, device: str) -> Process:
    log = options.out / "logs" / f"{run.name.replace('/', '--')}.log"
    make_own_folder(log.parent)
    make_folder(options.folder(run).parent)
    environment = child_environment()
    if options.jobs > 1:  # several runs with a thread for each core get in each other's way
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    with disk_errors(log), open(open_plain(log, links=False, flags=WRITE), "wb") as stream:
        # In a group of its own, so that a terminal's Ctrl-C comes to us alone and each run is asked once.
        popen = subprocess.Popen(
            command(run, options.folder(run), device, options.trust_code),
            stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment, start_new_session=True,
        )  # fmt: skip
    return Process(run, popen, log, device, time.monotonic())


def result_of(process: Process, options: Options, stopping: bool = False) -> RunResult:
    code = process.popen.returncode
    line = last_line(process.log)
    status: Status = "done" if code == 0 else "stopped" if stopping else "failed"
    if code < 0 and not stopping:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        line = f"killed by {name}" + (f" after: {line}" if line else "")
    folder = options.folder(process.run)
    return RunResult(process.run, folder, status, line, last_row(folder), time.monotonic() - process.started)


def last_line(log: Path) -> str:
    try:
        lines = read_run_text(log).split("\n")
    except (OSError, UserError):
        return ""
    found = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return found.removeprefix("crosel: ")


def _stop_processes(running: list[Process], options: Options) -> Iterator[RunResult]:
    for process in running:
        process.popen.send_signal(signal.SIGTERM)
    until = time.monotonic() + GRACE
    while running:
        process = running[0]
        try:
            process.popen.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()
        running.pop(0)
        yield result_of(process, options, stopping=True)


# --- on Ray ---------------------------------------------------------------------------------------------------------
# Runs as tasks of a Ray cluster: the one that is running, or one of this machine alone.
#
# Workers need not share a disk with us. A worker trains in a folder of its own; a thread beside it sends every file
# that has changed to a mailbox (an actor on our machine), from which we write it into the bench's folder. If a worker
# dies, only the work since its last batch is lost: another one gets the run, files included.

PAUSE = 15.0  # seconds from one batch of a worker to the next
LOOK = 0.5  # seconds from one look into the mailbox to the next
RETRIES = 3  # how often a run is given to another worker when its own has died

Files = dict[str, bytes]  # by their path within a run folder


@dataclass(frozen=True)
class SyncBatch:
    """What a worker sends: the files that have changed, and the names of all."""

    run: str
    attempt: int
    changed: Files
    present: tuple[str, ...]


class Mailbox:
    """The actor through which workers reach us, and we them."""

    def __init__(self) -> None:
        self.batches: list[SyncBatch] = []
        self.closing = False

    def put(self, batch: SyncBatch) -> bool:
        """Take a batch, and say whether to stop."""
        self.batches.append(batch)
        return self.closing

    def take(self) -> list[SyncBatch]:
        taken, self.batches = self.batches, []
        return taken

    def close(self) -> None:
        self.closing = True


# --- on the worker ------------------------------------------------------------------------------------------------


def run_on_worker(
    run: BenchRun, attempt: int, files: Files, device: str, trust_code: bool, mailbox: Any, pause: float
) -> tuple[str, str, SyncBatch]:
    """Train in a folder of our own, from the files given: status, last line, and all files not yet sent."""
    with TemporaryDirectory(prefix="crosel-") as root:
        folder = Path(root) / "run"
        write_files(folder, files)
        syncer = FileSyncer(run.name, attempt, folder, files, mailbox, pause)
        with syncer.syncing():
            result = run_one(run, folder, device, trust_code)
        return result.status, result.line, syncer.pack()


class FileSyncer:
    """Sends what changes in a folder, and learns from the answer when to stop."""

    def __init__(self, run: str, attempt: int, folder: Path, known: Files, mailbox: Any, pause: float) -> None:
        self.run, self.attempt, self.folder, self.mailbox, self.pause = run, attempt, folder, mailbox, pause
        self._known = {name: _stamp(folder / name) for name in known}
        self._ended = threading.Event()

    @contextmanager
    def syncing(self) -> Iterator[None]:
        self._send(SyncBatch(self.run, self.attempt, {}, ()))  # it has begun
        thread = threading.Thread(target=self._loop, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _loop(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(min(self.pause, 1.0)):
            due = time.monotonic() - last >= self.pause
            if self._send(self.pack() if due else SyncBatch(self.run, self.attempt, {}, ())):
                ask_to_stop()  # the run saves its state and ends
                return
            last = time.monotonic() if due else last

    def _send(self, batch: SyncBatch) -> bool:
        ray = find_ray()
        try:
            return bool(ray.get(self.mailbox.put.remote(batch)))
        except ray.exceptions.RayError:  # whoever wanted the result has gone
            return True

    def pack(self) -> SyncBatch:
        changed, present = {}, []
        for name, path in _files(self.folder):
            with contextlib.suppress(FileNotFoundError):  # an old checkpoint may go while we look
                stamp = _stamp(path)
                if self._known.get(name) != stamp:
                    changed[name] = read_file(path, memory_limit(), links=False)
                    self._known[name] = stamp
                present.append(name)
        return SyncBatch(self.run, self.attempt, changed, tuple(present))


def _stamp(path: Path) -> tuple[int, int]:
    now = path.stat()
    return now.st_mtime_ns, now.st_size


# --- both sides ---------------------------------------------------------------------------------------------------


def write_files(folder: Path, files: Mapping[str, bytes], present: Sequence[str] | None = None) -> None:
    """Write files into a run folder, `done` last; with `present`, delete checkpoints that the worker has deleted."""
    for name in sorted(files, key=lambda name: (name == "done", name)):
        parent = (folder / name).parent
        (make_folder if parent == folder else make_own_folder)(parent)
        atomic_write(folder / name, files[name])
    if present:
        with disk_errors(folder):
            for path in (folder / "checkpoints").glob("*.safetensors"):
                if f"checkpoints/{path.name}" not in present:
                    path.unlink(missing_ok=True)


def read_files(folder: Path) -> Files:
    """What a worker needs to continue a run."""
    return {name: read_file(path, memory_limit(), links=False) for name, path in _files(folder)}


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Whole files below a folder, with their names there; what links lead to is not below it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and not path.name.startswith(TEMPORARY):
            yield path.relative_to(folder).as_posix(), path


def find_ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UserError("--on ray needs Ray: pip install 'crosel[ray]'") from None


# --- on our side --------------------------------------------------------------------------------------------------


@dataclass
class Task:
    run: BenchRun
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
        self.mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()
        cards = options.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
        share = 1 / options.jobs if cards else 0
        self.work = ray.remote(run_on_worker).options(num_cpus=1, num_gpus=share, max_retries=0)
        self.tasks: dict[Any, Task] = {}

    def submit(self, task: Task) -> None:
        options, task.seen = self.options, False
        files = read_files(options.folder(task.run))
        ref = self.work.remote(task.run, task.attempt, files, options.device, options.trust_code, self.mailbox, PAUSE)
        self.tasks[ref] = task

    def receive(self, progress: BenchScreen) -> None:
        """Write what has arrived; what a worker sent that was given up is ignored."""
        current = {(task.run.name, task.attempt): task for task in self.tasks.values()}
        for batch in self.ray.get(self.mailbox.take.remote()):
            task = current.get((batch.run, batch.attempt))
            if task is None:
                continue
            if not task.seen:
                task.seen, task.began = True, time.monotonic()
                progress.started(task.run)
            write_files(self.options.folder(task.run), batch.changed, batch.present)

    def ended(self, seconds: float, progress: BenchScreen) -> Iterator[tuple[Task, Any]]:
        """Tasks that are over, with what they returned or the error in its place."""
        if not self.tasks:
            return
        ready, _ = self.ray.wait(list(self.tasks), num_returns=len(self.tasks), timeout=seconds)
        self.receive(progress)  # what a task sent before it ended is in the mailbox, not in what it returned
        for ref in ready:
            try:
                outcome = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                outcome = error
            yield self.tasks.pop(ref), outcome

    def result(self, task: Task, outcome: Any, stopping: bool = False) -> RunResult:
        folder, seconds = self.options.folder(task.run), time.monotonic() - task.began
        if isinstance(outcome, Exception):
            line = f"{type(outcome).__name__}: {str(outcome).splitlines()[0]}"
            return RunResult(task.run, folder, "stopped" if stopping else "failed", line, last_row(folder), seconds)
        status, line, batch = outcome
        write_files(folder, batch.changed, batch.present)
        return RunResult(task.run, folder, status, line, last_row(folder), seconds)

    def close(self) -> None:
        for ref in self.tasks:
            with contextlib.suppress(Exception):
                self.ray.cancel(ref, force=True)
        with contextlib.suppress(Exception):
            self.ray.kill(self.mailbox)


def run_ray(
    runs: Sequence[BenchRun], options: Options, progress: BenchScreen, stop: Callable[[], bool]
) -> Generator[RunResult, None, None]:
    """Give all runs to the cluster; `options.jobs` of them share a GPU."""
    if not runs:
        return
    with cluster() as ray:
        dispatcher = Dispatcher(ray, options)
        try:
            for run in runs:
                dispatcher.submit(Task(run))
            while dispatcher.tasks:
                if stop():
                    yield from _stop_all(dispatcher, progress)
                    return
                for task, outcome in list(dispatcher.ended(LOOK, progress)):
                    if isinstance(outcome, Exception) and task.attempt < RETRIES:
                        task.attempt += 1
                        dispatcher.submit(task)
                    else:
                        yield dispatcher.result(task, outcome)
                progress.tick()
        finally:
            dispatcher.close()


def _stop_all(dispatcher: Dispatcher, progress: BenchScreen) -> Iterator[RunResult]:
    """Let what has begun save its state; what waits is not begun."""
    dispatcher.receive(progress)
    dispatcher.ray.get(dispatcher.mailbox.close.remote())
    for ref, task in list(dispatcher.tasks.items()):
        if not task.seen:
            dispatcher.ray.cancel(ref)
    until = time.monotonic() + GRACE
    while dispatcher.tasks and time.monotonic() < until:
        for task, outcome in list(dispatcher.ended(LOOK, progress)):
            if task.seen:
                yield dispatcher.result(task, outcome, stopping=True)
    for task in dispatcher.tasks.values():
        yield RunResult(task.run, dispatcher.options.folder(task.run), "stopped", "the run did not stop in time")


# --- where runs can take place --------------------------------------------------------------------------------------

EXECUTORS: dict[str, Executor] = {"local": run_local, "ray": run_ray}


def find_executor(on: str) -> Executor:
    if on not in EXECUTORS:
        raise UserError(f"--on {on}: unknown{choose_from(on, EXECUTORS)}")
    if on == "ray":
        find_ray()  # before a folder is made for it
    return EXECUTORS[on]
