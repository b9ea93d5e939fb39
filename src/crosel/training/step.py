"""One step of training: views, losses, backward pass, optimiser. On CUDA it is captured once and replayed.

A small network spends its time waiting for kernels to be launched. A captured step (CUDA graph) is launched as a
whole: the same kernels, the same arithmetic, the same random stream, without Python in between.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from crosel.methods.base import Batch, Losses, Method, Stream
from crosel.nn.casts import SharedCasts
from crosel.nn.cuda import capture
from crosel.training.devices import compute_context, deterministic_cudnn
from crosel.training.divergence import FINITE_STEPS, SKIPPED_BATCHES, Rollback, accumulate, isfinite
from crosel.training.session import Session
from crosel.utils.out_of_memory import free_frames, is_out_of_memory

logger = logging.getLogger(__name__)

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
        self._updating = False  # whether weights may have moved in this step

    def __call__(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], lr: float) -> None:
        self.optimiser.set_lr(lr)
        raw = self.session.train.fetch(self.session.progress.step)
        while True:
            self._updating = False
            try:
                self._run(streams, index, raw)
            except (MemoryError, RuntimeError) as error:
                if not self._can_halve(error):
                    raise
                free_frames(error)
            else:
                return
            self._halve()

    def _run(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> None:
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

    def _can_halve(self, error: BaseException) -> bool:
        """Whether the step can be tried again in smaller parts: only while no weight has moved. What batch norm and
        the method's tables took from the attempt stays."""
        session = self.session
        wanted = session.config.train.out_of_memory == "halve" and session.world.size == 1  # other ranks would wait
        most = session.batch_size // 2  # of a single example batch norm has no variance
        return wanted and not self._updating and 2 * session.progress.parts <= most and is_out_of_memory(error)

    def _halve(self) -> None:
        progress, batch = self.session.progress, self.session.batch_size
        progress.parts *= 2
        self._signature = self._graph = None
        self._index, self._raw = {}, {}
        self._zero_grad()
        if self.session.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            f"out of memory with {-(-2 * batch // progress.parts)} examples at once: each step is computed in "
            f"{progress.parts} parts from now on, whose gradients are added up; batch norm and MixUp see a part as "
            "their batch, so numbers differ from those with more memory (train.out_of_memory=stop ends the run)"
        )

    def _capture(self, streams: Mapping[str, Stream]) -> Any:
        self._zero_grad()
        return capture(lambda: self._step(streams, self._index, self._raw), self.session.generator)

    def _step(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> None:
        session, parts = self.session, self.session.progress.parts
        rollback = Rollback(session) if session.config.train.bad_batches == "skip" else None
        if parts == 1:
            batches, losses = self._losses(streams, index, raw)
            self._zero_grad()
            seen, objective, losses_report = [batches], losses.objective, losses.report
            learns = self._backward(losses.objective)
        else:
            seen, objective, losses_report, learns = self._accumulate(streams, index, raw)
        report = session.world.reduce_gradients(self._gradients, losses_report, session.batch_size)
        self._updating = True
        if learns:
            self.optimiser.step()
        with torch.no_grad(), compute_context(session.config, session.device):
            for batches in seen:
                session.method.after_step(batches)
        good = self._report(objective, report, rollback)
        if session.ema:
            session.ema.update(good)

    def _losses(
        self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]
    ) -> tuple[dict[str, Batch], Losses]:
        session = self.session
        with torch.no_grad():
            batches = session.train.batches(index, streams, session.generator, raw)
        with compute_context(session.config, session.device), self.casts or nullcontext():
            return batches, session.method.loss(batches, session.generator)

    def _backward(self, objective: Tensor) -> bool:
        """Add the gradients of a loss; False where nothing is selected and there is no co-mix, so nothing to learn."""
        if not objective.requires_grad:
            return False
        with deterministic_cudnn(self.session.device):
            self.session.world.scale_loss(objective, self.session.batch_size).backward()  # type: ignore[no-untyped-call]
        if self.casts:
            self.casts.accumulate_gradients()
        return True

    def _accumulate(
        self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]
    ) -> tuple[list[dict[str, Batch]], Tensor, dict[str, Tensor], bool]:
        """The step in parts, each counted by its share of the batch: batches, loss, report, and whether any learns."""
        parts, seen, learns, objective = self.session.progress.parts, [], False, torch.zeros(())
        report: dict[str, Tensor] = {}
        keeps = type(self.session.method).after_step is not Method.after_step
        self._zero_grad()
        split = [{name: t.tensor_split(parts) for name, t in tensors.items()} for tensors in (index, raw)]
        for part in range(parts):
            own, images = ({name: pieces[part] for name, pieces in tensors.items()} for tensors in split)
            batches, losses = self._losses(streams, own, images)
            share = len(next(iter(own.values()))) / self.session.batch_size if own else 1 / parts
            learns |= self._backward(losses.objective * share)
            objective = losses.objective.detach() * share + objective.to(losses.objective.device)
            for name, value in losses.report.items():
                report[name] = report[name] + value * share if name in report else value * share
            if keeps:
                seen.append(batches)
        return seen, objective, report, learns

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
