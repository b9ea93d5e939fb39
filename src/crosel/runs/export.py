"""A run's classifier as one file that needs no crosel: an ONNX model, or a program of `torch.export`.

It takes inputs as crosel takes them (uint8 images [n, h, w, c] or float32 features [n, d]) and returns probabilities
[n, k]: normalisation, all networks and the method's `combine` are inside, and a description (`DESCRIPTION`) in JSON.
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import crosel
from crosel.errors import UserError
from crosel.nn.backbones import ImageBackbone, TextBackbone
from crosel.nn.factory import is_user_code, user_code_error
from crosel.runs.folder import load_run
from crosel.training.build import open_encoder
from crosel.training.devices import compute_context
from crosel.training.session import Session
from crosel.training.trainer import predicted_probabilities
from crosel.utils.files import atomic_write_with, new_folder, refuse_overwrite
from crosel.utils.text import choose_from, one_line

ENDINGS = {"onnx": ".onnx", "torch": ".pt2"}
DESCRIPTION = "crosel.json"  # its name among the ONNX file's metadata, and among the .pt2 file's extra files
_OPSET = 18  # of ONNX: the lowest that the exporters of all our versions of torch write
_TOLERANCE = 1e-5
_RULE = "Its forward must take the same steps whatever the values and the number of examples, without random numbers"

logger = logging.getLogger(__name__)


def export_run(run: Path | str, to: str, out: Path | str, trust_code: bool = False) -> dict[str, Any]:
    """Write the run's classifier to `out`, as an .onnx file (`to="onnx"`) or a .pt2 file (`to="torch"`).

    Return the description that is in the file: class names, the form of the inputs, names of the features.
    """
    run, out = Path(run), Path(out)
    check_target(to, out)
    session = load_run(run, torch.device("cpu"), trust_code, needs_data=False)
    refuse_overwrite(out, session.config.source, session.config.data.inputs)
    backbone = open_encoder(session.config)
    if isinstance(backbone, TextBackbone):
        logger.warning(f"{run}: the file takes embeddings of {backbone.name}, not texts")
        backbone = None
    description = describe(session, backbone)
    content = json.dumps(description, ensure_ascii=False)
    who = f"{run}: network '{session.config.network.name}'"
    with new_folder(out.parent), session.evaluating(), compute_context(session.config, session.device), _quiet():
        program = traced(session, who, backbone)
        if to == "onnx":
            model = onnx_model(program, who, description["input"]["name"], content)
            atomic_write_with(out, lambda stream: stream.write(model))
        else:
            extra = {DESCRIPTION: content}
            atomic_write_with(out, lambda stream: torch.export.save(program, stream, extra_files=extra))
    return description


def check_target(to: str, out: Path) -> None:
    """Refuse, before anything is read, what cannot be written."""
    if to not in ENDINGS:
        raise UserError(f"--to {to}: there is no such form{choose_from(to, ENDINGS)}")
    if out.suffix.lower() != ENDINGS[to]:
        raise UserError(f"{out}: --to {to} writes a {ENDINGS[to]} file; use this ending")
    if to == "onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError("--to onnx needs onnxscript, which is not installed: pip install 'crosel[onnx]'")


def describe(session: Session, backbone: ImageBackbone | None = None) -> dict[str, Any]:
    """What whoever gets the file has to know."""
    data = session.data
    if backbone is not None:  # pictures as it wants them: the short side resized, the middle cut out
        taken = {
            "name": "images", "dtype": "uint8", "shape": ["n", backbone.size, backbone.size, 3],
            "short_side": backbone.resized, "interpolation": backbone.resampling.name.lower(),
        }  # fmt: skip
    elif data.is_image:
        channels, height, width = data.shape
        taken = {"name": "images", "dtype": "uint8", "shape": ["n", height, width, channels]}
    else:
        taken = {"name": "features", "dtype": "float32", "shape": ["n", *data.shape]}
        if data.columns is not None:
            taken["columns"] = list(data.columns)
    return {
        "classes": list(data.classes), "input": taken, "method": session.method.name, "crosel": crosel.__version__,
    }  # fmt: skip


class _Classifier(nn.Module):
    """Raw inputs -> probabilities. The method itself is no part of it: its tables are about the training set."""

    def __init__(self, session: Session, backbone: ImageBackbone | None = None) -> None:
        super().__init__()
        self.networks, self.normalise = session.method.networks, session.normalise
        self.backbone = None if backbone is None else backbone.model
        self._embed = None if backbone is None else backbone.embed
        self._outputs, self._combine = session.method.outputs, session.method.combine

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            x = x.permute(0, 3, 1, 2)
        if self._embed is not None:
            x = self._embed(x)
        return self._combine(self._outputs(self.normalise(x)))


@torch.no_grad()
def traced(session: Session, who: str, backbone: ImageBackbone | None = None) -> ExportedProgram:
    """The classifier as a graph for any number of examples, once it is known to predict as the run does; `who` is
    named in errors."""
    examples = sample_inputs(session, 5, backbone)
    name = session.config.network.name
    try:
        # Of two examples: one would be taken for a size of its own.
        program = torch.export.export(
            _Classifier(session, backbone), (examples[:2],), dynamic_shapes=({0: Dim("n")},), strict=False
        )
        found = program.module()(examples)
    except Exception as error:  # torch has many errors for what it cannot trace
        told = user_code_error(name, error) if is_user_code(name) else ""
        raise UserError(f"{who} cannot be exported: {told or one_line(error)}. {_RULE}") from error
    raw = examples.permute(0, 3, 1, 2).contiguous().numpy() if session.data.is_image else examples.numpy()
    expected = predicted_probabilities(session, raw if backbone is None else backbone.encode(raw))
    if not torch.allclose(found, expected, rtol=0, atol=_TOLERANCE):
        raise UserError(f"{who} predicts something else once exported. {_RULE}")
    for node in program.graph.nodes:  # names files of this machine
        node.meta.pop("stack_trace", None)
    return program


def sample_inputs(session: Session, n: int, backbone: ImageBackbone | None = None) -> Tensor:
    """Inputs that look like those of training to the networks, as the exported classifier takes them."""
    rng = np.random.default_rng(0)
    if backbone is not None:
        return torch.from_numpy(rng.integers(0, 256, (n, backbone.size, backbone.size, 3), dtype=np.uint8))
    if session.data.is_image:
        channels, height, width = session.data.shape
        return torch.from_numpy(rng.integers(0, 256, (n, height, width, channels), dtype=np.uint8))
    noise = torch.from_numpy(rng.normal(size=(n, math.prod(session.data.shape))).astype(np.float32))
    return session.normalise.mean + session.normalise.std * noise


def onnx_model(program: ExportedProgram, who: str, name: str, description: str) -> bytes:
    """The program as an ONNX model. What is noted in it about our code and this machine is left out."""
    try:
        exported = torch.onnx.export(
            program, dynamo=True, opset_version=_OPSET, input_names=[name], output_names=["probabilities"],
            verbose=False,
        )  # fmt: skip
        assert exported is not None
        model = exported.model_proto
    except Exception as error:  # of many kinds, also where the two packages do not fit each other
        cause = innermost_cause(error)
        raise UserError(
            f"{who} cannot be written as ONNX by torch {torch.__version__} and onnxscript {version('onnxscript')} "
            f"({type(cause).__name__}: {one_line(cause)}); update both, or use --to torch"
        ) from error
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        part.ClearField("metadata_props")
    own_name = graph.input[0].type.tensor_type.shape.dim[0].dim_param  # such as s77
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == own_name:
                dim.dim_param = "n"
    model.metadata_props.add(key=DESCRIPTION, value=description)
    content: bytes = model.SerializeToString(deterministic=True)
    return content


def innermost_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch says about its exporters, in warnings, log lines and prints; errors say what matters."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
