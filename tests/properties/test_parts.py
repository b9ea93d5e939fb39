"""Batches that go through a network together, each with statistics of its own: what holds whatever their sizes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from crosel.nn import fused
from crosel.nn.networks import ResNet18, WideResNet, convert_sync_batch_norm, forward_split_bn
from crosel.utils.distributed import SINGLE_PROCESS

torch.set_num_threads(1)


# --- who takes which rows ---------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=fused.MAX_PARTS).filter(any),
    channels=st.integers(1, 700),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
)
@example(sizes=[64, 128], channels=32, height=32, width=32)
@example(sizes=[256, 256, 256], channels=640, height=8, width=8)
@example(sizes=[1, 300, 1], channels=64, height=40, width=40)
def test_each_row_of_each_part_is_taken_once(sizes: list[int], channels: int, height: int, width: int) -> None:
    plan = fused._plan_launch(torch.empty(sum(sizes), channels, height, width, device="meta"), sizes)
    row1, row2, rows, program1, program2, _ = plan.bounds
    programs, columns = plan.grid
    assert [*plan.rows] == [size * height * width for size in sizes]
    assert rows == sum(plan.rows)
    # As a kernel reads them: programs up to program1 are the first part's, which begins at row 0, and so on.
    parts = [(0, program1, 0, row1), (program1, program2, row1, row2), (program2, programs, row2, rows)]
    assert [end - begin for _, _, begin, end in parts] == [*plan.rows, 0, 0][:3]
    a_program = plan.how["STEPS"] * plan.how["BLOCK_R"]
    for first, last, begin, end in parts:
        assert last - first == -(-(end - begin) // a_program)  # enough of them, and none without a row
        assert last - first <= plan.adding["PROGRAMS"]
    assert (columns - 1) * plan.how["BLOCK_C"] < channels <= columns * plan.how["BLOCK_C"]
    assert columns <= len(fused._counters(nn.BatchNorm2d(channels)))
    assert programs * columns <= fused._PROGRAMS + columns * len(sizes)  # the card is full, and not much more
    for size in (plan.how["BLOCK_R"], plan.how["BLOCK_C"], plan.adding["PROGRAMS"]):
        assert size.bit_count() == 1  # as Triton's ranges have to be


# --- one pass instead of several --------------------------------------------------------------------------------------


@contextmanager
def one_pass() -> Iterator[None]:
    """`forward_split_bn` as on a GPU, with PyTorch's batch norm in place of the kernels."""
    with (
        mock.patch.object(fused, "available", return_value=True),
        mock.patch.object(fused, "_can_fuse", return_value=False),
    ):
        yield


def watched(network: nn.Module) -> list[int]:
    """Filled with the examples of every pass."""
    seen: list[int] = []
    next(network.children()).register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    return seen


def drawn(sizes: list[int], side: int, seed: int) -> list[Tensor]:
    """Batches with means and spreads of their own."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (i + 1) * torch.randn(size, 3, side, side, generator=generator, dtype=torch.float64) + i
        for i, size in enumerate(sizes)
    ]


def learnt(network: nn.Module, logits: list[Tensor]) -> dict[str, Tensor]:
    """Logits, the gradients of a loss to which each batch gives its own part, running statistics."""
    torch.stack([(i + 1) * out.sin().sum() for i, out in enumerate(logits)]).sum().backward()
    grads = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return {f"logits {i}": out.detach() for i, out in enumerate(logits)} | grads | dict(network.named_buffers())


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    side=st.integers(5, 9),
    training=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_together_is_one_after_another(sizes: list[int], side: int, training: bool, seed: int) -> None:
    torch.manual_seed(seed)
    network = WideResNet(10, 1, 4).double().train(training)
    passes = [sum(sizes)] if len(sizes) <= fused.MAX_PARTS else sizes
    assert_same(network, drawn(sizes, side, seed), passes, rtol=1e-7, atol=1e-8)


def test_together_over_ranks_too() -> None:
    network = WideResNet(10, 1, 4)
    convert_sync_batch_norm(network, SINGLE_PROCESS)
    assert_same(network, [x.float() for x in drawn([5, 7], 8, 0)], [12], rtol=1e-3, atol=1e-4)


def assert_same(together: nn.Module, batches: list[Tensor], passes: list[int], **near: float) -> None:
    alone = copy.deepcopy(together)
    seen = watched(together)
    with one_pass():
        found = learnt(together, forward_split_bn(together, *batches))
    assert seen == passes
    expected = learnt(alone, [alone(x) for x in batches])
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], **near, msg=lambda text, name=name: f"{name}: {text}")


class Derived(WideResNet):
    """A user's own: as many batch norms, but the first is asked by its own name, and knows nothing of parts."""

    def __init__(self) -> None:
        super().__init__(10, 1, 4)
        self.blocks[0].norm1 = nn.Identity()
        self.first = nn.BatchNorm2d(3)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.first(x))


def with_another_head() -> nn.Module:
    network = WideResNet(10, 1, 4)
    network.head = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return network


@pytest.mark.parametrize("make", [Derived, with_another_head, lambda: nn.Sequential(WideResNet(10, 1, 4))])
def test_networks_with_layers_of_their_own_take_one_batch_after_another(make) -> None:
    network = make()
    seen = watched(network)
    with one_pass():
        forward_split_bn(network, *(x.float() for x in drawn([2, 3], 5, 0)))
    assert seen == [2, 3]


def test_resnet_18_takes_them_together() -> None:
    network = ResNet18(4)
    seen = watched(network)
    with one_pass():
        assert [len(x) for x in forward_split_bn(network, *(x.float() for x in drawn([2, 3], 5, 0)))] == [2, 3]
    assert seen == [5]


def test_what_fails_leaves_no_parts_behind() -> None:
    network = WideResNet(10, 1, 4)
    with one_pass(), pytest.raises(RuntimeError):
        forward_split_bn(network, torch.zeros(2, 5, 4, 4), torch.zeros(2, 5, 4, 4))  # five channels instead of three
    with fused.batch_norm_parts((1, 2)), fused.batch_norm_parts((3,)):
        assert fused._context.parts == (3,)
    assert fused._context.parts == ()
