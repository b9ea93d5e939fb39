"""How much memory a run will take, said before it starts; and one line instead of a traceback when it was too much.

What is kept (data, tables, networks) is counted exactly. What a step needs besides is an estimate: the outputs of all
layers for one example, times the examples that a step keeps for its backward pass.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from crosel.data.limits import memory_bound
from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.methods.base import Method
    from crosel.session import Session

_DEVICE_SHARE = 0.6  # of the free device memory that inputs may take before they stay on the host
# How torch says it in a RuntimeError: on a CPU; in a recording; by cuBLAS and cuDNN, which want memory of their own.
_OUT_OF = ("can't allocate memory", "out of memory", "_ALLOC_FAILED", "unable to find an engine")


@dataclass(frozen=True)
class Budget:
    """Bytes that a run needs beyond what is in use already, by what they are for."""

    data: int  # inputs and candidate sets
    tables: int  # bank, weights, prototypes: whatever the method keeps for the training set
    networks: int  # weights, gradients, momentum, their average
    step: int  # layer outputs of one step, or of a pass without gradient
    per_example: int  # of `step`, for each example of a batch
    batch_size: int

    @property
    def kept(self) -> int:
        return self.data + self.tables + self.networks

    @property
    def total(self) -> int:
        return self.kept + self.step

    def __str__(self) -> str:
        parts = {"data": self.data, "tables": self.tables, "networks": self.networks, "a step": self.step}
        return f"{gib(self.total)} ({', '.join(f'{name} {gib(size)}' for name, size in parts.items())})"


def gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 0.1 * 2**30 else f"{count / 2**20:.1f} MiB"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; on the host CROSEL_MEMORY_GB, or what system and container leave."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, not in use
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    bounds = [memory_bound()]
    if not os.environ.get("CROSEL_MEMORY_GB"):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            bounds.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
        with contextlib.suppress(OSError, ValueError):  # a container has a bound of its own ("max": none)
            group = Path("/sys/fs/cgroup")
            bounds.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(bounds))


def inputs_stay_on_host(setting: str, size: int, device: torch.device) -> bool:
    """Whether training inputs of this many bytes stay in the host's memory (`train.data_on`)."""
    if setting == "auto":
        return device.type == "cuda" and size > _DEVICE_SHARE * free_memory(device)
    return setting == "host"


@torch.no_grad()
def layer_outputs(method: Method, shape: tuple[int, ...], device: torch.device) -> tuple[int, int]:
    """Bytes of all layers' outputs, and of the largest, for one example through all networks."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size() // 2)

    leaves = [m for network in method.networks for m in network.modules() if not list(m.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    was_training = method.training
    try:
        method.eval()
        method.outputs(torch.zeros(2, *shape, device=device))  # two: batch norm wants more than one
    finally:
        method.train(was_training)
        for hook in hooks:
            hook.remove()
    return sum(sizes), max(sizes, default=0)


def budget(session: Session) -> Budget:
    """What a run will take on its device. Data are counted even where they are in memory already."""
    method, train, device = session.method, session.config.train, session.device
    outputs, largest = layer_outputs(method, session.data.shape, device)
    if train.bf16:
        outputs, largest = outputs // 2, largest // 2
    weights = sum(p.numel() * p.element_size() for p in method.parameters())
    copies = 3 + (train.average > 0) + train.bf16 / 2  # weights, gradients, momentum; their average; their casts
    tables = sum(b.numel() * b.element_size() for b in method.buffers()) - method.candidates.numel()
    on_device = session.train.host is None and device.type == "cuda"  # on a CPU the arrays themselves are used
    inputs = session.data.x.nbytes if on_device else 0
    per_example = outputs * type(method).passes
    rows = min(train.eval_batch_size, session.data.n)
    step = max(per_example * session.batch_size, 2 * largest * rows)
    if train.bad_batches == "skip":  # a step begins with copies of what it may have to put back
        copies, tables = copies + 2, 2 * tables
    return Budget(
        inputs + method.candidates.numel(), tables, int(copies * weights), step, per_example, session.batch_size
    )


def check_budget(session: Session) -> Budget:
    """Refuse a run that cannot fit, with an estimate and what to change; return the estimate."""
    needed, device = budget(session), session.device
    there = sum(t.numel() * t.element_size() for t in (*session.method.parameters(), *session.method.buffers()))
    if device.type == "cuda" and session.train.host is None:
        there += session.data.x.nbytes
    free = free_memory(device) + there  # what the session holds already is part of the estimate
    if needed.total > free:
        where = "GPU memory" if device.type == "cuda" else "memory"
        raise UserError(f"training would take about {needed} of {where}, {gib(free)} are free; {_advice(needed, free)}")
    return needed


def _advice(needed: Budget, free: int) -> str:
    size = needed.batch_size
    while size > 2:
        size //= 2
        if replace(needed, step=needed.per_example * size).total <= free:
            passes = needed.step > needed.per_example * needed.batch_size  # those without gradient are too large
            return f"try --set train.batch_size={size}" + (f" --set train.eval_batch_size={size}" if passes else "")
    if needed.total - needed.data <= free:
        return "try --set train.data_on=host, which keeps the inputs out of it"
    return "take a smaller network (network.width), fewer examples or classes, or a machine with more memory"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is about memory, or came up while such an error was under way: a recording that cannot be ended."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF):
        return True
    return error.__context__ is not None and is_out_of_memory(error.__context__)


@dataclass(frozen=True)
class OneLine:
    """Whatever runs out of memory inside a block ends with one line that says what to change. Can be used again."""

    device: torch.device
    doing: str
    remedy: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if not isinstance(error, MemoryError | RuntimeError) or not is_out_of_memory(error):
            return
        _let_go(error)
        where = "GPU memory" if self.device.type == "cuda" else "memory"
        raise UserError(f"out of {where} {self.doing}; {self.remedy}") from None


def _let_go(error: BaseException | None) -> None:
    """Forget the tensors that the ended calls held: who keeps the error shall not keep the memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def in_building(device: torch.device, data_on: str) -> OneLine:
    """While data and networks are put in place, and in whatever else has no batches."""
    host = "try --set train.data_on=host, or " if device.type == "cuda" and data_on != "host" else ""
    return OneLine(device, "for data, networks and tables", f"{host}take a smaller network or fewer examples")


def in_steps(session: Session) -> OneLine:
    return _in_batches(session, "train.batch_size", session.batch_size, "batches")


def in_passes(session: Session) -> OneLine:
    """The passes without gradient at the end of an epoch."""
    rows = min(session.config.train.eval_batch_size, session.data.n)
    return _in_batches(session, "train.eval_batch_size", rows, "chunks")


def _in_batches(session: Session, setting: str, size: int, what: str) -> OneLine:
    smaller = f"try --set {setting}={size // 2}" if size > 2 else "take a smaller network"
    resident = session.device.type == "cuda" and session.train.host is None
    host = " or --set train.data_on=host" if resident else ""
    saved = f"What was saved is good; another {setting} needs another --out"
    return OneLine(session.device, f"with {what} of {size}", f"{smaller}{host}. {saved}")
