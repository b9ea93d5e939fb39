"""What all settings have in common, and what became of those of earlier versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Settings do not change, unknown names are errors, and no number is infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


# Of version 0.1.0. Removed settings stand with the value that did nothing.
RENAMED = {"train.average": "train.ema_decay", "method.average": "method.ensemble"}
REMOVED: dict[str, Any] = {"train.refresh": 0, "train.restart": 0, "train.restart_lr": None}


def with_new_names(tree: Mapping[str, Any], exists: Callable[[str], bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings by their present names, without removed ones that did nothing; and the values of those that had an
    old name. `exists` says which names there are today: a method from elsewhere may have a setting of an old name."""
    out, found = {name: dict(v) if isinstance(v, Mapping) else v for name, v in tree.items()}, {}
    for old in (*RENAMED, *REMOVED):
        section, _, name = old.partition(".")
        group = out.get(section)
        if not isinstance(group, dict) or name not in group or exists(old):
            continue
        if old in RENAMED and exists(RENAMED[old]):
            found[old] = group.pop(name)
            group.setdefault(RENAMED[old].partition(".")[2], found[old])
        elif old in REMOVED and group[name] == REMOVED[old]:
            del group[name]
    return out, found


def removed_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an earlier version that did something and are gone, by their dotted names."""
    return {
        f"{section}.{name}": value
        for section, group in tree.items() if isinstance(group, Mapping)
        for name, value in group.items()
        if f"{section}.{name}" in REMOVED and value != REMOVED[f"{section}.{name}"]
    }  # fmt: skip
