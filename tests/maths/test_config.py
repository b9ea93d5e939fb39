"""Settings: the order in which they are merged, the lines about faulty ones, presets, methods by name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import yaml
from _sessions import CPU
from _support import PAPER, PAPER_VIEWS
from pydantic import Field, ValidationError

from crosel import PartialLabelClassifier
from crosel.bench import expand, read_suite
from crosel.bench.tables import paper
from crosel.config import RunConfig, TrainSettings, build_config, check_config
from crosel.data.dataset import Dataset, make_dataset
from crosel.data.formats.digits import read_digits
from crosel.errors import UserError
from crosel.methods.base import STAGE, Method, MethodSettings, find_method, method_settings, methods, register
from crosel.methods.cc import CC, CCSettings
from crosel.methods.crosel import CroSel, CroSelSettings
from crosel.presets import _composed, presets, read_preset
from crosel.training.build import filled_from_data, resolve
from crosel.utils.settings import dotted, read_yaml
from crosel.utils.text import did_you_mean

SOURCE = {"source": "digits"}


def build(*settings: str, **kinds: object) -> RunConfig:
    values = {**SOURCE, **kinds.pop("values", {})}
    return build_config(settings=settings, values=values, **kinds)


def crosel_settings(epochs: int = TrainSettings().epochs, **values: object) -> CroSelSettings:
    """As a config for this many epochs has them."""
    return CroSelSettings(**values).filled_in(epochs)


def line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture
def file(tmp_path):
    """Writes a config file."""

    def write(text: str) -> Path:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# --- merging ------------------------------------------------------------------------------------------------------


def test_defaults():
    config = build()
    assert isinstance(config.method, CroSelSettings)
    assert (config.source, config.seed, config.candidates, config.data_dir) == ("digits", 0, None, None)
    assert config.train == TrainSettings()
    assert (config.network.name, config.augment.flip) == ("auto", True)


def test_defaults_of_crosel():
    """The paper's values for CIFAR-10, but for what the head of methods/crosel.py says."""
    s = CroSelSettings()
    assert (s.networks, s.bank_length, s.alpha, s.temperature, s.gamma, s.lambda_cr) == (2, 3, 0.25, 0.5, 0.9, 4.0)
    assert (s.warmup, s.ramp, s.temperature_start, s.lambda_cr_start, s.gamma_start) == (None,) * 5
    assert (s.criteria, s.scope, s.dynamic_lambda, s.mix_per_pair) == ((1, 2, 3), "all", True, False)
    assert (s.warmup_view, s.selected_view, s.target_mode, s.ensemble) == ("weak", "weak", "train", "logits")


DEFAULTS = {
    "cc": {"view": "weak"},
    "proden": {"view": "weak"},
    "lws": {"view": "weak", "loss": "sigmoid", "beta": 1.0, "epsilon": 1e-8},
    "crdpll": {"views": ("weak", "autoaugment", "autoaugment"), "consistency": 1.0, "ramp_share": 0.5},
    "pico": {
        "query_view": "contrast-weak", "key_view": "contrast-strong", "dimensions": 128, "queue": 8192,
        "key_momentum": 0.999, "proto_momentum": 0.99, "proto_start": 1, "phi_start": 0.95, "phi_end": 0.8,
        "temperature": 0.07, "contrast": 0.5,
    },
    "pop": {
        "views": ("plain", "autoaugment", "autoaugment"), "warm_up": 20, "every": 5, "history": 5, "threshold": 1e-3,
        "growth": 1e-3, "cap": 0.4, "settled": 1e-4,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_compared_methods(name):
    """Their authors' values; the views of the first three are those of CroSel's comparison."""
    assert find_method(name).Settings().model_dump() == {"name": name, **DEFAULTS[name]}


def test_a_config_of_crosel_says_all_that_its_defaults_come_to():
    config = build("train.epochs=30")
    s = config.method
    assert (s.warmup, s.ramp, s.temperature_start, s.lambda_cr_start, s.gamma_start) == (12, 9, 1.0, 1.0, None)
    assert (config.augment.strong_ops, config.augment.cutout) == (1, 0.25)
    assert build("train.epochs=1").method.warmup is None  # there is no room for two phases


@pytest.mark.parametrize("name", [name for name in methods() if name != "crosel"])
def test_other_methods_keep_the_stronger_views(name):
    config = build(values={"method": {"name": name}})
    assert {option: getattr(config.augment, option) for option in PAPER_VIEWS} == PAPER_VIEWS
    assert config.method == find_method(name).Settings()


def test_given_views_stay(file):
    assert build("augment.cutout=0.5").augment.model_dump() == build().augment.model_dump() | {"cutout": 0.5}
    both = build(file=file("augment: {strong_ops: 2, cutout: 0.5}\n")).augment
    assert (both.strong_ops, both.cutout) == (2, 0.5)
    preset = build(preset="own/pico", values={"method": {"name": "crosel"}}).augment
    assert (preset.strong_ops, preset.cutout) == (3, 0.25)


def test_a_saved_config_stays_as_it_was(file):
    """Its nulls mean that nothing moves, and its epochs may change without the rest following."""
    saved = build("train.epochs=30", "method.temperature=1", "method.lambda_cr=1", "method.ramp=4")
    assert saved.method._starts() == []
    assert build(file=file(saved.to_yaml())) == saved
    moved = build("method.temperature=0.5", "method.lambda_cr=4", file=file(saved.to_yaml())).method
    assert (moved.temperature_start, moved.lambda_cr_start) == (None, None)
    longer = build("train.epochs=60", file=file(build("train.epochs=30").to_yaml()))
    assert longer.method == crosel_settings(30)


@pytest.mark.parametrize(("epochs", "stages"), [(22, (12, 9)), (21, (8, 6)), (10, (4, 3)), (2, (1, 0)), (1, (None, 0))])
def test_the_stages_of_a_file_make_room_where_fewer_epochs_are_asked_for(epochs, stages, file):
    """As those of a preset do: else the warm-up that a run's config.yaml holds would take all of a shorter run."""
    saved = file(build("train.epochs=30").to_yaml())
    short = build(f"train.epochs={epochs}", file=saved).method
    assert (short.warmup, short.ramp) == stages
    assert short.model_dump(exclude={"warmup", "ramp"}) == crosel_settings(30).model_dump(exclude={"warmup", "ramp"})
    pop = build(f"train.epochs={epochs}", file=saved, values={"method": {"name": "pop"}}).method
    assert pop.warm_up == (20 if epochs > 20 else max(1, 20 * epochs // 30))


def test_there_is_no_remark_on_a_ramp_that_was_cut_away(file):
    saved = file(build("train.epochs=30").to_yaml())
    for epochs in (2, 3, 4):
        for ways in ({"file": saved}, {"preset": "fast/cifar10-crosel"}):
            assert build(f"train.epochs={epochs}", **ways).remarks() == []
    assert "no effect without method.ramp" in " ".join(build("method.ramp=0", file=saved).remarks())


def test_what_is_given_with_the_epochs_or_for_no_number_of_them_stays(file):
    given = build("train.epochs=10", "method.warmup=9", file=file(build("train.epochs=30").to_yaml())).method
    assert (given.warmup, given.ramp) == (9, 3)
    assert build("train.epochs=10", file=file("method: {warmup: 12}\n")).method.warmup == 12


@pytest.mark.parametrize(
    ("content", "epochs", "warmup"),
    [
        ("train: {epochs: 10}", 10, 5),  # of the preset's 20 in 40
        ("train: {epochs: 10}", 4, 2),
        ("method: {warmup: 30}\ntrain: {epochs: 60}", 20, 10),
        ("method: {warmup: 8}", 8, 1),
        ("method: {gamma: 0.5}", 20, 10),
    ],
)
def test_a_file_over_a_preset_makes_room_too(content, epochs, warmup, file):
    path = file(content)
    assert build(f"train.epochs={epochs}", file=path, preset="demo/digits").method.warmup == warmup


def test_merge_order(file, monkeypatch):
    """Defaults, then preset, file, flags, --set: each over the one before, and only where it speaks."""
    monkeypatch.setattr(
        "crosel.config.read_preset",
        lambda name: {"seed": 1, "train": {"epochs": 1, "lr": 1.0, "momentum": 0.1, "batch_size": 1}},
    )
    path = file("seed: 2\ntrain: {epochs: 2, lr: 2.0, momentum: 0.2}\n")
    config = build_config(
        preset="any", file=path, values={**SOURCE, "seed": 3, "train": {"epochs": 3, "lr": 3.0}},
        settings=["train.epochs=4", "seed=4"],
    )  # fmt: skip
    assert config.seed == 4
    assert (config.train.epochs, config.train.lr, config.train.momentum, config.train.batch_size) == (4, 3.0, 0.2, 1)
    assert config.train.weight_decay == TrainSettings().weight_decay


def test_flags_that_were_not_given_change_nothing(file):
    path = file("source: cifar10\nseed: 5\nmethod: {name: cc}\n")
    config = build_config(file=path, values={"source": None, "seed": None, "method": None})
    assert (config.source, config.seed, config.method.name) == ("cifar10", 5, "cc")


def test_a_later_set_wins():
    assert build("train.epochs=3", "train.epochs=7").train.epochs == 7


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("train.lr=1e-4", ("train", "lr"), 1e-4),
        ("train.lr=.5", ("train", "lr"), 0.5),
        ("train.nesterov=true", ("train", "nesterov"), True),
        ("train.milestones=[0.2, 0.4]", ("train", "milestones"), (0.2, 0.4)),
        ("method.criteria=[1, 3]", ("method", "criteria"), (1, 3)),
        ("method.criteria=[]", ("method", "criteria"), ()),
        ("method.temperature_start=null", ("method", "temperature_start"), None),
        ("network.name=wrn-28-2", ("network", "name"), "wrn-28-2"),
        (" train.epochs =9", ("train", "epochs"), 9),
        ("candidates=uniform:q=0.3", ("candidates",), "uniform:q=0.3"),
        # Names and paths, as written:
        ("data.classes=[0, 01, 1.0, no, 'a, b']", ("data", "classes"), ("0", "01", "1.0", "no", "a, b")),
        ("data.annotators=[0, 1]", ("data", "annotators"), ("0", "1")),
        ("data.classes=null", ("data", "classes"), None),
        ("data.image_root=2024", ("data", "image_root"), "2024"),
        ("data.image_root=1e3", ("data", "image_root"), "1e3"),
        ("data.inputs=a: b #c", ("data", "inputs"), "a: b #c"),
        ("data.inputs='2024'", ("data", "inputs"), "2024"),
        ("data.inputs=null", ("data", "inputs"), None),
        ("network.name = wrn-28-2 ", ("network", "name"), "wrn-28-2"),
        ("data.separator=-", ("data", "separator"), "-"),
        ("data.separator=|", ("data", "separator"), "|"),
        ('data.separator=" "', ("data", "separator"), " "),
    ],
)
def test_set_takes_yaml_values(text, path, expected):
    found = build(text)
    for part in path:
        found = getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["train.epochs"], "--set train.epochs: write NAME=VALUE, as in --set train.epochs=20"),
        (["=3"], "--set =3: write NAME=VALUE"),
        (
            ["data.classes=[>50K, <=50K]"],
            "--set data.classes=[>50K, <=50K]: not a list; put it in brackets, and names ",
        ),
        (["train=5", "train.epochs=3"], "--set train.epochs=3: 'train' already has a value"),
    ],
)
def test_bad_set(items, message):
    with pytest.raises(UserError) as caught:
        build(*items)
    assert line(caught).startswith(message)


def test_another_method_starts_afresh(file):
    """Settings of one method mean nothing to another, wherever its name comes from."""
    path = file("method: {name: crosel, gamma: 0.5}\n")
    assert build(file=path).method == crosel_settings(gamma=0.5)
    assert build(file=path, values={"method": {"name": "cc"}}).method == CCSettings()
    assert build("method.name=cc", file=path).method == CCSettings()
    assert build("method.name=crosel", file=path).method == crosel_settings(gamma=0.5)
    assert build("method.temperature=1", file=path).method == crosel_settings(gamma=0.5, temperature=1.0)


def test_the_same_method_keeps_what_was_said(file):
    path = file("method: {gamma: 0.5, alpha: 2}\n")
    assert build("method.gamma=0.6", file=path).method == crosel_settings(gamma=0.6, alpha=2.0)


# --- presets ------------------------------------------------------------------------------------------------------


LEFT = ("augment.cutout_fill", "train.bf16")
FOR_FEATURES = (
    "augment.weak_feature_noise", "network.hidden", "network.scaling", "train.candidate_weights", "train.weight_decay",
)  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ([], {*LEFT, "augment.flip", "network.name", "train.folds", "train.lr", *FOR_FEATURES}),
        (["augment.flip=true", "train.lr=1", "train.folds=3"], {*LEFT, "network.name", *FOR_FEATURES}),
        (["network.name=mlp"], {*LEFT, "augment.flip", "train.folds", *FOR_FEATURES}),
        (
            ["augment.flip=true", "network.name=mlp", "augment.cutout_fill=5", "train.folds=0", "train.bf16=true"],
            {*FOR_FEATURES},
        ),
        (
            ["network.name=wrn-10-1", "network.hidden=[7]", "network.scaling=robust", "train.candidate_weights=true"],
            {*LEFT, "augment.flip", "augment.weak_feature_noise", "train.folds"},
        ),
    ],
)
def test_only_what_nobody_gave_is_left_to_the_data(settings, left):
    config = build_config(settings=["source=digits", *settings])
    assert filled_from_data(config) == left
    asked, made = (dotted(c.model_dump(mode="json")) for c in (config, resolve(config, read_digits(), CPU)))
    # Digits must not flip, and are small images; white is white in them, and they are no photographs.
    changed = left - {"augment.cutout_fill", "train.lr", "network.hidden"} - {"train.weight_decay"}
    changed -= {"augment.weak_feature_noise"}
    assert {name for name in asked if asked[name] != made[name]} == changed
    assert filled_from_data(resolve(config, read_digits(), CPU)) == set()


def rows_of_features(n: int, d: int, k: int) -> Dataset:
    return make_dataset(np.zeros((n, d)), np.ones((n, k), bool))


def test_defaults_for_features():
    """Fewer rows than a linear classifier has weights: no hidden layer. What anybody sets stays."""
    many, few = rows_of_features(24, 6, 4), rows_of_features(23, 6, 4)
    for data, hidden, decay in ((many, (512,), 1e-4), (few, (), 0.01)):
        made = resolve(build_config(settings=["source=made"]), data)
        assert (made.network.hidden, made.train.weight_decay, made.network.scaling) == (hidden, decay, "robust")
        assert made.augment.weak_feature_noise == 0.3
        assert made.train.candidate_weights is False
    asked = ["source=made", "network.hidden=[7]", "network.scaling=standard", "augment.weak_feature_noise=0"]
    made = resolve(build_config(settings=asked), few)
    assert (made.network.hidden, made.network.scaling, made.train.weight_decay) == ((7,), "standard", 1e-4)
    assert made.augment.weak_feature_noise == 0
    assert resolve(build_config(settings=["source=made", "train.weight_decay=0.5"]), few).train.weight_decay == 0.5
    own = resolve(build_config(settings=["source=made", "network.name=mine:net"]), few)
    assert own.train.weight_decay == 1e-4
    embedded = resolve(build_config(settings=["source=made"]), replace(few, embedded_by=("timm/x", "0")))
    assert (embedded.network.scaling, embedded.augment.weak_feature_noise) == ("standard", 0)
    old = resolve(build_config(preset="own/features", settings=["source=made"]), few)
    assert (old.network.hidden, old.network.scaling, old.augment.weak_feature_noise) == ((512,), "standard", 0)


@pytest.mark.parametrize(("brightest", "fill"), [(255, 127), (128, 127), (127, 63), (16, 8), (1, 0)])
def test_a_cut_out_square_is_no_brighter_than_the_images(brightest, fill):
    digits = read_digits()
    dark = replace(digits, x=np.minimum(digits.x, brightest))
    dark.x[0, 0, 0, 0] = brightest
    config = build_config(settings=["source=digits"])
    assert resolve(config, dark).augment.cutout_fill == fill
    assert resolve(build_config(settings=["source=digits", "augment.cutout_fill=200"]), dark).augment.cutout_fill == 200


def test_there_are_presets():
    assert "demo/digits" in presets()


@pytest.mark.parametrize(
    ("preset", "epochs", "warmup", "ramp"),
    [
        ("demo/digits", 40, 20, 0), ("demo/digits", 21, 20, 0), ("demo/digits", 20, 10, 0), ("demo/digits", 2, 1, 0),
        ("demo/digits", 1, None, 0), ("fast/cifar10-crosel", 70, 19, 36), ("fast/cifar10-crosel", 19, 5, 9),
        ("fast/cifar10-crosel", 2, 1, 1), ("fast/cifar10-crosel", 56, 19, 36), ("fast/cifar10-crosel", 55, 14, 28),
    ],
)  # fmt: skip
def test_a_presets_warm_up_makes_room_where_fewer_epochs_are_asked_for(preset, epochs, warmup, ramp):
    config = build_config(preset=preset, values=SOURCE, settings=[f"train.epochs={epochs}"])
    assert (config.method.warmup, config.method.ramp) == (warmup, ramp)


def test_a_warm_up_that_was_asked_for_stays_whatever_the_epochs(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("method: {warmup: 7}\ntrain: {epochs: 3}\n", encoding="utf-8")
    short = ["train.epochs=3"]
    for ways in ({"settings": [*short, "method.warmup=7"]}, {"file": path}):
        assert build_config(preset="demo/digits", values=SOURCE, **ways).method.warmup == 7
    other = build_config(preset="demo/digits", values={**SOURCE, "method": {"name": "cc"}}, settings=short)
    assert other.method.name == "cc"
    one = build_config(preset="fast/cifar10-crosel", values=SOURCE, settings=[*short, "method.ramp=2"])
    assert (one.method.warmup, one.method.ramp) == (1, 2)


def test_a_given_stage_may_leave_room_for_the_others():
    settings = ["train.epochs=40", "method.ramp=0"]
    config = build_config(preset="fast/cifar10-crosel", values=SOURCE, settings=settings)
    assert (config.method.warmup, config.method.ramp) == (19, 0)


@pytest.mark.parametrize(
    ("preset", "epochs", "warm_up"),
    [
        ("own/pop", 500, 20),
        ("own/pop", 21, 20),
        ("own/pop", 20, 1),
        ("fast/cifar10-pop", 20, 4),
        ("own/features", 10, 4),
    ],
)
def test_stages_of_a_methods_defaults_make_room_too(preset, epochs, warm_up):
    """Else a short run of PoP would never purify."""
    values = {**SOURCE, "method": {"name": "pop"}}
    assert build_config(preset=preset, values=values, settings=[f"train.epochs={epochs}"]).method.warm_up == warm_up


@pytest.mark.parametrize("name", presets())
def test_every_preset_loads_and_validates(name):
    config = build(preset=name)
    assert isinstance(config, RunConfig)
    content = read_preset(name)
    assert content
    # What a preset says is what the run gets.
    dumped = config.model_dump(mode="json")
    for section, values in content.items():
        if isinstance(values, dict):
            for key, value in values.items():
                assert dumped[section][key] == value, f"{section}.{key}"


SCHEMES = {  # epochs, batch, learning rate, schedule, milestones in epochs
    "pico": (800, 256, 0.01, "cosine", None),
    "pop": (500, 256, 0.05, "step", [100, 150]),
    **dict.fromkeys(("crosel", "cc", "proden", "lws", "crdpll"), (200, 64, 0.1, "step", [100, 150])),
}
CROSEL = {"cifar10": (0.9, 4.0), "cifar100": (0.9, 1.0), "svhn": (0.85, 4.0)}  # γ, λ_cr


@pytest.mark.parametrize("name", [name for name in presets() if name.startswith("paper/")])
def test_a_paper_preset_is_the_papers_scheme(name):
    source, method = name.removeprefix("paper/").split("-")
    config = build(preset=name)
    train = config.train
    assert (config.method.name, config.network.name) == (method, "wrn-34-10")
    assert config.augment.policy == ("svhn" if source == "svhn" else "cifar10")
    epochs, batch, lr, schedule, milestones = SCHEMES[method]
    assert (train.epochs, train.batch_size, train.lr, train.schedule) == (epochs, batch, lr, schedule)
    assert (train.momentum, train.nesterov, train.weight_decay) == (0.9, False, 1e-4)
    assert (train.lr_ramp, train.ema_decay) == (0, 0)
    if milestones:
        assert [round(m * epochs) for m in train.milestones] == milestones
        assert train.decay == 0.1
    if method == "crosel":
        s, (gamma, lambda_cr) = config.method, CROSEL[source]
        assert s == CroSelSettings(warmup=10, gamma=gamma, lambda_cr=lambda_cr, **PAPER)
        assert {name: getattr(config.augment, name) for name in PAPER_VIEWS} == PAPER_VIEWS
    else:
        assert config.method == find_method(method).Settings()


OWN = {  # network, epochs, batch, learning rate, schedule, milestones in epochs, weight decay
    "cc": ("auto", 250, 256, 0.001, "constant", None, 1e-3),
    "crdpll": ("wrn-34-10", 200, 64, 0.1, "step", [100, 150], 1e-4),
    "lws": ("auto", 250, 256, 0.05, "step", [50, 100, 150, 200], 1e-3),
    "pico": ("resnet-18", 800, 256, 0.01, "cosine", None, 1e-3),
    "pop": ("wrn-28-2", 500, 256, 0.05, "step", [100, 150], 1e-3),
    "proden": ("auto", 500, 256, 0.05, "constant", None, 1e-3),
}


@pytest.mark.parametrize("method", OWN)
def test_a_methods_own_preset_is_its_authors_scheme(method):
    config = build(preset=f"own/{method}")
    train = config.train
    network, epochs, batch, lr, schedule, milestones, weight_decay = OWN[method]
    assert (config.method.name, config.network.name, train.epochs) == (method, network, epochs)
    assert (train.batch_size, train.lr, train.schedule, train.weight_decay) == (batch, lr, schedule, weight_decay)
    if milestones:
        assert [round(m * epochs) for m in train.milestones] == milestones
        assert train.decay == (0.5 if method == "lws" else 0.1)
    assert train.optimiser == ("adam" if method == "cc" else "sgd")
    plain = {"view": "plain"} if method in ("cc", "lws", "proden") else {}
    assert config.method == find_method(method).Settings(**plain)


@pytest.mark.parametrize("name", ["own/pico", "paper/cifar10-pico", "paper/cifar100-pico", "paper/svhn-pico"])
def test_picos_strong_view_takes_three_operations(name):
    s = build(preset=name).augment
    assert (s.strong_ops, s.strong_chance, s.strong_magnitudes, s.cutout) == (3, 1.0, (0, 10), 0.25)


def test_there_is_a_paper_preset_for_each_method_on_each_dataset():
    names = {name for name in presets() if name.startswith("paper/")}
    assert names == {f"paper/{source}-{method}" for source in CROSEL for method in SCHEMES}


@pytest.mark.parametrize("name", presets())
def test_a_presets_method_settings_do_not_leak(name):
    if read_preset(name).get("method", {}).get("name", "crosel") == "cc":
        config = build(preset=name, values={"method": {"name": "crosel"}})
        assert config.method == crosel_settings(config.train.epochs)
    else:
        config = build(preset=name, values={"method": {"name": "cc"}})
        assert config.method == CCSettings()
        assert config.train == build(preset=name).train


@pytest.mark.parametrize("name", presets())
def test_a_preset_says_its_command_and_what_it_gave(name):
    preset = presets()[name]
    assert preset.command.startswith("crosel train ")
    assert f"--preset {name} " in preset.command
    gave = re.search(r"\d+\.\d+ (± \d+\.\d+ )?%.*results/", preset.accuracy) and re.search(r"\d s\b", preset.time)
    assert gave or preset.accuracy.lower().startswith("not run"), "accuracy, seconds and the folder of the runs"


def test_later_bases_win():
    bases = {"a": {"note": "of a", "train": {"epochs": 1, "lr": 1}}, "b": {"train": {"epochs": 2}}}
    entry = {
        "bases": ["a", "b"],
        "title": "t",
        "command": "crosel train x --preset {preset}",
        "accuracy": "",
        "time": "",
    }
    made = _composed("g/p", {**entry, "train": {"lr": 3}}, bases)
    assert made.settings == {"train": {"epochs": 2, "lr": 3}}
    assert (made.note, made.command) == ("of a", "crosel train x --preset g/p")


def rows_of_the_paper():
    """(dataset, rule, method, [mean, deviation or nothing]) for every figure of its main and fine-grained tables."""
    for named, by_q in paper()["accuracy"].items():
        dataset, _, kind = named.partition("-")
        for q, by_method in by_q.items():
            for method, figure in by_method.items():
                yield dataset, f"{kind or 'uniform'}:q={q}", method, figure


def test_every_row_of_the_papers_tables_has_a_preset_that_cites_it():
    for dataset, rule, method, (mean, *deviation) in rows_of_the_paper():
        cited = f"{mean:.2f}" + "".join(f" ± {value:.2f}" for value in deviation)
        assert f"{rule} {cited}" in presets()[f"paper/{dataset}-{method}"].paper.split(", "), f"{dataset}, {rule}"


def test_every_row_of_the_papers_tables_has_a_short_preset():
    """Of the row's method, with a network small enough for minutes, and a command for the row's data."""
    for dataset, method in {(dataset, method) for dataset, _, method, _ in rows_of_the_paper()}:
        name = f"fast/{dataset}-{method}"
        config = build(preset=name)
        assert (config.method.name, config.augment.policy) == (method, "svhn" if dataset == "svhn" else "cifar10")
        assert config.network.name in ("resnet-18", "wrn-16-8")
        assert presets()[name].command.startswith(f"crosel train {dataset} --data DIR --preset {name} ")


def test_every_row_of_the_papers_tables_is_a_cell_of_a_suite():
    rows = {(dataset, rule, method) for dataset, rule, method, _ in rows_of_the_paper()}
    cells = [c.config for s in ("main", "svhn", "fine-grained") for c in expand(read_suite(f"paper-{s}"), seeds=1)]
    assert len(rows) == len(cells) == 70
    assert {(cell.source, cell.candidates, cell.method.name) for cell in cells} == rows


def test_unknown_preset():
    with pytest.raises(UserError, match=r"unknown preset 'demo/digit' \(did you mean 'demo/digits'\?\); crosel info "):
        build(preset="demo/digit")


# --- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("trian.epochs=3", "unknown setting 'trian' (did you mean 'train'?)"),
        ("train.epoch=3", "unknown setting 'train.epoch' (did you mean 'train.epochs'?)"),
        ("method.gama=0.5", "unknown setting 'method.gama' (did you mean 'method.gamma'?)"),
        ("method.lambda_rc=1", "unknown setting 'method.lambda_rc' (did you mean 'method.lambda_cr'?)"),
        ("network.nam=mlp", "unknown setting 'network.nam' (did you mean 'network.name'?)"),
        ("augment.flp=false", "unknown setting 'augment.flp' (did you mean 'augment.flip'?)"),
        ("zzzzzz=1", "unknown setting 'zzzzzz'; choose from source, data_dir, candidates, …"),
        ("augment.zzz=1", "unknown setting 'augment.zzz'; choose from augment.flip, augment.padding, …"),
    ],
)
def test_unknown_settings_get_the_nearest_name(item, message):
    with pytest.raises(UserError) as caught:
        build(item)
    if message.endswith("…"):
        assert line(caught).startswith(message[:-1])
    else:
        assert line(caught) == message


def test_what_must_be_a_list_is_said_without_words_of_python():
    for item in ("method.criteria=2", "train.milestones=0.5", "network.hidden=64"):
        with pytest.raises(UserError) as caught:
            build(item)
        name, _, value = item.partition("=")
        assert line(caught) == f"setting '{name}': input should be a list in brackets, as in [1, 2] (given: {value})"


def test_names_that_yaml_takes_for_something_else_need_quotes_in_a_file(file):
    for text, name, given in [("[a, no]", "data.classes.1", "False"), ("[0, 1]", "data.classes.0", "0")]:
        with pytest.raises(UserError) as caught:
            build(file=file(f"data: {{classes: {text}}}"))
        assert line(caught) == f"setting '{name}': input should be text; put it in quotes (given: {given})"
    assert build(file=file("data: {classes: ['0', 'no']}")).data.classes == ("0", "no")


def test_of_another_methods_settings_is_said_whose_they_are():
    with pytest.raises(UserError) as caught:
        build("method.name=cc", "method.gamma=0.9")
    assert line(caught) == "unknown setting 'method.gamma' of method 'cc'; it belongs to crosel"
    with pytest.raises(UserError) as caught:
        build("method.name=cc", "method.temperature=0.9")
    owners = sorted(name for name, method in methods().items() if "temperature" in method.Settings.model_fields)
    assert {"crosel", "pico"} <= set(owners)
    assert line(caught) == f"unknown setting 'method.temperature' of method 'cc'; it belongs to {', '.join(owners)}"


def test_an_unknown_setting_of_a_method_is_answered_with_its_own():
    """The word 'method.' is not what makes two names alike."""
    with pytest.raises(UserError) as caught:
        build("method.name=cc", "method.zzz=1")
    assert line(caught) == "unknown setting 'method.zzz'; choose from method.name, method.view"


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("method.gamma=1.5", "setting 'method.gamma': input should be less than or equal to 1 (given: 1.5)"),
        ("method.warmup=0", "setting 'method.warmup': input should be greater than or equal to 1 (given: 0)"),
        ("method.criteria=[1, 4]", "setting 'method.criteria.1': input should be 1, 2 or 3 (given: 4)"),
        (
            "method.scope=some",
            "setting 'method.scope': input should be 'all', 'unselected', 'unselected-once' or 'none' (given: 'some')",
        ),
        ("train.epochs=0", "setting 'train.epochs': input should be greater than or equal to 1 (given: 0)"),
        ("train.epochs=1.5", "setting 'train.epochs': input should be a whole number (given: 1.5)"),
        ("train.lr=0", "setting 'train.lr': input should be greater than 0 (given: 0)"),
        ("train.lr=nan", "setting 'train.lr': input should be "),
        ("train.epochs=many", "setting 'train.epochs': input should be a whole number (given: 'many')"),
        ("train.lr=fast", "setting 'train.lr': input should be a number (given: 'fast')"),
        ("train.bf16=some", "setting 'train.bf16': input should be 'auto', True or False (given: 'some')"),
        ("train.momentum=1", "setting 'train.momentum': input should be less than 1 (given: 1)"),
        ("train.milestones=[0.9, 0.2]", "setting 'train.milestones': give rising numbers between 0 and 1"),
        ("train.milestones=[0.5, 1.0]", "setting 'train.milestones': give rising numbers between 0 and 1"),
        ("train=5", "setting 'train' is a group; name one setting of it, as in train.epochs"),
        ("seed=-1", "setting 'seed': input should be greater than or equal to 0 (given: -1)"),
        ("network.width=0", "setting 'network.width': input should be greater than or equal to 1 (given: 0)"),
        ("method=cc", "setting 'method' needs a name and its settings, as in method: {name: crosel}"),
    ],
)
def test_values_out_of_range(item, message):
    with pytest.raises(UserError) as caught:
        build(item)
    assert line(caught).startswith(message)


@pytest.mark.parametrize(
    "item",
    [
        "train.lr=inf",
        "train.weight_decay=.inf",
        "method.temperature=inf",
        "method.lambda_cr=.inf",
        "train.lr_ramp=inf",
        "augment.feature_noise=.inf",
        "augment.weak_feature_noise=inf",
    ],
)
def test_infinite_values_are_refused(item):
    with pytest.raises(UserError, match=item.partition("=")[0]):
        build(item)


def test_nesterov_needs_momentum():
    with pytest.raises(UserError, match="nesterov needs a momentum above 0"):
        build("train.nesterov=true", "train.momentum=0")
    with pytest.raises(UserError, match="nesterov works only with SGD, but optimiser is adam"):
        build("train.nesterov=true", "train.optimiser=adam")
    assert build("train.nesterov=true").train.nesterov


def test_drops_of_the_learning_rate_without_a_schedule_that_has_them_are_remarked_on(file):
    said = "has no effect with train.schedule=cosine; it needs train.schedule=step"
    config = build("train.milestones=[0.3]", "train.decay=0.5")
    assert config.remarks() == [f"train.milestones {said}", f"train.decay {said}"]
    assert build(file=file(config.to_yaml())).remarks() == config.remarks()
    changed = build("train.schedule=constant", preset="own/pop", values={"method": {"name": "pop"}})
    assert changed.remarks() == [
        "train.milestones has no effect with train.schedule=constant; it needs train.schedule=step"
    ]
    assert build("train.schedule=step", "train.milestones=[0.3]", "train.decay=0.5").remarks() == []
    assert build(file=file(build().to_yaml())).remarks() == []  # every default, written out


def test_a_run_needs_a_source():
    with pytest.raises(UserError) as caught:
        build_config()
    assert line(caught) == "setting 'source' is missing"


def test_unknown_method():
    with pytest.raises(
        UserError, match=r"unknown method 'croesl' \(did you mean 'crosel'\?\); choose from .*cc, .*crosel"
    ):
        build("method.name=croesl")


def test_check_config_names_its_place():
    with pytest.raises(UserError) as caught:
        check_config({"method": {"name": "cc"}, "source": "digits", "sede": 3}, "old/config.yaml: ")
    assert line(caught) == "old/config.yaml: unknown setting 'sede' (did you mean 'seed'?)"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("train:\n  epochs: 3\n lr: 1\n", "line 3, column 2"),
        ("seed: [1, 2\ntrain: {}\n", "line 2, column 6"),
        ("a: b: c\n", "line 1, column 5"),
        ("seed: 1\n\ttrain: 2\n", "line 2, column 1"),
        ("x: !!python/object/apply:os.system ['true']\n", "line 1, column 4"),
    ],
)
def test_yaml_faults_have_line_and_column(text, place, file):
    path = file(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert line(caught).startswith(f"{path}, {place}: not valid YAML (")


@pytest.mark.parametrize("text", ["", "just words\n", "- 1\n- 2\n", "3\n"])
def test_files_that_are_no_settings(text, file):
    path = file(text)
    with pytest.raises(UserError) as caught:
        read_yaml(path)
    assert line(caught) == f"{path}: expected settings as 'name: value' lines"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.yaml: no such file"):
        read_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_yaml(tmp_path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("name: é\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.yaml: not UTF-8 text"):
        read_yaml(latin)


# --- frozen, and there and back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [None, "method", "network", "augment", "train"])
def test_settings_are_frozen(part):
    config = build()
    model = config if part is None else getattr(config, part)
    field = next(iter(type(model).model_fields))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(model, field, getattr(model, field))


@pytest.mark.parametrize("name", methods())
def test_yaml_there_and_back(name):
    config = build("train.lr=1e-5", "seed=9223372036854775807", values={"method": {"name": name}})
    again = check_config(yaml.safe_load(config.to_yaml()))
    assert again == config
    assert type(again.method) is find_method(name).Settings


# --- the registry -------------------------------------------------------------------------------------------------


def test_methods_are_found_by_name():
    assert find_method("crosel") is CroSel
    assert find_method("cc") is CC
    assert list(methods()) == sorted(methods())
    assert method_settings({"name": "crosel", "gamma": 0.7}) == CroSelSettings(gamma=0.7)
    for name, method in methods().items():
        assert method.name == name
        assert method.Settings().name == name
        assert method.title
        assert method.paper


def test_a_method_of_ones_own(monkeypatch):
    monkeypatch.setattr("crosel.methods.base._METHODS", dict(methods()))

    class OwnSettings(MethodSettings):
        name: str = "own"
        strength: float = Field(1.0, ge=0)

    class Own(Method):
        name, title, paper, Settings = "own", "Own", "none", OwnSettings

    assert register(Own) is Own
    assert register(Own) is Own  # a second import changes nothing
    assert build("method.name=own", "method.strength=2").method == OwnSettings(strength=2)
    with pytest.raises(UserError, match=r"unknown setting 'method\.strenght' \(did you mean 'method\.strength'\?\)"):
        build("method.name=own", "method.strenght=2")

    class Other(Own):
        pass

    with pytest.raises(ValueError, match="a method named 'own' is already registered"):
        register(Other)


def test_stages_of_a_method_of_ones_own(monkeypatch):
    monkeypatch.setattr("crosel.methods.base._METHODS", dict(methods()))

    class StagedSettings(MethodSettings):
        name: str = "staged"
        calm: int = Field(8, ge=0, json_schema_extra=STAGE)
        rise: int | None = Field(None, ge=1, json_schema_extra=STAGE)
        every: int = Field(5, ge=1)

    class Staged(Method):
        name, title, paper, Settings = "staged", "Staged", "none", StagedSettings

    register(Staged)

    def under_preset(*settings):  # of 40 epochs
        return build("method.name=staged", *settings, preset="demo/digits").method

    assert under_preset("train.epochs=9") == StagedSettings()
    assert under_preset("train.epochs=8") == StagedSettings(calm=1)
    assert under_preset("train.epochs=25", "method.rise=20") == StagedSettings(calm=5, rise=20)
    assert build("method.name=staged", "train.epochs=8").method == StagedSettings()  # no preset, no plan


@pytest.mark.parametrize("missing", ["name", "title", "paper", "Settings"])
def test_a_method_needs_its_attributes(missing):
    attributes = {"name": "x", "title": "X", "paper": "none", "Settings": CCSettings}
    del attributes[missing]
    with pytest.raises(TypeError, match=f"needs the class attribute '{missing}'"):
        register(type("Incomplete", (Method,), attributes))


def test_did_you_mean():
    assert did_you_mean("gama", ["gamma", "alpha"]) == " (did you mean 'gamma'?)"
    assert did_you_mean("zzz", ["gamma", "alpha"]) == ""


# --- settings of earlier versions ---------------------------------------------------------------------------------


def test_old_names_are_accepted_everywhere_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(
        "method: {average: probabilities}\ntrain: {average: 0.9, refresh: 0, restart: 0, restart_lr: null}\n"
    )
    config = build_config(file=old, values={"source": "digits"})
    assert (config.method.ensemble, config.train.ema_decay) == ("probabilities", 0.9)
    assert [record.message for record in caplog.records] == [
        "setting 'train.average' is called 'train.ema_decay' now; the old name still works",
        "setting 'method.average' is called 'method.ensemble' now; the old name still works",
    ]
    for settings, expected in (
        (["train.average=0.5"], 0.5),  # over the file's
        (["train.ema_decay=0.5"], 0.5),
        (["train.average=0.5", "train.ema_decay=0.7"], 0.7),
    ):
        assert build_config(file=old, values={"source": "digits"}, settings=settings).train.ema_decay == expected


def test_old_names_with_their_defaults_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    build_config(values={"source": "digits"}, settings=["train.average=0", "method.average=logits", "train.restart=0"])
    assert caplog.records == []


@pytest.mark.parametrize("item", ["train.refresh=4", "train.restart=2", "train.restart_lr=0.1"])
def test_settings_that_are_gone_are_refused(item: str) -> None:
    name, _, value = item.partition("=")
    with pytest.raises(UserError, match=rf"setting '{name}' does not exist any more \(given: {value}\)"):
        build_config(values={"source": "digits"}, settings=[item])


def test_a_method_may_have_a_setting_of_an_old_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(MethodSettings):
        name: Literal["own"] = "own"
        average: int = 1

    monkeypatch.setattr(
        "crosel.methods.base._METHODS", {**methods(), "own": SimpleNamespace(Settings=Own, view_defaults={})}
    )
    values = {"source": "digits", "method": {"name": "own"}}
    assert build_config(values=values, settings=["method.average=3"]).method.average == 3


def test_the_estimators_warn_of_old_names() -> None:
    clf = PartialLabelClassifier("crosel", epochs=2, train_settings={"average": 0.9})
    with pytest.warns(FutureWarning, match="'train.average' is called 'train.ema_decay' now"):
        assert clf._config().train.ema_decay == 0.9
