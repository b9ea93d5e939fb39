"""The reference of commands and settings, written from the program itself while the site is built.

A page holds a line `<!-- reference: NAME -->`, and what stands there in the end comes from the function of that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer
from sphinx.application import Sphinx

_MARK = re.compile(r"^<!-- reference: (\w+) -->$", re.M)


def commands() -> str:
    """Every verb with its arguments and options."""
    from crosel.cli.app import app

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
    from crosel.cli.info import settings_by_section

    return "\n".join(_section(title, list(map(_row, rows))) for title, rows in settings_by_section().items())


def _section(title: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}\n", "| setting | default (other values) | what |\n|---|---|---|", *rows, ""])


def _row(setting: Any) -> str:
    name, default, others, what = setting
    shown = default if default in ("", "required") else f"`{default}`".replace("|", "\\|")
    choices = ", ".join(f"`{other}`" for other in others)
    return f"| `{name}` | {f'{shown} ({choices})' if choices else shown} | {_cell(what)} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")


def presets() -> str:
    """Every preset with its command and what to expect of it, a table for each group."""
    from crosel.presets import presets

    groups: dict[str, list[str]] = {}
    for preset in presets().values():
        what = ". ".join(text.removesuffix(".") for text in (preset.title, preset.note) if text)
        gave = [f"paper: {preset.paper}"] if preset.paper else []
        gave += [preset.accuracy] if preset.accuracy.lower().startswith("not run") else [preset.accuracy, preset.time]
        expected = "; ".join(text.removesuffix(".") for text in gave)
        row = f"| `{preset.name}` | {_cell(what)}. `{preset.command}` | {_cell(expected)} |"
        groups.setdefault(preset.name.partition("/")[0], []).append(row)
    head = "| preset | for | accuracy and time |\n|---|---|---|"
    return "\n".join("\n".join([f"### `{group}/…`\n", head, *rows, ""]) for group, rows in groups.items())


_REFERENCES = {"commands": commands, "presets": presets, "settings": settings}


def _fill(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda mark: _REFERENCES[mark[1]](), source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
