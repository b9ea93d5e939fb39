"""Runs on this machine, each in a process of its own: what kills one, kills only one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from crosel.bench.execution import GRACE, BenchScreen, Options, RunResult, Status, last_row
from crosel.bench.suite import BenchRun
from crosel.utils.child import child_command
from crosel.utils.files import disk_errors, make_folder

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


def command(run: BenchRun, folder: Path, device: str, parent: int, trust_code: bool = False) -> list[str]:
    """A run as a command that lives no longer than the process `parent`, by which it must be started."""
    flags = ["--device", device, "--resume", "--out", str(folder), *(["--trust-code"] if trust_code else [])]
    return child_command(parent, "train", *run.arguments, *flags)


def start(run: BenchRun, options: Options, device: str) -> Process:
    log = options.out / "logs" / f"{run.name.replace('/', '--')}.log"
    make_folder(log.parent)
    make_folder(options.folder(run).parent)
    environment = dict(os.environ)
    if options.jobs > 1:  # several runs with a thread for each core get in each other's way
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // options.jobs)))
    with disk_errors(log), open(log, "wb") as stream:
        # In a group of its own, so that a terminal's Ctrl-C comes to us alone and each run is asked once.
        popen = subprocess.Popen(
            command(run, options.folder(run), device, os.getpid(), options.trust_code),
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
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
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
