"""A short run of every method without any extra: train, go on, evaluate, predict, labels, report, estimator.

    python tests/faults/short_run.py [WORD]      # prints one line of JSON: the versions, and what was done

Stands alone, so that any environment with crosel in it can run it. The exit code says whether all went well.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path

PACKAGES = ("torch", "numpy", "pillow", "scikit-learn", "pydantic", "pyyaml", "rich", "safetensors", "scipy", "typer")
EXTRAS = ("fastapi", "uvicorn", "pytest")
SETTINGS = ("--set", "train.epochs=2", "--set", "network.width=4", "--candidates", "uniform:q=0.3")


def crosel(*args: object) -> str:
    from crosel.cli.app import main

    old, sys.argv = sys.argv, ["crosel", *map(str, args)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"crosel {' '.join(map(str, args))}: exit {end.code}: {err.getvalue()}") from None
    finally:
        sys.argv = old
    return out.getvalue()


def everything(folder: Path) -> dict[str, float]:
    import numpy as np
    from sklearn.datasets import load_digits

    from crosel import CroSelClassifier
    from crosel.data.candidates import uniform
    from crosel.methods.base import methods

    x, y = load_digits(return_X_y=True)
    np.savez(folder / "new.npz", x=np.rint(x[:20].reshape(-1, 8, 8) * 255 / 16).astype(np.uint8))
    accuracy = {}
    for name in methods():
        run = folder / name
        crosel("train", "digits", "--method", name, *SETTINGS, "--out", run)
        crosel("train", "--resume", "--out", run)
        accuracy[name] = json.loads(crosel("eval", run, "--json"))["test_accuracy"]
        crosel("predict", run, folder / "new.npz", "--out", folder / f"{name}.csv")
        crosel("labels", run, "--out", folder / f"{name}.jsonl")
    crosel("report", folder / "crosel", folder / "cc", "--out", folder / "report.html")
    crosel("info")
    model = CroSelClassifier(epochs=2).fit(x[:200] / 16, uniform(y[:200], 10, 0.3, 0))
    accuracy["estimator"] = float(model.score(x[200:] / 16, y[200:]))
    return accuracy


def main() -> int:
    import crosel as package

    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    row = {
        "wanted": sys.argv[1] if len(sys.argv) > 1 else "", "python": platform.python_version(),
        "crosel": package.__version__, **versions,
        "extras": [name for name in EXTRAS if importlib.util.find_spec(name)],
    }  # fmt: skip
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            row["accuracy"] = {name: round(value, 4) for name, value in everything(Path(folder)).items()}
    except Exception:
        row["error"] = traceback.format_exc()[-2000:]
    row |= {"seconds": round(time.perf_counter() - started, 1), "ok": "error" not in row}
    print(json.dumps(row), flush=True)
    return int(not row["ok"])


if __name__ == "__main__":
    sys.exit(main())
