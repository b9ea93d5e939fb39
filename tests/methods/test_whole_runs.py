"""Whole runs of the loop against the same runs in numpy: weights, tables and every number of metrics.jsonl."""

from __future__ import annotations

from typing import Any

import _by_hand
import numpy as np
import pytest
import torch
from _support import PAPER

import crosel.methods.crosel as module
from crosel.config import build_config
from crosel.data.dataset import make_dataset
from crosel.methods.crosel import mix
from crosel.training.batches import Normaliser
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.trainer import fit

torch.set_num_threads(1)

N, D, K, SIZE, EPOCHS = 22, 5, 4, 8, 8
LR, DECAY = 0.1, 0.02  # so large a decay that leaving it out would show


def toy_data(n: int = N, kind: str = "drawn") -> _by_hand.Data:
    """Clouds that overlap; among the drawn sets a singleton and a full one."""
    rng = np.random.default_rng(0)
    y, y_test = rng.integers(K, size=n), rng.integers(K, size=9)
    x, x_test = (2 * np.eye(K, D)[labels] + rng.normal(size=(len(labels), D)) for labels in (y, y_test))
    sets = np.full((n, K), kind == "full") if kind != "drawn" else rng.random((n, K)) < 0.4
    if kind == "drawn":
        sets[0], sets[1] = False, True
    sets[np.arange(n), y] = True
    return _by_hand.Data(x.astype(np.float32).astype(float), sets, y, x_test.astype(np.float32).astype(float), y_test)


def make_session(
    data: _by_hand.Data, method: str, settings: dict[str, Any], size: int = SIZE, hidden: tuple[int, ...] = (6,)
) -> Session:
    made = make_dataset(data.x, candidates=data.sets, y=data.y, x_test=data.x_test, y_test=data.y_test, classes=K)
    values = {
        "source": "toy", "method": {"name": method, **settings}, "network": {"hidden": hidden, "scaling": "standard"},
        "augment": {"feature_noise": 0.5, "feature_drop": 0.2, "weak_feature_noise": 0},
        "train": {
            "epochs": EPOCHS, "batch_size": size, "lr": LR, "weight_decay": DECAY, "schedule": "step",
            "eval_batch_size": 7,
        },
    }  # fmt: skip
    return build_session(resolve(build_config(values=values), made), made, torch.device("cpu"))


class Exact(Normaliser):
    """In float64, so that all that follows is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.double() - self.mean) / self.std


def in_float64(session: Session) -> Session:
    """Networks and inputs, if not all tables of label weights. Where one example fills a batch, batch norm divides
    rounding by next to nothing: float32 against float64 would then say little."""
    x = torch.from_numpy(session.data.x).double()
    session.normalise = session.train.normalise = Exact(x.mean(dim=0), x.std(dim=0, unbiased=False))
    session.method.double()
    if session.method.name in ("proden", "lws", "crdpll", "pop"):  # which write float32 into them
        session.method.weights = session.method.weights.float()
    return session


def array(tensor: torch.Tensor) -> np.ndarray:
    out = tensor.detach().numpy().copy()
    return out.astype(float) if out.dtype == np.float32 else out


def recorded(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[dict[str, Any]], list[list[_by_hand.Step]]]:
    """Train, and keep what was drawn."""
    steps: list[_by_hand.Step] = []
    make_batches = session.train.batches

    def batches(*given: Any) -> Any:
        made = make_batches(*given)
        views = {name: {view: array(x) for view, x in batch.views.items()} for name, batch in made.items()}
        steps.append(_by_hand.Step({name: array(batch.index) for name, batch in made.items()}, views, []))
        return made

    def recording(values: torch.Tensor, partner: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if values.shape[1] == D:  # the inputs; targets follow, with the same draws
            steps[-1].mixes.append((array(partner), array(weight)))
        return mix(values, partner, weight)

    monkeypatch.setattr(session.train, "batches", batches)
    monkeypatch.setattr(module, "mix", recording)
    rows = fit(session)
    per_epoch = session.steps
    return rows, [steps[start : start + per_epoch] for start in range(0, len(steps), per_epoch)]


METHODS: dict[str, dict[str, Any]] = {
    "cc": {},
    "proden": {},
    "lws": {"beta": 2.0},
    "crdpll": {"consistency": 1.5},
    "pop": {"warm_up": 1, "every": 2, "history": 2, "threshold": 0.1, "growth": 0.5, "settled": 0.05},
    "pico": {"dimensions": 6, "proto_start": 3, "queue": 11, "key_momentum": 0.9, "proto_momentum": 0.8,
             "temperature": 0.3},
    "crosel": {"warmup": 3, "gamma": 0.6, **PAPER},
}  # fmt: skip
ABLATIONS: list[dict[str, Any]] = [
    {"networks": 1},
    {"scope": "unselected", "temperature": 1.0},
    {"scope": "none"},
    {"criteria": (1,), "selected_view": "strong"},
    {"criteria": (1, 2), "bank_length": 2, "warmup_view": "strong"},
    {"criteria": (2,), "bank_length": 4},
    {"dynamic_lambda": False, "lambda_cr": 0.5, "mix_per_pair": True},
    {"target_mode": "eval", "ensemble": "probabilities"},
    {"gamma": 1.0},  # nothing is ever selected
    {"gamma": 0.0, "criteria": (3,)},  # everything is
]


@pytest.mark.parametrize("precision", ["as it is", "float64"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_that_of_the_papers(method: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """22 examples in batches of 8: some come twice in an epoch."""
    data = toy_data()
    session = make_session(data, method, METHODS[method])
    if precision == "as it is":
        assert_the_same_by_hand(data, session, monkeypatch, close=1e-4)
    else:
        assert_the_same_by_hand(data, in_float64(session), monkeypatch)


@pytest.mark.parametrize("changed", ABLATIONS, ids=str)
def test_an_ablation_is_that_of_the_paper(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_data()
    assert_the_same_by_hand(data, in_float64(make_session(data, "crosel", METHODS["crosel"] | changed)), monkeypatch)


@pytest.mark.parametrize("kind", ["singleton", "full"])
@pytest.mark.parametrize("method", METHODS)
def test_singleton_and_full_sets(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of q = 0 and of q = 1."""
    data = toy_data(kind=kind)
    assert_the_same_by_hand(data, in_float64(make_session(data, method, METHODS[method])), monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_fewer_examples_than_a_batch(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = toy_data(n=5)
    assert_the_same_by_hand(data, in_float64(make_session(data, method, METHODS[method])), monkeypatch)


@pytest.mark.parametrize("method", METHODS)
def test_batches_of_one_example(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without batch norm, which has no statistics of one."""
    data = toy_data(n=9)
    assert_the_same_by_hand(
        data, in_float64(make_session(data, method, METHODS[method], size=1, hidden=())), monkeypatch
    )


def assert_the_same_by_hand(
    data: _by_hand.Data, session: Session, monkeypatch: pytest.MonkeyPatch, close: float = 1e-5
) -> None:
    start = {name: array(value) for name, value in session.method.state_dict().items()}
    rows, drawn = recorded(session, monkeypatch)
    run = getattr(_by_hand, type(session.method).__name__)(data, start, session.config.method, EPOCHS)
    plain = run.standardised(data.x)
    for step in (step for epoch in drawn for step in epoch):
        for name, views in step.views.items():
            assert len(step.index[name]) == session.batch_size
            for unchanged in {"weak", "plain"} & set(views):
                np.testing.assert_allclose(views[unchanged], plain[step.index[name]], atol=1e-5)
    expected = run.repeat(drawn, LR, DECAY)
    for row, own in zip(rows, expected, strict=True):
        assert {name: row[name] for name in own} == pytest.approx(own, abs=close, rel=close)
        assert set(row) - set(own) == {"epoch", "phase", "seconds", "images_per_second", "peak_memory_mib"}
    found = {name: array(value) for name, value in session.method.state_dict().items()}
    for name, table in run.tables().items():
        np.testing.assert_allclose(found[name], table, atol=close, err_msg=name)
    for v, net in enumerate(run.nets):
        assert found.get(f"networks.{v}.body.1.num_batches_tracked", 0) == net.passes
        for name, value in net.a.items():
            if "num_batches" not in name:
                np.testing.assert_allclose(found[f"networks.{v}.{name}"], value, atol=close, err_msg=name)
