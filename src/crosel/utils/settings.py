"""Settings: their base class, trees of them as YAML has them, `--set NAME=VALUE`, and names of earlier versions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from crosel.errors import UserError
from crosel.utils.reading import read_file
from crosel.utils.text import one_line


class Settings(BaseModel):
    """Settings do not change, unknown names are errors, and no number is infinite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


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


# --- --set --------------------------------------------------------------------------------------------------------


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


# --- names of earlier versions ------------------------------------------------------------------------------------


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


# --- YAML from files that need not be trusted: plain values only, errors in one line --------------------------------

_MAX_YAML = 1 << 20  # bytes in a file of settings


class _PlainLoader(yaml.SafeLoader):
    """Refuses aliases, with which a few lines can expand without end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (*name) are not allowed in settings; write the value out",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        return super().compose_node(parent, index)


class _TextLoader(_PlainLoader):
    """Every value stays text: no, 010 and 1.0 are names."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (declared so by yaml)


def parse_yaml(text: str, as_text: bool = False) -> Any:
    """Plain values from YAML that need not be trusted; whatever is wrong with it is a YAMLError."""
    try:
        return yaml.load(text, Loader=_TextLoader if as_text else _PlainLoader)
    except RecursionError:
        raise yaml.YAMLError("nested too deeply") from None
    except ValueError as error:  # a date or number that looks like one and is none
        raise yaml.YAMLError(one_line(error)) from None


def read_settings_text(path: Path, limit: int, links: bool = True) -> str:
    try:
        return read_file(path, limit, links).decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_yaml(path: Path, links: bool = True) -> dict[str, Any]:
    try:
        content = parse_yaml(read_settings_text(path, _MAX_YAML, links))
    except yaml.YAMLError as error:
        raise not_yaml(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected settings as 'name: value' lines")
    return content


def not_yaml(path: Path, error: yaml.YAMLError) -> UserError:
    """What is wrong with the content of a file, with line and column where they are known."""
    mark = getattr(error, "problem_mark", None)
    place = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    return UserError(f"{place}: not valid YAML ({one_line(getattr(error, 'problem', None) or error)})")
