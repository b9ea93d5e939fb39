"""How time and memory grow: linearly with the examples, and not with the classes beyond a batch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.data.dataset import make_dataset
from crosel.data.formats import InputSpec
from crosel.data.sources import open_inputs
from crosel.methods.bank import MemoryBank
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.trainer import fit

CPU = torch.device("cpu")


def session(n: int, classes: int, epochs: int = 3) -> Session:
    rng = np.random.default_rng(0)
    y = np.arange(n) % classes
    data = make_dataset(rng.normal(size=(n, 4)).astype(np.float32), y=y, classes=classes)
    data = draw_candidates(data, "uniform:q=0.1", 0)
    values = {
        "source": "made", "method": {"name": "crosel", "warmup": 1}, "network": {"hidden": [4]},
        "train": {"epochs": epochs, "batch_size": 50, "eval_batch_size": 50},
    }  # fmt: skip
    return build_session(resolve(build_config(settings=[], values=values), data), data, CPU)


def test_an_epoch_grows_linearly_with_the_examples() -> None:
    small, large = session(1000, 5), session(8000, 5)
    fastest = [min(row["seconds"] for row in fit(s)[1:]) for s in (small, large)]
    # Eight times the work; anything quadratic would be 64 times. Wide, because the machine may be busy.
    assert fastest[1] < 24 * fastest[0]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_predictions_grow_linearly_with_the_features(tmp_path: Path, ending: str) -> None:
    fastest = []
    for k in (1500, 12_000):
        names, path = [f"f{i}" for i in range(k)], tmp_path / f"{k}.{ending}"
        row = json.dumps(dict.fromkeys(names, 0.5)) if ending == "jsonl" else ",".join(["0.5"] * k)
        path.write_text(f"{row}\n" if ending == "jsonl" else f"{','.join(names)}\n{row}\n")
        took = []
        for _ in range(7):
            start = time.process_time()  # milliseconds: by the clock, a busy machine's other work would count
            (chunk,) = open_inputs(path, InputSpec((k,), names[::-1]))
            took.append(time.process_time() - start)
        assert chunk.x.shape == (1, k)
        fastest.append(min(took))
    assert fastest[1] < 24 * fastest[0]  # eight times the work, as above


def held(s: Session) -> int:
    """Bytes of what CroSel keeps for each example (the networks aside)."""
    kept = {n: t for n, t in s.method.state_dict().items() if not n.startswith("networks.")}
    assert kept
    return sum(t.numel() * t.element_size() for t in kept.values())


def test_what_is_kept_of_an_example_does_not_grow_with_the_classes() -> None:
    assert held(session(200, 2)) == held(session(200, 100))


@pytest.mark.parametrize("classes", [10, 1000])
def test_no_tensor_of_the_training_pass_outgrows_a_chunk(classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    s = session(1000, classes, epochs=2)
    seen: list[int] = []
    write = MemoryBank.write

    def watched(bank: MemoryBank, rows: slice, probabilities: torch.Tensor) -> None:
        seen.append(probabilities.numel())
        write(bank, rows, probabilities)

    monkeypatch.setattr(MemoryBank, "write", watched)
    fit(s)
    assert max(seen) == 50 * classes


def test_bank_of_imagenet_fits_in_64_mib() -> None:
    with torch.device("meta"):
        bank = MemoryBank(3, 1_281_167)
    assert sum(b.numel() * b.element_size() for b in bank.buffers()) < 64 * 2**20
