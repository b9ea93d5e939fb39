"""The optimiser of a run, and what it keeps for each parameter: momentum, and with Adam squares and a count of steps.

All of it exists from the start. SGD's fused form fails where some parameters have momentum and others get their first
gradient late; and what exists can be put back after a bad step, and restored in the weights' own layout, in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.config import TrainSettings

# torch's names for what is kept, and those in a checkpoint
_KEPT = {"momentum_buffer": "momentum", "exp_avg": "momentum", "exp_avg_sq": "squares", "step": "steps"}


def make_optimiser(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    cuda = device.type == "cuda"
    parameters = [p for p in module.parameters() if p.requires_grad]
    # On a CPU a fused optimiser takes parameter, gradient and momentum as flat memory, unseen; autograd lays a gradient
    # out like its parameter only where that has no gaps.
    fused = cuda or all(p.is_contiguous() or _channels_last(p) for p in parameters)
    # A learning rate on the device can change without a new recording of the step.
    lr = torch.tensor(settings.lr, device=device) if cuda else settings.lr
    momentum, decay = settings.momentum, settings.weight_decay
    optimiser: torch.optim.Optimizer
    if settings.optimiser == "adam":
        optimiser = torch.optim.Adam(
            parameters, lr, (momentum, 0.999), weight_decay=decay, fused=fused, capturable=cuda
        )
    else:
        optimiser = torch.optim.SGD(
            parameters, lr, momentum, nesterov=settings.nesterov, weight_decay=decay, fused=fused
        )
    for p in parameters:
        optimiser.state[p] = _at_start(p, settings)
    return optimiser


def _at_start(p: Tensor, settings: TrainSettings) -> dict[str, Tensor]:
    """What is kept for a parameter, by torch's names."""
    if settings.optimiser == "adam":
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return {"step": torch.zeros((), device=p.device), **moments}
    return {"momentum_buffer": torch.zeros_like(p)} if settings.momentum else {}


def copies_kept(settings: TrainSettings) -> int:
    """How many times the size of its parameters an optimiser keeps."""
    return 2 if settings.optimiser == "adam" else int(settings.momentum > 0)


def optimiser_state(optimiser: torch.optim.Optimizer, module: nn.Module) -> dict[str, Tensor]:
    """By parameter name, as in `momentum.networks.0.stem.weight`: independent of how torch numbers its state."""
    return dict(_named(optimiser, module))


def restore_optimiser(optimiser: torch.optim.Optimizer, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    for name, now in _named(optimiser, module):
        if name not in tensors or tensors[name].shape != now.shape:
            what, _, parameter = name.partition(".")
            raise UserError(f"the checkpoint does not fit this configuration: {what} of {parameter}")
        now.copy_(tensors[name])


def _named(optimiser: torch.optim.Optimizer, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, p in module.named_parameters():
        for theirs, tensor in optimiser.state.get(p, {}).items():
            yield f"{_KEPT[theirs]}.{name}", tensor


def _channels_last(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)
