"""Everything of a run that lives in memory, how it is built from a config, and how it is saved and restored."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from crosel.augment import make_views
from crosel.averaging import WeightAverage
from crosel.checkpoint import Checkpoint, prefixed, without_prefix
from crosel.compute import fused
from crosel.compute.forward import Forward
from crosel.compute.synchronised import synchronise_norms
from crosel.config import RunConfig
from crosel.data.dataset import Dataset
from crosel.data.tensors import Normaliser, TrainingTensors
from crosel.distributed import ONE, World
from crosel.errors import UserError
from crosel.memory import inputs_stay_on_host, is_out_of_memory
from crosel.methods.base import Method, Problem, find_method
from crosel.nets import InputShape, NetworkFactory, network_factory, network_name
from crosel.optimiser import make_optimiser, optimiser_state, restore_optimiser


@dataclass
class Progress:
    """How far a run has come. `rows` are the lines of metrics.jsonl."""

    epoch: int = 0  # epochs finished
    step: int = 0  # steps done of the epoch under way
    rows: list[dict[str, Any]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)  # losses added up over the epoch under way, on the device
    seconds: float = 0.0  # spent in the epoch under way before an interruption


@dataclass
class Session:
    """A run in memory: data and method on the device, the optimiser, and how far training has come."""

    config: RunConfig
    data: Dataset
    device: torch.device
    method: Method
    normalise: Normaliser
    train: TrainingTensors
    generator: torch.Generator
    steps: int  # of an epoch
    batch_size: int  # of each stream; over all ranks
    progress: Progress = field(default_factory=Progress)
    order: dict[str, Tensor] = field(default_factory=dict)  # the examples of every step of the epoch under way
    epoch_start: Tensor | None = None  # the generator's state when the epoch under way began
    world: World = ONE  # the ranks that share the work

    @cached_property
    def optimiser(self) -> torch.optim.Optimizer:
        """Made when it is first needed: its import alone takes a second, and prediction does without."""
        return make_optimiser(self.method, self.config.train, self.device)

    @property
    def records(self) -> bool:
        """Whether steps and passes are recorded once and replayed (CUDA graphs)."""
        # With several ranks a step holds messages; these are sent as they come.
        return self.device.type == "cuda" and self.config.train.cuda_graphs and self.world.size == 1

    @property
    def bf16(self) -> bool:
        return in_bfloat16(self.config, self.device)

    @cached_property
    def forward(self) -> Forward:
        """Logits [v, rows, k] of raw inputs on the device. The method is in evaluation mode when it is called."""
        # Not of `self`: a session that held itself would keep its memory until the garbage collector comes round.
        config, device, method, normalise = self.config, self.device, self.method, self.normalise

        def run(x: Tensor) -> Tensor:
            with computing(config, device):
                return method.outputs(normalise(x)).float()

        return Forward(run, self.config.train.eval_batch_size, self.records)

    @cached_property
    def average(self) -> WeightAverage | None:
        decay = self.config.train.average
        return WeightAverage(self.method.networks, decay, self.device) if decay else None

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode, with the averaged weights where there are any."""
        self.method.eval()
        with self.average.in_place() if self.average else nullcontext():
            yield

    def statistics(self) -> list[Tensor]:
        """Running statistics of batch norm, which each rank takes from its own rows."""
        tensors = dict(self.method.named_buffers()) | prefixed(
            "average", self.average.state_dict() if self.average else {}
        )
        return [t for name, t in tensors.items() if name.rpartition(".")[2] in ("running_mean", "running_var")]

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Hashes that tie a checkpoint to the data and the candidate sets of its run."""
        return {"data": self.data.fingerprint(), "candidates": candidates_digest(self.data)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All tensors by name, and all else as JSON."""
        p = self.progress
        tensors = {
            **prefixed("method", self.method.state_dict()),
            **prefixed("normalise", self.normalise.state_dict()),
            **optimiser_state(self.optimiser, self.method),
            **prefixed("average", self.average.state_dict() if self.average else {}),
            **prefixed("sums", p.sums if p.step else {}),
            "generator": self.generator.get_state(),
        }
        if p.step and self.epoch_start is not None:
            tensors["generator_at_epoch_start"] = self.epoch_start
        state = {
            "epoch": p.epoch, "step": p.step, "rows": p.rows, "seconds": p.seconds,
            "device": self.device.type, **self.fingerprints,
        }  # fmt: skip
        return tensors, state

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """All that prediction needs of a checkpoint, and the method's tables."""
        load_tensors(self.method, without_prefix("method", tensors))
        load_tensors(self.normalise, without_prefix("normalise", tensors))
        if self.average:
            self.average.load_state_dict(without_prefix("average", tensors))

    def restore(self, saved: Checkpoint) -> None:
        """Go back to a saved state, or say why it does not belong to this run."""
        for what, ours in self.fingerprints.items():
            if saved.state[what] != ours:
                raise UserError(f"the {what} differ from those this run was started with; nothing was changed")
        self.load_weights(saved.tensors)
        restore_optimiser(self.optimiser, self.method, saved.tensors)
        if saved.state["device"] == self.device.type:
            try:
                self.generator.set_state(saved.tensors["generator"])
            except (RuntimeError, TypeError):
                raise UserError("the checkpoint's random state is not one of this version of torch") from None
            self.epoch_start = saved.tensors.get("generator_at_epoch_start")
        else:  # another kind of device has another kind of generator: fresh draws, and the epoch begins anew
            self.generator.manual_seed(self.config.seed + 7919 * (saved.state["epoch"] + 1))
            saved.state["step"], saved.state["seconds"] = 0, 0.0
        sums = without_prefix("sums", saved.tensors) if saved.state["step"] else {}
        self.progress = Progress(
            saved.state["epoch"], saved.state["step"], saved.state["rows"],
            {name: value.to(self.device) for name, value in sums.items()}, saved.state["seconds"],
        )  # fmt: skip


def candidates_digest(data: Dataset) -> str:
    assert data.candidates is not None
    return hashlib.sha256(np.packbits(data.candidates).tobytes()).hexdigest()[:16]


def load_tensors(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(
            f"the checkpoint does not fit this configuration: {str(error).splitlines()[-1].strip()}"
        ) from None


def pick_device(name: str) -> torch.device:
    if name not in ("auto", "cpu", "cuda") and not name.startswith("cuda:"):
        raise UserError(f"unknown device '{name}'; there are auto, cpu, cuda")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("device 'cuda' was asked for, but torch sees no CUDA device; use --device cpu")
    if name.startswith("cuda:"):
        number, cards = name.removeprefix("cuda:"), torch.cuda.device_count()
        if not number.isdecimal() or int(number) >= cards:
            raise UserError(f"there is no device '{name}'; torch sees {cards}: cuda:0 to cuda:{cards - 1}")
        torch.cuda.set_device(int(number))  # recordings and the fused kernels go to the card that is current
    return torch.device(name)


def resolve(config: RunConfig, data: Dataset) -> RunConfig:
    """Fill in what follows from the data, so that the saved config alone repeats the run."""
    augment = config.augment
    if "flip" not in augment.model_fields_set:
        augment = augment.model_copy(update={"flip": data.flips})
    name = network_name(config.network, InputShape(data.shape))
    network = config.network.model_copy(update={"name": name})
    return config.model_copy(update={"augment": augment, "network": network})


def build_session(
    config: RunConfig,
    data: Dataset,
    device: torch.device,
    make_network: NetworkFactory | None = None,
    trust_code: bool = False,
    world: World = ONE,
) -> Session:
    """Build networks and method for a resolved config. `make_network` replaces the named network; a name that is
    `module:factory` imports code, which needs `trust_code`."""
    assert data.candidates is not None
    classes = len(data.classes)
    factory = make_network or network_factory(config.network, InputShape(data.shape), classes, trust_code)
    batch_size = min(config.train.batch_size, max(2, data.n))  # batch norm has no statistics of a single example
    if world.size > 1 and batch_size < 2 * world.size:
        raise UserError(
            f"a step has {batch_size} examples and there are {world.size} ranks: each needs two or more; "
            "raise train.batch_size or start fewer processes"
        )
    steps = math.ceil(data.n / batch_size)
    problem = Problem(torch.from_numpy(data.candidates), config.train.epochs)
    method_class = find_method(config.method.name)
    with torch.random.fork_rng(devices=[]):  # starting values follow from the seed, global state stays untouched
        torch.default_generator.manual_seed(config.seed)
        method = method_class(config.method, problem, factory).to(device)
    if data.is_image:
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_network(method, data, device)
    method.world = world
    if world.size > 1 and config.train.batch_norm == "synchronise":
        synchronise_norms(method, world)
    normalise = Normaliser.of(data).to(device)
    return Session(
        config, data, device, method, normalise,
        TrainingTensors(
            data, make_views(data.shape, config.augment), normalise, device,
            on_host=inputs_stay_on_host(config.train.data_on, data.x.nbytes, device), world=world,
        ),
        torch.Generator(device).manual_seed(config.seed), steps, batch_size, world=world,
    )  # fmt: skip


@torch.no_grad()
def check_network(method: Method, data: Dataset, device: torch.device) -> None:
    """Let a user's own network fail here, with a clear line, and not in the middle of a step."""
    method.eval()
    sample = torch.zeros(2, *data.shape, device=device)
    try:
        out = method.outputs(sample)
    except (RuntimeError, ValueError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(f"the network cannot take inputs of shape {data.shape}: {str(error).splitlines()[0]}") from None
    if out.shape[1:] != (2, len(data.classes)):
        raise UserError(
            f"the network gives {tuple(out.shape[2:])} outputs an example; there are {len(data.classes)} classes"
        )


@torch.no_grad()
def check_batch(session: Session) -> None:
    """Refuse what training would fail on: of a single example batch norm has statistics only where it has several
    pixels."""
    if session.batch_size > 1:
        return
    network = copy.deepcopy(session.method.networks[0]).train()  # a copy: running statistics move
    try:
        network(torch.zeros(1, *session.data.shape, device=session.device))
    except ValueError:
        raise UserError(
            "batches of one example cannot train this network, for its batch normalisation; raise the batch size "
            f"(train.batch_size is {session.config.train.batch_size})"
        ) from None


def in_bfloat16(config: RunConfig, device: torch.device) -> bool:
    """Only on a GPU: few CPUs gain by it, and on some an illegal instruction ends the process."""
    return config.train.bf16 and device.type == "cuda"


@contextmanager
def computing(config: RunConfig, device: torch.device) -> Iterator[None]:
    """How numbers are computed: their precision, and which kernels may be taken (only those that repeat themselves)."""
    # The cache is off: a weight cast under no_grad (the target pass) would be reused, without gradient, in training.
    precision: AbstractContextManager[Any] = nullcontext()
    bf16 = in_bfloat16(config, device)
    if bf16 or torch.is_autocast_enabled(device.type):  # a caller's own autocast does not reach in here
        precision = torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16, cache_enabled=False)
    with deterministic(device), precision, fused.use(config.train.fused):
        yield


def deterministic(device: torch.device) -> AbstractContextManager[None]:
    """Convolutions by cuDNN's own choice among the kernels that give the same bits each time: no search, no cost."""
    if device.type != "cuda":  # nothing to choose, and the flags cost more than a small layer
        return nullcontext()
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True)
