"""A process that has imported crosel and forks a child for every command: a real process without torch's start-up.

Requests come as lines of JSON on standard input, answers go to standard output:
{"argv": [...], "stdout": path, "stderr": path, "trap": null or {...}, "behind": null or seconds} -> {"pid": ...};
{"wait": pid, "seconds": ...} -> {"code": ..., "peak": bytes}.

A trap ends the child by SIGKILL at the n-th call of a function: {"target": "os:replace", "call": 3, "when": "before"}.
`when` is "before", "after", or "half", which cuts the file being flushed in half first (target "os:fsync").
With "seconds" it does not kill: every call from the n-th on takes that much longer; the n-th writes "tell" first.

With TIMM_STAND_IN in the environment, children find the stand-in of `_timm.py` for timm.

With `behind` checkpoints are written while training goes on, as on a GPU, and each takes that much longer.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import stat
import sys
import time
import traceback
from typing import Any, NoReturn

import crosel.cli.app
import crosel.config
import crosel.data.formats
import crosel.methods
import crosel.runs.folder
import crosel.runs.pipeline
import crosel.runs.predict

_MAXRSS = 1 if sys.platform == "darwin" else 1024  # bytes that ru_maxrss counts in


def set_trap(target: str, call: int = 1, when: str = "before", seconds: float | None = None, tell: str = "") -> None:
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    owner: Any = importlib.import_module(module_name)
    for parent in parents:
        owner = getattr(owner, parent)
    real, calls = getattr(owner, name), 0

    def trapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if target == "os:fsync" and stat.S_ISDIR(os.fstat(args[0]).st_mode):
            return real(*args, **kwargs)  # count files only, so that the n-th call means the n-th file
        calls += 1
        if seconds is not None:
            if calls == call:
                sys.stderr.write(tell)
                sys.stderr.flush()
            if calls >= call:
                time.sleep(seconds)
            return real(*args, **kwargs)
        if calls == call and when == "half":
            os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
        if calls == call and when != "after":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, trapped)


def child(request: dict[str, Any]) -> NoReturn:
    for number, name in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), number)
    # Whatever the test run itself was started with: a child begins as from a terminal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.argv = ["crosel", *request["argv"]]
    if request["behind"] is not None:
        crosel.runs.folder.writes_behind = lambda device: True
        set_trap("crosel.training.checkpoint:write", seconds=request["behind"])
    if request["trap"]:
        set_trap(**request["trap"])
    code = 0
    try:
        crosel.cli.app.main()
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait(pid: int, seconds: float) -> dict[str, int]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return {"code": os.waitstatus_to_exitcode(status), "peak": usage.ru_maxrss * _MAXRSS}
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return {"code": -1000, "peak": 0}  # no exit code looks like this: the child hung


def main() -> None:
    if "TIMM_STAND_IN" in os.environ:
        import _timm

        sys.modules["timm"] = _timm.module([])
    gc.freeze()  # or each child looks for garbage in all that is imported, and copies it by that
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"], request["seconds"])
        else:
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                child(request)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


main()
