"""A process that has imported crosel and forks ranks: real processes, without the seconds of their imports.

A request is a line of JSON: {"size": ranks, "job": name of a function in `_jobs`, "args": {...}, "folder": path}. Each
rank runs the job, in a folder of its own for what it says; the answer is a line with the ranks' exit codes.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import _jobs


def child(request: dict[str, Any], rank: int, meet: Path) -> NoReturn:
    log = Path(request["folder"]) / f"{rank}.log"
    for number in (1, 2):
        os.dup2(os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 0
    try:
        getattr(_jobs, request["job"])(rank, request["size"], meet, **request["args"])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what a fork has of the parent's modules takes seconds to take apart


def wait(pids: list[int], seconds: float = 120.0) -> list[int]:
    end, codes = time.monotonic() + seconds, dict.fromkeys(pids, -1000)  # the code of a rank that hung
    while -1000 in codes.values() and time.monotonic() < end:
        for pid in [pid for pid, code in codes.items() if code == -1000]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for pid in [pid for pid, code in codes.items() if code == -1000]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return list(codes.values())


def main() -> None:
    with TemporaryDirectory() as folder:  # what the first step of a process imports takes longer than the rest
        _jobs.alone(Path(folder), method="cc", settings=["train.epochs=1"])
    gc.freeze()  # a collection in a child would copy every page of ours
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        meet = Path(request["folder"]) / f"meet-{number}"
        pids = []
        for rank in range(request["size"]):
            pid = os.fork()
            if pid == 0:
                child(request, rank, meet)
            pids.append(pid)
        print(json.dumps(wait(pids)), flush=True)


if __name__ == "__main__":
    main()
