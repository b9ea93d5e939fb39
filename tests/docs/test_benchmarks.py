"""The benchmarks' own command lines: help, and faults of their users. What they measure is their own business."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from _blocks import ROOT

from crosel.errors import UserError

SHARED = {"changes.py", "record.py", "sureness.py"}  # what benchmarks use, and nobody runs
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if path.name not in SHARED)
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_help_says_what_it_is_for_and_measures_nothing(name: str) -> None:
    """In a process of its own: it imports what it needs by itself."""
    command = [sys.executable, ROOT / "benchmarks" / name, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout
    assert len(result.stdout.splitlines()) > 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("speed.py", "--device", "cuda", "--out", "x.json"), "speed.py: device 'cuda': torch finds no CUDA device"),
        (("speed.py", "--device", "cpu", "--only", "zzz", "--out", "x.json"), "speed.py: --only zzz: no case holds"),
        (
            ("speed.py", "--device", "cpu", "--data", "gone", "--out", "x.json"),
            "speed.py: gone/cifar-10-batches-py does not",
        ),
        (("variants.py", "--out", "x.json"), "variants.py: device 'cuda': torch finds no CUDA device"),
        (("agreement.py", "steps", "--out", "x.json"), "agreement.py: device 'cuda': torch finds no CUDA device"),
        (("memory_estimate.py", "--out", "x.json"), "memory_estimate.py: device 'cuda': torch finds no CUDA device"),
        (("memory_estimate.py", "--against", "gone.json"), "memory_estimate.py: gone.json: no such file"),
        (("readers.py", "--data", "gone"), "readers.py: gone/cifar-10-batches-py does not exist"),
        (("real_world.py", "--data", "x", "--trials", "gone", "--out", "x"), "real_world.py: gone: no such file"),
        (("report_size.py", "gone"), "crosel: gone: no such run folder"),
        (("confidence.py", "gone"), "confidence.py: gone/predictions.npz: no such file"),
        (("gamma_curve.py", "gone"), "gamma_curve.py: gone/config.yaml: no such file"),
        (("generators.py", "--rule", "unifrm:q=1"), "generators.py: unknown candidate rule 'unifrm'"),
        (("missing_truth.py", "table", "--out", "gone"), "missing_truth.py: gone: no runs are recorded here"),
        (("lws_lost_class.py", "table", "--out", "gone"), "lws_lost_class.py: gone: no runs are recorded here"),
        (
            ("lws_lost_class.py", "run", "--variants", "plan", "--out", "x"),
            "lws_lost_class.py: --variants plan: there is no such thing (did you mean 'plain'?); there are plain",
        ),
        (("fall_of_selection.py", "cut"), "fall_of_selection.py: cifar-10-batches-py does not exist"),
        (("averages.py", "gone", "--out", "x"), "averages.py: gone: no such run folder"),
        (("averages.py", "table", "--out", "gone"), "averages.py: gone: no runs are recorded here"),
        (
            ("fall_of_selection.py", "run", "--cut", "gone.npz", "--out", "x"),
            "fall_of_selection.py: --cut gone.npz is not there",
        ),
        (
            ("fall_of_selection.py", "run", "--arms", "zzz", "--out", "x"),
            "fall_of_selection.py: --arms zzz: there is no such thing; there are as it is",
        ),
        (("missing_truth.py", "run", "--seeds", "0-x", "--out", "x"), "missing_truth.py: argument --seeds: seeds are "),
        (("missing_truth.py", "run", "--out", "x"), "missing_truth.py: run needs --on; --help shows what there is"),
        (("generators.py", "--zzz"), "generators.py: unrecognized arguments: --zzz; --help shows what there is"),
        (("memory_estimate.py", "--against", __file__), f"memory_estimate.py: {__file__}, line 1, column 3: not valid"),
        (
            ("real_world.py", "--data", "x", "--trials", __file__, "--out", "x"),
            f"real_world.py: {__file__}, line 1, column 3: not valid JSON",
        ),
    ],
)
def test_what_the_user_can_mend_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],  # report_size.py leaves the last word to a process
) -> None:
    """In this process, which has torch loaded."""
    script = str(ROOT / "benchmarks" / arguments[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr("sys.argv", [script, *arguments[1:]])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert said.startswith(message)
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_ends_in_the_same_way(name: str) -> None:
    assert (ROOT / "benchmarks" / name).read_text(encoding="utf-8").endswith("    end_with(main)\n")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("seeds", {"0-3": [0, 1, 2, 3], "7": [7], "5,0": [5, 0]}, ["", "0-", "3-1", "0-x", "1,,2", "-1"]),
        ("count", {"1": 1, "20": 20}, ["", "0", "-1", "1.5", "many"]),
        ("positive", {"0.5": 0.5, "3": 3.0}, ["", "0", "-1", "nan", "inf", "long"]),
    ],
)
def test_kinds_of_arguments(
    kind: str, good: dict[str, object], bad: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    read = getattr(importlib.import_module("record"), kind)
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"not {text!r}")):
            read(text)


def test_a_record_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    record, path = importlib.import_module("record"), tmp_path / "new" / "rows.jsonl"
    assert record.read(path) == []
    for seed in (0, 1):
        record.add({"seed": seed}, path)
    assert record.read(path) == [{"seed": 0}, {"seed": 1}]
    path.write_text('{"seed": 0}\n{"seed"', encoding="utf-8")
    with pytest.raises(UserError, match="line 2, column 8: not valid JSON"):
        record.read(path)


def test_a_record_makes_the_folder_it_goes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written when all the work is done."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    importlib.import_module("record").save({"answer": 42}, tmp_path / "new" / "folder" / "record.json")
    record = json.loads((tmp_path / "new" / "folder" / "record.json").read_text(encoding="utf-8"))
    assert record["answer"] == 42
    assert "commit" in record
