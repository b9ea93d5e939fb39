"""Equations (1) to (14) of the paper, each against its slow version; gradients, extremes and limits of the losses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import slow
import torch
from _support import PAPER
from scipy import integrate, stats
from torch import nn

import crosel.methods.crosel as module
from crosel.methods.bank import MemoryBank, confidence_is_high, label_is_candidate, label_is_stable
from crosel.methods.base import Batch, Problem
from crosel.methods.crosel import (
    CroSel,
    CroSelSettings,
    average_outputs,
    comix_targets,
    dynamic_weight,
    mix,
    mixing_weight,
    selected_loss,
    total_loss,
)
from crosel.methods.losses import candidate_probabilities, cc_loss, soft_cross_entropy

torch.set_num_threads(1)

T, N, K = 3, 200, 6
GAMMA = 0.6


def random_sets(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    """Sets of every kind: a singleton, a full one, and drawn ones that are never empty."""
    sets = rng.random((n, k)) < 0.4
    sets[np.arange(n), rng.integers(k, size=n)] = True
    sets[0] = np.eye(k, dtype=bool)[k // 2]
    sets[1] = True
    return sets


@pytest.fixture(scope="module")
def history() -> tuple[np.ndarray, np.ndarray]:
    """A full bank [t, n, k], as the paper keeps it, in which every criterion both holds and fails, and the sets."""
    rng = np.random.default_rng(1)
    favourite = 4.0 * np.eye(K)[rng.integers(K, size=N)]
    logits = favourite + rng.normal(0, 1.6, (T, N, K))
    bank = np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True)
    return bank.astype(np.float32), random_sets(rng, N, K)


def filled(bank: np.ndarray) -> MemoryBank:
    memory = MemoryBank(*bank.shape[:2])
    for entry in bank:
        memory.push(torch.from_numpy(entry))
    return memory


def mixed_verdict(flags: list[bool]) -> bool:
    """Both answers occur, so that comparing them says something."""
    return 0 < sum(flags) < len(flags)


# --- the fourteen equations ---------------------------------------------------------------------------------------


def test_eq_01_label_is_candidate(history):
    bank, sets = history
    expected = slow.beta1(bank, sets)
    assert mixed_verdict(expected)
    newest = torch.from_numpy(bank[-1]).argmax(dim=1)
    assert label_is_candidate(newest, torch.from_numpy(sets)).tolist() == expected


def test_eq_02_label_is_stable(history):
    bank, _ = history
    expected = slow.beta2(bank)
    assert mixed_verdict(expected)
    assert label_is_stable(torch.from_numpy(bank).argmax(dim=2)).tolist() == expected


def test_eq_03_confidence_is_high(history):
    bank, _ = history
    expected = slow.beta3(bank, GAMMA)
    assert mixed_verdict(expected)
    assert confidence_is_high(torch.from_numpy(bank).amax(dim=2), GAMMA).tolist() == expected


def test_eq_03_threshold_itself_is_not_above_it():
    mean_is_three_quarters = torch.tensor([[0.5], [1.0]])
    assert not confidence_is_high(mean_is_three_quarters, 0.75).item()
    assert confidence_is_high(mean_is_three_quarters, 0.75 - 1e-6).item()


@pytest.mark.parametrize("criteria", [c for size in range(4) for c in itertools.combinations((1, 2, 3), size)], ids=str)
def test_eq_04_selected_set(history, criteria):
    bank, sets = history
    expected = slow.d_sel(bank, sets, GAMMA, criteria)
    assert 0 < len(expected) < N or not criteria
    chosen = filled(bank).select(torch.from_numpy(sets), GAMMA, criteria)
    found = {int(i): int(chosen.labels[i]) for i in chosen.mask.nonzero().flatten()}
    assert found == expected


def test_eq_04_takes_all_criteria_unless_told_otherwise(history):
    bank, sets = history
    chosen = filled(bank).select(torch.from_numpy(sets), GAMMA)
    assert chosen.mask.nonzero().flatten().tolist() == list(slow.d_sel(bank, sets, GAMMA, (1, 2, 3)))


def test_eq_05_selected_label_loss():
    rng = np.random.default_rng(2)
    logits, labels = rng.normal(0, 3, (9, K)), rng.integers(K, size=9)
    value = selected_loss(torch.from_numpy(logits), torch.from_numpy(labels))
    assert value.item() == pytest.approx(slow.selected_label_loss(logits.tolist(), labels.tolist()), rel=1e-12)


def test_eq_06_average_output():
    rng = np.random.default_rng(3)
    first, second = rng.normal(0, 3, (2, 9, K))
    expected = [slow.softmax(row) for row in slow.average_output(first.tolist(), second.tolist())]
    outputs = torch.from_numpy(np.stack([first, second]))
    np.testing.assert_allclose(average_outputs(outputs).numpy(), expected, rtol=2e-5, atol=1e-7)


def test_eq_06_average_of_probabilities_is_another_thing():
    rng = np.random.default_rng(3)
    first, second = rng.normal(0, 3, (2, 9, K))
    expected = slow.average_output([slow.softmax(r) for r in first], [slow.softmax(r) for r in second])
    outputs = torch.from_numpy(np.stack([first, second]))
    found = average_outputs(outputs, "probabilities").numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)
    assert np.abs(found - average_outputs(outputs).numpy()).max() > 0.05


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_eq_07_pseudo_label(temperature):
    rng = np.random.default_rng(4)
    logits, sets = rng.normal(0, 3, (40, K)), random_sets(rng, 40, K)
    expected = [slow.pseudo_label(row, inside, temperature) for row, inside in zip(logits, sets, strict=True)]
    found = comix_targets(torch.from_numpy(logits), torch.from_numpy(sets), temperature)
    np.testing.assert_allclose(found.numpy(), expected, rtol=3e-5, atol=1e-7)
    as_buffer = comix_targets(torch.from_numpy(logits), torch.from_numpy(sets), torch.tensor(temperature))
    assert torch.equal(found, as_buffer)


def folded_cdf(alpha: float):
    """Distribution of max(λ, 1-λ) for λ ~ Beta(α, α), from scipy."""
    beta = stats.beta(alpha, alpha)
    return lambda x: beta.cdf(x) - beta.cdf(1 - x)


@pytest.mark.parametrize("alpha", [0.4, 0.75, 1.0, 4.0])
def test_eq_08_mixing_weight_follows_beta(alpha):
    weights = mixing_weight(alpha, 20_000, torch.Generator().manual_seed(8)).double().numpy()
    assert stats.kstest(weights, folded_cdf(alpha)).pvalue > 0.01
    # The test has teeth: a neighbouring α is refused.
    assert stats.kstest(weights, folded_cdf(1.3 * alpha)).pvalue < 1e-6


def test_eq_08_mixing_weight_follows_beta_for_small_alpha():
    weights = mixing_weight(0.01, 20_000, torch.Generator().manual_seed(8)).double().numpy()
    # In single precision 1-λ' is never between 0 and 6e-8; what matters is how often the mix is about even.
    expected = folded_cdf(0.01)(0.6)
    assert np.mean(weights < 0.6) == pytest.approx(expected, abs=5 * math.sqrt(expected / 20_000))


def test_eq_08_mixing_weight_follows_its_generator():
    def draw(seed: int) -> torch.Tensor:
        return mixing_weight(0.75, 5, torch.Generator().manual_seed(seed))

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    state = torch.get_rng_state()
    draw(1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("alpha", [0.1, 0.75, 4.0])
def test_eq_09_larger_share(alpha):
    weights = mixing_weight(alpha, 20_000, torch.Generator().manual_seed(9)).double()
    assert weights.shape == (20_000,)
    assert [slow.larger_share(w) for w in weights.tolist()] == weights.tolist()
    assert weights.min() >= 0.5
    assert weights.max() <= 1.0
    beta = stats.beta(alpha, alpha)
    mean = 2 * integrate.quad(lambda x: x * beta.pdf(x), 0.5, 1, limit=200)[0]
    assert weights.mean().item() == pytest.approx(mean, abs=4 * weights.std().item() / math.sqrt(20_000))


@pytest.mark.parametrize("per_pair", [False, True])
def test_eq_10_mixed_inputs(per_pair):
    rng = np.random.default_rng(10)
    x, partner = rng.normal(size=(7, 2, 3, 4)), rng.permutation(7)
    weight = rng.uniform(0.5, 1, 7 if per_pair else 1)
    found = mix(torch.from_numpy(x), torch.from_numpy(partner), torch.from_numpy(weight))
    assert found.shape == x.shape
    for i in range(7):
        expected = slow.mixed(x[i].ravel(), x[partner[i]].ravel(), weight[i if per_pair else 0])
        np.testing.assert_allclose(found[i].numpy().ravel(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("per_pair", [False, True])
def test_eq_11_mixed_targets(per_pair):
    rng = np.random.default_rng(11)
    p, partner = rng.dirichlet(np.ones(K), 7), rng.permutation(7)
    weight = rng.uniform(0.5, 1, 7 if per_pair else 1)
    found = mix(torch.from_numpy(p), torch.from_numpy(partner), torch.from_numpy(weight))
    expected = [slow.mixed(p[i], p[partner[i]], weight[i if per_pair else 0]) for i in range(7)]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12)


def test_eq_12_consistency_loss():
    rng = np.random.default_rng(12)
    logits, targets = rng.normal(0, 3, (8, K)), rng.dirichlet(np.ones(K), 8)
    value = soft_cross_entropy(torch.from_numpy(logits), torch.from_numpy(targets))
    assert value.item() == pytest.approx(slow.soft_cross_entropy(logits, targets), rel=1e-12)


def linear_crosel(sets: np.ndarray, **settings) -> CroSel:
    """CroSel on linear networks (no batch statistics), in float64 as far as its arithmetic allows."""
    torch.manual_seed(0)
    problem = Problem(torch.from_numpy(sets), epochs=10)
    return CroSel(
        CroSelSettings(**{"warmup": 2, **PAPER, **settings}), problem, lambda: nn.Linear(4, sets.shape[1])
    ).double()


def slow_forward(network: nn.Linear, x: np.ndarray) -> np.ndarray:
    return x @ network.weight.detach().numpy().T + network.bias.detach().numpy()


@pytest.mark.parametrize("per_pair", [False, True])
def test_eq_12_whole_of_co_mix(per_pair, monkeypatch):
    """Eqs. (7) to (12) in a row, from two views to L_cr, with only the random draws taken from the code."""
    rng = np.random.default_rng(13)
    size = 5
    sets = random_sets(rng, size, K)
    method = linear_crosel(sets, temperature=0.5, mix_per_pair=per_pair)
    method.begin_epoch(3)
    drawn = []
    monkeypatch.setattr(module, "mix", lambda v, partner, w: drawn.append((partner, w)) or mix(v, partner, w))
    weak, strong = 2 * rng.normal(size=(2, size, 4))
    batch = Batch(torch.arange(size), {"weak": torch.from_numpy(weak), "strong": torch.from_numpy(strong)})
    network = method.networks[0]
    value = method._selection_losses(0, {"all_0": batch}, torch.Generator().manual_seed(0))["loss_comix"]

    (partner, weight), (partner_of_targets, weight_of_targets) = drawn
    assert torch.equal(partner, partner_of_targets)
    assert torch.equal(weight, weight_of_targets)
    assert sorted(partner.tolist()) == list(range(2 * size))
    assert len(weight) == (2 * size if per_pair else 1)
    shares = weight.double().expand(2 * size).tolist()
    pairs = [(weak[i], slow.pseudo_label(slow_forward(network, strong[i]), sets[i], 0.5)) for i in range(size)]
    pairs += [(strong[i], slow.pseudo_label(slow_forward(network, weak[i]), sets[i], 0.5)) for i in range(size)]
    logits, targets = [], []
    for i, (x, p) in enumerate(pairs):
        other_x, other_p = pairs[partner[i]]
        logits.append(slow_forward(network, np.array(slow.mixed(x, other_x, shares[i]))))
        targets.append(slow.mixed(p, other_p, shares[i]))
    assert value.item() == pytest.approx(slow.soft_cross_entropy(logits, targets), rel=1e-6)


def test_eq_13_total_loss():
    assert total_loss(torch.tensor(1.5), torch.tensor(2.0), 3.0).item() == slow.total_loss(1.5, 2.0, 3.0) == 7.5
    assert total_loss(torch.tensor(1.5), torch.tensor(2.0), torch.tensor(0.25)).item() == 2.0


def test_eq_13_objective_of_a_step():
    """Both networks' L_l + λ_d L_cr, with L_l from the other's labels, against slow versions throughout."""
    rng = np.random.default_rng(14)
    sets = random_sets(rng, 8, K)
    method = linear_crosel(sets, lambda_cr=3.0)
    method.selected[0, :3], method.selected[1, 4:8] = True, True
    method.labels[:] = torch.from_numpy(rng.integers(K, size=(2, 8)))
    method.begin_epoch(3)
    weight = slow.dynamic_weight([3, 4], 8, 3.0)
    assert method.lambda_d.item() == pytest.approx(weight, rel=1e-6)
    batches, expected = {}, 0.0
    mixed = []
    mixed_views = method._mixed_views
    method._mixed_views = lambda network, *rest: mixed.append((network, *mixed_views(network, *rest))) or mixed[-1][1:]
    for v, index in enumerate(([4, 6, 7], [0, 1, 2])):
        x = rng.normal(size=(3, 4))
        labels = method.labels[1 - v][index].tolist()
        expected += slow.selected_label_loss(slow_forward(method.networks[v], x), labels)
        batches[f"selected_{v}"] = Batch(torch.tensor(index), {"weak": torch.from_numpy(x)})
        views = {name: torch.from_numpy(rng.normal(size=(8, 4))) for name in ("weak", "strong")}
        batches[f"all_{v}"] = Batch(torch.arange(8), views)
    losses = method.loss(batches, torch.Generator().manual_seed(0))
    assert [network for network, _, _ in mixed] == list(method.networks)
    for network, x, targets in mixed:
        comix = slow.soft_cross_entropy(slow_forward(network, x.numpy()), targets.numpy())
        expected += slow.total_loss(0.0, comix, weight)
    assert losses.objective.item() == pytest.approx(expected, rel=1e-6)
    assert losses.report["loss"].item() == pytest.approx(expected / 2, rel=1e-6)


def test_eq_14_dynamic_weight():
    assert dynamic_weight(0.25, 4.0) == slow.dynamic_weight([25], 100, 4.0) == 3.0
    assert dynamic_weight(0.0, 4.0) == 4.0
    assert dynamic_weight(1.0, 4.0) == 0.0


def test_warm_up_loss():
    rng = np.random.default_rng(15)
    logits, sets = rng.normal(0, 3, (40, K)), random_sets(rng, 40, K)
    value = cc_loss(torch.from_numpy(logits), torch.from_numpy(sets))
    assert value.item() == pytest.approx(slow.cc_loss(logits, sets), rel=1e-12)


# --- gradients, extremes, limits ----------------------------------------------------------------------------------

SETS = torch.from_numpy(random_sets(np.random.default_rng(20), 5, K))
TARGETS = torch.from_numpy(np.random.default_rng(21).dirichlet(np.ones(K), 5))
LABELS = torch.tensor([0, 5, 2, 2, 1])
LOSSES = {
    "selected": lambda f: selected_loss(f, LABELS),
    "soft": lambda f: soft_cross_entropy(f, TARGETS),
    "cc": lambda f: cc_loss(f, SETS),
    "total": lambda f: total_loss(selected_loss(f, LABELS), soft_cross_entropy(f, TARGETS), 0.7),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradient(name):
    logits = torch.from_numpy(np.random.default_rng(22).normal(0, 2, (5, K))).requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[name], logits)


def test_gradient_reaches_inputs_but_not_targets():
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    partner, weight = torch.tensor([1, 0, 3, 2]), torch.tensor([0.8], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda v: mix(v, partner, weight), x)
    assert not comix_targets(x, torch.ones(4, 3, dtype=torch.bool), 0.5).requires_grad
    assert candidate_probabilities(x, torch.ones(4, 3, dtype=torch.bool), 0.5).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_logits(name, dtype):
    """±1e4 in every arrangement, against singleton, full and ordinary sets."""
    for signs in itertools.product((-1e4, 0.0, 1e4), repeat=3):
        logits = torch.tensor([[*signs, *reversed(signs)]] * 5, dtype=dtype, requires_grad=True)
        value = LOSSES[name](logits)
        value.backward()
        assert torch.isfinite(value)
        assert value >= -1e-6
        assert logits.grad is not None
        assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_extreme_logits_give_distributions(dtype, temperature):
    for signs in itertools.product((-1e4, 0.0, 1e4), repeat=3):
        logits = torch.tensor([[*signs, *reversed(signs)]] * 5, dtype=dtype)
        p = comix_targets(logits, SETS, temperature)
        assert torch.isfinite(p).all()
        torch.testing.assert_close(p.sum(dim=1), torch.ones(5))
        assert (p[~SETS] == 0).all()


def test_extreme_values_are_right():
    """Where all the probability lies outside S, CC costs the whole gap and pulls with its whole strength."""
    logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = cc_loss(logits, torch.tensor([[False, True, False]]))
    value.backward()
    assert value.item() == 2e4
    assert logits.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_singleton_set_is_one_hot_and_full_set_is_softmax():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert comix_targets(logits, torch.tensor([[True, False, False]]), 0.5).tolist() == [[1.0, 0.0, 0.0]]
    full = comix_targets(logits, torch.ones(1, 3, dtype=torch.bool), 1.0)
    torch.testing.assert_close(full, torch.softmax(logits, dim=1))


@pytest.mark.parametrize("temperature", [5e-3, 1e-6, 1e-20, 1e-30])
def test_temperature_to_zero_is_one_hot_inside_the_set(temperature):
    logits = torch.tensor([[5.0, 4.0, 9.0, -2.0], [-3.0, 7.0, 7.0, 1.0]])
    sets = torch.tensor([[True, True, False, True], [True, True, True, False]])
    for t in (temperature, torch.tensor(temperature)):
        assert comix_targets(logits, sets, t).tolist() == [[1.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0]]


@pytest.mark.parametrize("temperature", [1e-35, 1e-38])
def test_temperature_to_zero_with_large_logits(temperature):
    logits, sets = torch.tensor([[1e4, 0.0, -1e4]]), torch.tensor([[True, True, False]])
    assert comix_targets(logits, sets, temperature).tolist() == [[1.0, 0.0, 0.0]]


def test_high_temperature_is_uniform_on_the_set():
    logits = torch.tensor([[5.0, 4.0, 9.0, -2.0]])
    p = comix_targets(logits, torch.tensor([[True, True, False, True]]), 1e9)
    torch.testing.assert_close(p, torch.tensor([[1 / 3, 1 / 3, 0.0, 1 / 3]]))


def test_half_precision_is_computed_in_full():
    logits = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    for loss in LOSSES.values():
        value = loss(logits)
        assert value.dtype in (torch.float32, torch.float64)
        torch.testing.assert_close(value, loss(logits.float()))


# --- building blocks in other people's loops ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float32"])
def test_sets_may_be_zeros_and_ones_of_any_type(kind, dtype, history):
    bank, sets = history
    logits, mask = torch.from_numpy(bank[-1]).log(), torch.from_numpy(sets)
    given = kind(sets.astype(dtype))
    assert torch.equal(cc_loss(logits, given), cc_loss(logits, mask))
    assert torch.equal(comix_targets(logits, given, 0.5), comix_targets(logits, mask, 0.5))
    expected, selection = filled(bank).select(mask, GAMMA), filled(bank).select(given, GAMMA)
    assert torch.equal(selection.mask, expected.mask)
    assert selection.mask.dtype == torch.bool


def test_only_criteria_that_there_are():
    with pytest.raises(ValueError, match="unknown criterion 4; choose from 1, 2 and 3"):
        MemoryBank(1, 1).select(torch.ones(1, 2, dtype=torch.bool), 0.5, criteria=(1, 4))


@pytest.mark.parametrize("shape", [(2, 4), (4, 4), (3,), (3, 4, 1)])
def test_sets_of_another_shape_are_told_of(shape):
    with pytest.raises(ValueError, match=r"expected candidates of shape \[3, k\], got \["):
        MemoryBank(1, 3).select(torch.ones(shape, dtype=torch.bool), 0.5)
