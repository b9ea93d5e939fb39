"""`crosel bench` and `crosel tables` as commands: what they print, and their exit codes."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest
from _made import make_run
from _runs import untimed
from _support import CroselCli, run_in_process

from crosel.bench import EXECUTORS, expand, read_suite, suites


@pytest.fixture(autouse=True)
def _in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXECUTORS, "local", run_in_process)


def test_a_suite_from_start_to_tables(tmp_path: Path, crosel_cli: CroselCli) -> None:
    out = tmp_path / "out"
    result = crosel_cli("bench", "digits-tiny", "--seeds", 1, "--out", out, "--device", "cpu")
    assert result.code == 0, result.err
    assert result.out.splitlines() == [f"2 of 2 runs done; tables: crosel tables {out}"]
    assert "done     digits-q0.3/cc-seed0" in result.err
    listed = crosel_cli("bench", "digits-tiny", "--out", out, "--list")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["done", "new", "done", "new"]
    text = crosel_cli("tables", out)
    assert text.code == 0, text.err
    assert text.out.startswith("### digits, uniform:q=0.3\n\n| method | network |")
    written = crosel_cli("tables", out, "--out", tmp_path / "t" / "x.csv")
    assert written.out == f"tables: {tmp_path / 't' / 'x.csv'}\n"
    assert "Last epoch" in written.err
    assert (tmp_path / "t" / "x.csv").read_text(encoding="utf-8").startswith("dataset,candidates,method")


def test_parts_of_a_suite_in_one_folder_are_the_suite(tmp_path: Path, crosel_cli: CroselCli) -> None:
    """As from two machines: the data lie elsewhere, and so do the runs."""
    whole, parts, both = tmp_path / "whole", [tmp_path / "a" / "out", tmp_path / "b" / "out"], tmp_path / "both"
    assert crosel_cli("bench", "digits-tiny", "--out", whole, "--device", "cpu").code == 0
    chosen = (("--only", "*/cc-*", "--only", "*/crosel-seed1"), ("--seeds", 1, "--only", "digits-q0.3/crosel-*"))
    for part, words, count in zip(parts, chosen, (3, 1), strict=True):
        result = crosel_cli("bench", "digits-tiny", *words, "--data", part.parent, "--out", part, "--device", "cpu")
        assert (result.code, result.out) == (0, f"{count} of {count} runs done; tables: crosel tables {part}\n")
        shutil.copytree(part, both, dirs_exist_ok=True)
    left = crosel_cli("bench", "digits-tiny", "--out", parts[0], "--list").out.splitlines()
    assert [line.split()[0] for line in left] == ["new", "done", "done", "done"]

    for out in (whole, both):
        listed = crosel_cli("bench", "digits-tiny", "--out", out, "--list").out.splitlines()
        assert [line.split()[0] for line in listed] == ["done"] * 4
    again = crosel_cli("bench", "digits-tiny", "--out", both, "--device", "cpu")
    assert (again.code, again.err.count("skipped ")) == (0, 4)
    assert figures(crosel_cli("tables", both, "--format", "csv").out) == figures(
        crosel_cli("tables", whole, "--format", "csv").out
    )


def figures(table: str) -> list[dict[str, str]]:
    """Rows of a table, but for what two runs of the same settings may differ in."""
    rows = list(csv.DictReader(table.splitlines()))
    assert [row["method"] for row in rows] == ["crosel", "cc"]
    assert {row["seeds"] for row in rows} == {"0 1"}
    return untimed(rows)


@pytest.mark.parametrize("on", ["local", "ray"])
def test_a_part_needs_its_own_data_only_wherever_it_runs(
    tmp_path: Path, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    monkeypatch.setitem(EXECUTORS, on, EXECUTORS["local"])  # a real cluster: tests/cluster
    suite = write_suite(
        tmp_path / "mine.yaml", {"candidates": "uniform:q=0.3", "method": "cc"}, grid={"source": ["cifar10", "digits"]}
    )
    words = ("bench", suite, "--on", on, "--out", tmp_path / "out", "--device", "cpu", "--jobs", 2)
    result = crosel_cli(*words, "--only", "digits*")
    assert (result.code, result.out) == (0, f"1 of 1 runs done; tables: crosel tables {tmp_path / 'out'}\n")
    listed = crosel_cli("bench", suite, "--out", tmp_path / "out", "--only", "digits*", "--list").out.splitlines()
    assert [line.split(":")[0] for line in listed] == ["done   digits-q0.3/cc-seed0"]
    assert not (tmp_path / "out" / "cifar10-q0.3").exists()


def write_suite(path: Path, base: dict[str, object], **more: object) -> Path:
    path.write_text(json.dumps({"base": {**base, "train.epochs": 2}, **more}), encoding="utf-8")
    return path


def test_a_failing_run_gives_exit_code_1(tmp_path: Path, crosel_cli: CroselCli) -> None:
    suite = write_suite(tmp_path / "mine.yaml", {"source": "digits", "candidates": "uniform:q=0.3", "method.warmup": 9})
    result = crosel_cli("bench", suite, "--out", tmp_path / "out", "--device", "cpu")
    assert result.code == 1
    assert result.out.splitlines()[0] == "0 of 1 runs done"  # nothing to make tables of
    assert "failed: digits-q0.3/crosel-seed0: method.warmup is 9, but the run has only 2 epochs" in result.out
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("paper-main",),
            "suite 'paper-main', run cifar10-q0.1/crosel-seed0: cifar-10-batches-py does not exist; give the folder "
            "of the published files: --data DIR, or",
        ),
        (
            ("paper-main", "--data", "x", "--only", "*q0.5*seed2"),
            "suite 'paper-main', run cifar10-q0.5/crosel-seed2: x/cifar-10-batches-py does not exist; give the folder",
        ),
        (
            ("paper-svhn",),
            "suite 'paper-svhn', run svhn-q0.1/crosel-seed0: train_32x32.mat does not exist; give the folder of the "
            "published files: --data DIR, or download them",
        ),
        (
            ("realworld",),
            "suite 'realworld', run lost/crosel-seed0: source 'lost.mat': no such file; if it lies elsewhere: "
            "--data DIR",
        ),
    ],
)
def test_data_that_no_run_would_find_are_said_once_and_nothing_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosel_cli: CroselCli, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = crosel_cli("bench", *words)
    assert result.code == 2
    assert result.err.startswith(f"crosel: {says}")
    assert len(result.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_that_have_their_data_are_run_though_others_have_not(tmp_path: Path, crosel_cli: CroselCli) -> None:
    base, out = {"candidates": "uniform:q=0.3", "method": "cc"}, tmp_path / "out"
    sources = [str(tmp_path / "none.npz"), "digits"]
    suite = write_suite(tmp_path / "mine.yaml", base, grid={"source": sources})
    result = crosel_cli("bench", suite, "--out", out, "--device", "cpu")
    assert result.code == 1
    assert result.out.startswith("1 of 2 runs done")
    assert f"failed: none-q0.3/cc-seed0: {tmp_path / 'none.npz'}: no such file" in result.out
    told = f"{suite}, run none-q0.3/cc-seed0: {tmp_path / 'none.npz'}: no such file or folder"
    assert result.err.splitlines()[1].startswith(told)  # before the first begins
    again = crosel_cli("bench", suite, "--out", out, "--device", "cpu")  # what is done needs no data
    assert again.code == 2
    assert again.err.startswith(f"crosel: {told}")


def test_what_there_is(crosel_cli: CroselCli) -> None:
    lines = crosel_cli("bench", "list").out.splitlines()
    assert len(lines) == len(suites())
    assert any(line.startswith("paper-main ") and line.endswith("(126 runs)") for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("bench", "digist"), "unknown suite 'digist' (did you mean 'digits'?)"),
        (("bench", "digits-tiny", "--on", "mars"), "--on mars: unknown; choose from local, ray"),
        (("bench", "digits-tiny", "--jobs", "0"), "jobs"),
        (
            ("bench", "digits-tiny", "--set", "train.lr=x"),
            "suite 'digits-tiny', run digits-q0.3/crosel-seed0: setting",
        ),
        (
            ("bench", "digits-tiny", "--only", "cc"),
            "suite 'digits-tiny': no run matches --only cc; a pattern is for the whole name: try --only '*cc*'",
        ),
        (("bench", "digits-tiny", "--only", "*cc*", "--only", "*x*", "--list"), "no run matches --only '*x*'; the ne"),
        (("bench", "digits-tiny", "--only", "*seed1", "--seeds", "1"), "no run matches --only '*seed1'; the nearest"),
        (("tables", "nowhere"), "nowhere: no such folder"),
        (("tables", ".", "--format", "pdf"), "unknown format 'pdf'"),
    ],
)
def test_mistakes_give_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crosel_cli: CroselCli, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = crosel_cli(*words)
    assert result.code == 2
    assert says in result.err
    assert len(result.err.splitlines()) <= 2
    assert not (tmp_path / "bench").exists()


def test_tables_of_made_runs_in_latex(tmp_path: Path, crosel_cli: CroselCli) -> None:
    make_run(tmp_path / "a", accuracy=0.9)
    result = crosel_cli("tables", tmp_path, "--format", "latex")
    assert r"90.00 & 97.34 $\pm$ 0.05" in result.out
    assert r"% For the preamble: \usepackage{booktabs}" in result.out


def test_the_tiny_suite_is_tiny() -> None:
    assert all(run.config.train.epochs == 2 for run in expand(read_suite("digits-tiny")))
