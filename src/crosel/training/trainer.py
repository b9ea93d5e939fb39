"""The one loop, for every method.

streams -> indices -> views -> method.loss -> step -> method.after_step      (every step, all on the device)
training pass -> method.observe, test pass -> method.end_epoch -> metrics -> checkpoint      (every epoch)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crosel.config import TrainSettings
from crosel.data.store import Examples, chunks
from crosel.errors import Interrupted
from crosel.methods.base import Stream, TrainingLabels
from crosel.training import metrics
from crosel.training.callbacks import Callback, Row
from crosel.training.devices import advise_while_evaluating, advise_while_training, compute_context
from crosel.training.ema import recalibrate_batch_norm, spread_rows
from crosel.training.session import Session
from crosel.training.step import SKIPPED_BATCHES, TrainStep, all_finite, divergence_error, mean_losses
from crosel.utils.system import peak_memory

_EMA_CHUNKS = 16  # from which averaged weights get their batch-norm statistics


def learning_rate(settings: TrainSettings, epoch: int, step: int, steps: int) -> float:
    """Learning rate of a step of epoch 1, 2, …; the warm-up of a method counts, milestones scale with the epochs."""
    done = epoch - 1 + step / steps
    lr = settings.lr
    if settings.schedule == "cosine":
        lr *= 0.5 * (1 + math.cos(math.pi * done / settings.epochs))
    elif settings.schedule == "step":
        lr *= settings.decay ** sum(epoch > max(1, round(m * settings.epochs)) for m in settings.milestones)
    if settings.lr_ramp:
        lr *= min(1.0, (done + 1 / steps) / settings.lr_ramp)
    return lr


def fit(
    session: Session, callbacks: tuple[Callback, ...] = (), stop_requested: Callable[[], bool] = lambda: False
) -> list[Row]:
    """Train to the last epoch, from where the session is, and return the rows of metrics."""
    settings, progress, method = session.config.train, session.progress, session.method
    training_advice, evaluation_advice = advise_while_training(session), advise_while_evaluating(session)
    method.split_tables()
    with training_advice:
        train_step = TrainStep(session)
    while progress.epoch < settings.epochs:
        epoch = progress.epoch + 1
        started = time.perf_counter() - progress.seconds
        before = method.phase
        method.begin_epoch(epoch)
        if method.phase != before and not progress.step:
            progress.sums.clear()  # another phase has other losses to report
        if session.ema:
            session.ema.begin_epoch(progress.epoch * session.steps)
        with training_advice:
            finished = train_epoch(session, train_step, callbacks, stop_requested)
        if not finished:
            with evaluation_advice:
                recalibrate_ema(session, 1)  # few chunks: whoever asked to stop is waiting
            progress.seconds = time.perf_counter() - started
            with session.tables_gathered():
                for callback in callbacks:
                    callback.on_checkpoint(session)
            raise Interrupted
        check_weights(session, epoch)
        training_seconds = time.perf_counter() - started
        losses = mean_losses(session, epoch)
        with evaluation_advice:
            measured = finish_epoch(session, epoch)
        row = {
            "epoch": epoch,
            "phase": method.phase,
            "lr": learning_rate(settings, epoch, session.steps - 1, session.steps),
            **losses,
            **measured,
            "seconds": time.perf_counter() - started,
            "images_per_second": session.steps * session.batch_size / training_seconds,
            **peak_memory_mib(session.device),
        }
        progress.end_epoch(row)
        with session.tables_gathered():
            for callback in callbacks:
                callback.on_checkpoint(session)
                callback.on_epoch(session, row)
        if session.world.any_rank(stop_requested()) and epoch < settings.epochs:
            raise Interrupted
    method.join_tables()
    return progress.rows


def train_epoch(
    session: Session, train_step: TrainStep, callbacks: tuple[Callback, ...], stop_requested: Callable[[], bool]
) -> bool:
    """The steps of an epoch that are left. False: asked to stop before the last, with a state that may be saved."""
    settings, progress, world = session.config.train, session.progress, session.world
    epoch = progress.epoch + 1
    streams = session.method.streams()
    indices = draw_epoch(session, streams)
    losses = AsyncLossReader(session, epoch)
    session.method.train()
    stopped = False
    while progress.step < session.steps and not stopped:
        step = progress.step
        lr = learning_rate(settings, epoch, step, session.steps)
        train_step(streams, {name: table[step] for name, table in indices.items()}, lr)
        progress.step += 1
        last = progress.step == session.steps
        if progress.step % settings.log_every == 0 or last:
            for at, loss in losses.poll(wait=last):
                for callback in callbacks:
                    callback.on_step(session, epoch, at, loss)
        stopped = world.any_rank(stop_requested()) and not last
    for statistics in session.batch_norm_statistics():
        world.average_buffers(statistics, session.batch_size)
    if stopped:
        losses.poll(wait=True)  # what is not finite must not get into a checkpoint
    return not stopped


def draw_epoch(session: Session, streams: Mapping[str, Stream]) -> dict[str, Tensor]:
    """Draw the epoch's order; when resuming inside an epoch, draw the same order again and go on from there."""
    generator, now = session.generator, session.generator.get_state()
    session.epoch_indices = {}  # first: the order of a million examples takes its memory
    if session.progress.step and session.epoch_start is not None:
        generator.set_state(session.epoch_start)
    else:
        session.epoch_start = now
    indices = session.train.draw_epoch_indices(
        streams, session.steps, session.batch_size, generator, session.progress.parts
    )
    session.epoch_indices = indices
    if session.progress.step:
        generator.set_state(now)
    return indices


class AsyncLossReader:
    """Now and then, the mean loss of the epoch so far. A value that is not finite makes it so for good: the run ends.

    On a GPU the loss is copied to the host while steps go on, and read at the next poll. So the device never waits for
    the host, and the host never runs further ahead than two polls: a signal is answered soon.
    """

    def __init__(self, session: Session, epoch: int) -> None:
        self.session, self.epoch = session, epoch
        self._copies: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    def poll(self, wait: bool) -> list[tuple[int, float]]:
        """Copy the loss; return step and mean loss of the copies that are due: with `wait`, of all, this one too."""
        progress, device = self.session.progress, self.session.device
        nothing = torch.zeros((), device=device)
        sums = torch.stack([progress.sums.get(name, nothing) for name in ("loss", SKIPPED_BATCHES)])
        copied = sums.to("cpu", non_blocking=True)
        event = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if event:
            event.record(torch.cuda.current_stream(device))
        self._copies.append((progress.step, copied, event))
        due = len(self._copies) - (1 if reads_with_delay(device) and not wait else 0)
        return [self._read(*self._copies.pop(0)) for _ in range(due)]

    def _read(self, step: int, copied: Tensor, event: torch.cuda.Event | None) -> tuple[int, float]:
        if event:
            event.synchronize()
        total, skipped = copied.tolist()
        loss = total / max(1, step - int(skipped))
        if not math.isfinite(loss):
            raise divergence_error(self.session, self.epoch, "the loss is no longer finite (NaN or infinite)")
        return step, loss


def reads_with_delay(device: torch.device) -> bool:
    """Whether a loss is read at the next poll. A CPU has no queue of steps that could run dry."""
    return device.type == "cuda"


def check_weights(session: Session, epoch: int) -> None:
    """No loss shows the last step's update yet: check the weights themselves before they are saved."""
    if not bool(session.world.all_ranks(all_finite(session.method.state_dict().values()))):
        raise divergence_error(session, epoch, "the weights are no longer finite", session.steps - 1)


def finish_epoch(session: Session, epoch: int) -> Row:
    """Pass over training and test set in evaluation mode, let the method close the epoch, and measure.

    The training set is seen by the trained weights, even where their EMA predicts: an EMA hardly changes from epoch to
    epoch, so the stability of a label would say nothing (docs/study.md).
    """
    method, data, every = session.method, session.data, session.config.train.evaluate_every
    method.eval()
    due = epoch % every == 0 or epoch == session.config.train.epochs
    row: Row = {}
    if method.watches_training_set or due:
        row |= training_pass(session)
    method.end_epoch(epoch)
    row |= method.metrics()
    row |= selection_accuracy(session, method.training_labels() if data.y is not None else None)
    recalibrate_ema(session, _EMA_CHUNKS)  # due or not: a checkpoint holds it
    if due and data.x_test is not None and data.y_test is not None:
        row |= accuracies(session, data.x_test, data.y_test)
    return row


def selection_accuracy(session: Session, chosen: TrainingLabels | None) -> Row:
    """S-acc, if the true labels are known and anything is selected."""
    if chosen is None or session.data.y is None:
        return {}
    truth = torch.from_numpy(session.data.y).to(session.device)
    accuracy = metrics.oracle_selection_accuracy(chosen.labels, chosen.selected, truth)
    return {} if accuracy is None else {"oracle_selection_accuracy": accuracy}


def recalibrate_ema(session: Session, chunks: int) -> None:
    """Give the EMA weights, if there are any, batch-norm statistics of their own, from up to so many chunks of plain
    training examples. This draws no random numbers, so training does not depend on how often it is done."""
    if not session.ema:
        return
    n, world = session.data.n, session.world
    chunk = max(2 * world.size, min(n, session.config.train.eval_batch_size))  # two for each rank: one has no variance
    rows = spread_rows(n, min(chunks, max(1, n // chunk)) * chunk).view(-1, chunk)
    batches = (session.normalise(session.train.rows(world.local_shard(part).to(session.device))) for part in rows)
    with session.evaluating(), compute_context(session.config, session.device):
        found = recalibrate_batch_norm(session.method.networks, batches, session.method.outputs)
        world.average_buffers(found, chunk)


@torch.no_grad()
def training_pass(session: Session) -> Row:
    """Show the method its un-augmented training set (each rank a part), and measure what needs no true labels."""
    method, n = session.method, session.data.n
    sums, own = torch.zeros(2, device=session.device), session.world.local_rows(n)
    for rows, x in session.train.chunks(range(own.start, own.stop), session.config.train.eval_batch_size):
        outputs = session.forward(x)
        method.observe(rows, outputs)
        p, sets = method.combine(outputs), method.candidates[rows]
        sums += (rows.stop - rows.start) * torch.stack(
            [metrics.covering_rate(p, sets), metrics.approximated_accuracy(p, sets)]
        )
    covering, approximated = (session.world.all_reduce(sums) / n).tolist()
    return {"covering_rate": covering, "approximated_accuracy": approximated}


@torch.no_grad()
def accuracies(session: Session, x: Examples, y: np.ndarray[Any, Any]) -> Row:
    """Accuracy of the combined prediction, and of each network alone where there are several."""
    own = session.world.local_rows(len(x))
    truth = torch.from_numpy(y[own]).to(session.device)
    right = torch.zeros(len(session.method.networks) + 1, dtype=torch.int64, device=session.device)
    with session.evaluating():  # once: averaged weights are not put in place anew for every chunk
        for start, outputs in predict_chunks(session, x[own]):
            labels = truth[start : start + outputs.shape[1]]
            guesses = torch.cat([session.method.combine(outputs).argmax(1, keepdim=True).T, outputs.argmax(2)])
            right = right + (guesses == labels).sum(dim=1)
    together, *alone = (session.world.all_reduce(right) / len(x)).tolist()
    row = {"test_accuracy": together}
    if len(alone) > 1:
        row |= {f"test_accuracy_{v + 1}": value for v, value in enumerate(alone)}
    return row


@torch.no_grad()
def predict_chunks(session: Session, x: Examples) -> Iterator[tuple[int, Tensor]]:
    """Yield (start, logits [v, rows, k]) for raw inputs in the host's memory or on disk, in evaluation mode."""
    for start, raw in chunks(x, session.config.train.eval_batch_size):
        part = torch.from_numpy(raw).to(session.device)
        with session.evaluating():
            outputs = session.forward(part)
        yield start, outputs


def predicted_probabilities(session: Session, x: Examples) -> Tensor:
    """Class probabilities [n, k] of raw inputs, in the host's memory."""
    return torch.cat([session.method.combine(outputs).cpu() for _, outputs in predict_chunks(session, x)])


def peak_memory_mib(device: torch.device) -> dict[str, float]:
    """A metric, where the system knows it."""
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_memory()
    return {} if peak is None else {"peak_memory_mib": peak / 2**20}
