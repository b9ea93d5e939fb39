"""What holds for co-mix: its targets and its mixing, whatever the logits, the sets and the draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from crosel.methods.crosel import comix_targets, mix, mixing_weight
from crosel.methods.losses import soft_cross_entropy

torch.set_num_threads(1)
few = settings(max_examples=60)

temperatures = st.floats(0.05, 5.0)
seeds = st.integers(0, 2**31)


@st.composite
def logits_and_sets(draw: Any, scale: float = 20.0) -> tuple[Tensor, Tensor]:
    n, k = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    row = st.lists(st.floats(-scale, scale, width=32), min_size=k, max_size=k)
    inside = st.sets(st.integers(0, k - 1), min_size=1)
    logits = torch.tensor([draw(row) for _ in range(n)])
    return logits, torch.tensor([[j in s for j in range(k)] for s in (draw(inside) for _ in range(n))])


@few
@given(logits_and_sets(scale=1e4), temperatures)
def test_targets_are_distributions_on_the_set(drawn, temperature):
    logits, sets = drawn
    p = comix_targets(logits, sets, temperature)
    assert p.shape == logits.shape
    assert (p >= 0).all()
    assert (p[~sets] == 0).all()
    torch.testing.assert_close(p.sum(dim=1), torch.ones(len(p)))
    assert not p.requires_grad


@few
@given(logits_and_sets(), temperatures)
def test_targets_keep_the_order_of_the_candidates(drawn, temperature):
    logits, sets = drawn
    p = comix_targets(logits, sets, temperature)
    for f, target, inside in zip(logits, p, sets, strict=True):
        ranked = target[inside][f[inside].argsort()]
        assert (ranked.diff() >= 0).all()


@few
@given(logits_and_sets(), temperatures, temperatures)
def test_targets_are_sharper_with_a_smaller_temperature(drawn, one, other):
    logits, sets = drawn
    cold, warm = (comix_targets(logits, sets, t) for t in sorted((one, other)))
    assert (cold.amax(dim=1) >= warm.amax(dim=1) - 1e-6).all()
    entropy = torch.special.entr(torch.stack([cold, warm]).double()).sum(dim=2)
    assert (entropy[0] <= entropy[1] + 1e-5).all()


def test_sharpening_is_strict_where_there_is_a_choice():
    logits, sets = torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[True, True, False]])
    tops = [comix_targets(logits, sets, t).max().item() for t in (2.0, 1.0, 0.5, 0.25)]
    assert tops == sorted(set(tops))


@few
@given(logits_and_sets(), temperatures, st.floats(-50, 50, width=32))
def test_targets_ignore_a_shift_and_what_lies_outside(drawn, temperature, shift):
    logits, sets = drawn
    p = comix_targets(logits.double(), sets, temperature)
    elsewhere = torch.where(sets, logits, torch.full_like(logits, shift))
    assert torch.equal(comix_targets(elsewhere.double(), sets, temperature), p)
    torch.testing.assert_close(comix_targets(logits + shift, sets, temperature), p, atol=2e-3, rtol=0)


@few
@given(logits_and_sets(), temperatures, st.randoms(use_true_random=False))
def test_targets_follow_a_permutation_of_classes_and_examples(drawn, temperature, random):
    logits, sets = drawn
    rows, columns = list(range(logits.shape[0])), list(range(logits.shape[1]))
    random.shuffle(rows)
    random.shuffle(columns)
    p = comix_targets(logits, sets, temperature)
    permuted = comix_targets(logits[rows][:, columns], sets[rows][:, columns], temperature)
    torch.testing.assert_close(permuted, p[rows][:, columns])


@few
@given(logits_and_sets(), temperatures, seeds, st.booleans())
def test_mixing_keeps_targets_distributions(drawn, temperature, seed, per_pair):
    logits, sets = drawn
    generator = torch.Generator().manual_seed(seed)
    p = comix_targets(logits, sets, temperature)
    partner = torch.randperm(len(p), generator=generator)
    mixed = mix(p, partner, mixing_weight(0.75, len(p) if per_pair else 1, generator))
    assert (mixed >= 0).all()
    torch.testing.assert_close(mixed.sum(dim=1), torch.ones(len(p)))
    assert (mixed[~(sets | sets[partner])] == 0).all()


@few
@given(st.integers(1, 12), st.sampled_from([(3,), (2, 3, 4)]), seeds)
def test_one_weight_a_step_preserves_the_batch_mean(size, shape, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, *shape, generator=generator, dtype=torch.float64)
    partner = torch.randperm(size, generator=generator)
    mixed = mix(values, partner, mixing_weight(0.75, 1, generator))
    torch.testing.assert_close(mixed.mean(dim=0), values.mean(dim=0))


@few
@given(st.integers(1, 12), seeds, st.booleans())
def test_the_own_example_weighs_more_than_its_partner(size, seed, per_pair):
    """λ' is at least a half: a mixed pair stays nearer to its own example, and between the two."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    partner = torch.randperm(size, generator=generator)
    mixed = mix(values, partner, mixing_weight(0.75, size if per_pair else 1, generator))
    near, far = (mixed - values).norm(dim=1), (mixed - values[partner]).norm(dim=1)
    assert (near <= far + 1e-6).all()
    torch.testing.assert_close(near + far, (values - values[partner]).norm(dim=1))


def test_mixing_with_oneself_or_with_full_weight_changes_nothing():
    values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(mix(values, torch.arange(5), torch.tensor([0.7])), values)
    assert torch.equal(mix(values, torch.tensor([1, 2, 3, 4, 0]), torch.tensor([1.0])), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mixing_keeps_the_dtype(dtype):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight = mixing_weight(0.75, 4, torch.Generator().manual_seed(0))
    assert mix(values, torch.tensor([1, 0, 3, 2]), weight).dtype == dtype


@few
@given(logits_and_sets(), temperatures)
def test_soft_cross_entropy_is_least_at_the_target(drawn, temperature):
    """Gibbs: no other output costs less than the target itself, and there the cost is its entropy."""
    logits, sets = drawn
    p = comix_targets(logits, sets, temperature)
    at_target = soft_cross_entropy(p.clamp_min(1e-30).log(), p)
    assert at_target <= soft_cross_entropy(logits, p) + 1e-4
    torch.testing.assert_close(at_target, torch.special.entr(p).sum(dim=1).mean(), atol=1e-4, rtol=1e-4)
