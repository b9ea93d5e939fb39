"""The optimiser of a run, and what it keeps for each parameter: momentum, and with Adam squares and a count of steps.

Pretrained layers that are fine-tuned have a smaller learning rate than the rest (`train.body_lr`).

All state exists from the start: fused SGD fails if some parameters have momentum and others get their first gradient
late, and state that exists can be rolled back after a bad step and restored in place, in the layout of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from crosel.errors import UserError
from crosel.nn.fine_tuning import FineTuned
from crosel.training.checkpoint import check_compatible

if TYPE_CHECKING:
    from crosel.config import TrainSettings


# torch's names for what is kept, and those in a checkpoint
_CHECKPOINT_NAMES = {"momentum_buffer": "momentum", "exp_avg": "momentum", "exp_avg_sq": "squares", "step": "steps"}


class Optimiser:
    """SGD, Adam or AdamW by torch's functional forms: its optimiser classes import torch's compiler, which would take
    as long as importing torch itself. With Muon, convolutions follow its rule and all else follows SGD."""

    def __init__(self, module: nn.Module, settings: TrainSettings, device: torch.device) -> None:
        self.settings = settings
        self.parameters: list[Tensor] = [p for p in module.parameters() if p.requires_grad]
        bodies = (network.body for network in module.modules() if isinstance(network, FineTuned))
        self._pretrained = {p for body in bodies for p in body.parameters()}
        self.state = {p: _initial_state(p, settings) for p in self.parameters}
        uses_muon = settings.optimiser == "muon"
        # Not a pretrained layer: its batch norm keeps old statistics, so the length of its weights matters.
        self._by_muon = {p for p in self.parameters if uses_muon and suits_muon(p) and p not in self._pretrained}
        if uses_muon and not self._by_muon:
            raise UserError(
                "train.optimiser=muon is for convolutions larger than 1x1 that are not pretrained, of which this "
                "network has none; use sgd, adam or adamw"
            )
        self._cuda = device.type == "cuda"
        # On a CPU a fused optimiser takes parameter, gradient and momentum as flat memory, unseen; autograd lays a
        # gradient out like its parameter only where that has no gaps.
        self.fused = self._cuda or all(
            p.is_contiguous() or (p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last))
            for p in self.parameters
        )
        # A learning rate on the device can change without a new recording of the step.
        self._lr: Any = torch.tensor(settings.lr, device=device) if self._cuda else settings.lr

    def set_lr(self, lr: float) -> None:
        if isinstance(self._lr, Tensor):
            self._lr.fill_(lr)
        else:
            self._lr = lr

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters that have a gradient."""
        moved = [p for p in self.parameters if p.grad is not None]
        self._move([p for p in moved if p not in self._pretrained], self._lr)
        if pretrained := [p for p in moved if p in self._pretrained]:
            self._move(pretrained, self._lr * self.settings.body_lr)

    def _move(self, moved: list[Tensor], lr: Any) -> None:
        momentum, decay, optimiser = self.settings.momentum, self.settings.weight_decay, self.settings.optimiser
        turned = [p for p in moved if p in self._by_muon]
        moved = [p for p in moved if p not in self._by_muon]
        gradients = [p.grad for p in moved if p.grad is not None]
        if turned:
            muon_(
                turned, [p.grad for p in turned if p.grad is not None], self._states("momentum_buffer", turned),
                step=lr * (self.settings.muon_lr / self.settings.lr), momentum=momentum,
            )  # fmt: skip
        if optimiser in ("adam", "adamw"):
            means, squares, steps = (self._states(name, moved) for name in ("exp_avg", "exp_avg_sq", "step"))
            (adam if optimiser == "adam" else adamw)(
                moved, gradients, means, squares, [], steps, fused=self.fused, capturable=self._cuda, amsgrad=False,
                beta1=momentum, beta2=0.999, lr=lr, weight_decay=decay, eps=1e-8, maximize=False,
            )  # fmt: skip
        else:
            sgd(
                moved, gradients, [*self._states("momentum_buffer", moved)] if momentum else [], fused=self.fused,
                weight_decay=decay, momentum=momentum, lr=lr, dampening=0.0, nesterov=self.settings.nesterov,
                maximize=False,
            )  # fmt: skip

    def _states(self, name: str, parameters: list[Tensor]) -> list[Tensor]:
        return [self.state[p][name] for p in parameters]


def _initial_state(p: Tensor, settings: TrainSettings) -> dict[str, Tensor]:
    """The state of a parameter, by torch's names."""
    if settings.optimiser in ("adam", "adamw"):
        moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return {"step": torch.zeros((), device=p.device), **moments}
    keeps = settings.momentum or settings.optimiser == "muon"
    return {"momentum_buffer": torch.zeros_like(p)} if keeps else {}


def optimiser_state(optimiser: Optimiser, module: nn.Module) -> dict[str, Tensor]:
    """By parameter name, as in `momentum.networks.0.stem.weight`: independent of how torch numbers its state."""
    return {
        f"{_CHECKPOINT_NAMES[theirs]}.{name}": tensor
        for name, p in module.named_parameters()
        for theirs, tensor in optimiser.state.get(p, {}).items()
    }


def restore_optimiser(optimiser: Optimiser, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    state = optimiser_state(optimiser, module)
    check_compatible({name: tensors[name] for name in state if name in tensors}, state)
    for name, now in state.items():
        now.copy_(tensors[name])


# --- muon -----------------------------------------------------------------------------------------------------------
# Muon: momentum whose direction is made orthogonal, layer by layer (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).
#
# Convolutions that batch norm follows do not care for the length of their weights. So a step turns them by a share of
# that length, and the length stays: there is no weight decay to choose, and one rate fits layers of every size.

# Of the polynomial a x + b x³ + c x⁵ that takes singular values towards 1, five times over.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_TINY = 1e-30  # so that a gradient of zeros gives a step of zeros


def suits_muon(p: Tensor) -> bool:
    """Whether it is the weight of a convolution that sees neighbours."""
    return p.ndim == 4 and p.shape[2] * p.shape[3] > 1


def orthogonalise(matrices: Tensor) -> Tensor:
    """Of matrices U S Vᵀ [..., m, n]: nearly U Vᵀ, by Newton-Schulz iterations, which are only products of matrices."""
    a, b, c = _COEFFICIENTS
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / _length(wide)
    x = x.bfloat16() if x.is_cuda else x
    for _ in range(_ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    x = x.to(matrices.dtype)
    return x.mT if wide is not matrices else x


def muon_(
    weights: list[Tensor], gradients: list[Tensor], momenta: list[Tensor], step: Tensor | float, momentum: float
) -> None:
    """Move weights in place: each turns by `step` times its length, with Nesterov momentum, and keeps its length."""
    torch._foreach_mul_(momenta, momentum)
    torch._foreach_add_(momenta, gradients)
    directions = torch._foreach_add(gradients, momenta, alpha=momentum)
    by_shape: dict[tuple[int, int], list[int]] = {}
    for i, p in enumerate(weights):
        by_shape.setdefault((p.shape[0], p[0].numel()), []).append(i)
    for members in by_shape.values():  # layers of one shape at once
        w = torch.stack([weights[i].flatten(1) for i in members])
        turned = orthogonalise(torch.stack([directions[i].flatten(1) for i in members]))
        moved = w - step * _length(w) / _length(turned) * turned
        moved *= _length(w) / _length(moved)
        for i, new in zip(members, moved, strict=True):
            weights[i].copy_(new.view_as(weights[i]))


def _length(matrices: Tensor) -> Tensor:
    length: Tensor = torch.linalg.matrix_norm(matrices, keepdim=True)
    return length.clamp(min=_TINY)
