"""Several processes ("ranks") that train one run together. The only file that uses `torch.distributed`.

Every rank holds the data, the networks and all tables. All ranks draw the same batch, with the same views, from the
same generator; each then works on its own rows of it. What all ranks must agree on goes through a `World`:

    local_shard       the rows of something drawn for the whole batch that belong to this rank
    all_gather        the rows of all ranks, in the order of the batch; gradients flow back to the rank that gave a row
    fetch_rows        only those rows of other ranks that this one needs (partners of MixUp: whole images)
    reduce_gradients  gradients and losses, summed over ranks, in one message

A rank's loss is a mean over its rows, so it counts with its share of the batch (`scale_loss`): the sum over ranks is
the mean over the batch, and several ranks learn what one does. A `World` of one process does nothing and costs nothing.

Why not `DistributedDataParallel`: it works through `forward` of one module, while methods call parts of a network
(PiCO: `features`, `classify`), run it several times a step, and hold two. Gradients are summed after the backward pass
in one flat message, which also carries the losses: all ranks see the same numbers, and stop together where these are
not finite. DDP would send while it computes; docs/scaling.md says what that is worth.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from crosel.errors import Diverged, Interrupted, RankLost, RankZeroFailed, UserError

T = TypeVar("T")
Gradients = Callable[[], Sequence[Tensor]]
_TIMEOUT = timedelta(minutes=30)  # a rank that is alive but silent for so long counts as lost


class World:
    """One process, which does everything itself."""

    rank = 0
    size = 1
    restarted = False  # whether a launcher has started us anew after a failure

    def local_rows(self, n: int) -> slice:
        """This rank's part of n rows."""
        return slice(0, n)

    def local_shard(self, values: Tensor, parts: int | Sequence[int] = 1) -> Tensor:
        """This rank's rows of values [n, ...] for the whole batch. Each of several parts, so many of one size or of the
        sizes given, is split by itself."""
        return values

    def all_gather(self, values: Tensor, total: int) -> Tensor:
        """All ranks' rows [total, ...], in the order in which `local_shard` splits them."""
        return values

    def fetch_rows(self, values: Tensor, positions: Tensor, parts: int = 1) -> Tensor:
        """Rows of the whole batch, for each of this rank's rows the one that `positions` [parts * n] names."""
        return values[positions]

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over ranks, without gradient."""
        return values

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return flag

    def all_ranks(self, flag: Tensor) -> Tensor:
        """Whether a bool on the device is true on all ranks."""
        return flag

    def weight(self, size: int, batch: int) -> float:
        """By what a mean over this rank's rows of `size` is multiplied so that it may be scaled as one over `batch`."""
        return 1.0

    def scale_loss(self, loss: Tensor, batch: int) -> Tensor:
        """What this rank's mean counts in the mean over the whole batch."""
        return loss

    def reduce_gradients(self, gradients: Gradients, report: Mapping[str, Tensor], batch: int) -> Any:
        """Sum gradients in place, and return the losses to report for the whole batch."""
        return report

    def gather_table(self, own: Tensor, n: int, dim: int) -> Tensor | None:
        """The whole of a table with n rows along `dim`, of which each rank holds its own: for rank 0, on the host."""
        return own

    def scatter_table(self, table: Tensor, n: int, dim: int) -> Tensor:
        """This rank's rows of a table that rank 0 holds whole; in `table` the others have room for theirs."""
        return table

    def average_buffers(self, tensors: Sequence[Tensor], batch: int) -> None:
        """Give every rank the mean over ranks, by share of the batch, of each tensor."""

    def from_rank0(self, make: Callable[[], T], describe: Callable[[T], Any], follow: Callable[[Any], T]) -> T:
        """Rank 0 makes something and describes it; the others follow the description. A failure ends all."""
        return make()

    def barrier(self) -> None:
        """Wait until every rank is here."""


SINGLE_PROCESS = World()


def shard_slice(rank: int, size: int, n: int) -> slice:
    """Rows of rank `rank`: contiguous, the first n mod size ranks with one more."""
    small, more = divmod(n, size)
    start = rank * small + min(rank, more)
    return slice(start, start + small + (rank < more))


class Ranks(World):
    """Several processes. `sent` counts the bytes of what was handed to each kind of message."""

    def __init__(self, rank: int, size: int, restarted: bool = False) -> None:
        self.rank, self.size, self.restarted = rank, size, restarted
        self.sent: Counter[str] = Counter()
        self._locations: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def local_rows(self, n: int) -> slice:
        return shard_slice(self.rank, self.size, n)

    def local_shard(self, values: Tensor, parts: int | Sequence[int] = 1) -> Tensor:
        pieces = values.chunk(parts) if isinstance(parts, int) else torch.split(values, list(parts))
        own = [piece[self.local_rows(len(piece))] for piece in pieces]
        return own[0] if len(own) == 1 else torch.cat(own)

    def all_gather(self, values: Tensor, total: int) -> Tensor:
        if values.requires_grad and torch.is_grad_enabled():
            return cast(Tensor, _AllGather.apply(values, self, total))  # type: ignore[no-untyped-call]
        return self._all_gather_rows(values, total)

    def _all_gather_rows(self, values: Tensor, total: int) -> Tensor:
        """Without gradient. Ranks with fewer rows than the rest send some that are cut off again."""
        if values.dtype == torch.bool:  # not every backend can send it
            return self._all_gather_rows(values.to(torch.uint8), total).bool()
        if values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last):
            return self._all_gather_rows(values.permute(0, 2, 3, 1), total).permute(0, 3, 1, 2)
        width = -(-total // self.size)
        if len(values) < width:
            values = torch.cat([values, values.new_zeros(width - len(values), *values.shape[1:])])
        out = values.new_empty(self.size * width, *values.shape[1:])
        dist: Any = torch.distributed
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # newer name, older name
        with self._collective("all_gather", values):
            gather(out, values.contiguous())
        if total == len(out):
            return out
        sizes = [shard_slice(rank, self.size, total) for rank in range(self.size)]
        return torch.cat([out[r * width : r * width + s.stop - s.start] for r, s in enumerate(sizes)])

    def fetch_rows(self, values: Tensor, positions: Tensor, parts: int = 1) -> Tensor:
        if values.ndim == 4 and values.is_contiguous(memory_format=torch.channels_last):
            return self.fetch_rows(values.permute(0, 2, 3, 1), positions, parts).permute(0, 3, 1, 2)
        positions = positions.cpu()  # how much goes where must be known here: a wait for the device
        holder, row, by_rank = self._row_locations(len(positions), parts)
        given = by_rank[holder[positions[by_rank]] == self.rank]  # those that want one of our rows
        asked = holder[positions[by_rank[holder[by_rank] == self.rank]]]  # whom each of our rows wants one from
        sends, receives = (torch.bincount(ranks, minlength=self.size).tolist() for ranks in (holder[given], asked))
        outgoing = values[row[positions[given]].to(values.device)].contiguous()
        incoming = outgoing.new_empty(len(asked), *values.shape[1:])
        with self._collective("fetch_rows", outgoing):
            torch.distributed.all_to_all_single(incoming, outgoing, receives, sends)
        out = torch.empty_like(incoming)
        out[asked.argsort(stable=True).to(out.device)] = incoming
        return out

    def _row_locations(self, count: int, parts: int) -> tuple[Tensor, Tensor, Tensor]:
        """The rank that holds each position of the whole batch, the row it has there, and all positions by these."""
        if (count, parts) not in self._locations:
            n = count // parts
            sizes = [len(range(n)[shard_slice(rank, self.size, n)]) for rank in range(self.size)]
            holder = torch.arange(self.size).repeat_interleave(torch.tensor(sizes)).repeat(parts)
            row = torch.cat([torch.arange(size) + part * size for part in range(parts) for size in sizes])
            self._locations[count, parts] = holder, row, (holder * count + row).argsort()
        return self._locations[count, parts]

    def all_reduce(self, values: Tensor) -> Tensor:
        if values.dtype == torch.bool:  # not every backend can send it
            return self.all_reduce(values.to(torch.uint8)).bool()
        out = values.detach().clone(memory_format=torch.contiguous_format)
        with self._collective("all_reduce", out):
            torch.distributed.all_reduce(out)
        return out

    def any_rank(self, flag: bool) -> bool:
        return bool(self.all_reduce(torch.tensor(int(flag))))  # on the host: no wait for the device

    def all_ranks(self, flag: Tensor) -> Tensor:
        return self.all_reduce(flag.int()) == self.size

    def _loss_scale(self, batch: int) -> float:
        return len(range(batch)[self.local_rows(batch)]) / batch

    def weight(self, size: int, batch: int) -> float:
        return 1.0 if size == batch else self._loss_scale(size) / self._loss_scale(batch)

    def scale_loss(self, loss: Tensor, batch: int) -> Tensor:
        return loss * self._loss_scale(batch)

    def reduce_gradients(self, gradients: Gradients, report: Mapping[str, Tensor], batch: int) -> Any:
        found = gradients()
        scale = self._loss_scale(batch)
        losses = [value.detach().float() * scale for value in report.values()]
        total = self.all_reduce(torch.cat([value.flatten() for value in (*found, *losses)]))
        *summed, values = torch.split(total, [*(g.numel() for g in found), len(losses)])
        for gradient, part in zip(found, summed, strict=True):
            gradient.copy_(part.view_as(gradient))
        return dict(zip(report, values, strict=True))

    def gather_table(self, own: Tensor, n: int, dim: int) -> Tensor | None:
        if self.rank:
            for part in _parts(own, dim):
                self._send(part, 0)
            return None
        shape = [n if d == dim else size for d, size in enumerate(own.shape)]
        whole = torch.empty(shape, dtype=own.dtype)
        for all_rows, part in zip(_parts(whole, dim), _parts(own, dim), strict=True):
            all_rows[self.local_rows(n)] = part
            for other in range(1, self.size):
                self._receive(all_rows[shard_slice(other, self.size, n)], other)
        return whole

    def scatter_table(self, table: Tensor, n: int, dim: int) -> Tensor:
        if self.rank:
            for part in _parts(table, dim):
                self._receive(part, 0)
            return table
        for part in _parts(table, dim):
            for other in range(1, self.size):
                self._send(part[shard_slice(other, self.size, n)], other)
        own = self.local_rows(n)
        return table.narrow(dim, own.start, own.stop - own.start).clone(memory_format=torch.contiguous_format)

    def _send(self, rows: Tensor, rank: int) -> None:
        rows = rows.detach().cpu()
        with self._collective("tables", rows):
            torch.distributed.send(rows.view(torch.uint8), rank)  # not every backend can send all kinds

    def _receive(self, rows: Tensor, rank: int) -> None:
        buffer = rows if rows.device.type == "cpu" else torch.empty_like(rows, device="cpu")
        with self._collective("tables"):
            torch.distributed.recv(buffer.view(torch.uint8), rank)
        if buffer is not rows:
            rows.copy_(buffer)

    @torch.no_grad()
    def average_buffers(self, tensors: Sequence[Tensor], batch: int) -> None:
        if tensors:
            total = self.all_reduce(torch.cat([value.flatten() for value in tensors]) * self._loss_scale(batch))
            for value, part in zip(tensors, torch.split(total, [t.numel() for t in tensors]), strict=True):
                value.copy_(part.view_as(value))

    def from_rank0(self, make: Callable[[], T], describe: Callable[[T], Any], follow: Callable[[Any], T]) -> T:
        if self.rank:
            description = self._broadcast_from_rank0(None)
            if description is None:
                raise RankZeroFailed
            return follow(description)
        try:
            made = make()
        except BaseException:
            self._broadcast_from_rank0(None)
            raise
        self._broadcast_from_rank0(describe(made))
        return made

    def _broadcast_from_rank0(self, content: Any) -> Any:
        box = [content]
        with self._collective("start"):
            torch.distributed.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def barrier(self) -> None:
        self.any_rank(False)  # a message that all must answer

    @contextmanager
    def _collective(self, kind: str, values: Tensor | None = None) -> Iterator[None]:
        if values is not None:
            self.sent[kind] += values.numel() * values.element_size()
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, NotImplementedError):
                raise
            reason = str(error).strip().splitlines()
            raise RankLost(
                f"rank {self.rank} of {self.size}: another rank has ended or cannot be reached "
                f"({reason[-1] if reason else 'no message'}); the last checkpoint is intact; continue with --resume"
            ) from None


def _parts(table: Tensor, dim: int) -> list[Tensor]:
    """Tables with a row for each example, of one whose examples are counted by dimension 0 or 1: without a copy."""
    return list(table.unbind(0)) if dim else [table]


class _AllGather(torch.autograd.Function):
    """Rows of all ranks; the gradient of a row is the sum of what every rank found for it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, world: Ranks, total: int) -> Tensor:
        ctx.world = world
        return world._all_gather_rows(values, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.world.local_shard(ctx.world.all_reduce(gradients[0])), None, None


# --- joining and leaving ------------------------------------------------------------------------------------------

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched_by_torchrun() -> bool:
    """Whether torchrun, or a launcher like it, started this process as one of several."""
    return all(name in os.environ for name in _LAUNCHED) and int(os.environ["WORLD_SIZE"]) > 1


@contextmanager
def init_distributed(device: torch.device) -> Iterator[tuple[World, torch.device]]:
    """Join the other ranks for the length of a run, and say which device is ours. Alone: one process."""
    if not launched_by_torchrun():
        yield SINGLE_PROCESS, device
        return
    if device.type == "cuda" and device.index is None:
        device = local_cuda_device(int(os.environ.get("LOCAL_RANK", os.environ["RANK"])))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    with process_group(rank, size, device, "env://", attempt) as world:
        yield world, device


def local_cuda_device(number: int) -> torch.device:
    if number >= torch.cuda.device_count():
        raise UserError(
            f"there are {torch.cuda.device_count()} CUDA devices, but this is process {number + 1}; "
            "start no more processes than devices (torchrun --nproc-per-node), or use --device cpu"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


@contextmanager
def process_group(rank: int, size: int, device: torch.device, meet: str, attempt: int = 0) -> Iterator[Ranks]:
    """Connect to the other ranks at `meet` (env://, file://PATH, tcp://HOST:PORT): nccl on CUDA, gloo on CPUs."""
    # Objects and flags go by gloo even where tensors go by nccl: they need not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    world = Ranks(rank, size, restarted=attempt > 0)
    with world._collective("start"):
        dist: Any = torch.distributed
        store, _, _ = next(dist.rendezvous(meet, rank, size, timeout=_TIMEOUT))
        # The launcher's store may outlive a restart, and with it the addresses of those who have gone.
        store = dist.PrefixStore(f"crosel/{attempt}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        yield world
    except (Interrupted, Diverged) as ended:  # on all ranks alike, so one says it
        _shut_down(world)
        if rank:
            raise RankZeroFailed(130 if isinstance(ended, Interrupted) else 2) from None
        raise
    # After any other failure nobody is left to shut down with: the connections end with the process.
    _shut_down(world)


def _shut_down(world: Ranks) -> None:
    world.barrier()  # gloo aborts if one side leaves while another still communicates
    # At its end gloo waits for its threads, which may need Python's lock to let go of what they sent. Ended through a
    # name of its own it gives the lock up meanwhile; ended with the group it does not in torch 2.6, and hangs.
    group: Any = torch.distributed.group.WORLD
    gloo = group._get_backend(torch.device("cpu"))
    del group
    torch.distributed.destroy_process_group()
    del gloo
