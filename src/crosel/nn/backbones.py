"""Pretrained backbones by name: `timm/NAME` for images, `text/NAME` for texts. They turn examples into rows of numbers.

A frozen backbone stays as it was trained: each example passes through it once (`crosel.data.embeddings`), and a head
is trained on what comes out. Size, crop, mean and deviation are the backbone's own. Fine-tuned, it is a network like
others (`crosel.nn.fine_tuning`). No code of a user's runs: weights come from timm or sentence-transformers, or from a
file with tensors alone (`network.weights`).
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from crosel.errors import UserError
from crosel.utils.reading import check_plain
from crosel.utils.system import check_bytes
from crosel.utils.text import did_you_mean, one_line

_LONGEST = 8  # times the short side of a picture

# Good ones to begin with: name, millions of parameters, what it is good for. Speeds: results/photographs/speed.jsonl.
SUGGESTED = (
    ("timm/tf_efficientnet_lite0.in1k", 5, "photographs, about 40 a second on one CPU core"),
    ("timm/resnet50.a1_in1k", 26, "photographs, about 10 a second on one CPU core"),
    ("timm/vit_base_patch14_dinov2.lvd142m", 87, "photographs, on a GPU: one in 3 seconds on a CPU core"),
    ("text/all-MiniLM-L6-v2", 23, "short English texts, on a CPU"),
    ("text/paraphrase-multilingual-MiniLM-L12-v2", 118, "texts in fifty languages"),
)
EXTRAS = {
    "timm": ("timm", "pip install 'crosel[photos]'"),
    "text": ("sentence_transformers", "pip install 'crosel[text]'"),
}


def is_backbone(name: str) -> bool:
    """Whether a network's name stands for a pretrained backbone."""
    return name.partition("/")[0] in EXTRAS and "/" in name


class ImageBackbone:
    """A timm model without its classifier."""

    takes = "images"

    def __init__(self, name: str, model: nn.Module, settings: Mapping[str, Any], device: torch.device) -> None:
        self.name, self.device = name, device
        self.model = model.eval().to(device).requires_grad_(False)
        self.size = int(settings["input_size"][1])
        self.resized = math.floor(self.size / float(settings["crop_pct"]))
        self.resampling = Image.Resampling[str(settings["interpolation"]).upper()]
        self._mean, self._std = (torch.tensor(settings[key], device=device).view(1, 3, 1, 1) for key in ("mean", "std"))
        self.dimensions = int(self.encode(np.zeros((1, self.size, self.size, 3), np.uint8)).shape[1])
        recipe = (name, self.size, self.resized, self.resampling, settings["mean"], settings["std"])
        self.digest = digest_of(model.state_dict(), repr(recipe))

    def prepare(self, image: Image.Image) -> NDArray[np.uint8]:
        """A picture in RGB, its short side resized and the middle cut out: [size, size, 3]."""
        short = min(image.size)
        if max(image.size) > _LONGEST * short:  # a strip: its ends are not seen, but would be enlarged, too
            sides = [min(side, _LONGEST * short) for side in image.size]
            left, top = ((whole - side) // 2 for whole, side in zip(image.size, sides, strict=True))
            image = image.crop((left, top, left + sides[0], top + sides[1]))
        width, height = (self.resized * side // short for side in image.size)  # rounded as torchvision does
        if image.size != (width, height):
            image = image.resize((width, height), self.resampling)
        left, top = round((width - self.size) / 2), round((height - self.size) / 2)
        return np.array(image.crop((left, top, left + self.size, top + self.size)), dtype=np.uint8)

    @torch.inference_mode()
    def encode(self, pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Embeddings [m, d] of prepared pictures [m, size, size, 3]."""
        return _embedding_rows(self.embed(torch.from_numpy(pictures).to(self.device).permute(0, 3, 1, 2)), self.name)

    def embed(self, x: Tensor) -> Tensor:
        """The same of uint8 pixels [m, 3, size, size]."""
        out: Tensor = self.model((x.float() / 255 - self._mean) / self._std)
        return out


class TextBackbone:
    """A sentence-transformers model."""

    takes, size = "texts", 0

    def __init__(self, name: str, model: Any, device: torch.device) -> None:
        self.name, self.device, self.model = name, device, model.eval()
        self.dimensions = len(self.encode(["a"])[0])
        self.digest = digest_of(model.state_dict(), repr((name, model.get_max_seq_length())))

    def prepare(self, text: str) -> str:
        return text

    @torch.inference_mode()
    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        out = self.model.encode(list(texts), convert_to_numpy=True, show_progress_bar=False)
        return np.asarray(out, dtype=np.float32)


Backbone = ImageBackbone | TextBackbone


def _embedding_rows(out: Tensor, name: str) -> NDArray[np.float32]:
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"network '{name}' gives no row of numbers for an image; choose another backbone")
    rows: NDArray[np.float32] = out.float().cpu().numpy()
    return rows


def digest_of(tensors: Mapping[str, Tensor], recipe: str) -> str:
    """What tells weights and preparation from all others: the name of a cache of embeddings."""
    digest = hashlib.sha256(recipe.encode())
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def check_digest(wanted: str | None, digest: str, name: str) -> None:
    """Refuse weights that are not those of a run (`wanted`), whatever they are called."""
    if wanted not in (None, digest):
        raise UserError(
            f"network '{name}' has other weights than those that the run was trained with; name the file with them: "
            "--set network.weights=FILE, or network.weights in the run's config.yaml"
        )


# --- opening ------------------------------------------------------------------------------------------------------


def open_backbone(name: str, weights: str | None = None, device: torch.device | None = None) -> Backbone:
    """Build the named backbone with its pretrained weights, or with those of a file."""
    device = device or torch.device("cpu")
    kind, _, short = name.partition("/")
    if not is_backbone(name):
        raise UserError(f"network '{name}' is no pretrained backbone; write timm/NAME or text/NAME")
    if kind == "timm":
        settings = picture_settings(name)
        return ImageBackbone(name, image_model(name, weights), settings, device)
    return _open_text(_library(name, kind), name, short, weights, device)


def installed(kind: str) -> bool:
    """Whether backbones of a kind (`timm`, `text`) can be used here."""
    module = EXTRAS[kind][0]
    return module in sys.modules or importlib.util.find_spec(module) is not None


def _library(name: str, kind: str) -> Any:
    module, command = EXTRAS[kind]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if error.name == module:
            raise UserError(f"network '{name}' needs another package: {command}") from None
        raise UserError(
            f"network '{name}': {module} cannot be imported ({one_line(error)}); install it again"
        ) from None
    except RuntimeError as error:  # torchvision that was built for another torch
        raise UserError(
            f"network '{name}': {module} cannot be imported ({one_line(error)}); torch and torchvision must be builds "
            "of the same release"
        ) from None


def picture_settings(name: str) -> Mapping[str, Any]:
    """How a backbone wants its pictures: input_size, mean, std, crop_pct, interpolation. Nothing is downloaded."""
    timm, short = _library(name, "timm"), name.partition("/")[2]
    plain = short.partition(".")[0]
    try:
        found = timm.get_pretrained_cfg(short) if plain in timm.list_models() else None
    except RuntimeError:  # no such tag
        found = None
    if found is None:
        known = [f"timm/{known}" for known in (*timm.list_models(), *timm.list_models(pretrained=True))]
        near = did_you_mean(name, known)
        raise UserError(f"unknown backbone '{name}'{near}; crosel info names a few good ones")
    settings: Mapping[str, Any] = timm.data.resolve_data_config({}, pretrained_cfg=found.to_dict())
    channels, height, width = settings["input_size"]
    if height != width or channels != 3:
        raise UserError(f"network '{name}' takes images of {channels} x {height} x {width}; choose one for squares")
    return settings


def image_model(name: str, weights: str | None = None, pretrained: bool = True) -> nn.Module:
    """A timm model without its classifier, with its pretrained weights or those of a file; or with any weights, for
    those of a run."""
    timm, short = _library(name, "timm"), name.partition("/")[2]
    hub = getattr(timm.get_pretrained_cfg(short), "hf_hub_id", None)
    with _from_hub(name, f"model.safetensors of huggingface.co/{hub}" if hub else "the file with them"):
        model: nn.Module = timm.create_model(short, pretrained=pretrained and weights is None, num_classes=0)
    if pretrained and weights is not None:
        _load_weights(model, Path(weights), name)
    return model


def _open_text(library: Any, name: str, short: str, weights: str | None, device: torch.device) -> TextBackbone:
    hub = short if "/" in short else f"sentence-transformers/{short}"
    with _from_hub(name, f"the folder huggingface.co/{hub}"):
        # A folder holds the whole model, as sentence-transformers saves it; its weights may only be safetensors.
        model = library.SentenceTransformer(
            weights or short, device=str(device), trust_remote_code=False, model_kwargs={"use_safetensors": True}
        )
    return TextBackbone(name, model, device)


@contextmanager
def _from_hub(name: str, what: str) -> Iterator[None]:
    """No network, a broken download, a name that the hub does not know: one line that names what to fetch by other
    means. What the hub's library logs of each trial is left out; its next download goes on where this one broke off."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception as error:
        raise UserError(
            f"the weights of '{name}' cannot be had ({one_line(error)}); try again online, or download {what} "
            "elsewhere and name it: --set network.weights=PATH"
        ) from None
    finally:
        log.setLevel(level)


def _load_weights(model: nn.Module, path: Path, name: str) -> None:
    """Take weights from a file that holds tensors alone; those of a classifier are left out."""
    tensors = read_tensors(path)
    wanted = model.state_dict()
    missing = [key for key in wanted if key not in tensors]
    if missing:
        raise UserError(
            f"{path}: there is no tensor '{missing[0]}', which '{name}' has; give the weights of that model"
        )
    for key, value in wanted.items():
        if tensors[key].shape != value.shape:
            raise UserError(
                f"{path}: tensor '{key}' has shape {tuple(tensors[key].shape)}, but '{name}' takes "
                f"{tuple(value.shape)}; give the weights of that model"
            )
    model.load_state_dict({key: tensors[key] for key in wanted})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors by name, from safetensors or from a `.pt` without anything but tensors."""
    if not os.path.exists(path):
        raise UserError(
            f"{path}: no such file; network.weights (of a run: in its config.yaml) names the file with the "
            "backbone's weights"
        )
    check_plain(path)
    check_bytes(2 * path.stat().st_size, "its tensors", path)
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle with code in it, a damaged file
        raise UserError(f"{path}: not a file of tensors ({one_line(error)}); save it as .safetensors") from None
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise UserError(f"{path}: expected tensors by name (a state_dict)")
    return {str(key).removeprefix("module."): value for key, value in found.items()}
