"""Using a finished run: measuring it, and predicting with it."""

from __future__ import annotations

import csv
import io
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

import crosel
from crosel import metrics
from crosel.config import presets
from crosel.data import load
from crosel.data.dataset import as_inputs
from crosel.errors import UserError
from crosel.files import atomic_write_with
from crosel.methods import methods
from crosel.run import load_run
from crosel.session import Session
from crosel.train import predict_chunks, test_pass


def evaluate_run(
    run: Path, source: str | None, data_dir: Path | None, device: torch.device, trust_code: bool = False
) -> dict[str, Any]:
    """Accuracy on the run's test set (or on all labelled examples of another source), and the training set's rest."""
    session = load_run(run, device, trust_code, data_dir=data_dir, needs_data=source is None)
    result: dict[str, Any] = {"epoch": session.progress.epoch, "method": session.config.method.name}
    if source is not None:
        other = load(source, data_dir)
        if other.shape != session.data.shape:
            raise UserError(f"{source} has examples of shape {other.shape}, the run of shape {session.data.shape}")
        if other.classes != session.data.classes[: len(other.classes)]:  # a file may lack the last few
            ours, theirs = (", ".join(d.classes[:8]) for d in (session.data, other))
            raise UserError(f"{source} has other classes than the run: {theirs}, …; the run has {ours}, …")
        x, y = (other.x_test, other.y_test) if other.x_test is not None else (other.x, other.y)
        if x is None or y is None:
            raise UserError(f"{source} has no true labels (y) to compare with")
        return result | {"examples": len(x)} | test_pass(session, x, y)
    if session.data.x_test is not None and session.data.y_test is not None:
        result |= {"examples": len(session.data.x_test)}
        result |= test_pass(session, session.data.x_test, session.data.y_test)
    return result | training_metrics(session)


def training_metrics(session: Session) -> dict[str, float]:
    """What the training set itself says, with the method's selection where it has one."""
    p = torch.cat([session.method.combine(outputs) for _, outputs in predict_chunks(session, session.data.x)])
    sets = session.method.candidates
    out = {
        "covering_rate": float(metrics.covering_rate(p, sets)),
        "approximated_accuracy": float(metrics.approximated_accuracy(p, sets)),
    }
    chosen = session.method.training_labels()
    if chosen is not None:
        out["selection_ratio"] = float(chosen.selected.float().mean())
        if session.data.y is not None:
            truth = torch.from_numpy(session.data.y).to(session.device)
            right = metrics.oracle_selection_accuracy(chosen.labels, chosen.selected, truth)
            if right is not None:
                out["oracle_selection_accuracy"] = right
    return out


def read_inputs(path: Path, session: Session) -> tuple[np.ndarray[Any, Any], list[str]]:
    """Examples to predict, and their ids."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix != ".npz":
        raise UserError(f"{path}: cannot read '{path.suffix}'; give an npz file with x")
    try:
        loaded = np.load(path, allow_pickle=False)  # object arrays are pickles: never from outside
        if isinstance(loaded, np.ndarray):
            raise UserError(f"{path}: this is a single array; an npz file with x is needed")
        with loaded as archive:
            if "x" not in archive.files:
                raise UserError(f"{path}: the array 'x' is missing")
            x = archive["x"]
            ids = [str(i) for i in archive["ids"]] if "ids" in archive.files else []
    except UserError:
        raise
    except Exception as error:  # zip, zlib and numpy each have their own errors for a damaged file
        raise UserError(f"{path}: not a readable npz file ({error})") from None
    x = as_inputs(x, f"{path}: x")
    if x.shape[1:] != session.data.shape:
        raise UserError(f"{path}: examples of shape {x.shape[1:]}; the run was trained on {session.data.shape}")
    if ids and len(ids) != len(x):
        raise UserError(f"{path}: x has {len(x)} examples, but there are {len(ids)} ids")
    return x, ids or [str(i) for i in range(len(x))]


def predict_file(run: Path, source: Path, out: Path, top: int, device: torch.device, trust_code: bool = False) -> int:
    """Write id, label and confidence of the `top` labels, chunk by chunk, to csv or jsonl."""
    if out.suffix not in (".csv", ".jsonl"):
        raise UserError(f"{out}: predictions are written as .csv or .jsonl; give the file one of these endings")
    session = load_run(run, device, trust_code, needs_data=False)
    x, ids = read_inputs(source, session)
    top = min(top, len(session.data.classes))
    line = _csv_line if out.suffix == ".csv" else _json_line

    def write(stream: IO[bytes]) -> None:
        if out.suffix == ".csv":
            more = [f"{word}_{rank}" for rank in range(2, top + 1) for word in ("label", "confidence")]
            stream.write(_csv(["id", "label", "confidence", *more]))
        for start, outputs in predict_chunks(session, x):
            best, order = session.method.combine(outputs).topk(top, dim=1)
            for row, (values, labels) in enumerate(zip(best.tolist(), order.tolist(), strict=True)):
                pairs = [(session.data.classes[j], p) for j, p in zip(labels, values, strict=True)]
                stream.write(line(ids[start + row], pairs))

    atomic_write_with(out, write)
    return len(x)


def _csv(cells: list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


def _csv_line(name: str, pairs: list[tuple[str, float]]) -> bytes:
    return _csv([name, *(cell for label, p in pairs for cell in (label, f"{p:.6f}"))])


def _json_line(name: str, pairs: list[tuple[str, float]]) -> bytes:
    top = [{"label": label, "probability": p} for label, p in pairs]
    row = {"id": name, "label": pairs[0][0], "confidence": pairs[0][1], "top": top}
    return (json.dumps(row, ensure_ascii=False) + "\n").encode()


_NEEDED = ("torch", "numpy", "scikit-learn", "pydantic", "pyyaml", "safetensors", "typer")
_OPTIONAL = ("scipy", "pillow", "ray")


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def info_lines() -> list[str]:
    """Versions, what is installed, devices, methods and presets, for `crosel info`."""
    lines = [
        f"crosel {crosel.__version__}, python {platform.python_version()}, {platform.platform()}",
        ", ".join(map(_installed, _NEEDED)),
        f"optional: {', '.join(map(_installed, _OPTIONAL))}",
    ]
    if torch.cuda.is_available():
        lines += [
            f"cuda {torch.version.cuda}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())
        ]
    else:
        lines.append(f"no CUDA device; {torch.get_num_threads()} CPU threads")
    lines += ["", "methods:", *(f"  {name:<8} {m.paper}" for name, m in methods().items())]
    return [*lines, "", "presets:", *(f"  {name}" for name in presets())]
