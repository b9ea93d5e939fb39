"""Benchmarks side by side, each on cores of its own, until the time is over.

    python benchmarks/side_by_side.py commands.txt --cores '0,1;2,3;4,5' --minutes 8 --logs FOLDER

`commands.txt` has a command line each, the most important first; empty lines and those that begin with # are left out.
Each is started as soon as cores are free, sees no others, and is given a thread for each of them. What still runs when
the time is over is stopped; what it has recorded until then stays. Ends with the number of commands that failed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from record import Arguments, end_with, positive

from crosel.errors import UserError

Command = tuple[int, list[str]]  # the number of its line, and the command


def start(command: list[str], cores: set[int], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": str(len(cores))}, preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip


def stop(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, how)
        try:
            process.wait(5)
            return
        except subprocess.TimeoutExpired:
            pass


@dataclass
class Running:
    number: int
    process: subprocess.Popen[bytes]
    cores: set[int]
    since: float


def run(waiting: list[Command], running: list[Running], free: list[set[int]], end: float, logs: Path) -> int:
    """Run what waits, and return how many failed."""
    failed = 0
    while waiting or running:
        over = time.monotonic() >= end
        while waiting and free and not over:
            number, command = waiting.pop(0)
            cores = free.pop(0)
            running.append(Running(number, start(command, cores, logs / f"{number}.log"), cores, time.monotonic()))
        for one in list(running):
            if over:
                stop(one.process)
            if one.process.poll() is None:
                continue
            failed += one.process.returncode != 0
            how = "stopped" if over else f"ended with {one.process.returncode}"
            took = time.monotonic() - one.since
            print(f"line {one.number}: {how} after {took:.0f} s on cores {sorted(one.cores)}", flush=True)
            running.remove(one)
            free.append(one.cores)
        if over:
            for number, _ in waiting:
                print(f"line {number}: not started", flush=True)
            return failed + len(waiting)
        time.sleep(0.1)
    return failed


def main() -> int:
    parser = Arguments(str(__doc__))
    parser.add_argument("commands", type=Path, help="file with command lines")
    parser.add_argument("--cores", required=True, help="numbers of cores, such as 0,1;2,3")
    parser.add_argument("--minutes", type=positive, required=True)
    parser.add_argument("--logs", type=Path, required=True, help="folder for what the commands print")
    args = parser.parse_args()
    try:
        free = [{int(core) for core in group.split(",")} for group in args.cores.split(";")]
    except ValueError:
        raise UserError(f"--cores {args.cores}: numbers of cores are needed, as in 0,1;2,3") from None
    if lost := set.union(*free) - os.sched_getaffinity(0):
        raise UserError(f"--cores {args.cores}: there is no core {min(lost)} for this process")
    lines = args.commands.read_text(encoding="utf-8").splitlines()
    waiting = [(number, command) for number, line in enumerate(lines, 1) if (command := shlex.split(line, True))]
    args.logs.mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    try:
        return run(waiting, running, free, time.monotonic() + 60 * args.minutes, args.logs)
    finally:
        for one in running:
            stop(one.process)


if __name__ == "__main__":
    end_with(main)
