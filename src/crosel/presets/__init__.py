"""Presets: settings by name, with what they are for and what they gave.

Each YAML file here is a group of presets. A preset names its bases, pieces from the top of the same file, and adds what
is its own; later ones win. `title`, `command`, `accuracy`, … are its header; all else are settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from crosel.errors import UserError
from crosel.utils.settings import merge
from crosel.utils.text import did_you_mean


@dataclass(frozen=True)
class Preset:
    """Settings, and their header: what they are for, a command that uses them, and what to expect of it."""

    name: str
    settings: Mapping[str, Any]
    title: str
    command: str
    accuracy: str  # ours, with the folder of the runs, or "not run"
    time: str
    note: str = ""
    paper: str = ""  # the accuracy in the paper's tables, rule by rule

    @property
    def header(self) -> dict[str, str]:
        """What there is to know about it beside the settings."""
        said = {name: getattr(self, name) for name in _HEADER}
        return {name: text for name, text in said.items() if text}


_HEADER = ("title", "command", "paper", "accuracy", "time", "note")


@cache
def presets() -> Mapping[str, Preset]:
    """All presets that come with the package, by name."""
    files = [file for file in resources.files("crosel.presets").iterdir() if file.name.endswith(".yaml")]
    found = []
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        group, bases = file.name.removesuffix(".yaml"), content.get("bases", {})
        found += [_composed(f"{group}/{name}", entry, bases) for name, entry in content["presets"].items()]
    return {preset.name: preset for preset in sorted(found, key=lambda preset: preset.name)}


def _composed(name: str, entry: Mapping[str, Any], bases: Mapping[str, Any]) -> Preset:
    tree: dict[str, Any] = {}
    for layer in (*(bases[base] for base in entry.get("bases", ())), entry):
        tree = merge(tree, layer)
    tree.pop("bases", None)
    header = {part: str(tree.pop(part)).replace("{preset}", name) for part in _HEADER if part in tree}
    return Preset(name, tree, **header)


def read_preset(name: str) -> Mapping[str, Any]:
    """The settings of a preset."""
    known = presets()
    if name not in known:
        crosels = [preset for preset in known if preset.endswith(f"{name}-crosel")]  # one of several that begin alike
        near = did_you_mean(name, crosels or known)
        raise UserError(f"unknown preset '{name}'{near}; crosel info lists them all")
    return known[name].settings
