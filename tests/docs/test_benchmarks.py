"""The benchmarks can be started, and say what is wrong in one line. What they measure is their own business."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import runpy
import sys
from pathlib import Path

import pytest
from _blocks import ROOT

from crosel.errors import UserError

BENCHMARKS = sorted(
    path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in ("record", "pretrained")
)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_it_can_be_started(name: str) -> None:
    """What it imports of crosel is there."""
    assert callable(importlib.import_module(name).main)


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
        (
            ("kernels.py", "--case", "wrn-10-1", "--out", "x"),
            "kernels.py: --case wrn-10-1: write a network and a batch",
        ),
        (
            ("kernels.py", "--parts", "profil", "--out", "x"),
            "kernels.py: --parts profil: there is no such thing (did y",
        ),
        (("kernels.py", "--case", "mlp 4", "--out", "x"), "kernels.py: device 'cuda': torch finds no CUDA device"),
        (("agreement.py", "steps", "--out", "x.json"), "agreement.py: device 'cuda': torch finds no CUDA device"),
        (("readers.py", "--data", "gone"), "readers.py: gone/cifar-10-batches-py does not exist"),
        (("real_world.py", "--data", "x", "--trials", "gone", "--out", "x"), "real_world.py: gone: no such file"),
        (("report_size.py", "gone"), "crosel: gone: no such run folder"),
        (("generators.py", "--rule", "unifrm:q=1"), "generators.py: unknown candidate rule 'unifrm'"),
        (("missing_truth.py", "table", "--out", "gone"), "missing_truth.py: gone: no runs are recorded here"),
        (("lws_lost_class.py", "table", "--out", "gone"), "lws_lost_class.py: gone: no runs are recorded here"),
        (
            ("lws_lost_class.py", "run", "--variants", "plan", "--out", "x"),
            "lws_lost_class.py: --variants plan: there is no such thing (did you mean 'plain'?); there are plain",
        ),
        (("missing_truth.py", "run", "--seeds", "0-x", "--out", "x"), "missing_truth.py: argument --seeds: seeds are "),
        (("missing_truth.py", "run", "--out", "x"), "missing_truth.py: run needs --on; --help shows what there is"),
        (
            ("side_by_side.py", "gone", "--cores", "a", "--minutes", "1", "--logs", "x"),
            "side_by_side.py: --cores a: numbers of cores are needed",
        ),
        (("relay.py", "pack", "gone", "--to", "x"), "relay.py: gone: no such run folder"),
        (("relay.py", "leg", "gone", "--seconds", "0"), "relay.py: argument --seconds: a number above 0 is needed"),
        (("relay.py", "leg", "gone", "--seconds", "9"), "relay.py: gone: no such run folder; the first leg needs the "),
        (("same_bits.py", "a", "b"), "same_bits.py: the following arguments are required: --out"),
        (("run_records.py", "pack", "gone", "--out", "x"), "run_records.py: gone: no runs found"),
        (("run_records.py", "unpack", "gone", "--to", "x"), "run_records.py: gone: no such file"),
        (("generators.py", "--zzz"), "generators.py: unrecognized arguments: --zzz; --help shows what there is"),
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
    monkeypatch.setattr("sys.argv", [script, *arguments[1:]])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert said.startswith(message)
    assert len(said.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no process to cores")
def test_side_by_side_on_cores_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    core = min(os.sched_getaffinity(0))
    shown = "import os; print(os.sched_getaffinity(0), os.environ['OMP_NUM_THREADS'])"
    lines = ["# the most important first", f'{sys.executable} -c "{shown}"', "", "false", "sleep 60", "echo never"]
    (tmp_path / "commands.txt").write_text("\n".join(lines), encoding="utf-8")
    given = ["--cores", str(core), "--minutes", "0.1", "--logs", str(tmp_path / "logs")]
    monkeypatch.setattr("sys.argv", ["side_by_side.py", str(tmp_path / "commands.txt"), *given])
    assert importlib.import_module("side_by_side").main() == 3
    assert (tmp_path / "logs" / "2.log").read_text() == f"{{{core}}} 1\n"
    said = [line.partition(" after ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["line 2: ended with 0", "line 4: ended with 1", "line 5: stopped", "line 6: not started"]


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("seeds", {"0-3": [0, 1, 2, 3], "7": [7], "5,0": [5, 0]}, ["", "0-", "3-1", "0-x", "1,,2", "-1"]),
        ("count", {"1": 1, "20": 20}, ["", "0", "-1", "1.5", "many"]),
        ("positive", {"0.5": 0.5, "3": 3.0}, ["", "0", "-1", "nan", "inf", "long"]),
    ],
)
def test_kinds_of_arguments(kind: str, good: dict[str, object], bad: list[str]) -> None:
    read = getattr(importlib.import_module("record"), kind)
    assert {text: read(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(f"not {text!r}")):
            read(text)


def test_a_record_that_grows(tmp_path: Path) -> None:
    record, path = importlib.import_module("record"), tmp_path / "new" / "rows.jsonl"
    assert record.read(path) == []
    for seed in (0, 1):
        record.add({"seed": seed}, path)
    assert record.read(path) == [{"seed": 0}, {"seed": 1}]
    assert record.done(path, "seed") == {(0,), (1,)}
    path.write_text('{"seed": 0}\n{"seed"', encoding="utf-8")
    with pytest.raises(UserError, match="line 2, column 8: not valid JSON"):
        record.read(path)


def test_a_record_makes_the_folder_it_goes_to(tmp_path: Path) -> None:
    """It is written when all the work is done."""
    importlib.import_module("record").save({"answer": 42}, tmp_path / "new" / "folder" / "record.json")
    record = json.loads((tmp_path / "new" / "folder" / "record.json").read_text(encoding="utf-8"))
    assert record["answer"] == 42
    assert "commit" in record


def test_kernels_that_overlap_are_counted_once() -> None:
    kernels = importlib.import_module("kernels")
    names = ("sm90_xmma_wgrad_implicit_gemm", "moments", "sm90_xmma_fprop_implicit_gemm")
    spans = ((0, 3000), (1000, 2000), (4000, 6000))
    found = kernels.per_step([kernels.Kernel(name, *span) for name, span in zip(names, spans, strict=True)], 2)
    assert found["at_once_ms"] == {"0": 0.5, "1": 2.0, "2": 0.5}
    assert (found["span_ms"], found["busy_ms"], found["sum_ms"]) == (3.0, 2.5, 3.0)
    assert {group: row["ms"] for group, row in found["groups"].items()} == {
        "batch norm: moments": 0.5, "convolution: wgrad": 1.5, "convolution: forward": 1.0,
    }  # fmt: skip
