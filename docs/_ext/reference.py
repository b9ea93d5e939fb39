"""The reference of commands and settings, written from the program itself while the site is built.

A page holds a line `<!-- reference: NAME -->`, and what stands there in the end comes from the function of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import typer
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from sphinx.application import Sphinx

_MARK = re.compile(r"^<!-- reference: (\w+) -->$", re.M)


def commands() -> str:
    """Every verb with its arguments and options."""
    from crosel.cli import app

    return "\n".join(_command(typer.main.get_command(app), "crosel"))


def _command(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for child in command.commands.values():
            yield from _command(child, f"{name} {child.name}")
        return
    shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    usage = "".join(f" {_metavar(p)}" for p in arguments)
    yield f"## `{name}`\n\n{command.help}\n\n```text\n{name}{usage} [OPTIONS]\n```\n"
    if shown:
        yield "| argument or option | what | default |\n|---|---|---|"
        for p in shown:
            names = f"`{_metavar(p)}`" if p in arguments else f"`{' '.join([*p.opts, *_value_of(p)])}`"
            said, _, default = (p.help or "").removesuffix("]").partition("  [default: ")
            default = _cell(default) if " " in default else f"`{default}`" if default else _default(p)
            yield f"| {names} | {_cell(said)} | {default} |"
        yield ""


def _metavar(argument: Any) -> str:
    name = argument.metavar + ("…" if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _value_of(option: Any) -> list[str]:
    return [] if option.is_flag else [option.metavar]


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default in (None, False, "", [], ()):
        return ""
    return f"`{parameter.default}`"


def settings() -> str:
    """Every setting that `--set` and YAML files know, section by section, methods last."""
    from crosel.config import RunConfig
    from crosel.methods import methods

    sections = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if name != "method" and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    own = [name for name in RunConfig.model_fields if name not in (*sections, "method")]
    first = [_row(name, RunConfig.model_fields[name]) for name in own]
    first.append("| `method.name` | `crosel` | name of the method; each has settings of its own, below |")
    parts = [_section("Run", first)]
    models = {name: (name, model) for name, model in sections.items()}
    models |= {f"method: {name}": ("method", method.Settings) for name, method in methods().items()}
    for title, (prefix, model) in models.items():
        fields = {name: field for name, field in model.model_fields.items() if (prefix, name) != ("method", "name")}
        parts.append(_section(title.capitalize(), [_row(f"{prefix}.{name}", field) for name, field in fields.items()]))
    return "\n".join(parts)


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}\n", "| setting | default (other values) | what |\n|---|---|---|", *rows, ""])


def _row(name: str, field: Any) -> str:
    return f"| `{name}` | {_value(field)} | {_cell(field.description or '')} |"


def _value(field: Any) -> str:
    default = field.get_default(call_default_factory=True)
    shown = "required" if default is PydanticUndefined else "" if default is None else f"`{_plain(default)}`"
    shown = shown.replace("|", "\\|")
    choices = [a for a in get_args(field.annotation) if isinstance(a, str)]
    others = ", ".join(f"`{c}`" for c in choices if c != default)
    return f"{shown} ({others})" if others else shown


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


_REFERENCES = {"commands": commands, "settings": settings}


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda mark: _REFERENCES[mark[1]](), source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
