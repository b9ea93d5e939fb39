"""Constants of the views: made once on the host, kept on every device they were asked for."""

from __future__ import annotations

import torch
from torch import Tensor


class PerDevice:
    def __init__(self, *tensors: Tensor) -> None:
        self._host = tensors
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def on(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self._on:
            self._on[device] = tuple(_copy(t, device) for t in self._host)
        return self._on[device]


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    """First asked for in the middle of an epoch: a copy that nobody waits for needs pinned memory."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
