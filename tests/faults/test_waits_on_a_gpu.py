"""No step waits for the device, and the device waits for no step. Skipped without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _on_a_gpu import EAGER, NEEDS_GPU, RECORDED, STEPS, assert_same_bits, session_of, trained
from _sessions import NAMES

from crosel.training import trainer as train_loop
from crosel.training.session import Session
from crosel.training.trainer import fit

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("settings", [(RECORDED,), (EAGER,), (RECORDED, "train.data_on=host")])
@pytest.mark.parametrize("name", NAMES)
def test_no_step_waits_for_the_device(name: str, settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """From an epoch's order to its last step: an operation that makes the host wait is an error."""
    unwatched = trained(name, *settings)
    order, weights = train_loop.draw_epoch, train_loop.check_weights
    watched, looks = 0, []

    def draw(*args: Any) -> Any:
        nonlocal watched
        drawn = order(*args)
        torch.cuda.set_sync_debug_mode("error")
        watched += 1
        return drawn

    def check(*args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        weights(*args)

    class Watch:
        def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None:
            looks.append((session.progress.step, step))

        def on_epoch(self, *args: Any) -> None: ...
        def on_checkpoint(self, *args: Any) -> None: ...

    monkeypatch.setattr(train_loop, "draw_epoch", draw)
    monkeypatch.setattr(train_loop, "check_weights", check)
    session = session_of(name, "train.log_every=3", *settings)
    try:
        fit(session, (Watch(),))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert watched == session.config.train.epochs
    assert all(step < now or now == STEPS for now, step in looks), "a look is read when others have been sent"
    assert_same_bits(session, unwatched)
