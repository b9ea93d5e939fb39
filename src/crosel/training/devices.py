"""What a run computes on, and how: device, precision, kernels that may be used; and advice when memory runs out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from crosel.config import RunConfig
from crosel.errors import UserError
from crosel.nn import fused
from crosel.nn.cuda import free_frames, is_out_of_memory

if TYPE_CHECKING:
    from crosel.training.session import Session

_INPUTS_SHARE = 0.6  # of the free device memory that inputs may take before they stay on the host


def pick_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise UserError(f"unknown device '{name}'; choose from auto, cpu, cuda")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("device 'cuda': torch finds no CUDA device; use --device cpu")
    if name.startswith("cuda:"):
        number, cards = name.removeprefix("cuda:"), torch.cuda.device_count()
        if not number.isdecimal() or int(number) >= cards:
            raise UserError(f"there is no device '{name}'; torch finds {cards}: cuda:0 to cuda:{cards - 1}")
        torch.cuda.set_device(int(number))  # CUDA graphs and the fused kernels use the current card
    return torch.device(name)


def inputs_stay_on_host(setting: str, size: int, device: torch.device) -> bool:
    """Whether training inputs of this many bytes stay in the host's memory (`train.data_on`)."""
    if setting != "auto" or device.type != "cuda":
        return setting == "host"
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, not in use
    return size > _INPUTS_SHARE * (torch.cuda.mem_get_info(device)[0] + reusable)


def computes_in_bf16(device: torch.device) -> bool:
    """What `train.bf16=auto` means. A GPU without units for it would take longer."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def uses_bf16(config: RunConfig, device: torch.device) -> bool:
    """Only on a GPU: few CPUs gain by it, and on some an illegal instruction ends the process."""
    wanted = config.train.bf16
    return device.type == "cuda" and (computes_in_bf16(device) if wanted == "auto" else wanted)


@contextmanager
def compute_context(config: RunConfig, device: torch.device) -> Iterator[None]:
    """The precision of the computation, and the kernels that it may use (only deterministic ones)."""
    # The cache is off: a weight cast under no_grad (the target pass) would be reused, without gradient, in training.
    precision: AbstractContextManager[Any] = nullcontext()
    bf16 = uses_bf16(config, device)
    if bf16 or torch.is_autocast_enabled(device.type):  # a caller's own autocast does not reach in here
        precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)
    with deterministic_cudnn(device), precision, fused.enable(config.train.fused):
        yield


def deterministic_cudnn(device: torch.device) -> AbstractContextManager[None]:
    """cuDNN chooses among convolutions that give the same bits each time, without a search."""
    if device.type != "cuda":  # nothing to choose, and the flags cost more than a small layer
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)


# --- running out of memory ends with one line that says what to change, not with a traceback --------------------------


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
