"""Out-of-sample probabilities: every training example judged by networks that never trained on it.

A network learns the sets it is shown by heart; what it then says of them is too sure. So the examples are split into K
folds, and for each fold a run of the same settings trains on the others. The run itself is left alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data.dataset import only_rows
from crosel.errors import Diverged, UserError
from crosel.nn.factory import NetworkFactory
from crosel.training.build import build_session
from crosel.training.callbacks import Callback
from crosel.training.session import Session
from crosel.training.trainer import fit, predicted_probabilities
from crosel.utils.console import Console
from crosel.utils.files import atomic_write_with
from crosel.utils.reading import ArraySpec, read_arrays

logger = logging.getLogger(__name__)


def assign_folds(n: int, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of each example [n]: of equal sizes but for one, at random, the same for a seed on every machine."""
    if not 2 <= folds <= n:
        raise UserError(f"folds must lie between 2 and the number of examples, {n}, not {folds}")
    order = np.random.Philox(np.random.SeedSequence([seed, folds])).random_raw(n).argsort(kind="stable")
    fold = np.empty(n, np.int64)
    fold[order] = np.arange(n) % folds
    return fold


def out_of_sample(
    session: Session,
    path: Path | None = None,
    make_network: NetworkFactory | None = None,
    trust_code: bool = False,
    stop_requested: Callable[[], bool] = lambda: False,
    console: Console | None = None,
) -> NDArray[np.float32] | None:
    """Probabilities [n, k] of the training examples by networks that trained on the other folds; None: no folds.

    With a path, what is found is saved after each fold, and folds that are there already are not trained again.
    """
    folds = session.config.train.folds
    if not folds:
        return None
    if session.world.size > 1:
        logger.warning("train.folds needs a single process; labels are judged by the networks that trained on them")
        return None
    data, seed = session.data, session.config.seed
    fold = assign_folds(data.n, folds, seed)
    found, done = _read_folds(path, session) if path else None, np.zeros(folds, bool)
    probabilities = np.zeros((data.n, len(data.classes)), np.float32)
    if found is not None:
        probabilities, done = found
    if not done.all():
        logger.info(f"labels are judged out of sample: {folds} trainings on all but one of {folds} parts each")
    for k in np.flatnonzero(~done):
        try:
            shown: tuple[Callback, ...] = () if console is None else (_Progress(console, int(k), folds),)
            part = _held_out(session, fold == k, int(k), make_network, trust_code, stop_requested, shown)
        except Diverged as error:  # the run itself is finished and well
            logger.warning(f"labels cannot be judged out of sample: without part {k + 1} of {folds}, {error}")
            return None
        probabilities[fold == k] = part
        done[k] = True
        if path is not None:
            _write_folds(path, session, probabilities, done)
    return probabilities


def read_out_of_sample(path: Path, session: Session) -> NDArray[np.float32] | None:
    """What a finished run has saved; None where it had no folds, or, with a line, where they cannot be read."""
    if not session.config.train.folds:
        return None
    found = _read_folds(path, session)
    if found is None or not found[1].all():
        logger.warning(
            f"{path} is missing, damaged or not complete: labels and confidence come from the networks that trained on "
            "these examples; restore the file for those out of sample"
        )
        return None
    return found[0]


def fold_config(config: RunConfig, fold: int) -> RunConfig:
    """The run's settings with a seed of the fold's own; nothing is measured before the last epoch."""
    train = config.train.model_copy(update={"evaluate_every": config.train.epochs})
    return config.model_copy(update={"seed": (config.seed + 7907 * (fold + 1)) % 2**63, "train": train})


def _held_out(
    session: Session,
    held_out: NDArray[np.bool_],
    fold: int,
    make_network: NetworkFactory | None,
    trust_code: bool,
    stop_requested: Callable[[], bool],
    callbacks: tuple[Callback, ...],
) -> NDArray[np.float32]:
    """Train on the other examples and their sets, and return probabilities [m, k] of those that are held out."""
    config, data = fold_config(session.config, fold), session.data
    rest = replace(only_rows(data, np.flatnonzero(~held_out)), y=None, x_test=None, y_test=None)
    other = build_session(config, rest, session.device, make_network, trust_code)
    fit(other, callbacks, stop_requested)
    found: NDArray[np.float32] = predicted_probabilities(other, data.x[held_out]).float().numpy()
    return found


class _Progress(Callback):
    """One bar for all folds, as a callback of the training loop."""

    def __init__(self, console: Console, fold: int, folds: int) -> None:
        self.console, self.fold, self.folds = console, fold, folds

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        epochs = session.config.train.epochs
        done = self.fold + ((epoch - 1) * session.steps + step) / (epochs * session.steps)
        self.console.show(f"part {self.fold + 1}/{self.folds}  epoch {epoch}/{epochs}", done, self.folds)


# --- the file, from which a killed run goes on with the next fold -------------------------------------------------


_FILE = {"probabilities": ArraySpec("f", "nk", 0, 1.001), "done": ArraySpec("b", "d"), "digest": ArraySpec("U", "")}


def _folds_digest(session: Session) -> str:
    """Of what the folds are about; a run folder holds on to the settings that decide what is learnt."""
    content = repr((session.fingerprints, session.config.seed, session.config.train.folds))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _write_folds(path: Path, session: Session, probabilities: NDArray[np.float32], done: NDArray[np.bool_]) -> None:
    arrays = {"probabilities": probabilities, "done": done, "digest": np.array(_folds_digest(session))}
    atomic_write_with(path, lambda stream: np.savez(stream, **arrays))  # type: ignore[arg-type]


def _read_folds(path: Path, session: Session) -> tuple[NDArray[np.float32], NDArray[np.bool_]] | None:
    """None where there is no such file, where it is damaged, or about something else."""
    try:
        sizes = {"n": session.data.n, "k": len(session.data.classes), "d": session.config.train.folds or 0}
        found = read_arrays(path, _FILE, sizes)
        return (found["probabilities"], found["done"]) if str(found["digest"]) == _folds_digest(session) else None
    except (OSError, UserError, KeyError):
        return None
