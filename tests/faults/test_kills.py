"""A short form of the soak with SIGKILL; chosen moments of one run are in test_sigkill.py."""

from __future__ import annotations

import shutil
from pathlib import Path

from _runs import tree
from _support import CroselCli, TinyRun
from soak import decisions, embeddings, kills, stores


def test_a_few_kills_over_some_methods(tmp_path: Path) -> None:
    score = kills.soak(tmp_path, kills=6, seed=4, methods=("crosel", "pico", "pop"))
    assert score.kills == 6
    assert set(score.by_method) <= {"crosel", "pico", "pop"}
    assert score.finished >= 3
    assert (score.lost_epochs, score.damaged) == (0, 0)


def test_a_few_kills_while_images_are_written_to_disk_and_read(tmp_path: Path) -> None:
    score = stores.soak(tmp_path, kills=2, seed=4)
    assert score["kills"] == 2
    assert score["finished"] >= 1


def test_a_few_kills_while_images_are_embedded(tmp_path: Path) -> None:
    score = embeddings.soak(tmp_path, kills=2, seed=4)
    assert score["kills"] == 2
    assert score["finished"] >= 1


def test_a_few_kills_while_somebody_decides(tmp_path: Path) -> None:
    score = decisions.soak(tmp_path, kills=3, seed=4)
    assert score["kills"] == 3
    assert score["answered"] > 3


def test_half_a_file_is_removed_wherever_it_lies(tiny_run: TinyRun, tmp_path: Path, crosel_cli: CroselCli) -> None:
    """Found by the soak: a kill inside the folder of plots left one behind for good."""
    run = Path(shutil.copytree(tiny_run.path, tmp_path / "run"))
    (run / "done").unlink()
    for folder in (run, run / "checkpoints", run / "plots"):
        folder.mkdir(exist_ok=True)
        (folder / ".writing-17-curves.svg").write_text("half")
    assert crosel_cli("train", "--resume", "--out", run).code == 0
    assert tree(run) == tree(tiny_run.path)
