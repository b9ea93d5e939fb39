"""Weights in bfloat16, cast once a step for all passes of it; their gradients are cast back and added up at once.

    shared = SharedCasts(method)
    with shared:                     # casts every weight now
        loss = …                     # Conv2d, Linear and the fused batch norm ask for weights: `shared_cast(parameter)`
    loss.backward()
    shared.accumulate_gradients()    # puts the gradients where the optimiser looks for them

Autocast casts each weight in each pass, casts each of its gradients back, and autograd adds the passes up one by one:
in CroSel's step hundreds of kernels that compute next to nothing. Here it is a dozen for lists of tensors, with the
same bits: gradients are added in float32, the last pass first, as autograd does.

Every use is a leaf of its own in autograd's graph, so that the gradients of two passes never meet in bfloat16. The
casts live as long as the object, and each step fills them anew: whatever changed the weights in between is seen.
Weights must not change inside the block, so those without gradients (PiCO's key network, which moves in the middle of
a step) are left to autocast, like those of layers other than these.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_active = threading.local()


def shared_cast(parameter: Tensor) -> Tensor:
    """What a pass computes with where the parameter is meant: its cast, or itself where nothing is shared."""
    shared: SharedCasts | None = getattr(_active, "value", None)
    return parameter if shared is None else shared.use(parameter)


class Conv2d(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else shared_cast(self.bias)
        out: Tensor = self._conv_forward(x, shared_cast(self.weight), bias)
        return out


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, shared_cast(self.weight), None if self.bias is None else shared_cast(self.bias))


class SharedCasts:
    def __init__(self, method: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        layers = (module for module in method.modules() if isinstance(module, Conv2d | Linear))
        wanted = [p for layer in layers for p in layer.parameters(recurse=False) if p.requires_grad]
        self._casts: dict[Tensor, Tensor] = {p: torch.empty_like(p, dtype=dtype, requires_grad=False) for p in wanted}
        self._uses: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        if self._casts:
            with torch.no_grad():
                torch._foreach_copy_(list(self._casts.values()), list(self._casts))
        self._uses.clear()
        _active.value = self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        _active.value = None
        if failed:  # no gradients will come; a step that ran out of memory lets go of all it holds
            self._uses.clear()

    def use(self, parameter: Tensor) -> Tensor:
        value = self._casts.get(parameter, parameter)
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return value
        leaf = value.detach().requires_grad_()
        self._uses.append((parameter, leaf))
        return leaf

    @torch.no_grad()
    def accumulate_gradients(self) -> None:
        """Add the gradients of all uses to those of the parameters."""
        parts: dict[Tensor, list[Tensor]] = {}
        for p, grad in _in_parameter_dtype(
            [(p, leaf.grad) for p, leaf in reversed(self._uses) if leaf.grad is not None]
        ):
            parts.setdefault(p, [] if p.grad is None else [p.grad]).append(grad)
        self._uses.clear()
        for p, grads in parts.items():
            p.grad = grads[0]
        for number in range(1, max(map(len, parts.values()), default=0)):
            more = [grads for grads in parts.values() if len(grads) > number]
            torch._foreach_add_([grads[0] for grads in more], [grads[number] for grads in more])


def _in_parameter_dtype(found: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Parameters and gradients; each gradient in its parameter's precision."""
    # Like the gradient, not like the parameter: a list is copied by one kernel only where the strides agree.
    wide = {i: torch.empty_like(g, dtype=p.dtype) for i, (p, g) in enumerate(found) if g.dtype != p.dtype}
    if wide:
        torch._foreach_copy_(list(wide.values()), [found[i][1] for i in wide])
    return [(p, wide.get(i, g)) for i, (p, g) in enumerate(found)]
