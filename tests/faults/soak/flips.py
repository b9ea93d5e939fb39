"""Every byte of a checkpoint flipped in turn: always noticed, and the one before it is used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from crosel.training import checkpoint


def regions(content: bytes) -> Iterator[tuple[str, int, int]]:
    """(what, begin, end) of everything in a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    yield "length of the header", 0, 8
    header = content[8 : 8 + length].decode("ascii")
    begin = header.index("{", header.index('"__metadata__"'))
    _, end = json.JSONDecoder().raw_decode(header, begin)
    config = header.index("config", begin)
    yield "header: places of tensors", 8, 8 + begin
    yield "header: metrics and progress", 8 + begin, 8 + config
    yield "header: config", 8 + config, 8 + end
    yield "header: places of tensors", 8 + end, 8 + length
    names = {"method": "weights and tables", "momentum": "optimiser", "generator": "random state"}
    for name, entry in json.loads(header).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            yield names.get(name.partition(".")[0].partition("_")[0], "other tensors"), begin, end


def flip_all(folder: Path, newest: Path, stride: int = 1) -> Counter[str]:
    """Flip one bit of every `stride`-th byte of each region; how many were noticed, by region."""
    content, noticed = newest.read_bytes(), Counter()
    previous = checkpoint.load_newest(folder).checkpoint
    assert previous is not None
    for what, begin, end in regions(content):
        for at in range(begin, end, stride):
            damaged = bytearray(content)
            damaged[at] ^= 1 << (at % 8)
            newest.write_bytes(damaged)
            found = checkpoint.load_newest(folder)
            assert found.damaged == [newest], f"byte {at} of {what}: not noticed"
            assert found.checkpoint is not None
            assert found.checkpoint.state["epoch"] == previous.state["epoch"] - 1, f"byte {at} of {what}"
            noticed[what] += 1
    newest.write_bytes(content)
    again = checkpoint.load_newest(folder)
    assert again.damaged == []
    return noticed


def small_run(folder: Path) -> Path:
    import torch

    from crosel.config import build_config
    from crosel.runs.pipeline import train_run

    values = {"source": "digits", "candidates": "uniform:q=0.3", "method": {"name": "cc"}}
    config = build_config(settings=["train.epochs=2", "network.width=2", "train.batch_size=256"], values=values)
    train_run(config, folder / "run", torch.device("cpu"))
    return folder / "run"


def run(folder: Path, out: Path | None) -> dict[str, Any]:
    checkpoints = small_run(folder) / "checkpoints"
    newest = sorted(checkpoints.glob("*.safetensors"))[-1]
    size = newest.stat().st_size
    noticed = flip_all(checkpoints, newest)
    assert sum(noticed.values()) >= size * 0.99, "not the whole file was tried"
    assert np.all([count > 0 for count in noticed.values()])
    return {"bytes_of_the_file": size, "flipped_and_noticed": sum(noticed.values()), "by_region": dict(noticed)}
