"""Memory of a GPU that really runs out. Skipped without one.

Other programs on the card notice nothing: torch is told to take no more than a part of it, or asks for so much at once
that nothing is taken.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _on_a_gpu import EAGER, GPU, NEEDS_GPU, RECORDED, assert_same_bits, pictures, save, session_of, train, trained
from _runs import assert_same_run, metrics
from _support import CroselCli

from crosel.errors import UserError
from crosel.training.step import TrainStep
from crosel.training.trainer import fit

pytestmark = NEEDS_GPU
STOP = "train.out_of_memory=stop"


def limit(count: float) -> None:
    """Let torch take so many bytes of the card and no more: other programs on it notice nothing."""
    total = torch.cuda.mem_get_info(GPU)[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, count / total), 0)


@pytest.fixture
def whole_card() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    yield
    limit(float("inf"))
    gc.collect()
    torch.cuda.empty_cache()


VAST = """
from torch import nn

def network(classes, shape):
    wide = nn.Conv2d(3, 16384, 3, padding=1)
    return nn.Sequential(wide, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16384, classes))
"""


@pytest.mark.usefixtures("whole_card")
def test_one_tensor_larger_than_the_card(
    tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 GiB at once: the card itself refuses."""
    (tmp_path / "vast_network.py").write_text(VAST)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = (
        "method.name=cc", "network.name=vast_network:network", "train.batch_size=4096", "train.epochs=1", STOP,
    )  # fmt: skip
    source = save(tmp_path / "x.npz", n=4096, side=32)
    result = train(crosel_cli, source, tmp_path / "run", *settings, extra=("--trust-code",))
    assert result.code == 2, result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("crosel: out of GPU memory with batches of 4096; try --set train.batch_size=2048")
    assert "Traceback" not in result.err
    assert len(trained("cc").progress.rows) == 3, "and the card is as usable as before"


@pytest.mark.parametrize("graphs", [RECORDED, EAGER])
@pytest.mark.usefixtures("whole_card")
def test_the_batch_size_to_try_works(graphs: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    network, batch = "wrn-16-8", 512
    settings = (
        "method.name=cc", f"network.name={network}", "train.epochs=2", "train.eval_batch_size=128",
        "train.fused=false", graphs,
    )  # fmt: skip
    source = save(tmp_path / "x.npz", n=1024, side=32)
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    probe = ("train.batch_size=512", "train.epochs=2", "train.eval_batch_size=128", "train.fused=false", graphs)
    fit(session_of("cc", *probe, data=pictures(n=1024, side=32), network=network))
    needed = torch.cuda.max_memory_reserved() - before
    gc.collect()
    torch.cuda.empty_cache()
    limit(torch.cuda.memory_reserved() + 0.75 * needed)
    result = train(crosel_cli, source, tmp_path / "large", *settings, f"train.batch_size={batch}", STOP)
    assert result.code == 2, result.err
    last = result.err.splitlines()[-1]
    found = re.match(rf"crosel: out of GPU memory with batches of {batch}; try --set train.batch_size=(\d+)", last)
    assert found, last
    assert "Traceback" not in result.err
    assert "Saved checkpoints are intact" in last
    result = train(crosel_cli, source, tmp_path / "smaller", *settings, f"train.batch_size={found[1]}")
    assert result.code == 0, result.err
    assert len(metrics(tmp_path / "smaller")) == 2
    result = train(crosel_cli, source, tmp_path / "halved", *settings, f"train.batch_size={batch}")
    assert result.code == 0, result.err
    assert re.search(r"out of memory with 512 examples at once: each step is computed in \d+ parts", result.err)
    assert len(metrics(tmp_path / "halved")) == 2


@pytest.mark.parametrize("share", [0.02, 0.3, 0.5, 0.7])
@pytest.mark.usefixtures("whole_card")
def test_out_of_memory_while_recording_leaves_nothing_broken(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps fit, then the recording has a share of what it needs: it ends somewhere in a step of two streams."""
    settings = ("train.batch_size=64", "train.eval_batch_size=64", "train.lr=0.01", STOP)
    data = pictures(side=32)
    real: Callable[..., Any] = TrainStep._capture
    allocated: list[int] = []

    def record(stepper: TrainStep, streams: Any) -> Any:
        if stepper.session.method.phase == "warm-up":
            return real(stepper, streams)
        torch.cuda.empty_cache()
        allocated.append(torch.cuda.memory_allocated())
        room = share * (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())  # of the steps before it
        limit(torch.cuda.memory_reserved() + room)
        return real(stepper, streams)

    stream = torch.cuda.current_stream()
    torch.cuda.reset_peak_memory_stats()  # of the tests before
    session = session_of("crosel", *settings, data=data, network="wrn-10-4")
    weights = sum(4 * p.numel() for p in session.method.parameters())
    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "_capture", record)
        with pytest.raises(
            UserError, match=r"out of GPU memory with batches of 64; try --set train.batch_size=32"
        ) as e:
            fit(session)
    assert len(allocated) == 1, "the recording was begun"
    assert torch.cuda.current_stream() == stream
    gc.collect()
    kept = torch.cuda.memory_allocated() - allocated[0]
    assert kept < 2 * weights + 2**27, "whoever holds the error does not hold the step's memory"
    del session, e
    limit(float("inf"))
    torch.cuda.empty_cache()
    first, again = (trained("crosel", *settings, data=data) for _ in range(2))  # recording works as before
    assert_same_bits(first, again)


@pytest.mark.usefixtures("whole_card")
def test_after_running_out_the_run_goes_on_to_the_same_end(
    tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "x.npz", side=32)
    settings = (
        "network.name=wrn-10-4", "train.epochs=3", "train.batch_size=64", "method.warmup=1", "method.bank_length=1",
        "method.gamma=0.2",
    )  # fmt: skip
    assert train(crosel_cli, source, tmp_path / "unbroken", *settings).code == 0
    real: Callable[..., Any] = TrainStep.__call__
    calls = 0

    def step(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:  # the second step of selection, for which nothing is recorded yet
            gc.collect()
            torch.cuda.empty_cache()
            limit(torch.cuda.memory_reserved() + 2**20)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(TrainStep, "__call__", step)
        result = train(crosel_cli, source, tmp_path / "run", *settings)
    limit(float("inf"))
    assert result.code == 2, result.err
    assert "out of GPU memory with batches of 64; try --set train.batch_size=32" in result.err.splitlines()[-1]
    assert len(metrics(tmp_path / "run")) == 1
    assert crosel_cli("train", "--resume", "--out", tmp_path / "run", "--device", "cuda").code == 0
    assert_same_run(tmp_path / "run", tmp_path / "unbroken")
