"""One step of training: views, losses, backward pass, optimiser. On CUDA it is captured once and replayed.

A small network spends its time waiting for kernels to be launched. A captured step (CUDA graph) is launched as a
whole: the same kernels, the same arithmetic, the same random stream, without Python in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from crosel.errors import Diverged
from crosel.methods.base import Batch, Losses, Method, MethodSettings, Stream
from crosel.nn.casts import SharedCasts
from crosel.nn.cuda import capture, free_frames, is_out_of_memory
from crosel.training.devices import compute_context, deterministic_cudnn
from crosel.training.optimiser import optimiser_state
from crosel.training.session import Session
from crosel.utils.text import some_of

logger = logging.getLogger(__name__)

_EAGER_STEPS = 3  # real steps before the capture: they create the sums, and kernels are compiled and chosen


class TrainStep:
    """Runs steps, eagerly or by replaying a CUDA graph. A new phase, other streams or sizes need a new capture."""

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
                if not self._can_halve(error, index):
                    raise
                free_frames(error)
            else:
                return
            self._halve()

    def _run(self, streams: Mapping[str, Stream], index: Mapping[str, Tensor], raw: Mapping[str, Tensor]) -> None:
        if not self.uses_cuda_graphs:
            self._step(streams, index, raw)
            return
        signature = (self.session.method.phase, tuple((name, s.views, len(index[name])) for name, s in streams.items()))
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

    def _can_halve(self, error: BaseException, index: Mapping[str, Tensor]) -> bool:
        """Whether the step can be tried again in smaller parts: only while no weight has moved. What batch norm and
        the method's tables took from the attempt stays."""
        session = self.session
        wanted = session.config.train.out_of_memory == "halve" and session.world.size == 1  # other ranks would wait
        most = min(map(len, index.values()), default=session.batch_size) // 2  # batch norm: one has no variance
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
        parts, seen, learns = self.session.progress.parts, [], False
        objective = torch.zeros((), device=self.session.device)
        report: dict[str, Tensor] = {}
        keeps = type(self.session.method).after_step is not Method.after_step
        self._zero_grad()
        split = [{name: t.tensor_split(parts) for name, t in tensors.items()} for tensors in (index, raw)]
        for part in range(parts):
            own, images = ({name: pieces[part] for name, pieces in tensors.items()} for tensors in split)
            batches, losses = self._losses(streams, own, images)
            share = next((len(own[name]) / len(index[name]) for name in own), 1 / parts)
            learns |= self._backward(losses.objective * share)
            objective = objective + losses.objective.detach() * share
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


# --- losses and weights that are not finite -------------------------------------------------------------------------
# They are found on the device, so that no step has to wait for the host.
#
# `train.bad_batches` says what happens then. `stop`: a count on the device names the first bad step when the loop next
# reads the loss, and the run ends with its last good checkpoint. `skip`: the step leaves no trace but a count;
# weights, what the optimiser keeps and every table of the method are as they were before it.

FINITE_STEPS = "good_steps"  # in `Progress.sums`: steps before the first loss that is not finite
SKIPPED_BATCHES = "skipped_batches"  # in `Progress.sums` and in metrics.jsonl: steps that were undone
_SHOWN_IDS = 5
_OUTLIER = 1000.0  # times the largest value of the batch's median example
_UNUSUAL = 10.0  # times the default of a method's setting, or its part


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """One bool on the device: whether every value of the floating-point tensors is finite. By the extremes, of which
    NaN is one: no copy of a large table."""
    extremes = [torch.stack(t.aminmax()) for t in tensors if t.is_floating_point() and t.numel()]
    return torch.stack([torch.isfinite(pair).all() for pair in extremes]).all()


def isfinite(value: Tensor) -> Tensor:
    """A bool on the device. In two operations: `torch.isfinite` takes four, and this happens in every step."""
    return value * 0 == 0


def accumulate(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    """Add in place: a recorded step keeps adding to the same tensors."""
    sums[name] = sums[name].add_(value) if name in sums else value.detach().float().clone()


class Rollback:
    """A copy of all that a step changes, restored on the device if the step turns out bad."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.of_method = [(t, t.detach().clone()) for t in session.method.state_dict().values()]
        self.of_optimiser = [(t, t.clone()) for t in optimiser_state(session.optimiser, session.method).values()]

    @torch.no_grad()
    def restore_unless_finite(self, objective: Tensor) -> Tensor:
        """Restore everything if the loss or the new state is not finite. Returns a bool on the device."""
        good = torch.isfinite(objective.detach()) & all_finite(t for t, _ in self.of_method)
        good = self.session.world.all_ranks(good)
        for now, before in (*self.of_method, *self.of_optimiser):
            torch.where(good, now, before, out=now)
        return good


def mean_losses(session: Session, epoch: int) -> dict[str, float | int]:
    """Reported losses averaged over the steps that count, and how many did not."""
    steps = session.steps
    sums = {name: float(total) for name, total in session.progress.sums.items() if name != FINITE_STEPS}
    skipped = sums.pop(SKIPPED_BATCHES, None)
    if skipped is None:
        return {name: total / steps for name, total in sums.items()}
    if skipped >= steps:
        raise Diverged(
            f"none of the {steps} batches of epoch {epoch} had a finite loss: all were skipped; the last checkpoint is "
            f"intact. Likely cause: {_likely_cause(session, _batch_rows(session, 0))}"
        )
    return {**{name: total / (steps - skipped) for name, total in sums.items()}, SKIPPED_BATCHES: int(skipped)}


def divergence_error(session: Session, epoch: int, what: str, step: int | None = None) -> Diverged:
    """The end of a run: the step (the first bad one unless given), the examples of its batch, and a likely cause."""
    if step is None:
        count = session.progress.sums.get(FINITE_STEPS)
        step = session.progress.step - 1 if count is None else min(int(count), session.progress.step - 1)
    rows = _batch_rows(session, step)
    ids = [session.data.example_id(int(row)) for row in rows]
    saved = "the last checkpoint is intact" if epoch > 1 else "no epoch has been saved yet: choose another --out"
    error = Diverged(
        f"{what} at step {step + 1} of {session.steps} of epoch {epoch}; {saved}. Likely cause: "
        f"{_likely_cause(session, rows)}; or skip such batches (--set train.bad_batches=skip). "
        f"Examples in the batch: {some_of(ids, _SHOWN_IDS)}"
    )
    error.ids = tuple(ids)
    return error


def _batch_rows(session: Session, step: int) -> Tensor:
    """Positions of all examples that a step of the epoch under way looked at, each once."""
    streams = [table[step] for table in session.epoch_indices.values()]
    return torch.unique(torch.cat(streams)) if streams else torch.zeros(0, dtype=torch.int64)


@torch.no_grad()
def _likely_cause(session: Session, rows: Tensor) -> str:
    if len(rows):
        # Raw values: normalised ones hide an outlier, which inflates its own scale.
        largest = session.train.rows(rows).abs().flatten(1).amax(dim=1).float()
        worst = int(largest.argmax())
        if float(largest[worst]) > _OUTLIER * max(float(largest.median()), 1.0):
            name = session.data.example_id(int(rows[worst]))
            return f"extreme values in example {name}; fix or drop it"
    lr, ramp = session.config.train.lr, session.config.train.lr_ramp
    far = "".join(f"{line}, or " for line in _unusual_settings(session.config.method))
    return f"{far}a learning rate that is too high; lower train.lr ({lr:g})" + ("" if ramp else " or set train.lr_ramp")


def _unusual_settings(settings: MethodSettings) -> list[str]:
    """Weights, temperatures and the like, far from the values with which the method is known to work."""
    lines = []
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.default
        if not isinstance(value, float) or not isinstance(default, int | float) or 0 in (value, default):
            continue  # 0 switches something off
        if not default / _UNUSUAL <= value <= default * _UNUSUAL:
            lines.append(f"method.{name}={value:g}, far from its default {default:g}")
    return lines
