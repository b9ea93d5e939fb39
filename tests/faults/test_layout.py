"""The fused optimiser takes parameter, gradient and momentum as flat memory: their layouts must be the same."""

from __future__ import annotations

import torch
from _sessions import make_session, small_data
from torch import Tensor, nn

from crosel.checkpoint import Checkpoint
from crosel.session import Session, build_session
from crosel.train import fit


def _momentum(session: Session) -> dict[str, Tensor]:
    state = session.optimiser.state
    return {name: state[p]["momentum_buffer"] for name, p in session.method.named_parameters() if p in state}


def test_restored_momentum_lies_like_its_parameter() -> None:
    session = make_session("crosel", epochs=2)
    fit(session)
    tensors, state = session.state()
    files = {name: t.clone().contiguous() for name, t in tensors.items()}  # what a checkpoint's file holds
    again = make_session("crosel", epochs=2)
    again.restore(Checkpoint(files, state))
    saved, restored, parameters = _momentum(session), _momentum(again), dict(again.method.named_parameters())
    assert restored.keys() == saved.keys() == parameters.keys()
    for name, buffer in restored.items():
        assert torch.equal(buffer, saved[name])
        assert buffer.stride() == parameters[name].stride(), name
    images = [p for p in parameters.values() if p.ndim == 4 and p.shape[1] > 1]
    assert any(not p.is_contiguous() for p in images), "channels-last: else nothing was tried"


class Gaps(nn.Module):
    """A network whose weight is every other column of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 128, generator=torch.Generator().manual_seed(0))[:, ::2])

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.weight.T


def test_parameters_with_gaps_learn_as_others_do() -> None:
    plain, data = make_session("cc", epochs=1), small_data()
    gaps = build_session(plain.config, data, plain.device, Gaps)
    assert plain.optimiser.defaults["fused"]
    assert not gaps.optimiser.defaults["fused"]

    class Dense(Gaps):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(self.weight.detach().clone(memory_format=torch.contiguous_format))

    dense = build_session(plain.config, data, plain.device, Dense)
    assert dense.optimiser.defaults["fused"]
    fit(gaps), fit(dense)
    torch.testing.assert_close(gaps.method.networks[0].weight, dense.method.networks[0].weight)
