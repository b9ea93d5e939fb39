"""Runs packed into a file and unpacked again: nothing is lost, and `crosel tables` reads what comes out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from _blocks import ROOT
from _support import run_cli
from run_records import find_runs, groups, pack, read_folder, read_group, read_run, rows, unpack

from crosel.bench.tables import collect
from crosel.errors import UserError


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, whose first epoch has no S-acc."""
    folder = tmp_path_factory.mktemp("bench") / "digits" / "crosel-seed0"
    settings = ("network.width=4", "train.epochs=3", "method.warmup=2", "method.gamma=0.3")
    words = [word for setting in settings for word in ("--set", setting)]
    assert run_cli("train", "digits", "--candidates", "uniform:q=0.3", *words, "--out", folder).code == 0
    return folder


def test_a_fresh_run_comes_back_as_it_was(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    assert pack([run.parents[1]], out) == 1
    unpack([out], tmp_path / "runs")
    back = tmp_path / "runs" / "mine" / "digits" / "crosel-seed0"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows(read_run("mine/digits/crosel-seed0", tmp_path)) == lines
    assert rows(read_folder("again", back)) == lines
    assert (back / "environment.json").read_text(encoding="utf-8") == (run / "environment.json").read_text("utf-8")
    (before,), (after,) = (collect([folder]).finished for folder in (run, back))
    assert (after.key, after.last, after.seconds) == (before.key, before.last, before.seconds)
    assert 0 <= read_group(out)["digits/crosel-seed0"]["seconds"] < 600


def test_packing_adds_to_a_file_and_replaces_what_is_there(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.jsonl"
    pack([run.parents[1]], out)
    other = shutil.copytree(run, tmp_path / "more" / "digits" / "crosel-seed1")
    shutil.copytree(run, tmp_path / "more" / "digits" / "crosel-seed0")
    (other / "done").unlink()
    assert pack([tmp_path / "more"], out) == 2
    packed = read_group(out)
    assert list(packed) == ["digits/crosel-seed0", "digits/crosel-seed1"]
    assert "seconds" not in packed["digits/crosel-seed1"]
    with pytest.raises(UserError, match="no runs found"):
        pack([tmp_path / "more" / "nothing"], out)


def test_where_the_data_lay_is_not_packed(run: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(run, tmp_path / "run")
    config = (mine / "config.yaml").read_text(encoding="utf-8")
    (mine / "config.yaml").write_text(config.replace("data_dir: null", "data_dir: /secret/data"), encoding="utf-8")
    environment = json.loads((mine / "environment.json").read_text(encoding="utf-8"))
    environment["command"] += ["--data", "/secret/data"]
    (mine / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    pack([mine], tmp_path / "mine.jsonl")
    assert read_group(tmp_path / "mine.jsonl")["run"]["environment"]["command"][-2:] == ["--data", "DIR"]
    assert "secret" not in (tmp_path / "mine.jsonl").read_text(encoding="utf-8")


def test_every_run_of_the_repository_can_be_read(tmp_path: Path) -> None:
    unpack(groups(), tmp_path)
    collection = collect([tmp_path])
    assert not [problem for problem in collection.problems if "duplicate" not in problem]
    assert {run.path.parent.name for run in collection.unfinished} == {"trials"}  # ended by a time limit
    assert len(list(find_runs(tmp_path))) > 300
    assert len([path for path in (ROOT / "results").rglob("*") if path.is_file()]) <= 230
