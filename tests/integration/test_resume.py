"""Going on with a run: after every way of stopping it ends as if it had never been stopped, bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from _runs import ENVIRONMENT, ForkServer, arrays, assert_same_run, checkpoints, metrics, tree
from _sessions import make_session
from _support import CroselCli, Result, TinyRun, small_arrays

from crosel.config import build_config
from crosel.errors import UserError
from crosel.runs.folder import RunFolder
from crosel.runs.pipeline import StopFlag
from crosel.training import checkpoint
from crosel.training.session import Progress, Session

STEPS = 6  # of an epoch of the tiny run: 96 examples in batches of 16


class Stopper:
    """Lets a run in this process go on until the loop has looked n times for a reason to stop."""

    def __init__(self, cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cli, self.patch = cli, monkeypatch

    def __call__(self, looks: int, *args: object) -> Result:
        count = 0

        def stop(flag: StopFlag) -> bool:
            nonlocal count
            count += 1
            return count >= looks

        with self.patch.context() as patch:
            patch.setattr(StopFlag, "__call__", stop)
            return self.cli(*args)


@pytest.fixture
def stopper(crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch) -> Stopper:
    return Stopper(crosel_cli, monkeypatch)


def without_checkpoints(run: Path) -> set[str]:
    return {name for name in tree(run) if not name.startswith("checkpoints/")}


# --- stopping anywhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_stopped_after_an_epoch(
    epoch: int, tiny_run: TinyRun, tmp_path: Path, stopper: Stopper, crosel_cli: CroselCli
) -> None:
    run = tmp_path / "run"
    result = stopper(epoch * (STEPS + 1), *tiny_run.command, "--out", run)  # one look a step, one at the end
    assert result.code == 130
    assert metrics(run) == metrics(tiny_run.path)[:epoch]
    assert not (run / "done").exists()
    result = crosel_cli(*tiny_run.command, "--out", run, "--resume")
    assert result.code == 0, result.err
    assert result.err.splitlines()[0] == f"continuing after epoch {epoch}"
    assert_same_run(run, tiny_run.path)


def test_the_command_that_continues_a_run_with_a_network_of_the_users_own(
    own_network: str, tiny_run: TinyRun, tmp_path: Path, stopper: Stopper, crosel_cli: CroselCli
) -> None:
    run = tmp_path / "run"
    result = stopper(1, *tiny_run.command, "--set", f"network.name={own_network}", "--trust-code", "--out", run)
    told = f"crosel train --resume --out {run} --trust-code"
    assert result.err.endswith(f"crosel: stopped; the state is saved. Continue with: {told}\n")
    assert crosel_cli(*told.split()[1:]).code == 0
    assert (run / "done").is_file()


@pytest.mark.parametrize("looks", [1, 5, 10, 12, 16, 19, 23, 26])
def test_stopped_in_the_middle_of_an_epoch(
    looks: int, tiny_run: TinyRun, tmp_path: Path, stopper: Stopper, crosel_cli: CroselCli
) -> None:
    """In both phases, and with only the run folder named to go on."""
    run = tmp_path / "run"
    result = stopper(looks, *tiny_run.command, "--out", run)
    assert result.code == 130
    assert result.err.endswith(
        f"crosel: stopped; the state is saved. Continue with: crosel train --resume --out {run}\n"
    )
    epoch, step = divmod(looks, STEPS + 1)
    assert f"epoch-{epoch:05d}-step-{step:06d}" in checkpoints(run)[-1].name
    result = crosel_cli("train", "--resume", "--out", run)
    assert result.code == 0, result.err
    assert result.err.splitlines()[0] == f"continuing after epoch {epoch}, step {step}"
    assert_same_run(run, tiny_run.path, same_files=False)
    assert without_checkpoints(run) == without_checkpoints(tiny_run.path)


def test_stopped_again_and_again(tiny_run: TinyRun, tmp_path: Path, stopper: Stopper, crosel_cli: CroselCli) -> None:
    run = tmp_path / "run"
    codes: list[int] = []
    while not codes or codes[-1] == 130:
        codes.append(stopper(4, *tiny_run.command, "--out", run, "--resume").code)
        assert len(codes) < 20
    assert codes[-1] == 0
    assert len(codes) > 5
    assert_same_run(run, tiny_run.path, same_files=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_in_a_process(number: int, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    run = tmp_path / "run"
    here = "a step of the third epoch\n"
    slow = {"target": "crosel.training.step:TrainStep.__call__", "call": 2 * STEPS + 1, "seconds": 0.05, "tell": here}
    child = fork_server.start(*tiny_run.command, "--out", run, trap=slow)
    child.wait_for(lambda: here in child.err)
    child.signal(number)
    assert child.wait() == 130
    assert child.err.splitlines()[-1].startswith("crosel: stopped; the state is saved. Continue with: ")
    assert "Traceback" not in child.err
    assert "epoch-00002-step-00000" in checkpoints(run)[-1].name
    assert "step-000000" not in checkpoints(run)[-1].name, "the signal should land in the middle of epoch 3"
    code, _, err = fork_server.run("train", "--resume", "--out", run)
    assert code == 0, err
    assert_same_run(run, tiny_run.path)


def test_second_ctrl_c_is_immediate(tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer) -> None:
    here = "a step that takes a minute\n"
    slow = {"target": "crosel.training.step:TrainStep.__call__", "call": STEPS + 1, "seconds": 60, "tell": here}
    child = fork_server.start(*tiny_run.command, "--out", tmp_path / "run", trap=slow)
    child.wait_for(lambda: here in child.err)
    started = time.monotonic()
    child.signal(signal.SIGINT)
    time.sleep(0.2)
    child.signal(signal.SIGINT)
    assert child.wait() == 130
    assert time.monotonic() - started < 30
    assert child.err.splitlines()[-1] == "crosel: stopped"
    code, _, err = fork_server.run("train", "--resume", "--out", tmp_path / "run")
    assert code == 0, err
    assert_same_run(tmp_path / "run", tiny_run.path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_signal_before_training_leaves_nothing(
    number: int, tiny_run: TinyRun, tmp_path: Path, fork_server: ForkServer
) -> None:
    slow = {"target": "crosel.data.formats.npz:Npz.read", "seconds": 60}
    run = tmp_path / "run"
    child = fork_server.start(*tiny_run.command, "--out", run, trap=slow)
    child.wait_for(run.exists)
    time.sleep(0.1)
    child.signal(number)
    assert child.wait() == 130
    assert child.err == "crosel: stopped\n"
    assert not run.exists()


def test_sigterm_to_the_real_thing(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Once without the fork server: its children have their imports behind them."""
    run = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "crosel", *tiny_run.command, "--set", "train.epochs=1000000", "--out", str(run)],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stderr is not None
    assert any(line.startswith("epoch") for line in process.stderr)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (
        err.splitlines()[-1] == f"crosel: stopped; the state is saved. Continue with: crosel train --resume --out {run}"
    )
    assert checkpoints(run)


# --- what is there to go on with ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_run(tiny_run: TinyRun, tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> Path:
    """Killed after its third epoch of four: checkpoints of the second and third. To be copied, not used up."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    trap = {"target": "crosel.runs.folder:Recorder.on_epoch", "call": 3, "when": "after"}
    code, _, _ = fork_server.run(*tiny_run.command, "--out", run, trap=trap)
    assert code == -signal.SIGKILL
    assert [path.name[:11] for path in checkpoints(run)] == ["epoch-00002", "epoch-00003"]
    return run


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def snapshot(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_finished_run_says_so(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    before = snapshot(run)
    for command in (tiny_run.command, ("train",)):
        result = crosel_cli(*command, "--out", run, "--resume")
        assert result.code == 0
        assert f"{run} is already finished" in result.err
        assert "continuing" not in result.err
        assert "test accuracy" in result.out
        assert snapshot(run) == before


def test_resume_of_nothing_starts(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    """So that one command line, put into a scheduler, both starts and goes on."""
    result = crosel_cli(*tiny_run.command, "--out", tmp_path / "run", "--resume")
    assert result.code == 0, result.err
    assert_same_run(tmp_path / "run", tiny_run.path)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (("--set", "train.epochs=9"), "train.epochs was 4, now 9"),
        (("--set", "method.gamma=0.3"), "method.gamma was 0.2, now 0.3"),
        (("--seed", "5"), "seed was 0, now 5"),
        (("--method", "cc"), "method.name was 'crosel', now 'cc'"),
        (("--set", "augment.flip=false"), "augment.flip was True, now False"),
    ],
)
@pytest.mark.parametrize("with_source", [True, False], ids=["source", "folder only"])
def test_another_config_is_refused(
    extra: tuple[str, ...], says: str, with_source: bool, tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli
) -> None:
    before = snapshot(stopped)
    # Another method knows nothing of these settings; everything else is the run's own command.
    command = ("train", str(tiny_run.source)) if extra[0] == "--method" else tiny_run.command
    result = crosel_cli(*(command if with_source else ("train",)), *extra, "--out", stopped, "--resume")
    assert result.code == 2
    assert result.err.startswith(f"crosel: {stopped} has a run with other settings: ")
    assert says in result.err
    assert snapshot(stopped) == before


@pytest.mark.parametrize(
    ("given", "extra", "says"),
    [
        ((), "train.epochs=5", "train.epochs was 3, now 5"),
        (("method.warmup=1",), "method.warmup=2", "method.warmup was 1, now 2"),
        ((), "method.ramp=0", "method.ramp was 1, now 0"),
        (("method.lambda_cr=1",), "method.temperature=1", "method.temperature was 0.5, now 1.0"),
        (("method.lambda_cr=1", "method.temperature=1"), "method.gamma_start=0.5", "method.gamma_start was None, now"),
    ],
)
def test_what_was_changed_is_named_and_not_what_follows_from_it(
    given: tuple[str, ...], extra: str, says: str, image_npz: Path, tmp_path: Path
) -> None:
    """A config holds numbers where a default follows from other settings, and these change along."""
    settings = ("train.epochs=3", *given)
    values = {"source": str(image_npz)}
    old, new = (build_config(settings=s, values=values) for s in (settings, (*settings, extra)))
    assert old.method.model_dump() != new.method.model_dump()
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    (folder / "config.yaml").write_text(old.to_yaml(), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        folder.update_config(new)
    assert f"has a run with other settings: {says}" in str(caught.value)


def test_settings_that_decide_nothing_may_change(tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli) -> None:
    extra = ("--set", "train.keep_checkpoints=3", "--set", "train.log_every=2")
    result = crosel_cli("train", *extra, "--out", stopped, "--resume")
    assert result.code == 0, result.err
    assert_same_run(stopped, tiny_run.path, same_files=False)
    assert len(checkpoints(stopped)) == 3
    assert yaml.safe_load((stopped / "config.yaml").read_text())["train"]["keep_checkpoints"] == 3


def test_edited_config_is_noticed(stopped: Path, crosel_cli: CroselCli) -> None:
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.1\n", "lr: 0.2\n"))
    before = snapshot(stopped)
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 2
    assert result.err == (
        f"crosel: {config} has changed since the run started: train.lr was 0.1, now 0.2; change it back\n"
    )
    assert snapshot(stopped) == before


def test_weights_that_do_not_fit_an_edited_config_are_told_of_by_the_setting(
    tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli
) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run.path, run)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("width: 4\n", "width: 6\n"))
    result = crosel_cli("eval", run)
    assert (result.code, result.err) == (
        2, f"crosel: {config} has changed since the run started: network.width was 4, now 6; change it back\n"
    )  # fmt: skip


@pytest.mark.parametrize("part", ["method.networks.0", "momentum.networks.0", "average"])
def test_weights_of_other_code_are_refused_with_what_differs(part: str, tmp_path: Path, crosel_cli: CroselCli) -> None:
    """The settings are the same, so it must be another version, or another network of the same name."""
    np.savez(tmp_path / "d.npz", **small_arrays(n=32))
    run = tmp_path / "run"
    settings = ("--set", "train.epochs=2", "--set", "train.ema_decay=0.9", "--set", "network.width=4")
    assert crosel_cli("train", tmp_path / "d.npz", "--method", "cc", *settings, "--out", run).code == 0
    found = checkpoint.load_newest(run / "checkpoints").checkpoint
    assert found is not None
    name = next(name for name in found.tensors if name.startswith(part) and found.tensors[name].ndim == 4)
    shape = list(found.tensors[name].shape)
    found.tensors[name] = found.tensors[name][:, :, :2].clone()
    checkpoint.save(run / "checkpoints", found.tensors, found.state, keep=1)
    before = snapshot(run)
    other = [*shape[:2], 2, shape[3]]
    says = f"{name.removeprefix('method.')} has shape {other}, but {shape} is needed; use the version of crosel, and"
    for command in (("train", "--resume", "--out"), ("eval",)):
        result = crosel_cli(*command, run)
        if command == ("eval",) and part.startswith("momentum"):
            assert result.code == 0  # prediction does without
            continue
        assert result.code == 2
        assert result.err.startswith(f"crosel: {run}: the saved weights do not fit the networks: {says}")
        assert snapshot(run) == before


def test_a_run_from_before_a_setting_was_there_goes_on(tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli) -> None:
    found = checkpoint.load_newest(stopped / "checkpoints").checkpoint
    assert found is not None
    assert found.state["config"]["method"].pop("least_selected") == 1
    checkpoint.save(stopped / "checkpoints", found.tensors, found.state, keep=1)
    config = stopped / "config.yaml"
    config.write_text(config.read_text().replace("  least_selected: 1\n", ""))
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    assert_same_run(stopped, tiny_run.path, same_files=False)


def test_a_state_from_another_kind_of_device_begins_its_epoch_anew_with_draws_of_its_own() -> None:
    def continued(epoch: int) -> Session:
        session = make_session("proden")
        session.progress = Progress(epoch, 2, [{"epoch": epoch}], {"loss": torch.tensor(1.0)}, 3.0)
        tensors, state = session.state()
        other = {**tensors, "generator": torch.zeros(16, dtype=torch.uint8)}  # of no use here
        again = make_session("proden")
        again.restore(checkpoint.Checkpoint(other, {**state, "device": "cuda"}))
        return again

    assert continued(1).progress == Progress(1, 0, [{"epoch": 1}], {}, 0.0)
    sessions = make_session("proden"), continued(1), continued(1), continued(2)
    fresh, one, same, two = (torch.rand(8, generator=session.generator).tolist() for session in sessions)
    assert one == same
    assert fresh != one != two != fresh


# --- damage -------------------------------------------------------------------------------------------------------


def flip(place: Callable[[int], int]) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        at = place(len(content))
        return content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :]

    return damage


def flip_in_state(content: bytes) -> bytes:
    """A digit of the metrics, which the header carries as JSON: the file still parses."""
    at = content.index(b"covering_rate") + len(b'covering_rate\\": 0.')
    return content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "length of the header": flip(lambda size: 0),
    "header": flip(lambda size: 40),
    "metrics in the header": flip_in_state,
    "weights": flip(lambda size: size // 2),
    "last byte": flip(lambda size: size - 1),
    "cut in half": lambda content: content[: len(content) // 2],
    "one byte missing": lambda content: content[:-1],
    "one byte too many": lambda content: content + b"\0",
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_damaged_checkpoint_is_passed_over(
    damage: str, tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli
) -> None:
    newest = checkpoints(stopped)[-1]
    content = newest.read_bytes()
    newest.write_bytes(DAMAGE[damage](content))
    assert newest.read_bytes() != content
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    said = result.err.splitlines()
    assert said[:2] == [f"checkpoint {newest.name} is damaged and was moved aside", "continuing after epoch 2"]
    assert_same_run(stopped, tiny_run.path, same_files=False)
    aside = newest.with_suffix(".damaged")
    assert aside.read_bytes() == DAMAGE[damage](content), "what could be rescued by hand is kept"
    assert tree(stopped) - tree(tiny_run.path) == {str(aside.relative_to(stopped))}


def test_no_good_checkpoint_at_all(tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli) -> None:
    for path in checkpoints(stopped):
        path.write_bytes(b"")
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    assert result.err.splitlines()[2] == "no good checkpoint yet; starting from the beginning"
    assert_same_run(stopped, tiny_run.path, same_files=False)
    shutil.rmtree(stopped / "checkpoints")  # to free some space, say
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    assert result.err.splitlines()[0] == "no checkpoint yet; starting from the beginning"
    assert_same_run(stopped, tiny_run.path)


def test_using_a_run_with_a_damaged_checkpoint(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    newest = checkpoints(run)[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    result = crosel_cli("eval", run, "--json")
    assert result.code == 0, result.err
    assert result.err == f"checkpoint {newest.name} is damaged and is ignored\n"
    assert json.loads(result.out)["epoch"] == 3
    result = crosel_cli("train", "--resume", "--out", run)  # the last epoch again, and it is as good as new
    assert result.code == 0, result.err
    assert "finished already" not in result.err
    assert_same_run(run, tiny_run.path, same_files=False)
    assert json.loads(crosel_cli("eval", run, "--json").out)["epoch"] == 4


def test_a_checkpoint_that_a_run_replaces_while_it_is_read(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run under way removes the old ones whenever it has written a new one: then one looks again."""
    folder, real = stopped / "checkpoints", checkpoint._read_checkpoint

    def replaced(path: Path) -> bytes:
        monkeypatch.setattr(checkpoint, "_read_checkpoint", real)
        raise FileNotFoundError(path)

    checkpoint.prune(folder, 1)
    monkeypatch.setattr(checkpoint, "_read_checkpoint", replaced)
    found = checkpoint.load_newest(folder)
    assert found.checkpoint is not None
    assert (found.checkpoint.state["epoch"], found.damaged) == (3, [])
    assert checkpoint.load_newest(tmp_path / "nowhere") == checkpoint.LoadResult(None, [])


def test_old_checkpoints_that_cannot_be_removed_are_one_clear_line(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(UserError, match="checkpoints: this file system is read-only"):
        checkpoint.prune(stopped / "checkpoints", 1)


def test_hash_matches_but_content_is_no_checkpoint(tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli) -> None:
    import hashlib

    content = b"\x02\0\0\0\0\0\0\0{}"  # a valid, empty safetensors file without our state
    name = f"epoch-00009-step-000000-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    (stopped / "checkpoints" / name).write_bytes(content)
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    assert result.err.splitlines()[:2] == [
        f"checkpoint {name} is damaged and was moved aside",
        "continuing after epoch 3",
    ]
    assert_same_run(stopped, tiny_run.path, same_files=False)


@pytest.mark.parametrize("content", [None, b"", b'{"epoch": 1, "pha', b"\xff\xfe\n", b"{}\n" * 9])
def test_metrics_are_rebuilt(content: bytes | None, tiny_run: TinyRun, stopped: Path, crosel_cli: CroselCli) -> None:
    path = stopped / "metrics.jsonl"
    path.unlink() if content is None else path.write_bytes(content)
    result = crosel_cli("train", "--resume", "--out", stopped)
    assert result.code == 0, result.err
    assert_same_run(stopped, tiny_run.path)


def test_damaged_candidates_are_noticed(stopped: Path, crosel_cli: CroselCli) -> None:
    path = stopped / "candidates.npz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    before = snapshot(stopped)
    for command in (("train", "--resume", "--out", stopped), ("eval", stopped)):
        result = crosel_cli(*command)
        assert result.code == 2
        assert result.err.startswith(f"crosel: {path}: cannot be read (")
        assert len(result.err.splitlines()) == 1
    assert snapshot(stopped) == before


# --- data and candidate sets --------------------------------------------------------------------------------------


def test_sets_are_read_back_and_not_drawn_again(
    tmp_path: Path, stopper: Stopper, crosel_cli: CroselCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_arrays()
    del data["candidates"]
    np.savez(tmp_path / "plain.npz", **data)
    command = (
        "train", tmp_path / "plain.npz", "--candidates", "uniform:q=0.4", "--method", "cc", "--set", "train.epochs=2",
    )  # fmt: skip
    assert crosel_cli(*command, "--out", tmp_path / "straight").code == 0
    assert stopper(2, *command, "--out", tmp_path / "run").code == 130
    drawn = arrays(tmp_path / "run/candidates.npz")

    def refuse(*args: object) -> None:
        raise AssertionError("drawn a second time")

    monkeypatch.setattr("crosel.runs.pipeline.draw_candidates", refuse)
    result = crosel_cli(*command, "--out", tmp_path / "run", "--resume")
    assert result.code == 0, result.err
    assert arrays(tmp_path / "run/candidates.npz") == drawn
    assert metrics(tmp_path / "run") == metrics(tmp_path / "straight")


@pytest.mark.parametrize("when", ["after an epoch", "before the first checkpoint"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("x", "x or the class names have changed"),
        ("candidates", "the candidate set of example 7 has changed"),
        ("y", "the true labels (y) have changed"),
        ("n", "96 examples and 10 classes, now 95 and 10"),
        ("classes", "x or the class names have changed"),
    ],
)
def test_changed_data_are_noticed(
    when: str, what: str, says: str, tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli, fork_server: ForkServer
) -> None:
    data, source, run = small_arrays(), tmp_path / "data.npz", tmp_path / "run"
    np.savez(source, **data)
    trap = {
        "target": "crosel.training.checkpoint:write",
        "call": 1,
        "when": "after" if when == "after an epoch" else "before",
    }
    code, _, err = fork_server.run("train", source, *tiny_run.command[2:], "--out", run, trap=trap)
    assert code == -signal.SIGKILL, err
    before = snapshot(run)
    if what == "x":
        data["x"][5, 2, 2] += 1
    elif what == "candidates":
        data["candidates"][7] = ~data["candidates"][7]
    elif what == "y":
        data["y"][3] = (data["y"][3] + 1) % 10
    elif what == "n":
        data |= {name: data[name][:-1] for name in ("x", "candidates", "y")}
    else:
        data["classes"] = np.array(list("abcdefghij"))
    np.savez(source, **data)
    for command in (("train", "--resume", "--out", run), ("eval", run), ("labels", run, "--out", tmp_path / "l.csv")):
        result = crosel_cli(*command)
        assert result.code == 2
        assert result.err == f"crosel: {run} was trained on other data: {says}; restore the original data\n"
    assert snapshot(run) == before


def test_moved_data_are_fine(tiny_run: TinyRun, stopped: Path, tmp_path: Path, crosel_cli: CroselCli) -> None:
    moved = Path(shutil.copy(tiny_run.source, tmp_path / "moved.npz"))
    result = crosel_cli("train", moved, *tiny_run.command[2:], "--out", stopped, "--resume")
    assert result.code == 0, result.err
    assert_same_run(stopped, tiny_run.path)
    assert yaml.safe_load((stopped / "config.yaml").read_text())["source"] == str(moved)


def test_other_named_source_is_another_config(stopped: Path, tiny_run: TinyRun, crosel_cli: CroselCli) -> None:
    result = crosel_cli("train", "digits", *tiny_run.command[2:], "--out", stopped, "--resume")
    assert result.code == 2
    assert f"source was '{tiny_run.source}', now 'digits'" in result.err


def test_a_refused_resume_leaves_the_run_as_it_was(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    other = small_arrays()
    other["x"] = other["x"][::-1].copy()
    np.savez(tmp_path / "other.npz", **other)
    result = crosel_cli("train", tmp_path / "other.npz", *tiny_run.command[2:], "--out", run, "--resume")
    assert result.code == 2
    assert "was trained on other data" in result.err
    assert {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()} == before
