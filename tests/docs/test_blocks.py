"""Every code block of README, CONTRIBUTING and docs runs as it stands, page by page, in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from _blocks import PAGES, ROOT, SHOWN, Block, Reader, blocks_of, check_output, commands, goes_on_from
from _support import run_cli, run_in_process

from crosel.bench import EXECUTORS, suites
from crosel.cli import app as cli
from crosel.config import build_config
from crosel.data.formats import FORMATS
from crosel.methods import base, methods

# Blocks that the tests leave alone, each with its reason beside it on the page. A new one needs a decision here.
NOT_RUN = {
    "CONTRIBUTING.md": 1,  # make test
    "README.md": 1,  # installing
    "docs/estimator.md": 2,  # a server that goes on; a download
    "docs/labels.md": 1,  # cleanlab
    "docs/missing-truth.md": 1,  # 35 runs
    "docs/real-world.md": 3,  # files that are not ours, 45 runs, a download
    "docs/recipes/photographs.md": 3,  # downloads
    "docs/recipes/texts.md": 1,  # a download
    "docs/report.md": 2,  # a second run; a page that waits for people
    "docs/reproduce.md": 3,  # downloads, hours of a GPU
    "docs/scaling.md": 4,  # the launcher, a cluster, 20 runs, a job of an array
    "docs/tutorial.md": 2,  # installing; a page that waits for people
}

Follow = Callable[[str], Reader]


@pytest.fixture(scope="module")
def follow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follow]:
    """Follow a page once; pages that go on from another begin with a copy of its folder."""
    done: dict[str, Reader] = {}
    before, known, formats, local = Path.cwd(), dict(methods()), list(FORMATS), EXECUTORS["local"]
    EXECUTORS["local"] = run_in_process

    def follow_page(page: str) -> Reader:
        if page not in done:
            first = goes_on_from(page)
            earlier = follow_page(first) if first else None
            folder = tmp_path_factory.mktemp(Path(page).stem)
            if earlier:
                shutil.copytree(earlier.folder, folder, symlinks=True, dirs_exist_ok=True)
            else:
                for name in ("benchmarks", "results"):  # as in a clone
                    (folder / name).symlink_to(ROOT / name)
            os.chdir(folder)
            reader = Reader(folder)
            for block in blocks_of(page):
                reader.follow(block)
            done[page] = reader
        return done[page]

    yield follow_page
    os.chdir(before)
    base._METHODS.clear()
    base._METHODS.update(known)
    FORMATS[:] = formats
    EXECUTORS["local"] = local


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_blocks_run(page: str, follow: Follow) -> None:
    reader = follow(page)
    if page == "CONTRIBUTING.md":
        assert "average" in methods()
        short = ("--method", "cc", "--set", "train.epochs=1", "--set", "train.batch_size=2")
        assert run_cli("train", "mine.sets", *short, "--out", "runs/sets").code == 0
        assert run_cli("predict", "runs/sets", "mine.sets", "--out", "predicted.csv").code == 0
        assert Path("predicted.csv").read_text(encoding="utf-8").count("\n") == 5
    if page == "README.md":
        assert (reader.names["clf"].transduction_ == reader.names["y"]).mean() > 0.9


def test_blocks_are_of_known_kinds() -> None:
    for block in (b for page in PAGES for b in blocks_of(page)):
        assert block.language in {"python", "console", *SHOWN}, f"{block.place}: say what kind of block this is"
        if block.language in SHOWN:
            first = block.code.split(maxsplit=1)[0]
            assert first not in {"$", "crosel", "python", "make", "pip"}, f"{block.place}: commands go into 'console'"


def test_blocks_that_are_not_run_are_counted() -> None:
    left = Counter(block.page for page in PAGES for block in blocks_of(page) if block.not_run is not None)
    assert left == NOT_RUN


def test_commands_that_are_not_run_are_understood() -> None:
    """Command, options, presets and suites exist, and every setting can be set."""
    seen = 0
    for block in (b for page in PAGES for b in blocks_of(page) if b.not_run is not None and b.language == "console"):
        for line, _ in commands(block):
            words = shlex.split(line, comments=True)
            if "crosel" not in words:
                continue
            words = words[words.index("crosel") + 1 :]
            command = typer.main.get_command(cli.app)
            while hasattr(command, "commands"):
                name = words.pop(0)
                assert name in command.commands, f"{block.place}: {line}"
                command = command.commands[name]
            given = command.make_context(name, words).params
            preset, settings = given.get("preset"), given.get("set_") or ()
            assert build_config(preset=preset, settings=settings, values={"source": "digits"}), line
            if name == "bench" and not str(given["suite"]).endswith((".yaml", ".yml")):
                assert given["suite"] in suites(), f"{block.place}: {line}"
            seen += 1
    assert seen > 10


def test_links_outside_the_site_lead_somewhere() -> None:
    """README and CONTRIBUTING are read where they are; links within the site are checked in test_site.py."""
    for page in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/README.md"):
        prose = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", prose):
            if not target.startswith(("http:", "https:")):
                assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_a_wrong_page_is_found() -> None:
    def block(language: str, code: str) -> Block:
        return Block("page.md", 1, language, "", code, None)

    reader = Reader(Path.cwd())
    with pytest.raises(ZeroDivisionError):
        reader.follow(block("python", "1 / 0"))
    with pytest.raises(AssertionError, match="no-such-verb"):
        reader.follow(block("console", "$ crosel no-such-verb\n"))
    with pytest.raises(AssertionError, match="the page shows"):
        reader.follow(block("console", "$ echo one\ntwo\n"))
    with pytest.raises(AssertionError, match=r"shows 90\.0 %"):
        check_output("page.md", ["accuracy 90.0 %"], "accuracy 80.0 %")
    check_output("page.md", ["accuracy 90.0 %", "…", "in … s"], "accuracy 91.2 %\nso many\nin 3 s\n")
    assert commands(block("console", "$ echo a \\\n  b\na b\n")) == [("echo a    b", ["a b"])]
