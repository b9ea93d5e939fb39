"""CroSel's option for sets that may miss the truth: which examples, what becomes of them, and that it is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _support import PAPER
from _toy import INPUTS, ToyNetwork, assert_never_waits, random_sets
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from crosel.methods.base import Batch, Problem
from crosel.methods.crosel import CroSel, CroSelSettings
from crosel.methods.outside import update_outside

N, K, WARMUP = 12, 4, 2
OUTSIDE = [3, 7]  # examples that both networks are sure of, with label 3, which no set holds


def sets(n: int = N) -> Tensor:
    """Every set is {0, 1} or {1, 2}; label 3 is in none."""
    out = torch.zeros(n, K, dtype=torch.bool)
    out[:, 1] = True
    out[::2, 0] = True
    out[1::2, 2] = True
    return out


def build(candidates: Tensor | None = None, seed: int = 0, **settings: Any) -> CroSel:
    torch.manual_seed(seed)
    problem = Problem(sets() if candidates is None else candidates, epochs=6)
    return CroSel(
        CroSelSettings(**{"warmup": WARMUP, **PAPER, **settings}), problem, lambda: ToyNetwork(problem.classes)
    )


def observe(method: CroSel, labels: Tensor, confidence: Tensor) -> None:
    """Show outputs whose softmax has these labels [v, n] with this confidence [v, n]."""
    k = method.problem.classes
    rest = ((1 - confidence) / (k - 1)).unsqueeze(2).expand(*labels.shape, k)
    p = rest.scatter(2, labels.unsqueeze(2), confidence.unsqueeze(2))
    method.observe(slice(0, labels.shape[1]), p.log())


def selecting(seed: int = 0, sure: float = 0.95, turn: int = 0, **settings: Any) -> CroSel:
    """Both networks have said 1 of every example for three epochs, sure of the first six, and 3 of OUTSIDE.

    With `turn`, the classes have other numbers: so much higher, and after the last comes 0.
    """
    method = build(sets().roll(turn, dims=1), seed=seed, **settings)
    v = len(method.networks)
    labels = torch.ones(v, N, dtype=torch.int64)
    confidence = torch.where(torch.arange(N) < 6, 0.99, 0.4).expand(v, N).clone()
    labels[:, OUTSIDE], confidence[:, OUTSIDE] = 3, sure
    for epoch in range(1, 4):
        method.begin_epoch(epoch)
        observe(method, (labels + turn) % K, confidence)
        method.end_epoch(epoch)
    method.begin_epoch(4)
    method.train()
    return method


def pools(method: CroSel) -> dict[str, list[int] | None]:
    return {name: None if s.pool is None else s.pool.tolist() for name, s in method.streams().items()}


def batches(method: CroSel, seed: int = 1) -> dict[str, Batch]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, stream in method.streams().items():
        pool = torch.arange(N) if stream.pool is None else stream.pool
        index = pool[torch.randint(len(pool), (8,), generator=generator)]
        out[name] = Batch(index, {view: torch.randn(8, INPUTS, generator=generator) for view in stream.views})
    return out


# --- which examples -----------------------------------------------------------------------------------------------


@given(st.data())
def test_labels_outside_against_a_slow_version(data):
    v, n, k = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6)), data.draw(st.integers(2, 4))
    stable = [[data.draw(st.booleans()) for _ in range(n)] for _ in range(v)]
    labels = [[data.draw(st.integers(-1, k - 1)) for _ in range(n)] for _ in range(v)]
    held = [data.draw(st.sets(st.integers(0, k - 1), min_size=1)) for _ in range(n)]
    known = [data.draw(st.integers(-1, k - 1)) for _ in range(n)]
    candidates = torch.tensor([[j in s for j in range(k)] for s in held])
    slow = []
    for i in range(n):
        said = {labels[w][i] for w in range(v)}
        if all(stable[w][i] for w in range(v)) and len(said) == 1 and -1 not in said:
            (label,) = said
            slow.append(-1 if label in held[i] else label)
        else:
            slow.append(known[i])
    int32 = torch.int32
    fast = update_outside(
        torch.tensor(known, dtype=int32), torch.tensor(stable), torch.tensor(labels, dtype=int32), candidates
    )
    assert fast.tolist() == slow


@pytest.mark.parametrize("mode", ["drop", "take"])
def test_an_example_comes_back_only_when_all_agree_on_a_label_inside(mode):
    method = selecting(outside=mode)
    labels = torch.ones(2, N, dtype=torch.int64)
    labels[:, OUTSIDE] = torch.tensor([2, 1])  # 3 has label 2 in its set, 7 has 1
    labels[1, 7] = 2  # inside as well, but not the same
    for epoch in range(4, 7):
        assert method.outside.found.nonzero().flatten().tolist() == OUTSIDE, "one or two epochs are not stable"
        assert method.outside.label[OUTSIDE].tolist() == [3, 3], "what was found is remembered"
        method.begin_epoch(epoch)
        observe(method, labels, torch.full((2, N), 0.95))
        method.end_epoch(epoch)
    assert method.outside.label[OUTSIDE].tolist() == [-1, 3]


def test_what_is_taken_is_learnt_with_the_label_that_was_found():
    """Also while a network says something else for an epoch."""
    method = selecting(outside="take")
    labels = torch.ones(2, N, dtype=torch.int64)
    observe(method, labels, torch.full((2, N), 0.95))
    method.end_epoch(4)
    method.begin_epoch(5)
    assert (method.labels[:, OUTSIDE] == 1).all()
    assert method.outside.sets(sets()[OUTSIDE], torch.tensor(OUTSIDE)).tolist() == [[False, False, False, True]] * 2
    batch = {f"selected_{v}": Batch(torch.tensor([3, 7]), {"weak": torch.randn(2, INPUTS)}) for v in (0, 1)}
    report = method.loss(batch, torch.Generator().manual_seed(0)).report
    logits = [method.networks[v](batch[f"selected_{v}"]["weak"]) for v in (0, 1)]
    expected = sum(torch.nn.functional.cross_entropy(x, torch.full((2,), 3)) for x in logits) / 2
    torch.testing.assert_close(report["loss_selected"], expected.detach())


@pytest.mark.parametrize("mode", ["drop", "take"])
def test_only_what_both_are_stable_and_sure_of_with_one_label(mode):
    method = build(outside=mode)
    labels = torch.full((2, N), 3)
    confidence = torch.full((2, N), 0.95)
    labels[0, 0] = 0  # the networks say different things, one of them inside
    labels[0, 1] = 0  # different things, both outside: 0 is not in the set of example 1
    confidence[1, 2] = 0.85  # one is not sure
    labels[:, 4] = 1  # inside
    for epoch in range(1, 4):
        method.begin_epoch(epoch)
        wavering = labels.clone()
        if epoch == 2:
            wavering[1, 5] = 1  # one was not stable
        observe(method, wavering, confidence)
        assert not method.outside.found.any(), "nothing is stable before the bank is full"
        method.end_epoch(epoch)
    assert (~method.outside.found).nonzero().flatten().tolist() == [0, 1, 2, 4, 5]
    assert method.metrics()["outside_ratio"] == pytest.approx(7 / 12)


def test_threshold_of_its_own():
    assert not selecting(outside="take", sure=0.6).outside.found.any()
    method = selecting(outside="take", sure=0.6, outside_gamma=0.5)
    assert method.outside.found.nonzero().flatten().tolist() == OUTSIDE
    assert method.selected[0].nonzero().flatten().tolist() == [0, 1, 2, 4, 5], "γ itself is as before"
    assert method.training_labels().stable[:, OUTSIDE].all()
    # Above γ it does not count: what is selected must be stable, too.
    high = selecting(outside="take", sure=0.95, outside_gamma=0.99)
    assert high.outside.found.nonzero().flatten().tolist() == OUTSIDE


# --- what becomes of them -----------------------------------------------------------------------------------------


def test_keep_drop_and_take_decide_the_pools():
    inside, rest = [0, 1, 2, 4, 5], [6, 8, 9, 10, 11]
    plain = pools(selecting())
    assert plain == {"selected_0": inside, "all_0": None, "selected_1": inside, "all_1": None}
    everything_else = sorted(inside + rest)
    dropped = pools(selecting(outside="drop"))
    assert dropped["selected_0"] == dropped["selected_1"] == inside
    assert dropped["all_0"] == dropped["all_1"] == everything_else
    taken = pools(selecting(outside="take"))
    assert taken["selected_0"] == taken["selected_1"] == sorted(inside + OUTSIDE)
    assert taken["all_0"] == taken["all_1"] == everything_else
    for mode in ("drop", "take"):
        assert pools(selecting(outside=mode, scope="unselected"))["all_0"] == rest
        assert "all_0" not in pools(selecting(outside=mode, scope="none"))


@pytest.mark.parametrize("turn", range(K))
@pytest.mark.parametrize("mode", ["drop", "take"])
def test_no_class_is_special(mode, turn):
    """The first class, too, may be what a set misses."""
    plain, turned = selecting(outside=mode), selecting(outside=mode, turn=turn)
    assert pools(turned) == pools(plain)
    assert float(turned.lambda_d) == float(plain.lambda_d)
    assert turned.metrics()["outside_ratio"] == plain.metrics()["outside_ratio"] > 0
    index = torch.arange(N)
    labels, taken = plain.labels[0].long(), plain.outside.labels(plain.labels[0].long(), index)
    assert torch.equal(turned.outside.labels((labels + turn) % K, index), (taken + turn) % K)
    assert torch.equal(turned.outside.sets(turned.candidates, index), plain.outside.sets(sets(), index).roll(turn, 1))


@pytest.mark.parametrize("mode", ["keep", "drop", "take"])
def test_the_warm_up_heeds_them_too(mode):
    """Twenty epochs of CC on a set without the truth are enough to learn it by heart: docs/missing-truth.md."""
    method = selecting(outside=mode)
    method.begin_epoch(WARMUP)
    assert method.phase == "warm-up"
    left = sorted(set(range(N)) - set(OUTSIDE)) if mode == "drop" else None
    assert pools(method) == {"all_0": left, "all_1": left}
    index = torch.arange(N)
    expected = sets()
    if mode == "take":
        expected[OUTSIDE] = torch.tensor([False, False, False, True])
    assert torch.equal(method.outside.sets(sets(), index), expected)
    assert torch.equal(method.candidates, sets()), "the sets themselves stay"


def test_cc_learns_the_new_label_in_the_warm_up():
    method = selecting(outside="take")
    method.begin_epoch(WARMUP)
    batch = {name: Batch(torch.tensor([3, 7]), {"weak": torch.randn(2, INPUTS)}) for name in method.streams()}
    loss = method.loss(batch, torch.Generator().manual_seed(0)).report["loss"]
    logits = [method.networks[v](batch[f"all_{v}"]["weak"]) for v in (0, 1)]
    expected = sum(torch.nn.functional.cross_entropy(x, torch.full((2,), 3)) for x in logits) / 2
    torch.testing.assert_close(loss, expected.detach())


def test_a_warm_up_without_anything_left_takes_all():
    method = selecting(outside="drop")
    method.outside.label.fill_(3)
    method.begin_epoch(WARMUP)
    assert pools(method) == {"all_0": None, "all_1": None}


def test_drop_also_drops_what_is_selected_without_the_first_criterion():
    assert set(OUTSIDE) <= set(pools(selecting(criteria=(2, 3)))["selected_0"] or ())
    assert not set(OUTSIDE) & set(pools(selecting(criteria=(2, 3), outside="drop"))["selected_0"] or ())


def test_taken_examples_are_learnt_with_the_new_label():
    method = selecting(outside="take")
    method.lambda_d.zero_()
    batch = {
        name: Batch(torch.tensor([3, 7, 3, 7]), b.views | {"weak": b["weak"][:4]})
        for name, b in batches(method).items()
        if name.startswith("selected")
    }
    report = method.loss(batch, torch.Generator().manual_seed(0)).report
    logits = [method.networks[v](batch[f"selected_{v}"]["weak"]) for v in (0, 1)]
    expected = sum(torch.nn.functional.cross_entropy(x, torch.full((4,), 3)) for x in logits) / 2
    torch.testing.assert_close(report["loss_selected"], expected.detach())


def test_share_selected_in_the_weight_of_co_mix():
    """5 of 12 are selected and 2 are outside."""
    assert float(selecting().lambda_d) == pytest.approx(4 * (1 - 5 / 12))
    assert float(selecting(outside="take").lambda_d) == pytest.approx(4 * (1 - 7 / 12))
    assert float(selecting(outside="drop").lambda_d) == pytest.approx(4 * (1 - 5 / 10))


@pytest.mark.parametrize(
    ("mode", "streams", "weight"), [("drop", set(), 4.0), ("take", {"selected_0", "selected_1"}, 0.0)]
)
def test_everything_outside(mode, streams, weight):
    method = selecting(outside=mode)
    method.outside.label.fill_(3)
    method.selected.fill_(False)
    method.begin_epoch(4)
    assert set(method.streams()) == streams
    assert method.metrics()["lambda_d"] == weight
    losses = method.loss(batches(method), torch.Generator().manual_seed(0))
    assert torch.isfinite(losses.objective)
    assert losses.report["loss_comix"] == 0


def test_one_network_alone_can_flag():
    method = selecting(outside="take", networks=1)
    assert method.outside.found.nonzero().flatten().tolist() == OUTSIDE
    assert set(OUTSIDE) <= set(pools(method)["selected_0"] or ())


# --- off by default, saved, and graph-safe ------------------------------------------------------------------------


def steps(method: CroSel, count: int = 4) -> tuple[list[float], list[Tensor]]:
    optimiser = torch.optim.SGD(method.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    objectives = []
    for i in range(count):
        loss = method.loss(batches(method, seed=i), generator).objective
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        objectives.append(float(loss.detach()))
    return objectives, [p.detach().clone() for p in method.parameters()]


def test_keep_is_the_default_and_leaves_no_trace():
    method = selecting()
    assert method.settings.outside == "keep"
    assert not any("outside" in name for name, _ in method.named_buffers())
    assert not any("outside" in name for name in method.metrics())
    assert set(method.state_dict()) == {n for n in selecting(outside="take").state_dict() if n != "outside.label"}


def plain_streams(method: CroSel) -> dict[str, Any]:
    """The pools as they were before there was the option, written out again."""
    out: dict[str, Any] = {}
    for v in range(len(method.networks)):
        mask = method.selected[len(method.networks) - 1 - v]
        if mask.any():
            out[f"selected_{v}"] = mask.nonzero().squeeze(1).tolist()
        if method.settings.scope == "all":
            out[f"all_{v}"] = None
        elif method.settings.scope == "unselected" and not mask.all():
            out[f"all_{v}"] = (~mask).nonzero().squeeze(1).tolist()
    return out


@given(
    st.lists(st.lists(st.booleans(), min_size=N, max_size=N), min_size=2, max_size=2),
    st.sampled_from(["all", "unselected", "none"]),
    st.sampled_from([None, 0.3]),
)
def test_keep_draws_from_the_same_pools_as_ever(selected, scope, threshold):
    method = selecting(scope=scope, outside_gamma=threshold)
    method.selected.copy_(torch.tensor(selected))
    method.begin_epoch(4)
    got = pools(method)
    assert got == plain_streams(method)
    assert list(got) == list(plain_streams(method)), "their order decides the draws"
    weight = 0.0 if scope == "none" else 4 * (1 - sum(map(sum, selected)) / (2 * N))
    assert float(method.lambda_d) == pytest.approx(weight, abs=1e-6)


def test_keep_is_bit_identical_whatever_is_outside():
    """Where nothing is outside, the modes agree; where something is, only keep is as it was."""
    first, weights = steps(selecting())
    again, same = steps(selecting(outside_gamma=0.1))
    assert first == again
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    assert steps(selecting(outside="drop"))[0] != first
    assert steps(selecting(outside="take"))[0] != first


@pytest.mark.parametrize(("mode", "pool"), [("drop", 5), ("take", 7)])
def test_the_least_to_learn_from_counts_what_is_learnt(mode, pool):
    """Five are selected and two found outside. Where they are fewer than the least, nothing is left of either."""
    enough, too_few = (selecting(outside=mode, least_selected=least) for least in (pool, pool + 1))
    assert {f"selected_{v}" for v in (0, 1)} <= pools(enough).keys()
    assert pools(too_few).keys() == {"all_0", "all_1"}
    assert float(enough.lambda_d) == float(selecting(outside=mode).lambda_d)
    assert float(too_few.lambda_d) == 4, "what is not learnt with one label does not count in r_s"


@pytest.mark.parametrize("mode", ["drop", "take"])
def test_state_carries_over(mode):
    method, fresh = selecting(outside=mode), build(seed=5, outside=mode)
    state = {name: value.clone() for name, value in method.state_dict().items()}
    assert (state["outside.label"] >= 0).sum() == 2
    fresh.load_state_dict(state)
    fresh.begin_epoch(4)
    fresh.train()
    assert pools(fresh) == pools(method)
    assert float(fresh.lambda_d) == float(method.lambda_d)
    assert steps(fresh)[0] == steps(method)[0]


@pytest.mark.parametrize("mode", ["drop", "take"])
def test_the_step_never_waits_for_the_device(mode):
    torch.manual_seed(0)
    problem = Problem(random_sets(24, 5), epochs=6)
    method = CroSel(CroSelSettings(warmup=1, outside=mode, **PAPER), problem, lambda: ToyNetwork(5))
    method.selected[:, :9], method.labels[:, :9] = True, 1
    method.outside.label[9:12] = 2
    assert_never_waits(method, epoch=3)


@pytest.mark.parametrize("settings", [{"outside": "leave"}, {"outside_gamma": 1.5}, {"outside_gamma": -0.1}], ids=str)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        CroSelSettings(**settings)
