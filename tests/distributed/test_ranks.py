"""Several ranks learn what one process does, hold the same state, and end together."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _jobs import CPU, alone, free_port, train
from _runs import untimed
from _support import PAPER_SETS, small_arrays
from safetensors.torch import load_file
from torch import Tensor, nn

from crosel.errors import RankLost, UserError
from crosel.methods import methods
from crosel.nn.networks import convert_sync_batch_norm
from crosel.training.checkpoint import load_newest
from crosel.utils.distributed import (
    SINGLE_PROCESS,
    Ranks,
    init_distributed,
    launched_by_torchrun,
    process_group,
    shard_slice,
)

TESTS = Path(__file__).resolve().parent.parent
PATHS = [str(TESTS / "distributed"), str(TESTS), os.environ.get("PYTHONPATH", "")]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, PATHS))}
Launch = Callable[..., list[int]]

PLAIN = ["method.warmup=1", "method.bank_length=1", *PAPER_SETS]
CROSEL = [*PLAIN, "method.gamma=0.12"]
EARLY = {"crosel": CROSEL, "pop": ["method.warm_up=1", "method.threshold=0.9", "method.cap=0.95"]}
# Ways in which ranks could come to have unequal work.
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method": name, "settings": EARLY.get(name, [])} for name in methods()},
    "bad batches left out": {"method": "proden", "settings": ["train.bad_batches=skip"]},
    "inputs on the host": {"method": "cc", "settings": ["train.data_on=host"]},
    "one store on disk": {"method": "crosel", "settings": CROSEL, "disk": True},
    "a weight for each pair": {"method": "crosel", "settings": [*CROSEL, "method.mix_per_pair=true"]},
    "unselected only": {"method": "crosel", "settings": [*CROSEL, "method.scope=unselected"]},
    "smaller batches": {"method": "crosel", "settings": [*CROSEL, "method.scope=unselected-once"]},
    "nothing selected": {"method": "crosel", "settings": [*PLAIN, "method.gamma=1.0"]},
    "nothing to learn from": {
        "method": "crosel", "settings": [*PLAIN, "method.gamma=1.0", "method.scope=none", "train.momentum=0"],
    },
    "fewer selected than a batch": {"method": "crosel", "settings": [*PLAIN, "method.gamma=0.18"]},
}  # fmt: skip


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """Fork ranks for a job and return their exit codes; what they say is in `folder`/RANK.log."""
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "distributed" / "_launcher.py")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(size: int, job: str, folder: Path, **args: Any) -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        request = {"size": size, "job": job, "folder": str(folder), "args": args}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return list(json.loads(process.stdout.readline()))

    yield ask
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture(scope="module")
def trained(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Every case, by one process, two ranks and four; folders NAME below."""
    root = tmp_path_factory.mktemp("cases")
    out = {}
    for size in (2, 4):
        out[size] = root / str(size)
        for name in CASES:
            (out[size] / name).mkdir(parents=True)
        cases = [{"out": str(out[size] / name), **case} for name, case in CASES.items()]
        codes = launch(size, "many_trainings", root / f"logs{size}", cases=cases)
        assert codes == [0] * size, logs(root / f"logs{size}")
    out[1] = root / "1"
    for name, case in CASES.items():
        alone(out[1] / name, **case)
    return out


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def state(folder: Path, rank: int = 0, epoch: int = 3, step: int = 0) -> dict[str, Tensor]:
    return load_file(folder / f"{epoch}-{step}-rank{rank}.st")


def rows(folder: Path) -> list[dict[str, Any]]:
    found = load_newest(folder).checkpoint
    assert found is not None
    return [{k: v for k, v in row.items() if k != "phase"} for row in untimed(found.state["rows"])]


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, theirs[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def shared_out(whole: dict[str, Tensor], part: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """Of a whole state, the rows of tables that this rank has."""
    out = {}
    for name, value in whole.items():
        dims = [
            d for d, (ours, all_of_it) in enumerate(zip(part[name].shape, value.shape, strict=True)) if ours < all_of_it
        ]
        rows = shard_slice(rank, size, value.shape[dims[0]]) if dims else slice(0)
        out[name] = value.narrow(dims[0], rows.start, rows.stop - rows.start) if dims else value
    return out


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


# --- the same as one process --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_equal_those_of_one_process(trained: dict[int, Path], name: str, size: int) -> None:
    assert_close(state(trained[size] / name), state(trained[1] / name))
    for ours, theirs in zip(rows(trained[size] / name), rows(trained[1] / name), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_hold_the_same_state_after_every_epoch(trained: dict[int, Path], name: str, size: int) -> None:
    for epoch in (1, 2, 3):
        first = state(trained[size] / name, 0, epoch)
        for rank in range(1, size):
            ours = state(trained[size] / name, rank, epoch)
            assert_same(ours, shared_out(first, ours, rank, size))


def test_the_cases_are_what_their_names_say(trained: dict[int, Path]) -> None:
    def selected(name: str) -> list[float]:
        return [row["selection_ratio"] for row in rows(trained[1] / name)]

    assert 14 / 29 < selected("crosel")[-1] < 1
    assert selected("nothing selected") == [0, 0, 0]
    assert 0 < selected("fewer selected than a batch")[1] * 29 < 14
    stuck = trained[1] / "nothing to learn from"
    weights = [name for name in state(stuck) if name.startswith("method.networks")]
    assert all(torch.equal(state(stuck, 0, 1)[name], state(stuck)[name]) for name in weights)
    assert bool(
        (state(trained[1] / "pop")["method.purified"] != state(trained[1] / "pop", 0, 1)["method.purified"]).any()
    )


# --- batch norm ---------------------------------------------------------------------------------------------------


def test_batch_norm_is_averaged_or_synchronised(launch: Launch, tmp_path: Path) -> None:
    calm = ["train.ema_decay=0.5", "train.eval_batch_size=9"]
    cases, settings = {}, {"average": calm, "synchronise": [*calm, "train.batch_norm=synchronise"]}
    one_row = ["train.eval_batch_size=1"]  # too few for each rank to have some
    settings |= {"plain": one_row, "averaged weights": [*one_row, "train.ema_decay=0.5"]}
    for name, extra in settings.items():
        for method in ("crosel", "pico"):
            out = tmp_path / f"{method}-{name}"
            out.mkdir()
            cases[out] = {"out": str(out), "method": method, "settings": [*EARLY.get(method, []), *extra], "norm": True}
    codes = launch(3, "many_trainings", tmp_path, cases=list(cases.values()))
    assert codes == [0, 0, 0], logs(tmp_path)
    for out in cases:
        for epoch in (1, 2, 3):
            for rank in (1, 2):
                ours = state(out, rank, epoch)
                assert_same(ours, shared_out(state(out, 0, epoch), ours, rank, 3))
    for method in ("crosel", "pico"):
        alone(tmp_path / f"{method}-one", method=method, settings=[*EARLY.get(method, []), *calm], norm=True)
        one = state(tmp_path / f"{method}-one", epoch=1)
        assert_close(state(tmp_path / f"{method}-synchronise", epoch=1), one, 1e-4)
        statistics = [name for name in one if name.endswith("running_mean")]
        apart = state(tmp_path / f"{method}-average", epoch=1)
        assert statistics
        assert any(not torch.allclose(apart[name], one[name], rtol=1e-6) for name in statistics)
        plain, averaged = (state(tmp_path / f"{method}-{name}") for name in ("plain", "averaged weights"))
        assert_same({name: value for name, value in averaged.items() if not name.startswith("average.")}, plain)
        means = [name for name in averaged if name.startswith("average.") and name.endswith("running_mean")]
        trained_means = [plain[name.replace("average.", "method.networks.", 1)] for name in means]
        assert means
        assert not any(torch.allclose(averaged[a], b) for a, b in zip(means, trained_means, strict=True))


@pytest.mark.parametrize("size", [2, 4])
def test_with_batch_norm_too_all_ranks_hold_the_same_state(launch: Launch, tmp_path: Path, size: int) -> None:
    cases = {tmp_path / name: {"method": name, "settings": EARLY.get(name, []), "norm": True} for name in methods()}
    muon = ["train.optimiser=muon", "train.batch_norm=synchronise"]
    cases[tmp_path / "muon"] = {"method": "crosel", "settings": [*CROSEL, *muon], "norm": True}
    for out in cases:
        out.mkdir()
    codes = launch(size, "many_trainings", tmp_path, cases=[{"out": str(out), **case} for out, case in cases.items()])
    assert codes == [0] * size, logs(tmp_path)
    for out in cases:
        assert any(name.endswith("running_mean") for name in state(out))
        for epoch in (1, 2, 3):
            for rank in range(1, size):
                ours = state(out, rank, epoch)
                assert_same(ours, shared_out(state(out, 0, epoch), ours, rank, size))
    alone(tmp_path / "one", **{**cases[tmp_path / "muon"], "norm": True})
    assert_close(state(tmp_path / "muon", epoch=1), state(tmp_path / "one", epoch=1), 1e-4)


# --- stopping, going on -------------------------------------------------------------------------------------------


def test_one_rank_is_asked_to_stop_all_stop_and_any_number_goes_on(launch: Launch, tmp_path: Path) -> None:
    args = {"method": "crosel", "settings": CROSEL}
    stopped, resumed = tmp_path / "stopped", tmp_path / "resumed"
    for folder in (stopped, resumed):
        folder.mkdir()
    codes = launch(2, "ranks_train", tmp_path / "logs", out=str(stopped), stop_after=5, **args)
    assert codes == [1, 1], logs(tmp_path / "logs")  # Interrupted, and RankZeroFailed on the other
    assert "Interrupted" in logs(tmp_path / "logs")
    assert "exit code 130" in logs(tmp_path / "logs")
    ours = state(stopped, 1, 1, 2)
    assert ours["method.banks.0.labels"].shape == (1, 14)
    assert_same(ours, shared_out(state(stopped, 0, 1, 2), ours, 1, 2))
    codes = launch(4, "ranks_train", tmp_path / "logs4", out=str(resumed), resume=str(stopped), **args)
    assert codes == [0] * 4, logs(tmp_path / "logs4")
    alone(tmp_path / "one", resume=str(stopped), **args)
    alone(tmp_path / "straight", **args)
    assert_close(state(resumed), state(tmp_path / "straight"))
    assert_close(state(tmp_path / "one"), state(tmp_path / "straight"))
    assert rows(resumed) == [pytest.approx(row, rel=1e-5) for row in rows(tmp_path / "straight")]


def test_a_loss_that_is_not_finite_ends_all_ranks(launch: Launch, tmp_path: Path) -> None:
    codes = launch(2, "ranks_train", tmp_path, out=str(tmp_path), method="cc", settings=["train.lr=1e30"])
    assert codes == [1, 1]
    assert "Diverged" in (tmp_path / "0.log").read_text()
    assert "rank 0 ended the run with exit code 2" in (tmp_path / "1.log").read_text()


def test_25_starts_and_stops_end_without_an_abort(launch: Launch, tmp_path: Path) -> None:
    assert [launch(2, "start_and_stop", tmp_path / str(i)) for i in range(25)] == [[0, 0]] * 25


def test_words_under_way_do_not_hold_up_the_end(launch: Launch, tmp_path: Path) -> None:
    assert launch(1, "leave_at_once", tmp_path) == [0]


# --- the command line ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "digits.npz"
    np.savez(path, **small_arrays(29, test=13))
    return path


def command(source: Path, out: Path, *more: str) -> list[str]:
    sets = ["train.epochs=3", "train.batch_size=14", "network.name=_jobs:plain", *CROSEL]
    flags = [part for item in sets for part in ("--set", item)]
    return ["train", str(source), *flags, "--trust-code", "--device", "cpu", "--out", str(out), *more]


def test_a_killed_rank_ends_the_run_and_a_restart_ends_like_an_unbroken_one(
    launch: Launch, source: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def run(out: Path, log: str, *more: str, **kill: int) -> list[int]:
        argv = command(source, out, *more)
        return launch(2, "command_line", tmp_path / log, argv=argv, port=free_port(), kill=kill or None)

    assert run(whole, "whole-log") == [0, 0], logs(tmp_path / "whole-log")
    assert run(broken, "broken-log", rank=1, step=5) == [1, -9]
    said = (tmp_path / "broken-log" / "0.log").read_text()
    assert "crosel: rank 0 of 2: another rank has ended" in said
    assert "Traceback" not in said
    assert run(broken, "rest-log", "--resume") == [0, 0], logs(tmp_path / "rest-log")
    assert "continuing after epoch 1" in (tmp_path / "rest-log" / "0.log").read_text()
    assert (tmp_path / "rest-log" / "1.log").read_text() == ""  # one speaks for all
    ours, theirs = (load_newest(out / "checkpoints").checkpoint for out in (broken, whole))
    assert ours is not None
    assert theirs is not None
    assert_same(ours.tensors, theirs.tensors)
    assert (broken / "labels.csv").read_bytes() == (whole / "labels.csv").read_bytes()
    assert (broken / "done").is_file()


def test_what_rank_0_finds_wrong_is_said_once_and_ends_all(launch: Launch, source: Path, tmp_path: Path) -> None:
    argv = command(source, tmp_path / "run", "--set", "method.warmup=9")
    assert launch(2, "command_line", tmp_path, argv=argv, port=free_port(), kill=None) == [2, 2]
    assert (tmp_path / "0.log").read_text().startswith("crosel: method.warmup is 9")
    assert (tmp_path / "1.log").read_text() == ""
    assert not (tmp_path / "run").exists()


def test_classes_that_are_hardly_predicted_are_said_by_one_rank_for_all(launch: Launch, tmp_path: Path) -> None:
    np.savez(tmp_path / "digits.npz", **small_arrays(600, test=13))
    lines = []
    for size in (1, 2):
        out = tmp_path / f"{size}"
        argv = [*command(tmp_path / "digits.npz", out), "--set", "train.lr=1e-6"]  # nothing is learnt
        codes = launch(size, "command_line", tmp_path / f"log{size}", argv=argv, port=free_port(), kill=None)
        assert codes == [0] * size, logs(tmp_path / f"log{size}")
        lines.append(re.findall("^hardly predicted: .*", (tmp_path / f"log{size}/0.log").read_text(), re.MULTILINE))
    assert len(lines[0]) == 1
    assert lines[1] == lines[0]
    assert (tmp_path / "log2/1.log").read_text() == ""


def test_the_launcher_restarts_a_run_that_lost_a_rank(launch: Launch, source: Path, tmp_path: Path) -> None:
    """What `torchrun --max-restarts 1` does: the same command again, without --resume."""
    out = tmp_path / "run"
    assert launch(1, "elastic", tmp_path, argv=command(source, out), workers=2) == [0], logs(tmp_path)
    said = logs(tmp_path)
    assert "another rank has ended" in said
    assert "continuing after epoch 1" in said
    assert [row["epoch"] for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())] == [1, 2, 3]
    assert (out / "done").is_file()


# --- one rank, in this process ------------------------------------------------------------------------------------


@pytest.fixture
def single(tmp_path: Path) -> Iterator[Ranks]:
    with process_group(0, 1, CPU, f"file://{tmp_path / 'meet'}") as world:
        yield world


@pytest.mark.parametrize("method", ["crosel", "pico", "lws"])
def test_one_rank_of_a_group_is_one_process(single: Ranks, method: str, tmp_path: Path) -> None:
    args = {"method": method, "settings": [*EARLY.get(method, []), "train.bad_batches=skip"], "norm": True}
    for name, world in (("group", single), ("alone", SINGLE_PROCESS)):
        (tmp_path / name).mkdir()
        train(world, str(tmp_path / name), **args)
    assert_close(state(tmp_path / "group"), state(tmp_path / "alone"))
    assert single.sent["all_reduce"] > 0


def test_messages_of_one_rank_give_back_what_was_sent(single: Ranks) -> None:
    image = torch.randn(5, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    order = torch.tensor([3, 0, 4, 1, 2])
    assert torch.equal(single.fetch_rows(image, order), image[order])
    assert torch.equal(single.all_gather(image, 5), image)
    assert torch.equal(single.all_gather(torch.tensor([True, False]), 2), torch.tensor([True, False]))
    row = torch.randn(4, 2, requires_grad=True)
    single.all_gather(row, 4).square().sum().backward()
    torch.testing.assert_close(row.grad, 2 * row.detach())
    assert single.any_rank(True)
    assert not single.any_rank(False)
    assert bool(single.all_ranks(torch.tensor(True)))
    assert single.from_rank0(lambda: 5, str, int) == 5
    with pytest.raises(UserError, match="nothing came of it"):
        single.from_rank0(_nothing, str, int)


def _nothing() -> int:
    raise UserError("nothing came of it")


def test_synchronised_norm_is_batch_norm(single: Ranks) -> None:
    ours = nn.Sequential(nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False, momentum=None)).double()
    theirs = copy.deepcopy(ours)
    convert_sync_batch_norm(ours, single)
    x = torch.randn(7, 6, dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-5, atol=1e-5)


def test_who_is_launched_and_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "3"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    with init_distributed(CPU) as (world, device):  # torchrun with a single process
        assert world is SINGLE_PROCESS
        assert device == CPU
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched_by_torchrun()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(UserError, match="2 CUDA devices, but this is process 4"),
        init_distributed(torch.device("cuda")),
    ):
        pass


def test_a_lost_rank_is_one_line() -> None:
    def broken() -> None:
        with Ranks(1, 2)._collective("all_reduce"):
            raise RuntimeError("first\nConnection closed by peer")

    with pytest.raises(RankLost, match=r"rank 1 of 2: another rank has ended .*\(Connection closed by peer\)"):
        broken()


# --- pieces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "size"), [(7, 1), (7, 2), (7, 3), (8, 4), (3, 5), (0, 2)])
def test_shares_are_contiguous_and_differ_by_one_at_most(n: int, size: int) -> None:
    shares = [range(n)[shard_slice(rank, size, n)] for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_copied_or_sent() -> None:
    x = torch.arange(6.0)
    assert SINGLE_PROCESS.local_shard(x) is x
    assert SINGLE_PROCESS.all_gather(x, 6) is x
    assert SINGLE_PROCESS.all_reduce(x) is x
    assert SINGLE_PROCESS.scale_loss(x, 6) is x
    assert SINGLE_PROCESS.local_rows(6) == slice(0, 6)
    assert SINGLE_PROCESS.from_rank0(lambda: 5, str, int) == 5


def test_a_batch_smaller_than_two_a_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="14 examples and there are 9 ranks"):
        train(Ranks(0, 9), str(tmp_path), "cc", [])
