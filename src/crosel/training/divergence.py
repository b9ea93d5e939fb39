"""Losses and weights that are not finite: found on the device, so that no step has to wait for the host.

`train.bad_batches` says what happens then. `stop`: a count on the device names the first bad step when the loop next
reads the loss, and the run ends with its last good checkpoint. `skip`: the step leaves no trace but a count;
weights, what the optimiser keeps and every table of the method are as they were before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from crosel.errors import Diverged
from crosel.training.optimiser import optimiser_state
from crosel.utils.text import some_of

if TYPE_CHECKING:
    from crosel.methods.base import MethodSettings
    from crosel.training.session import Session

FINITE_STEPS = "good_steps"  # in `Progress.sums`: steps before the first loss that is not finite
SKIPPED_BATCHES = "skipped_batches"  # in `Progress.sums` and in metrics.jsonl: steps that were undone
_SHOWN_IDS = 5
_OUTLIER = 1000.0  # times the largest value of the batch's median example
_UNUSUAL = 10.0  # times the default of a method's setting, or its part


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """One bool on the device: whether every value of the floating-point tensors is finite."""
    return torch.stack([torch.isfinite(t).all() for t in tensors if t.is_floating_point()]).all()


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
