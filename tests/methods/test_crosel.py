"""CroSel the method: phases, streams, who learns from whom, targets, ablations and edges, on a toy problem."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from _support import PAPER
from _toy import assert_never_waits, make
from torch import Tensor, nn
from torch.nn import functional as F

import crosel.methods.crosel as module
from crosel.augment import AugmentSettings, make_views
from crosel.config import build_config
from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import UserError
from crosel.methods.base import Batch, Losses, Problem
from crosel.methods.crosel import CroSel, CroSelSettings, comix_targets, mix, ramp
from crosel.methods.losses import cc_loss, soft_cross_entropy
from crosel.training.batches import Normaliser, TrainingTensors
from crosel.training.build import build_session, resolve
from crosel.training.trainer import fit

torch.set_num_threads(1)

N, D, K = 30, 4, 5
WARMUP, EPOCHS = 3, 12
SIZE = 8  # of a batch


class Toy(nn.Module):
    """A batch normalisation between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, K)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.hidden(x))))


def toy_data(kind: str = "drawn", n: int = N) -> Dataset:
    rng = np.random.default_rng(0)
    y = rng.integers(K, size=n)
    sets = {
        "drawn": rng.random((n, K)) < 0.4,
        "singleton": np.zeros((n, K), bool),
        "full": np.ones((n, K), bool),
    }[kind]
    sets[np.arange(n), y] = True
    return make_dataset(3 * np.eye(K)[y][:, :D] + rng.normal(size=(n, D)), candidates=sets, y=y)


def build(kind: str = "drawn", n: int = N, epochs: int = EPOCHS, seed: int = 0, **settings: Any) -> CroSel:
    sets = toy_data(kind, n).candidates
    assert sets is not None
    problem = Problem(torch.from_numpy(sets), epochs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CroSel(CroSelSettings(**{"warmup": WARMUP, **PAPER, **settings}), problem, Toy)


def observe(method: CroSel, labels: Tensor, confidence: Tensor | float = 0.99) -> None:
    """Show the method outputs that predict these labels [v, n] with this confidence."""
    p = torch.as_tensor(confidence).expand(labels.shape).unsqueeze(2)
    rest = (1 - p) / (K - 1)
    outputs = torch.where(F.one_hot(labels, K).bool(), p, rest).log()
    for rows in (slice(0, 7), slice(7, labels.shape[1])):
        method.observe(rows, outputs[:, rows])


def selecting(method: CroSel, share: float = 0.5, epoch: int = WARMUP + 1) -> CroSel:
    """Bring a method to the beginning of a selection epoch, as the loop would, with this share selected for each."""
    n, networks = method.problem.n, len(method.networks)
    labels = method.candidates.int().argmax(dim=1).expand(networks, n)
    sure = torch.arange(n).expand(networks, n) < round(share * n)
    for e in range(1, epoch):
        method.begin_epoch(e)
        observe(method, labels, torch.where(sure, 0.99, 0.3))
        method.end_epoch(e)
    method.begin_epoch(epoch)
    method.train()
    return method


def draw(method: CroSel, kind: str = "drawn", size: int = SIZE, seed: int = 1) -> dict[str, Batch]:
    """One batch of every stream, by the library's own index streams and views of features."""
    data = toy_data(kind, method.problem.n)
    views = make_views((D,), AugmentSettings(weak_feature_noise=0.05))
    tensors = TrainingTensors(data, views, Normaliser.of(data), torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    streams = method.streams()
    indices = tensors.draw_epoch_indices(streams, 1, size, generator)
    return tensors.batches({name: table[0] for name, table in indices.items()}, streams, generator)


def step(method: CroSel, batches: dict[str, Batch] | None = None, seed: int = 2) -> Losses:
    """Losses and gradients of one step."""
    method.zero_grad()
    losses = method.loss(batches if batches is not None else draw(method), torch.Generator().manual_seed(seed))
    if losses.objective.requires_grad:
        losses.objective.backward()
    return losses


def gradients(method: CroSel, network: int) -> list[Tensor]:
    return [p.grad.clone() for p in method.networks[network].parameters() if p.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_finite(method: CroSel, losses: Losses) -> None:
    assert torch.isfinite(losses.objective)
    assert all(torch.isfinite(value) and not value.requires_grad for value in losses.report.values())
    grads = [p.grad for p in method.parameters() if p.grad is not None]
    assert all(torch.isfinite(g).all() for g in grads)


# --- two networks, each other's selection -------------------------------------------------------------------------


def test_the_two_networks_start_different():
    one, other = build().networks
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    assert not any(a is b for a, b in pairs)
    weights = [(a, b) for a, b in pairs if a.ndim == 2]
    assert len(weights) == 2
    assert not any(torch.equal(a, b) for a, b in weights)
    assert {p.data_ptr() for p in one.parameters()}.isdisjoint({p.data_ptr() for p in other.parameters()})


def disjoint_selection() -> CroSel:
    """Network 0 selected examples 0 to 9 as class 1, network 1 selected 10 to 19 as class 2."""
    method = selecting(build(), share=0)
    method.selected[0, :10], method.selected[1, 10:20] = True, True
    method.labels[0], method.labels[1] = 1, 2
    method.begin_epoch(WARMUP + 1)
    return method


def test_each_network_draws_from_the_selection_of_the_other():
    streams = disjoint_selection().streams()
    assert streams["selected_0"].pool.tolist() == list(range(10, 20))
    assert streams["selected_1"].pool.tolist() == list(range(10))


def test_each_network_learns_the_labels_of_the_other():
    method = disjoint_selection()
    method.lambda_d.zero_()
    batches = draw(method)
    losses = step(method, batches)
    expected = sum(
        F.cross_entropy(method.networks[v](batches[f"selected_{v}"]["weak"]), torch.full((SIZE,), label))
        for v, label in ((0, 2), (1, 1))
    )
    torch.testing.assert_close(losses.objective, expected)
    torch.testing.assert_close(losses.report["loss_selected"], expected.detach() / 2)


@pytest.mark.parametrize("teacher", [0, 1])
def test_new_labels_of_a_teacher_move_the_other_network_and_only_that(teacher):
    method, student = disjoint_selection(), 1 - teacher
    state = {name: value.clone() for name, value in method.state_dict().items()}
    batches = draw(method)
    loss = step(method, batches).objective
    before = [gradients(method, v) for v in (0, 1)]
    method.load_state_dict(state)  # running statistics too
    method.labels[teacher] = 3
    new_loss = step(method, batches).objective
    after = [gradients(method, v) for v in (0, 1)]
    assert loss.item() != new_loss.item()
    assert not same(before[student], after[student])
    assert same(before[teacher], after[teacher])


def test_one_network_selects_for_itself():
    method = selecting(build(networks=1), share=0.5)
    assert len(method.networks) == 1
    assert method.teacher(0) == 0
    streams = method.streams()
    assert set(streams) == {"selected_0", "all_0"}
    assert streams["selected_0"].pool.tolist() == list(range(15))
    losses = step(method)
    assert_finite(method, losses)
    torch.testing.assert_close(losses.report["loss"], losses.objective.detach())
    assert "selection_ratio_1" not in method.metrics()


def test_two_networks_teach_crosswise():
    method = build()
    assert [method.teacher(v) for v in (0, 1)] == [1, 0]


def test_gradients_stay_with_their_network():
    """One backward pass of the summed loss gives each network what it would get alone."""
    method = selecting(build())
    batches = draw(method)
    del batches["selected_1"], batches["all_1"]
    step(method, batches)
    assert len(gradients(method, 0)) > 0
    assert gradients(method, 1) == []


# --- phases -------------------------------------------------------------------------------------------------------


def test_warm_up_is_cc_for_both_networks():
    method = build()
    method.begin_epoch(1)
    method.train()
    assert method.phase == "warm-up"
    assert {name: (s.views, s.pool) for name, s in method.streams().items()} == {
        "all_0": (("weak",), None),
        "all_1": (("weak",), None),
    }
    batches = draw(method)
    losses = step(method, batches)
    expected = sum(
        cc_loss(method.networks[v](batches[f"all_{v}"]["weak"]), method.candidates[batches[f"all_{v}"].index])
        for v in (0, 1)
    )
    torch.testing.assert_close(losses.objective, expected)
    assert set(losses.report) == {"loss"}
    assert method.lambda_d == 0


def test_warm_up_uses_no_selection_even_if_there_is_one():
    method = selecting(build(bank_length=1), share=1.0, epoch=WARMUP)
    assert method.selected.all()
    assert method.phase == "warm-up"
    assert set(method.streams()) == {"all_0", "all_1"}


def test_selection_follows_warm_up():
    method = build()
    for epoch in range(1, EPOCHS + 1):
        method.begin_epoch(epoch)
        assert method.phase == ("warm-up" if epoch <= WARMUP else "selection")


@pytest.mark.parametrize(("epochs", "expected"), [(1, 1), (2, 1), (3, 1), (4, 1), (5, 2), (12, 4), (30, 12), (200, 80)])
def test_default_warm_up_is_two_fifths_of_the_epochs(epochs, expected):
    method = build(epochs=epochs, warmup=None)
    assert method.warmup == expected
    assert method.settings.warmup == (None if epochs == 1 else expected)


@pytest.mark.parametrize("warmup", [EPOCHS, EPOCHS + 5])
def test_a_warm_up_without_end_is_refused(warmup):
    with pytest.raises(UserError, match=rf"method\.warmup is {warmup}, but the run has only {EPOCHS} epochs") as caught:
        build(warmup=warmup)
    assert "\n" not in str(caught.value)
    assert build(warmup=EPOCHS - 1).warmup == EPOCHS - 1


def test_banks_fill_while_warming_up():
    method = selecting(build(), share=0.5)
    for bank in method.banks:
        assert (bank.labels >= 0).all()
    assert method.selected.sum(dim=1).tolist() == [15, 15]


def test_observe_takes_chunks_as_one_epoch():
    """Two chunks an epoch are one entry of the bank, and the next epoch is the next entry."""
    method = build(bank_length=2)
    labels = torch.zeros(2, N, dtype=torch.long)
    for label in (1, 2, 3):
        observe(method, labels + label)
        method.end_epoch(label)
    for bank in method.banks:
        assert bank.labels.unique(dim=1).flatten().tolist() == [2, 3]
        torch.testing.assert_close(bank.confidence, torch.full((2, N), 0.99))


def test_each_bank_remembers_its_own_network():
    method = build()
    labels = torch.stack([torch.zeros(N), torch.ones(N)]).long()
    for epoch in range(1, 4):
        observe(method, labels)
        method.end_epoch(epoch)
    assert [bank.labels.unique().tolist() for bank in method.banks] == [[0], [1]]
    for v in (0, 1):
        assert torch.equal(method.selected[v], method.candidates[:, v])
        assert (method.labels[v] == v).all()


# --- λ_d, ramps ---------------------------------------------------------------------------------------------------


def test_lambda_d_uses_the_mean_of_both_shares():
    method = selecting(build(lambda_cr=4.0), share=0)
    method.selected[0, :3], method.selected[1, :12] = True, True
    method.begin_epoch(WARMUP + 1)
    assert method.lambda_d.item() == pytest.approx((1 - (3 / N + 12 / N) / 2) * 4.0)
    metrics = method.metrics()
    assert metrics["selection_ratio"] == pytest.approx(0.25)
    assert (metrics["selection_ratio_1"], metrics["selection_ratio_2"]) == pytest.approx((0.1, 0.4))
    assert metrics["lambda_d"] == pytest.approx(3.0)


def test_lambda_d_is_fixed_within_the_epoch():
    method = selecting(build(bank_length=1), share=0.5)
    before = method.lambda_d.item()
    assert before == pytest.approx(2.0)
    step(method)
    assert method.lambda_d.item() == before
    method.begin_epoch(WARMUP + 1)  # as when a run resumes inside an epoch
    assert method.lambda_d.item() == before
    observe(method, method.labels.long(), 0.99)
    method.end_epoch(WARMUP + 1)
    assert method.selected.all()
    assert method.lambda_d.item() == before
    method.begin_epoch(WARMUP + 2)
    assert method.lambda_d.item() == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_fixed_lambda_ignores_the_share(share):
    method = selecting(build(dynamic_lambda=False, lambda_cr=2.0), share=share)
    assert method.lambda_d.item() == 2.0


def test_ramp():
    assert [ramp(1.0, 3.0, p) for p in (-1, 0, 0.25, 1, 2)] == [1.0, 1.0, 1.5, 3.0, 3.0]
    assert ramp(None, 3.0, 0.1) == 3.0


def test_temperature_and_lambda_cr_ramp_after_warm_up():
    method = build(
        ramp=4, temperature_start=1.0, temperature=0.5, lambda_cr_start=0.0, lambda_cr=4.0, dynamic_lambda=False
    )
    seen = []
    for epoch in range(1, EPOCHS + 1):
        method.begin_epoch(epoch)
        seen.append((method.temperature.item(), method.lambda_d.item()))
    assert seen[:WARMUP] == [(1.0, 0.0)] * WARMUP
    assert seen[WARMUP:] == [(1.0, 0.0), (0.875, 1.0), (0.75, 2.0), (0.625, 3.0)] + [(0.5, 4.0)] * 5


def test_without_a_ramp_the_ends_hold_at_once():
    method = build(temperature_start=1.0, lambda_cr_start=1.0)
    method.begin_epoch(WARMUP + 1)
    assert (method.temperature.item(), method.lambda_d.item()) == (0.5, 4.0)


def selections_in_gamma_ramp() -> list[int]:
    """How many a run with γ from .5 to .9 over 4 epochs trains on in each selection epoch.

    Confidences are spread over .4 to 1 and never change, so the count says which γ was used.
    """
    method = build(kind="full", ramp=4, gamma_start=0.5, gamma=0.9)
    confidence = torch.linspace(0.41, 0.999, N).expand(2, N)
    counts = []
    for epoch in range(1, EPOCHS + 1):
        method.begin_epoch(epoch)
        if epoch > WARMUP:
            counts.append(len(method.streams()["selected_0"].pool))
        observe(method, torch.zeros(2, N, dtype=torch.long), confidence)
        method.end_epoch(epoch)
    return counts


def test_gamma_ramps_after_warm_up():
    counts = selections_in_gamma_ramp()
    confidence = torch.linspace(0.41, 0.999, N)
    assert counts[0] == int((confidence > 0.5).sum())
    assert counts[-1] == int((confidence > 0.9).sum())
    assert counts == sorted(counts, reverse=True)
    assert len(set(counts)) == 5


def test_gamma_ramps_in_step_with_temperature():
    confidence = torch.linspace(0.41, 0.999, N)
    expected = [int((confidence > g).sum()) for g in (0.5, 0.6, 0.7, 0.8, 0.9)]
    assert selections_in_gamma_ramp()[:5] == expected


# --- co-mix -------------------------------------------------------------------------------------------------------


class Signs(nn.Module):
    """Says class 0 of an input with positive entries, and class 1 of any other."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(10.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.one_hot((x.mean(dim=1) <= 0).long(), K)


def record_mix(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Keep what `mix` is called with: first the inputs, then the targets."""
    calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def recording(values: Tensor, partner: Tensor, weight: Tensor) -> Tensor:
        calls.append((values, partner, weight))
        return mix(values, partner, weight)

    monkeypatch.setattr(module, "mix", recording)
    return calls


def test_targets_are_crossed(monkeypatch):
    """The weak views are positive and the strong ones negative, so the target tells which view it came from."""
    calls = record_mix(monkeypatch)
    problem = Problem(torch.ones(SIZE, K, dtype=torch.bool), EPOCHS)
    method = CroSel(CroSelSettings(warmup=WARMUP, **PAPER), problem, Signs)
    method.begin_epoch(WARMUP + 1)
    weak = torch.rand(SIZE, D, generator=torch.Generator().manual_seed(0)) + 0.1
    method._mixed_views(
        method.networks[0],
        Batch(torch.arange(SIZE), {"weak": weak, "strong": -weak}),
        torch.Generator().manual_seed(0),
    )
    (x, _, _), (targets, _, _) = calls
    assert torch.equal(x, torch.cat([weak, -weak]))
    assert targets.argmax(dim=1).tolist() == [1] * SIZE + [0] * SIZE
    torch.testing.assert_close(targets[0], torch.softmax(torch.tensor([0.0, 20.0, 0, 0, 0]), dim=0))  # sharpened: T = ½


def test_targets_carry_no_gradient(monkeypatch):
    """The gradient is that of a cross-entropy against constants."""
    calls = record_mix(monkeypatch)
    method = selecting(build(networks=1, scope="all"), share=0)
    losses = step(method)
    found = gradients(method, 0)
    (x, partner, weight), (targets, _, _) = calls
    assert not targets.requires_grad
    assert not x.requires_grad
    method.zero_grad()
    loss = method.lambda_d * soft_cross_entropy(
        method.networks[0](mix(x, partner, weight)), mix(targets, partner, weight).clone()
    )
    loss.backward()
    torch.testing.assert_close(loss, losses.objective)
    for a, b in zip(found, gradients(method, 0), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("mode", "passes"), [("train", 3), ("eval", 2)])
def test_target_pass_moves_running_statistics_in_train_mode_only(mode, passes):
    """Targets, selected batch, mixed batch: three passes in train mode, of which `eval` leaves out the first."""
    method = selecting(build(target_mode=mode))
    before = [network.norm.num_batches_tracked.item() for network in method.networks]
    assert before == [0, 0]
    step(method)
    assert [network.norm.num_batches_tracked.item() for network in method.networks] == [passes] * 2
    assert all(network.training for network in method.networks)


def test_order_of_the_passes(monkeypatch):
    """Targets, selected batch, mixed batch: the order in which running statistics move, and what the targets see."""
    calls = record_mix(monkeypatch)
    method = selecting(build(networks=1))
    batches, seen = draw(method), []
    method.networks[0].register_forward_hook(lambda m, args, out: seen.append((args[0], torch.is_grad_enabled())))
    step(method, batches)
    everything, chosen = batches["all_0"], batches["selected_0"]
    expected = [torch.cat([everything["weak"], everything["strong"]]), chosen["weak"], mix(*calls[0])]
    assert all(torch.equal(x, y) for (x, _), y in zip(seen, expected, strict=True))
    assert [gradient for _, gradient in seen] == [False, True, True]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_target_pass_uses_the_statistics_of_its_mode(mode, monkeypatch):
    calls = record_mix(monkeypatch)
    method = selecting(build(networks=1, target_mode=mode), share=0)
    network = method.networks[0]
    network.norm.running_mean.fill_(5.0)
    state = {name: value.clone() for name, value in network.state_dict().items()}
    batches = draw(method)
    step(method, batches)
    network.load_state_dict(state)
    network.train(mode == "train")
    batch = batches["all_0"]
    with torch.no_grad():
        of_weak, of_strong = network(torch.cat([batch["weak"], batch["strong"]])).chunk(2)
    sets = method.candidates[batch.index]
    expected = torch.cat([comix_targets(of_strong, sets, 0.5), comix_targets(of_weak, sets, 0.5)])
    torch.testing.assert_close(calls[1][0], expected)


@pytest.mark.parametrize("per_pair", [False, True])
def test_one_lambda_a_step_or_one_a_pair(per_pair, monkeypatch):
    calls = record_mix(monkeypatch)
    step(selecting(build(mix_per_pair=per_pair)))
    assert len(calls) == 4  # inputs and targets of two networks
    assert all(weight.shape == ((2 * SIZE,) if per_pair else (1,)) for _, _, weight in calls)
    assert all(sorted(partner.tolist()) == list(range(2 * SIZE)) for _, partner, _ in calls)
    assert not torch.equal(calls[0][1], calls[2][1])  # each network has its own partners
    assert not torch.equal(calls[0][2], calls[2][2])  # and its own λ'
    assert all((partner[:SIZE] >= SIZE).any() for _, partner, _ in calls)  # a weak view may meet a strong one


def test_a_step_follows_its_generator():
    method = selecting(build())
    state = {name: value.clone() for name, value in method.state_dict().items()}
    batches, values = draw(method), []
    outside = torch.get_rng_state()
    for seed in (1, 1, 2):
        method.load_state_dict(state)
        values.append(step(method, batches, seed=seed).objective.item())
    assert values[0] == values[1] != values[2]
    assert torch.equal(outside, torch.get_rng_state())


@pytest.mark.parametrize("epoch", [1, WARMUP + 1])
def test_never_waits_for_the_device(epoch):
    method = make(CroSel, epochs=EPOCHS, warmup=WARMUP)
    method.selected[:, :12], method.labels[:, :12] = True, 1
    assert_never_waits(method, epoch)


# --- every ablation of the paper ----------------------------------------------------------------------------------

ABLATIONS = [
    *({"criteria": c} for c in ((), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3))),
    *({"scope": scope} for scope in ("all", "unselected", "unselected-once", "none")),
    *({"bank_length": t} for t in (1, 2, 3)),
    *({"gamma": gamma} for gamma in (0.0, 0.8, 0.9, 0.95)),
    *({"lambda_cr": w, "dynamic_lambda": d} for w in (0.0, 0.5, 1.0, 2.0, 4.0) for d in (True, False)),
    *({"networks": v} for v in (1, 2)),
    *({"selected_view": view} for view in ("plain", "weak", "strong")),
    *({"warmup_view": view} for view in ("plain", "weak", "strong")),
    *({"mix_per_pair": flag} for flag in (True, False)),
    *({"ensemble": what} for what in ("logits", "probabilities")),
    *({"target_mode": mode} for mode in ("train", "eval")),
    *({"temperature": t} for t in (0.1, 0.5, 1.0)),
    *({"alpha": a} for a in (0.1, 0.75, 4.0)),
]


@pytest.mark.parametrize("settings", ABLATIONS, ids=str)
def test_every_ablation_takes_a_step(settings):
    method = build(**settings)
    method.begin_epoch(1)
    method.train()
    assert all(s.views == (method.settings.warmup_view,) for s in method.streams().values())
    assert_finite(method, step(method))
    selecting(method, share=0.6)
    assert method.selected.any()
    streams = method.streams()
    assert streams["selected_0"].views == (method.settings.selected_view,)
    assert ("all_0" in streams) == (method.settings.scope != "none")
    losses = step(method)
    assert_finite(method, losses)
    assert set(losses.report) == {"loss", "loss_selected", "loss_comix"}
    for v in range(len(method.networks)):
        assert sum(float(g.abs().sum()) for g in gradients(method, v)) > 0
    p = method.combine(method.outputs(torch.randn(4, D, generator=torch.Generator().manual_seed(0))))
    torch.testing.assert_close(p.sum(dim=1), torch.ones(4))


def test_criteria_decide_what_is_selected():
    """An example outside its set, one that wavers, one that is unsure: each criterion drops its own."""
    kept = {}
    for criteria in ((), (1,), (2,), (3,), (1, 2, 3)):
        method = build(criteria=criteria)
        labels = method.candidates.int().argmax(dim=1)
        labels[2] = 0 if not method.candidates[2, 0] else int((~method.candidates[2]).nonzero()[0])
        for epoch in range(1, 4):
            wavering = labels.clone()
            wavering[3] = labels[3] if epoch == 3 else (labels[3] + 1) % K
            confidence = torch.full((2, N), 0.99)
            confidence[:, 4] = 0.6
            observe(method, wavering.expand(2, N), confidence)
            method.end_epoch(epoch)
        kept[criteria] = set((~method.selected[0]).nonzero().flatten().tolist())
    assert kept == {(): set(), (1,): {2}, (2,): {3}, (3,): {4}, (1, 2, 3): {2, 3, 4}}


def test_scope_of_co_mix():
    def pool(scope: str) -> list[int] | None:
        stream = selecting(build(scope=scope), share=0.4).streams().get("all_0")
        return [] if stream is None else None if stream.pool is None else stream.pool.tolist()

    assert pool("all") is None
    assert pool("unselected") == list(range(12, N))
    assert pool("none") == []
    method = selecting(build(scope="none"), share=0.4)
    assert method.lambda_d == 0
    assert step(method).report["loss_comix"] == 0


def test_unselected_means_what_the_network_does_not_learn_from():
    """Network 0 learns from the selection of network 1, so the rest of that is what co-mix shows it."""
    method = selecting(build(scope="unselected"), share=0)
    method.selected[0, :10], method.selected[1, 10:20] = True, True
    streams = method.streams()
    for v, taught in ((0, set(range(10, 20))), (1, set(range(10)))):
        assert set(streams[f"selected_{v}"].pool.tolist()) == taught
        assert set(streams[f"all_{v}"].pool.tolist()) == set(range(N)) - taught


def test_the_unselected_once_cost_what_they_need():
    """Where 12 and 6 of 30 are left, two quarters of a batch do for both."""
    method = selecting(build(scope="unselected-once"), share=0)
    method.selected[0, :18], method.selected[1, :24], method.labels[:, :24] = True, True, 1
    method.begin_epoch(WARMUP + 1)
    batches = draw(method)
    sizes = {name: len(batch.index) for name, batch in batches.items()}
    assert sizes == {"selected_0": SIZE, "selected_1": SIZE, "all_0": SIZE // 2, "all_1": SIZE // 2}
    assert set(batches["all_1"].index.tolist()) <= set(range(18, N))
    assert_finite(method, step(method, batches))


def test_average_of_logits_or_of_probabilities():
    outputs = torch.tensor([[[4.0, 0.0, 0.0]], [[0.0, 2.0, 0.0]]])
    of_logits = build(ensemble="logits").combine(outputs)
    of_probabilities = build(ensemble="probabilities").combine(outputs)
    torch.testing.assert_close(of_logits, torch.softmax(outputs.mean(dim=0), dim=1))
    torch.testing.assert_close(of_probabilities, torch.softmax(outputs, dim=2).mean(dim=0))
    assert not torch.allclose(of_logits, of_probabilities)


@pytest.mark.parametrize(
    "settings",
    [
        {"networks": 3}, {"networks": 0}, {"warmup": 0}, {"bank_length": 0}, {"gamma": 1.1}, {"gamma": -0.1},
        {"criteria": (4,)}, {"lambda_cr": -1.0}, {"scope": "some"}, {"selected_view": "medium"}, {"temperature": 0.0},
        {"alpha": 0.0}, {"ramp": -1}, {"least_selected": 0}, {"gamma_start": 2.0}, {"temperature_start": 0.0},
        {"lambda": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CroSelSettings(**settings)


# --- edges --------------------------------------------------------------------------------------------------------


def test_nothing_selected_goes_on_with_co_mix():
    method = selecting(build(), share=0)
    assert set(method.streams()) == {"all_0", "all_1"}
    losses = step(method)
    assert_finite(method, losses)
    assert losses.report["loss_selected"] == 0
    assert losses.report["loss_comix"] > 0
    assert losses.objective.item() == pytest.approx(4.0 * 2 * losses.report["loss_comix"].item(), rel=1e-5)
    assert method.metrics()["selection_ratio"] == 0


def test_nothing_selected_by_one_of_two():
    method = selecting(build(), share=0)
    method.selected[0, :6], method.labels[0, :6] = True, 1
    method.begin_epoch(WARMUP + 1)
    assert set(method.streams()) == {"all_0", "all_1", "selected_1"}
    assert_finite(method, step(method))


@pytest.mark.parametrize("scope", ["all", "unselected"])
@pytest.mark.parametrize(("least", "taken"), [(5, True), (6, True), (7, False)])
def test_fewer_than_the_least_count_as_none(scope, least, taken):
    """Network 1 learns from six of network 0; what it does not learn from, co-mix shows it."""
    method = selecting(build(scope=scope, least_selected=least), share=0)
    method.selected[0, :6], method.labels[0, :6] = True, 1
    method.begin_epoch(WARMUP + 1)
    assert float(method.lambda_d) == pytest.approx(4.0 * (1 - (6 / N / 2 if taken else 0)))
    streams = method.streams()
    assert ("selected_1" in streams) == taken
    mixed = streams["all_1"].pool
    assert set(range(N) if mixed is None else mixed.tolist()) == (
        set(range(6, N)) if taken and scope == "unselected" else set(range(N))
    )
    losses = step(method)
    assert_finite(method, losses)
    assert (losses.report["loss_selected"] > 0) == taken
    assert method.metrics()["selection_ratio_1"] == pytest.approx(6 / N)  # they are selected all the same


def test_nothing_selected_and_no_co_mix_has_nothing_to_learn():
    method = selecting(build(scope="none"), share=0)
    assert method.streams() == {}
    losses = step(method)
    assert losses.objective == 0
    assert not losses.objective.requires_grad


@pytest.mark.parametrize("count", [1, 3, SIZE - 1])
def test_fewer_than_a_batch_are_cycled_through(count):
    method = selecting(build(), share=count / N)
    batches = draw(method)
    index = batches["selected_0"].index
    assert len(index) == SIZE
    times = torch.bincount(index, minlength=count)
    assert len(times) == count
    assert times.max() - times.min() <= 1
    assert_finite(method, step(method, batches))


@pytest.mark.parametrize("scope", ["all", "unselected", "none"])
def test_all_selected(scope):
    method = selecting(build(scope=scope), share=1.0)
    assert method.selected.all()
    assert method.lambda_d == 0
    assert ("all_0" in method.streams()) == (scope == "all")
    losses = step(method)
    assert_finite(method, losses)
    torch.testing.assert_close(losses.objective.detach(), 2 * losses.report["loss_selected"])


@pytest.mark.parametrize("kind", ["singleton", "full"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_singleton_and_full_sets(kind, share):
    method = build(kind)
    method.begin_epoch(1)
    method.train()
    assert_finite(method, step(method, draw(method, kind)))
    selecting(method, share)
    assert_finite(method, step(method, draw(method, kind)))
    assert method.selected.float().mean().item() == pytest.approx(share)


@pytest.mark.parametrize("n", [2, 5])
def test_fewer_examples_than_a_batch(n):
    method = selecting(build(n=n), share=0.5)
    assert_finite(method, step(method, draw(method, size=n)))


# --- what it says of its labels, and its state --------------------------------------------------------------------


def test_training_labels():
    method = build()
    labels = method.candidates.int().argmax(dim=1)
    labels[2] = int((~method.candidates[2]).nonzero()[0])
    confidence = torch.full((2, N), 0.95)
    confidence[:, 4] = 0.6
    for epoch in range(1, 4):
        observe(method, labels.expand(2, N), confidence)
        method.end_epoch(epoch)
    said = method.training_labels()
    assert torch.equal(said.labels, labels.expand(2, N))
    torch.testing.assert_close(said.confidence, confidence)
    assert (~said.stable[0]).nonzero().flatten().tolist() == [4]
    assert (~said.selected[0]).nonzero().flatten().tolist() == [2, 4]
    assert said.labels.dtype == torch.int64


def test_training_labels_tell_the_last_epochs():
    """Confidence is the mean over them, the newest comes last, and each epoch counts for what it selected itself."""
    method = build(kind="full", gamma=0.7)
    labels, confidence = torch.zeros(2, N, dtype=torch.long), torch.full((2, N), 0.5)
    for epoch, sure in enumerate((0.6, 0.9, 0.9, 0.9), start=1):
        confidence[1] = sure
        observe(method, labels, confidence)
        method.end_epoch(epoch)
    labels[:, 0] = 1
    confidence[1] = 0.6
    observe(method, labels, confidence)
    method.end_epoch(5)
    said = method.training_labels()
    assert said.past_labels[:, :, 0].tolist() == [[0, 0, 1]] * 2
    torch.testing.assert_close(said.past_confidence[1], torch.tensor([0.9, 0.9, 0.6]).unsqueeze(1).expand(3, N))
    torch.testing.assert_close(said.confidence, torch.tensor([[0.5], [0.8]]).expand(2, N))
    # Network 1 was sure from the third epoch on; example 0 has changed its label in the fifth.
    assert said.epochs_selected.tolist() == [[0] * N, [2] + [3] * (N - 1)]


def test_selected_labels_are_stable_ones_while_gamma_ramps():
    method = build(ramp=4, gamma_start=0.5, gamma=0.9)
    labels = method.candidates.int().argmax(dim=1).expand(2, N)
    for epoch in range(1, WARMUP + 1):
        observe(method, labels, 0.7)
        method.end_epoch(epoch)
    said = method.training_labels()
    assert said.selected.all()
    assert said.stable.all()


def test_state_carries_over():
    """Tables are saved, and what is not saved follows from them in `begin_epoch`."""
    method, other = selecting(build(), share=0.5), build(seed=5)
    saved = {name: value.clone() for name, value in method.state_dict().items()}
    assert {"selected", "labels", "banks.0.labels", "banks.1.confidence"} <= set(saved)
    assert not any("candidates" in name for name in saved)
    other.load_state_dict(saved)
    other.begin_epoch(WARMUP + 1)
    other.train()
    batches = draw(method)
    assert step(method, batches).objective.item() == step(other, batches).objective.item()
    assert same(gradients(method, 1), gradients(other, 1))


def test_per_example_tables_are_small():
    """Two banks of t entries, labels, masks and counts: bytes an example, whatever the number of classes."""
    method = build()
    tables = [b for name, b in method.named_buffers() if b.ndim and b.shape[-1] == N and name != "candidates"]
    assert sum(b.numel() * b.element_size() for b in tables) == N * 2 * (3 * (4 + 4) + 4 + 1 + 4)


@pytest.mark.parametrize("n", [9, 48])
def test_learns_end_to_end(n):
    """The loop, from warm-up to selection; n = 9 is less than a batch. Three clouds far apart are learnt outright."""
    rng = np.random.default_rng(0)
    y = np.arange(n) % 3
    x = (8 * np.eye(3)[y] + rng.normal(size=(n, 3))).astype(np.float32)
    sets = rng.random((n, 3)) < 0.3
    sets[np.arange(n), y] = True
    data = make_dataset(x, candidates=sets, y=y, x_test=x, y_test=y)
    settings = ["train.epochs=14", "train.batch_size=16", "method.warmup=6", "method.gamma=0.6"]
    config = build_config(settings=[*settings, "network.hidden=[16]"], values={"source": "toy"})
    rows = fit(build_session(resolve(config, data), data, torch.device("cpu")))
    assert [row["phase"] for row in rows] == ["warm-up"] * 6 + ["selection"] * 8
    assert all(math.isfinite(value) for row in rows for value in row.values() if isinstance(value, float))
    last = rows[-1]
    assert last["selection_ratio"] > 0.5
    assert last["lambda_d"] == pytest.approx(4 * (1 - rows[-2]["selection_ratio"]), rel=1e-5)
    assert last["test_accuracy"] > 0.85
    assert last["oracle_selection_accuracy"] > 0.85
    assert {"loss", "loss_selected", "loss_comix", "covering_rate", "test_accuracy_1"} <= set(last)


def test_the_loop_shows_the_bank_every_example_as_it_is_in_evaluation_mode():
    """After each epoch, before the selection of the next: n is no multiple of a chunk, and views have noise."""
    data = toy_data(n=N)
    settings = [
        "train.epochs=6",
        "train.batch_size=8",
        "train.eval_batch_size=7",
        "method.warmup=2",
        "method.gamma=0.4",
    ]
    settings += ["network.hidden=[16]", "augment.weak_feature_noise=0.5", "train.lr=0.2"]
    config = build_config(settings=settings, values={"source": "toy"})
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    method, x = session.method, torch.from_numpy(data.x)
    history: list[tuple[Tensor, Tensor]] = []

    class AfterEveryEpoch:
        def on_step(self, *_: Any) -> None: ...

        def on_checkpoint(self, _: Any) -> None: ...

        def on_epoch(self, _: Any, row: dict[str, Any]) -> None:
            method.eval()
            with torch.no_grad():
                p = torch.stack([torch.softmax(network(session.normalise(x)), dim=1) for network in method.networks])
            history.append(p.max(dim=2))
            for v, bank in enumerate(method.banks):
                assert torch.equal(bank.labels[-1], history[-1][1][v].int())
                torch.testing.assert_close(bank.confidence[-1], history[-1][0][v])
                if row["epoch"] >= 3:
                    labels = torch.stack([entry[1][v] for entry in history[-3:]])
                    sure = torch.stack([entry[0][v] for entry in history[-3:]]).mean(dim=0) > 0.4
                    inside = method.candidates[torch.arange(N), labels[-1]]
                    assert torch.equal(method.selected[v], (labels == labels[-1]).all(dim=0) & sure & inside)

    fit(session, (AfterEveryEpoch(),))
    assert len(history) == 6
    assert method.selected.any()
