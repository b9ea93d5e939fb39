"""Everything that decides a run, in one frozen model: defaults, then a preset, a file, and `--set`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from crosel.augment import AugmentSettings
from crosel.data.settings import DataSettings
from crosel.errors import UserError
from crosel.methods.base import MethodSettings, find_method, method_settings, methods, stages
from crosel.nn.backbones import is_backbone
from crosel.nn.factory import NetworkSettings
from crosel.presets import read_preset
from crosel.utils.settings import (
    RENAMED,
    Settings,
    declared_type,
    merge,
    parse_set,
    read_yaml,
    removed_settings,
    with_new_names,
)
from crosel.utils.text import did_you_mean, one_line

logger = logging.getLogger(__name__)
Warn = Callable[[str], None]


class TrainSettings(Settings):
    """The training loop: length, optimiser, evaluation and checkpoints."""

    epochs: int = Field(50, ge=1, description="passes over the training set, including warm-up")
    batch_size: int = Field(64, ge=1, description="examples in a batch; at most the whole training set")
    lr: float = Field(0.05, gt=0, description="learning rate at the start")
    body_lr: float = Field(
        0.1, gt=0, description="fine-tuning: learning rate of the pretrained layers, as a share of the head's (lr)"
    )
    optimiser: Literal["sgd", "adam", "adamw", "muon"] = Field(
        "sgd",
        description="rule by which weights are updated; muon: Muon for convolutions larger than 1x1, SGD for the rest",
    )
    muon_lr: float = Field(
        0.02,
        gt=0,
        lt=1,
        description="Muon: by what share of its length a weight turns in a step, while lr is at its start",
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of SGD; for Adam and AdamW it is β1 (β2 is 0.999)")
    nesterov: bool = Field(False, description="use Nesterov momentum with SGD")
    weight_decay: float = Field(1e-4, ge=0, description="weight decay, of all parameters that Muon does not move")
    schedule: Literal["step", "cosine", "constant"] = Field("cosine", description="how the learning rate falls")
    milestones: tuple[float, ...] = Field(
        (0.5, 0.75), description="step: points in the run at which the learning rate drops, as shares of the epochs"
    )
    decay: float = Field(0.1, gt=0, le=1, description="step: factor applied to the learning rate at each milestone")
    lr_ramp: float = Field(0, ge=0, description="epochs at the start in which the learning rate rises from 0")
    bf16: Literal["auto", True, False] = Field(
        "auto",
        description="on a GPU, run forward passes in bfloat16 (weights stay float32): true, false or auto: if the GPU "
        "has units for it",
    )
    fused: bool = Field(
        True,
        description="on CUDA, kernels of our own (Triton) where the network allows it: batch norm and ReLU in one, "
        "convolutions of 160 channels on a Hopper card",
    )
    cuda_graphs: bool = Field(True, description="on CUDA, record a step once and replay it (CUDA graphs)")
    ema_decay: float = Field(
        0,
        ge=0,
        lt=1,
        description="predict with an exponential moving average (EMA) of the weights that has this decay, and with "
        "batch norm statistics computed for it from unaugmented training examples; 0: off",
    )
    batch_norm: Literal["average", "synchronise"] = Field(
        "average", description="with several ranks: average running statistics every epoch, or share them in each batch"
    )
    evaluate_every: int = Field(1, ge=1, description="epochs from one test to the next; the last epoch always has one")
    eval_batch_size: int = Field(1024, ge=1, description="batch size for passes without gradients")
    bad_batches: Literal["stop", "skip"] = Field(
        "stop",
        description="what to do with a batch whose loss or update is not finite: stop the run, or skip and count it",
    )
    out_of_memory: Literal["halve", "stop"] = Field(
        "halve",
        description="what to do when a step runs out of memory: compute it in parts from then on and add up their "
        "gradients (batch norm then sees parts, so bits differ from those with more memory), or stop the run",
    )
    data_on: Literal["auto", "device", "host"] = Field(
        "auto",
        description="where to keep training inputs; auto: on the device if they fit, else on the host",
    )
    folds: int | None = Field(
        None,
        ge=0,
        description="judge each training label out of sample: train again on all but one of this many parts, for each "
        "part, and take labels and confidence from there; 0: off; default: 5 for features, 0 for images",
    )
    candidate_weights: bool | None = Field(
        None,
        description="let CroSel, CC and PRODEN learn from weights of the candidates, if the data have any: a column "
        "`weight`, votes or scores; default: yes",
    )
    log_every: int = Field(
        50, ge=1, description="steps from one loss report to the next (on a GPU, reports lag by one)"
    )
    keep_checkpoints: int = Field(2, ge=1, description="number of checkpoints to keep, the newest ones")

    @field_validator("milestones")
    @classmethod
    def _milestones(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if any(not 0 < m < 1 for m in value) or list(value) != sorted(value):
            raise ValueError("give rising numbers between 0 and 1, such as [0.5, 0.75]")
        return value

    @field_validator("folds")
    @classmethod
    def _folds(cls, value: int | None) -> int | None:
        if value == 1:
            raise ValueError("give 0, or at least 2 parts")
        return value

    @model_validator(mode="after")
    def _nesterov(self) -> TrainSettings:
        if self.nesterov and self.optimiser == "adam":
            raise ValueError(f"nesterov works only with SGD, but optimiser is {self.optimiser}; set nesterov to false")
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def remarks(self) -> list[str]:
        """What is allowed, but does nothing: lines for the user. Not of defaults, all of which a run's config.yaml
        repeats."""
        return [
            f"train.{name} has no effect with train.schedule={self.schedule}; it needs train.schedule=step"
            for name in ("milestones", "decay")
            if self.schedule != "step" and getattr(self, name) != type(self).model_fields[name].default
        ]


class RunConfig(Settings):
    """A run: its data, method, network and training."""

    source: str = Field(description="digits, cifar10, cifar100, cifar100-coarse, svhn, a file or a folder")
    data_dir: str | None = Field(
        None, description="folder with the published files of cifar10, …, or with moved files (`--data`)"
    )
    candidates: str | None = Field(None, description="rule that makes candidate sets, such as uniform:q=0.3")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of candidate sets, weights and all other random numbers")
    method: SerializeAsAny[MethodSettings]
    data: DataSettings = DataSettings()
    network: NetworkSettings = NetworkSettings()
    augment: AugmentSettings = AugmentSettings()
    train: TrainSettings = TrainSettings()

    @property
    def data_folder(self) -> Path | None:
        return Path(self.data_dir) if self.data_dir else None

    def remarks(self) -> list[str]:
        """Settings that will not do what their names say, a line each."""
        return [*self.method.remarks(self.train.epochs), *self.train.remarks()]

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def build_config(
    *,
    preset: str | None = None,
    file: Path | None = None,
    settings: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    base: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Merge `base` (a whole tree of settings), preset, file, flags (`values`) and `--set` items, each over the one
    before, and check the result."""
    tree: dict[str, Any] = dict(base) if base else {"method": {"name": "crosel"}}
    flags = {key: value for key, value in (values or {}).items() if value is not None}
    preset_tree = read_preset(preset) if preset is not None else {}
    for given in ([preset_tree], [read_yaml(file) if file else {}], [flags, parse_set(settings, RunConfig)]):
        before = tree
        for layer in given:  # by their new names before they are merged: of both names, the one given later counts
            tree = merge(tree, _with_new_names(layer, _method_name(layer) or _method_name(tree)))
        tree = _shrink_stages(tree, _epochs(before), given)
    return check_config(with_backbone_defaults(tree))


# A linear head on embeddings of images and of texts: chosen on other examples than those of the recipes' tables.
HEAD_SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
TEXT_HEAD = {"lr": 0.01, "weight_decay": 0.03}
# Usual values, not searched.
FINE_TUNING = {
    "optimiser": "adamw", "lr": 0.001, "weight_decay": 0.05, "epochs": 20, "lr_ramp": 1, "eval_batch_size": 64
}  # fmt: skip


def with_backbone_defaults(tree: dict[str, Any]) -> dict[str, Any]:
    """Other defaults where a pretrained backbone is the network; what anybody has set stays."""
    network = tree.get("network")
    name = network.get("name") if isinstance(network, Mapping) else None
    if not isinstance(network, Mapping) or not isinstance(name, str) or not is_backbone(name):
        return tree
    head = TEXT_HEAD if name.startswith("text/") else HEAD_SETTINGS
    return merge({"train": head if network.get("freeze", True) is True else FINE_TUNING}, tree)


def _epochs(tree: Mapping[str, Any]) -> int | None:
    train = tree.get("train")
    epochs = train.get("epochs") if isinstance(train, Mapping) else None
    return epochs if isinstance(epochs, int) else None


def _shrink_stages(tree: dict[str, Any], planned: int | None, given: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Make room after a method's stages (a warm-up, say) if fewer epochs are asked for than the preset or file planned.
    If the stages would take them all, they shrink in proportion, except those `given` together with the epochs."""
    method, epochs = tree.get("method"), _epochs(tree)
    if not isinstance(method, Mapping) or epochs is None or planned is None or not 0 < epochs < planned:
        return tree
    defaults = {name: field.default for name, field in stages(find_method(str(method.get("name"))).Settings).items()}
    asked = {name: method.get(name, default) for name, default in defaults.items()}
    lengths = {name: length for name, length in asked.items() if isinstance(length, int) and length > 0}
    if epochs > sum(lengths.values()):
        return tree
    fixed = {name for layer in given if isinstance(layer.get("method"), Mapping) for name in layer["method"]}
    shrunk = {
        # Nothing left: the method's own rule for few epochs, if it has one.
        name: length * epochs // planned or (None if defaults[name] is None else 1)
        for name, length in lengths.items() if name not in fixed
    }  # fmt: skip
    return tree | {"method": {**method, **shrunk}}


class RemovedSettingError(UserError):
    """A setting of an earlier version that is gone."""


def _method_name(tree: Mapping[str, Any]) -> str | None:
    method = tree.get("method")
    return str(method["name"]) if isinstance(method, Mapping) and "name" in method else None


def _with_new_names(tree: Mapping[str, Any], method: str | None, warn: Warn | None = logger.warning) -> dict[str, Any]:
    """Settings of an earlier version by the names they have now; `warn` is told about those that matter."""

    def field(name: str) -> FieldInfo | None:
        section, _, setting = name.partition(".")
        try:
            settings = find_method(str(method)).Settings if section == "method" else TrainSettings
        except UserError:  # an unknown method: said when it is looked for
            return None
        return settings.model_fields.get(setting)

    new, found = with_new_names(tree, lambda name: field(name) is not None)
    for old, value in found.items():
        now = field(RENAMED[old])
        if warn and now is not None and value != now.default:
            warn(f"setting '{old}' is called '{RENAMED[old]}' now; the old name still works")
    return new


def check_config(
    tree: Mapping[str, Any],
    place: str = "",
    removed: Literal["refuse", "tell", "ignore"] = "refuse",
    warn: Warn = logger.warning,
) -> RunConfig:
    """Validate a tree of settings, or say in one line what is wrong with the first faulty one.

    Of an earlier version's settings that are `removed`, a new run refuses those that did something; an old run opens.
    """
    tree = _with_new_names(tree, _method_name(tree), None if removed == "ignore" else lambda line: warn(place + line))
    gone = removed_settings(tree)
    for name, value in gone.items():
        if removed == "refuse":
            raise RemovedSettingError(
                f"{place}setting '{name}' does not exist any more (given: {value}); train without it, or with crosel "
                "0.1.0"
            )
        if removed == "tell":
            warn(f"{place}setting '{name}' does not exist any more; {value} was used in training")
    for section, _, setting in (name.partition(".") for name in gone):
        tree = {**tree, section: {key: value for key, value in tree[section].items() if key != setting}}
    method = tree.get("method")
    if not isinstance(method, Mapping):
        raise UserError(
            f"{place}setting 'method' needs a name and its settings, as in method: {{name: crosel}}, or --method crosel"
        )
    try:
        checked = method_settings(method)
    except ValidationError as error:
        raise UserError(place + _explain(error, ["method"], tree)) from None
    except UserError as error:  # the method itself
        remedy = "; if it comes from another package, install that package" if place else ""
        raise UserError(f"{place}{error}{remedy}") from None
    try:
        return _with_defaults(RunConfig.model_validate({**tree, "method": checked}))
    except ValidationError as error:
        raise UserError(place + _explain(error, [], tree)) from None


def _with_defaults(config: RunConfig) -> RunConfig:
    """Fill in what follows from the method and the number of epochs, where nobody gave it."""
    method, augment = config.method.filled_in(config.train.epochs), config.augment
    views = find_method(method.name).view_defaults
    missing = {name: value for name, value in views.items() if name not in augment.model_fields_set}
    return config.model_copy(update={"method": method, "augment": augment.model_copy(update=missing)})


# What pydantic says in Python's words.
_PLAIN = {
    **dict.fromkeys(("tuple_type", "list_type"), "input should be a list in brackets, as in [1, 2]"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "input should be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "input should be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "input should be true or false"),
    "string_type": "input should be text; put it in quotes",
}


def _explain(error: ValidationError, prefix: list[str], tree: Mapping[str, Any]) -> str:
    """One line for the first fault, with the nearest known name for an unknown one."""
    first = error.errors()[0]
    path = [*prefix, *(str(part) for part in first["loc"])]
    name = ".".join(path)
    if first["type"] == "extra_forbidden":
        owners = [name for name, method in methods().items() if path[-1] in method.Settings.model_fields]
        if prefix == ["method"] and len(path) == 2 and owners:
            return f"unknown setting '{name}' of method '{tree['method']['name']}'; it belongs to {', '.join(owners)}"
        if groups := [group for group in RunConfig.model_fields if path[-1] in _known_names([group], tree)]:
            there = " or ".join(f"'{group}.{path[-1]}'" for group in groups)
            return f"unknown setting '{name}' (did you mean {there}?)"
        known, section = _known_names(path[:-1], tree), "".join(f"{part}." for part in path[:-1])
        if did_you_mean(path[-1], known):  # without the section, which would make all of them alike
            return f"unknown setting '{name}'{did_you_mean(name, [section + n for n in known])}"
        return f"unknown setting '{name}'" + (f"; choose from {', '.join(section + n for n in known)}" if known else "")
    if first["type"] == "missing":
        return f"setting '{name}' is missing"
    given = first.get("input")
    shown = f" (given: {one_line(repr(given))})" if isinstance(given, str | int | float | bool | list | tuple) else ""
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] in ("model_type", "model_attributes_type"):
        return f"setting '{name}' is a group; name one setting of it, as in {name}.{_known_names(path, tree)[0]}"
    message = _PLAIN.get(first["type"], message)
    return f"setting '{name}': {message[0].lower() + message[1:]}{shown}"


def _known_names(path: list[str], tree: Mapping[str, Any]) -> list[str]:
    """The settings of a section; none where it has none."""
    if path[:1] == ["method"]:
        section = declared_type(find_method(tree["method"]["name"]).Settings, path[1:])
    else:
        section = declared_type(RunConfig, path)
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
