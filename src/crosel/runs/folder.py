"""The run folder: what a run leaves behind, and what is needed to resume or use it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from crosel.config import RemovedSettingError, RunConfig, check_config
from crosel.data import Dataset, full_rule, load, with_classes_of
from crosel.data.formats import published_formats
from crosel.data.settings import OnImages
from crosel.data.sources import locate
from crosel.errors import UserError
from crosel.runs.result import TrainingSet
from crosel.training import checkpoint
from crosel.training.build import build_session, choose_encoder, data_settings
from crosel.training.callbacks import Callback, Row, check_row
from crosel.training.devices import OutOfMemoryAdvice
from crosel.training.session import Session
from crosel.utils.files import (
    TEMPORARY,
    atomic_write,
    claimed,
    disk_errors,
    make_own_folder,
    new_folder,
    remove_temporary_files,
)
from crosel.utils.reading import APPEND, load_json, open_plain, read_run_text
from crosel.utils.settings import dotted, merge, read_yaml

logger = logging.getLogger(__name__)

Removed = Literal["refuse", "tell", "ignore"]
# Settings that do not affect what is learnt: they may change when a run is resumed.
FREE_TO_CHANGE = {
    "data_dir", "data.cache", "data.inputs", "data.image_root", "train.log_every", "train.keep_checkpoints",
    "network.weights", "network.checkpointing", "train.cuda_graphs", "train.data_on", "train.folds",
    "train.out_of_memory",
}  # fmt: skip
# Settings whose defaults are not those of version 0.1.0.
NEW_DEFAULTS = (
    "data.resize", "network.scaling", "network.hidden", "augment.weak_feature_noise", "train.weight_decay",
    "train.candidate_weights", "train.bf16", "method.phi_start", "method.phi_end", "method.queue",
)  # fmt: skip
# What a run leaves behind if it is killed before its config is written.
_BEFORE_CONFIG = {"checkpoints", "candidates.npz", "environment.json", "metrics.jsonl"}


def _check_saved(tree: Mapping[str, Any], place: str, removed: Removed) -> RunConfig:
    """The settings that a run has saved. Those of version 0.1.0 do not say that image files were stretched, that
    features had unit variance and that candidates had no weights."""
    data = tree.get("data")
    if isinstance(data, Mapping) and "resize" not in data and tree.get("source") not in published_formats():
        tree = {**tree, "data": {**data, "resize": "stretch"}}
    before: dict[str, Any] = {"network": {"scaling": "standard"}, "train": {"candidate_weights": False}}
    return check_config(merge(before, tree), place, removed)


class RunFolder:
    """Paths and files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def exists(self) -> bool:
        return (self / "config.yaml").is_file()

    @property
    def is_done(self) -> bool:
        return (self / "done").is_file()

    # --- making and opening -----------------------------------------------------------------------------------

    def create(
        self, config: RunConfig, data: Dataset, environment: Mapping[str, Any], corrected: Sequence[int] = ()
    ) -> None:
        """Write the files of a new run. The config comes last: a folder without it is not a run."""
        make_own_folder(self.checkpoints)
        remove_temporary_files(self.path)
        TrainingSet.of(data, corrected).save(self / "candidates.npz")
        atomic_write(self / "environment.json", json.dumps(environment, indent=1) + "\n")
        atomic_write(self / "metrics.jsonl", "")
        atomic_write(self / "config.yaml", config.to_yaml())

    def check_can_hold(self, resume: bool) -> None:
        """Refuse a folder that holds a run (unless `resume`) or anything else."""
        if self.exists:
            if not resume:
                raise UserError(f"{self.path} already holds a run; continue it with --resume, or choose another --out")
            return
        with disk_errors(self.path):
            others = {path.name for path in self.path.iterdir() if not path.name.startswith(TEMPORARY)}
        if others - _BEFORE_CONFIG:
            raise UserError(f"{self.path} is not empty and not a run folder; choose another --out")

    def read_config(self, removed: Removed = "ignore") -> RunConfig:
        """The run's settings; where the file cannot be read any more, those that the newest checkpoint carries.
        `removed`: what to do about settings of an earlier version that are gone (`check_config`)."""
        config, damaged = self._config_or_backup(removed)
        if damaged:
            logger.warning(f"{self / 'config.yaml'} is damaged; using the settings from the newest checkpoint")
        return config

    def _config_or_backup(self, removed: Removed) -> tuple[RunConfig, bool]:
        """The settings, and whether the file is damaged."""
        with disk_errors(self.path):
            if not self.path.exists():
                raise UserError(f"{self.path}: no such run folder")
            if not self.exists:
                inside = [*self.path.glob("*/config.yaml"), *self.path.glob("*/*/config.yaml")]
                such_as = f"; it contains runs, such as {min(inside).parent}" if inside else ""
                raise UserError(f"{self.path} is not a run folder (it has no config.yaml){such_as}")
        try:
            return _check_saved(
                read_yaml(self / "config.yaml", links=False), f"{self / 'config.yaml'}: ", removed
            ), False
        except RemovedSettingError:
            raise
        except UserError:
            found = checkpoint.load_newest(self.checkpoints).checkpoint
            if found is None or not isinstance(found.state.get("config"), dict):
                raise
            return _check_saved(found.state["config"], f"{self.checkpoints}: ", removed), True

    def check_settings(self, config: RunConfig) -> tuple[RunConfig, bool]:
        """Refuse settings that must not change in a resumed run. Returns the old ones, and whether their file is
        damaged."""
        old, damaged = self._config_or_backup("refuse")
        remedy = "use the old value, or choose another --out"
        refuse_changes(old, config, f"{self.path} has a run with other settings", remedy)
        return old, damaged

    def update_config(self, config: RunConfig) -> None:
        """Save the settings of a resumed run; refuse those that must not change."""
        old, damaged = self.check_settings(config)
        if damaged or old.to_yaml() != config.to_yaml():
            atomic_write(self / "config.yaml", config.to_yaml())

    def with_own_values(self, config: RunConfig) -> RunConfig:
        """The settings to go on with: the run's own where a default has changed and nobody has given a value."""
        try:
            old, _ = self._config_or_backup("ignore")
        except UserError:  # said when the settings are compared
            return config
        sections: dict[str, Any] = {}
        for section, _, name in (full.partition(".") for full in NEW_DEFAULTS):
            settings, own = sections.get(section, getattr(config, section)), getattr(old, section)
            if name not in settings.model_fields_set and type(own) is type(settings) and hasattr(own, name):
                sections[section] = settings.model_copy(update={name: getattr(own, name)})
        return config.model_copy(update=sections)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder, made if need be, for this process; the lock ends with the process, however that ends."""
        with ExitStack() as held, new_folder(self.path):  # goes again, while still ours, if nothing comes of the run
            taken = f"{self.path} is in use by another process; wait for it or choose another --out"
            held.enter_context(claimed(self.path, taken))
            yield

    # --- candidate sets ---------------------------------------------------------------------------------------

    def training_set(self) -> TrainingSet:
        """The candidate sets of the run: drawn and saved once, then always read back."""
        return TrainingSet.load(self / "candidates.npz")

    def with_candidates(self, data: Dataset) -> Dataset:
        """The data with the run's candidate sets; a UserError if the data are not those of the run."""
        saved = self.training_set()
        joined = replace(data, candidates=saved.candidates)
        changed = _difference(saved, data, joined)
        if changed is not None:
            raise UserError(f"{self.path} was trained on other data: {changed}; restore the original data")
        return joined

    def placeholder_dataset(self) -> Dataset:
        """A dataset with the shape and classes of the run's data but without the data: enough to predict."""
        saved = self.training_set()
        x = np.zeros((1, *saved.shape), np.uint8 if len(saved.shape) == 3 else np.float32)
        return Dataset(x, saved.classes, saved.candidates, columns=saved.columns)

    # --- going on ---------------------------------------------------------------------------------------------

    def restore(self, session: Session) -> None:
        """Load the newest good checkpoint into the session, and put the folder in order."""
        make_own_folder(self.checkpoints)
        remove_temporary_files(self.path)
        found = checkpoint.load_newest(self.checkpoints)
        if found.checkpoint is not None:
            self.check_unchanged(session.config, found.checkpoint.state)
            try:
                session.restore(found.checkpoint)
            except UserError as error:
                raise UserError(f"{self.path}: {error}") from None
        with disk_errors(self.checkpoints):
            for path in found.damaged:
                logger.warning(f"checkpoint {path.name} is damaged and was moved aside")
                path.replace(path.with_suffix(".damaged"))
        checkpoint.prune(self.checkpoints, session.config.train.keep_checkpoints)
        p = session.progress
        if p.epoch < session.config.train.epochs:
            with disk_errors(self / "done"):
                (self / "done").unlink(missing_ok=True)
        if found.checkpoint is None:
            logger.info(f"no {'good ' if found.damaged else ''}checkpoint yet; starting from the beginning")
        elif not self.is_done:
            logger.info(f"continuing after epoch {p.epoch}" + (f", step {p.step}" if p.step else ""))
        atomic_write(self / "metrics.jsonl", "".join(map(_line, p.rows)))

    def check_unchanged(self, config: RunConfig, state: Mapping[str, Any]) -> None:
        """config.yaml may have been edited or damaged since the checkpoint was written."""
        if not isinstance(state.get("config"), dict):
            return
        old = _check_saved(state["config"], f"{self.checkpoints}: ", "ignore")  # perhaps of an earlier version
        refuse_changes(old, config, f"{self / 'config.yaml'} has changed since the run started", "change it back")

    # --- the end ----------------------------------------------------------------------------------------------

    def read_metrics(self) -> list[Row]:
        """Rows of metrics.jsonl; a last line cut in half by a crash is left out."""
        path, rows = self / "metrics.jsonl", list[Row]()
        try:
            lines = read_run_text(path).splitlines()
        except FileNotFoundError:
            return rows
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from None
        for number, line in enumerate(lines, 1):
            try:
                rows.append(check_row(load_json(line)))
            except json.JSONDecodeError:
                break
            except ValueError:  # pydantic's, too
                again = "it is written anew by: crosel train --resume --out RUN"
                raise UserError(f"{path}, line {number}: not a row of metrics; {again}") from None
        return rows

    def finish(self) -> None:
        atomic_write(self / "done", time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))


def load_run(
    path: Path,
    device: torch.device,
    trust_code: bool = False,
    data_dir: Path | None = None,
    needs_data: bool = True,
) -> Session:
    """Open a run: its networks from the newest good checkpoint, and its data if `needs_data`."""
    folder = RunFolder(path)
    config = folder.read_config(removed="tell")
    if needs_data:
        try:
            data = load_data(config, data_dir, device=device)
        except UserError as error:
            raise UserError(f"{error} (the run's settings are in {path / 'config.yaml'})") from None
        data = folder.with_candidates(with_classes_of(data, config.candidates))
    else:
        data = folder.placeholder_dataset()
    session = build_session(config, data, device, trust_code=trust_code, pretrained=False)
    found = checkpoint.load_newest(folder.checkpoints)
    for damaged in found.damaged:
        logger.warning(f"checkpoint {damaged.name} is damaged and is ignored")
    if found.checkpoint is None:
        if found.damaged or folder.is_done:
            what = "all checkpoints are damaged" if found.damaged else "the checkpoints are gone"
            raise UserError(f"{path}: {what}; restore the folder checkpoints, or train again with another --out")
        raise UserError(f"{path}: there is no checkpoint yet; train it first: crosel train … --out {path}")
    try:
        session.load_weights(found.checkpoint.tensors)
    except UserError as error:
        folder.check_unchanged(config, found.checkpoint.state)  # names the setting
        raise UserError(f"{path}: {error}") from None
    session.progress.epoch = found.checkpoint.state["epoch"]
    session.progress.rows = found.checkpoint.state["rows"]
    epoch, epochs = session.progress.epoch, config.train.epochs
    if not folder.is_done and epoch < epochs:
        logger.warning(f"{path} is not finished; using its state after {epoch} of {epochs} epochs")
    return session


def load_data(
    config: RunConfig,
    data_dir: Path | None = None,
    progress: OnImages | None = None,
    device: torch.device | None = None,
) -> Dataset:
    """Load the data that a config names; `data_dir` is where else to look for a file that has moved. The device is
    where a backbone embeds them."""
    encoder = choose_encoder(config, device)
    return load(config.source, data_dir or config.data_folder, data_settings(config), progress, encoder)


def training_inputs(config: RunConfig, examples: TrainingSet, data: Dataset | None = None) -> Any:
    """The training images [n, c, h, w] (perhaps `ImageFiles`) or features [n, d] of a run, for people to look at; None
    where they have changed since.

    What cannot be read at all is a UserError or an OSError.
    """
    if data is None:
        data = with_classes_of(load_data(config), config.candidates)
    if data.fingerprint != examples.fingerprint:
        return None
    return data.x if data.originals is None else data.originals


def with_full_paths(config: RunConfig) -> RunConfig:
    """Make paths absolute, so that the run can be repeated and resumed from any working folder."""
    update: dict[str, Any] = {"data": config.data.with_full_paths(), "candidates": full_rule(config.candidates)}
    if config.source not in published_formats():
        update["source"] = os.path.abspath(locate(config.source, config.data_folder))
    if config.data_dir:
        update["data_dir"] = os.path.abspath(config.data_dir)
    if config.network.weights:
        weights = os.path.abspath(config.network.weights)
        update["network"] = config.network.model_copy(update={"weights": weights})
    return config.model_copy(update=update)


def refuse_changes(old: RunConfig, new: RunConfig, what: str, remedy: str) -> None:
    """Refuse a config that would learn something else; the error names the first setting that differs."""
    was, now = (dotted(config.model_dump(mode="json")) for config in (old, new))
    free = set(FREE_TO_CHANGE)
    if not {was.get("source"), now.get("source")} & published_formats().keys():
        free.add("source")  # a file may have moved; its content is compared with the run's own record of it
    changed = first_difference(was, now, free)
    if changed is not None:
        name, before, after = changed
        raise UserError(f"{what}: {name} was {before!r}, now {after!r}; {remedy}")


def first_difference(was: Mapping[str, Any], now: Mapping[str, Any], free: Set[str]) -> tuple[str, Any, Any] | None:
    """The first difference between settings with dotted names, except those in `free`."""
    first = ("source", "method.name", "train.epochs")  # when these differ, so do many others
    # Then in the order of declaration: a default that depends on other settings comes after them.
    for name in sorted([*now, *(was.keys() - now.keys())], key=lambda name: name not in first):
        if name in free:
            continue
        if was.get(name) != now.get(name):
            return name, was.get(name), now.get(name)
    return None


def _difference(saved: TrainingSet, data: Dataset, joined: Dataset) -> str | None:
    """How the data differ from those of candidates.npz. `joined` are the same inputs: hashed here, and used later."""
    n, k = saved.candidates.shape
    if (n, k) != (data.n, len(data.classes)):
        return f"{n} examples and {k} classes, now {data.n} and {len(data.classes)}"
    if saved.fingerprint != joined.fingerprint:
        return "x or the class names have changed"
    if saved.given_ids is not None and data.ids is not None:
        row = next((i for i in range(n) if saved.example_id(i) != data.example_id(i)), None)
        if row is not None:  # decisions and labels would land on another example
            return f"the id of example {row} has changed"
    if data.candidates is not None:
        changed = (data.candidates != saved.candidates).any(axis=1)
        changed[saved.corrected] = False
        if changed.any():
            return f"the candidate set of example {int(changed.argmax())} has changed"
    same = data.y is saved.truth if data.y is None or saved.truth is None else np.array_equal(data.y, saved.truth)
    return None if same else "the true labels (y) have changed"


# --- what is recorded while a run trains: checkpoints, and a line of metrics.jsonl for each epoch -------------------

# The copy is in host memory, whatever the device.
_SAVING = OutOfMemoryAdvice(
    torch.device("cpu"),
    "for a checkpoint",
    "earlier checkpoints are intact; free some memory and continue with --resume",
)


def writes_behind(device: torch.device) -> bool:
    """Whether training goes on while a checkpoint is written. On a CPU both would compete for the cores."""
    return device.type == "cuda"


class Recorder(Callback):
    """A callback of the training loop. An epoch gets into the metrics only when its checkpoint is on the disk."""

    def __init__(self, run: Path) -> None:
        self.checkpoints = run / "checkpoints"
        self.metrics = run / "metrics.jsonl"
        self._writer = checkpoint.AsyncWriter()
        self._rows: list[Row] = []  # of an epoch whose checkpoint is under way

    def on_checkpoint(self, session: Session) -> None:
        self.wait()
        tensors, state = session.state()
        state["config"] = session.config.model_dump(mode="json")
        save = self._writer.save if writes_behind(session.device) else checkpoint.save
        with _SAVING:
            save(self.checkpoints, tensors, state, session.config.train.keep_checkpoints)

    def on_epoch(self, session: Session, row: Row) -> None:
        self._rows.append(row)
        if not writes_behind(session.device):
            self.wait()

    def wait(self) -> None:
        """Return when the last state, and its epoch's metrics, are on the disk."""
        try:
            with _SAVING:
                self._writer.wait()
        except Exception:
            self._rows.clear()
            raise
        while self._rows:
            row = self._rows.pop(0)
            with disk_errors(self.metrics), open(open_plain(self.metrics, False, APPEND), "ab") as stream:
                stream.write(_line(row).encode())


def _line(row: Row) -> str:
    # Significant digits, not decimals: a small learning rate must not become 0.
    return json.dumps({key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in row.items()}) + "\n"
