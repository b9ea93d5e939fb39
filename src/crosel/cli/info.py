"""`crosel info`: versions, devices, methods, presets; or all settings."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, get_args

import typer

import crosel
from crosel.cli.options import flag
from crosel.utils.text import counted

_NEEDED = ("torch", "numpy", "scipy", "pillow", "scikit-learn", "pydantic", "pyyaml", "safetensors", "rich", "typer")
_OPTIONAL = ("fastapi", "uvicorn", "matplotlib", "tensorboard", "wandb", "ray", "optuna", "onnxscript")


def info(
    settings: bool = flag("--settings", "list all settings with their defaults instead"),
) -> None:
    """Show versions, devices, methods and presets."""
    for line in settings_lines() if settings else info_lines():
        typer.echo(line)


def _installed(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


def info_lines() -> list[str]:
    import torch

    from crosel.methods import methods
    from crosel.methods.base import broken_methods
    from crosel.nn.backbones import EXTRAS, SUGGESTED, installed
    from crosel.presets import presets

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
    lines += [f"  {name:<8} {why}" for name, why in broken_methods().items()]
    lines += ["", "pretrained backbones (any of timm and sentence-transformers; parameters in millions):"]
    for kind, (_, command) in EXTRAS.items():
        missing = "" if installed(kind) else f"  (first: {command})"
        lines += [f"  {name:<48} {size:>4}  {what}{missing}" for name, size, what in SUGGESTED if name.startswith(kind)]
    return [*lines, "", "presets:", *(f"  {name:<26} {preset.title}" for name, preset in presets().items())]


class Setting(NamedTuple):
    name: str
    default: str  # empty where there is none
    others: list[str]  # the other values of a choice
    what: str


def settings_by_section() -> dict[str, list[Setting]]:
    """Every setting that `--set` and YAML files know, section by section, methods last."""
    from pydantic import BaseModel

    from crosel.config import RunConfig
    from crosel.methods import methods

    sections = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if name != "method" and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    own = [name for name in RunConfig.model_fields if name not in (*sections, "method")]
    first = [_setting(name, RunConfig.model_fields[name]) for name in own]
    first.append(Setting("method.name", "crosel", [], "name of the method; each has settings of its own, below"))
    models = {name: (name, model) for name, model in sections.items()}
    models |= {f"method: {name}": ("method", method.Settings) for name, method in methods().items()}
    return {"Run": first} | {
        title.capitalize(): [
            _setting(f"{prefix}.{name}", field)
            for name, field in model.model_fields.items()
            if (prefix, name) != ("method", "name")
        ]
        for title, (prefix, model) in models.items()
    }


def _setting(name: str, field: Any) -> Setting:
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else "" if default is None else _plain(default)
    others = [a for a in get_args(field.annotation) if isinstance(a, str) and a != default]
    return Setting(name, shown, others, " ".join((field.description or "").split()))


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def settings_lines() -> list[str]:
    lines = []
    for title, settings in settings_by_section().items():
        lines += ["", title]
        for name, default, others, what in settings:
            choices = f" (or {', '.join(others)})" if others else ""
            lines.append(f"  {name:<26} {default or '-':<12} {what}{choices}")
    return ["setting, default, what it does:", *lines]
