"""One parametrised walk through every registered method: steps, checkpoint, resume, learning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _runs import untimed
from _sessions import CPU, NAMES, bits, different, make_session, small_data
from _support import small_arrays
from _toy import ToyNetwork, assert_never_waits, batches, make, random_sets

from crosel.config import build_config
from crosel.data import draw_candidates, load
from crosel.data.dataset import Dataset
from crosel.errors import Interrupted
from crosel.methods import methods
from crosel.methods.base import Method, Problem
from crosel.runs.pipeline import train_run
from crosel.training import checkpoint
from crosel.training.session import Session
from crosel.training.step import TrainStep
from crosel.training.trainer import fit


def session(name: str, *settings: str, epochs: int = 2, data: Dataset | None = None) -> Session:
    """With 352 digits, where the test brings none: 11 steps an epoch."""
    return make_session(name, *settings, data=data or small_data(**small_arrays(n=352)), epochs=epochs, seed=3)


def test_all_seven_are_here() -> None:
    assert {"cc", "proden", "lws", "crdpll", "pico", "pop", "crosel"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_three_steps_give_finite_gradients_in_all_parameters(name: str) -> None:
    s = session(name)
    step, method = TrainStep(s), s.method
    for epoch in (1, 2):
        method.begin_epoch(epoch)
        streams = method.streams()
        indices = s.train.draw_epoch_indices(streams, s.steps, s.batch_size, s.generator)
        method.train()
        for i in range(3):
            step(streams, {stream: table[i] for stream, table in indices.items()}, 0.01)
            for parameter_name, p in method.named_parameters():
                if p.requires_grad:
                    assert p.grad is not None, parameter_name
                    assert torch.isfinite(p.grad).all(), parameter_name
                else:
                    assert p.grad is None, parameter_name
            for buffer_name, buffer in method.named_buffers():
                assert not buffer.requires_grad, f"{buffer_name} holds the graph of every step so far"
    assert torch.isfinite(s.progress.sums["loss"])


def test_the_loop_calls_a_method_in_the_order_of_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epochs count from 1; the whole training set is shown between the last step and the end of the epoch."""
    all_digits = draw_candidates(load("digits"), "uniform:q=0.3", 3)  # more than are shown at once
    s, calls = session("crosel", data=all_digits), []
    for name in ("begin_epoch", "loss", "after_step", "observe", "end_epoch"):
        its_own = getattr(s.method, name)

        def noted(first: object, *rest: object, name: str = name, its_own: Callable[..., object] = its_own) -> object:
            seen = first if name.endswith("epoch") else (first.start, first.stop) if isinstance(first, slice) else ""
            calls.append((name, seen, s.method.training))
            return its_own(first, *rest)

        monkeypatch.setattr(s.method, name, noted)
    fit(s)
    step = [("loss", "", True), ("after_step", "", True)]
    for epoch in (1, 2):
        assert calls.pop(0)[:2] == ("begin_epoch", epoch)
        assert [calls.pop(0) for _ in range(2 * s.steps)] == step * s.steps
        shown = [calls.pop(0) for _ in range(2)]
        assert shown == [("observe", (0, 1024), False), ("observe", (1024, s.data.n), False)]
        assert calls.pop(0)[:2] == ("end_epoch", epoch)
    assert not calls


def test_what_acts_after_the_step_sees_what_the_step_made() -> None:
    """LWS's extra pass is over the same batch: it gives something else because the weights have moved."""
    s = session("lws", "train.lr=0.1")
    network, inputs, outputs = s.method.networks[0], [], []
    network.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    network.register_forward_hook(lambda m, args, out: outputs.append(out.detach()))
    streams = s.method.streams()
    indices = s.train.draw_epoch_indices(streams, s.steps, s.batch_size, s.generator)
    s.method.begin_epoch(1)
    s.method.train()
    TrainStep(s)(streams, {stream: table[0] for stream, table in indices.items()}, 0.1)
    assert torch.equal(*inputs)
    with torch.no_grad():
        torch.testing.assert_close(outputs[1], network(inputs[1]))
    assert (outputs[1] - outputs[0]).abs().max() > 1e-3


@pytest.mark.parametrize("epoch", [1, 2])  # PiCO and CroSel are past their warm-up in the second
@pytest.mark.parametrize("name", NAMES)
def test_a_step_never_waits_for_the_device(name: str, epoch: int) -> None:
    assert_never_waits(make(methods()[name]), epoch)


IN_BFLOAT16 = [
    *((name, {}) for name in NAMES),
    ("lws", {"loss": "cross-entropy"}),
    ("crosel", {"ensemble": "probabilities"}),
]


class Coarse(ToyNetwork):
    """Rounds its logits and features to bfloat16, as on a GPU, and gives them out in this type."""

    given_as: torch.dtype

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return super().features(x).bfloat16().float()

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return super().classify(features).bfloat16().to(self.given_as)


@pytest.mark.parametrize(("name", "settings"), IN_BFLOAT16)
def test_what_comes_in_bfloat16_is_computed_in_float32(name: str, settings: dict[str, str]) -> None:
    """The same logits in both types: losses and tables must not feel which it was."""
    kind, found = methods()[name], []
    for given_as in (torch.bfloat16, torch.float32):
        Coarse.given_as = given_as
        torch.manual_seed(0)
        method = kind(kind.Settings(**settings), Problem(random_sets(24, 5), epochs=4), lambda: Coarse(5))
        generator, values = torch.Generator().manual_seed(1), {}
        for epoch in (1, 2):
            method.begin_epoch(epoch)
            drawn = batches(method, 8, generator)
            losses = method.loss(drawn, generator)
            method.after_step(drawn)
            with torch.no_grad():
                outputs = method.outputs(torch.randn(24, 6, generator=generator))
                method.observe(slice(0, 24), outputs)
                values[f"predictions of epoch {epoch}"] = method.combine(outputs)
            method.end_epoch(epoch)
            values |= {f"{part} of epoch {epoch}": value for part, value in losses.report.items()}
        found.append(values | method.state_dict())
    coarse, fine = found
    assert coarse.keys() == fine.keys()
    for what, value in coarse.items():
        assert value.dtype == fine[what].dtype, what
        torch.testing.assert_close(value, fine[what], rtol=1e-6, atol=1e-6, msg=what)


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_round_trip(name: str, tmp_path: Path) -> None:
    s = session(name)
    fit(s)
    saved, state = s.state()
    checkpoint.save(tmp_path, saved, state, keep=1)
    other = session(name)
    assert bits(other) != bits(s)
    found = checkpoint.load_newest(tmp_path)
    assert found.checkpoint is not None
    other.restore(found.checkpoint)
    assert different(bits(s), bits(other)) == []
    assert other.progress.rows == s.progress.rows
    assert other.progress.epoch == 2


@pytest.mark.parametrize("name", NAMES)
def test_resume_equals_a_straight_run(name: str, tmp_path: Path) -> None:
    straight = session(name, epochs=3)
    fit(straight)
    broken = session(name, epochs=3)
    assert broken.steps == 11
    looks = iter([False] * 14 + [True])  # stops in the middle of the second epoch
    with pytest.raises(Interrupted):
        fit(broken, stop_requested=lambda: next(looks))
    assert (broken.progress.epoch, broken.progress.step) == (1, 3)
    checkpoint.save(tmp_path, *broken.state(), keep=1)
    resumed = session(name, epochs=3)
    found = checkpoint.load_newest(tmp_path)
    assert found.checkpoint is not None
    resumed.restore(found.checkpoint)
    fit(resumed)
    assert different(bits(straight), bits(resumed)) == []
    assert untimed(straight.progress.rows) == untimed(resumed.progress.rows)


@pytest.mark.parametrize("name", NAMES)
def test_training_does_not_feel_how_often_it_is_measured(name: str) -> None:
    """CroSel's bank must see every epoch, also those that are not measured."""
    data, longer = small_data(**small_arrays(n=64)), ["method.bank_length=3"] if name == "crosel" else []
    often, seldom = (session(name, f"train.evaluate_every={every}", *longer, epochs=5, data=data) for every in (1, 2))
    fit(often)
    fit(seldom)
    assert different(bits(often), bits(seldom)) == []
    for row, other in zip(often.progress.rows, seldom.progress.rows, strict=True):
        measured = {"test_accuracy", *(() if name == "crosel" else ("covering_rate", "approximated_accuracy"))}
        assert (measured <= set(other)) == (row["epoch"] in (2, 4, 5)), "every second epoch, and the last"
        assert measured <= set(row)
        assert other["loss"] == row["loss"]
        assert all(other[key] == row[key] for key in measured & set(other))


@pytest.mark.parametrize("name", NAMES)
def test_learns_on_digits(name: str, tmp_path: Path) -> None:
    """Far above chance (10 %) after a few epochs; what each reaches with time stands in docs/comparison.md."""
    settings = ["network.width=16", "train.batch_size=64", *(["method.warmup=6"] if name == "crosel" else [])]
    values = {"source": "digits", "candidates": "uniform:q=0.3", "method": {"name": name}, "seed": 3}
    config = build_config(preset="demo/digits", settings=["train.epochs=8", *settings], values=values)
    s = train_run(config, tmp_path / "run", CPU)
    rows = s.progress.rows
    assert rows[-1]["test_accuracy"] > 0.5
    assert rows[-1]["test_accuracy"] > rows[0]["test_accuracy"]
    assert (tmp_path / "run" / "labels.csv").read_text().count("\n") == s.data.n + 1


def test_outputs_and_probabilities_have_the_promised_shapes() -> None:
    for name in NAMES:
        method: Method = session(name).method.eval()
        outputs = method.outputs(torch.randn(5, 1, 8, 8))
        assert outputs.shape[1:] == (5, 10)
        p = method.combine(outputs)
        assert torch.allclose(p.sum(dim=1), torch.ones(5))
