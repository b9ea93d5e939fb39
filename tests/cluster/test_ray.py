"""Suites on a real Ray cluster of this machine, with two workers."""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _runs import metrics

from crosel.bench import Options, executors, expand, parse_suite, run_one, run_suite
from crosel.bench.execution import BenchScreen
from crosel.bench.suite import Suite
from crosel.errors import UserError

TINY = {
    "source": "digits", "preset": "demo/digits", "candidates": "uniform:q=0.3", "network.width": 4,
    "train.epochs": 3, "train.batch_size": 256,
}  # fmt: skip
MARK = "CROSEL_TEST_CLUSTER"


def tiny(seeds: int, **base: Any) -> Suite:
    return parse_suite({"base": {**TINY, **base}, "grid": {"method": ["cc", "proden"]}, "seeds": seeds}, "t", "t.yaml")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    os.environ[MARK] = str(os.getpid())  # our workers inherit it
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()
    del os.environ[MARK]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "PAUSE", 0.1)
    monkeypatch.setattr(executors, "LOOK", 0.1)


def workers() -> list[int]:
    """Processes of our cluster that are training a run."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            ours = f"{MARK}={os.getpid()}\0".encode() in (process / "environ").read_bytes()
            if ours and (process / "cmdline").read_bytes().startswith(b"ray::run_on_worker"):
                found.append(int(process.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.usefixtures("cluster", "quick")
def test_a_suite_of_8_runs_loses_nothing_when_a_worker_is_killed(tmp_path: Path) -> None:
    out, killed = tmp_path / "out", []

    def kill_one() -> None:
        until = time.monotonic() + 120
        while not killed and time.monotonic() < until:
            if any(out.rglob("checkpoints/*.safetensors")):  # delivered by a worker that is still at it
                for pid in workers()[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.02)

    watcher = threading.Thread(target=kill_one, daemon=True)
    watcher.start()
    results = run_suite(tiny(4), out, on="ray", device="cpu")
    watcher.join()
    assert killed
    assert [(r.status, r.line) for r in results] == [("done", "")] * 8
    for result in results:
        assert len(metrics(result.folder)) == 3
        assert {"config.yaml", "labels.csv", "done", "report.html"} <= {p.name for p in result.folder.iterdir()}
    first = results[0]
    run_one(first.run, tmp_path / "here", "cpu")
    assert metrics(first.folder) == metrics(tmp_path / "here")
    again = run_suite(tiny(4), out, on="ray", device="cpu")
    assert {r.status for r in again} == {"skipped"}
    (part,) = run_suite(tiny(4), tmp_path / "part", only="*/cc-seed3", on="ray", device="cpu")
    assert (part.run.name, part.status) == ("digits-q0.3/cc-seed3", "done")
    assert metrics(part.folder) == metrics(out / part.run.name)


@pytest.mark.usefixtures("cluster", "quick")
def test_asked_to_stop_runs_save_their_state_and_bad_runs_are_reported(tmp_path: Path) -> None:
    suite = tiny(1, **{"train.epochs": 2000})
    bad = parse_suite({"base": {**TINY, "method": "crosel", "method.warmup": 9}}, "bad", "bad.yaml")
    runs, options = [*expand(bad), *expand(suite)], Options(tmp_path, "cpu")
    asked = False

    def stop() -> bool:
        nonlocal asked
        asked = asked or (all((tmp_path / run.name / "checkpoints").is_dir() for run in runs[1:]))
        return asked

    progress = BenchScreen(runs, options, quiet=True)
    results = {r.run.name: r for r in executors.run_ray(runs, options, progress, stop)}
    refused, *stopped = (results[run.name] for run in runs)
    assert refused.status == "failed"
    assert "method.warmup is 9" in refused.line
    for result in stopped:
        assert result.status == "stopped"
        assert any((result.folder / "checkpoints").glob("*.safetensors"))
        assert not (result.folder / "done").exists()
    assert workers() == []


@pytest.mark.usefixtures("cluster", "quick")
def test_workers_know_whether_a_network_of_the_users_own_is_trusted(tmp_path: Path) -> None:
    (run,) = expand(parse_suite({"base": {**TINY, "method": "cc", "network.name": "math:none"}}, "t", "t.yaml"))
    for trust_code, says in ((False, "is code from outside crosel"), (True, "cannot be imported")):
        options = Options(tmp_path, "cpu", trust_code=trust_code)
        (result,) = executors.run_ray([run], options, BenchScreen([run], options, quiet=True), lambda: False)
        assert (result.status, says in result.line) == ("failed", True), result.line


@pytest.mark.usefixtures("cluster")
def test_what_was_delivered_just_before_the_end_comes_home(cluster: Any, tmp_path: Path) -> None:
    """What a task returns leaves out what it has sent, so the mailbox must be looked at between its end and ours."""
    run = expand(tiny(1))[0]
    options = Options(tmp_path, "cpu")
    dispatcher = executors.Dispatcher(cluster, options)

    def deliver_and_end(mailbox: Any) -> tuple[str, str, executors.SyncBatch]:
        put = mailbox.put.remote(executors.SyncBatch(run.name, 0, {"labels.csv": b"early"}, ("labels.csv",)))
        assert not cluster.get(put)
        return "done", "", executors.SyncBatch(run.name, 0, {"done": b""}, ("labels.csv", "done"))

    dispatcher.tasks[cluster.remote(deliver_and_end).remote(dispatcher.mailbox)] = executors.Task(run)
    try:
        [(task, outcome)] = dispatcher.ended(60, BenchScreen([run], options, quiet=True))
        result = dispatcher.result(task, outcome)
    finally:
        dispatcher.close()
    assert result.status == "done"
    assert executors.read_files(result.folder) == {"labels.csv": b"early", "done": b""}


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = importlib.import_module

    def no_ray(name: str, *args: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(importlib, "import_module", no_ray)
    with pytest.raises(UserError, match=r"pip install 'crosel\[ray\]'"):
        run_suite(tiny(1), tmp_path / "out", on="ray", device="cpu")
    assert not (tmp_path / "out").exists()


def test_files_come_and_go_as_on_the_worker(tmp_path: Path) -> None:
    old, new = "checkpoints/a.safetensors", "checkpoints/b.safetensors"
    executors.write_files(tmp_path, {old: b"1", "config.yaml": b"x"}, [old, "config.yaml"])
    executors.write_files(tmp_path, {new: b"2"}, [new, "config.yaml"])
    assert executors.read_files(tmp_path) == {new: b"2", "config.yaml": b"x"}
