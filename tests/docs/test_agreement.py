"""The steps that benchmarks/agreement.py compares are those of a run."""

from __future__ import annotations

import argparse

import agreement
import pytest
import speed
import torch

from crosel.config import build_config
from crosel.data import draw_candidates
from crosel.errors import Interrupted
from crosel.training import trainer as train
from crosel.training.build import build_session, resolve
from crosel.training.step import TrainStep

CPU = torch.device("cpu")


def test_the_start_is_what_a_run_of_the_preset_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit. A small network, for speed."""
    data, seed = speed.images(None, 640), 3
    options = argparse.Namespace(device="cpu", set=["network.name=wrn-10-1"])
    walk = agreement.Walk(data, options, seed, speed.PLAIN, kind="start")
    rates = agreement.learning_rates("start", walk.steps.session)[:5]  # all that 640 images give in an epoch
    walked = walk.losses(rates)

    values = {"source": "cifar10", "seed": seed, "train": {"bf16": False}}
    config = resolve(build_config(preset=agreement.PRESET, settings=options.set, values=values), data)
    session = build_session(config, draw_candidates(data, "uniform:q=0.5", seed), CPU)
    losses, used = [], []

    class Noted(TrainStep):
        def __call__(self, streams, index, lr):  # type: ignore[no-untyped-def]
            for total in session.progress.sums.values():
                total.zero_()
            super().__call__(streams, index, lr)
            losses.append(float(session.progress.sums["loss"]))
            used.append(lr)

    monkeypatch.setattr(train, "TrainStep", Noted)
    with pytest.raises(Interrupted):
        train.fit(session, stop_requested=lambda: len(losses) == len(rates))
    assert (losses, used) == (walked, rates)
    assert len(set(losses)) == len(rates)
