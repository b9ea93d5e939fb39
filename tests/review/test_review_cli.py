"""The whole way by the command line and a real browser: review, kill -9, review again, export, train on it."""

from __future__ import annotations

import csv
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
from _browser import Visit
from _runs import Child, ForkServer
from _support import CroselCli, TinyRun


def start(fork_server: ForkServer, run: Path, *options: object) -> tuple[Child, str]:
    """`crosel review` as a process of its own, and the address it prints."""
    child = fork_server.start("review", run, "--no-browser", *options)
    child.wait_for(lambda: "stop with Ctrl-C" in child.out)
    return child, child.out.splitlines()[0].rpartition(" at ")[2]


def test_review_kill_review_export_train(
    browser: Any, fork_server: ForkServer, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    child, address = start(fork_server, run)
    visit = Visit(browser, address)
    page = visit.page
    page.click("article.current summary")
    assert "network 1: " in page.inner_text("article.current")  # with what it predicted before
    visit.press("a", "s")
    visit.done(2)
    visit.press("o")
    page.wait_for_selector("#choose[open] [role=option]")
    beyond = page.inner_text("#options [aria-selected=true] .word")
    third = visit.current()
    visit.press("Enter")
    visit.done(3)
    child.signal(signal.SIGKILL)
    assert child.wait() == -9
    assert visit.faults == []

    child, address = start(fork_server, run)
    visit.open(address)
    visit.done(3)  # nothing lost
    visit.press("a", "a")
    visit.done(5)
    visit.press("u")
    visit.done(4)
    assert visit.faults == []
    child.signal(signal.SIGINT)
    assert child.wait() in (0, 130)
    assert "4 decisions" in child.out
    visit.close()

    result = crosel_cli("review", run, "--export", tmp_path / "known.csv")
    assert (result.code, result.out) == (0, f"4 decisions: {tmp_path / 'known.csv'}\n")
    rows = {row["id"]: row for row in csv.DictReader((tmp_path / "known.csv").open())}
    assert len(rows) == 4
    assert (rows[third]["decision"], rows[third]["label"]) == ("outside", beyond)

    command = [*tiny_run.command, "--corrections", tmp_path / "known.csv", "--out", tmp_path / "again"]
    result = crosel_cli(*command)
    assert result.code == 0, result.err
    with np.load(tmp_path / "again" / "candidates.npz") as saved:
        classes = saved["classes"].tolist()
        for name, row in rows.items():
            if row["decision"] != "skip":
                assert np.flatnonzero(saved["candidates"][int(name)]).tolist() == [classes.index(row["label"])]
        assert len(saved["corrected"]) == 3


def test_export_says_what_is_wrong(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    result = crosel_cli("review", run, "--export", tmp_path / "known.csv")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "no decisions yet; review it first" in result.err
    line = {"time": "", "id": "no such", "row": 0, "decision": "skip", "label": ""}
    (run / "review.jsonl").write_text(json.dumps(line) + "\n")
    result = crosel_cli("review", run, "--export", tmp_path / "known.csv")
    assert (result.code, result.err.splitlines()) == (
        2,
        [
            "1 line of review.jsonl ignored: cut short, or from another run",
            f"crosel: {run}: no decisions yet; review it first: crosel review {run}",
        ],
    )
    assert not (tmp_path / "known.csv").exists()
    line = {"time": "", "id": "0", "row": 0, "decision": "skip", "label": ""}
    (run / "review.jsonl").write_text(json.dumps(line) + "\n")
    result = crosel_cli("review", run, "--export", tmp_path / "known.jsonl")  # --corrections would read it as a log
    assert (result.code, result.err) == (
        2,
        f"crosel: {tmp_path / 'known.jsonl'}: decisions are written as .csv; use this ending\n",
    )
    result = crosel_cli("review", run, "--export", run / "config.yaml" / "known.csv")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "config.yaml: this is a file; give a folder" in result.err


def test_corrections_without_a_label_are_told_of(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    (tmp_path / "known.csv").write_text("id,label,decision\n0,,skip\n")
    command = [*tiny_run.command, "--corrections", tmp_path / "known.csv", "--out", tmp_path / "again"]
    result = crosel_cli(*command)
    assert result.code == 0, result.err
    assert f"{tmp_path / 'known.csv'}: no known label in it, so nothing is corrected\n" in result.err


def test_lines_of_a_log_that_are_cut_short_are_told_of(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    whole = {"time": "", "id": "1", "row": 1, "decision": "accept", "label": "1"}
    (tmp_path / "review.jsonl").write_text('{"id": "0", "row": 0, "deci\n' + json.dumps(whole) + "\n")
    command = [*tiny_run.command, "--corrections", tmp_path / "review.jsonl", "--out", tmp_path / "again"]
    result = crosel_cli(*command)
    assert result.code == 0, result.err
    assert result.err.startswith(
        f"{tmp_path / 'review.jsonl'}: line 1 is cut short or not JSON, and is ignored (1 such)\n"
    )
    with np.load(tmp_path / "again" / "candidates.npz") as saved:
        assert saved["corrected"].tolist() == [1]
