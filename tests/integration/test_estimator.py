"""The estimators: scikit-learn's own checks, every form of input, every way to keep a trained classifier."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pickle
import pickletools
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from _support import small_arrays
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from crosel import CroSelClassifier, PartialLabelClassifier, UserError
from crosel.config import build_config
from crosel.data.candidates import uniform
from crosel.estimator import History
from crosel.estimator.inputs import read_candidates
from crosel.methods import methods
from crosel.methods.crosel import CroSelSettings

SMALL: dict[str, Any] = {
    "batch_size": 16, "lr": 0.1, "network": "mlp", "network_settings": {"hidden": [16]}, "device": "cpu",
    "folds": 0,  # which train again; tests/labels/test_folds.py
}  # fmt: skip
# Every check of scikit-learn's passes today. One that cannot make sense for candidate sets goes here with the reason.
EXPECTED_FAILURES: dict[str, str] = {}


def small(method: str = "cc", **params: Any) -> PartialLabelClassifier:
    return PartialLabelClassifier(method, **{"epochs": 4, **SMALL, **params})


def small_crosel(**params: Any) -> CroSelClassifier:
    return CroSelClassifier(**{"epochs": 4, **SMALL, **params})


def tiny_network(classes: int, shape: tuple[int, ...]) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(int(np.prod(shape)), classes))


def problem(n: int = 60, classes: int = 3, seed: int = 0) -> tuple[Any, Any, Any]:
    """Separable clusters, their labels, and sets with one wrong label in most of them."""
    x, y = make_blobs(n, n_features=5, centers=classes, cluster_std=1.0, random_state=seed)
    rng = np.random.default_rng(seed)
    sets = np.eye(classes, dtype=bool)[y]
    sets[np.arange(n), (y + rng.integers(0, classes - 1, n)) % classes] = True
    return x, y, sets


def images(n: int = 24) -> tuple[Any, Any]:
    """Bright in the upper or in the lower half; sets of one or both."""
    rng = np.random.default_rng(1)
    y = np.arange(n) % 2
    x = rng.integers(0, 60, (n, 8, 8)).astype(np.uint8)
    x[y == 0, :4] += 150
    x[y == 1, 4:] += 150
    sets = np.eye(2, dtype=bool)[y]
    sets[::4] = True
    return x, sets


@parametrize_with_checks(
    [small("cc", epochs=10, folds=None), small_crosel(epochs=8)],
    expected_failed_checks=lambda estimator: EXPECTED_FAILURES,
)
def test_scikit_learn_checks(estimator: Any, check: Any) -> None:
    """The assertions are scikit-learn's own: a check that is not met raises."""
    assert check(estimator) is None


def test_learns_and_reports_labels() -> None:
    x, y, sets = problem(150)
    clf = small_crosel(epochs=12, gamma=0.8).fit(x, sets)
    assert clf.score(x, y) > 0.9
    assert (clf.transduction_ == y).mean() > 0.9
    assert clf.classes_.tolist() == [0, 1, 2]
    assert sets[np.arange(150), clf.transduction_].all()  # always inside the set
    assert clf.selected_.dtype == bool
    assert clf.selected_.shape == clf.confidence_.shape == clf.flags_.shape == (150,)
    assert clf.selected_.any()
    assert set(clf.flags_.tolist()) <= {"", "outside", "disputed", "unsure"}
    assert [row["epoch"] for row in clf.history_] == list(range(1, 13))
    np.testing.assert_allclose(clf.predict_proba(x).sum(axis=1), 1, rtol=1e-5)
    assert not hasattr(clf, "partial_fit")
    with pytest.raises(AttributeError, match="partial_fit is not available"):
        clf.partial_fit(x, sets)
    assert "partial_fit" in (PartialLabelClassifier.__doc__ or "")


def test_named_parameters_have_the_defaults_of_the_method() -> None:
    names = ("gamma", "bank_length", "lambda_cr", "temperature", "alpha", "networks")
    given = {name: CroSelSettings.model_fields[name].default for name in names}
    assert CroSelClassifier()._config() == CroSelClassifier(epochs=50, batch_size=64, **given)._config()


def test_presets_are_those_of_crosel_train_and_what_is_given_counts_more() -> None:
    ours = CroSelClassifier(preset="own/features", epochs=7, gamma=0.8)._config()
    settings = ["train.epochs=7", "method.gamma=0.8"]
    theirs = build_config(preset="own/features", settings=settings, values={"source": "memory"})
    assert ours == theirs
    other = PartialLabelClassifier("cc", preset="own/features")._config()  # as with --method
    assert other == build_config(preset="own/features", values={"source": "memory", "method": {"name": "cc"}})
    with pytest.raises(UserError, match="is for method 'proden'"):
        PartialLabelClassifier(preset="own/proden").fit(*problem()[::2])
    with pytest.raises(UserError, match="did you mean 'own/features'"):
        small("crosel", preset="own/feature").fit(*problem()[::2])


def test_sparse_features_are_what_they_are_as_a_table() -> None:
    x, _, sets = problem()
    x = np.where(x > 0, x, 0).astype(np.float32)
    dense, sparse = small().fit(x, sets), small().fit(csr_matrix(x), sets)
    np.testing.assert_array_equal(sparse.predict_proba(csr_matrix(x)), dense.predict_proba(x))


def test_cross_validation_takes_sets_and_matrices() -> None:
    x, _, sets = problem()
    named = [set(np.flatnonzero(row).tolist()) for row in sets]
    by_sets, by_matrix = (cross_val_score(small(), x, y, cv=KFold(3)) for y in (named, sets))
    np.testing.assert_array_equal(by_sets, by_matrix)


@pytest.mark.parametrize("epochs", [1, 2, 5, 50])
def test_the_classifier_resolves_as_crosel_train_without_a_preset(epochs: int) -> None:
    ours = CroSelClassifier(epochs=epochs)._config()
    theirs = build_config(settings=[f"train.epochs={epochs}"], values={"source": "digits"})
    assert ours.method == theirs.method
    assert ours.augment == theirs.augment
    assert PartialLabelClassifier("crosel", epochs=epochs)._config().method == theirs.method
    assert CroSelClassifier(warmup=3, method_settings={"ramp": 0})._config().method == CroSelSettings(warmup=3, ramp=0)


@pytest.mark.parametrize("method", sorted(methods()))
def test_every_method_trains_pickles_saves_and_loads(method: str, tmp_path: Path) -> None:
    x, y, sets = problem()
    short = {"warm_up": 1} if method == "pop" else None  # its default would take more epochs than there are
    clf = small(method, epochs=2, method_settings=short).fit(x, sets)
    p = clf.predict_proba(x)
    assert (clf.selected_ is None) == (clf._model._session.method.training_labels() is None)
    clf.save(tmp_path / "model.safetensors")
    for again in (pickle.loads(pickle.dumps(clf)), PartialLabelClassifier.load(tmp_path / "model.safetensors")):
        np.testing.assert_array_equal(again.predict_proba(x), p)
        np.testing.assert_array_equal(again.transduction_, clf.transduction_)
        np.testing.assert_array_equal(again.flags_, clf.flags_)
        assert again.history_ == clf.history_
        assert again.n_features_in_ == 5
        assert again.get_params() == clf.get_params()
        assert 0 <= again.score(x, y) <= 1


# --- candidate sets -----------------------------------------------------------------------------------------------


def test_all_forms_of_candidate_sets_agree() -> None:
    x, _, sets = problem(30)
    lists = [np.flatnonzero(row).tolist() for row in sets]
    objects = np.empty(30, dtype=object)
    objects[:] = [set(row) for row in lists]
    expected = small(epochs=1).fit(x, sets).predict_proba(x)
    for form in (
        sets.astype(int), sets.astype(float), sets.tolist(), lists, [tuple(r) for r in lists], [set(r) for r in lists],
        [np.array(r) for r in lists], objects, csr_matrix(sets.astype(int)), torch.from_numpy(sets),
        sets.astype(object),
    ):  # fmt: skip
        clf = small(epochs=1).fit(x, form)
        np.testing.assert_array_equal(clf.predict_proba(x), expected)
        assert clf.classes_.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(small(epochs=1).fit(x, candidates=sets).predict_proba(x), expected)


@pytest.mark.parametrize(
    ("names", "order", "dtype"),
    [
        (["dog", "cat", "emu"], ["cat", "dog", "emu"], "U"),
        ([("a", 1), ("a", 0), ("b", 0)], [("a", 0), ("a", 1), ("b", 0)], "O"),
        ([2, "one", 1.5], [1.5, 2, "one"], "O"),  # not comparable: by type, then text
        ([2.5, 1.5, 0.5], [0.5, 1.5, 2.5], "f"),
        ([2**70, 1, 0], [0, 1, 2**70], "O"),
    ],
)
def test_any_hashable_labels(names: list[Any], order: list[Any], dtype: str, tmp_path: Path) -> None:
    x, y, sets = problem()
    lists = [{names[j] for j in np.flatnonzero(row)} for row in sets]
    clf = small(epochs=8).fit(x, lists)
    assert clf.classes_.tolist() == order
    assert clf.classes_.dtype.kind == dtype
    truth = [names[j] for j in y]
    assert np.mean([a == b for a, b in zip(clf.transduction_.tolist(), truth, strict=True)]) > 0.8
    assert all(label in row for label, row in zip(clf.transduction_.tolist(), lists, strict=True))
    assert clf.score(x, lists) > 0.8
    clf.save(tmp_path / "m")
    again = PartialLabelClassifier.load(tmp_path / "m")
    assert again.classes_.tolist() == order
    assert [type(label) for label in again.classes_.tolist()] == [type(label) for label in order]
    assert again.predict(x).tolist() == clf.predict(x).tolist()


def test_matrix_of_text_is_label_lists() -> None:
    x, _, _ = problem(4)
    clf = small(epochs=1).fit(x, np.array([["cat", "dog"], ["dog", "emu"], ["cat", "emu"], ["dog", "dog"]]))
    assert clf.classes_.tolist() == ["cat", "dog", "emu"]
    assert clf.transduction_[3] == "dog"


def test_plain_labels_are_sets_of_one() -> None:
    x, y, _ = problem(90)
    names = np.array(["c", "a", "b"])[y]
    clf = small(epochs=8).fit(x, names)
    assert clf.classes_.tolist() == ["a", "b", "c"]
    assert clf.score(x, names) > 0.9
    assert clf.transduction_.tolist() == names.tolist()
    assert small(epochs=1).fit(x, names.tolist()).classes_.tolist() == ["a", "b", "c"]
    mixed = small(epochs=1).fit(x, [1 if label == "a" else label for label in names.tolist()])
    assert mixed.classes_.tolist() == [1, "b", "c"]


def test_classes_parameter(tmp_path: Path) -> None:
    x, _, sets = problem(30)
    clf = small(epochs=1, classes=["x", "y", "z"]).fit(x, sets)
    assert clf.classes_.tolist() == ["x", "y", "z"]
    assert set(clf.predict(x)) <= {"x", "y", "z"}
    clf.save(tmp_path / "m")
    assert PartialLabelClassifier.load(tmp_path / "m").get_params()["classes"] == ["x", "y", "z"]
    wider = small(epochs=1, classes=np.array([0, 1, 2, 3])).fit(x, np.arange(30) % 3)
    assert wider.predict_proba(x).shape == (30, 4)


class Frame:
    """As much of a pandas or polars frame as is looked at, for machines that have neither."""

    def __init__(self, values: Any, columns: list[Any]) -> None:
        self.values, self.columns, self.shape = values, columns, values.shape

    def to_numpy(self) -> Any:
        return self.values

    def __len__(self) -> int:
        return len(self.values)


def test_frame_columns_name_the_classes() -> None:
    x, _, sets = problem(30)
    frame = Frame(sets, ["ant", "bee", "cow"])
    clf = small(epochs=1).fit(x, frame)
    assert clf.classes_.tolist() == ["ant", "bee", "cow"]
    assert clf.score(x, frame) == clf.score(x, sets)
    assert small(epochs=1, classes=[1, 2, 3]).fit(x, frame).classes_.tolist() == [1, 2, 3]
    of_numpy = small(epochs=1).fit(x, Frame(sets, list(np.array(["ant", "bee", "cow"]))))
    assert of_numpy.classes_.dtype == clf.classes_.dtype


@pytest.mark.parametrize("missing", [None, float("nan"), "", "  "])
def test_a_frame_of_votes_makes_sets_of_what_anyone_chose(missing: Any) -> None:
    x, labels, _ = problem(30)
    names = np.array(["ant", "bee", "cow"], dtype=object)
    votes = np.stack([names[labels], np.roll(names[labels], 1), names[labels]], axis=1)
    votes[::3, 2] = missing
    frame = Frame(votes, ["anna", "ben", "clara"])
    sets = [sorted(set(row[:2])) for row in votes.tolist()]
    clf, plain = small(epochs=1).fit(x, frame), small(epochs=1).fit(x, sets)
    assert clf.classes_.tolist() == ["ant", "bee", "cow"]
    np.testing.assert_array_equal(clf.predict_proba(x), plain.predict_proba(x))
    assert clf.score(x, frame) == plain.score(x, sets)
    votes[4] = missing
    with pytest.raises(UserError, match="candidate set of example 4 is empty"):
        small(epochs=1).fit(x, frame)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"id": ["a", "b"], "cat": [0, 1], "dog": [1, 0]}, "column 'cat' holds 0, other columns hold words"),
        ({"anna": ["a", 1], "ben": ["b", "b"]}, "column 'anna' holds 1, other columns hold words"),
        ({"cat": ["0", "1"], "dog": ["1", "0"]}, "nothing but the texts 0 and 1 may be a matrix or votes"),
    ],
)
def test_a_frame_that_may_be_a_matrix_is_not_taken_for_votes(columns: dict[str, list[Any]], says: str) -> None:
    values = np.array(list(columns.values()), dtype=object).T
    with pytest.raises(UserError, match=says):
        small(epochs=1).fit(np.eye(2), Frame(values, list(columns)))


def test_a_frame_with_sets_for_votes_is_told_of() -> None:
    frame = Frame(np.array([["a|b", "b"], ["b", "a"]], dtype=object), ["anna", "ben"])
    with pytest.warns(UserWarning, match=r"'a\|b' is read as one label"):
        assert read_candidates(frame)[1].tolist() == ["a", "a|b", "b"]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_data_frames(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    frames = importlib.import_module(library)
    x, _, sets = problem(30)
    plain = small(epochs=1).fit(x, sets)
    inputs = frames.DataFrame({f"f{j}": x[:, j] for j in range(5)})
    matrix = frames.DataFrame({name: sets[:, j] for j, name in enumerate(("ant", "bee", "cow"))})
    clf = small(epochs=1).fit(inputs, matrix)
    assert clf.classes_.tolist() == ["ant", "bee", "cow"]
    assert clf.feature_names_in_.tolist() == [f"f{j}" for j in range(5)]
    np.testing.assert_array_equal(clf.predict_proba(inputs), plain.predict_proba(x))
    lists = frames.Series([[f"c{j}" for j in np.flatnonzero(row)] for row in sets])
    assert small(epochs=1).fit(inputs, lists).classes_.tolist() == ["c0", "c1", "c2"]
    votes = frames.DataFrame({"anna": ["a", "b", "c"] * 10, "ben": ["a", None, "b"] * 10})
    assert small(epochs=1).fit(inputs, votes).transduction_[1] == "b"
    labels = frames.Series(["b", "a", "c"] * 10)
    assert small(epochs=1).fit(inputs, labels).classes_.tolist() == ["a", "b", "c"]


# --- images -------------------------------------------------------------------------------------------------------


def test_images_of_every_type_agree() -> None:
    x, sets = images()
    expected = small().fit(x, sets).predict_proba(x)
    for form in (x[..., None], x.astype(np.int64), x.astype(np.float32), x / 255, x.tolist(), torch.from_numpy(x)):
        clf = small().fit(form, sets)
        np.testing.assert_array_equal(clf.predict_proba(form), expected)
        assert not hasattr(clf, "n_features_in_")
    colour = np.repeat(x[..., None], 3, axis=3)
    assert small(network="small-cnn", network_settings=None).fit(colour, sets).predict(colour).shape == (24,)


def test_the_meaning_of_pixels_is_decided_in_fit() -> None:
    x, sets = images()
    floats = x.astype(float)
    clf = small().fit(floats, sets)
    dark = floats.copy()
    dark[0] = np.linspace(0, 1, 64).reshape(8, 8)  # alone it would look like an image in 0..1
    np.testing.assert_allclose(clf.predict_proba(dark[:1]), clf.predict_proba(dark)[:1], rtol=1e-5)
    unit = small().fit(x / 255, sets)
    np.testing.assert_array_equal(unit.predict_proba(x), unit.predict_proba(x / 255))
    with pytest.raises(UserError, match="divide them by 255"):
        unit.predict(floats)
    with pytest.raises(UserError, match="multiply them by 255"):
        small().fit(x, sets).predict(x / 255)
    binary = small(epochs=1).fit(x > 100, sets)
    assert binary.predict(x > 100).shape == (24,)


@pytest.mark.parametrize(("scale", "warned"), [(1, 1), (1 / 16, 0), (15, 0)])
def test_images_with_values_from_0_to_16_are_warned_of(scale: float, warned: int) -> None:
    digits = load_digits()
    sets = uniform(digits.target[:100], classes=10, q=0.3, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PartialLabelClassifier("cc", epochs=1).fit(digits.images[:100] * scale, sets)
    assert sum("brightest pixel of all training images is 16 of 255" in str(w.message) for w in caught) == warned


def test_fit_on_images_after_features() -> None:
    features, _, sets = problem(24, classes=2)
    clf = small(epochs=1).fit(features, sets)
    assert clf.n_features_in_ == 5
    x, sets = images()
    assert not hasattr(clf.fit(x, sets), "n_features_in_")
    with pytest.raises(UserError, match="trained on images"):
        clf.predict(features)
    with pytest.raises(UserError, match="images of 8 x 7 with 1 channel; trained on 8 x 8 with 1 channel"):
        clf.predict(x[:, :, :7])
    with pytest.raises(UserError, match="dim 3"):
        small(epochs=1).fit(features, sets).predict(x)


# --- wrong input --------------------------------------------------------------------------------------------------

X4 = np.arange(8.0).reshape(4, 2)
SETS4 = np.array([[1, 0], [1, 1], [0, 1], [1, 1]])


@pytest.mark.parametrize(
    ("x", "candidates", "message"),
    [
        (X4, None, "requires y"),
        (X4, SETS4[:3], "4 examples, but candidates has 3"),
        (X4, SETS4 * 0, "candidate set of example 0 is empty"),
        (X4, [[1], [], [2], [1]], "candidate set of example 1 is empty"),
        (X4, SETS4 * 3, "only 0 and 1 are allowed.*lists or sets"),
        (X4, SETS4.tolist(), "may be a matrix or label lists"),
        (X4, [[1], 2, [3], [1]], "example 1 is 2, but others are collections"),
        (X4, [["a"], ["b", None], ["a"], ["b"]], "example 1 has a missing label"),
        (X4, [[float("nan")], ["b"], ["a"], ["b"]], "example 0 has a missing label"),
        (X4, [[[1]], [[2]], [[1]], [[2]]], "example 0 has a label that is not hashable"),
        (X4, ["a", None, "b", "a"], "example 1 has a missing label"),
        (X4, [["a"], ["b", ""], ["a"], ["b"]], "example 1 has an empty string as a label"),
        (X4, [0.0, np.nan, 1.0, 1.0], "NaN or infinity at example 1"),
        (X4, [0.1, 0.2, 1.0, 1.0], "continuous"),
        (X4, "abab", "got str"),
        (X4, 7, "got int"),
        (X4, [], "no examples"),
        (X4, np.array([]), "no examples"),
        (X4, np.zeros((4, 2, 2)), r"got shape \(4, 2, 2\)"),
        (X4[0], SETS4, "2D array"),
        (X4[:0], SETS4[:0], "0 sample"),
        ([[1, 2], [3]], [0, 1], "inhomogeneous"),
        (np.array([["a", "b"]] * 4), SETS4, "not compatible with arrays of bytes/strings"),
        (np.where(X4 == 3, np.nan, X4), SETS4, "NaN in row 1, column 1"),
        (np.full((4, 2, 2), -1.0), SETS4, r"must lie in 0\.\.255"),
        (np.full((4, 2, 2), 300), SETS4, r"must lie in 0\.\.255"),
        (np.full((4, 2, 2), np.nan), SETS4, "NaN in row 0"),
        (np.full((4, 2, 2), 1j), SETS4, "complex"),
        (np.full((4, 2, 2), "a"), SETS4, "expected numbers"),
        (np.zeros((4, 0, 2)), SETS4, "size 0"),
        (np.zeros((4, 2, 2, 2, 2)), SETS4, "dim 5"),
    ],
)
def test_wrong_data_is_said_in_one_line(x: Any, candidates: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        small(epochs=1).fit(x, candidates)
    assert "\n" not in str(caught.value)


def test_a_stage_that_never_ends_is_warned_of() -> None:
    x, sets = np.eye(4), np.ones((4, 2), dtype=bool)
    with pytest.warns(UserWarning, match=r"method.warm_up=20 with train.epochs=1: pop never gets past that stage"):
        PartialLabelClassifier("pop", epochs=1).fit(x, sets)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PartialLabelClassifier("pop", epochs=1, method_settings={"warm_up": 0}).fit(x, sets)


ONE_NETWORK = torch.nn.Linear(2, 2)


class Changed(torch.nn.Linear):
    """A network that does something wrong with its outputs."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(2, 2)
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(super().forward(x))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"method": "crosl"}, "unknown method 'crosl'.*did you mean 'crosel'"),
        ({"epochs": 0}, "train.epochs"),
        ({"lr": -1}, "train.lr"),
        ({"network": "mlpp"}, "unknown network"),
        ({"network": 3}, "expected a name or a factory.*got int"),
        ({"network": torch.nn.Linear(2, 2)}, "expected a name or a factory"),
        ({"network": lambda classes, shape: 5}, "the factory returned int"),
        ({"network": lambda classes, shape: torch.nn.Linear(2, 7)}, "there are 2 classes"),
        (
            {"network": lambda k, size: torch.nn.Linear(2, 2)},
            r"factory\(classes=k, shape=shape\), which it does not take",
        ),
        (
            {"network": lambda classes, shape: torch.nn.Linear(2, 2).requires_grad_(False)},
            "no weights that can be trained",
        ),
        ({"network": lambda classes, shape: ONE_NETWORK, "method": "crosel"}, "the same network twice"),
        ({"network": lambda classes, shape: Changed(lambda out: (out, out))}, "does not return a tensor.*got tuple"),
        ({"network": lambda classes, shape: Changed(torch.Tensor.detach)}, "do not depend on weights"),
        ({"device": "tpu"}, "unknown device"),
        ({"random_state": -1}, "seed"),
        ({"random_state": "x"}, "random_state"),
        ({"method_settings": {"gamma": 1}}, "unknown setting 'method.gamma'"),
        ({"method_settings": [1]}, "method_settings: expected a dict"),
        ({"method_settings": {"name": "cc"}}, "method_settings: the name"),
        ({"train_settings": {"epochs": 3}}, "'epochs' is a separate parameter of the classifier"),
        ({"batch_size": 1}, "batch normalisation"),
        ({"classes": ["a", "a"]}, "at least one label, each once"),
        ({"classes": [["a"], ["b"]]}, "hashable"),
        ({"classes": ["a", "b", "c"]}, "2 columns for 3 classes"),
    ],
)
def test_wrong_parameters_are_said_in_one_line(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        small(**params).fit(X4, SETS4)
    assert "\n" not in str(caught.value)


def test_more_wrong_calls() -> None:
    with pytest.raises(UserError, match="given twice"):
        small().fit(X4, SETS4, candidates=SETS4)
    with pytest.raises(UserError, match="'gamma' is a separate parameter of the classifier"):
        small_crosel(method_settings={"gamma": 0.5}).fit(X4, SETS4)
    with pytest.raises(UserError, match="not in `classes`"):
        small(classes=["a"]).fit(X4, ["a", "b", "a", "a"])
    with pytest.raises(UserError, match="2 columns for 3 classes"):
        small(classes=[1, 2, 3]).fit(X4, Frame(SETS4, ["a", "b"]))
    clf = small(epochs=1).fit(X4, SETS4)
    with pytest.raises(UserError, match="but y has 3"):
        clf.score(X4, [0, 1, 0])
    with pytest.raises(UserError, match="3 columns for 2 classes"):
        clf.score(X4, np.ones((4, 3)))


def test_a_score_of_labels_that_are_no_classes_is_warned_of() -> None:
    """Names in training, numbers in the test: a score of 0 would look like a bad model."""
    clf = small(epochs=1).fit(X4, [["a"], ["a", "b"], ["b"], ["b"]])
    for y in ([0, 1, 0, 1], np.array([0, 1, 0, 1]), [[0], [0, 1], [1], [1]]):
        with pytest.warns(UserWarning, match="no label is a class \\(0 is none; 'a' is one\\), so the score is 0"):
            assert clf.score(X4, y) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clf.score(X4, ["a", "c", "c", "c"])


# --- scikit-learn's tools -----------------------------------------------------------------------------------------


def test_cross_validation_pipeline_and_search() -> None:
    x, y, sets = problem(90)
    pipeline = make_pipeline(StandardScaler(), small(epochs=6))
    assert cross_val_score(pipeline, x, sets, cv=3, error_score="raise").mean() > 0.8
    assert cross_val_score(pipeline, x, y, cv=3, error_score="raise").mean() > 0.8
    search = GridSearchCV(small_crosel(epochs=3), {"gamma": np.array([0.5, 0.9]), "bank_length": np.array([2])}, cv=2)
    search.fit(x, sets)
    assert search.best_params_["gamma"] in (0.5, 0.9)
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


def test_shown_in_a_notebook_without_warnings(recwarn: pytest.WarningsRecorder) -> None:
    for estimator in (small(), small_crosel()):
        assert type(estimator).__name__ in estimator._repr_html_()
    assert [str(warning.message) for warning in recwarn] == []


def test_score_with_weights() -> None:
    x, y, sets = problem(30)
    clf = small(epochs=1).fit(x, sets)
    right = clf.predict(x) == y
    assert clf.score(x, y, sample_weight=right + 1e-9) == pytest.approx(1)
    column = y[:, None]
    with pytest.warns(UserWarning, match="column-vector"):
        assert clf.score(x, column) == right.mean()


def test_sets_written_as_in_a_csv_are_told_of() -> None:
    x, _, _ = problem(4)
    with pytest.warns(UserWarning, match=r"'cat\|dog' is read as one label; if it is a set, split it"):
        clf = small(epochs=1).fit(x, ["cat|dog", "dog", "cat", "dog"])
    assert clf.classes_.tolist() == ["cat", "cat|dog", "dog"]


def test_random_state() -> None:
    x, _, sets = problem(30)

    def run(state: Any) -> Any:
        return small(epochs=1, random_state=state).fit(x, sets).predict_proba(x)

    np.testing.assert_array_equal(run(3), run(np.int64(3)))
    np.testing.assert_array_equal(run(np.random.RandomState(1)), run(np.random.RandomState(1)))
    np.testing.assert_array_equal(run(np.random.default_rng(1)), run(np.random.default_rng(1)))
    assert not np.array_equal(run(3), run(4))
    assert not np.array_equal(run(None), run(None))


def test_own_network_and_one_network() -> None:
    x, y, sets = problem(60)
    clf = small("proden", network=tiny_network, epochs=8).fit(x, sets)
    assert clf.score(x, y) > 0.8
    single = small_crosel(networks=1, warmup=1, epochs=3).fit(x, sets)
    assert single.selected_.shape == (60,)
    assert single.history_[0]["phase"] == "warm-up"


def test_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    small(epochs=2).fit(X4, SETS4)
    assert capsys.readouterr().err == ""
    small(epochs=2, verbose=True).fit(X4, SETS4)
    assert "epoch 2/2" in capsys.readouterr().err


# --- keeping ------------------------------------------------------------------------------------------------------


def test_pickle_holds_no_torch_objects() -> None:
    x, _, sets = problem(30)
    content = pickle.dumps(small_crosel(epochs=2, network=tiny_network).fit(x, sets))
    names = [str(argument) for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)]
    assert not [name for name in names if name.split(".")[0] == "torch"]
    np.testing.assert_array_equal(pickle.loads(content).predict(x).shape, (30,))


def test_saved_images_and_random_state(tmp_path: Path) -> None:
    x, sets = images()
    clf = small_crosel(random_state=np.random.RandomState(5)).fit(x / 255, sets)
    clf.save(str(tmp_path / "m.safetensors"))
    again = CroSelClassifier.load(tmp_path / "m.safetensors", device="cpu")
    np.testing.assert_array_equal(again.predict_proba(x / 255), clf.predict_proba(x / 255))
    assert isinstance(again.random_state, int)
    np.testing.assert_array_equal(again.selected_, clf.selected_)
    refitted = clone(again).fit(x / 255, sets)
    np.testing.assert_array_equal(refitted.predict_proba(x / 255), clf.predict_proba(x / 255))


def test_as_a_module_for_programs_without_crosel(tmp_path: Path) -> None:
    """One program for all kinds: what it imports takes longer than all that it computes."""
    expected = {kind: export(kind, tmp_path) for kind in ("features", "images")}
    program = (
        "import sys, numpy, torch\n"
        "for folder in sys.argv[1:]:\n"
        "    p = torch.export.load(folder + '/m.pt2').module()(torch.from_numpy(numpy.load(folder + '/x.npy')))\n"
        "    numpy.save(folder + '/p.npy', p.numpy())\n"
        "assert not any(name.startswith('crosel') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, *(str(tmp_path / kind) for kind in expected)], check=True)
    for kind, p in expected.items():
        np.testing.assert_allclose(np.load(tmp_path / kind / "p.npy"), p, atol=1e-6, err_msg=kind)


def export(kind: str, folder: Path) -> Any:
    """Write a module m.pt2 and three examples x.npy; return what it should say of these."""
    arrays = small_arrays(images=kind != "features")
    clf = CroSelClassifier(epochs=2, batch_size=32, folds=0).fit(arrays["x"][:64], arrays["candidates"][:64])
    x = torch.from_numpy(arrays["x_test"][:5])
    x = x.float() if kind == "features" else x[:, None]
    (folder / kind).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        exported = torch.export.export(clf.to_torch(), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
        torch.export.save(exported, folder / kind / "m.pt2")
    np.testing.assert_allclose(clf.to_torch()(x).numpy(), clf.predict_proba(arrays["x_test"][:5]), atol=1e-6)
    np.save(folder / kind / "x.npy", x[:3].numpy())
    return clf.predict_proba(arrays["x_test"][:3])


@pytest.mark.parametrize("kind", ["features", "grey", "colour", "floats"])
@pytest.mark.parametrize("method", ["crosel", "pico"])
def test_a_module_gives_what_predict_proba_does(kind: str, method: str) -> None:
    rng = np.random.default_rng(0)
    x = {
        "features": rng.normal(3, 10, (24, 5)), "grey": rng.integers(0, 256, (24, 12, 12), np.uint8),
        "colour": rng.integers(0, 256, (24, 12, 14, 3), np.uint8), "floats": rng.random((24, 12, 12, 3)),
    }[kind]  # fmt: skip
    sets = np.eye(3, dtype=bool)[rng.integers(0, 3, 24)] | (rng.random((24, 3)) < 0.3)
    averaged = {"ema_decay": 0.9}
    clf = PartialLabelClassifier(method, epochs=2, batch_size=8, train_settings=averaged, device="cpu").fit(x, sets)
    given = torch.from_numpy(x).float()
    if kind != "features":
        pixels = np.rint(x * 255).astype(np.uint8) if kind == "floats" else x
        given = torch.from_numpy(pixels[..., None] if kind == "grey" else pixels).permute(0, 3, 1, 2)
    module = clf.to_torch()
    np.testing.assert_allclose(module(given).numpy(), clf.predict_proba(x), rtol=0, atol=1e-6)
    if kind != "features":
        with pytest.raises(TypeError, match="expected images as bytes"):
            module(given.float())


def test_a_module_is_not_the_classifier_itself() -> None:
    arrays = small_arrays(images=False)
    clf = CroSelClassifier(epochs=2, batch_size=32).fit(arrays["x"], arrays["candidates"])
    before = clf.predict_proba(arrays["x_test"])
    for parameter in clf.to_torch().parameters():
        parameter.data.zero_()
    np.testing.assert_array_equal(clf.predict_proba(arrays["x_test"]), before)
    with pytest.raises(NotFittedError):
        CroSelClassifier().to_torch()


def test_load_imports_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _, sets = problem(30)
    (tmp_path / "stranger.py").write_text(
        "import torch\ndef make(classes, shape):\n    return torch.nn.Linear(shape[0], classes)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    named = small(epochs=1, network="stranger:make").fit(x, sets)
    passed = small(epochs=1, network=tiny_network).fit(x, sets)
    monkeypatch.delitem(sys.modules, "stranger")
    for clf, factory in ((named, lambda classes, shape: torch.nn.Linear(shape[0], classes)), (passed, tiny_network)):
        clf.save(tmp_path / "m")
        with pytest.raises(UserError, match="pass it: load"):
            PartialLabelClassifier.load(tmp_path / "m")
        again = PartialLabelClassifier.load(tmp_path / "m", network=factory)
        np.testing.assert_array_equal(again.predict_proba(x), clf.predict_proba(x))
    assert "stranger" not in sys.modules
    with pytest.raises(UserError, match=r"not fit the networks: they have networks\.0\.1\.bias, .* your own network"):
        PartialLabelClassifier.load(tmp_path / "m", network=lambda classes, shape: torch.nn.Linear(5, 3)).predict(x)


def test_load_refuses_what_it_cannot_use(tmp_path: Path) -> None:
    x, _, sets = problem(30)
    small(epochs=1).fit(x, sets).save(tmp_path / "m")
    with pytest.raises(UserError, match="holds a PartialLabelClassifier, not a CroSelClassifier"):
        CroSelClassifier.load(tmp_path / "m")
    with pytest.raises(UserError, match="no such file"):
        PartialLabelClassifier.load(tmp_path / "other")
    content = (tmp_path / "m").read_bytes()
    for damaged in (b"", content[:100], content[:-10], safetensors.torch.save({"a": torch.zeros(1)})):
        (tmp_path / "d").write_bytes(damaged)
        with pytest.raises(UserError, match="not a saved crosel model"):
            PartialLabelClassifier.load(tmp_path / "d")
    tensors = safetensors.torch.load(content)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["crosel"])
    for change, message in (
        ({"format": 99}, "another version"),
        ({"params": {}}, "damaged, or made by another version"),
        ({"label_error": {"outside": [2, 0, 1]}}, "damaged, or made by another version"),
        ({"class": "Exploit"}, "holds a Exploit"),
    ):
        metadata = {"crosel": json.dumps({**header, **change})}
        (tmp_path / "d").write_bytes(safetensors.torch.save(tensors, metadata=metadata))
        with pytest.raises(UserError, match=message):
            PartialLabelClassifier.load(tmp_path / "d")


def test_labels_that_cannot_be_saved(tmp_path: Path) -> None:
    clf = small(epochs=1).fit(X4, [frozenset("ab"), frozenset("a"), frozenset("a"), frozenset("b")])
    assert clf.classes_.tolist() == ["a", "b"]  # frozen sets are sets of labels
    clf = small(epochs=1).fit(X4, [[frozenset("a")], [frozenset("b")]] * 2)
    with pytest.raises(UserError, match="labels of type frozenset cannot be saved"):
        clf.save(tmp_path / "m")
    steps = {"schedule": "step", "milestones": (0.5,)}
    with pytest.raises(UserError, match="cannot be saved as JSON"):
        small(epochs=1, train_settings=steps, verbose=SimpleNamespace()).fit(X4, SETS4).save(tmp_path / "m")


# --- history ------------------------------------------------------------------------------------------------------


class Axes:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def plot(self, x: Any, y: Any, label: str) -> None:
        assert len(x) == len(y)
        self.lines.append(label)

    def axvline(self, x: float, **style: Any) -> None:
        self.lines.append(f"line at {x}")

    def set_xlabel(self, text: str) -> None: ...
    def legend(self) -> None: ...


def test_history(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"epoch": 1, "phase": "warm-up", "loss": 2.0},
        {"epoch": 2, "phase": "selection", "loss": 1.0, "loss_comix": 0.5, "selection_ratio": 0.1},
    ]
    history = History(rows)
    assert history.to_dict()["loss_comix"] == [None, 0.5]
    assert history.columns == ["epoch", "phase", "loss", "loss_comix", "selection_ratio"]
    assert history.plot(ax=Axes()).lines == ["loss", "loss comix", "line at 1.5"]
    assert history.plot_selection(ax=Axes()).lines[0] == "selection ratio"
    with pytest.raises(UserError, match="no column 'x'"):
        history.plot(["x"], ax=Axes())
    assert pickle.loads(pickle.dumps(history)) == history
    monkeypatch.setattr(importlib, "import_module", _no_matplotlib)
    with pytest.raises(ImportError, match=r"pip install 'crosel\[plots\]'"):
        history.plot()
    axes = Axes()
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace(subplots=lambda: (None, axes)))
    assert history.plot() is axes


def _no_matplotlib(name: str) -> Any:
    raise ImportError(name)


def test_a_shell_completes_the_estimators_before_torch_is_loaded() -> None:
    code = "import sys, crosel; print(set(crosel.__all__) <= set(dir(crosel)), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False"]


def test_a_matrix_of_fractions_has_weights() -> None:
    rng = np.random.default_rng(0)
    x, sets = rng.normal(size=(40, 4)), rng.random((40, 3)) < 0.6
    sets[np.arange(40), rng.integers(3, size=40)] = True
    weights = sets * rng.uniform(0.1, 0.9, sets.shape)

    def fitted(y: Any) -> PartialLabelClassifier:
        return PartialLabelClassifier("cc", epochs=3, folds=0).fit(x, y)

    plain, weighted = fitted(sets), fitted(weights)
    assert not np.allclose(plain.predict_proba(x), weighted.predict_proba(x))
    for same in (torch.from_numpy(weights), csr_matrix(weights)):
        assert np.allclose(fitted(same).predict_proba(x), weighted.predict_proba(x))
    assert weighted.score(x, weights) == weighted.score(x, sets)
    off = PartialLabelClassifier("cc", epochs=3, folds=0, train_settings={"candidate_weights": False})
    assert np.allclose(off.fit(x, weights).predict_proba(x), plain.predict_proba(x))


def test_threads_with_one_seed_give_the_same_as_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch draws starting weights from one generator for the whole process."""
    draw = torch.nn.Linear.reset_parameters

    def slowly(layer: torch.nn.Linear) -> None:
        time.sleep(0.005)  # others have their turn
        draw(layer)

    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", slowly)
    rng = np.random.default_rng(0)
    x, sets = rng.normal(size=(40, 4)), np.eye(3, dtype=bool)[rng.integers(0, 3, 40)]

    def fit(_: int) -> Any:
        return PartialLabelClassifier("cc", epochs=1, random_state=0).fit(x, sets).predict_proba(x)

    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(found, fit(0)) for found in pool.map(fit, range(8)))


def test_sets_that_run_backwards() -> None:
    x, sets = np.random.default_rng(0).normal(size=(30, 4)), np.eye(3, dtype=bool)[np.arange(30) % 3]
    model = PartialLabelClassifier("cc", epochs=1, random_state=0)
    straight = model.fit(x, sets[::-1].copy()).predict_proba(x)
    assert np.array_equal(model.fit(x, sets[::-1]).predict_proba(x), straight)
