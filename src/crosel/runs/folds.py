"""Out-of-sample probabilities: every training example judged by networks that never trained on it.

A network learns the sets it is shown by heart; what it then says of them is too sure. So the examples are split into K
folds, and for each fold a run of the same settings trains on the others. The run itself is left alone.

Where networks select the labels they learn from, those of another method train beside them, as a witness
(`label_error.py` says why), unless the sets were drawn by a known rule, which says enough.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data.candidates import parse_rule
from crosel.data.dataset import only_rows
from crosel.errors import Diverged, UserError
from crosel.methods.base import Method, find_method
from crosel.nn.factory import NetworkFactory
from crosel.runs.label_error import OutOfSample
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
) -> OutOfSample | None:
    """Probabilities of the training examples by networks that trained on the other folds; None: no folds.

    With a path, what is found is saved after each fold, and folds that are there already are not trained again.
    """
    folds = session.config.train.folds
    if not folds:
        return None
    if session.world.size > 1:
        logger.warning("train.folds needs a single process; labels are judged by the networks that trained on them")
        return None
    data, seed = session.data, session.config.seed
    fold, done = assign_folds(data.n, folds, seed), np.zeros(folds, bool)
    table = np.zeros((data.n, len(data.classes)), np.float32)
    found = OutOfSample(table, np.zeros_like(table) if witness_of(session) else None)
    if path and (saved := _read_folds(path, session)):
        found, done = saved
    if not done.all():
        logger.info(f"labels are judged out of sample: {folds} trainings on all but one of {folds} parts each")
    runs = [(found.probabilities, session.config)]
    if found.witness is not None:
        runs.append((found.witness, witness_config(session)))
    for k in np.flatnonzero(~done):
        for turn, (into, config) in enumerate(runs):
            try:
                progress = None if console is None else _Progress(console, int(k), folds, turn, len(runs))
                shown: tuple[Callback, ...] = () if progress is None else (progress,)
                asked = fold_config(config, int(k))
                part = _held_out(session, asked, fold == k, make_network, trust_code, stop_requested, shown)
            except Diverged as error:  # the run itself is finished and well
                logger.warning(
                    f"labels cannot be judged out of sample: without part {k + 1} of {folds}, "
                    f"{config.method.name}: {error}"
                )
                return None
            into[fold == k] = part
        done[k] = True
        if path is not None:
            _write_folds(path, session, found, done)
    return found


def witness_of(session: Session) -> type[Method] | None:
    """The method whose networks judge the labels of this one; None: its own do."""
    name = session.method.witness
    return None if name is None or drawn_at_random(session)[0] else find_method(name)


def witness_config(session: Session) -> RunConfig:
    """Its method with its defaults, all else as in the run."""
    witness = witness_of(session)
    assert witness is not None
    return session.config.model_copy(update={"method": witness.Settings.model_validate({"name": witness.name})})


def drawn_at_random(session: Session) -> tuple[bool, NDArray[np.bool_] | None]:
    """Whether wrong candidates were drawn at random by a rule, and from which labels [n, k] (None: all)."""
    data, text = session.data, session.config.candidates
    rule = parse_rule(text) if text else None
    if rule is None or rule.name not in ("uniform", "uniform-sets", "superclass") or rule.values.get("eta"):
        return False, None
    if rule.name != "superclass":
        return True, None
    assert data.groups is not None
    assert data.candidates is not None
    groups = np.array(data.groups)
    return True, (data.candidates[:, :, None] & (groups[:, None] == groups[None, :])).any(axis=1)


def read_out_of_sample(path: Path, session: Session) -> OutOfSample | None:
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
    config: RunConfig,
    held_out: NDArray[np.bool_],
    make_network: NetworkFactory | None,
    trust_code: bool,
    stop_requested: Callable[[], bool],
    callbacks: tuple[Callback, ...],
) -> NDArray[np.float32]:
    """Train on the other examples and their sets, and return probabilities [m, k] of those that are held out."""
    data = session.data
    rest = replace(only_rows(data, np.flatnonzero(~held_out)), y=None, x_test=None, y_test=None)
    other = build_session(config, rest, session.device, make_network, trust_code)
    fit(other, callbacks, stop_requested)
    found: NDArray[np.float32] = predicted_probabilities(other, data.x[held_out]).float().numpy()
    return found


class _Progress(Callback):
    """One bar for all folds, as a callback of the training loop."""

    def __init__(self, console: Console, fold: int, folds: int, turn: int, turns: int) -> None:
        self.console, self.fold, self.folds, self.turn, self.turns = console, fold, folds, turn, turns

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        epochs = session.config.train.epochs
        trained = ((epoch - 1) * session.steps + step) / (epochs * session.steps)
        done = self.fold + (self.turn + trained) / self.turns
        self.console.show(f"part {self.fold + 1}/{self.folds}  epoch {epoch}/{epochs}", done, self.folds)


# --- the file, from which a killed run goes on with the next fold -------------------------------------------------


_FILE = {
    "probabilities": ArraySpec("f", "nk", 0, 1.001), "witness": ArraySpec("f", "nk", 0, 1.001),
    "done": ArraySpec("b", "d"), "digest": ArraySpec("U", ""),
}  # fmt: skip


def _folds_digest(session: Session) -> str:
    """Of what the folds are about; a run folder holds on to the settings that decide what is learnt."""
    content = repr((session.fingerprints, session.config.seed, session.config.train.folds))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _write_folds(path: Path, session: Session, found: OutOfSample, done: NDArray[np.bool_]) -> None:
    arrays: dict[str, NDArray[Any]] = {name: table for name, table in found._asdict().items() if table is not None}
    arrays |= {"done": done, "digest": np.array(_folds_digest(session))}
    atomic_write_with(path, lambda stream: np.savez(stream, **arrays))  # type: ignore[arg-type]


def _read_folds(path: Path, session: Session) -> tuple[OutOfSample, NDArray[np.bool_]] | None:
    """None where there is no such file, where it is damaged, or about something else."""
    try:
        sizes = {"n": session.data.n, "k": len(session.data.classes), "d": session.config.train.folds or 0}
        found = read_arrays(path, _FILE, sizes)
        if str(found["digest"]) != _folds_digest(session):
            return None
        witness = found["witness"] if witness_of(session) else None
        return OutOfSample(found["probabilities"], witness), found["done"]
    except (OSError, UserError, KeyError):
        return None
