"""Build a session from a config and data, and refuse what could not be trained."""

from __future__ import annotations

import copy
import logging
import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import CodeType
from typing import Any

import torch

from crosel.augment import make_views
from crosel.config import HEAD_SETTINGS, RunConfig
from crosel.data.dataset import Dataset
from crosel.data.embeddings import ChooseEncoder
from crosel.data.images import ImageSource, typical_size
from crosel.data.settings import DataSettings
from crosel.errors import UserError
from crosel.methods.base import Method, Problem, find_method, methods
from crosel.nn.backbones import (
    SUGGESTED,
    Backbone,
    check_digest,
    digest_of,
    image_model,
    installed,
    is_backbone,
    open_backbone,
    picture_settings,
)
from crosel.nn.cuda import is_out_of_memory
from crosel.nn.factory import (
    NetworkFactory,
    NetworkSettings,
    is_user_code,
    network_factory,
    network_name,
    user_code_error,
)
from crosel.nn.fine_tuning import FineTuned
from crosel.nn.networks import convert_sync_batch_norm
from crosel.training.batches import Normaliser, TrainingTensors
from crosel.training.devices import computes_in_bf16, inputs_stay_on_host
from crosel.training.session import Session
from crosel.utils.distributed import SINGLE_PROCESS, World
from crosel.utils.text import one_line

logger = logging.getLogger(__name__)

FOLDS = 5  # for features, where training again takes little time
FEATURE_NOISE = 0.3  # of their standard deviation
FEW_ROWS_DECAY = 0.01  # weight decay of a linear classifier, where there are few rows


def resolve(config: RunConfig, data: Dataset, device: torch.device | None = None) -> RunConfig:
    """Fill in what follows from data and device, so that the saved config alone repeats the run."""
    augment, network, train, left = config.augment, config.network, config.train, filled_from_data(config)
    if "augment.flip" in left:
        augment = augment.model_copy(update={"flip": data.flips})
    if "augment.cutout_fill" in left and data.is_image:
        augment = augment.model_copy(update={"cutout_fill": middle_grey(data.brightest)})
    if "network.name" in left and data.embedded_by is None:
        network = network.model_copy(update={"name": network_name(network, data.shape)})
    if data.embedded_by is not None:
        name, weights = data.embedded_by
        if "network.name" in left:  # photographs chose it: with settings of a head, where nobody has given others
            given = network.model_dump(include=network.model_fields_set)
            network = NetworkSettings.model_validate({**given, "name": name})
            train = train.model_copy(update={k: v for k, v in HEAD_SETTINGS.items() if k not in train.model_fields_set})
        network = network.model_copy(update={"digest": weights})
    if network.fine_tunes:
        body = image_model(network.name, network.weights) if network.digest is None else None
        digest = network.digest if body is None else digest_of(body.state_dict(), network.name)
        network = network.model_copy(update={"size": side_of(network), "digest": digest})
    if "train.bf16" in left and device is not None:
        train = train.model_copy(update={"bf16": computes_in_bf16(device)})
    if "train.folds" in left:
        train = train.model_copy(update={"folds": 0 if data.is_image or data.n < FOLDS * 2 else FOLDS})
    elif train.folds and train.folds > data.n:
        raise UserError(f"setting 'train.folds': {train.folds} parts of {data.n} examples; use fewer")
    features = not data.is_image and data.embedded_by is None
    own_network = features and network.name == "mlp" and "network.hidden" in left
    few = own_network and has_few_rows(data)
    values: dict[str, Any] = {  # docs/real-world.md
        "network.scaling": "robust" if features else "standard",
        "network.hidden": network.hidden if not features else () if few else (512,),
        "train.weight_decay": FEW_ROWS_DECAY if few else train.weight_decay,
        "train.candidate_weights": data.weights is not None,
        "augment.weak_feature_noise": FEATURE_NOISE if features else augment.weak_feature_noise,
    }
    if own_network and not few:
        values |= {f"method.{name}": value for name, value in many_rows_defaults(config).items()}
    made = {
        "augment": augment, "network": network, "train": train, "data": data_settings(config), "method": config.method,
    }  # fmt: skip
    for section, _, name in (full.partition(".") for full in values.keys() & left):
        made[section] = made[section].model_copy(update={name: values[f"{section}.{name}"]})
    return config.model_copy(update=made)


def many_rows_defaults(config: RunConfig) -> Mapping[str, Any]:
    return find_method(config.method.name).many_rows_defaults


def has_few_rows(data: Dataset) -> bool:
    """Whether a linear classifier has more weights than there are rows of features: a hidden layer would learn by heart
    what is wrong in the sets before it learns what speaks against it."""
    return data.n < data.shape[0] * len(data.classes)


def data_settings(config: RunConfig) -> DataSettings:
    """How data are read. Image files are brought to the size that a fine-tuned backbone sees."""
    if not config.network.fine_tunes or "image_size" in config.data.model_fields_set:
        return config.data
    return config.data.model_copy(update={"image_size": side_of(config.network)})


def side_of(network: NetworkSettings) -> int:
    """Pixels of the side of what a fine-tuned backbone sees."""
    return network.size or int(picture_settings(network.name)["input_size"][1])


_LEAST_ROWS = 500  # half of what the smallest set of the trials had


def better_method(session: Session) -> str | None:
    """The method that did best on rows of features like these (docs/real-world.md), if it is another.

    Where candidates have weights, which not all methods learn from, that was not measured, nor on a handful of rows.
    """
    data = session.data
    if data.is_image or data.embedded_by is not None or data.weights is not None or data.n < _LEAST_ROWS:
        return None
    kind = "few rows" if has_few_rows(data) else "many rows"
    return None if session.method.best_on == kind else next(m.name for m in methods().values() if m.best_on == kind)


PHOTOGRAPH = 64  # image files with more pixels than this on their short side are learnt from on a backbone


def choose_encoder(config: RunConfig, device: torch.device | None = None) -> Backbone | ChooseEncoder | None:
    """What turns inputs into embeddings: the run's backbone; for `auto`, one for photographs, where they can be had."""
    if config.network.name != "auto" or "image_size" in config.data.model_fields_set:
        return open_encoder(config, device)

    def choose(paths: Sequence[ImageSource]) -> Backbone | None:
        weights = config.network.weights
        if weights is not None:  # somebody has them for a backbone, and wants no other network
            return open_backbone(SUGGESTED[0][0], weights, device)
        width, height = typical_size(paths)
        if min(width, height) <= PHOTOGRAPH:
            return None
        side = config.data.image_size
        reduced = f"images of {width} x {height} pixels are reduced to {side} x {side} and learnt from scratch"
        if not installed("timm"):
            logger.warning(f"{reduced}; a pretrained backbone does better: pip install 'crosel[photos]'")
            return None
        try:
            backbone = open_backbone(SUGGESTED[0][0], None, device)
        except UserError as error:
            logger.warning(f"{reduced}, since {error}")
            return None
        scratch = f"--set data.image_size={side}"
        logger.info(f"images of {width} x {height} pixels: learning on {backbone.name}; from scratch: {scratch}")
        return backbone

    return choose


def open_encoder(config: RunConfig, device: torch.device | None = None) -> Backbone | None:
    """The pretrained backbone whose embeddings a run learns from, if it has one; of the weights that the run had."""
    network = config.network
    if not is_backbone(network.name) or network.fine_tunes:
        return None
    backbone = open_backbone(network.name, network.weights, device)
    check_digest(network.digest, backbone.digest, network.name)
    return backbone


def filled_from_data(config: RunConfig) -> set[str]:
    """Dotted names of what `resolve` fills in: in these a run's config may differ from what was asked for."""
    given = {
        **{f"augment.{name}": name in config.augment.model_fields_set for name in FROM_DATA},
        "network.name": config.network.name != "auto",
        "network.scaling": config.network.scaling is not None,
        "network.hidden": "hidden" in config.network.model_fields_set,
        "train.lr": config.network.name != "auto" or "lr" in config.train.model_fields_set,
        "train.weight_decay": config.network.name not in ("auto", "mlp")
        or "weight_decay" in config.train.model_fields_set,
        "network.digest": config.network.digest is not None or not is_backbone(config.network.name),
        "network.size": config.network.size is not None or not config.network.fine_tunes,
        "data.image_size": not config.network.fine_tunes or "image_size" in config.data.model_fields_set,
        "train.bf16": config.train.bf16 != "auto",
        "train.folds": config.train.folds is not None,
        "train.candidate_weights": config.train.candidate_weights is not None,
        **{f"method.{name}": name in config.method.model_fields_set for name in many_rows_defaults(config)},
    }
    return {name for name, is_given in given.items() if not is_given}


_DRAWING = threading.Lock()
FROM_DATA = ("flip", "cutout_fill", "weak_feature_noise")  # settings of `augment`


def middle_grey(brightest: int) -> int:
    """What a cut-out square is filled with. On images that are dark throughout, 127 would be brighter than anything."""
    return 127 if brightest >= 128 else brightest // 2


def build_session(
    config: RunConfig,
    data: Dataset,
    device: torch.device,
    make_network: NetworkFactory | None = None,
    trust_code: bool = False,
    world: World = SINGLE_PROCESS,
    pretrained: bool = True,
) -> Session:
    """Build networks and method for a resolved config. `make_network` replaces the named network; a name that is
    `module:factory` imports code, which needs `trust_code`. Not `pretrained`: a run's weights are loaded next."""
    assert data.candidates is not None
    classes = len(data.classes)
    factory = make_network or network_factory(config.network, data.shape, classes, trust_code, pretrained)
    batch_size = min(config.train.batch_size, max(2, data.n))  # batch norm has no statistics of a single example
    if world.size > 1 and batch_size < 2 * world.size:
        raise UserError(
            f"a step has {batch_size} examples and there are {world.size} ranks: each needs at least two; "
            "raise train.batch_size or start fewer processes"
        )
    steps = math.ceil(data.n / batch_size)
    weights = torch.from_numpy(data.weights) if config.train.candidate_weights and data.weights is not None else None
    own_rows = world.local_rows(data.n) if world.rank else None  # rank 0 begins, and ends, with all
    problem = Problem(torch.from_numpy(data.candidates), config.train.epochs, weights, own_rows)
    method_class = find_method(config.method.name)
    # Starting values follow from the seed. torch's modules draw them from the generator of the whole process: one
    # thread at a time has it, and leaves it as it was.
    with _DRAWING, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        method = method_class(config.method, problem, factory).to(device)
    if data.is_image:
        method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    check_network(method, data, device, config.network.name)
    if isinstance(method.networks[0], FineTuned):
        data = replace(data, mean=method.networks[0].mean, std=method.networks[0].std)
    method.world = world
    if world.size > 1 and config.train.batch_norm == "synchronise":
        heads = [network.head for network in method.modules() if isinstance(network, FineTuned)]
        for part in heads or (method,):  # a backbone's statistics stay as they are
            convert_sync_batch_norm(part, world)
    normalise = Normaliser.of(data, config.network.scaling == "robust").to(device)
    return Session(
        config, data, device, method, normalise,
        TrainingTensors(
            data, make_views(data.shape, config.augment), normalise, device,
            on_host=inputs_stay_on_host(config.train.data_on, data.x.nbytes, device), world=world,
        ),
        torch.Generator(device).manual_seed(config.seed), steps, batch_size, world=world,
    )  # fmt: skip


@torch.enable_grad()
def check_network(method: Method, data: Dataset, device: torch.device, name: str) -> None:
    """Let a user's own network fail here, with a clear line, not in the middle of a step."""
    if len({id(network) for network in method.networks}) < len(method.networks):
        raise UserError("the factory returned the same network twice; build a new one in every call")
    if not any(weight.requires_grad for weight in method.networks.parameters()):
        raise UserError("the network has no weights that can be trained (requires_grad)")
    method.eval()
    sample = torch.zeros(2, *data.shape, device=device)
    try:
        out = method.outputs(sample)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if isinstance(error, TypeError) and raising_code(error) is Method.outputs.__code__:  # all networks returned
            raise UserError(
                f"the network does not return a tensor ({one_line(error)}); let it return logits [n, classes]"
            ) from None
        if is_user_code(name) and (told := user_code_error(name, error)):
            raise UserError(f"network '{name}' cannot take inputs of shape {data.shape}: {told}") from error
        if not isinstance(error, RuntimeError | ValueError | TypeError):
            raise
        raise UserError(
            f"the network cannot take inputs of shape {data.shape} ({one_line(error)}); choose another network"
        ) from None
    if out.shape[1:] != (2, len(data.classes)):
        raise UserError(
            f"the network gives {tuple(out.shape[2:])} outputs per example, but there are {len(data.classes)} classes; "
            "give its last layer one output for each class"
        )
    if not out.requires_grad and not torch.is_inference_mode_enabled():
        raise UserError(
            "the network's outputs do not depend on weights that can be trained; "
            "look for detach() or torch.no_grad() in its forward"
        )


def raising_code(error: BaseException) -> CodeType:
    """The function in which it was raised."""
    return list(traceback.walk_tb(error.__traceback__))[-1][0].f_code


@torch.no_grad()
def check_batch_size(session: Session) -> None:
    """Refuse what training would fail on: of a single example batch norm has statistics only where it has several
    pixels."""
    if session.batch_size > 1:
        return
    network = copy.deepcopy(session.method.networks[0]).train()  # a copy: running statistics move
    try:
        network(torch.zeros(1, *session.data.shape, device=session.device))
    except ValueError:
        raise UserError(
            "this network has batch normalisation and cannot train on batches of one example; raise the batch size "
            f"(train.batch_size is {session.config.train.batch_size})"
        ) from None
