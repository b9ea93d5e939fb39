"""A command in a child process that ends with its parent: `python -m crosel.utils.child PARENT train …` is
`crosel train …`, but it saves its state and stops when the process PARENT is gone. Otherwise a killed bench would leave
runs behind that still hold their folders when it is started again."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

from crosel.utils.system import WINDOWS, ask_to_stop


def child_command(parent: int, *arguments: str) -> list[str]:
    """A command that ends with the process `parent`, which must start it."""
    return [sys.executable, "-m", "crosel.utils.child", str(parent), *arguments]


def stop_without(parent: int) -> None:
    """Send ourselves SIGTERM once `parent` is gone and we have another parent (usually process 1)."""
    while os.getppid() == parent:
        time.sleep(0.2)
    ask_to_stop()


def main() -> None:
    parent = int(sys.argv[1])
    # The run folder notes the command that a person would type.
    sys.argv = ["crosel", *sys.argv[2:]]
    if not WINDOWS:  # where the parent's number need not be that of the starting process, and never changes
        threading.Thread(target=stop_without, args=(parent,), daemon=True).start()
    runpy.run_module("crosel", run_name="__main__")


if __name__ == "__main__":
    main()
