"""Weights cast once a step: the same bits as autocast's casts in every pass, in fewer operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.data.dataset import make_dataset
from crosel.methods import methods
from crosel.nn.casts import Conv2d, Linear, SharedCasts, shared_cast
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.step import TrainStep

pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _bfloat16_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without oneDNN: not every CPU has the instructions that it takes for bfloat16."""
    monkeypatch.setattr("crosel.training.devices.uses_bf16", lambda config, _: config.train.bf16)
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _session(method: str, device: str = "cpu", **train: Any) -> Session:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8), rng.integers(0, 4, 24)
    data = make_dataset(x, y=y, classes=4)
    settings: dict[str, Any] = {"name": method} | ({"warmup": 1} if method == "crosel" else {})
    values = {
        "source": "made", "method": settings, "network": {"name": "wrn-10-1"},
        "train": {"epochs": 3, "batch_size": 8, "bf16": True, "lr": 0.05, **train},
    }  # fmt: skip
    data = draw_candidates(data, "uniform:q=0.5", 0)
    return build_session(resolve(build_config(settings=[], values=values), data), data, torch.device(device))


def _train(session: Session, shared: bool) -> tuple[list[Tensor], Counter[str]]:
    """Three steps (CroSel: with all but one selected): the state after them, and the operations of the last."""
    method = session.method
    selected = getattr(method, "selected", None)
    if selected is not None:
        selected.fill_(True)
        selected[:, 0] = False
        method.labels.zero_()
    method.begin_epoch(2)
    method.train()
    stepper, streams = TrainStep(session), method.streams()
    if not shared:
        stepper.casts = None
    index = session.train.draw_epoch_indices(streams, 3, session.batch_size, session.generator)
    for step in range(3):
        with Counting() as counting:
            stepper(streams, {name: table[step] for name, table in index.items()}, 0.05)
    return [t.clone() for t in [*method.state_dict().values(), *session.progress.sums.values()]], counting.calls


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_learns_the_same_bits(method: str, device: str) -> None:
    session = _session(method, device)
    ours, few = _train(session, shared=True)
    autocasts, many = _train(_session(method, device), shared=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, autocasts, strict=True))
    shared = len(SharedCasts(session.method)._casts)  # one pass at least, there and back
    assert shared
    assert few["_to_copy.default"] <= many["_to_copy.default"] - 2 * shared


def test_a_skipped_step_and_an_average_leave_no_stale_cast() -> None:
    train = {"bad_batches": "skip", "ema_decay": 0.5}
    ours, _ = _train(_session("crosel", **train), shared=True)
    autocasts, _ = _train(_session("crosel", **train), shared=False)
    assert all(torch.equal(a, b) for a, b in zip(ours, autocasts, strict=True))


def test_without_bf16_nothing_is_shared() -> None:
    assert TrainStep(_session("cc", bf16=False)).casts is None


class Two(nn.Module):
    """A layer used in every pass, one used in some, one never, and a weight that no layer of ours holds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.some, self.never = Conv2d(1, 4, 3), Linear(4, 3), Linear(4, 3)
        self.free = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.double()

    def forward(self, x: Tensor, some: bool) -> Tensor:
        h = self.conv(x).mean(dim=(2, 3))
        return (self.some(h) * shared_cast(self.free).float() if some else h).square().sum()


def _gradients(shared: bool) -> tuple[Two, list[Tensor | None]]:
    torch.manual_seed(0)
    net = Two()
    passes = [(torch.randn(5, 1, 6, 6), i != 1) for i in range(3)]
    casts = SharedCasts(net, torch.float32)
    assert len(casts._casts) == 6

    def objective() -> Tensor:
        with torch.no_grad():
            assert not net(passes[0][0], True).requires_grad
        return torch.stack([net(x, some) for x, some in passes]).sum()

    if shared:
        with casts:
            loss = objective()
        loss.backward()
        casts.accumulate_gradients()
        casts.accumulate_gradients()  # nothing is left to add
    else:
        ahead = [m.register_forward_pre_hook(_cast) for m in (net.conv, net.some)]
        loss = objective()
        loss.backward()
        assert ahead
    return net, [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def _cast(layer: nn.Module, _: Any) -> None:
    """Cast as autocast does: in each pass, differentiably."""
    for name, p in layer._parameters.items():
        assert p is not None
        layer.__dict__[name] = p.float()


def test_gradients_of_several_passes_add_up_in_full_precision() -> None:
    net, ours = _gradients(shared=True)
    _, each = _gradients(shared=False)
    for (name, p), a, b in zip(net.named_parameters(), ours, each, strict=True):
        assert (a is None) == (b is None) == name.startswith("never"), name
        if a is not None and b is not None:
            assert a.dtype == p.dtype == torch.float64
            assert torch.equal(a, b), name


def test_weights_changed_between_steps_are_seen() -> None:
    layer = Linear(2, 2, bias=False).double()
    casts, x = SharedCasts(layer, torch.float32), torch.ones(1, 2)
    for value in (1.0, 3.0):
        with torch.no_grad():
            layer.weight.fill_(value)
        with casts:
            assert layer(x).tolist() == [[2 * value, 2 * value]]


def test_what_is_not_ours_stays_as_it_is() -> None:
    frozen = Linear(2, 2).requires_grad_(False)
    with SharedCasts(frozen, torch.float64):
        assert shared_cast(frozen.weight) is frozen.weight
    learns = Linear(512, 512)
    with SharedCasts(learns, torch.float64):
        assert shared_cast(learns.weight).dtype == shared_cast(learns.bias).dtype == torch.float64
    plain = nn.Linear(2, 2)
    casts = SharedCasts(plain)
    with casts:
        loss = plain(torch.ones(1, 2)).sum()
    loss.backward()
    casts.accumulate_gradients()
    assert plain.bias.grad is not None
    assert plain.bias.grad.tolist() == [1.0, 1.0]
    assert shared_cast(plain.bias) is plain.bias
