"""What can be changed in a session of CroSel beyond its settings. `fall_of_selection.py` and `fixed_choices.py` measure
what each change is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from unittest import mock

import torch
from sureness import method_of
from torch import Tensor, nn

from crosel.methods.base import Batch, Stream
from crosel.methods.crosel import comix_targets, dynamic_weight, ramp
from crosel.training import trainer
from crosel.training.devices import compute_context
from crosel.training.ema import recalibrate_batch_norm, spread_rows
from crosel.training.session import Session


def true_targets(session: Session) -> None:
    """Co-mix gets the true labels, which no method may know. MixUp and strong views stay."""
    method = method_of(session)
    assert session.data.y is not None
    plain, sets = method._mixed_views, method.candidates
    truth = torch.nn.functional.one_hot(torch.from_numpy(session.data.y), sets.shape[1]).bool()

    def told(network: nn.Module, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        method.candidates = truth
        try:
            return plain(network, batch, generator)
        finally:
            method.candidates = sets

    method._mixed_views = told  # type: ignore[method-assign]


def weak_only(session: Session) -> None:
    """Co-mix sees two weak views instead of a weak and a strong one."""
    method = method_of(session)
    streams, plain = method.streams, method._mixed_views

    def with_two_weak() -> dict[str, Stream]:
        made = streams()
        return {n: Stream(("weak", "weak#1"), s.pool) if s.views == ("weak", "strong") else s for n, s in made.items()}

    def renamed(network: nn.Module, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        views = {"weak": batch["weak"], "strong": batch["weak#1"]}
        return plain(network, Batch(batch.index, views, batch.all_ranks_index), generator)

    method.streams, method._mixed_views = with_two_weak, renamed  # type: ignore[method-assign]


def without_selected(session: Session) -> None:
    """Co-mix alone: no network learns from what is selected."""
    streams = session.method.streams
    session.method.streams = lambda: {n: s for n, s in streams().items() if not n.startswith("selected")}  # type: ignore[method-assign]


def balanced(session: Session) -> None:
    """All selected classes are drawn equally often, but no example more than ten times as often as before."""
    method = method_of(session)
    streams = method.streams

    def evenly() -> dict[str, Stream]:
        made = streams()
        for v in range(len(method.networks)):
            stream = made.get(f"selected_{v}")
            if stream is not None and stream.pool is not None:
                labels = method.labels[method.teacher(v)][stream.pool].long()
                counts = labels.bincount(minlength=method.candidates.shape[1])
                times = (counts.max() / counts.clamp(min=1)).round().long().clamp(max=10)[labels]
                made[f"selected_{v}"] = Stream(stream.views, stream.pool.repeat_interleave(times))
        return made

    method.streams = evenly  # type: ignore[method-assign]


def refreshed(session: Session) -> None:
    """From here on, batch norm's statistics come from plain images, before each pass over all examples."""
    n, plain = session.data.n, trainer.training_pass
    chunk = min(n, session.config.train.eval_batch_size)
    rows = spread_rows(n, min(4, n // chunk) * chunk).view(-1, chunk)

    def training_pass(session: Session) -> trainer.Row:
        batches = (session.normalise(session.train.rows(part).to(session.device)) for part in rows)
        with compute_context(session.config, session.device):
            recalibrate_batch_norm(session.method.networks, batches, session.method.outputs)
        return plain(session)

    mock.patch("crosel.training.trainer.training_pass", training_pass).start()  # until the run ends


def selected_leave_no_trace(session: Session) -> None:
    """Batch norm's running statistics come from co-mix alone, not from selected batches (the first of two)."""
    method = method_of(session)
    plain = method._selection_losses

    def forward_split_bn(network: nn.Module, *batches: Tensor) -> list[Tensor]:
        norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
        logits = []
        for i, x in enumerate(batches):
            for norm in norms:
                norm.momentum = 0.0 if i < len(batches) - 1 else 0.1
            logits.append(network(x))
        return logits

    def losses(v: int, batches: Mapping[str, Batch], generator: torch.Generator) -> dict[str, Tensor]:
        with mock.patch("crosel.methods.crosel.forward_split_bn", forward_split_bn):
            return plain(v, batches, generator)

    method._selection_losses = losses  # type: ignore[method-assign]


def aligned(session: Session) -> None:
    """Targets are divided by their running mean, so that no class is forgotten: over time all are equally frequent."""
    method = method_of(session)
    plain, k = method._mixed_views, method.candidates.shape[1]
    means = {id(network): torch.full((k,), 1 / k) for network in method.networks}

    def mixed_views(network: nn.Module, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        mean = means[id(network)]

        def targets(logits: Tensor, candidates: Tensor, temperature: float | Tensor) -> Tensor:
            now = comix_targets(logits, candidates, 1.0).mean(dim=0)
            mean.mul_(0.99).add_(now, alpha=0.01)
            return comix_targets(logits - mean.log(), candidates, temperature)

        with mock.patch("crosel.methods.crosel.comix_targets", targets):
            return plain(network, batch, generator)

    method._mixed_views = mixed_views  # type: ignore[method-assign]


def no_comix(session: Session) -> None:
    """The warm-up continues to the end."""
    method_of(session).warmup = session.config.train.epochs


def only(count: int, classes: int) -> Callable[[Session], None]:
    """Of network 2 so many are selected, rightly, of the first classes; of network 1 nothing. So network 1 alone learns
    from what is selected, and network 2 shows what becomes of one that does not."""

    def change(session: Session) -> None:
        method = method_of(session)
        assert session.data.y is not None
        y, plain = torch.from_numpy(session.data.y), method.end_epoch
        few = torch.cat([(y == c).nonzero().squeeze(1)[: count // classes] for c in range(1, classes + 1)])

        def put() -> None:
            method.selected.zero_()
            method.selected[1, few], method.labels[1, few] = True, y[few].int()

        def end_epoch(epoch: int) -> None:
            plain(epoch)
            put()

        put()
        method.end_epoch = end_epoch  # type: ignore[method-assign]

    return change


def both(*changes: Callable[[Session], None]) -> Callable[[Session], None]:
    def change(session: Session) -> None:
        for one in changes:
            one(session)

    return change


def strong_bank(session: Session) -> None:
    """The bank sees strong views, as in the released code for SVHN."""
    method, plain = method_of(session), method_of(session).observe
    generator = torch.Generator(session.device).manual_seed(session.config.seed)

    def observe(rows: slice, outputs: Tensor) -> None:
        index = torch.arange(rows.start, rows.stop, device=session.device)
        views = session.train.batches({"all": index}, {"all": Stream(("strong",))}, generator)["all"]
        with compute_context(session.config, session.device):
            plain(rows, method.outputs(views["strong"]).float())

    method.observe = observe  # type: ignore[method-assign]


def missing_rows(session: Session) -> None:
    """The bank is filled through a shuffled loader that drops its last batch: the rest stays zero for an epoch."""
    method, plain = method_of(session), method_of(session).end_epoch
    generator = torch.Generator().manual_seed(session.config.seed)

    def end_epoch(epoch: int) -> None:
        for bank in method.banks:
            left_out = torch.randperm(session.data.n, generator=generator)[: session.data.n % session.batch_size]
            bank.labels[-1, left_out], bank.confidence[-1, left_out] = 0, 0.0
        plain(epoch)

    method.end_epoch = end_epoch  # type: ignore[method-assign]


class OneStream:
    """In place of `StreamPool`: one network after the other, for each also passes through the other."""

    def __init__(self, device: torch.device) -> None: ...

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        yield

    def join(self) -> None: ...


def targets_of_the_other(session: Session) -> None:
    """A network's targets come from the other network: not only the selection crosses."""
    method = method_of(session)
    plain, (first, second) = method._mixed_views, method.networks
    mock.patch("crosel.methods.crosel.StreamPool", OneStream).start()  # until the run ends

    def mixed_views(network: nn.Module, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return plain(second if network is first else first, batch, generator)

    method._mixed_views = mixed_views  # type: ignore[method-assign]


def own_share(session: Session) -> None:
    """λ_d follows from the share that a network itself learns with one label, not from the mean of both."""
    method = method_of(session)
    begin, losses, s = method.begin_epoch, method._selection_losses, method.settings
    own = [torch.zeros((), device=session.device) for _ in method.networks]

    def begin_epoch(epoch: int) -> None:
        begin(epoch)
        lambda_cr = ramp(s.lambda_cr_start, s.lambda_cr, method._progress(epoch))
        for value, learnt in zip(own, method._trained_on(), strict=True):
            value.fill_(dynamic_weight(learnt.float().mean().item(), lambda_cr))

    def selection_losses(v: int, batches: Mapping[str, Batch], generator: torch.Generator) -> dict[str, Tensor]:
        mean, method.lambda_d = method.lambda_d, own[v]
        try:
            return losses(v, batches, generator)
        finally:
            method.lambda_d = mean

    method.begin_epoch, method._selection_losses = begin_epoch, selection_losses  # type: ignore[method-assign]
