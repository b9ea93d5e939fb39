"""Work in a child process that is watched: how long it takes, how much memory, and what it touches outside its folders.

The child is forked, so that it starts in milliseconds; only for a process without other threads.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

SPARE = 4 << 30  # bytes of private memory that a child may take at all: it must not harm the machine
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {  # audit events: which of their arguments are paths that are changed, each with the folder it starts from
    "os.remove": ((0, 1),), "os.rename": ((0, 2), (1, 3)), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),),
    "os.symlink": ((1, 2),), "os.link": ((1, 3),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),),
}  # fmt: skip
_FOLLOWS = {"os.truncate": (0,), "os.setxattr": (0,)}  # these change what a link leads to
_NEVER = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "socket.connect", "socket.bind",
          "webbrowser.open")  # fmt: skip


class Late(BaseException):
    """Not an Exception: nothing may catch it."""


@dataclass(frozen=True)
class Outcome:
    value: Any  # what the work returned; None if it did not end
    died: str  # how it ended instead, or ""
    peak: int  # bytes of memory at the most; what it shares with its parent is counted as it is first touched
    touched: list[str]  # outside the allowed folders, and other things that must not happen


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise Late after so many seconds; after more where the machine has more to do than it has cores for."""
    seconds *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def late(number: int, frame: Any) -> NoReturn:
        raise Late(f"it took more than {seconds:.0f} s")

    old = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def confined(work: Callable[[], Any], allowed: Sequence[Path], seconds: float) -> Outcome:
    """Do the work in a child, which is killed after so many seconds. What it returns must be JSON."""
    gc.freeze()  # or the child looks for garbage in all that is imported, and copies it by that
    sys.stdout.flush()
    sys.stderr.flush()
    end, start = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(end)
        _child(work, [os.path.realpath(path) for path in allowed], start)
    os.close(start)
    answer, until = bytearray(), time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([end], [], [], max(0.0, until - time.monotonic()))
        part = os.read(end, 1 << 20) if ready else b""
        if not part:
            break
        answer += part
    os.close(end)
    late = time.monotonic() >= until
    if late:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    peak = usage.ru_maxrss * 1024
    code = os.waitstatus_to_exitcode(status)
    try:
        value, touched = json.loads(answer)
    except ValueError:
        said = answer.decode("utf-8", "replace")[-3000:]
        return Outcome(None, f"hung for {seconds} s" if late else f"died with exit code {code} {said}", peak, [])
    return Outcome(value, "", peak, touched)


def _child(work: Callable[[], Any], allowed: list[str], start: int) -> NoReturn:
    try:
        import resource

        soft = _private() + SPARE
        resource.setrlimit(resource.RLIMIT_DATA, (soft, soft))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        touched: list[str] = []
        watch(allowed, touched)
        answer = json.dumps([work(), touched])
    except BaseException:
        answer = traceback.format_exc()
    data = answer.encode("utf-8", "backslashreplace")
    while data:
        data = data[os.write(start, data) :]
    os._exit(0)


def _private() -> int:
    """Bytes that RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def watch(allowed: Sequence[str], touched: list[str]) -> None:
    """From now on, note what this process changes outside the allowed folders, and what it starts. For good."""
    roots = tuple(root.rstrip("/") + "/" for root in allowed)

    def inside(path: Any, follow: bool) -> bool:
        if isinstance(path, int) or path is None:
            return True
        path = os.fsdecode(path)
        folder, name = os.path.split(path)
        real = os.path.realpath(path) if follow else os.path.join(os.path.realpath(folder or "."), name)
        return f"{real}/".startswith(roots) or real in ("/dev/null", "/dev/tty", f"/proc/{os.getpid()}/clear_refs")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES and not inside(path, True):
                touched.append(f"open for writing: {path!r}")
        elif event in _CHANGES:
            for at, folder in _CHANGES[event]:
                path, start = arguments[at], arguments[folder]
                if isinstance(start, int) and start >= 0 and not isinstance(path, int):
                    path = os.path.join(os.readlink(f"/proc/self/fd/{start}"), os.fsdecode(path))
                if not inside(path, False):
                    touched.append(f"{event}: {path!r}")
        elif event in _FOLLOWS:
            if not inside(arguments[0], True):
                touched.append(f"{event}: {arguments[0]!r}")
        elif event in _NEVER or (event == "ctypes.dlopen" and "/" in str(arguments[0]) and inside(arguments[0], True)):
            touched.append(f"{event}: {str(arguments)[:200]}")

    sys.addaudithook(hook)
