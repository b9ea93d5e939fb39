"""One step of training: views, losses, backward pass, optimiser. On CUDA it is captured once and replayed.

A small network spends its time waiting for kernels to be launched. A captured step (CUDA graph) is launched as a
whole: the same kernels, the same arithmetic, the same random stream, without Python in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from crosel.methods.base import Stream
from crosel.nn.casts import SharedCasts
from crosel.nn.cuda import capture
from crosel.training.devices import compute_context, deterministic_cudnn
from crosel.training.divergence import FINITE_STEPS, SKIPPED_BATCHES, Rollback, accumulate, isfinite
from crosel.training.session import Session

_EAGER_STEPS = 3  # real steps before the capture: they create the sums, and kernels are compiled and chosen


class TrainStep:
    """Runs steps, eagerly or by replaying a CUDA graph. A new phase, or other streams, need a new capture."""

    def __init__(self, session: Session) -> None:
        self.session, self.optimiser = session, session.optimiser  # made now: its copy to the device is waited for
        self.uses_cuda_graphs = session.uses_cuda_graphs
        self.casts = SharedCasts(session.method) if session.bf16 else None
        self._signature: Any = None
        self._eager_steps_left = 0
        self._graph: Any = None
        self._index: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}

    def __call__(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], lr: float) -> None:
        self.optimiser.set_lr(lr)
        raw = self.session.train.fetch(self.session.progress.step)
        if not self.uses_cuda_graphs:
            self._step(streams, index, raw)
            return
        signature = (self.session.method.phase, tuple((name, s.views) for name, s in streams.items()))
        if signature != self._signature:
            self._signature, self._graph, self._eager_steps_left = signature, None, _EAGER_STEPS
        if self._eager_steps_left:
            self._eager_steps_left -= 1
            self._step(streams, index, raw)
            return
        if self._graph is None:
            self._index = {name: i.clone() for name, i in index.items()}
            self._raw = {name: x.clone() for name, x in raw.items()}
            self._graph = self._capture(streams)
        for name, i in index.items():
            self._index[name].copy_(i)
        for name, x in raw.items():
            self._raw[name].copy_(x)
        self._graph.replay()

    def _capture(self, streams: Mapping[str, Stream]) -> Any:
        self._zero_grad()
        return capture(lambda: self._step(streams, self._index, self._raw), self.session.generator)

    def _step(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> None:
        session = self.session
        rollback = Rollback(session) if session.config.train.bad_batches == "skip" else None
        with torch.no_grad():
            batches = session.train.batches(index, streams, session.generator, raw)
        with compute_context(session.config, session.device), self.casts or nullcontext():
            losses = session.method.loss(batches, session.generator)
        self._zero_grad()
        learns = losses.objective.requires_grad  # nothing selected and no co-mix: nothing to learn from in this step
        if learns:
            with deterministic_cudnn(session.device):
                session.world.scale_loss(losses.objective, session.batch_size).backward()  # type: ignore[no-untyped-call]
            if self.casts:
                self.casts.accumulate_gradients()
        report = session.world.reduce_gradients(self._gradients, losses.report, session.batch_size)
        if learns:
            self.optimiser.step()
        with torch.no_grad(), compute_context(session.config, session.device):
            session.method.after_step(batches)
        good = self._report(losses.objective, report, rollback)
        if session.ema:
            session.ema.update(good)

    def _zero_grad(self) -> None:
        for p in self.optimiser.parameters:
            p.grad = None

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.optimiser.parameters if p.grad is not None]

    def _report(self, objective: Tensor, report: Mapping[str, Tensor], rollback: Rollback | None) -> Tensor | None:
        """Add up the reported losses; undo a bad step. Returns a bool on the device: whether the step counts."""
        sums = self.session.progress.sums
        good = rollback.restore_unless_finite(objective) if rollback else None
        for name, value in report.items():
            accumulate(sums, name, value if good is None else torch.where(good, value, torch.zeros_like(value)))
        if good is not None:
            accumulate(sums, SKIPPED_BATCHES, ~good)
        elif "loss" in sums:  # one value that is not finite makes the sum so for good
            accumulate(sums, FINITE_STEPS, isfinite(sums["loss"]))
        return good
