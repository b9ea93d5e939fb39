"""What the fused optimiser asks for: parameters without gaps, since it takes them, their gradients and momentum as flat
memory; and momentum for all of them."""

from __future__ import annotations

import pytest
import torch
from _sessions import make_session, small_data
from torch import Tensor, nn

from crosel.training.build import build_session
from crosel.training.trainer import fit


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
    assert plain.optimiser.fused
    assert not gaps.optimiser.fused

    class Dense(Gaps):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(self.weight.detach().clone(memory_format=torch.contiguous_format))

    dense = build_session(plain.config, data, plain.device, Dense)
    assert dense.optimiser.fused
    fit(gaps), fit(dense)
    torch.testing.assert_close(gaps.method.networks[0].weight, dense.method.networks[0].weight)


class Sleeper(nn.Module):
    """A network with a branch that is not used at first, as with stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.later, self.seen = nn.Linear(64, 10), nn.Linear(64, 10), 0

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        self.seen += self.training
        return self.always(x) + self.later(x) if self.seen > 2 else self.always(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_parameters_may_get_their_first_gradient_late(optimiser: str) -> None:
    plain, data = make_session("cc", f"train.optimiser={optimiser}", epochs=1), small_data()
    session = build_session(plain.config, data, plain.device, Sleeper)
    assert session.optimiser.fused
    before = session.method.networks[0].later.weight.detach().clone()
    fit(session)
    assert not torch.equal(before, session.method.networks[0].later.weight), "it was used in the third step"
