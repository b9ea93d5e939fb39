"""An exponential moving average (EMA) of each network's weights over the steps (`train.ema_decay`; off by default).

It predicts in place of the weights that are trained. The bank is filled by these: it lives on how they change. Its
batch-norm statistics are taken from plain training images: the average of those of trained weights does not fit it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from crosel.training.checkpoint import add_prefix, check_compatible


class EmaWeights:
    """ema <- ema + (live - ema) · max(1 - decay, 1 / steps so far), for weights and batch-norm statistics."""

    def __init__(self, networks: nn.Module, decay: float, device: torch.device) -> None:
        self.decay = decay
        named = {n: t for n, t in networks.state_dict().items() if t.is_floating_point()}
        self.names, self.live = list(named), list(named.values())
        self.averaged = [t.clone() for t in self.live]
        self._swapped = False
        self._weight = torch.ones((), device=device)  # on the device: it changes without a new recording of the step

    def begin_epoch(self, steps_done: int) -> None:
        """At first the average is a plain mean; the starting weights soon count for nothing."""
        self._weight.fill_(max(1 - self.decay, 1 / (steps_done + 1)))

    def update(self, counts: Tensor | None = None) -> None:
        """Take in the weights as they are now, if the step `counts` (a bool on the device)."""
        away = torch._foreach_sub(self.live, self.averaged)
        torch._foreach_mul_(away, self._weight if counts is None else self._weight * counts)
        torch._foreach_add_(self.averaged, away)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put the average where the networks' own weights are; nested blocks do nothing more."""
        if self._swapped:
            yield
            return
        self._swap()
        self._swapped = True
        try:
            yield
        finally:
            self._swap()
            self._swapped = False

    def _swap(self) -> None:
        for live, averaged in zip(self.live, self.averaged, strict=True):
            live_values = live.clone()
            live.copy_(averaged)
            averaged.copy_(live_values)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.averaged, strict=True))

    def load_state_dict(self, tensors: dict[str, Tensor]) -> None:
        check_compatible(add_prefix("average", tensors), add_prefix("average", self.state_dict()))
        for name, averaged in self.state_dict().items():
            averaged.copy_(tensors[name])


def spread_rows(n: int, count: int) -> Tensor:
    """`count` of n rows, none twice before all have come. Any run of them is spread evenly over all n.

    So each run has its share of every class, whether rows are sorted by class or classes alternate: a step of n divided
    by the golden ratio avoids both patterns, and a step coprime to n reaches every row.
    """
    step = round(n * (math.sqrt(5) - 1) / 2)
    while math.gcd(step, n) > 1:
        step += 1
    return torch.arange(count) * step % n


@torch.no_grad()
def recalibrate_batch_norm(
    networks: nn.Module, batches: Iterable[Tensor], run: Callable[[Tensor], object]
) -> list[Tensor]:
    """Replace batch norm's running statistics by their mean over `batches`, in place, and return them.

    All else stays in evaluation mode (dropout would draw random numbers), and so does batch norm that a network keeps
    out of training mode by itself. Without batch norm, no batch is made.
    """
    networks.train()
    norms = [m for m in networks.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    networks.eval()
    if not norms:
        return []
    momenta = [norm.momentum for norm in norms]
    statistics = [s for norm in norms for s in (norm.running_mean, norm.running_var) if s is not None]
    counts = [(c, c.clone()) for c in (norm.num_batches_tracked for norm in norms) if c is not None]
    for norm in norms:
        norm.train()
    try:
        for count, batch in enumerate(batches, 1):
            for norm in norms:
                norm.momentum = 1 / count  # the first batch replaces what was there; then a plain mean
            run(batch)
    finally:
        networks.eval()
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for counted, before in counts:  # of batches that were trained on; with momentum None the next weighs by it
            counted.copy_(before)
    return statistics
