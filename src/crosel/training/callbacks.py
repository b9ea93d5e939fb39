"""What is called while a run goes on: the protocol, and loggers for TensorBoard and Weights & Biases (both optional).

The run folder's metrics.jsonl stays the truth; a logger that fails in the middle of a run is left out from then on, and
the run goes on. A further one costs a class with `log` and `close`, and a line in `LOGGERS`.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import ConfigDict, Field, TypeAdapter
from typing_extensions import NotRequired, TypedDict

from crosel.errors import UserError
from crosel.utils.files import check_own_folder
from crosel.utils.reading import OF_A_RUN, read_file
from crosel.utils.text import choose_from

if TYPE_CHECKING:
    from crosel.training.session import Session

logger = logging.getLogger(__name__)

Row = dict[str, Any]  # a line of metrics.jsonl
_MOST = 1 << 53  # of a whole number: more is no float


class _Row(TypedDict):
    """What every line has; each method adds numbers of its own."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]
    epoch: Annotated[int, Field(ge=1, le=10**6)]
    seconds: NotRequired[Annotated[float, Field(ge=0, le=1e12)]]


_Value = str | bool | None | Annotated[int, Field(ge=-_MOST, le=_MOST)] | float
_VALUES = TypeAdapter(dict[str, _Value], config=ConfigDict(strict=True))
_FIXED = TypeAdapter(_Row)


def check_row(row: Any) -> Row:
    """A row of metrics from a file; pydantic's error, a ValueError, where it is none."""
    found: Row = _VALUES.validate_python(row)
    _FIXED.validate_python({name: value for name, value in found.items() if name in _Row.__annotations__})
    if any(isinstance(value, float) and 1e30 < abs(value) < math.inf for value in found.values()):
        raise ValueError("a number beyond all that is measured")
    return found


class Callback(Protocol):
    """Told how a run goes: the run folder, the progress line, loggers. Derived from this, each defines only what it has
    a use for."""

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        """Every `train.log_every` steps: the mean loss of the epoch so far."""
        return

    def on_checkpoint(self, session: Session) -> None:
        """The state may be saved: after every epoch, and where a run is stopped inside one."""
        return

    def on_epoch(self, session: Session, row: Row) -> None:
        """After every epoch: its line of metrics."""
        return


class Logger(Protocol):
    def log(self, epoch: int, values: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Scalars under RUN/tensorboard: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, session: Session) -> None:
        check_own_folder(folder / "tensorboard")
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # What a resumed run does again replaces what stands there.
        self._writer = writer(str(folder / "tensorboard"), purge_step=session.progress.epoch + 1)

    def log(self, epoch: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, epoch)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `crosel` (WANDB_PROJECT names another); a resumed run goes on with the same one."""

    def __init__(self, folder: Path, session: Session) -> None:
        check_own_folder(folder / "wandb")
        wandb = importlib.import_module("wandb")
        started = read_file(folder / "environment.json", OF_A_RUN, links=False)  # written once, when the run began
        name = hashlib.sha256(str(folder.resolve()).encode() + started).hexdigest()[:16]
        settings = {"name": folder.resolve().name, "id": name, "resume": "allow", "dir": str(folder)}
        project = None if os.environ.get("WANDB_PROJECT") else "crosel"
        self._run = wandb.init(project=project, config=session.config.model_dump(mode="json"), **settings)

    def log(self, epoch: int, values: dict[str, float]) -> None:
        self._run.log(values, step=epoch)

    def close(self) -> None:
        self._run.finish()


# Each is named as the package that it needs.
LOGGERS: dict[str, Callable[[Path, Session], Logger]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def check_loggers(names: Iterable[str]) -> None:
    """Say what is wrong before a run begins."""
    for name in names:
        if name not in LOGGERS:
            raise UserError(f"unknown logger '{name}'{choose_from(name, LOGGERS)}")
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"--logger {name} needs {name}, which is not installed: pip install {name}") from None


class LoggerCallback(Callback):
    """Hands every epoch's numbers to a logger; whatever it does, the run goes on."""

    def __init__(self, name: str, folder: Path, session: Session) -> None:
        self._name = name
        self._logger: Logger | None = None
        with self._switched_off_by_errors():
            self._logger = LOGGERS[name](folder, session)

    @contextmanager
    def _switched_off_by_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a server that is away, a full disk: their own errors, of any kind
            self._logger = None
            lines = str(error).splitlines()
            reason = lines[0] if lines else type(error).__name__
            logger.warning(f"{self._name} failed ({reason}) and is switched off; metrics.jsonl has everything")

    def on_epoch(self, session: Session, row: Row) -> None:
        if self._logger is not None:
            numbers = {name: float(v) for name, v in row.items() if isinstance(v, int | float) and name != "epoch"}
            with self._switched_off_by_errors():
                self._logger.log(int(row["epoch"]), numbers)

    def close(self) -> None:
        if self._logger is not None:
            with self._switched_off_by_errors():
                self._logger.close()
            self._logger = None
