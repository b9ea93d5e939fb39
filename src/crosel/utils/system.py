"""What Linux, macOS and Windows do differently. Modules that not every system has are imported here, when needed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib import import_module
from typing import Any

WINDOWS = sys.platform == "win32"
# Windows keeps everybody else from reading bytes that are locked: lock one that our files do not reach, and that its
# C library can name in 31 bits.
_BEYOND = (1 << 31) - 2


def lock(handle: int) -> bool:
    """Lock an open file or folder for this process, until it is closed; False if another has it.

    Where there are no locks, as on some network file systems, go on without.
    """
    try:
        fcntl: Any = import_module("fcntl")
    except ImportError:
        return _lock_on_windows(handle)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _lock_on_windows(handle: int) -> bool:
    msvcrt: Any = import_module("msvcrt")
    here = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, _BEYOND, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(handle, here, os.SEEK_SET)
    return True


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Make a rename in this folder survive a power cut, where the system can."""
    if WINDOWS:  # opens no folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot; the file itself is safe
            os.fsync(handle)
    finally:
        os.close(handle)


def peak_memory() -> int | None:
    """The most bytes of memory that this process has had; None where the system does not say."""
    try:
        resource: Any = import_module("resource")
    except ImportError:
        return None
    peak = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    return peak if sys.platform == "darwin" else peak * 1024


def ask_to_stop() -> None:
    """Send this process SIGTERM, as another would; its handler runs in the main thread."""
    if WINDOWS:
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process there, whatever handler it has
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def workers() -> int:
    """Threads for decoding: one for each core that this process may use."""
    try:
        return max(1, min(16, len(os.sched_getaffinity(0))))
    except AttributeError:  # not on every system
        return max(1, min(16, os.cpu_count() or 1))
