"""What Linux, macOS and Windows do differently. Modules that not every system has are imported here, when needed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import sys
import threading
import time
from importlib import import_module
from typing import Any

from crosel.errors import UserError
from crosel.utils.text import gib

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


def give_memory_back() -> None:
    """Let the system have what this process has freed. The C library of Linux keeps pieces of up to 32 MB, and what is
    drawn for a million examples is no larger."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)


def ask_to_stop() -> None:
    """Send this process SIGTERM, as another would; its handler runs in the main thread."""
    if WINDOWS:
        signal.raise_signal(signal.SIGTERM)  # os.kill would end the process there, whatever handler it has
    else:
        os.kill(os.getpid(), signal.SIGTERM)


_PARENT = "CROSEL_PARENT"  # the number of the process that a command must not outlive


def child_environment() -> dict[str, str]:
    """For a command of ours that saves its state and stops when this process is gone: a killed bench would leave runs
    behind that still hold their folders when it is started again."""
    return {**os.environ, _PARENT: str(os.getpid())}


def stop_with_parent() -> None:
    """Send ourselves SIGTERM once the process of `child_environment` is gone: we then have another parent."""
    parent = os.environ.pop(_PARENT, "")
    if WINDOWS or not parent:  # Windows: a parent need not be the starting process, and its number never changes
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.2)
        ask_to_stop()

    threading.Thread(target=watch, daemon=True).start()


def processes_here() -> int:
    """Processes of one run on this machine, as its launcher says."""
    found = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(found)) if found.isdecimal() else 1


def import_by_name(name: str) -> Any:
    """What `module:attribute` stands for, of an installed package or of a file in the working folder."""
    module, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # which a command has not, other than `python -m`
        sys.path.append(here)  # last, so that a file here takes the place of no installed package
    return getattr(import_module(module), attribute)


_POSITION = threading.Lock()  # of a file, where reading and moving are two calls


def read_at(handle: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer from a place in a file; OSError where the file ends before."""
    while buffer:
        if hasattr(os, "preadv"):
            got = os.preadv(handle, [buffer], offset)
        else:  # macOS, Windows
            with _POSITION:
                os.lseek(handle, offset, os.SEEK_SET)
                part = os.read(handle, min(len(buffer), 1 << 24))
            got = len(part)
            buffer[:got] = part
        if not got:
            raise OSError(errno.EIO, "the file ends too early")
        buffer, offset = buffer[got:], offset + got


def write_at(handle: int, data: memoryview | bytes, offset: int) -> None:
    data = memoryview(data)
    while data:
        if hasattr(os, "pwrite"):
            got = os.pwrite(handle, data, offset)
        else:  # Windows
            with _POSITION:
                os.lseek(handle, offset, os.SEEK_SET)
                got = os.write(handle, data)
        data, offset = data[got:], offset + got


def workers() -> int:
    """Threads for decoding: one for each core that this process may use."""
    try:
        return max(1, min(16, len(os.sched_getaffinity(0))))
    except AttributeError:  # not on every system
        return max(1, min(16, os.cpu_count() or 1))


# --- limits on what a file may ask for ------------------------------------------------------------------------------

MAX_LINE = 1 << 24  # bytes in a line of text; a longer one is no table
MAX_JSON = 1 << 30  # bytes in a JSON document, which is held as Python objects of about ten times the size


def memory_limit() -> int:
    """Bytes of memory that data may take: CROSEL_MEMORY_GB, or four fifths of this machine's memory."""
    given = os.environ.get("CROSEL_MEMORY_GB")
    if given:
        try:
            return int(float(given) * 2**30)
        except (ValueError, OverflowError):
            raise UserError(f"CROSEL_MEMORY_GB={given}: expected a number of GiB") from None
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 4 // 5
    except (ValueError, OSError, AttributeError):  # not a POSIX system
        return 16 << 30


def check_bytes(count: int, what: str, place: object) -> None:
    """Refuse what would not fit into memory before it is allocated."""
    bound = memory_limit()
    if count > bound:
        raise UserError(
            f"{place}: {what} would take {gib(count)} of memory, more than the limit of {gib(bound)} "
            "(CROSEL_MEMORY_GB sets it)"
        )
