"""A trained classifier without its training set: what it takes to predict, to pickle and to save."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from crosel.config import check_config
from crosel.data.dataset import Dataset
from crosel.data.embeddings import Encoder
from crosel.errors import UserError
from crosel.methods.base import Method
from crosel.nn.backbones import is_backbone
from crosel.nn.factory import NetworkFactory, UserFactory, bind_factory
from crosel.training.batches import Normaliser
from crosel.training.build import build_session, open_encoder
from crosel.training.callbacks import Row
from crosel.training.checkpoint import add_prefix, strip_prefix
from crosel.training.devices import pick_device
from crosel.training.session import Session, load_tensors
from crosel.training.trainer import predicted_probabilities
from crosel.utils.files import atomic_write
from crosel.utils.system import check_bytes
from crosel.utils.text import one_line

OWN_NETWORK = "own"  # the network's name in the config where the user passed a factory
FORMAT = 1


@dataclass
class FittedModel:
    """Settings, shapes and weights. The networks are built from them when they are first needed."""

    config: dict[str, Any]
    classes: int
    shape: tuple[int, ...]
    pixels: str | None  # what the numbers of images mean; None for features
    weights: bytes  # safetensors
    network: UserFactory | None = None
    _session: Session | None = field(default=None, repr=False, compare=False)
    _encoder: Encoder | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(
        cls, session: Session, pixels: str | None, network: UserFactory | None, encoder: Encoder | None = None
    ) -> FittedModel:
        """Keep what prediction needs of a trained session.

        Tables with a row for each training example are left out: they are the tensors that have another shape in a
        method built for one example.
        """
        config = session.config.model_dump(mode="json")
        model = cls(config, len(session.data.classes), session.data.shape, pixels, b"", network, _encoder=encoder)
        bare = model._build(session.device)
        with session.evaluating():  # an average of the weights predicts, where there is one
            tensors = {
                **_same_shape("method", bare.method, session.method),
                **_same_shape("normalise", bare.normalise, session.normalise),
            }
        model.weights = safetensors.torch.save(tensors)
        model._load(bare)
        return model

    def probabilities(self, x: NDArray[Any], device: str) -> NDArray[np.float32]:
        """Class probabilities [n, k] of checked inputs."""
        wanted = pick_device(device)
        if self._session is None or self._session.device != wanted:
            self._load(self._build(wanted))
        session = self._session
        assert session is not None
        result: NDArray[np.float32] = predicted_probabilities(session, x).float().numpy()
        return result

    def module(self) -> nn.Module:
        """Networks and normalisation as one module, on the CPU."""
        session = self._build(torch.device("cpu"))
        self._fill(session)
        module = Predictor(session.normalise, session.method).eval().requires_grad_(False)
        # The layout that other programs expect.
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return module

    def _build(self, device: torch.device) -> Session:
        """A session of the same networks for a training set of one blank example."""
        names = tuple(map(str, range(self.classes)))
        blank = np.zeros((1, *self.shape), np.float32 if len(self.shape) == 1 else np.uint8)
        channels = self.shape[0]
        data = Dataset(
            blank, names, np.ones((1, self.classes), bool), mean=(0.0,) * channels, std=(1.0,) * channels
        )  # fmt: skip
        config = check_config(self.config, removed="ignore")
        # Whoever wrote this program also named the code; `load` refuses a file that names any.
        network = user_network(self.network, self.classes, self.shape)
        return build_session(config, data, device, network, trust_code=True, pretrained=False)

    def _load(self, session: Session) -> None:
        self._fill(session)
        self._session = session

    def _fill(self, session: Session) -> None:
        tensors = safetensors.torch.load(self.weights)
        own = session.method.state_dict()
        load_tensors(session.method, own | strip_prefix("method", tensors))
        load_tensors(session.normalise, strip_prefix("normalise", tensors))

    @property
    def on_backbone(self) -> bool:
        network = self.config["network"]
        return is_backbone(network["name"]) and network.get("freeze", True) is True

    def encoder(self, device: str) -> Encoder:
        """The pretrained backbone that the classifier was trained on, with the same weights."""
        if self._encoder is None:
            self._encoder = open_encoder(check_config(self.config, removed="ignore"), pick_device(device))
        assert self._encoder is not None
        return self._encoder

    def __getstate__(self) -> dict[str, Any]:
        """Networks are rebuilt from the weights: a pickle holds no torch objects. Of a backbone it has the name."""
        return {**self.__dict__, "_session": None, "_encoder": None}


class Predictor(nn.Module):
    """Raw inputs -> class probabilities, in plain torch."""

    def __init__(self, normalise: Normaliser, method: Method) -> None:
        super().__init__()
        self.normalise, self.method = normalise, method

    def forward(self, x: Tensor) -> Tensor:
        if self.normalise.mean.ndim == 3 and x.dtype != torch.uint8:  # floats could be on either of two scales
            raise TypeError(f"expected images as bytes, uint8 [n, channels, height, width], got {x.dtype}")
        return self.method.combine(self.method.outputs(self.normalise(x)).float())


def _same_shape(prefix: str, bare: nn.Module, trained: nn.Module) -> dict[str, Tensor]:
    shapes = {name: t.shape for name, t in bare.state_dict().items()}
    kept = {name: t for name, t in trained.state_dict().items() if shapes.get(name) == t.shape}
    # Copies: safetensors refuses tensors that share memory (tied weights).
    return add_prefix(prefix, {name: t.detach().to("cpu", copy=True).contiguous() for name, t in kept.items()})


def user_network(factory: UserFactory | None, classes: int, shape: tuple[int, ...]) -> NetworkFactory | None:
    return None if factory is None else bind_factory(factory, classes, shape, "network: the factory")


# --- the file -----------------------------------------------------------------------------------------------------


def write_model(path: Path, model: FittedModel, arrays: dict[str, NDArray[Any]], header: dict[str, Any]) -> None:
    """One safetensors file: weights and arrays as tensors, everything else as JSON in its header."""
    tensors = safetensors.torch.load(model.weights)
    tensors |= add_prefix("fitted", {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()})
    content = {
        "format": FORMAT, "config": model.config, "classes": model.classes, "shape": model.shape,
        "pixels": model.pixels, **header,
    }  # fmt: skip
    try:
        text = json.dumps(content)
    except TypeError as error:
        raise UserError(f"{path}: a parameter cannot be saved as JSON ({error}); pickle it instead") from None
    atomic_write(path, safetensors.torch.save(tensors, metadata={"crosel": text}))


def read_model(path: Path, network: UserFactory | None) -> tuple[FittedModel, dict[str, NDArray[Any]], dict[str, Any]]:
    """Read what `write_model` wrote. No code is imported: the user passes a network of their own."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    check_bytes(2 * path.stat().st_size, "its tensors", path)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {})["crosel"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        if header["format"] != FORMAT:
            raise UserError(
                f"{path}: made by another version of crosel (format {header['format']}); save it with this one"
            )
        name = header["config"]["network"]["name"]
        model = FittedModel(header["config"], header["classes"], tuple(header["shape"]), header["pixels"], b"", network)
    except UserError:
        raise
    except Exception as error:  # safetensors, JSON and missing entries each have their own errors
        raise UserError(
            f"{path}: not a saved crosel model, or damaged ({one_line(error)}); fit and save it again"
        ) from None
    if network is None and (name == OWN_NETWORK or ":" in name):
        raise UserError(f"{path}: its network is your own code; pass it: load(path, network=factory)")
    arrays = {name: t.numpy() for name, t in strip_prefix("fitted", tensors).items()}
    model.weights = safetensors.torch.save({n: t for n, t in tensors.items() if not n.startswith("fitted.")})
    return model, arrays, header


# --- history ------------------------------------------------------------------------------------------------------


class History(list[Row]):
    """One dict per epoch, as in a run folder's metrics.jsonl."""

    @property
    def columns(self) -> list[str]:
        """All names that occur, in order of first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns by name, with None where an epoch has no value: `pandas.DataFrame(clf.history_.to_dict())`."""
        return {name: [row.get(name) for row in self] for name in self.columns}

    def plot(self, columns: list[str] | None = None, ax: Any = None) -> Any:
        """Draw columns over epochs (default: the losses) and return matplotlib's axes."""
        names = columns if columns is not None else [name for name in self.columns if name.startswith("loss")]
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise UserError(f"history has no column '{unknown[0]}'; choose from {', '.join(self.columns)}")
        if ax is None:
            _, ax = _pyplot().subplots()
        for name in names:
            rows = [row for row in self if row.get(name) is not None]
            ax.plot([row["epoch"] for row in rows], [row[name] for row in rows], label=name.replace("_", " "))
        warm_up = sum(row.get("phase") == "warm-up" for row in self)
        if 0 < warm_up < len(self):
            ax.axvline(warm_up + 0.5, color="grey", linestyle=":", label="end of warm-up")
        ax.set_xlabel("epoch")
        ax.legend()
        return ax

    def plot_selection(self, ax: Any = None) -> Any:
        """Draw the share of selected examples, and the metrics that tell how good the labels are."""
        wanted = ("selection_ratio", "oracle_selection_accuracy", "covering_rate", "approximated_accuracy")
        return self.plot([name for name in wanted if name in self.columns], ax)


def _pyplot() -> Any:
    try:
        return importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise ImportError("plots need matplotlib, which is not installed: pip install 'crosel[plots]'") from None
