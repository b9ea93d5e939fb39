"""Training inputs that stay in the host's memory, for data larger than the device's.

Only the rows of a step travel. They are gathered into page-locked memory, from where the device copies them while it is
still busy with the step before; two buffers a stream take turns, so that none is overwritten before it was copied.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class HostRows:
    def __init__(self, x: Tensor, device: torch.device) -> None:
        self.x, self.device = x, device
        self.cuda = device.type == "cuda"
        self._order: dict[str, Tensor] = {}
        self._buffers: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}

    def begin_epoch(self, order: Mapping[str, Tensor]) -> None:
        """Take the positions [steps, batch] of every stream: the one wait for the device in an epoch."""
        self._order = {name: table.cpu() for name, table in order.items()}

    def fetch(self, step: int) -> dict[str, Tensor]:
        """The raw examples of a step, on the device."""
        return {name: self._copy((name, step % 2), table[step]) for name, table in self._order.items()}

    def _copy(self, key: tuple[str, int], index: Tensor) -> Tensor:
        buffer, copied = self._buffers.get(key, (None, None))
        if buffer is None or len(buffer) != len(index):
            buffer = torch.empty(len(index), *self.x.shape[1:], dtype=self.x.dtype, pin_memory=self.cuda)
            copied = torch.cuda.Event() if self.cuda else None  # type: ignore[no-untyped-call]
        elif copied is not None:
            copied.synchronize()
        torch.index_select(self.x, 0, index, out=buffer)
        there = buffer.to(self.device, non_blocking=True)
        if copied is not None:
            copied.record()
        self._buffers[key] = (buffer, copied)
        return there
