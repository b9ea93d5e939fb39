"""What `crosel info` says: versions, devices, methods, presets."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import crosel
from crosel.config import presets
from crosel.errors import counted
from crosel.methods import methods
from crosel.methods.base import faulty_methods

_NEEDED = ("torch", "numpy", "scipy", "pillow", "scikit-learn", "pydantic", "pyyaml", "safetensors", "typer")
_OPTIONAL = ("fastapi", "uvicorn", "matplotlib", "tensorboard", "wandb", "ray", "optuna")


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def info_lines() -> list[str]:
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
        lines.append(f"no CUDA device; {counted(torch.get_num_threads(), 'CPU thread')}")
    lines += ["", "methods:", *(f"  {name:<8} {m.paper}" for name, m in methods().items())]
    lines += [f"  {name:<8} {why}" for name, why in faulty_methods().items()]
    return [*lines, "", "presets:", *(f"  {name}" for name in presets())]
