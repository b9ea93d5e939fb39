"""Networks by name: the settings that describe one, and what builds it, be it ours, pretrained or the user's own."""

from __future__ import annotations

import copy
import inspect
import math
import os
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from torch import nn

from crosel.errors import UserError
from crosel.nn.backbones import check_digest, digest_of, image_model, is_backbone
from crosel.nn.cuda import is_out_of_memory
from crosel.nn.fine_tuning import FineTuned
from crosel.nn.networks import MLP, ResNet18, SmallCNN, WideResNet
from crosel.utils.settings import Settings
from crosel.utils.system import import_by_name
from crosel.utils.text import did_you_mean, one_line

NetworkFactory = Callable[[], nn.Module]
UserFactory = Callable[..., nn.Module]  # called as factory(classes=k, shape=shape of one example)
Shape = tuple[int, ...]  # (d,) for features, (channels, height, width) for images


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
    try:
        factory = import_by_name(name)
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
