"""Muon: momentum whose direction is made orthogonal, layer by layer (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon).

Convolutions that batch norm follows do not care for the length of their weights. So a step turns them by a share of
that length, and the length stays: there is no weight decay to choose, and one rate fits layers of every size.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
