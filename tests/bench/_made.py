"""Run folders made by hand, with figures that can be checked with a pencil."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from _support import PAPER_SETS

from crosel.config import build_config


def make_run(
    path: Path,
    source: str = "cifar10",
    rule: str = "uniform:q=0.5",
    method: str = "crosel",
    seed: int = 0,
    sets: tuple[str, ...] = (),
    accuracy: float | None = 0.9,
    epochs: int = 2,
    done: int | None = None,
    environment: dict[str, Any] | None = None,
    **last: float,
) -> Path:
    """Write config, metrics and environment as a run of `epochs` epochs leaves them, of which `done` are there."""
    values = {"source": source, "candidates": rule, "seed": seed, "method": {"name": method}}
    # CroSel as in the paper, whose figures stand beside its rows.
    papers = PAPER_SETS if method == "crosel" else ()
    config = build_config(values=values, settings=[f"train.epochs={epochs}", "network.name=wrn-16-4", *papers, *sets])
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    rows = []
    for epoch in range(1, (epochs if done is None else done) + 1):
        row: dict[str, Any] = {
            "epoch": epoch, "phase": "training", "loss": 1.0, "seconds": 10.0 * epoch,
            "images_per_second": 100.0 * epoch, "peak_memory_mib": 50.0, "test_accuracy": 0.99,
        }  # fmt: skip
        rows.append(row)
    if rows:
        rows[-1] |= last
        if accuracy is None:
            del rows[-1]["test_accuracy"]
        else:
            rows[-1]["test_accuracy"] = accuracy
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    content = {"gpu": "NVIDIA H200", "command": ["crosel", "train"]} if environment is None else environment
    (path / "environment.json").write_text(json.dumps(content), encoding="utf-8")
    return path
