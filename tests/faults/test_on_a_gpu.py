"""What only a GPU can show: recorded steps, data that travel, kills. Skipped without one. See test_gpu_memory.py."""

from __future__ import annotations

import copy
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _on_a_gpu import (
    EAGER,
    NEEDS_GPU,
    RECORDED,
    STEPS,
    assert_same_bits,
    pictures,
    save,
    session_of,
    tensors,
    train,
    trained,
)
from _runs import ENVIRONMENT, assert_same_run
from _sessions import NAMES, on_disk
from _support import CroselCli
from _timm import BatchNormAct2d, Conv2dSame, stand_in
from torch import nn

from crosel.data.candidates import uniform
from crosel.data.dataset import Dataset, make_dataset
from crosel.errors import Diverged, Interrupted
from crosel.methods.base import Losses
from crosel.nn.frozen_norm import use_kernels
from crosel.training import checkpoint
from crosel.training.devices import deterministic_cudnn
from crosel.training.session import Session
from crosel.training.trainer import draw_epoch, fit, predict_chunks

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from relay import leg, pack, unpack

pytestmark = NEEDS_GPU
SOME = ("crosel", "lws", "pico")

# --- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "setting"),
    [*((n, f"train.bf16={b}") for b in ("true", "false") for n in (NAMES if b == "true" else SOME)),
     *((n, f"train.optimiser={kind}") for n in ("cc", "crosel") for kind in ("adam", "adamw", "muon"))],
)  # fmt: skip
def test_same_seed_same_bits_recorded_or_not(name: str, setting: str) -> None:
    first, again, eager = (trained(name, setting, graphs) for graphs in (RECORDED, RECORDED, EAGER))
    assert_same_bits(first, again)
    assert_same_bits(first, eager)


@pytest.mark.parametrize("name", SOME)
def test_a_step_in_parts_has_the_same_bits_recorded_or_not(name: str) -> None:
    recorded, eager = (session_of(name, graphs) for graphs in (RECORDED, EAGER))
    for session in (recorded, eager):
        session.progress.parts = 2  # as after running out of memory
        fit(session)
    assert_same_bits(recorded, eager)


@pytest.mark.parametrize("name", SOME)
def test_a_backbone_is_fine_tuned_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch)
    settings = ("network.name=timm/tiny", "network.freeze=1", "train.optimiser=adamw", "train.bf16=true")
    data = pictures(side=8 if name == "crosel" else 16)  # it sees 12 pixels
    recorded, eager = (trained(name, *settings, graphs, data=data) for graphs in (RECORDED, EAGER))
    again = trained(name, *settings, "network.checkpointing=true", data=data)
    assert_same_bits(recorded, eager)
    assert_same_bits(recorded, again)


def test_a_fine_tuned_networks_kernels_agree_with_pytorch() -> None:
    """In bfloat16 they are as near to double precision as PyTorch's layers are."""
    torch.manual_seed(0)
    acts = (nn.ReLU6, nn.ReLU, nn.Identity, nn.ReLU6)
    widths = ((3, 24, 1), (24, 144, 1), (144, 40, 1), (40, 320, 8))
    body = nn.Sequential(*(
        layer for act, (inputs, outputs, groups) in zip(acts, widths, strict=True)
        for layer in (Conv2dSame(inputs, outputs, 3, 2, groups=groups, bias=False), BatchNormAct2d(outputs, act()))
    ))  # fmt: skip
    for norm in body[1::2]:
        nn.init.normal_(norm.bias, 1.0)
        norm.running_mean.normal_(0, 0.1)
        norm.running_var.uniform_(0.5, 2)
    body = body.eval().to("cuda", memory_format=torch.channels_last)
    x = torch.randn(96, 3, 80, 80, device="cuda").contiguous(memory_format=torch.channels_last)

    def results(kernels: bool, double: bool = False) -> list[torch.Tensor]:
        own = copy.deepcopy(body)
        use_kernels(own).on = kernels
        own = own.double() if double else own
        with deterministic_cudnn(x.device):
            with torch.autocast("cuda", torch.bfloat16, enabled=not double):
                out = own(x.double() if double else x)
            out.double().square().mean(dim=(2, 3)).sum().backward()
        return [out, *(p.grad for p in own.parameters())]

    exact = results(False, double=True)
    ours, theirs = ([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]
                    for found in (results(True), results(False)))  # fmt: skip
    assert all(one <= 2 * other + 2e-3 for one, other in zip(ours, theirs, strict=True)), (ours, theirs)
    assert all(a.equal(b) for a, b in zip(results(True), results(True), strict=True))


@pytest.mark.parametrize("graphs", [RECORDED, EAGER])
@pytest.mark.parametrize("name", ["crosel", "pico"])
def test_from_the_host_the_bits_are_the_same(name: str, graphs: str) -> None:
    resident, streamed = trained(name, graphs), trained(name, graphs, "train.data_on=host")
    assert streamed.train.host is not None
    assert streamed.train.x.device.type == "cpu"
    assert resident.train.x.is_cuda
    assert_same_bits(resident, streamed)


@pytest.mark.parametrize("graphs", [RECORDED, EAGER])
@pytest.mark.parametrize("data_on", ["host", "device"])
@pytest.mark.parametrize("name", ["crosel", "pico"])
def test_from_the_disk_the_bits_are_the_same(name: str, data_on: str, graphs: str, tmp_path: Path) -> None:
    stored = trained(name, graphs, f"train.data_on={data_on}", data=on_disk(pictures(), tmp_path))
    assert (stored.train.host is None) == (data_on == "device")
    assert_same_bits(trained(name, graphs), stored)


def test_features_from_the_host_too() -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(5, size=256)
    data = make_dataset(draw.normal(size=(256, 20)) + y[:, None], uniform(y, 5, 0.3, 0), y=y, classes=5)
    recorded = trained("crosel", "train.data_on=host", data=data)
    assert_same_bits(recorded, trained("crosel", data=data))
    assert_same_bits(recorded, trained("crosel", "train.data_on=host", EAGER, data=data))


@pytest.mark.parametrize("extra", [(), ("train.ema_decay=0.9",), ("train.bf16=true",), ("train.data_on=host",)])
def test_recorded_passes_measure_the_same(extra: tuple[str, ...]) -> None:
    """Chunks of 48: full ones are replayed, the rest of the training and of the test set is not."""
    recorded, eager = (trained("crosel", graphs, "train.eval_batch_size=48", *extra) for graphs in (RECORDED, EAGER))
    assert recorded.forward._graph is not None
    assert eager.forward._graph is None
    assert_same_bits(recorded, eager)
    measured = [k for k in recorded.progress.rows[-1] if k.startswith(("test_", "covering", "approximated", "selec"))]
    assert len(measured) >= 4
    for one, other in zip(recorded.progress.rows, eager.progress.rows, strict=True):
        assert {k: one[k] for k in measured} == {k: other[k] for k in measured}
    x = recorded.data.x[:100]
    for (_, one), (_, other) in zip(predict_chunks(recorded, x), predict_chunks(eager, x), strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("graphs", [RECORDED, EAGER])
@pytest.mark.parametrize("name", ["crosel", "pico", "pop"])
def test_stopped_inside_an_epoch_it_goes_on_to_the_same_bits(name: str, graphs: str, tmp_path: Path) -> None:
    stopped, asked = session_of(name, graphs), 0

    def stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == STEPS + 1 + 6  # once after each step, once after an epoch: six steps into the second

    with pytest.raises(Interrupted):
        fit(stopped, (), stop)
    assert (stopped.progress.epoch, stopped.progress.step) == (1, 6)
    values, state = stopped.state()
    checkpoint.save(tmp_path, values, state, keep=1)
    saved = checkpoint.load_newest(tmp_path).checkpoint
    assert saved is not None
    resumed = session_of(name, graphs)
    resumed.restore(saved)
    fit(resumed)
    assert_same_bits(trained(name, graphs), resumed)


# --- numbers that go wrong ------------------------------------------------------------------------------------------


def poison(session: Session, row: int) -> None:
    """A loss and gradients that are not finite whenever this example is in the batch; decided on the device."""
    real = session.method.loss

    def loss(batches: Mapping[str, Any], generator: torch.Generator) -> Losses:
        losses = real(batches, generator)
        present = torch.stack([(batch.index == row).any() for batch in batches.values()]).any()
        factor = torch.ones_like(losses.report["loss"]).masked_fill(present, float("nan"))
        return Losses(losses.objective * factor, {**losses.report, "loss": losses.report["loss"] * factor})

    session.method.loss = loss  # type: ignore[method-assign]


def poisoned(name: str, row: int, *settings: str, data: Dataset | None = None) -> Session:
    session = session_of(name, *settings, data=data)
    poison(session, row)
    return session


@pytest.mark.parametrize("name", NAMES)
def test_a_poisoned_example_is_skipped_and_counted(name: str) -> None:
    runs = {}
    for graphs in (RECORDED, EAGER):
        session = runs[graphs] = poisoned(name, 17, graphs, "train.bad_batches=skip", "train.ema_decay=0.9")
        rows = fit(session)
        assert all(torch.isfinite(t).all() for t in session.state()[0].values() if t.is_floating_point())
        assert all(np.isfinite(row["loss"]) for row in rows)
        counts = [row["skipped_batches"] for row in rows]
        if name == "crosel":  # two networks, each with batches of its own
            assert all(1 <= count < STEPS for count in counts)
        else:
            assert counts == [1, 1, 1], "each example comes once an epoch"
    assert_same_bits(runs[RECORDED], runs[EAGER])
    before, after = session_of(name), runs[RECORDED]
    moved = [n for n, t in tensors(before).items() if n in tensors(after) and not t.equal(tensors(after)[n])]
    assert any(n.startswith("method.networks") for n in moved), "the other batches were learnt from"


def test_skipping_changes_nothing_where_nothing_is_skipped_and_works_from_the_host() -> None:
    plain = trained("crosel", RECORDED)
    assert_same_bits(plain, trained("crosel", RECORDED, "train.bad_batches=skip"))
    streamed = poisoned("proden", 17, RECORDED, "train.bad_batches=skip", "train.data_on=host")
    resident = poisoned("proden", 17, RECORDED, "train.bad_batches=skip")
    fit(streamed)
    fit(resident)
    assert_same_bits(streamed, resident)


@pytest.mark.parametrize("data_on", ["device", "host"])
@pytest.mark.parametrize("graphs", [RECORDED, EAGER])
def test_stop_names_the_step_and_the_ids(graphs: str, data_on: str) -> None:
    data = replace(pictures(), ids=tuple(f"pic-{i}" for i in range(256)))
    probe = session_of("cc", data=data)
    probe.method.begin_epoch(1)
    batch = draw_epoch(probe, probe.method.streams())["all"][5].tolist()  # the sixth step: replayed, if recorded
    session = poisoned("cc", batch[3], graphs, "train.log_every=1000", f"train.data_on={data_on}", data=data)
    with pytest.raises(Diverged) as caught:
        fit(session)
    text = str(caught.value)
    assert text.startswith(f"the loss is no longer finite (NaN or infinite) at step 6 of {STEPS} of epoch 1; ")
    assert caught.value.ids == tuple(f"pic-{i}" for i in sorted(batch))
    assert "\n" not in text


# --- kills ----------------------------------------------------------------------------------------------------------


def test_killed_twice_it_ends_as_an_unbroken_run(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """SIGKILL to a real process, in the warm-up or not long after it, and again while the run goes on."""
    source, run = save(tmp_path / "x.npz"), tmp_path / "run"
    settings = (
        "network.name=wrn-10-1", "train.epochs=40", "train.batch_size=16", "method.warmup=4", "method.bank_length=2",
        "method.gamma=0.3", "train.bf16=true",
    )  # fmt: skip
    assert train(crosel_cli, source, tmp_path / "unbroken", *settings).code == 0
    flags = [part for item in settings for part in ("--set", item)]
    begin = ["train", str(source), *flags, "--out", str(run), "--device", "cuda"]
    for reported, command in ((3, begin), (15, ["train", "--resume", "--out", str(run), "--device", "cuda"])):
        process = subprocess.Popen(
            [sys.executable, "-m", "crosel", *command], env=ENVIRONMENT, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        while process.poll() is None and _lines(run) < reported:
            time.sleep(0.002)
        process.kill()
        _, said = process.communicate(timeout=60)
        assert process.returncode == -9, said
        assert reported <= _lines(run) < 40
    assert crosel_cli("train", "--resume", "--out", run, "--device", "cuda").code == 0
    assert_same_run(run, tmp_path / "unbroken")


@pytest.mark.parametrize("optimiser", ["sgd", "muon"])
def test_in_two_legs_it_ends_as_an_unbroken_run(tmp_path: Path, optimiser: str) -> None:
    """The state packed, sent and unpacked in between, with the settings of the paper's own run."""
    source = save(tmp_path / "x.npz")
    settings = (
        "network.name=wrn-10-1", "train.epochs=40", "train.batch_size=16", "method.warmup=4", "method.bank_length=3",
        "method.gamma=0.3", "train.bf16=true", f"train.optimiser={optimiser}",
    )  # fmt: skip
    first = (str(source), *(part for item in settings for part in ("--set", item)), "--device", "cuda")
    assert leg(tmp_path / "unbroken", first, lambda: False) == "the end"
    there = leg(tmp_path / "run", first, lambda: _lines(tmp_path / "run") >= 10)
    pack(tmp_path / "run", tmp_path / "parts", 100_000)
    assert unpack(tmp_path / "parts", tmp_path / "elsewhere") == there != "the end"
    assert leg(tmp_path / "elsewhere", (), lambda: False) == "the end"
    assert_same_run(tmp_path / "elsewhere", tmp_path / "unbroken", same_files=False)


def _lines(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0
