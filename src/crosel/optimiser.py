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

# torch's names, and those of a checkpoint
_KEPT = {"momentum_buffer": "momentum", "exp_avg": "momentum", "exp_avg_sq": "squares", "step": "steps"}


def make_optimiser(module: nn.Module, settings: TrainSettings, device: torch.device) -> torch.optim.Optimizer:
    cuda = device.type == "cuda"
    parameters = [p for p in module.parameters() if p.requires_grad]
    # On a CPU a fused optimiser takes parameter, gradient and momentum as flat memory, unseen; autograd lays a gradient
    # out like its parameter only where that has no gaps.
    fused = cuda or all(p.is_contiguous() or _channels_last(p) for p in parameters)
    # A learning rate on the device can change without a new recording of the step.
    lr = torch.tensor(settings.lr, device=device) if cuda else settings.lr
    if settings.optimiser == "adam":
        adam = torch.optim.Adam(
            parameters, lr, (settings.momentum, 0.999), weight_decay=settings.weight_decay, fused=fused, capturable=cuda
        )
        for p in parameters:
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            adam.state[p] = {"step": torch.zeros((), device=p.device), **moments}
        return adam
    sgd = torch.optim.SGD(
        parameters, lr, settings.momentum, nesterov=settings.nesterov, weight_decay=settings.weight_decay, fused=fused
    )
    if settings.momentum:
        for p in parameters:
            sgd.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return sgd


def copies_kept(settings: TrainSettings) -> int:
    """How many times the size of its parameters an optimiser keeps."""
    return 2 if settings.optimiser == "adam" else 1


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
            if tensor is not None:
                yield f"{_KEPT[theirs]}.{name}", tensor


def _channels_last(t: Tensor) -> bool:
    return t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)
