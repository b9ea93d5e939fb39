"""The one loop, for every method.

streams -> indices -> views -> method.loss -> step -> method.after_step      (every step, all on the device)
training pass -> method.observe, test pass -> method.end_epoch -> metrics -> checkpoint      (every epoch)
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from crosel.config import TrainSettings
from crosel.errors import Interrupted
from crosel.methods.base import Stream, TrainingLabels
from crosel.training import finite, metrics
from crosel.training.devices import computing
from crosel.training.ema import refresh_statistics, spread_rows
from crosel.training.session import Session
from crosel.training.step import Stepper
from crosel.utils.out_of_memory import in_passes, in_steps

Row = dict[str, Any]

_AVERAGE_CHUNKS = 16  # from which averaged weights get their statistics, or more if `train.refresh` is more


class Watcher(Protocol):
    """Whoever wants to know how the run goes: run folder, console, loggers."""

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None: ...
    def on_state(self, session: Session) -> None: ...
    def on_epoch(self, session: Session, row: Row) -> None: ...


def learning_rate(settings: TrainSettings, epoch: int, step: int, steps: int) -> float:
    """Learning rate of a step of epoch 1, 2, …; the warm-up of a method counts, milestones scale with the epochs."""
    done = epoch - 1 + step / steps
    lr = settings.lr
    if settings.schedule == "cosine":
        lr = cosine(settings, done)
    elif settings.schedule == "step":
        lr *= settings.decay ** sum(epoch > max(1, round(m * settings.epochs)) for m in settings.milestones)
    if settings.lr_ramp:
        lr *= min(1.0, (done + 1 / steps) / settings.lr_ramp)
    return lr


def cosine(settings: TrainSettings, done: float) -> float:
    """Half a cosine from lr to 0 over the run; with a restart, one up to there and one from there to the end."""
    if not settings.restart:
        start, share = settings.lr, done / settings.epochs
    elif done < settings.restart:
        start, share = settings.lr, done / settings.restart
    else:
        start = settings.restart_lr or settings.lr
        share = (done - settings.restart) / (settings.epochs - settings.restart)
    return start * 0.5 * (1 + math.cos(math.pi * share))


def fit(
    session: Session, watchers: tuple[Watcher, ...] = (), stop_requested: Callable[[], bool] = lambda: False
) -> list[Row]:
    """Train to the last epoch, from wherever the session stands, and return the rows of metrics."""
    settings, progress, method = session.config.train, session.progress, session.method
    steps_fit, passes_fit = in_steps(session), in_passes(session)
    with steps_fit:
        stepper = Stepper(session)
    while progress.epoch < settings.epochs:
        epoch = progress.epoch + 1
        started = time.perf_counter() - progress.seconds
        before = method.phase
        method.begin_epoch(epoch)
        if method.phase != before and not progress.step:
            progress.sums.clear()  # another phase has other losses to report
        if session.average:
            session.average.begin_epoch(progress.epoch * session.steps)
        with steps_fit:
            finished = take_steps(session, stepper, watchers, stop_requested)
        if not finished:
            with passes_fit:
                refresh_average(session, 1)  # who has asked to stop waits for it
            progress.seconds = time.perf_counter() - started
            for watcher in watchers:
                watcher.on_state(session)
            raise Interrupted
        check_weights(session, epoch)
        training_seconds = time.perf_counter() - started
        losses = finite.means(session, epoch)
        with passes_fit:
            measured = finish_epoch(session, epoch)
        row = {
            "epoch": epoch,
            "phase": method.phase,
            "lr": learning_rate(settings, epoch, session.steps - 1, session.steps),
            **losses,
            **measured,
            "seconds": time.perf_counter() - started,
            "images_per_second": session.steps * session.batch_size / training_seconds,
            "peak_memory_mib": peak_memory_mib(session.device),
        }
        progress.end_epoch(row)
        for watcher in watchers:
            watcher.on_state(session)
            watcher.on_epoch(session, row)
        if session.world.any(stop_requested()) and epoch < settings.epochs:
            raise Interrupted
    return progress.rows


def take_steps(
    session: Session, stepper: Stepper, watchers: tuple[Watcher, ...], stop_requested: Callable[[], bool]
) -> bool:
    """The steps of an epoch that are left. False: asked to stop before the last, with a state that may be saved."""
    settings, progress, world = session.config.train, session.progress, session.world
    epoch = progress.epoch + 1
    streams = session.method.streams()
    indices = draw_epoch(session, streams)
    looks = Looks(session, epoch)
    session.method.train()
    stopped = False
    while progress.step < session.steps and not stopped:
        step = progress.step
        lr = learning_rate(settings, epoch, step, session.steps)
        stepper(streams, {name: table[step] for name, table in indices.items()}, lr)
        progress.step += 1
        last = progress.step == session.steps
        if progress.step % settings.log_every == 0 or last:
            for at, loss in looks.take(wait=last):
                for watcher in watchers:
                    watcher.on_step(session, epoch, at, loss)
        stopped = world.any(stop_requested()) and not last
    for statistics in session.statistics():
        world.average(statistics, session.batch_size)
    if stopped:
        looks.take(wait=True)  # what is not finite must not get into a checkpoint
    return not stopped


def draw_epoch(session: Session, streams: Mapping[str, Stream]) -> dict[str, Tensor]:
    """Draw the epoch's order; when resuming inside an epoch, draw the same order again and go on from there."""
    generator, now = session.generator, session.generator.get_state()
    if session.progress.step and session.epoch_start is not None:
        generator.set_state(session.epoch_start)
    else:
        session.epoch_start = now
    indices = session.train.epoch_indices(streams, session.steps, session.batch_size, generator)
    session.order = indices
    if session.progress.step:
        generator.set_state(now)
    return indices


class Looks:
    """Now and then, the mean loss of the epoch so far. A value that is not finite makes it so for good: the run ends.

    On a GPU a look is a copy that comes home while steps go on, and is read at the next look. So the device never waits
    for the host, and the host never runs further ahead than two looks: a signal is answered soon.
    """

    def __init__(self, session: Session, epoch: int) -> None:
        self.session, self.epoch = session, epoch
        self._under_way: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def take(self, wait: bool) -> list[tuple[int, float]]:
        """Look. Returns step and mean loss of the looks that are due: with `wait`, of all, this one too."""
        progress, device = self.session.progress, self.session.device
        nothing = torch.zeros((), device=device)
        sums = torch.stack([progress.sums.get(name, nothing) for name in ("loss", finite.SKIPPED)])
        copied = sums.to("cpu", non_blocking=True)
        event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if event:
            event.record(torch.cuda.current_stream(device))
        self._under_way.append((progress.step, copied, event))
        due = len(self._under_way) - (1 if reads_late(device) and not wait else 0)
        return [self._read(*self._under_way.pop(0)) for _ in range(due)]

    def _read(self, step: int, copied: Tensor, event: torch.cuda.Event | None) -> tuple[int, float]:
        if event:
            event.synchronize()
        total, skipped = copied.tolist()
        loss = total / max(1, step - int(skipped))
        if not math.isfinite(loss):
            raise finite.diverged(self.session, self.epoch, "the loss is no longer finite (NaN or infinite)")
        return step, loss


def reads_late(device: torch.device) -> bool:
    """Whether a look is read at the next one. A CPU has no queue of steps that could run dry."""
    return device.type == "cuda"


def check_weights(session: Session, epoch: int) -> None:
    """The last step's update shows in no loss yet: look at the weights themselves before they are saved."""
    if not bool(finite.all_finite(session.method.state_dict().values())):
        raise finite.diverged(session, epoch, "the weights are no longer finite", session.steps - 1)


def finish_epoch(session: Session, epoch: int) -> Row:
    """Pass over training and test set in evaluation mode, let the method close the epoch, and measure.

    The training set is shown with the weights that are trained, also where an average of them predicts: an average
    hardly changes from epoch to epoch, so that a label's stability would say nothing (docs/study.md).
    """
    method, data, every = session.method, session.data, session.config.train.evaluate_every
    method.eval()
    due = epoch % every == 0 or epoch == session.config.train.epochs
    row: Row = {}
    if method.watches_training_set or due:
        refresh(session, session.config.train.refresh)
        row |= training_pass(session)
    method.end_epoch(epoch)
    row |= method.metrics()
    row |= selection_accuracy(session, method.training_labels())
    refresh_average(session, max(session.config.train.refresh, _AVERAGE_CHUNKS))  # due or not: a checkpoint holds it
    if due and data.x_test is not None and data.y_test is not None:
        row |= accuracies(session, data.x_test, data.y_test)
    return row


def selection_accuracy(session: Session, chosen: TrainingLabels | None) -> Row:
    """S-acc, where the true labels are there and anything is selected."""
    if chosen is None or session.data.y is None:
        return {}
    truth = torch.from_numpy(session.data.y).to(session.device)
    accuracy = metrics.oracle_selection_accuracy(chosen.labels, chosen.selected, truth)
    return {} if accuracy is None else {"oracle_selection_accuracy": accuracy}


def refresh_average(session: Session, chunks: int) -> None:
    """Give averaged weights, where there are any, the statistics that go with them."""
    if session.average:
        with session.evaluating():
            refresh(session, chunks)


def refresh(session: Session, chunks: int) -> None:
    """Take batch norm's statistics anew from up to so many chunks of plain training examples.

    Without random numbers: training is the same however often this is done.
    """
    if not chunks:
        return
    n, world = len(session.train.x), session.world
    chunk = max(2 * world.size, min(n, session.config.train.eval_batch_size))  # two for each rank: one has no variance
    rows = spread_rows(n, min(chunks, max(1, n // chunk)) * chunk).view(-1, chunk)
    batches = (session.normalise(session.train.rows(world.own(part)).to(session.device)) for part in rows)
    with computing(session.config, session.device):
        found = refresh_statistics(session.method.networks, batches, session.method.outputs)
    world.average(found, chunk)


@torch.no_grad()
def training_pass(session: Session) -> Row:
    """Show the method its un-augmented training set (each rank a part), and measure what needs no true labels."""
    method, x, chunk = session.method, session.train.x, session.config.train.eval_batch_size
    sums, own = torch.zeros(2, device=session.device), session.world.rows(len(x))
    for start in range(own.start, own.stop, chunk):
        rows = slice(start, min(own.stop, start + chunk))
        outputs = session.forward(x[rows].to(session.device))
        method.observe(rows, outputs)
        p, sets = method.combine(outputs), method.candidates[rows]
        sums += (rows.stop - rows.start) * torch.stack(
            [metrics.covering_rate(p, sets), metrics.approximated_accuracy(p, sets)]
        )
    covering, approximated = (session.world.sum(sums) / len(x)).tolist()
    return {"covering_rate": covering, "approximated_accuracy": approximated}


@torch.no_grad()
def accuracies(session: Session, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Row:
    """Accuracy of the combined prediction, and of each network alone where there are several."""
    own = session.world.rows(len(x))
    truth = torch.from_numpy(y[own]).to(session.device)
    right = torch.zeros(len(session.method.networks) + 1, dtype=torch.int64, device=session.device)
    with session.evaluating():  # once: averaged weights are not put in place anew for every chunk
        for start, outputs in predict_chunks(session, x[own]):
            labels = truth[start : start + outputs.shape[1]]
            guesses = torch.cat([session.method.combine(outputs).argmax(1, keepdim=True).T, outputs.argmax(2)])
            right = right + (guesses == labels).sum(dim=1)
    together, *alone = (session.world.sum(right) / len(x)).tolist()
    row = {"test_accuracy": together}
    if len(alone) > 1:
        row |= {f"test_accuracy_{v + 1}": value for v, value in enumerate(alone)}
    return row


@torch.no_grad()
def predict_chunks(session: Session, x: np.ndarray[Any, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, logits [v, rows, k]) for raw inputs in the host's memory, in evaluation mode."""
    chunk = session.config.train.eval_batch_size
    for start in range(0, len(x), chunk):
        part = torch.from_numpy(x[start : start + chunk]).to(session.device)
        with session.evaluating():
            outputs = session.forward(part)
        yield start, outputs


def predicted_probabilities(session: Session, x: np.ndarray[Any, Any]) -> Tensor:
    """Class probabilities [n, k] of raw inputs, in the host's memory."""
    return torch.cat([session.method.combine(outputs).cpu() for _, outputs in predict_chunks(session, x)])


def peak_memory_mib(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)
