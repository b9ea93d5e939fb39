"""Running out of memory ends with one line that says what to change, not with a traceback."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.training.session import Session

# How torch says it in a RuntimeError: on a CPU; in a recording; by cuBLAS and cuDNN, which want memory of their own.
_OUT_OF = ("can't allocate memory", "out of memory", "_ALLOC_FAILED", "unable to find an engine")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is about memory, or was raised while such an error was handled: a capture that cannot be ended."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


@dataclass(frozen=True)
class OutOfMemoryAdvice:
    """Whatever runs out of memory inside a block ends with one line that says what to change. Can be used again."""

    device: torch.device
    doing: str
    remedy: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
            return
        free_frames(error)
        where = "GPU memory" if self.device.type == "cuda" else "memory"
        raise UserError(f"out of {where} {self.doing}; {self.remedy}") from None


def free_frames(error: BaseException | None) -> None:
    """Release the tensors that the failed calls held: keeping the error must not keep the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def advise_while_building(device: torch.device, data_on: str) -> OutOfMemoryAdvice:
    """While data and networks are set up, and wherever else there are no batches."""
    host = "try --set train.data_on=host, or " if device.type == "cuda" and data_on != "host" else ""
    return OutOfMemoryAdvice(device, "for data, networks and tables", f"{host}use a smaller network or fewer examples")


def advise_while_training(session: Session) -> OutOfMemoryAdvice:
    return _in_batches(session, "train.batch_size", session.batch_size, "batches")


def advise_while_evaluating(session: Session) -> OutOfMemoryAdvice:
    """The passes without gradient at the end of an epoch."""
    rows = min(session.config.train.eval_batch_size, session.data.n)
    return _in_batches(session, "train.eval_batch_size", rows, "chunks")


def _in_batches(session: Session, setting: str, size: int, what: str) -> OutOfMemoryAdvice:
    smaller = f"try --set {setting}={size // 2}" if size > 2 else "use a smaller network"
    resident = session.device.type == "cuda" and session.train.host is None
    host = " or --set train.data_on=host" if resident else ""
    if session.config.network.fine_tunes and not session.config.network.checkpointing:
        host += " or --set network.checkpointing=true"
    saved = f"Saved checkpoints are intact; another {setting} needs another --out"
    return OutOfMemoryAdvice(session.device, f"with {what} of {size}", f"{smaller}{host}. {saved}")
