"""Everything of a run that lives in memory, and how it is saved and restored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crosel.config import RunConfig
from crosel.data.dataset import Dataset
from crosel.errors import UserError
from crosel.methods.base import Method
from crosel.nn.cuda import GraphedForward
from crosel.training import devices
from crosel.training.batches import Normaliser, TrainingTensors
from crosel.training.checkpoint import Checkpoint, add_prefix, check_compatible, mismatch, strip_prefix
from crosel.training.ema import EmaWeights
from crosel.training.optimiser import Optimiser, optimiser_state, restore_optimiser
from crosel.utils.distributed import SINGLE_PROCESS, World
from crosel.utils.text import one_line


@dataclass
class Progress:
    """How far a run has come. `rows` are the lines of metrics.jsonl."""

    epoch: int = 0  # epochs finished
    step: int = 0  # steps done of the epoch under way
    rows: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)  # losses added up over the epoch under way, on the device
    seconds: float = 0.0  # spent in the epoch under way before an interruption
    parts: int = 1  # in which a step is computed, since it ran out of memory

    def end_epoch(self, row: dict[str, Any]) -> None:
        self.epoch, self.step, self.seconds = self.epoch + 1, 0, 0.0
        for total in self.sums.values():
            total.zero_()  # in place: a recorded step goes on adding to the same tensors
        self.rows.append(row)


@dataclass
class Session:
    """A run in memory: data and method on the device, the optimiser, and how far training has come."""

    config: RunConfig
    data: Dataset
    device: torch.device
    method: Method
    normalise: Normaliser
    train: TrainingTensors
    generator: torch.Generator
    steps: int  # of an epoch
    batch_size: int  # of each stream; over all ranks
    progress: Progress = field(default_factory=Progress)
    epoch_indices: dict[str, Tensor] = field(default_factory=dict)  # the examples of every step of the epoch under way
    epoch_start: Tensor | None = None  # the generator's state when the epoch under way began
    world: World = SINGLE_PROCESS  # the ranks that share the work
    whole_tables: dict[str, Tensor] = field(default_factory=dict)  # on rank 0, while callbacks may save the state

    @cached_property
    def optimiser(self) -> Optimiser:
        """Created on first use: prediction needs no optimiser state."""
        return Optimiser(self.method, self.config.train, self.device)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether steps and passes are recorded once and replayed (CUDA graphs)."""
        # With several ranks a step holds messages, which are sent as they come; checkpointing asks for random states.
        wanted = self.config.train.cuda_graphs and not self.config.network.checkpointing
        return self.device.type == "cuda" and wanted and self.world.size == 1

    @property
    def bf16(self) -> bool:
        return devices.uses_bf16(self.config, self.device)

    @cached_property
    def forward(self) -> GraphedForward:
        """Logits [v, rows, k] of raw inputs on the device. The method is in evaluation mode when it is called."""
        # No reference to `self`: the cycle would keep the session's memory until the next garbage collection.
        config, device, method, normalise = self.config, self.device, self.method, self.normalise

        def run(x: Tensor) -> Tensor:
            with devices.compute_context(config, device):
                return method.outputs(normalise(x)).float()

        return GraphedForward(run, self.config.train.eval_batch_size, self.uses_cuda_graphs)

    @cached_property
    def ema(self) -> EmaWeights | None:
        decay = self.config.train.ema_decay
        return EmaWeights(self.method.networks, decay, self.device) if decay else None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, with the EMA weights if there are any."""
        self.method.eval()
        with self.ema.swapped_in() if self.ema else nullcontext():
            yield

    def batch_norm_statistics(self) -> Iterator[list[Tensor]]:
        """Running statistics of batch norm, which each rank takes from its own rows: the method's, and the EMA's.

        Separately: how a sum over ranks is rounded depends on what else is in the message, and an EMA must not change
        training.
        """
        for tensors in (dict(self.method.named_buffers()), self._ema_state()):
            yield [t for name, t in tensors.items() if name.rpartition(".")[2] in ("running_mean", "running_var")]

    def _ema_state(self) -> dict[str, Tensor]:
        """The EMA weights, if there are any, by their names in a checkpoint."""
        return add_prefix("average", self.ema.state_dict()) if self.ema else {}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes that tie a checkpoint to the data and the candidate sets of its run."""
        assert self.data.candidates is not None
        sets = hashlib.sha256(np.packbits(self.data.candidates).tobytes()).hexdigest()[:16]
        found = {"data": self.data.fingerprint, "candidates": sets}
        if self.method.log_weights is not None:
            assert self.data.weights is not None
            found["weights of candidates"] = hashlib.sha256(np.ascontiguousarray(self.data.weights).data).hexdigest()[
                :16
            ]
        return found

    @contextmanager
    def tables_gathered(self) -> Iterator[None]:
        """While it lasts, rank 0 can tell the state of all ranks. All of them call this."""
        self.whole_tables = self.method.gather_tables()
        try:
            yield
        finally:
            self.whole_tables = {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and all else as JSON."""
        p = self.progress
        tensors = {
            **add_prefix("method", {**self.method.state_dict(), **self.whole_tables}),
            **add_prefix("normalise", self.normalise.state_dict()),
            **optimiser_state(self.optimiser, self.method),
            **self._ema_state(),
            **add_prefix("sums", p.sums if p.step else {}),
            "generator": self.generator.get_state(),
        }
        if p.step and self.epoch_start is not None:
            tensors["generator_at_epoch_start"] = self.epoch_start
        state = {
            "epoch": p.epoch, "step": p.step, "rows": p.rows, "seconds": p.seconds,
            "device": self.device.type, **self.fingerprints, **({"parts": p.parts} if p.parts > 1 else {}),
        }  # fmt: skip
        return tensors, state

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """All that prediction needs of a checkpoint, and the method's tables."""
        load_tensors(self.method, self.method.own_rows(strip_prefix("method", tensors)))
        load_tensors(self.normalise, strip_prefix("normalise", tensors))
        if self.ema:
            self.ema.load_state_dict(strip_prefix("average", tensors))

    def restore(self, saved: Checkpoint) -> None:
        """Go back to a saved state, or say why it does not belong to this run."""
        for what, ours in self.fingerprints.items():
            if saved.state[what] != ours:
                raise UserError(
                    f"the {what} differ from those at the start of this run; nothing was changed. "
                    "Restore the original files, for every process of the run"
                )
        self.load_weights(saved.tensors)
        restore_optimiser(self.optimiser, self.method, saved.tensors)
        step, seconds = saved.state["step"], saved.state["seconds"]
        if saved.state["device"] == self.device.type:
            try:
                self.generator.set_state(saved.tensors["generator"])
            except (RuntimeError, TypeError):
                raise UserError(
                    "the checkpoint's random state does not fit this version of torch; continue with the version that "
                    "the run's environment.json names"
                ) from None
            self.epoch_start = saved.tensors.get("generator_at_epoch_start")
        else:  # another kind of device has another kind of generator: fresh draws, and the epoch begins anew
            self.generator.manual_seed(self.config.seed + 7919 * (saved.state["epoch"] + 1))
            step, seconds = 0, 0.0
        sums = strip_prefix("sums", saved.tensors) if step else {}
        self.progress = Progress(
            saved.state["epoch"], step, saved.state["rows"],
            {name: value.to(self.device) for name, value in sums.items()}, seconds, saved.state.get("parts", 1),
        )  # fmt: skip


def load_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        module.load_state_dict(tensors)
        return
    except RuntimeError as error:
        reason = one_line(error)
    check_compatible(tensors, module.state_dict())
    raise mismatch(reason)
