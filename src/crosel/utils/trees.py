"""Nested settings, as YAML has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(base: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Deep merge: what is in `extra` wins. Settings of one method mean nothing to another, so a new method name starts
    afresh."""
    out = dict(base)
    for key, value in extra.items():
        old = out.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            out[key] = value
        elif key == "method" and value.get("name", old.get("name")) != old.get("name"):
            out[key] = dict(value)
        else:
            out[key] = merge(old, value)
    return out


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names, as `--set` takes them."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= dotted(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
