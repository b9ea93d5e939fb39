"""What holds for the memory bank and for selection, whatever a network predicted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import slow
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from crosel.methods.bank import MemoryBank, Selection, label_is_stable

torch.set_num_threads(1)
few = settings(max_examples=60)

GRAINS = 64  # probabilities are multiples of 1/64: sums and comparisons with γ are exact in float32 and in float64
CRITERIA = [c for size in range(4) for c in itertools.combinations((1, 2, 3), size)]
gammas = st.integers(0, GRAINS).map(lambda g: g / GRAINS)


@dataclass(frozen=True)
class History:
    """What one network said in each epoch, oldest first, and the candidate sets."""

    probabilities: np.ndarray  # [epochs, n, k]
    candidates: np.ndarray  # [n, k]

    @property
    def n(self) -> int:
        return self.candidates.shape[0]

    def bank(self, length: int, epochs: slice = slice(None)) -> MemoryBank:
        bank = MemoryBank(length, self.n)
        for entry in self.probabilities[epochs]:
            bank.push(torch.from_numpy(entry))
        return bank

    def select(self, length: int, gamma: float, criteria: tuple[int, ...] = (1, 2, 3)) -> Selection:
        return self.bank(length).select(torch.from_numpy(self.candidates), gamma, criteria)


def make_history(epochs: int, n: int, k: int, seed: int, noise: float) -> History:
    """Every example has a favourite label, and is sure of it to its own degree; noise makes it waver."""
    rng = np.random.default_rng(seed)
    favourite = rng.uniform(0, 6, (n, 1)) * np.eye(k)[rng.integers(k, size=n)]
    logits = favourite + noise * rng.normal(size=(epochs, n, k))
    shares = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    grains = np.floor(shares * GRAINS)
    grains[..., 0] += GRAINS - grains.sum(axis=2)  # the rest goes to class 0, so that each row sums to 1
    candidates = rng.random((n, k)) < 0.5
    candidates[np.arange(n), rng.integers(k, size=n)] = True
    return History((grains / GRAINS).astype(np.float32), candidates)


def histories(min_epochs: int = 1, max_epochs: int = 7) -> st.SearchStrategy[History]:
    return st.builds(
        make_history, st.integers(min_epochs, max_epochs), st.integers(1, 12), st.integers(1, 6),
        st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    )  # fmt: skip


def as_dict(chosen: Selection) -> dict[int, int]:
    return {int(i): int(chosen.labels[i]) for i in chosen.mask.nonzero().flatten()}


def inside(smaller: torch.Tensor, larger: torch.Tensor) -> bool:
    return not bool((smaller & ~larger).any())


def test_histories_are_varied():
    """The properties below are not empty talk: each criterion keeps some examples and drops some."""
    history = make_history(3, 300, 5, seed=1, noise=1.5)
    sizes = {criteria: int(history.select(3, 0.625, criteria).mask.sum()) for criteria in CRITERIA}
    assert sizes[()] == 300
    assert 0 < sizes[1, 2, 3] < min(sizes[1, 2], sizes[1, 3], sizes[2, 3])
    assert all(20 < sizes[(c,)] < 280 for c in (1, 2, 3))


@few
@given(histories(min_epochs=4), st.integers(1, 4), gammas, st.sampled_from(CRITERIA))
@example(make_history(3, 200, 5, seed=2, noise=1.0), 3, 0.75, (1, 2, 3))
def test_compact_bank_equals_full_bank(history, length, gamma, criteria):
    full = history.probabilities[-length:].tolist()
    expected = slow.d_sel(full, history.candidates.tolist(), gamma, criteria)
    assert as_dict(history.select(length, gamma, criteria)) == expected


@few
@given(histories(), st.integers(1, 4), gammas, st.sampled_from([c for c in CRITERIA if 1 in c]))
def test_selection_is_inside_the_candidate_set(history, length, gamma, criteria):
    for i, label in as_dict(history.select(length, gamma, criteria)).items():
        assert history.candidates[i, label]


def test_without_the_first_criterion_selection_may_leave_the_candidate_set():
    history = make_history(3, 200, 5, seed=3, noise=0.3)
    chosen = as_dict(history.select(3, 0.5, (2, 3)))
    assert any(not history.candidates[i, label] for i, label in chosen.items())


@few
@given(histories(), st.integers(1, 4), gammas, gammas, st.sampled_from(CRITERIA))
def test_selection_shrinks_as_gamma_grows(history, length, one, other, criteria):
    low, high = sorted((one, other))
    loose, strict = (history.select(length, gamma, criteria) for gamma in (low, high))
    assert inside(strict.mask, loose.mask)
    assert torch.equal(strict.labels, loose.labels)


def test_gamma_of_one_selects_nothing():
    assert not make_history(3, 200, 5, seed=4, noise=0.0).select(3, 1.0).mask.any()


@few
@given(histories(), st.integers(1, 4), st.integers(0, 3))
def test_stable_selection_shrinks_as_t_grows(history, length, more):
    for criteria in ((2,), (1, 2)):
        shorter, longer = history.select(length, 0, criteria), history.select(length + more, 0, criteria)
        assert inside(longer.mask, shorter.mask)


@few
@given(histories(), st.integers(1, 4), st.integers(0, 3), gammas)
def test_selection_shrinks_as_t_grows_while_confidence_rises(history, length, more, gamma):
    """With β3 the mean goes further back: it can only fall where the network has grown surer, as in training."""
    order = history.probabilities.max(axis=2).argsort(axis=0, kind="stable")
    rising = History(np.take_along_axis(history.probabilities, order[:, :, None], axis=0), history.candidates)
    shorter, longer = rising.select(length, gamma), rising.select(length + more, gamma)
    assert inside(longer.mask, shorter.mask)


def test_confidence_lost_of_late_is_outweighed_by_a_longer_memory():
    """Why the property above needs its condition: this is what Eq. (3) says, not a fault."""
    probabilities = np.array([[[0.0, 1.0]], [[0.125, 0.875]]], dtype=np.float32)
    history = History(probabilities, np.ones((1, 2), dtype=bool))
    assert not history.select(1, 0.9).mask.any()
    assert history.select(2, 0.9).mask.all()


@few
@given(histories(), st.integers(1, 4), gammas, st.sampled_from(CRITERIA), st.randoms(use_true_random=False))
def test_selection_follows_a_permutation_of_the_examples(history, length, gamma, criteria, random):
    order = list(range(history.n))
    random.shuffle(order)
    shuffled = History(history.probabilities[:, order], history.candidates[order])
    before, after = history.select(length, gamma, criteria), shuffled.select(length, gamma, criteria)
    assert torch.equal(after.mask, before.mask[order])
    assert torch.equal(after.labels, before.labels[order])


@few
@given(histories(min_epochs=4), st.integers(1, 4), gammas, st.randoms(use_true_random=False))
def test_selection_follows_a_permutation_of_the_classes(history, length, gamma, random):
    order = list(range(history.candidates.shape[1]))
    random.shuffle(order)
    tied = (history.probabilities == history.probabilities.max(axis=2, keepdims=True)).sum(axis=2).max(axis=0) > 1
    renamed = History(history.probabilities[:, :, order], history.candidates[:, order])
    before, after = history.select(length, gamma), renamed.select(length, gamma)
    clear = torch.from_numpy(~tied)  # which of two equal labels comes first is a matter of order
    assert torch.equal(after.mask[clear], before.mask[clear])
    assert torch.equal(torch.tensor(order)[after.labels[clear]], before.labels[clear])


@few
@given(histories(), st.integers(1, 4))
def test_first_in_first_out(history, length):
    bank = history.bank(length)
    kept = history.probabilities[-length:]
    empty = length - len(kept)
    assert (bank.labels[:empty] == -1).all()
    assert (bank.confidence[:empty] == 0).all()
    assert bank.labels[empty:].tolist() == kept.argmax(axis=2).tolist()
    assert bank.confidence[empty:].tolist() == kept.max(axis=2).tolist()


@few
@given(histories(min_epochs=2), st.integers(1, 4), st.sets(st.integers(1, 11)), st.randoms(use_true_random=False))
def test_chunked_write_equals_push(history, length, cuts, random):
    pushed = history.bank(length)
    written = history.bank(length, slice(None, -1))
    edges = [0, *sorted(c for c in cuts if c < history.n), history.n]
    chunks = [slice(a, b) for a, b in itertools.pairwise(edges)]
    random.shuffle(chunks)
    written.shift()
    for rows in chunks:
        written.write(rows, torch.from_numpy(history.probabilities[-1, rows]))
    assert torch.equal(written.labels, pushed.labels)
    assert torch.equal(written.confidence, pushed.confidence)


@few
@given(histories(), st.integers(1, 8), gammas)
def test_nothing_is_stable_before_t_pushes(history, length, gamma):
    calm = history.probabilities[:1]  # the same prediction again and again
    for epochs in range(1, length + 2):
        chosen = History(calm.repeat(epochs, axis=0), history.candidates).select(length, gamma, (2,))
        assert bool(chosen.mask.all()) == bool(chosen.mask.any()) == (epochs >= length)
    if len(history.probabilities) < length:
        assert not history.select(length, gamma).mask.any()


@pytest.mark.parametrize("criteria", CRITERIA, ids=str)
def test_an_empty_bank_selects_nothing(criteria):
    chosen = MemoryBank(3, 4).select(torch.ones(4, 2, dtype=torch.bool), 0.0, criteria)
    assert not chosen.mask.any()
    assert chosen.labels.tolist() == [-1] * 4


def test_a_row_that_was_not_written_is_not_selected():
    history = make_history(3, 6, 3, seed=5, noise=0.0)
    bank = history.bank(3)
    bank.shift()
    bank.write(slice(0, 4), torch.from_numpy(history.probabilities[-1, :4]))
    for criteria in CRITERIA:
        chosen = bank.select(torch.ones(6, 3, dtype=torch.bool), 0.0, criteria)
        assert chosen.mask.tolist() == [True] * 4 + [False] * 2
    assert (bank.confidence[-1, 4:] == 0).all(), "nothing is left of the entry that was dropped"
    assert not label_is_stable(torch.full((3, 2), -1)).any()


@pytest.mark.parametrize("classes", [2, 10, 1000])
def test_memory_grows_with_t_and_n_alone(classes):
    bank = MemoryBank(3, 50)
    bank.push(torch.full((50, classes), 1 / classes))
    bank.select(torch.ones(50, classes, dtype=torch.bool), 0.5)
    assert sum(b.untyped_storage().nbytes() for b in bank.buffers()) == 3 * 50 * (4 + 4)
    assert set(bank.state_dict()) == {"labels", "confidence"}
    assert not list(bank.parameters())


@few
@given(histories(), st.integers(1, 4), gammas)
def test_a_saved_bank_goes_on_the_same(history, length, gamma):
    bank, other = history.bank(length, slice(None, -1)), MemoryBank(length, history.n)
    other.load_state_dict({name: value.clone() for name, value in bank.state_dict().items()})
    sets = torch.from_numpy(history.candidates)
    for b in (bank, other):
        b.push(torch.from_numpy(history.probabilities[-1]))
    one, two = bank.select(sets, gamma), other.select(sets, gamma)
    assert torch.equal(one.mask, two.mask)
    assert torch.equal(one.labels, two.labels)


def test_selecting_changes_nothing():
    history = make_history(4, 20, 4, seed=6, noise=0.3)
    bank = history.bank(3)
    before = {name: value.clone() for name, value in bank.state_dict().items()}
    chosen = bank.select(torch.from_numpy(history.candidates), 0.5)
    chosen.labels.fill_(7)
    assert all(torch.equal(before[name], value) for name, value in bank.state_dict().items())


def test_a_nan_is_never_selected():
    bank = MemoryBank(1, 1)
    bank.push(torch.tensor([[float("nan"), 0.5]]))
    assert not bank.select(torch.ones(1, 2, dtype=torch.bool), 0.0).mask.any()


SAID = [[0.25, 0.75], [0.5, 0.5]]


@pytest.mark.parametrize(
    "pushed",
    [np.array(SAID), torch.tensor(SAID), torch.tensor(SAID).bfloat16(), torch.tensor(SAID).double().requires_grad_()],
    ids=["array", "float32", "bfloat16", "with a gradient"],
)
def test_what_is_pushed_in_somebody_elses_loop(pushed):
    """Arrays, any precision, outputs that still carry their gradient: the bank keeps numbers alone."""
    bank = MemoryBank(2, 2)
    bank.push(pushed)
    assert bank.labels.tolist() == [[-1, -1], [1, 0]]
    assert bank.confidence.tolist() == [[0, 0], [0.75, 0.5]]
    assert (bank.labels.dtype, bank.confidence.dtype) == (torch.int32, torch.float32)
    assert not bank.confidence.requires_grad
    bank.shift()
    assert bank.labels.tolist() == [[1, 0], [-1, -1]]


@pytest.mark.parametrize("shape", [(4, 2), (5,), (5, 2, 1), (0, 2)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected probabilities of shape \[5, k\]"):
        MemoryBank(2, 5).push(torch.ones(shape))


@pytest.mark.parametrize(("length", "n"), [(0, 3), (3, 0), (-1, 3)])
def test_a_bank_of_nothing_is_refused(length, n):
    with pytest.raises(ValueError, match="at least 1"):
        MemoryBank(length, n)
