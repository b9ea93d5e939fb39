"""The data on the device: raw examples, their normalisation, their views, and the order they come in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crosel.augment import View
from crosel.data.dataset import Dataset
from crosel.data.store import StoredImages, chunks
from crosel.methods.base import Batch, Stream
from crosel.utils.distributed import SINGLE_PROCESS, World
from crosel.utils.system import give_memory_back


class Normaliser(nn.Module):
    """Raw uint8 images or float features -> zero mean and unit variance for each channel or column.

    Its buffers are saved with the networks, so prediction needs nothing but the run. With `robust`, for features, what
    is far out is drawn in first (`soft_clip`), by the column's median and its interquartile range.
    """

    mean: Tensor
    std: Tensor
    median: Tensor
    iqr: Tensor

    def __init__(self, mean: Tensor, std: Tensor, median: Tensor | None = None, iqr: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.robust = median is not None
        if self.robust:
            self.register_buffer("median", median)
            self.register_buffer("iqr", iqr)

    @classmethod
    def of(cls, data: Dataset, robust: bool = False) -> Normaliser:
        """Use the published values where the dataset has them, otherwise those of its training examples."""
        if data.is_image:
            if data.mean is not None and data.std is not None:
                mean, std = torch.tensor(data.mean), torch.tensor(data.std)
            else:
                mean, std = _pixel_statistics(torch.from_numpy(data.channel_counts()).double())
            return cls(mean.float().view(-1, 1, 1), _scale(std).view(-1, 1, 1))
        x = torch.from_numpy(np.asarray(data.x))
        if not robust:
            x = x.double()
            return cls(x.mean(dim=0).float(), _scale(x.std(dim=0, unbiased=False)))
        rows = []
        for column in x.T:  # one by one: quantiles need a copy
            median, iqr = _quartiles(column.numpy())
            clipped = soft_clip((column.double() - median) / iqr)
            rows.append((float(clipped.mean()), float(clipped.std(unbiased=False)), median, iqr))
        mean, std, median, iqr = torch.tensor(rows, dtype=torch.float64).T
        return cls(mean.float(), _scale(std), median.float(), iqr.float())

    def forward(self, x: Tensor) -> Tensor:
        raw = x.float() / 255 if x.dtype == torch.uint8 else x.float()
        if raw.ndim == 4:  # the layout in which convolutions run fastest
            raw = raw.contiguous(memory_format=torch.channels_last)
        if self.robust:
            raw = soft_clip((raw - self.median) / self.iqr)
        return (raw - self.mean) / self.std


def _scale(std: Tensor) -> Tensor:
    """Of a constant column, which says nothing, the scale is left as it is."""
    return torch.where(std > 1e-6, std, torch.ones_like(std)).float()


def soft_clip(v: Tensor, bound: float = 3.0) -> Tensor:
    """v / √(1 + (v/b)²): hardly changes what is near 0, and never exceeds b."""
    v = v.clamp(-1e18, 1e18)  # whose square is still finite
    return v / torch.sqrt(1 + (v / bound) ** 2)


def _quartiles(column: NDArray[Any]) -> tuple[float, float]:
    """Median and interquartile range; where the quartiles are the same, the standard deviation, or 1 of a constant."""
    low, median, high = np.quantile(column.astype(np.float64), (0.25, 0.5, 0.75)).tolist()
    spread = high - low if high - low > 1e-6 else float(column.std(dtype=np.float64))
    return median, spread if spread > 1e-6 else 1.0


def _pixel_statistics(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, from counts of grey levels: exact, and no float copy of the images."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    mean = (counts * levels).sum(dim=1) / counts.sum(dim=1)
    square = (counts * levels**2).sum(dim=1) / counts.sum(dim=1)
    return mean, (square - mean**2).clamp_min(0).sqrt()


def stream_batch(batch: int, share: float, ranks: int = 1, parts: int = 1) -> int:
    """The size of a stream's batches with which an epoch sees `share` of all examples, where `batch` sees all of them.

    In quarters of `batch`, rounded up: on a GPU every new size is recorded, and its kernels compiled, anew. Each rank
    gets one example at least, and each of the `parts` in which a step may be computed two.
    """
    return min(batch, max(-(-max(1, math.ceil(4 * share)) * batch // 4), ranks, 2 * parts))


def draw_indices(pool: Tensor | int, steps: int, batch: int, generator: torch.Generator) -> Tensor:
    """Indices for one epoch, [steps, batch], on the generator's device: the pool (a number: so many first examples) in
    random order, again and again.

    Every member comes at least once if the epoch is long enough, and no batch holds one twice unless the pool is
    smaller than a batch.
    """
    total, n = steps * batch, pool if isinstance(pool, int) else len(pool)
    rounds = max(1, -(-total // n))
    if n > _MANY and n >= batch and generator.device.type == "cpu":
        order = _order_of_many(n, total, batch, generator)
    else:
        table = torch.rand(rounds, n, generator=generator, device=generator.device).argsort(dim=1)
        for r in range(1, rounds if n >= batch else 1):
            # This many of the current batch came from the round before: in this round they go to the back.
            tail = r * n % batch
            if tail:
                seen = torch.isin(table[r], table[r - 1, n - tail :])
                table[r] = table[r][seen.to(torch.uint8).argsort(stable=True)]
        order = table.flatten()[:total]
    return (order if isinstance(pool, int) else pool.to(order.dtype)[order]).view(steps, batch)


_MANY = 1 << 16  # examples of which every number that is held counts


def _order_of_many(n: int, total: int, batch: int, generator: torch.Generator) -> Tensor:
    """The same order, one round after the other, in half the bytes, and nothing of a round that is not needed."""
    out = torch.empty(total, dtype=torch.int32)
    give_memory_back()
    for start in range(0, total, n):
        values, order = torch.rand(n, generator=generator), torch.empty(n, dtype=torch.int64)
        torch.sort(values, out=(values, order))
        end, before = min(total, start + n), out[start - start % batch : start].long()
        first = order[: end - start + len(before)]  # never more is used
        if len(before):
            seen = torch.zeros(n, dtype=torch.bool)
            seen[before] = True
            seen = seen[first]
            fresh = first[~seen]
            first = fresh if len(fresh) >= end - start else torch.cat([fresh, first[seen]])
        out[start:end] = first[: end - start]
        del values, order, first
        give_memory_back()
    return out


_BUFFERS = 3  # of each stream


class PinnedLoader:
    """Training inputs that stay in the host's memory or on disk, for data larger than the device's memory.

    Only the rows of a step travel. A thread gathers those of the next step into page-locked memory while the device is
    busy with this one, and copies overlap with computing. Buffers take turns: one is used, one copied or gathered into,
    and one may still be on its way to the device.
    """

    def __init__(self, x: Tensor | StoredImages, device: torch.device) -> None:
        self.x, self.device = x, device
        self.cuda = device.type == "cuda"
        self._order: dict[str, Tensor] = {}
        self._buffers: dict[tuple[str, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self._thread = ThreadPoolExecutor(1, "next-step")
        self._coming: tuple[int, Future[dict[str, Tensor]]] | None = None

    def begin_epoch(self, order: Mapping[str, Tensor]) -> None:
        """Take the positions [steps, batch] of every stream: the one wait for the device in an epoch."""
        self._take(-1)
        self._order = {name: table.cpu() for name, table in order.items()}

    def fetch(self, step: int) -> dict[str, Tensor]:
        """The raw examples of a step, on the device."""
        gathered = self._take(step) or self._gather(step, self._free_buffers(step))
        there = {name: self._copy((name, step % _BUFFERS), rows) for name, rows in gathered.items()}
        if all(step + 1 < len(table) for table in self._order.values()):
            # Buffers are waited for here: while this thread records a step, no other may call CUDA.
            buffers = self._free_buffers(step + 1)
            with suppress(RuntimeError):  # no more threads, as when the main one has ended: gathered when it is needed
                self._coming = step + 1, self._thread.submit(self._gather, step + 1, buffers)
        return there

    def _take(self, step: int) -> dict[str, Tensor] | None:
        """What the thread has gathered, if it is for this step."""
        coming, self._coming = self._coming, None
        if coming is None:
            return None
        gathered = coming[1].result()  # also what is not used: its buffers are ours again
        return gathered if coming[0] == step else None

    def _free_buffers(self, step: int) -> dict[str, Tensor]:
        return {
            name: self._free_buffer((name, step % _BUFFERS), len(table[step])) for name, table in self._order.items()
        }

    def _free_buffer(self, key: tuple[str, int], count: int) -> Tensor:
        buffer, copied = self._buffers.get(key, (None, None))
        if buffer is None or len(buffer) != count:
            dtype = self.x.dtype if isinstance(self.x, Tensor) else torch.uint8
            buffer = torch.empty(count, *self.x.shape[1:], dtype=dtype, pin_memory=self.cuda)
            copied = torch.cuda.Event() if self.cuda else None  # type: ignore[no-untyped-call]
            self._buffers[key] = buffer, copied
        elif copied is not None:
            copied.synchronize()
        return buffer

    def _gather(self, step: int, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, buffer in buffers.items():
            index = self._order[name][step]
            if isinstance(self.x, Tensor):
                torch.index_select(self.x, 0, index, out=buffer)
            else:
                self.x.read(index.numpy(), buffer.numpy())
        return buffers

    def _copy(self, key: tuple[str, int], rows: Tensor) -> Tensor:
        there = rows.to(self.device, non_blocking=True)
        if (copied := self._buffers[key][1]) is not None:
            copied.record()
        return there


class TrainingTensors:
    """Training examples on the device, and the batches a method asks for."""

    def __init__(
        self,
        data: Dataset,
        views: Mapping[str, View],
        normalise: Normaliser,
        device: torch.device,
        on_host: bool = False,
        world: World = SINGLE_PROCESS,
    ) -> None:
        x = data.x if isinstance(data.x, StoredImages) else torch.from_numpy(data.x)
        on_host = on_host or (isinstance(x, StoredImages) and device.type == "cpu")
        self.x = x if on_host else _on_device(x, device)
        self.host = PinnedLoader(self.x, device) if on_host else None
        self.views, self.normalise, self.world = views, normalise, world
        self.n, self.device = data.n, device
        self.full = 0  # size of a full batch

    def draw_epoch_indices(
        self, streams: Mapping[str, Stream], steps: int, batch: int, generator: torch.Generator, parts: int = 1
    ) -> dict[str, Tensor]:
        """Draw the order of every stream for one epoch, whose steps are computed in so many parts."""
        if self.host is not None:
            self.host.begin_epoch({})  # lets go of that of the epoch before
        tables = {
            name: draw_indices(
                self.n if s.pool is None else s.pool,
                steps,
                stream_batch(batch, s.share, self.world.size, parts),
                generator,
            )
            for name, s in streams.items()
        }
        self.full = batch
        if self.host is not None:
            own = {name: self.world.local_rows(table.shape[1]) for name, table in tables.items()}
            self.host.begin_epoch({name: table[:, own[name]] for name, table in tables.items()})
        return tables

    def rows(self, index: Tensor) -> Tensor:
        """Raw examples, on the device."""
        if isinstance(self.x, Tensor):
            return self.x[index.to(self.x.device)].to(index.device)
        return torch.from_numpy(np.asarray(self.x[index.cpu().numpy()])).to(index.device)

    def chunks(self, rows: range, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Raw examples of these rows on the device, part by part."""
        if isinstance(self.x, Tensor):
            for start in rows[::size]:
                part = slice(start, min(rows.stop, start + size))
                yield part, self.x[part].to(self.device)
            return
        for start, x in chunks(self.x, size, rows):
            yield slice(start, start + len(x)), torch.from_numpy(x).to(self.device)

    def fetch(self, step: int) -> dict[str, Tensor]:
        """The raw examples of a step that have to come from the host, by stream; none where the device has them all."""
        return self.host.fetch(step) if self.host is not None else {}

    def batches(
        self,
        indices: Mapping[str, Tensor],
        streams: Mapping[str, Stream],
        generator: torch.Generator,
        fetched: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Batch]:
        """Gather raw examples (unless fetched) and make every wanted view; `name#2` is one more draw of view `name`.

        A view that several streams ask for is made in one go: on a GPU, every small operation has a fixed cost.
        Every rank draws for the whole batch, so that all generators stay in step, and makes its own rows of it.
        """
        if not indices:
            return {}
        indices = {name: index.long() for name, index in indices.items()}
        own = {name: self.world.local_shard(index) for name, index in indices.items()}
        raw = _concat([fetched[name] for name in own]) if fetched else self.rows(_concat(list(own.values())))
        if raw.dtype != torch.uint8:  # noise on features is in units of their standard deviation
            raw = self.normalise(raw)
        rows = dict(zip(own, _split(raw, [len(i) for i in own.values()]), strict=True))
        views: dict[str, dict[str, Tensor]] = {name: {} for name in indices}
        for view, wanted in _streams_by_view(indices, streams).items():
            if view not in self.views:  # a bug in the method
                raise ValueError(
                    f"stream '{wanted[0][0]}' asks for a view '{view}'; choose from {', '.join(self.views)}"
                )
            every = [name for name, _ in wanted] == list(indices)
            drawn = [len(indices[name]) for name, _ in wanted]
            draw = self.views[view].draw(sum(drawn), generator)
            seen = self.views[view].apply(
                raw if every else _concat([rows[name] for name, _ in wanted]),
                {key: self.world.local_shard(value, drawn) for key, value in draw.items()},
            )
            if raw.dtype == torch.uint8:  # pixels are changed as pixels, and normalised afterwards
                seen = self.normalise(seen)
            sizes = [len(own[name]) for name, _ in wanted]
            for (name, key), part in zip(wanted, _split(seen, sizes), strict=True):
                views[name][key] = part
        return {
            name: Batch(own[name], views[name], index, self.world.weight(len(index), self.full))
            for name, index in indices.items()
        }


def _on_device(x: Tensor | StoredImages, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.to(device)
    out = torch.empty(x.shape, dtype=torch.uint8, device=device)
    for start, part in chunks(x, max(1, (1 << 26) * len(x) // x.nbytes)):
        out[start : start + len(part)] = torch.from_numpy(part).to(device)
    return out


def _concat(parts: list[Tensor]) -> Tensor:
    """One after the other; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(whole: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    return [whole] if len(sizes) == 1 else torch.split(whole, sizes)


def _streams_by_view(names: Iterable[str], streams: Mapping[str, Stream]) -> dict[str, list[tuple[str, str]]]:
    """For each view: the streams that want it, and under which name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name in names:
        for key in streams[name].views:
            found.setdefault(key.partition("#")[0], []).append((name, key))
    return found
