"""What the tests of the methods share: a tiny network, random partial labels, and a training loop by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from crosel.methods.base import Batch, Losses, Method, Problem

torch.set_num_threads(1)

INPUTS = 6


class ToyNetwork(nn.Module):
    """Two layers with batch normalisation, in the form that embedding methods ask for."""

    feature_size = 8

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(INPUTS, self.feature_size)
        self.norm = nn.BatchNorm1d(self.feature_size)
        self.last = nn.Linear(self.feature_size, classes)

    def features(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.hidden(x)))

    def classify(self, features: Tensor) -> Tensor:
        return self.last(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def random_sets(n: int, k: int, seed: int = 0) -> Tensor:
    """Candidate sets of every kind: row 0 a singleton, row 1 full, the rest drawn (never empty)."""
    generator = torch.Generator().manual_seed(seed)
    sets = torch.rand(n, k, generator=generator) < 0.4
    sets[torch.arange(n), torch.randint(k, (n,), generator=generator)] = True
    sets[0] = False
    sets[0, k // 2] = True
    sets[1] = True
    return sets


def assert_follows_permutations(weights: Callable[[Tensor, Tensor], Tensor], drawn: Any, random: Any) -> None:
    """Weights of permuted examples and classes are the weights, permuted."""
    logits, candidates = drawn
    classes = random.sample(range(logits.shape[1]), logits.shape[1])
    examples = random.sample(range(len(logits)), len(logits))
    permuted = weights(logits[examples][:, classes], candidates[examples][:, classes])
    torch.testing.assert_close(permuted, weights(logits, candidates)[examples][:, classes])


def make(method: type[Method], n: int = 24, k: int = 5, epochs: int = 4, seed: int = 0, **settings: Any) -> Any:
    """Build a method on `n` random examples; the seed is the network's, the sets are always the same."""
    torch.manual_seed(seed)
    problem = Problem(random_sets(n, k), epochs=epochs)
    return method(method.Settings(**settings), problem, lambda: ToyNetwork(k))


def batches(method: Method, size: int, generator: torch.Generator) -> dict[str, Batch]:
    """Draw one batch for every stream; each view is the example plus noise of its own."""
    data = torch.randn(method.problem.n, INPUTS, generator=torch.Generator().manual_seed(99))
    drawn = {}
    for name, stream in method.streams().items():
        index = torch.randperm(method.problem.n, generator=generator)[:size]
        noise = {view: 0.1 * torch.randn(size, INPUTS, generator=generator) for view in stream.views}
        drawn[name] = Batch(index, {view: data[index] + noise[view] for view in stream.views})
    return drawn


def train(
    method: Method,
    epochs: int,
    steps: int = 3,
    size: int = 8,
    each: Callable[[dict[str, Batch], Losses], None] | None = None,
    after_epoch: Callable[[int], None] | None = None,
    seed: int = 1,
) -> list[float]:
    """The loop in small: the objective of every step. `each` is called between backward pass and step."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    objectives = []
    method.train()
    for epoch in range(1, epochs + 1):
        method.begin_epoch(epoch)
        for _ in range(steps):
            drawn = batches(method, size, generator)
            losses = method.loss(drawn, generator)
            optimiser.zero_grad()
            losses.objective.backward()
            if each is not None:
                each(drawn, losses)
            optimiser.step()
            method.after_step(drawn)
            objectives.append(losses.objective.item())
        method.end_epoch(epoch)
        if after_epoch is not None:
            after_epoch(epoch)
    return objectives


def assert_trains(method: Method, epochs: int = 3) -> None:
    """Losses and reports are finite, every trainable parameter gets a gradient, and every step moves it."""

    def look(drawn: dict[str, Batch], losses: Losses) -> None:
        assert "loss" in losses.report
        for name, value in losses.report.items():
            assert value.shape == (), name
            assert not value.requires_grad, name
            assert torch.isfinite(value), name
        assert torch.equal(losses.report["loss"], losses.objective.detach())
        for name, parameter in method.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None, name
                assert torch.isfinite(parameter.grad).all(), name
                seen[name] = seen.get(name, False) or bool(parameter.grad.abs().sum() > 0)

    seen: dict[str, bool] = {}
    before = {name: p.detach().clone() for name, p in method.named_parameters() if p.requires_grad}
    objectives = train(method, epochs, each=look)
    assert len(set(objectives)) > 1
    # A bias in front of a batch normalisation has no influence, hence no gradient but rounding.
    silent = {name for name, had in seen.items() if not had and name != "networks.0.hidden.bias"}
    assert not silent
    after = dict(method.named_parameters())
    assert all(not torch.equal(before[name], after[name]) for name in before if not name.endswith("hidden.bias"))


def assert_round_trip(method: Method, fresh: Method, tables: tuple[str, ...]) -> None:
    """The state of a trained method carries its tables into a fresh one, which then goes on just the same."""
    train(method, epochs=3)
    state = {name: value.clone() for name, value in method.state_dict().items()}
    for name in tables:
        assert name in state, f"{name} is not saved"
        assert not torch.equal(state[name], fresh.state_dict()[name]), f"{name} never changed: the test sees nothing"
    fresh.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in fresh.state_dict().items())
    assert train(method, epochs=2, seed=5) == train(fresh, epochs=2, seed=5)


def assert_never_waits(method: Method, epoch: int) -> None:
    """Run `loss`, backward and `after_step` on tensors without values, where looking at one is an error.

    What passes has no `.item()`, no branch on a tensor and no shape that depends on data.
    """
    method.begin_epoch(epoch)
    generator = torch.Generator().manual_seed(0)
    drawn = batches(method, 8, generator)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:

        def fake(tensor: Tensor) -> Tensor:
            return mode.from_tensor(tensor)

        for module in method.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fake(buffer)
        empty = {
            name: Batch(fake(batch.index), {view: fake(x) for view, x in batch.views.items()})
            for name, batch in drawn.items()
        }
        method.loss(empty, generator).objective.backward()
        method.after_step(empty)


@st.composite
def logits_and_sets(draw: Any, extreme: float = 20.0) -> tuple[Tensor, Tensor]:
    """Random logits [n, k] and candidate sets that are never empty, hypothesis' own drawing."""
    n, k = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    numbers = st.floats(-extreme, extreme, width=32)
    logits = [[draw(numbers) for _ in range(k)] for _ in range(n)]
    sets = [draw(st.sets(st.integers(0, k - 1), min_size=1)) for _ in range(n)]
    return torch.tensor(logits), torch.tensor([[j in chosen for j in range(k)] for chosen in sets])


def softmax(row: list[float]) -> list[float]:
    """Plain Python, for the slow versions."""
    top = max(row)
    parts = [math.exp(value - top) for value in row]
    return [part / sum(parts) for part in parts]


# Logits of ten thousand with either sign, a singleton right and wrong, full sets.
EXTREME_LOGITS = [
    [1e4, -1e4, 0.0, 0.0],
    [1e4, -1e4, 0.0, 0.0],
    [-1e4, -1e4, -1e4, 1e4],
    [1e4, 1e4, 1e4, 1e4],
    [0.0, 0.0, 0.0, 0.0],
]
EXTREME_SETS = [
    [True, False, False, False],
    [False, True, False, False],
    [True, True, True, False],
    [True, True, True, True],
    [True, True, True, True],
]


def assert_finite_at_extremes(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Value and gradient of a loss(logits, candidates) are finite where probabilities underflow."""
    for dtype in (torch.float32, torch.float64):
        logits = torch.tensor(EXTREME_LOGITS, dtype=dtype, requires_grad=True)
        value = loss(logits, torch.tensor(EXTREME_SETS))
        value.backward()
        assert torch.isfinite(value)
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()
