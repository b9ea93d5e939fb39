"""What a rank does in these tests. Also called by the test itself, as the one process to compare with."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from _sessions import on_disk
from _support import small_arrays
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import crosel.cli.app
import crosel.runs.pipeline
from crosel.config import build_config
from crosel.data.dataset import Dataset
from crosel.nn.networks import Classifier
from crosel.training import checkpoint
from crosel.training.build import build_session, resolve
from crosel.training.callbacks import Row
from crosel.training.session import Session
from crosel.training.trainer import fit
from crosel.utils.distributed import SINGLE_PROCESS, World, process_group

CPU = torch.device("cpu")


class PlainNetwork(Classifier):
    """Two layers without batch norm; PiCO finds its features."""

    def __init__(self, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__(16, classes)
        self.hidden = nn.Linear(64, 16)

    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(self.hidden(x.flatten(1)))


def plain(classes: int, shape: tuple[int, ...]) -> nn.Module:
    return PlainNetwork(classes, shape)


def digits(n: int, test: int = 13) -> Dataset:
    a = small_arrays(n, test=test)
    return Dataset(
        a["x"][:, None], tuple("0123456789"), a["candidates"], a["y"], a["x_test"][:, None], a["y_test"], flips=False
    )


class Recorder:
    """Writes a rank's state after every epoch, and when it stops in the middle of one."""

    def __init__(self, out: Path, rank: int) -> None:
        self.out, self.rank = out, rank

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
        pass

    def on_checkpoint(self, session: Session) -> None:
        tensors, state = session.state()
        p = session.progress
        save_file({k: v.contiguous() for k, v in tensors.items()}, self.out / f"{p.epoch}-{p.step}-rank{self.rank}.st")
        if self.rank == 0:
            checkpoint.save(self.out, tensors, state, keep=9)

    def on_epoch(self, session: Session, row: Row) -> None:
        pass


def train(
    world: World,
    out: str,
    method: str,
    settings: list[str],
    n: int = 29,
    norm: bool = False,
    resume: str | None = None,
    stop_after: int | None = None,
    disk: bool = False,
) -> Session:
    data = on_disk(digits(n), Path(out)) if disk else digits(n)
    values = {"source": "memory", "seed": 3, "method": {"name": method}}
    common = ["train.epochs=3", "train.batch_size=14", "train.lr=0.05", "network.width=4", "train.log_every=1"]
    config = resolve(build_config(settings=[*common, *settings], values=values), data)
    network = None if norm else lambda: plain(10, data.shape)
    session = build_session(config, data, CPU, network, world=world)
    if resume:
        found = checkpoint.load_newest(Path(resume)).checkpoint
        assert found is not None
        session.restore(found)
    looks = 0

    def stop() -> bool:
        nonlocal looks
        looks += 1
        return stop_after is not None and looks > stop_after and world.rank == world.size - 1  # only one is asked

    fit(session, (Recorder(Path(out), world.rank),), stop)
    return session


def ranks_train(rank: int, size: int, meet: Path, **args: Any) -> None:
    with process_group(rank, size, CPU, f"file://{meet}") as world:
        train(world, **args)


def many_trainings(rank: int, size: int, meet: Path, cases: list[dict[str, Any]]) -> None:
    """Several runs, one after the other, of the same ranks."""
    with process_group(rank, size, CPU, f"file://{meet}") as world:
        for case in cases:
            train(world, **case)


def start_and_stop(rank: int, size: int, meet: Path) -> None:
    with process_group(rank, size, CPU, f"file://{meet}") as world:
        assert int(world.all_reduce(torch.tensor(rank + 1))) == size * (size + 1) // 2


def leave_at_once(rank: int, size: int, meet: Path) -> None:
    """With much that gloo has yet to send and let go of."""
    with process_group(rank, size, CPU, f"file://{meet}") as world:
        world.barrier = lambda: None  # type: ignore[method-assign]
        for _ in range(2000):
            torch.distributed.all_reduce(torch.ones(1000), async_op=True)


def command_line(rank: int, size: int, meet: Path, argv: list[str], port: int, kill: dict[str, int] | None) -> None:
    """`crosel ...` as torchrun would start it. `kill`: this rank ends by SIGKILL at this step."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    if kill and kill["rank"] == rank:
        end_at_step(kill["step"])
    sys.argv = ["crosel", *argv]
    crosel.cli.app.main()


def end_at_step(last: int) -> None:
    from crosel.training.step import TrainStep

    real, steps = TrainStep.__call__, 0

    def step(self: TrainStep, *args: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == last:
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, *args)

    TrainStep.__call__ = step  # type: ignore[method-assign]


def elastic(rank: int, size: int, meet: Path, argv: list[str], workers: int) -> None:
    """torchrun's own agent with `--max-restarts 1`, whose workers are forks; rank 1 is killed in its first life."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=workers, max_restarts=1, start_method="fork", rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0", run_id="tests", monitor_interval=0.05,
    )  # fmt: skip
    elastic_launch(config, elastic_worker)(argv)


def elastic_worker(argv: list[str]) -> None:
    if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        end_at_step(5)
    sys.argv = ["crosel", *argv]
    try:
        crosel.cli.app.main()
    except SystemExit as end:
        os._exit(int(end.code or 0))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def alone(out: Path, **args: Any) -> Session:
    """The same training in this process."""
    out.mkdir(parents=True, exist_ok=True)
    return train(SINGLE_PROCESS, str(out), **args)
