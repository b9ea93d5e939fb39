"""The record of where and how a run or a benchmark was made: versions, hardware, commit, command."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import StrictBool, StrictFloat, StrictInt, StrictStr, TypeAdapter

import crosel
from crosel.errors import UserError
from crosel.utils.reading import load_json, read_run_text
from crosel.utils.text import without_secrets

_SCHEMA = TypeAdapter(dict[str, StrictStr | StrictInt | StrictFloat | StrictBool | list[StrictStr] | None])


def environment(command: list[str], device: torch.device | None = None) -> dict[str, Any]:
    """Versions, hardware, commit and device, with the given command."""
    out: dict[str, Any] = {
        "crosel": crosel.__version__, "python": platform.python_version(), "torch": torch.__version__,
        "numpy": np.__version__, "platform": f"{platform.system()} {platform.machine()}", "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(), "command": command, "commit": _commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }  # fmt: skip
    if torch.cuda.is_available():
        out |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return out if device is None else out | {"device": device.type}


def _commit() -> str | None:
    """The commit of the source tree this package runs from, with a mark if it has been changed."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        # Installed into someone's project, the package lies in a repository that is not ours.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], capture_output=True, timeout=5, check=True)
        result = subprocess.run(
            [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("CROSEL_COMMIT")
    return result.stdout.strip()


def command_line() -> list[str]:
    """The command as typed, without secrets."""
    return ["crosel", *without_secrets(sys.argv[1:])]


def read_environment(path: Path) -> dict[str, Any]:
    """The content of environment.json, or nothing if it cannot be read: tables and reports do without."""
    try:
        known: dict[str, Any] = _SCHEMA.validate_python(load_json(read_run_text(path)))
    except (OSError, ValueError, UserError):
        return {}
    return known


def hardware(environment: Mapping[str, Any]) -> str:
    """What a run was trained on, in words; empty where that is not known."""
    if not environment:
        return ""
    # A machine may have a GPU that the run did not use.
    if environment.get("gpu") and (environment.get("device") or _device_flag(environment.get("command"))) != "cpu":
        return str(environment["gpu"])
    threads = environment.get("threads") or environment.get("cpu_count")
    return f"CPU, {threads} thread{'' if threads == 1 else 's'}" if threads else "CPU"


def _device_flag(command: Any) -> str:
    """The device in a command line, for older runs that did not record it; the last of several flags counts."""
    words = [str(word) for word in command] if isinstance(command, list) else []
    named: list[str] = re.findall(r"--device[ =](\S+)", " ".join(words))
    return named[-1] if named else ""
