"""What CroSel's defaults come to: they follow from the number of epochs, and leave alone what somebody gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from _support import PAPER
from _toy import make
from hypothesis import given
from hypothesis import strategies as st

from crosel.config import build_config
from crosel.methods.crosel import CroSel, CroSelSettings
from crosel.presets import presets, read_preset

STARTS = ("temperature_start", "lambda_cr_start", "gamma_start")
EPOCHS = st.integers(2, 10_000)
# Settings that the defaults look at, given or not; null where it may be given.
GIVEN = st.fixed_dictionaries(
    {},
    optional={
        "warmup": st.none() | st.integers(1, 60),
        "ramp": st.none() | st.integers(0, 60),
        "temperature": st.sampled_from([0.1, 0.5, 1.0, 2.0]),
        "lambda_cr": st.sampled_from([0.0, 0.5, 1.0, 4.0]),
        "temperature_start": st.sampled_from([None, 0.7, 2.0]),
        "lambda_cr_start": st.sampled_from([None, 0.0, 3.0]),
        "gamma_start": st.sampled_from([None, 0.5]),
    },
)


def starts(settings: CroSelSettings) -> tuple[float | None, ...]:
    return tuple(getattr(settings, name) for name in STARTS)


@pytest.mark.parametrize(
    ("epochs", "warmup", "ramp"),
    [(1, None, 0), (2, 1, 0), (3, 1, 1), (5, 2, 1), (10, 4, 3), (30, 12, 9), (50, 20, 15), (200, 80, 60)],
)
def test_two_fifths_warm_up_and_half_of_the_rest_ramp(epochs: int, warmup: int | None, ramp: int) -> None:
    s = CroSelSettings().filled_in(epochs)
    assert (s.warmup, s.ramp) == (warmup, ramp)
    assert starts(s) == ((1.0, 1.0, None) if ramp else (None, None, None))
    assert s.model_dump(exclude={"warmup", "ramp", *STARTS}) == CroSelSettings().model_dump(
        exclude={"warmup", "ramp", *STARTS}
    )


@given(EPOCHS)
def test_there_is_room_for_every_stage(epochs: int) -> None:
    s = CroSelSettings().filled_in(epochs)
    assert s.warmup is not None
    assert s.ramp is not None
    assert 1 <= s.warmup < epochs
    assert s.warmup + s.ramp <= epochs
    assert s.remarks(epochs) == []


@given(EPOCHS, st.data())
def test_a_given_warm_up_leaves_the_ramp_half_of_the_rest(epochs: int, data: st.DataObject) -> None:
    warmup = data.draw(st.integers(1, epochs - 1))
    s = CroSelSettings(warmup=warmup).filled_in(epochs)
    assert (s.warmup, s.ramp) == (warmup, (epochs - warmup) // 2)


@given(st.integers(1, 100), st.integers(1, 100), GIVEN)
def test_filled_in_twice_is_filled_in_once(epochs: int, other: int, values: dict[str, Any]) -> None:
    """Also after a way through a file, where every setting counts as given."""
    once = CroSelSettings(**values).filled_in(epochs)
    assert once.filled_in(epochs) == once
    read = CroSelSettings(**once.model_dump())
    assert read.filled_in(epochs) == once
    if once.warmup is not None:
        assert read.filled_in(other) == once, "numbers do not follow the epochs any more"


@given(st.integers(1, 100), GIVEN)
def test_what_was_given_stays(epochs: int, values: dict[str, Any]) -> None:
    filled = CroSelSettings(**values).filled_in(epochs)
    for name, value in values.items():
        if name not in ("warmup", "ramp") or value is not None:
            assert getattr(filled, name) == value, name


@given(st.integers(1, 100), st.sampled_from([0.5, 1.0]), st.sampled_from([0.5, 4.0]))
def test_no_ramp_no_starts(epochs: int, temperature: float, lambda_cr: float) -> None:
    s = CroSelSettings(ramp=0, temperature=temperature, lambda_cr=lambda_cr).filled_in(epochs)
    assert s.ramp == 0
    assert starts(s) == (None, None, None)


@pytest.mark.parametrize(
    ("values", "ramp", "expected"),
    [
        ({"lambda_cr": 1.0}, 15, (1.0, None, None)),
        ({"lambda_cr": 0.5}, 15, (1.0, None, None)),
        ({"lambda_cr": 0.0}, 15, (1.0, None, None)),
        ({"temperature": 1.0}, 15, (None, 1.0, None)),
        ({"temperature": 2.0}, 15, (None, 1.0, None)),
        ({"temperature": 1.0, "lambda_cr": 1.0}, 0, (None, None, None)),  # nothing is left to move
        ({"temperature": 1.0, "lambda_cr": 1.0, "gamma_start": 0.5}, 15, (None, None, 0.5)),
        ({"temperature_start": None, "lambda_cr_start": None}, 0, (None, None, None)),
        ({"temperature_start": None}, 15, (None, 1.0, None)),
        ({"lambda_cr_start": 0.0}, 15, (1.0, 0.0, None)),
        ({"temperature_start": 3.0, "temperature": 2.0}, 15, (3.0, 1.0, None)),
        ({"ramp": 7}, 7, (1.0, 1.0, None)),
        ({"ramp": 7, "temperature": 1.0, "lambda_cr": 1.0}, 7, (None, None, None)),  # a remark says so
    ],
    ids=str,
)  # fmt: skip
def test_starts_are_gentler_than_the_ends_or_none(
    values: dict[str, Any], ramp: int, expected: tuple[float | None, ...]
) -> None:
    s = CroSelSettings(**values).filled_in(50)
    assert (s.warmup, s.ramp) == (20, ramp)
    assert starts(s) == expected


@pytest.mark.parametrize("epochs", [12, 200])
def test_the_papers_values_are_untouched(epochs: int) -> None:
    given = CroSelSettings(warmup=10, **PAPER)
    assert given.filled_in(epochs) == given


@pytest.mark.parametrize("name", [name for name in presets() if read_preset(name)["method"]["name"] == "crosel"])
def test_a_preset_leaves_nothing_to_defaults_that_follow_from_the_epochs(name: str) -> None:
    """What its results were made with does not change with the defaults."""
    content, method = read_preset(name), build_config(preset=name, values={"source": "digits"}).method
    assert isinstance(method, CroSelSettings)
    assert {"warmup", "ramp", "alpha"} <= set(content["method"])
    assert starts(method) == tuple(content["method"].get(start) for start in STARTS)
    if name.partition("/")[0] in ("paper", "fast", "demo"):  # of images
        assert {"strong_ops", "cutout"} <= set(content["augment"])


def test_a_method_by_itself_has_the_same_defaults() -> None:
    """T and λ_cr go from 1 to their ends over the ramp, and stay there."""
    torch.manual_seed(0)
    method = make(CroSel, epochs=20, dynamic_lambda=False)
    assert method.settings == CroSelSettings(dynamic_lambda=False).filled_in(20)
    assert (method.warmup, method.settings.ramp) == (8, 6)
    seen = []
    for epoch in range(1, 21):
        method.begin_epoch(epoch)
        seen.append((method.phase, method.temperature.item(), method.lambda_d.item()))
    assert seen[:8] == [("warm-up", 1.0, 0.0)] * 8
    assert [phase for phase, _, _ in seen[8:]] == ["selection"] * 12
    assert [t for _, t, _ in seen[8:]] == pytest.approx([1 - i / 12 for i in range(6)] + [0.5] * 6)
    assert [weight for _, _, weight in seen[8:]] == pytest.approx([1 + i / 2 for i in range(6)] + [4.0] * 6)
