"""YAML from files that need not be trusted: plain values only, errors in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from crosel.errors import UserError
from crosel.utils.reading import read_file
from crosel.utils.text import one_line

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


def read_yaml(path: Path, links: bool = True) -> dict[str, Any]:
    try:
        text = read_file(path, _MAX_YAML, links).decode("utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    try:
        content = parse_yaml(text)
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
