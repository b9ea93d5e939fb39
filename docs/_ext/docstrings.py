"""Docstrings as the code has them (`name : text`, underlined headings) as Sphinx reads them (lists, rubrics)."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_ENTRY = re.compile(r"^(\w[\w, ]*) : (.*)$")
_UNDERLINE = re.compile(r"^-{4,}$")


def _rewrite(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    out: list[str] = []
    in_list = False
    for line, below in zip(lines, [*lines, ""][1:], strict=True):
        if _UNDERLINE.match(line):
            continue
        if _UNDERLINE.match(below):
            out += [f".. rubric:: {line}", ""]
            continue
        entry = _ENTRY.match(line)
        if entry:
            out += [*([] if in_list else [""]), f"- ``{entry[1]}``: {entry[2]}"]
        elif in_list and line.startswith("    "):
            out.append(f"  {line.strip()}")
        else:
            out += ["", line] if in_list and line else [line]
        in_list = bool(entry) or (in_list and line.startswith("    "))
    lines[:] = out


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", _rewrite)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
