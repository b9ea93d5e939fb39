"""A run in a process of its own: `python -m crosel.utils.child PARENT train …` is `crosel train …`, but it stops, and
saves its state, when the process that started it is gone. A killed bench must not leave runs behind that nobody knows
of and that hold their folders when it is started again."""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time

from crosel.utils.system import WINDOWS, ask_to_stop


def child_command(parent: int, *arguments: str) -> list[str]:
    """A command of crosel's that lives no longer than the process `parent`, by which it must be started."""
    return [sys.executable, "-m", "crosel.utils.child", str(parent), *arguments]


def stop_without(parent: int) -> None:
    """Send ourselves SIGTERM once our parent is another process (the system's first, as a rule)."""
    while os.getppid() == parent:
        time.sleep(0.2)
    ask_to_stop()


def main() -> None:
    parent = int(sys.argv[1])
    # The command noted in the run folder is the one a person would type.
    sys.argv = ["crosel", *sys.argv[2:]]
    if not WINDOWS:  # where the number of the parent is not that of whoever started us, nor ever changes
        threading.Thread(target=stop_without, args=(parent,), daemon=True).start()
    runpy.run_module("crosel", run_name="__main__")


if __name__ == "__main__":
    main()
