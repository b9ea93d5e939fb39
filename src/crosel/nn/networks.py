"""Networks. Each maps normalised inputs to logits, and shows its last hidden layer:

    forward(x) = classify(features(x)),   features(x): [B, feature_size]

Any `nn.Module` factory of the user's serves as well; only methods that look at features (PiCO) need the two parts.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import os
import re
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Protocol, cast

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from crosel.errors import UserError
from crosel.nn import fused
from crosel.nn.backbones import check_digest, digest_of, image_model, is_backbone, picture_settings
from crosel.nn.casts import Conv2d, Linear
from crosel.nn.fused import add_norm_relu, norm_relu
from crosel.utils.out_of_memory import is_out_of_memory
from crosel.utils.settings import Settings
from crosel.utils.text import did_you_mean, one_line

NetworkFactory = Callable[[], nn.Module]
UserFactory = Callable[..., nn.Module]  # called as factory(classes=k, shape=shape of one example)


class Classifier(nn.Module, ABC):
    """Features and a linear layer on top."""

    def __init__(self, feature_size: int, classes: int) -> None:
        super().__init__()
        self.feature_size = feature_size
        self.head = Linear(feature_size, classes)

    @abstractmethod
    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer: [B, feature_size]."""

    def classify(self, features: Tensor) -> Tensor:
        out: Tensor = self.head(features)
        return out

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def _conv3(inputs: int, outputs: int, stride: int = 1) -> Conv2d:
    return Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)


class _Block(nn.Module):
    """Pre-activation block. Where the width changes, the activated tensor feeds both branches."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), _conv3(inputs, outputs, stride)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), _conv3(outputs, outputs)
        self.shortcut = Conv2d(inputs, outputs, 1, stride=stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Take and return a sum as its two terms: whoever reads it adds them, in one kernel with the batch norm."""
        x, activated = add_norm_relu(x, residual, self.norm1)
        residual = self.conv2(norm_relu(self.conv1(activated), self.norm2))
        return (x if self.shortcut is None else self.shortcut(activated)), residual


class ResidualNetwork(Classifier):
    """Pre-activation blocks in groups, after a stem without an activation of its own. For images of any size."""

    def __init__(self, stem: int, widths: Sequence[int], blocks: int, classes: int, channels: int) -> None:
        """Each group has so many blocks; all but the first halve the image."""
        super().__init__(widths[-1], classes)
        self.stem = _conv3(channels, stem)
        made: list[_Block] = []
        inputs = stem
        for group, outputs in enumerate(widths):
            for position in range(blocks):
                # Where the first group changes nothing, its shortcut is the identity.
                made.append(_Block(inputs, outputs, 2 if group > 0 and position == 0 else 1))
                inputs = outputs
        self.blocks = nn.ModuleList(made)
        self.norm = nn.BatchNorm2d(inputs)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        x, residual = self.stem(x), None
        for block in self.blocks:
            x, residual = block(x, residual)
        return add_norm_relu(x, residual, self.norm)[1].mean(dim=(2, 3))


class WideResNet(ResidualNetwork):
    """WRN-d-w (Zagoruyko and Komodakis, 2016)."""

    def __init__(self, depth: int, width: int, classes: int, channels: int = 3) -> None:
        if depth < 10 or (depth - 4) % 6:
            raise UserError(f"the depth of a wide ResNet must be 6n + 4 (10, 16, 22, 28, 34, 40, …), not {depth}")
        if width < 1:
            raise UserError(f"the width of a wide ResNet must be at least 1, not {width}")
        super().__init__(16, (16 * width, 32 * width, 64 * width), (depth - 4) // 6, classes, channels)


class ResNet18(ResidualNetwork):
    """ResNet-18 with pre-activation (He et al., Identity Mappings, 2016) and a stem for small images, as is usual for
    CIFAR: about as many parameters as WRN-16-8 (11.2 million, 11.0), a third of its arithmetic."""

    def __init__(self, classes: int, channels: int = 3) -> None:
        super().__init__(64, (64, 128, 256, 512), 2, classes, channels)


def wide_resnet(depth: int, width: int, classes: int, channels: int = 3) -> WideResNet:
    """Return a wide ResNet for images of any size: `wide_resnet(34, 10, 10)` has 46.2 million parameters."""
    return WideResNet(depth, width, classes, channels)


class SmallCNN(Classifier):
    """Four convolutions with batch norm: for small images on a CPU. Works from 1x1 pixels on."""

    def __init__(self, classes: int, channels: int = 3, width: int = 32) -> None:
        super().__init__(2 * width, classes)
        self.body = nn.Sequential(
            _conv3(channels, width), nn.BatchNorm2d(width), nn.ReLU(),
            _conv3(width, width), nn.BatchNorm2d(width), nn.ReLU(),
            nn.MaxPool2d(2, ceil_mode=True),
            _conv3(width, 2 * width), nn.BatchNorm2d(2 * width), nn.ReLU(),
            _conv3(2 * width, 2 * width), nn.BatchNorm2d(2 * width), nn.ReLU(),
        )  # fmt: skip

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out.mean(dim=(2, 3))


class MLP(Classifier):
    """Fully connected layers with batch norm, for feature vectors (images are flattened)."""

    def __init__(self, inputs: int, classes: int, hidden: tuple[int, ...] = (512, 256)) -> None:
        super().__init__(hidden[-1] if hidden else inputs, classes)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [Linear(inputs, size), nn.BatchNorm1d(size), nn.ReLU()]
            inputs = size
        self.body = nn.Sequential(*layers)

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x.flatten(1))
        return out


class FineTuned(nn.Module):
    """A pretrained backbone that goes on learning, and a head: one linear layer, or an MLP.

    Images of another size than its own are brought to it here, on the device: the middle square of each.
    """

    def __init__(self, body: nn.Module, settings: NetworkSettings, classes: int) -> None:
        super().__init__()
        pictures = picture_settings(settings.name)
        self.size = settings.size or int(pictures["input_size"][1])
        self.mean, self.std = tuple(pictures["mean"]), tuple(pictures["std"])
        self.body = body
        with torch.no_grad():
            self.head = MLP(_body_width(body, self.size, settings.name), classes, settings.hidden)
        self.feature_size = self.head.feature_size
        if settings.checkpointing:
            keep_less: Any = getattr(body, "set_grad_checkpointing", None)
            if keep_less is None:
                raise UserError(f"setting 'network.checkpointing': '{settings.name}' has none; leave it out")
            keep_less(True)
        # Statistics of batch norm stay those of pretraining: the batches of a method are a mixture of views.
        still = _frozen_layers(body, settings)
        for layer in still:
            layer.requires_grad_(False)
        self._in_evaluation = [*still, *(module for module in body.modules() if isinstance(module, _BatchNorm))]

    def train(self, mode: bool = True) -> FineTuned:
        super().train(mode)
        for module in self._in_evaluation:
            module.eval()
        return self

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer: [B, feature_size]."""
        return self.head.features(self.body(_middle_square(x, self.size)))

    def classify(self, features: Tensor) -> Tensor:
        return self.head.classify(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.features(x))


def _body_width(body: nn.Module, size: int, name: str) -> int:
    """Features that a backbone gives for an image of this size."""
    try:
        out = body.eval()(torch.zeros(1, 3, size, size))
    except Exception as error:
        raise UserError(
            f"network '{name}' cannot take images of {size} x {size} ({one_line(error)}); leave network.size out"
        ) from None
    if not isinstance(out, Tensor) or out.ndim != 2:
        raise UserError(f"network '{name}' gives no row of numbers for an image; choose another backbone")
    return int(out.shape[1])


def _frozen_layers(body: nn.Module, settings: NetworkSettings) -> list[nn.Module]:
    """The layers that `network.freeze` names, or the first so many."""
    layers: dict[str, nn.Module] = {}
    for name, child in body.named_children():
        parts = child.named_children() if isinstance(child, nn.Sequential | nn.ModuleList) else ()
        layers |= {f"{name}.{part}": module for part, module in parts} or {name: child}
    layers = {name: layer for name, layer in layers.items() if next(layer.parameters(), None) is not None}
    known, freeze = f"it has {', '.join(layers)}", settings.freeze
    if isinstance(freeze, tuple):
        modules = dict(body.named_modules())
        if missing := [name for name in freeze if not name or name not in modules]:
            near = did_you_mean(missing[0], modules)
            raise UserError(f"setting 'network.freeze': '{settings.name}' has no layer '{missing[0]}'{near}; {known}")
        return [modules[name] for name in freeze]
    if freeze > len(layers):
        raise UserError(f"setting 'network.freeze': '{settings.name}' has {len(layers)} layers, not {freeze}; {known}")
    if freeze:  # what comes before all layers, such as a class token
        for parameter in body.parameters(recurse=False):
            parameter.requires_grad_(False)
    return list(layers.values())[: int(freeze)]


def _middle_square(x: Tensor, size: int) -> Tensor:
    """The middle of each image [n, c, h, w] in this size, in three channels."""
    height, width = x.shape[2:]
    x = x.expand(-1, 3, -1, -1)  # grey ones have one
    if height != width:
        side = min(height, width)
        top, left = (height - side) // 2, (width - side) // 2
        x = x[:, :, top : top + side, left : left + side]
    if x.shape[3] == size:
        return x
    smaller = x.shape[3] > size
    return F.interpolate(x, (size, size), mode="bilinear" if smaller else "bicubic", antialias=smaller)


def forward_split_bn(network: nn.Module, *batches: Tensor) -> list[Tensor]:
    """Logits of each batch, as from a pass of its own: batch norm takes its statistics from that batch alone.

    Where the fused kernels run, a network whose batch norms all know of parts makes it one pass: convolutions of 64
    examples do not fill a large card.
    """
    several = 2 <= len(batches) <= fused.MAX_PARTS
    if not (several and fused.available(batches[0]) and _norms_support_parts(network)):
        return [network(x) for x in batches]
    sizes = [len(x) for x in batches]
    with fused.batch_norm_parts(sizes):
        return list(network(torch.cat(batches)).split(sizes))


def _norms_support_parts(network: nn.Module) -> bool:
    """Whether all batch norms are asked through `crosel.nn.fused`. Where a user derives a class from one of ours,
    or puts in another head, there may be others, which would take all parts together."""
    if not isinstance(network, ResidualNetwork) or type(network) not in (WideResNet, ResNet18):
        return False
    norms = sum(isinstance(module, _BatchNorm) for module in network.modules())
    return norms == 2 * len(network.blocks) + 1


class EmbeddingNetwork(Protocol):
    """What a method that embeds asks of a network: forward(x) = classify(features(x))."""

    feature_size: int

    def features(self, x: Tensor) -> Tensor: ...

    def classify(self, features: Tensor) -> Tensor: ...


def embedding_network(network: nn.Module, who: str) -> EmbeddingNetwork:
    """The same network, once it is known to have what `who` needs."""
    missing = [name for name in ("features", "classify", "feature_size") if not hasattr(network, name)]
    if missing:
        raise UserError(
            f"{who} embeds what a network sees, and {type(network).__name__} has no {', '.join(missing)}: "
            "give it features(x) -> [B, d], classify(features) -> logits and feature_size = d"
        )
    return cast(EmbeddingNetwork, network)


# --- by name ------------------------------------------------------------------------------------------------------


class NetworkSettings(Settings):
    """Which network to train. Methods that train two give them different starting weights."""

    name: str = Field(
        "auto",
        description="mlp, small-cnn, resnet-18, wrn-DEPTH-WIDTH, a pretrained timm/NAME (images) or text/NAME, or your "
        "own module:factory; auto: mlp for features, small-cnn for images under 16 pixels, else wrn-28-2",
    )
    weights: str | None = Field(
        None, description="pretrained backbones: file with the weights, instead of a download (safetensors or .pt)"
    )
    digest: str | None = Field(None, description="pretrained backbones: which weights it has; filled in by the run")
    freeze: bool | int | tuple[str, ...] = Field(
        True,
        description="timm/NAME: true: its embeddings are computed once, and only a head is trained; false: all of it "
        "is fine-tuned; a number or a list of names, such as [conv_stem, blocks.0]: all but the first so many layers, "
        "or these",
    )
    size: int | None = Field(
        None, ge=1, le=2048, description="fine-tuning: side in pixels of what the backbone sees; default: its own"
    )
    checkpointing: bool = Field(
        False,
        description="fine-tuning: compute activations again in the backward pass instead of keeping them: less memory, "
        "more time",
    )
    width: int = Field(32, ge=1, description="channels of the first layers of small-cnn")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (512, 256),
        description="sizes of the hidden layers of mlp; default for features: 512, or none if there are fewer rows "
        "than features times classes (with train.weight_decay=0.01); for the head on a backbone: none",
    )
    scaling: Literal["standard", "robust"] | None = Field(
        None,
        description="inputs before the network; standard: mean 0 and deviation 1; robust: outliers are drawn in first; "
        "default: robust for features, standard for images and embeddings",
    )

    @model_validator(mode="before")
    @classmethod
    def _linear_head(cls, values: Any) -> Any:
        name = values.get("name") if isinstance(values, Mapping) else None
        return {"hidden": (), **values} if isinstance(name, str) and is_backbone(name) else values

    @field_validator("freeze", mode="before")
    @classmethod
    def _layers(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value
        if isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names):
            return tuple(names)
        if isinstance(value, int) and value >= 0:
            return value
        raise ValueError("give true, false, a number of layers, or their names, as in [conv_stem, blocks.0]")

    @model_validator(mode="after")
    def _fine_tuned(self) -> NetworkSettings:
        if self.fine_tunes and not self.name.startswith("timm/"):
            raise ValueError("to fine-tune, name an image backbone: network.name=timm/NAME")
        if not self.fine_tunes and (self.size is not None or self.checkpointing):
            raise ValueError("size and checkpointing need network.freeze=false")
        return self

    @property
    def fine_tunes(self) -> bool:
        """Whether a pretrained backbone goes on learning."""
        return self.freeze is not True


Shape = tuple[int, ...]  # (d,) for features, (channels, height, width) for images


def network_name(settings: NetworkSettings, shape: Shape) -> str:
    """Resolve `auto`: an MLP for features, a small CNN for images under 16 pixels, WRN-28-2 otherwise."""
    if settings.name != "auto":
        return settings.name
    if len(shape) == 1:
        return "mlp"
    return "small-cnn" if min(shape[1:]) < 16 else "wrn-28-2"


# Networks by name, built from the settings, the shape of an example and the number of classes.
_NETWORKS: dict[str, Callable[[NetworkSettings, Shape, int], nn.Module]] = {
    "small-cnn": lambda settings, shape, classes: SmallCNN(classes, shape[0], settings.width),
    "mlp": lambda settings, shape, classes: MLP(math.prod(shape), classes, settings.hidden),
    "resnet-18": lambda settings, shape, classes: ResNet18(classes, shape[0]),
}
_FOR_FEATURES = {"mlp"}  # the others take images only


def is_user_code(name: str) -> bool:
    """Whether a name stands for a factory of the user's own: `module:factory`."""
    return ":" in name


def check_trust(name: str, trust_code: bool) -> None:
    """Refuse a name that stands for code; nothing of it is imported."""
    if is_user_code(name) and not trust_code:
        raise UserError(f"network '{name}' is code from outside crosel; add --trust-code if you trust it")


def network_factory(
    settings: NetworkSettings, shape: Shape, classes: int, trust_code: bool = False, pretrained: bool = True
) -> NetworkFactory:
    """Return a function that builds one network. `module:factory` names need `trust_code`: they import code.

    A user's factory is called as `factory(classes=k, shape=shape)`. Not `pretrained`: whoever calls loads weights.
    """
    name = network_name(settings, shape)
    wrn = re.fullmatch(r"wrn-(\d+)-(\d+)", name)
    if len(shape) == 1 and (wrn or name in _NETWORKS) and name not in _FOR_FEATURES:
        raise UserError(f"network '{name}' is for images, but the data has features; use --set network.name=mlp")
    if wrn:
        depth, width = int(wrn[1]), int(wrn[2])
        return lambda: WideResNet(depth, width, classes, shape[0])
    if name in _NETWORKS:
        build = _NETWORKS[name]
        return lambda: build(settings, shape, classes)
    if settings.fine_tunes:
        if len(shape) == 1 or shape[0] not in (1, 3):
            found = "rows of numbers" if len(shape) == 1 else f"images of {shape[0]} channels"
            raise UserError(f"network '{name}' takes images of 1 or 3 channels, but there are {found}; use another")
        body = image_model(name, settings.weights, pretrained)
        if pretrained:
            check_digest(settings.digest, digest_of(body.state_dict(), name), name)
        return lambda: FineTuned(copy.deepcopy(body), settings, classes)
    if is_backbone(name):  # the data are its embeddings
        return lambda: MLP(math.prod(shape), classes, settings.hidden)
    if is_user_code(name):
        check_trust(name, trust_code)
        return _import_factory(name, classes, shape)
    near = did_you_mean(name, ("auto", *_NETWORKS, "wrn-28-2", "wrn-34-10"))
    raise UserError(
        f"unknown network '{name}'{near}; choose from auto, {', '.join(_NETWORKS)}, wrn-D-W, timm/NAME, text/NAME, "
        "module:factory"
    )


def _import_factory(name: str, classes: int, shape: Shape) -> NetworkFactory:
    module_name, _, attribute = name.partition(":")
    if (here := os.getcwd()) not in sys.path:  # which a command has not, other than `python -m`
        sys.path.append(here)  # last, so that a file here takes the place of no installed package
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a script may end itself
        if told := user_code_error(name, error):
            raise UserError(f"network '{name}' cannot be imported: {told}") from error
        raise UserError(
            f"network '{name}' cannot be imported ({error}); check the name, and that its file is in the working "
            "folder or on PYTHONPATH"
        ) from None
    if not callable(factory):
        raise UserError(f"network '{name}' is not a function that builds a network; give MODULE:FUNCTION")
    build = bind_factory(factory, classes, shape, f"network '{name}'")

    def build_user_network() -> nn.Module:
        try:
            return build()
        except (Exception, SystemExit) as error:
            told = user_code_error(name, error)
            if is_out_of_memory(error) or not told:
                raise
            raise UserError(f"network '{name}' cannot be built: {told}") from error

    return build_user_network


def user_code_error(name: str, error: BaseException) -> str:
    """An error under the code that `module:factory` names, with the innermost line of the user's own that led to it;
    nothing, if there is none. Their own are the package of that name and the files beside it."""
    frames = [  # the first is our own call
        (frame.f_globals.get("__name__", "").partition(".")[0], frame.f_code.co_filename, line)
        for frame, line in list(traceback.walk_tb(error.__traceback__))[1:]
    ]
    package = re.split(r"[.:]", name)[0]
    folder = next((os.path.dirname(file) for top, file, _ in frames if top == package), None)
    places = [(file, line) for top, file, line in frames if top == package or os.path.dirname(file) == folder]
    text: object = error
    if isinstance(error, SyntaxError) and error.lineno and os.path.isfile(error.filename or ""):  # has no frame
        places, text = [*places, (str(error.filename), error.lineno)], error.msg
    if not places:
        return ""
    file, line = places[-1]
    what = type(error).__name__
    said = f"{what}: {one_line(text)}" if str(text).strip() else what
    return f"{said} ({file}, line {line}); correct it there"


def bind_factory(factory: UserFactory, classes: int, shape: Shape, what: str) -> NetworkFactory:
    """Bind a user's factory to the problem, and check what it returns; `what` it is called in an error."""
    try:
        inspect.signature(factory).bind(classes=classes, shape=shape)
    except TypeError as error:
        raise UserError(
            f"{what} is called as factory(classes=k, shape=shape), which it does not take ({error})"
        ) from None
    except ValueError:  # what is not written in Python may have no signature to look at
        pass

    def build() -> nn.Module:
        network = factory(classes=classes, shape=shape)
        if not isinstance(network, nn.Module):
            raise UserError(f"{what} returned {type(network).__name__}, not a torch.nn.Module")
        return network

    return build
