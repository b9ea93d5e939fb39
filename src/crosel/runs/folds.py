"""Out-of-sample probabilities: every training example judged by networks that never trained on it.

A network learns the sets it is shown by heart; what it then says of them is too sure. So the examples are split into K
folds, and for each fold a run of the same settings trains on the others. The run itself is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from crosel.config import RunConfig
from crosel.data import Dataset
from crosel.data.dataset import only_rows
from crosel.errors import UserError
from crosel.nn.networks import NetworkFactory
from crosel.training.build import build_session
from crosel.training.callbacks import Callback
from crosel.training.trainer import fit, predicted_probabilities


def assign_folds(n: int, folds: int, seed: int) -> NDArray[np.int64]:
    """The fold of each example [n]: of equal sizes but for one, at random, the same for a seed on every machine."""
    if not 2 <= folds <= n:
        raise UserError(f"folds must lie between 2 and the number of examples, {n}, not {folds}")
    order = np.random.Philox(np.random.SeedSequence([seed, folds])).random_raw(n).argsort(kind="stable")
    fold = np.empty(n, np.int64)
    fold[order] = np.arange(n) % folds
    return fold


def held_out_probabilities(
    config: RunConfig,
    data: Dataset,
    device: torch.device,
    held_out: NDArray[np.bool_],
    make_network: NetworkFactory | None = None,
    trust_code: bool = False,
    callbacks: tuple[Callback, ...] = (),
    stop_requested: Callable[[], bool] = lambda: False,
) -> NDArray[np.float32]:
    """Train on the other examples and their sets, and return probabilities [m, k] for those that are held out."""
    rest = replace(only_rows(data, np.flatnonzero(~held_out)), y=None, x_test=None, y_test=None)
    session = build_session(config, rest, device, make_network, trust_code)
    fit(session, callbacks, stop_requested)
    found: NDArray[np.float32] = predicted_probabilities(session, data.x[held_out]).float().numpy()
    return found


def fold_config(config: RunConfig, fold: int) -> RunConfig:
    """The run's settings with a seed of the fold's own; nothing is measured before the last epoch."""
    train = config.train.model_copy(update={"evaluate_every": config.train.epochs})
    return config.model_copy(update={"seed": (config.seed + 7907 * (fold + 1)) % 2**63, "train": train})
