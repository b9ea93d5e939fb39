"""How much memory a run will take, said before it starts.

What is kept (data, tables, networks) is counted exactly. What a step needs besides is an estimate: the outputs of all
layers for one example, times the examples that a step keeps for its backward pass. What a pass without gradient needs
is seen on two examples. `benchmarks/memory_estimate.py` holds all of it against what a GPU really takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosel.errors import UserError
from crosel.training.optimiser import copies_kept
from crosel.utils.limits import gib, memory_limit

if TYPE_CHECKING:
    from crosel.config import TrainSettings
    from crosel.methods.base import Method
    from crosel.training.session import Session

_WORKSPACE = 2**26  # what cuBLAS and its like take on each CUDA stream
_DEVICE_SHARE = 0.6  # of the free device memory that inputs may take before they stay on the host


@dataclass(frozen=True)
class Budget:
    """Bytes that a run needs beyond what is in use already, by what they are for."""

    data: int  # inputs and candidate sets
    tables: int  # bank, weights, prototypes: whatever the method keeps for the training set
    networks: int  # weights, gradients, what the optimiser keeps, and other copies of them
    libraries: int  # what cuBLAS and its like take for themselves
    per_example: int  # layer outputs that a step keeps for each example of a batch
    per_row: int  # what is alive at once in a pass without gradient, for each row of a chunk
    batch_size: int
    rows: int  # of a chunk
    recorded: bool = False  # steps that are recorded keep their memory to themselves

    @property
    def kept(self) -> int:
        return self.data + self.tables + self.networks + self.libraries

    @property
    def step(self) -> int:
        return self.per_example * self.batch_size

    @property
    def a_pass(self) -> int:
        return self.per_row * self.rows

    @property
    def total(self) -> int:
        return self.kept + (self.step + self.a_pass if self.recorded else max(self.step, self.a_pass))

    def __str__(self) -> str:
        parts = {
            "data": self.data, "tables": self.tables, "networks": self.networks, "libraries": self.libraries,
            "a step": self.step, "a pass": self.a_pass,
        }  # fmt: skip
        return f"{gib(self.total)} ({', '.join(f'{name} {gib(size)}' for name, size in parts.items() if size)})"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; on the host CROSEL_MEMORY_GB, or what system and container leave."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, not in use
        return int(torch.cuda.mem_get_info(device)[0]) + spare
    bounds = [memory_limit()]
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


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks on while tensors are made and dropped; `most` is the largest number of bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch's compiler would be imported only to be kept out of here; that takes as long as importing torch."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        self._alive = [(ref, size) for ref, size in self._alive if not ref.expired()]  # type: ignore[no-untyped-call]
        self._alive += [
            (StorageWeakRef(storage), storage.nbytes())  # type: ignore[no-untyped-call]
            for storage in _storages(out)
            if storage._cdata not in given
        ]
        self.most = max(self.most, sum(size for _, size in self._alive))
        return out


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    """The memory of all tensors in a tree of values; sparse ones and their like have none to show."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
            yield leaf.untyped_storage()


@torch.no_grad()
def layer_outputs(method: Method, shape: tuple[int, ...], device: torch.device) -> tuple[int, int]:
    """For one example through all networks: bytes of all layers' outputs, and the most that is alive at once."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size() // 2)

    leaves = [m for network in method.networks for m in network.modules() if not list(m.children())]
    hooks = [leaf.register_forward_hook(note) for leaf in leaves]
    was_training = method.training
    try:
        method.eval()
        with _Alive() as alive:
            method.outputs(torch.zeros(2, *shape, device=device))  # two: batch norm wants more than one
    finally:
        method.train(was_training)
        for hook in hooks:
            hook.remove()
    return sum(sizes), alive.most // 2


def budget(session: Session) -> Budget:
    """What a run will take on its device. Data are counted even where they are in memory already."""
    method, train, cuda = session.method, session.config.train, session.device.type == "cuda"
    outputs, alive = layer_outputs(method, session.data.shape, session.device)
    if session.bf16:
        outputs, alive = outputs // 2, alive // 2
    on_device = session.train.host is None and cuda  # on a CPU the arrays themselves are used
    tables = sum(b.numel() * b.element_size() for b in method.buffers()) - method.candidates.numel()
    return Budget(
        data=(session.data.x.nbytes if on_device else 0) + method.candidates.numel(),
        tables=tables * (2 if train.bad_batches == "skip" else 1),  # a step begins with a copy, to be put back
        networks=_networks(method, train, session.bf16),
        libraries=libraries(method, session.uses_cuda_graphs) if cuda else 0,
        per_example=int(outputs * type(method).passes),
        per_row=alive,
        batch_size=session.batch_size,
        rows=min(train.eval_batch_size, session.data.n),
        recorded=session.uses_cuda_graphs,
    )


def libraries(method: Method, recorded: bool) -> int:
    """Each network has a stream of its own (`crosel.nn.cuda`); a recording has others."""
    return _WORKSPACE * len(method.networks) * (2 if recorded else 1)


def _networks(method: Method, train: TrainSettings, bf16: bool) -> int:
    """Weights and their copies: gradients, the optimiser's, average, in bfloat16, to be put back after a bad batch."""
    learning, still = (
        sum(p.numel() * p.element_size() for p in method.parameters() if p.requires_grad == learns)
        for learns in (True, False)
    )
    skip, kept = train.bad_batches == "skip", copies_kept(train)
    copies = 2 + kept + (train.ema_decay > 0) + bf16 / 2 + skip * (1 + kept)
    return int(learning * copies) + still * (1 + skip)


def check_budget(session: Session) -> Budget:
    """Refuse a run that cannot fit, with an estimate and what to change; return the estimate."""
    needed, device = budget(session), session.device
    there = sum(t.numel() * t.element_size() for t in (*session.method.parameters(), *session.method.buffers()))
    if device.type == "cuda" and session.train.host is None:
        there += session.data.x.nbytes
    free = free_memory(device) + there  # what the session holds already is part of the estimate
    if needed.total > free:
        where = "GPU memory" if device.type == "cuda" else "memory"
        raise UserError(
            f"training would take about {needed} of {where}, but only {gib(free)} are free; {_advice(needed, free)}"
        )
    return needed


def _advice(needed: Budget, free: int) -> str:
    for size, rows in _smaller(needed.batch_size, needed.rows):
        if replace(needed, batch_size=size, rows=rows).total <= free:
            changed = {"batch_size": (size, needed.batch_size), "eval_batch_size": (rows, needed.rows)}
            return "try" + "".join(f" --set train.{name}={now}" for name, (now, was) in changed.items() if now != was)
    if needed.total - needed.data <= free:
        return "try --set train.data_on=host, which keeps the inputs in host memory"
    return "use a smaller network (network.width), fewer examples or classes, or a machine with more memory"


def _smaller(size: int, rows: int) -> Iterator[tuple[int, int]]:
    """Sizes of batches and of chunks to try, those first that change the least."""
    yield from ((size, rows >> i) for i in range(1, rows.bit_length()))
    while size > 2:
        size //= 2
        yield size, rows
        yield size, min(rows, size)
