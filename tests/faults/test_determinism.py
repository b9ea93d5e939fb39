"""Same seed, same machine: same bits; other numbers of threads: as close as rounding allows.

Candidate sets are the same on every machine and version: tests/maths/test_candidates.py keeps their hashes
(`test_sets_never_change`, `test_sets_with_missing_truth_never_change`). The long form of what follows: `make soak`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from _sessions import NAMES, bits, different, make_session
from soak.threads import TOLERANCE

from crosel.training.checkpoint import Checkpoint
from crosel.training.session import Session
from crosel.training.trainer import fit, predict_chunks


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def probabilities(session: Session) -> np.ndarray:
    assert session.data.x_test is not None
    return torch.cat([session.method.combine(out) for _, out in predict_chunks(session, session.data.x_test)]).numpy()


def trained(name: str, threads: int, *settings: str, seed: int = 0) -> Session:
    torch.set_num_threads(threads)
    session = make_session(name, *settings, epochs=2, seed=seed)
    fit(session)
    return session


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bits(name: str) -> None:
    first, again, other = trained(name, 1), trained(name, 1), trained(name, 1, seed=1)
    assert different(bits(first), bits(again)) == []
    assert any(n.startswith("method.networks") for n in different(bits(first), bits(other)))


def test_threads_within_tolerance() -> None:
    """One method here, all of them in the soak: threads that wait for each other are slow on a busy machine."""
    wide = ("network.width=16", "train.batch_size=96")  # torch shares work only from some size on
    expected = probabilities(trained("crosel", 1, *wide))
    for threads in (2, 4):
        np.testing.assert_allclose(probabilities(trained("crosel", threads, *wide)), expected, atol=TOLERANCE, rtol=0)


def test_other_draws_in_the_process_change_nothing() -> None:
    """Global random state is neither used nor moved."""
    first = trained("crosel", 1)
    torch.manual_seed(123)
    np.random.seed(5)
    before = torch.random.get_rng_state()
    assert different(bits(first), bits(trained("crosel", 1))) == []
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(("optimiser", "kept"), [("sgd", ["momentum_buffer"]), ("adam", ["exp_avg", "exp_avg_sq"])])
def test_restored_momentum_lies_in_memory_as_the_weights_do(optimiser: str, kept: list[str]) -> None:
    """Files hold plain rows, the networks of images are channels-last: a fused optimiser refuses a mixture."""
    setting = f"train.optimiser={optimiser}"
    session, resumed = trained("crosel", 1, setting), make_session("crosel", setting, epochs=2)
    tensors, state = session.state()
    resumed.restore(Checkpoint({name: t.detach().contiguous() for name, t in tensors.items()}, state))
    layouts = {
        (name, part): (p.stride(), resumed.optimiser.state[p][part].stride())
        for name, p in resumed.method.named_parameters()
        for part in kept
    }
    assert [name for name, (weights, momentum) in layouts.items() if weights != momentum] == []
    assert different(bits(session), bits(resumed)) == []
