"""scikit-learn estimators: `fit` on candidate sets, then `predict`, or read the training set's labels.

    clf = CroSelClassifier(epochs=50).fit(X, candidates)
    clf.predict(X_new), clf.transduction_, clf.confidence_, clf.selected_, clf.flags_, clf.history_

Training is the package's one loop. This file only converts inputs and results.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.metadata_routing import UNUSED
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from crosel.config import RunConfig, build_config, check_config, with_backbone_defaults
from crosel.data.dataset import as_inputs, make_dataset
from crosel.data.embeddings import Encoder
from crosel.errors import UserError
from crosel.estimator.inputs import (
    UserTypeError,
    are_texts,
    check_settings,
    class_indices,
    decode_labels,
    embedded,
    encode_labels,
    inside,
    is_image_like,
    pixel_kind,
    read_candidates,
    split_weights,
    to_host,
    to_python,
    to_uint8,
)
from crosel.estimator.model import (
    OWN_NETWORK,
    FittedModel,
    History,
    read_model,
    user_network,
    write_model,
)
from crosel.methods.base import import_method
from crosel.nn.factory import UserFactory
from crosel.presets import read_preset
from crosel.runs.folds import out_of_sample
from crosel.runs.label_error import LabelError
from crosel.runs.result import Result
from crosel.training.build import build_session, check_batch_size, open_encoder, resolve
from crosel.training.devices import advise_while_building, pick_device
from crosel.training.trainer import fit as train
from crosel.utils.console import Console, NotebookConsole, in_notebook
from crosel.utils.text import counted

Self = TypeVar("Self", bound="PartialLabelClassifier")


@dataclass(eq=False, repr=False)
class PartialLabelClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Classifier that learns from sets of candidate labels, with any of crosel's methods.

    Parameters
    ----------
    method : name of the method; `crosel info` lists them. Or your own, "module:Class".
    preset : settings that come with crosel, such as "own/features"; `crosel info` lists them. What is given beside it
        counts more.
    epochs, batch_size : passes over the training set; examples in a step. None: the preset's, or 50 and 64.
    lr : learning rate at the start; None: the default of `crosel train`, 0.05, or 0.01 on a pretrained backbone.
    network : "auto", "mlp", "small-cnn", "resnet-18", "wrn-DEPTH-WIDTH", a pretrained backbone ("timm/NAME" for images,
        "text/NAME" for texts), "module:factory", or a factory of your own:
        `factory(classes=k, shape=shape)`, with shape (d,) or (channels, height, width), returns a torch module.
    method_settings, train_settings, augment_settings, network_settings : dicts of further settings, named as in
        `--set`: `train_settings={"weight_decay": 5e-4}`, `augment_settings={"flip": False}`.
    classes : all labels, in order, if the data do not show them: names for the columns of a matrix, or labels that
        happen to be in no set.
    folds : judge each training label by networks that did not train on it, one for each of so many parts of the
        data; 0: no; None: 5 for features, 0 for images. The classifier itself is the same.
    random_state : int, None or RandomState; decides starting weights and everything else that is random.
    device : "auto", "cpu" or "cuda".
    verbose : True shows progress: live in a notebook, elsewhere a line per epoch on standard error. None, the default,
        shows it in notebooks only.

    Attributes
    ----------
    classes_ : all labels, sorted if they can be compared. `predict_proba` has one column for each.
    transduction_ : the training set's labels, each the most probable one of its candidate set.
    confidence_ : the chance that each is right, by networks that did not train on it (`folds`); without folds the
        probability that the classifier itself gives it, among all classes.
    label_error_ : estimates of the error rate that need no true labels, with intervals: `.labels` of `transduction_`,
        `.answers` of predictions for new data, `.outside`; None without folds.
    selected_ : bool, selected by every network; None for methods that do not select.
    flags_ : "" or "outside" (all networks are sure of a label that is not in the set), "disputed" (they differ),
        "unsure" (no network selected it; for methods that do not select: confidence below 0.5).
    history_ : one dict per epoch; `history_.to_dict()`, `history_.plot()`.
    n_features_in_, feature_names_in_ : for features, as in all of scikit-learn.

    There is no `partial_fit`: the methods look at the whole training set after every epoch.
    """

    method: str = "crosel"
    _: KW_ONLY
    preset: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    network: str | UserFactory = "auto"
    method_settings: Mapping[str, Any] | None = None
    train_settings: Mapping[str, Any] | None = None
    augment_settings: Mapping[str, Any] | None = None
    network_settings: Mapping[str, Any] | None = None
    classes: Any = None
    folds: int | None = None
    random_state: int | np.random.RandomState | None = 0
    device: str = "auto"
    verbose: bool | None = None

    # `candidates` is another name for y, not metadata that scikit-learn should route.
    __metadata_request__fit = {"candidates": UNUSED}  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name == "partial_fit":  # for scikit-learn's hasattr; users see the reason
            raise AttributeError(
                "partial_fit is not available: the methods use the whole training set after every epoch; "
                "call fit with all data"
            )
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # --- training ---------------------------------------------------------------------------------------------

    def fit(self: Self, X: Any, y: Any = None, *, candidates: Any = None) -> Self:
        """Train on examples with candidate sets.

        X : features [n, d], or images [n, h, w] or [n, h, w, c]: bytes, or floats in 0..1 or 0..255 (`fit`
            decides which of the two, for `predict` as well). numpy, lists, tensors, pandas or polars frames. For a
            network "text/NAME", a list of texts.
        y : candidate sets, also by the name `candidates`: a bool or 0/1 matrix [n, k], a frame of that kind with
            the classes as column names, a matrix or frame of fractions that say how likely each candidate is (0: it
            is none), a frame of words with a column for each annotator (the set is what anyone
            chose; empty cells are no votes), or a list of label lists or sets. A one-dimensional list of labels
            means sets of one.
        """
        if y is not None and candidates is not None:
            raise UserError("candidate sets were given twice, as y and as candidates; give them once")
        config, device = self._config(), pick_device(str(self.device))
        encoder = open_encoder(config, device)
        x, pixels = self._training_inputs(X, encoder)
        given, weights = split_weights(y if candidates is None else candidates)
        sets, classes = read_candidates(given, self.classes)
        names = [str(label) for label in classes.tolist()]
        data = make_dataset(x, sets, classes=names, weights=weights, place="fit")
        factory = None if isinstance(self.network, str) else self.network
        if encoder is not None:
            data = replace(data, embedded_by=(encoder.name, encoder.digest))
        config = resolve(config, data, device)
        with advise_while_building(device, config.train.data_on):
            network = user_network(factory, len(classes), data.shape)
            # Whoever names code in a Python program could as well have called it.
            session = build_session(config, data, device, network, trust_code=True)
        check_batch_size(session)
        for line in (*data.remarks(), *config.remarks()):
            warnings.warn(line, stacklevel=2)
        with self._console() as console:
            train(session, (console,))
            judged = out_of_sample(session, make_network=network, trust_code=True, console=console)
        self.classes_ = classes
        self.history_ = History(session.progress.rows)
        result = Result.of(session, out_of_sample=judged)
        self.label_error_ = result.error
        self.transduction_ = self.classes_[result.labels]
        self.confidence_ = result.confidence
        self.selected_ = None if result.networks is None else np.asarray(result.networks.selected.all(axis=0))
        self.flags_ = np.array(result.flag_names())
        self._model = FittedModel.of(session, pixels, factory, encoder)
        for line in result.warnings():  # last, so that whoever turns warnings into errors still has a classifier
            warnings.warn(line, stacklevel=2)
        return self

    def _console(self) -> Console:
        if self.verbose is not False and in_notebook():
            return NotebookConsole()
        return Console(quiet=not self.verbose)

    def _training_inputs(self, X: Any, encoder: Encoder | None) -> tuple[NDArray[Any], str | None]:
        X = to_host(X)
        if encoder is None and not is_image_like(X):
            return self._features(X, reset=True), None
        for stale in ("n_features_in_", "feature_names_in_"):  # from an earlier fit on features
            if hasattr(self, stale):
                delattr(self, stale)
        kind = pixel_kind(X) if is_image_like(X) else None
        if encoder is not None:
            return embedded(X, encoder, kind), kind
        assert kind is not None
        return to_uint8(X, kind), kind

    def _features(self, X: Any, reset: bool) -> NDArray[Any]:
        """scikit-learn's own checks and messages, in one line."""
        try:
            x = validate_data(self, X, reset=reset, dtype="numeric", ensure_all_finite=False)
        except (TypeError, ValueError) as error:
            if are_texts(X):
                remedy = "choose a network for texts: network='text/all-MiniLM-L6-v2' (pip install 'crosel[text]')"
                raise UserError(f"X: these are texts; {remedy}") from None
            kind = UserTypeError if isinstance(error, TypeError) else UserError
            raise kind(" ".join(str(error).split())) from None
        return np.asarray(x)

    def _config(self) -> RunConfig:
        if ":" in str(self.method):  # whoever names code in a Python program could as well have called it
            import_method(str(self.method))
        train_values = check_settings("train_settings", self.train_settings)
        for name in ("epochs", "batch_size", "lr", "folds"):
            if name in train_values:
                raise UserError(f"train_settings: '{name}' is a separate parameter of the classifier")
        own = {"epochs": self.epochs, "batch_size": self.batch_size, "lr": self.lr, "folds": self.folds}
        train_values |= {name: value for name, value in own.items() if value is not None}
        network = check_settings("network_settings", self.network_settings)
        if not isinstance(self.network, str) and (not callable(self.network) or isinstance(self.network, nn.Module)):
            raise UserError(
                "network: expected a name or a factory, called as factory(classes=k, shape=shape) once for "
                f"each network, got {type(self.network).__name__}"
            )
        tree = {
            "source": "memory", "seed": self._seed(), "method": self._method_values(), "train": train_values,
            "augment": check_settings("augment_settings", self.augment_settings),
            "network": {**network, "name": self.network if isinstance(self.network, str) else OWN_NETWORK},
        }  # fmt: skip
        if self.preset is not None:
            return self._config_of_preset(str(self.preset), tree)
        return check_config(
            with_backbone_defaults(to_python(tree)), warn=lambda line: warnings.warn(line, FutureWarning, stacklevel=7)
        )

    def _config_of_preset(self, preset: str, tree: dict[str, Any]) -> RunConfig:
        if self.network == "auto":  # the preset's, if it has one
            tree["network"].pop("name")
        named = read_preset(preset).get("method", {}).get("name", "crosel")
        if self.method == "crosel" and named != "crosel":  # the default, perhaps; another takes the preset's settings
            raise UserError(f"preset '{preset}' is for method '{named}', not '{self.method}'; give method='{named}'")
        return build_config(preset=preset, values=to_python(tree)).model_copy(update={"candidates": None})

    def _method_values(self) -> dict[str, Any]:
        values = check_settings("method_settings", self.method_settings)
        return {**values, "name": self.method}

    def _seed(self) -> int:
        """An int is the seed itself; anything else gives a new seed for every fit."""
        state = self.random_state
        if isinstance(state, int | np.integer):
            return int(state)
        if isinstance(state, np.random.Generator):
            return int(state.integers(2**31))
        try:
            return int(check_random_state(state).randint(2**31 - 1))
        except ValueError as error:
            raise UserError(f"random_state: {error}") from None

    # --- prediction -------------------------------------------------------------------------------------------

    def predict_proba(self, X: Any) -> NDArray[np.float32]:
        """Class probabilities [n, k], columns in the order of `classes_`."""
        check_is_fitted(self, "classes_")
        X = to_host(X)
        if self._model.on_backbone:
            kind = self._model.pixels if is_image_like(X) else None
            x = embedded(X, self._model.encoder(str(self.device)), kind)
        elif self._model.pixels is None:
            x = as_inputs(self._features(X, reset=False), "X")
        else:
            if not is_image_like(X):
                raise UserError("X: the classifier was trained on images; pass images [n, h, w] or [n, h, w, c]")
            x = as_inputs(to_uint8(X, self._model.pixels), "X")
            if x.shape[1:] != self._model.shape:
                raise UserError(f"X: images of {_size(x.shape[1:])}; trained on {_size(self._model.shape)}")
        return self._model.probabilities(x, str(self.device))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable label of each example, in the type of the labels passed to `fit`."""
        p = self.predict_proba(X)
        labels: NDArray[Any] = self.classes_[p.argmax(axis=1)]
        return labels

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy if y holds labels; if it holds candidate sets, the share of predictions inside them."""
        hits = inside(self.predict(X).tolist(), y, self.classes_)
        return float(np.average(hits, weights=sample_weight))

    # --- keeping ----------------------------------------------------------------------------------------------

    def to_torch(self) -> nn.Module:
        """The trained networks as one torch module, for `torch.export` and programs without crosel.

        It takes features, float [n, d], or images as bytes, uint8 [n, channels, height, width], and gives what
        `predict_proba` does: columns in the order of `classes_`. On a pretrained backbone, it takes embeddings.
        """
        check_is_fitted(self, "classes_")
        return self._model.module()

    def save(self, path: str | Path) -> None:
        """Write everything to one safetensors file. It is no pickle: loading it runs no code from the file."""
        check_is_fitted(self, "classes_")
        params = self.get_params(deep=False)
        if not isinstance(self.network, str):
            params["network"] = None
        if not isinstance(self.random_state, int | np.integer | None):
            params["random_state"] = self._model.config["seed"]
        if self.classes is not None:
            params["classes"] = encode_labels(self.classes_)
        names, codes = np.unique(self.flags_, return_inverse=True)
        arrays: dict[str, NDArray[Any]] = {
            "labels": class_indices(self.transduction_.tolist(), self.classes_), "confidence": self.confidence_,
            "flags": codes.astype(np.uint8),
        }  # fmt: skip
        if self.selected_ is not None:
            arrays["selected"] = self.selected_
        header = {
            "class": type(self).__name__, "params": to_python(params), "labels": encode_labels(self.classes_),
            "history": list(self.history_), "flag_names": names.tolist(),
            "label_error": None if self.label_error_ is None else self.label_error_.to_json(),
            "feature_names": getattr(self, "feature_names_in_", np.array([])).tolist(),
        }  # fmt: skip
        write_model(Path(path), self._model, arrays, header)

    @classmethod
    def load(cls: type[Self], path: str | Path, network: UserFactory | None = None, device: str | None = None) -> Self:
        """Read a saved classifier. If its network is your own, pass the factory: `load` imports no code."""
        model, arrays, header = read_model(Path(path), network)
        kinds: list[type[Any]] = [cls, PartialLabelClassifier, CroSelClassifier]
        kind = next((k for k in kinds if k.__name__ == header.get("class")), None)
        if kind is None or not issubclass(kind, cls):
            raise UserError(f"{path}: holds a {header.get('class')}, not a {cls.__name__}; load it with that class")
        try:
            params = dict(header["params"])
            if params["classes"] is not None:
                params["classes"] = decode_labels(params["classes"]).tolist()
            params["network"] = network if params["network"] is None else params["network"]
            params["device"] = params["device"] if device is None else device
            self: Self = kind(**params)
            self.classes_ = decode_labels(header["labels"])
            self.history_ = History(header["history"])
            self.transduction_ = self.classes_[arrays["labels"]]
            self.confidence_, self.selected_ = arrays["confidence"], arrays.get("selected")
            self.flags_ = np.array(header["flag_names"])[arrays["flags"]]
            error = header.get("label_error")  # which files of earlier versions do not have
            self.label_error_ = None if error is None else LabelError.from_json(error)
            if model.pixels is None and not model.on_backbone:
                self.n_features_in_ = model.shape[0]
            if header["feature_names"]:
                self.feature_names_in_ = np.array(header["feature_names"], dtype=object)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
            raise UserError(
                f"{path}: damaged, or made by another version of crosel ({error}); fit and save it again"
            ) from None
        self._model = model
        return self

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.input_tags.sparse = True
        return tags


@dataclass(eq=False, repr=False, kw_only=True)
class CroSelClassifier(PartialLabelClassifier):
    """CroSel: two networks select confident labels for each other from their prediction history.

    It has all parameters of `PartialLabelClassifier` except `method`, and CroSel's own.

    Parameters
    ----------
    Each is None by default: as the preset has it, or as below.

    warmup : epochs of CC before the networks learn from selected labels; two fifths of all epochs.
    gamma : confidence that a label must exceed, on average over the history, to be selected; 0.9.
    bank_length : epochs of history; 3.
    lambda_cr : weight of the co-mix loss; 4.
    temperature : sharpens the pseudo labels of co-mix (1: not at all); 0.5.
    alpha : parameter of MixUp's Beta distribution; 0.25.
    networks : 2, or 1, which selects for itself; 2.
    """

    method: str = field(default="crosel", init=False)
    warmup: int | None = None
    gamma: float | None = None
    bank_length: int | None = None
    lambda_cr: float | None = None
    temperature: float | None = None
    alpha: float | None = None
    networks: int | None = None

    def _method_values(self) -> dict[str, Any]:
        values = super()._method_values()
        for name in ("warmup", "gamma", "bank_length", "lambda_cr", "temperature", "alpha", "networks"):
            if name in values:
                raise UserError(f"method_settings: '{name}' is a separate parameter of the classifier")
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        return values


def _size(shape: tuple[int, ...]) -> str:
    channels, height, width = shape
    return f"{height} x {width} with {counted(channels, 'channel')}"
