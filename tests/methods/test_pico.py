"""PiCO: losses, prototypes, queue and moving average against slow versions, and the whole method."""

import copy
import math

import pytest
import torch
from _toy import (
    ToyNetwork,
    assert_round_trip,
    assert_trains,
    batches,
    make,
    random_sets,
    softmax,
    train,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from crosel.errors import UserError
from crosel.methods.base import Problem
from crosel.methods.pico import (
    PiCO,
    PiCOSettings,
    best_candidate,
    disambiguate,
    enqueue,
    info_nce_loss,
    matmul_float32,
    move_towards,
    phi,
    prototype_update,
    supcon_loss,
)
from crosel.methods.proden import uniform_weights


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=-1)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def slow_info_nce(queries, keys, queue, temperature):
    total = 0.0
    for q, k in zip(queries.tolist(), keys.tolist(), strict=True):
        own = math.exp(dot(q, k) / temperature)
        others = sum(math.exp(dot(q, z) / temperature) for z in queue.tolist())
        total -= math.log(own / (own + others))
    return total / len(queries)


def slow_supcon(queries, others, labels, other_labels, temperature):
    points = queries.tolist() + others.tolist()
    tags = labels.tolist() + other_labels.tolist()
    total = 0.0
    for i, q in enumerate(queries.tolist()):
        scores = {j: math.exp(dot(q, z) / temperature) for j, z in enumerate(points) if j != i}
        positives = [j for j in scores if tags[j] == tags[i]]
        total -= sum(math.log(scores[j] / sum(scores.values())) for j in positives) / len(positives)
    return total / len(queries)


def slow_prototypes(prototypes, queries, labels, momentum):
    """The literal loop: one example after another, then one normalisation."""
    table = [list(row) for row in prototypes.tolist()]
    for q, label in zip(queries.tolist(), labels.tolist(), strict=True):
        table[label] = [momentum * old + (1 - momentum) * new for old, new in zip(table[label], q, strict=True)]
    for row in table:
        length = math.sqrt(dot(row, row))
        row[:] = [value / length if length else 0.0 for value in row]
    return torch.tensor(table, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_info_nce_is_its_definition(temperature):
    queries, keys, queue = unit(5, 6), unit(5, 6, seed=1), unit(9, 6, seed=2)
    expected = slow_info_nce(queries, keys, queue, temperature)
    assert info_nce_loss(queries, keys, queue, temperature).item() == pytest.approx(expected, rel=1e-9)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(-1, 3), max_size=8))
def test_supcon_is_its_definition(labels, queue_labels):
    b = len(labels)
    queries, others = unit(b, 5), unit(b + len(queue_labels), 5, seed=1)
    labels = torch.tensor(labels)
    other_labels = torch.cat([labels, torch.tensor(queue_labels, dtype=torch.int64)])
    expected = slow_supcon(queries, others, labels, other_labels, 0.07)
    ours = supcon_loss(queries, others, labels, other_labels, 0.07)
    assert ours.item() == pytest.approx(expected, rel=1e-9)
    assert math.isfinite(ours.item())


def test_supcon_of_all_different_labels_is_info_nce_over_everything():
    """With no label shared, the own key is the one positive; all others and the queue are negatives."""
    queries, keys, queue = unit(4, 5), unit(4, 5, seed=1), unit(6, 5, seed=2)
    labels, blank = torch.arange(4), torch.full((6,), -1)
    loss = supcon_loss(queries, torch.cat([keys, queue]), labels, torch.cat([labels, blank]), 0.1)
    expected = 0.0
    for i in range(4):
        negatives = torch.cat([queries[:i], queries[i + 1 :], keys[:i], keys[i + 1 :], queue])
        expected += info_nce_loss(queries[i : i + 1], keys[i : i + 1], negatives, 0.1).item() / 4
    assert loss.item() == pytest.approx(expected)


def test_gradients():
    queries = unit(4, 3).requires_grad_()
    keys, queue, labels = unit(4, 3, seed=1), unit(5, 3, seed=2), torch.tensor([0, 1, 0, 2])
    others, other_labels = torch.cat([keys, queue]), torch.cat([labels, torch.tensor([-1, 0, 1, 1, 3])])
    assert torch.autograd.gradcheck(lambda q: info_nce_loss(q, keys, queue, 0.5), queries)
    assert torch.autograd.gradcheck(lambda q: supcon_loss(q, others, labels, other_labels, 0.5), queries)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_contrastive_losses_are_finite_at_tiny_temperatures(dtype):
    """τ of 1e-4 makes similarities of ±1e4."""
    queries = torch.eye(3, dtype=dtype).requires_grad_()
    keys, labels = -torch.eye(3, dtype=dtype), torch.arange(3)
    nce = info_nce_loss(queries, keys, torch.eye(3, dtype=dtype), 1e-4)
    con = supcon_loss(queries, keys, labels, labels, 1e-4)
    (nce + con).backward()
    assert torch.isfinite(nce)
    assert torch.isfinite(con)
    assert torch.isfinite(queries.grad).all()
    assert nce.item() == pytest.approx(2e4, rel=1e-3)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from([0.0, 0.5, 0.99]), st.booleans())
def test_prototypes_are_the_loop(labels, momentum, fresh):
    queries, labels = unit(len(labels), 4), torch.tensor(labels)
    prototypes = torch.zeros(5, 4, dtype=torch.float64) if fresh else unit(5, 4, seed=3)
    ours = prototype_update(prototypes, queries, labels, momentum)
    torch.testing.assert_close(ours, slow_prototypes(prototypes, queries, labels, momentum))
    lengths = ours.norm(dim=1)
    seen = torch.zeros(5, dtype=torch.bool)
    seen[labels] = True
    torch.testing.assert_close(lengths, (seen | torch.tensor(not fresh)).double())


def test_prototypes_follow_a_permutation_of_classes():
    queries, labels, prototypes = unit(7, 4), torch.tensor([0, 1, 1, 3, 0, 1, 2]), unit(5, 4, seed=3)
    order = torch.tensor([3, 0, 4, 1, 2])  # class c becomes order[c]
    moved = prototype_update(prototypes, queries, labels, 0.9)
    permuted = torch.empty_like(prototypes)
    permuted[order] = prototypes
    torch.testing.assert_close(prototype_update(permuted, queries, order[labels], 0.9)[order], moved)


@settings(max_examples=40)
@given(st.integers(1, 7), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_queue_is_first_in_first_out(size, batch_sizes):
    """Against a plain list, also where the end is passed and where a batch is longer than the queue."""
    queue, labels, pointer = torch.zeros(size, 2), torch.full((size,), -1), torch.zeros((), dtype=torch.int64)
    arrived = []
    for b in batch_sizes:
        new = list(range(len(arrived), len(arrived) + b))
        arrived += new
        keys = torch.tensor([[float(number), -float(number)] for number in new])
        enqueue(queue, labels, pointer, keys, torch.tensor(new))
        expected = arrived[-size:] + [-1] * (size - len(arrived))
        assert sorted(labels.tolist()) == sorted(expected)
        assert 0 <= pointer.item() < size
        for key, label in zip(queue.tolist(), labels.tolist(), strict=True):
            assert key == ([float(label), -float(label)] if label >= 0 else [0.0, 0.0])
    if len(arrived) >= size:  # the pointer stands on the oldest
        assert labels[pointer].item() == arrived[-size]


def test_queue_wraps_in_order():
    queue, labels, pointer = torch.zeros(4, 1), torch.full((4,), -1), torch.tensor(3)
    enqueue(queue, labels, pointer, torch.tensor([[1.0], [2.0]]), torch.tensor([7, 8]))
    assert labels.tolist() == [8, -1, -1, 7]
    assert queue.flatten().tolist() == [2.0, 0.0, 0.0, 1.0]
    assert pointer.item() == 1


def test_best_candidate_stays_inside_the_set():
    scores = torch.tensor([[9.0, 1.0, 2.0], [-5.0, -7.0, 3.0]])
    candidates = torch.tensor([[False, True, True], [True, True, False]])
    assert best_candidate(scores, candidates).tolist() == [2, 0]


@settings(max_examples=30)
@given(st.floats(0, 1), st.integers(0, 10_000))
def test_disambiguated_weights_stay_distributions_on_the_sets(share, seed):
    candidates = random_sets(6, 4, seed)
    weights = uniform_weights(candidates)
    labels = best_candidate(torch.rand(6, 4, generator=torch.Generator().manual_seed(seed)), candidates)
    moved = disambiguate(weights, labels, share)
    for i in range(6):
        for j in range(4):
            expected = share * weights[i, j].item() + (1 - share) * (labels[i].item() == j)
            assert moved[i, j].item() == pytest.approx(expected, abs=1e-6)
    assert (moved[~candidates] == 0).all()
    torch.testing.assert_close(moved.sum(dim=1), torch.ones(6))


def test_phi_falls_linearly():
    assert phi(1, 800, 0.95, 0.8) == 0.95
    assert phi(401, 800, 0.95, 0.8) == pytest.approx(0.875)
    assert phi(800, 800, 0.95, 0.8) == pytest.approx(0.8, abs=1e-3)


def test_moving_average():
    keys, queries = [torch.zeros(3), torch.ones(2, 2)], [torch.ones(3), torch.full((2, 2), 5.0)]
    move_towards(keys, queries, 0.75)
    assert keys[0].tolist() == [0.25] * 3
    assert keys[1].tolist() == [[2.0, 2.0]] * 2


def test_products_stay_exact_inside_autocast():
    a, b = unit(6, 16).float(), unit(16, 5, seed=1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not torch.equal((a @ b).float(), (a.double() @ b.double()).float())
        inside = matmul_float32(a, b)
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, (a.double() @ b.double()).float())


def test_phases_and_schedule():
    method = make(PiCO, epochs=4, proto_start=2)
    phases, values = [], []
    for epoch in range(1, 5):
        method.begin_epoch(epoch)
        phases.append(method.phase)
        values.append(method.metrics()["phi"])
    assert phases == ["warm-up", "warm-up", "training", "training"]
    assert values == pytest.approx([0.95, 0.9125, 0.875, 0.8375])


def test_what_it_starts_from():
    method = make(PiCO, queue=10)
    assert torch.equal(method.weights, uniform_weights(method.candidates))
    assert method.settings.contrast == 0.5
    assert (method.prototypes == 0).all()
    assert method.prototypes.shape == (5, 128)
    torch.testing.assert_close(method.queue.norm(dim=1), torch.ones(10))
    assert (method.queue_labels == -1).all()
    assert len(make(PiCO).queue) == 24  # 8192 would be more than there are examples
    assert len(method.networks) == 1
    for key, query in zip(method.key_network.parameters(), method.networks[0].parameters(), strict=True):
        assert torch.equal(key, query)
        assert key is not query
        assert not key.requires_grad


def test_same_view_twice_is_drawn_twice():
    views = make(PiCO, query_view="weak", key_view="weak").streams()["all"].views
    assert len(set(views)) == 2
    assert [view.split("#")[0] for view in make(PiCO).streams()["all"].views] == [
        "contrast-weak",
        "contrast-strong",
    ]


def test_key_network_follows_by_moving_average_alone():
    method = make(PiCO, key_momentum=0.9)
    expected = {name: p.detach().clone() for name, p in method.key_network.named_parameters()}
    expected_head = {name: p.detach().clone() for name, p in method.key_head.named_parameters()}
    start = {name: value.clone() for name, value in expected.items()}

    def look(drawn, losses):
        # Called after the loss and before the step: the average has taken in the parameters as they are now.
        for mine, keys, queries in [
            (expected, method.key_network, method.networks[0]),
            (expected_head, method.key_head, method.head),
        ]:
            for (name, key), query in zip(keys.named_parameters(), queries.parameters(), strict=True):
                mine[name] = 0.9 * mine[name] + 0.1 * query.detach()
                torch.testing.assert_close(key.detach(), mine[name])
                assert key.grad is None

    train(method, epochs=3, each=look)
    assert not torch.equal(method.key_network.last.weight, start["last.weight"])
    tracked = method.key_network.norm.num_batches_tracked.item()
    assert tracked == 9  # statistics of its own passes, not averaged


def test_a_run_by_hand():
    """Every state and every loss of a run through both phases, by loops from what the networks gave."""
    method = make(PiCO, epochs=4, queue=10, dimensions=6, proto_momentum=0.8, contrast=0.7, temperature=0.2)
    table = uniform_weights(method.candidates).double()
    prototypes = method.prototypes.double().clone()
    queue = list(zip(method.queue.double().tolist(), method.queue_labels.tolist(), strict=True))
    seen = {}
    modules = {"logits": method.networks[0].last, "q": method.head, "k": method.key_head}
    for name, module in modules.items():
        module.register_forward_hook(lambda m, args, output, name=name: seen.update({name: output.detach().double()}))
    steps = [0]

    def look(drawn, losses):
        nonlocal prototypes, queue
        epoch = steps[0] // 3 + 1
        index, candidates = drawn["all"].index, method.candidates[drawn["all"].index]
        queries, keys, logits = F.normalize(seen["q"], dim=1), F.normalize(seen["k"], dim=1), seen["logits"]
        labels, nearest = [], []
        for i in range(len(index)):
            inside = [j for j in range(5) if candidates[i, j]]
            labels.append(max(inside, key=lambda j: logits[i, j].item()))
            nearest.append(max(inside, key=lambda j: dot(queries[i].tolist(), prototypes[j].tolist())))
        labels = torch.tensor(labels)
        others = torch.tensor([key for key, _ in queue], dtype=torch.float64)
        if epoch == 1:
            contrast = slow_info_nce(queries, keys, others, 0.2)
        else:
            share = 0.95 - 0.15 * (epoch - 1) / 4
            for i, label in zip(index.tolist(), nearest, strict=True):
                for j in range(5):
                    table[i, j] = share * table[i, j] + (1 - share) * (j == label)
            tags = torch.cat([labels, torch.tensor([tag for _, tag in queue])])
            contrast = slow_supcon(queries, torch.cat([keys, others]), labels, tags, 0.2)
        cls = 0.0
        for i, row in zip(index.tolist(), logits.tolist(), strict=True):
            cls -= dot(table[i].tolist(), [math.log(p) for p in softmax(row)]) / len(index)
        prototypes = slow_prototypes(prototypes, queries, labels, 0.8)
        queue = (queue + list(zip(keys.tolist(), labels.tolist(), strict=True)))[-10:]

        assert losses.report["loss_class"].item() == pytest.approx(cls, rel=1e-4)
        assert losses.report["loss_contrast"].item() == pytest.approx(contrast, rel=1e-4)
        assert losses.objective.item() == pytest.approx(cls + 0.7 * contrast, rel=1e-4)
        torch.testing.assert_close(method.weights.double(), table, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(method.prototypes.double(), prototypes, atol=1e-5, rtol=1e-4)
        oldest = method.queue_pointer.item()
        torch.testing.assert_close(
            method.queue.roll(-oldest, 0).double(),
            torch.tensor([key for key, _ in queue]).double(),
            atol=1e-5,
            rtol=0,
        )
        assert method.queue_labels.roll(-oldest).tolist() == [tag for _, tag in queue]
        steps[0] += 1

    train(method, epochs=4, each=look)
    assert steps[0] == 12
    assert not torch.equal(method.weights, uniform_weights(method.candidates))


def test_who_sees_which_view():
    """Queries: the query view. Keys: the key view, by the key network as just moved, batch norm in training mode."""
    method = make(PiCO, key_momentum=0.5, dimensions=6)
    seen = {}
    for name, module in {"q": method.head, "k": method.key_head}.items():
        module.register_forward_hook(lambda m, args, output, name=name: seen.update({name: output.detach()}))

    def look(drawn, losses):
        query, key = seen["q"], seen["k"]
        with torch.no_grad():
            again = method.head(method.networks[0].features(drawn["all"]["contrast-weak"]))
            torch.testing.assert_close(query, again)
            moved = copy.deepcopy(method.key_network).train()
            again = method.key_head(moved.features(drawn["all"]["contrast-strong#key"]))
            torch.testing.assert_close(key, again)

    train(method, epochs=2, each=look)


def test_the_head_has_two_layers():
    method = make(PiCO)
    kinds = ["Linear", "ReLU", "Linear"]
    assert [[type(layer).__name__ for layer in head] for head in (method.head, method.key_head)] == [kinds, kinds]
    assert [layer.out_features for layer in method.head if isinstance(layer, nn.Linear)] == [8, 128]


def test_prediction_uses_the_query_network_only():
    method = make(PiCO).eval()
    x = torch.randn(3, 6)
    before = method.outputs(x)
    assert before.shape == (1, 3, 5)
    with torch.no_grad():
        for parameter in [
            *method.key_network.parameters(),
            *method.key_head.parameters(),
            *method.head.parameters(),
        ]:
            parameter.add_(1.0)
    assert torch.equal(method.outputs(x), before)


def test_finite_at_extreme_logits():
    method = make(PiCO)
    with torch.no_grad():
        method.networks[0].last.weight.mul_(1e5)
        method.networks[0].last.bias.copy_(torch.tensor([1e4, -1e4, 0.0, 0.0, 0.0]))
    for epoch in (1, 2):
        method.begin_epoch(epoch)
        losses = method.loss(batches(method, 8, torch.Generator()), torch.Generator())
        losses.objective.backward()
        assert torch.isfinite(losses.objective)
        assert all(torch.isfinite(p.grad).all() for p in method.parameters() if p.requires_grad)


def test_a_network_without_features_is_refused():
    class Plain(nn.Sequential):
        pass

    problem = Problem(random_sets(4, 3), epochs=1)
    with pytest.raises(UserError, match=r"Plain has no features, classify, feature_size"):
        PiCO(PiCOSettings(), problem, lambda: Plain(nn.Linear(6, 3)))
    PiCO(PiCOSettings(), problem, lambda: ToyNetwork(3))


def test_trains():
    assert_trains(make(PiCO))


def test_trains_inside_autocast():
    """Half precision from the networks, full precision in losses and state."""
    method = make(PiCO, dimensions=8)
    for epoch in (1, 2):
        method.begin_epoch(epoch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = method.loss(batches(method, 8, torch.Generator()), torch.Generator())
        assert losses.objective.dtype == torch.float32
        losses.objective.backward()
    assert method.head[0].weight.grad.abs().sum() > 0
    assert method.prototypes.dtype == method.queue.dtype == torch.float32


def test_state_round_trip():
    tables = ("weights", "prototypes", "queue", "queue_labels", "queue_pointer", "key_network.hidden.weight")
    assert_round_trip(make(PiCO, queue=13), make(PiCO, seed=1, queue=13), tables)
