"""Code blocks of README and docs: found, run in a folder, and their shown output compared with the real one."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from _support import run_cli
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "_build" not in path.parts
]
SHOWN = {"text", "json", "yaml", "toml", "html"}  # written to a file where a caption names one
_FILE = re.compile(r"<!-- file: (\S+) -->")
_NOT_RUN = re.compile(r"Not run in the tests \((.+)\)\s*(?:-->)?\s*$", re.S)
_OPTION = re.compile(r":([\w-]+):[ ]?(.*)")
_PERCENT = re.compile(r"\d+(?:\.\d+)? %")
TOLERANCE = 5.0  # points: what a tiny run gives depends a little on the processor


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    caption: str
    code: str
    not_run: str | None  # the reason

    @property
    def place(self) -> str:
        return f"{self.page}, line {self.line}"


def blocks_of(page: str) -> list[Block]:
    tokens = MarkdownIt().enable("table").parse((ROOT / page).read_text(encoding="utf-8"))
    found = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type != "fence":
            continue
        directive, _, language = token.info.strip().partition(" ")
        if directive.startswith("{") and directive != "{code-block}":
            continue
        lines = token.content.splitlines()
        options = {}
        while directive == "{code-block}" and lines and (option := _OPTION.fullmatch(lines[0])):
            options[option[1]] = option[2]
            lines.pop(0)
        comment = before.content if before is not None and before.type == "html_block" else ""
        name = _FILE.search(comment)
        caption = name[1] if name else options.get("caption", "")
        reason = _NOT_RUN.search(caption) or _NOT_RUN.search(comment)
        assert token.map is not None
        code = "\n".join(lines).strip("\n") + "\n"
        why = reason[1] if reason else None
        found.append(Block(page, token.map[0] + 1, language or directive, caption, code, why))
    return found


def goes_on_from(page: str) -> str | None:
    """The page whose files and results this one uses, as its text says."""
    text = (ROOT / page).read_text(encoding="utf-8")
    said = re.search(r"goes on from (?:the )?\[[^\]]+\]\(([^)]+\.md)\)", text)
    return os.path.relpath((ROOT / page).parent / said[1], ROOT) if said else None


class Reader:
    """Someone who follows a page word for word, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "block"}

    def follow(self, block: Block) -> None:
        if block.not_run is not None:
            return
        if block.language == "python" and not block.caption:
            exec(compile(block.code, block.place, "exec", dont_inherit=True), self.names)
        elif block.language == "console":
            for command, shown in commands(block):
                check_output(block.place, shown, self._run(block, command, shown))
        elif block.caption:
            path = self.folder / block.caption
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")

    def _run(self, block: Block, command: str, shown: list[str]) -> str:
        words = shlex.split(command, comments=True)
        if words[0] == "crosel":
            result = run_cli(*words[1:])
            code, said = result.code, result.err + result.out
        elif words[0] == "python" and len(words) == 2:  # in this process, which has everything loaded
            code, said = 0, run_script(words[1])
        elif words[0] == "python":
            done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True, cwd=self.folder)
            code, said = done.returncode, done.stderr + done.stdout
        else:
            done = subprocess.run(command, shell=True, cwd=self.folder, capture_output=True, text=True, check=False)
            code, said = done.returncode, done.stderr + done.stdout
        refused = code == 2 and bool(shown) and shown[0].startswith("crosel: ")  # the page shows the refusal
        assert code == 0 or refused, f"{block.place}: {command}\n{said}"
        return said


def run_script(name: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(name, run_name="__main__")
    return said.getvalue()


def commands(block: Block) -> list[tuple[str, list[str]]]:
    """Commands after `$ `, each with the output shown below it."""
    found: list[tuple[str, list[str]]] = []
    for line in block.code.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"{block.place}: a console block begins with '$ COMMAND', not with {line!r}"
            found[-1][1].append(line)
    return found


def check_output(place: str, shown: list[str], said: str) -> None:
    """What is shown must have been said. `…` stands for anything, shares may differ a little."""
    text, said = ("\n".join(re.sub(" +", " ", line) for line in lines).strip() for lines in (shown, said.splitlines()))
    if not text:
        return
    pattern = _PERCENT.sub("\0", text)
    pattern = re.escape(pattern).replace("…", ".*").replace("\0", r"(\d+(?:\.\d+)?) %")
    match = re.search(pattern, said, re.S)
    assert match, f"{place}: the page shows\n{text}\nbut the command said\n{said}"
    for given, real in zip(_PERCENT.findall(text), match.groups(), strict=True):
        close = abs(float(given.split()[0]) - float(real)) <= TOLERANCE
        assert close, f"{place}: the page shows {given}, the command said {real} %:\n{said}"


def docs_script(name: str) -> ModuleType:
    """A script of docs/ that writes parts of its pages, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module
