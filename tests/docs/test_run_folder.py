"""The page about the run folder names every file of a run, and every number that a run has recorded."""

from __future__ import annotations

import re
from pathlib import Path

from _blocks import ROOT
from _support import run_cli
from run_records import groups, read_group

NAMED = set(re.findall(r"`([\w.]+)/?`", (ROOT / "docs/run-folder.md").read_text(encoding="utf-8")))


def test_every_file_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = ("network.width=4", "train.epochs=3", "method.warmup=1")
    settings = [part for setting in short for part in ("--set", setting)]
    assert run_cli("train", "digits", "--candidates", "uniform:q=0.3", *settings, "--out", run).code == 0
    files = {path.name for path in run.iterdir()}
    assert {"config.yaml", "selection.npz", "done"} <= files <= NAMED


def test_every_metric_is_named() -> None:
    names = {name for group in groups() for run in read_group(group).values() for name in run["metrics"]}
    assert {"selection_ratio", "purified_set_size"} <= names <= NAMED
