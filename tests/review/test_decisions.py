"""The log: whatever is acknowledged is on the disk, and the disk alone gives the same state back."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crosel import UserError
from crosel.runs.corrections import KINDS, Decision, DecisionLog, Decisions, SkippedLines, read_log, replay

IDS = ["a", "b|c", "=d", "zeile\u2028", "é\ud800"]
CLASSES = ("cat", "dog", "<b>")

decided = st.builds(
    lambda kind, label: Decision(kind, -1 if kind == "skip" else label), st.sampled_from(KINDS), st.integers(0, 2)
)
steps = st.lists(st.one_of(st.tuples(st.integers(0, len(IDS) - 1), decided), st.none()), max_size=30)  # None: undo
relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Slow:
    """All decisions ever, as a list; what holds is found by looking through it."""

    def __init__(self) -> None:
        self.past: list[tuple[int, Decision]] = []

    def state(self) -> dict[int, Decision]:
        return dict(self.past)


def run_steps(log: DecisionLog, plan: list[Any], slow: Slow) -> None:
    for step in plan:
        if step is None:
            row = log.undo()
            assert row == (slow.past.pop()[0] if slow.past else None)
        else:
            log.decide(*step)
            slow.past.append(step)


def state(decisions: Decisions) -> dict[int, Decision]:
    return dict(decisions.in_force())


@relaxed
@given(plan=steps)
def test_replay_gives_the_same_state_and_undo_goes_on_over_a_restart(
    plan: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "review.jsonl"
    slow = Slow()
    for part in (plan[: len(plan) // 2], plan[len(plan) // 2 :], [None] * 3):
        log = DecisionLog(path, IDS, CLASSES)
        assert not log.skipped_lines
        run_steps(log, part, slow)
        assert state(log.decisions) == slow.state()
        assert sum(log.decisions.counts().values()) == len(slow.state())
        log.close()


@relaxed
@given(plan=steps, cut=st.integers(1, 200), more=decided)
def test_a_crash_at_any_byte_loses_at_most_the_line_under_way(
    plan: list[Any], cut: int, more: Decision, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "review.jsonl"
    log = DecisionLog(path, IDS, CLASSES)
    run_steps(log, plan, Slow())
    log.close()
    whole = path.read_bytes()
    os.truncate(path, max(0, len(whole) - cut))
    left = path.read_bytes()
    complete = left.count(b"\n") + (left[-1:] == b"}")  # all of a line but its end is still the line
    expected = Decisions(len(IDS))
    lines = whole.decode().split("\n")[:complete]
    assert replay(lines, expected, lambda entry: entry["row"], CLASSES) == SkippedLines()
    again = DecisionLog(path, IDS, CLASSES)
    assert state(again.decisions) == state(expected)
    again.decide(1, more)  # and what comes after the half line is a line of its own
    again.close()
    expected.decide(1, more)
    third = DecisionLog(path, IDS, CLASSES)
    assert state(third.decisions) == state(expected)
    assert path.read_bytes().startswith(left)  # nothing is ever rewritten
    third.close()


def test_lines_are_as_promised_and_on_the_disk_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_size), real(handle))[1])
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    synced.clear()
    log.decide(3, Decision("choose", 2))
    assert synced == [(tmp_path / "review.jsonl").stat().st_size]
    log.undo()
    first, second, rest = read_log(tmp_path / "review.jsonl")
    entry = json.loads(first)
    assert list(entry) == ["time", "id", "row", "decision", "label"]
    assert (entry["id"], entry["row"], entry["decision"], entry["label"]) == (IDS[3], 3, "choose", "<b>")
    assert entry["time"].endswith("Z")
    assert json.loads(second)["decision"] == "undo"
    assert rest == ""
    log.close()


def test_concurrent_decisions_are_whole_lines_and_all_there(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)

    def work(number: int) -> None:
        for i in range(25):
            log.decide((number + i) % len(IDS), Decision("accept", i % 3))
            if i % 5 == 4:
                log.undo()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    lines = read_log(log.path)
    assert len(lines) == 6 * 30 + 1
    again = DecisionLog(log.path, IDS, CLASSES)
    assert not again.skipped_lines
    assert state(again.decisions) == state(log.decisions)
    again.close()


def test_a_full_disk_is_told_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    log.decide(0, Decision("accept", 0))
    real = os.write

    def short(handle: int, data: bytes) -> int:
        if len(data) > 40:
            return real(handle, data[:40])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(UserError, match=r"review\.jsonl: no space left"):
            log.decide(1, Decision("accept", 1))
    assert state(log.decisions) == {0: Decision("accept", 0)}
    log.decide(2, Decision("skip"))
    log.close()
    again = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    assert state(again.decisions) == {0: Decision("accept", 0), 2: Decision("skip")}
    assert again.skipped_lines == SkippedLines(truncated=[2])
    again.close()


def test_a_run_that_cannot_be_written_to_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_read_only(*_: Any) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = tmp_path / "review.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_read_only)
        with pytest.raises(UserError) as told:
            DecisionLog(path, ["a"], ["cat"])
    assert str(told.value) == (
        f"{path}: this file system is read-only; copy the run folder to a writable place and review the copy"
    )


def test_a_second_review_of_the_same_run_is_told(tmp_path: Path) -> None:
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    with pytest.raises(UserError, match="open in another review"):
        DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    log.close()
    DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES).close()


@pytest.mark.parametrize(
    "line",
    [
        "[]", "7", "null", "{", '{"row": 0}', "[" * 100_000, '{"id": "a", "row": 0, "decision": "accept"}', "\x00\xff",
        '{"id": "x", "row": 0, "decision": "skip"}', '{"id": "a", "row": true, "decision": "skip"}',
        '{"id": "a", "row": 99, "decision": "skip"}', '{"id": "a", "row": -1, "decision": "undo"}',
        '{"id": "a", "row": 0, "decision": "accept", "label": ["cat"]}',
        '{"id": "a", "row": 0, "decision": ["accept"], "label": "cat"}',
    ],
)  # fmt: skip
def test_lines_about_other_data_are_skipped(tmp_path: Path, line: str) -> None:
    good = '{"id": "b|c", "row": 1, "decision": "accept", "label": "dog"}\n'
    (tmp_path / "review.jsonl").write_text(line + "\n" + good)
    log = DecisionLog(tmp_path / "review.jsonl", IDS, CLASSES)
    assert sorted(log.skipped_lines.truncated + log.skipped_lines.unknown) == [1]
    assert state(log.decisions) == {1: Decision("accept", 1)}
    log.close()
