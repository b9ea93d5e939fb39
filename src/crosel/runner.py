"""One run from start to end: data, candidate sets, training, labels, report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch

from crosel.config import RunConfig
from crosel.console import Console
from crosel.data import Dataset, draw_candidates, load
from crosel.errors import UserError
from crosel.labels import label_table, write_labels, write_selection
from crosel.report import write_report
from crosel.run import RunFolder, command_line
from crosel.session import Session, build_session, resolve
from crosel.train import fit


class StopFlag:
    """Set by the first Ctrl-C or SIGTERM; the loop looks at it after every step. A second Ctrl-C is immediate."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._event.set()


@contextmanager
def stop_signals() -> Iterator[StopFlag]:
    """Catch Ctrl-C and SIGTERM for the length of a run (only the main thread may)."""
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    old = {number: signal.signal(number, flag.set) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train_run(
    config: RunConfig | None, out: Path, device: torch.device, resume: bool = False, console: Console | None = None
) -> Session:
    """Train into a run folder. With `resume`, go on with the run that is there (config None: exactly as it was)."""
    console = console or Console(quiet=True)
    folder = RunFolder(out)
    if folder.exists and not resume:
        raise UserError(f"{out} holds a run already; go on with it by --resume, or choose another --out")
    if config is None:
        config = folder.read_config()
    elif out.exists() and not folder.exists and out.is_dir() and any(out.iterdir()) and not _is_unborn(out):
        raise UserError(f"{out} is not a run folder and not empty; choose another --out")
    data = load(config.source, Path(config.data_dir) if config.data_dir else None)
    config = resolve(config, data)
    folder.lock()
    try:
        with stop_signals() as stop:
            session = _open(folder, config, data, device, console)
            if folder.is_done and session.progress.epoch >= config.train.epochs:
                console.say(f"{out} is finished already")
                return session
            fit(session, (folder, console), stop)
            finish(folder, session)
    finally:
        folder.unlock()
    return session


def _is_unborn(out: Path) -> bool:
    """A run that was killed before its config was written left nothing but these."""
    return {path.name for path in out.iterdir()} <= {
        "checkpoints",
        "candidates.npz",
        "environment.json",
        "metrics.jsonl",
    }


def _open(folder: RunFolder, config: RunConfig, data: Dataset, device: torch.device, console: Console) -> Session:
    if not folder.exists:
        data = draw_candidates(data, config.candidates, config.seed)
        session = build_session(config, data, device)  # before anything is written: it may refuse the config
        folder.create(config, data, command_line())
        return session
    folder.check_same_config(config)
    session = build_session(config, folder.with_candidates(data), device)
    for line in folder.restore(session):
        console.say(line)
    return session


def finish(folder: RunFolder, session: Session) -> None:
    """Write what a finished run leaves behind; `done` comes last."""
    table = label_table(session)
    write_selection(session, folder / "selection.npz")
    write_labels(table, folder / "labels.csv")
    write_report([folder], folder / "report.html")
    folder.finish()
