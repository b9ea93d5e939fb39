"""Memory: data that stay on the host, nothing that grows. See test_out_of_memory.py, too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from _sessions import CPU, NAMES, bits, different, make_session, on_disk, small_data
from _support import CroselCli, TinyRun, small_arrays

from crosel.training.batches import PinnedLoader
from crosel.training.devices import inputs_stay_on_host
from crosel.training.session import Session
from crosel.training.trainer import fit, predicted_probabilities

# --- data that stay on the host -------------------------------------------------------------------------------------


def test_auto_keeps_on_the_host_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    for name, value in {"memory_reserved": 500, "memory_allocated": 200, "mem_get_info": (700, 2000)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert not inputs_stay_on_host("auto", 500, cuda)
    assert inputs_stay_on_host("auto", 700, cuda)
    assert not inputs_stay_on_host("auto", 10**9, CPU)
    assert not inputs_stay_on_host("device", 10**9, cuda)
    assert inputs_stay_on_host("host", 1, CPU)


@pytest.mark.parametrize("where", ["host", "disk"])
@pytest.mark.parametrize("name", NAMES)
def test_from_elsewhere_the_bits_are_the_same(name: str, where: str, tmp_path: Path) -> None:
    settings = ("train.ema_decay=0.9", "network.name=small-cnn") if name == "crosel" else ()
    resident = make_session(name, *settings)
    if where == "host":
        streamed = make_session(name, *settings, "train.data_on=host")
    else:
        streamed = make_session(name, *settings, data=on_disk(small_data(), tmp_path))
    rows, others = fit(resident), fit(streamed)
    assert streamed.train.host is not None
    assert streamed.train.host._buffers, "batches went through the host's buffers"
    assert different(bits(resident), bits(streamed)) == []
    for row, other in zip(rows, others, strict=True):
        assert row["loss"] == other["loss"]
        assert row.get("test_accuracy") == other.get("test_accuracy")
        assert row.get("covering_rate") == other.get("covering_rate")
    ours, theirs = (predicted_probabilities(session, session.data.x) for session in (resident, streamed))
    assert ours.equal(theirs)


def test_features_from_the_host_too() -> None:
    data = small_data(**{k: v for k, v in small_arrays(images=False).items() if k.startswith("x")})
    resident, streamed = make_session("crosel", data=data), make_session("crosel", "train.data_on=host", data=data)
    fit(resident)
    fit(streamed)
    assert different(bits(resident), bits(streamed)) == []


def test_a_run_may_go_on_with_the_data_elsewhere(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    import shutil

    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    result = crosel_cli(*tiny_run.command, "--set", "train.data_on=host", "--out", run, "--resume")
    assert result.code == 0, result.err


def test_a_buffer_is_not_overwritten_by_the_next_step() -> None:
    x = torch.arange(40, dtype=torch.uint8).view(20, 2)
    rows = PinnedLoader(x, CPU)
    rows.begin_epoch({"a": torch.tensor([[0, 1], [2, 3], [4, 5]]), "b": torch.tensor([[6], [7], [8]])})
    first, second = rows.fetch(0), rows.fetch(1)
    assert first["a"].tolist() == x[:2].tolist()
    assert second["a"].tolist() == x[2:4].tolist()
    assert rows.fetch(2)["b"].tolist() == x[8:9].tolist()


# --- nothing grows --------------------------------------------------------------------------------------------------


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_no_tensor_outlives_its_epoch() -> None:
    """The long form (500 epochs, the memory of the process) is `python -m soak leak`."""
    counts: dict[int, int] = {}

    class Count:
        def on_step(self, *args: Any) -> None: ...
        def on_checkpoint(self, *args: Any) -> None: ...
        def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
            if row["epoch"] in (5, 20):
                counts[row["epoch"]] = live_tensors()

    session = make_session("crosel", epochs=20)
    fit(session, (Count(),))
    assert counts[5] == counts[20] > 10
