"""`--set NAME=VALUE`: text becomes a tree of settings, each value by the type that its setting is declared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import yaml
from pydantic import BaseModel

from crosel.errors import UserError
from crosel.utils.yaml_files import parse_yaml


def parse_set(items: Iterable[str], model: type[BaseModel]) -> dict[str, Any]:
    """`method.gamma=0.95` -> {"method": {"gamma": 0.95}}."""
    tree: dict[str, Any] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.strip():
            raise UserError(f"--set {item}: write NAME=VALUE, as in --set train.epochs=20")
        *path, last = name.strip().split(".")
        value, node = _parse_value(item, text, declared_type(model, [*path, last])), tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise UserError(f"--set {item}: '{part}' already has a value")
        node[last] = value
    return tree


def _parse_value(item: str, text: str, declared: Any) -> Any:
    """YAML; but names and paths are text as written, whatever YAML would make of `no`, `010`, `2024` or `-`."""
    if text.strip() in ("", "~", "null"):
        return None
    is_text = declared in (str, str | None)
    if is_text and text.strip()[0] not in "'\"":
        return text.strip()
    is_names = declared == tuple[str, ...] | None
    try:
        value = parse_yaml(text, as_text=is_names)
    except yaml.YAMLError:
        if is_names:
            raise UserError(
                f"--set {item}: not a list; put it in brackets, and names with other signs than letters in quotes, "
                "as in \"['>50K','a, b']\""
            ) from None
        return text
    if isinstance(value, str) and not is_text:  # YAML 1.1 reads 1e-4 as text
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def declared_type(model: type[BaseModel], path: Iterable[str]) -> Any:
    """What a setting is declared as in a model; None for a method's own, which depend on the method, and for unknown
    ones."""
    found: Any = model
    for part in path:
        if not (isinstance(found, type) and issubclass(found, BaseModel)):
            return None
        field = found.model_fields.get(part)
        found = field.annotation if field else None
    return found
