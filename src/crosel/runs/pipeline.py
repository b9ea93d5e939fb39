"""One run from start to end: data, candidate sets, training, labels, report."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crosel.config import RunConfig
from crosel.data import Dataset, draw_candidates, with_classes_of
from crosel.data.candidates import with_weights
from crosel.data.convert import summarise
from crosel.errors import Interrupted, UserError
from crosel.nn.factory import network_name
from crosel.runs.corrections import apply_corrections, read_corrections
from crosel.runs.environment import command_line, environment, hardware
from crosel.runs.folder import Recorder, RunFolder, load_data, with_full_paths
from crosel.runs.folds import out_of_sample, witness_of
from crosel.runs.label_error import OutOfSample
from crosel.runs.result import Result
from crosel.training.build import better_method, build_session, check_batch_size, resolve
from crosel.training.callbacks import LoggerCallback, check_loggers
from crosel.training.checkpoint import Checkpoint
from crosel.training.devices import advise_while_building
from crosel.training.session import Session
from crosel.training.trainer import fit
from crosel.utils.console import Console
from crosel.utils.distributed import SINGLE_PROCESS, World
from crosel.utils.text import counted

logger = logging.getLogger(__name__)

ReportWriter = Callable[[RunFolder, Dataset, Result], None]


class StopFlag:
    """Set by the first Ctrl-C or SIGTERM; the loop checks it after every step. A second Ctrl-C is immediate."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self, number: int, frame: FrameType | None) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._event.set()


@contextmanager
def stop_signals(flag: StopFlag | None = None) -> Iterator[StopFlag]:
    """Catch Ctrl-C and SIGTERM for the length of a run (only the main thread may)."""
    flag = flag or StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    old = {number: signal.signal(number, flag.set) for number in (signal.SIGINT, signal.SIGTERM)}
    if any(getattr(handler, "asked", False) for handler in old.values()):  # the signal came before this handler was set
        flag.set(signal.SIGTERM, None)
    try:
        yield flag
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def train_run(
    config: RunConfig,
    out: Path,
    device: torch.device,
    resume: bool = False,
    console: Console | None = None,
    trust_code: bool = False,
    corrections: Path | None = None,
    world: World = SINGLE_PROCESS,
    loggers: Sequence[str] = (),
    write_report: ReportWriter | None = None,
) -> Session:
    """Train into a run folder; with `resume`, continue the run that is there, if any.

    `trust_code` lets a network named `module:factory` be imported. `corrections` is a file of known labels, as a review
    leaves it: their examples get a candidate set of that one label. Of several ranks only rank 0 uses the run folder;
    the others get their state from it. `loggers` names other places for the metrics.
    `write_report` writes the report of the finished run: `crosel.report.write_run_report`, or none.
    """
    check_loggers(loggers)
    console = console or Console(quiet=True)
    folder, recorder, stop = RunFolder(out), Recorder(out), StopFlag()
    try:
        with ExitStack() as held:
            build = partial(build_session, device=device, trust_code=trust_code, world=world)

            def on_rank0() -> Session:
                held.enter_context(folder.locked())
                folder.check_can_hold(resume or world.restarted)
                asked = folder.with_own_values(config) if folder.exists else config
                data = with_weights(load_data(asked, progress=console.on_images, device=device), asked.candidates)
                for note in data.notes:
                    logger.info(note)
                for warning in data.remarks():
                    logger.warning(warning)
                full = with_full_paths(resolve(asked, data, device))
                _protect(held, stop, full, device)
                held.callback(recorder.wait)  # however the run ends, what was reported as saved is on the disk
                if folder.exists:
                    return _resume(folder, full, data, build, corrections)
                return _start(folder, full, data, build, corrections)

            def on_other_ranks(start: StartState) -> Session:
                _protect(held, stop, start[0], device)
                return _join(start, build, device)

            session = world.from_rank0(on_rank0, _start_state, on_other_ranks)
            if world.rank:
                fit(session, (), stop)
            elif folder.is_done:
                logger.info(f"{out} is already finished")
            else:
                others = [LoggerCallback(name, folder.path, session) for name in loggers]
                for callback in others:
                    held.callback(callback.close)
                fit(session, (recorder, console, *others), stop)
                recorder.wait()  # the report shows the last epoch, too
                judged = out_of_sample(
                    session, folder / "folds.npz", trust_code=trust_code, stop_requested=stop, console=console
                )
                finish(folder, session, write_report, judged)
            return session
    except Interrupted:
        again = f"crosel train --resume --out {out}{' --trust-code' if trust_code else ''}"
        raise Interrupted(f"stopped; the state is saved. Continue with: {again}") from None
    finally:
        console.close()


Build = Callable[[RunConfig, Dataset], Session]  # device and ranks are bound


def _start(folder: RunFolder, config: RunConfig, data: Dataset, build: Build, corrections: Path | None) -> Session:
    """Start a new run in the folder."""
    data = draw_candidates(data, config.candidates, config.seed)
    known = read_corrections(corrections, data) if corrections else {}
    data = apply_corrections(data, known)
    session = build(config, data)  # before anything is written: this may raise a UserError
    check_batch_size(session)
    _ = session.optimiser  # made now: one that does not suit the network must leave no folder behind
    about = environment(command_line(), session.device)
    folder.create(config, data, about, corrected=sorted(known))
    if corrections and not known:
        logger.warning(f"{corrections}: no known label in it, so nothing is corrected")
    summary = summarise(data)
    read = f"read {config.source}: {summary.lines()[0]}; {summary.mean_size:.2f} candidates on average"
    for line in (read, _plan(session, about)):
        logger.info(line)
    for warning in (*config.remarks(), *summary.remarks()):
        logger.warning(warning)
    return session


def _plan(session: Session, about: Mapping[str, Any]) -> str:
    """What a run is going to do."""
    config, networks = session.config, len(session.method.networks)
    name = network_name(config.network, session.data.shape)
    beside = witness_of(session)
    witness = f", and {beside.title} as often," if beside else ""
    folds = f", then {config.train.folds} times{witness} for labels out of sample" if config.train.folds else ""
    return (
        f"train: {session.method.title}, {counted(networks, 'network')} ({name}), {config.train.epochs} epochs of "
        f"{counted(session.steps, 'step')}, on {hardware(about)}{folds}"
    )


def _resume(folder: RunFolder, config: RunConfig, data: Dataset, build: Build, corrections: Path | None) -> Session:
    """Continue the run in the folder from its last checkpoint."""
    if corrections:
        raise UserError(f"{folder.path}: corrections apply only to a new run; choose another --out")
    folder.check_settings(config)
    session = build(config, folder.with_candidates(with_classes_of(data, config.candidates)))
    folder.restore(session)
    folder.update_config(config)  # last: a resume that is refused leaves the run as it was
    return session


def _protect(held: ExitStack, stop: StopFlag, config: RunConfig, device: torch.device) -> None:
    """Until the run ends: a signal waits for the end of the step, and too little memory is an error of one line."""
    held.enter_context(stop_signals(stop))
    held.enter_context(advise_while_building(device, config.train.data_on))


# config, candidate sets, and a checkpoint's two halves
StartState = tuple[RunConfig, NDArray[np.bool_] | None, dict[str, Tensor], dict[str, Any]]


def _start_state(session: Session) -> StartState:
    """What another rank needs to start from the same state; it reads the data from its own disk."""
    tensors, state = session.state()
    tables = {f"method.{name}" for name in session.method.all_tables()}  # shared out when training begins
    sent = {name: t.cpu() for name, t in tensors.items() if name not in tables}
    return session.config, session.data.candidates, sent, state


def _join(start: StartState, build: Build, device: torch.device) -> Session:
    config, sets, tensors, state = start
    data = with_weights(load_data(config, device=device), config.candidates)
    data = replace(with_classes_of(data, config.candidates), candidates=sets, ids=None, originals=None)
    session = build(config, data)  # ids and pictures are shown by rank 0 alone
    session.restore(Checkpoint(tensors, state))
    return session


def finish(
    folder: RunFolder,
    session: Session,
    write_report: ReportWriter | None = None,
    judged: OutOfSample | None = None,
) -> None:
    """Write what a finished run leaves behind; `done` comes last."""
    result = Result.of(session, with_test=True, out_of_sample=judged)
    result.save(folder.path)
    if write_report is not None:
        write_report(folder, session.data, result)
    folder.finish()
    count, kinds = result.to_check()
    if count:
        logger.info(
            f"{count:,} of {counted(len(result.labels), 'label')} to check ({kinds}): crosel review {folder.path}"
        )
    for note in result.notes():
        logger.info(note)
    for warning in result.warnings():
        logger.warning(warning)
    if other := better_method(session):
        logger.info(f"on rows of features like these, another method did better in our trials: --method {other}")
