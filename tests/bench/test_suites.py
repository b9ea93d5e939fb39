"""Suites: what a grid becomes, how runs are called, and what is said about a bad file."""

from __future__ import annotations

import json
import shlex
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from _support import PAPER, PAPER_VIEWS

from crosel.bench import BenchRun, expand, parse_suite, read_suite, suites
from crosel.cli.bench import list_lines
from crosel.errors import UserError
from crosel.utils.settings import dotted

RESULTS = Path(__file__).parents[2] / "results"
BASE = {"source": "digits", "preset": "demo/digits", "candidates": "uniform:q=0.3"}


def make(**content: Any) -> Any:
    return parse_suite({"base": BASE, **content}, "mine", "mine.yaml")


def names(suite: Any, **options: Any) -> list[str]:
    return [run.name for run in expand(suite, **options)]


def test_grid_times_seeds() -> None:
    runs = expand(make(seeds=2, grid={"method": ["cc", "crosel"], "train.epochs": [30, 40]}))
    assert [run.name for run in runs] == [
        "digits-q0.3/cc-epochs=30-seed0", "digits-q0.3/cc-epochs=30-seed1",
        "digits-q0.3/cc-epochs=40-seed0", "digits-q0.3/cc-epochs=40-seed1",
        "digits-q0.3/crosel-epochs=30-seed0", "digits-q0.3/crosel-epochs=30-seed1",
        "digits-q0.3/crosel-epochs=40-seed0", "digits-q0.3/crosel-epochs=40-seed1",
    ]  # fmt: skip
    last = runs[-1].config
    assert (last.method.name, last.train.epochs, last.seed, last.source) == ("crosel", 40, 1, "digits")
    assert last.network.width == 32  # of the preset
    assert last.method.model_dump()["warmup"] == 20


def test_named_choices_set_several_things() -> None:
    choices = {"low": {"method.lambda_cr": 1}, "fixed": {"method": {"lambda_cr": 2, "dynamic_lambda": False}}}
    low, fixed = expand(make(grid={"weight": choices}))
    assert (low.name, fixed.name) == ("digits-q0.3/crosel-weight=low-seed0", "digits-q0.3/crosel-weight=fixed-seed0")
    settings = fixed.config.method.model_dump()
    assert (settings["lambda_cr"], settings["dynamic_lambda"]) == (2, False)
    assert low.config.method.model_dump()["dynamic_lambda"] is True


def test_choices_of_methods_with_their_own_settings() -> None:
    choices = {"cc": {"method": "cc"}, "quick": {"method": "crosel", "method.warmup": 5}}
    assert names(make(grid={"method": choices})) == ["digits-q0.3/cc-seed0", "digits-q0.3/crosel-quick-seed0"]


def test_values_that_are_lists_and_whole_floats() -> None:
    grid = {"method.criteria": [[1], [1, 2, 3]], "method.lambda_cr": [1.0, 0.5]}
    runs = expand(make(grid=grid))
    assert runs[0].name == "digits-q0.3/crosel-criteria=1-lambda_cr=1-seed0"
    assert runs[-1].name == "digits-q0.3/crosel-criteria=1+2+3-lambda_cr=0.5-seed0"
    assert runs[-1].config.method.model_dump()["criteria"] == (1, 2, 3)


def test_a_setting_may_follow_the_seed() -> None:
    runs = expand(make(seeds=[3, 5], base={**BASE, "data.test_share": 0.1, "data.split_seed": "{seed}"}))
    assert [run.config.data.split_seed for run in runs] == [3, 5]
    assert "data.split_seed=5" in runs[1].arguments


def test_parts_join_grids_that_do_not_multiply() -> None:
    suite = make(
        grid={"method": ["cc"]},
        parts=[
            {"base": {"candidates": "uniform:q=0.1"}},
            {"base": {"candidates": "uniform:q=0.5"}, "grid": {"train.lr": [0.1, 0.2]}},
        ],
    )
    assert names(suite) == ["digits-q0.1/cc-seed0", "digits-q0.5/cc-lr=0.1-seed0", "digits-q0.5/cc-lr=0.2-seed0"]


def test_a_name_does_not_depend_on_the_rest_of_the_suite() -> None:
    few, many = make(grid={"train.lr": [0.1]}), make(seeds=[3, 0], grid={"train.lr": [0.3, 0.1]})
    assert names(few)[0] in names(many)
    assert names(many, seeds=1)[-1] == names(few)[0]


def test_seeds_and_settings_go_over_the_suite() -> None:
    suite = make(seeds=[7], **{"grid": {"train.epochs": [30]}})
    assert [run.config.seed for run in expand(suite)] == [7]
    assert [run.config.seed for run in expand(suite, seeds=3)] == [0, 1, 2]
    assert [run.config.seed for run in expand(suite, seeds=[4, 2])] == [4, 2]
    assert expand(suite, settings=["train.epochs=25"])[0].config.train.epochs == 25
    with pytest.raises(UserError, match=r"are the same run; --set train.lr=1 overrides what the suite varies"):
        expand(make(grid={"train.lr": [0.1, 0.2]}), settings=["train.lr=1"])


def test_arguments_make_the_same_config() -> None:
    """The command line of a run and its config are two views of one thing."""
    from crosel.config import build_config

    for run in expand(read_suite("paper-lambda"), seeds=1, data_dir=Path("files")):
        words = list(run.arguments)
        source, flags = words[0], dict(zip(words[1::2], words[2::2], strict=True))
        sets = [after for word, after in zip(words[1::2], words[2::2], strict=True) if word == "--set"]
        values = {
            "source": source, "candidates": flags["--candidates"], "seed": int(flags["--seed"]),
            "data_dir": flags["--data"], "method": {"name": flags["--method"]},
        }  # fmt: skip
        assert build_config(preset=flags["--preset"], values=values, settings=sets) == run.config


@pytest.mark.parametrize("name", list(suites()))
def test_suites_that_come_with_crosel(name: str) -> None:
    suite = read_suite(name)
    runs = expand(suite)
    assert len(runs) == suite.size > 0
    assert len({run.name for run in runs}) == len(runs)
    assert len({run.config.model_dump_json() for run in runs}) == len(runs)
    if name.startswith("paper-"):
        assert suite.seeds == (0, 1, 2)
        assert {run.config.network.name for run in runs} == {"wrn-34-10"}
        for run in (run for run in runs if run.config.method.name == "crosel"):  # but for what an ablation changes
            all_set = dotted(run.config.model_dump(mode="json"))
            papers = {**PAPER, "warmup": 10, "temperature": 0.5, "temperature_start": None, "lambda_cr_start": None}
            assert {option: all_set[f"method.{option}"] for option in papers} == papers
            assert {option: all_set[f"augment.{option}"] for option in PAPER_VIEWS} == PAPER_VIEWS


def test_the_main_table_is_complete() -> None:
    runs = expand(read_suite("paper-main"), seeds=1)
    assert len(runs) == 2 * 3 * 7
    pico = next(run for run in runs if run.name == "cifar100-q0.05/pico-seed0")
    assert (pico.config.train.epochs, pico.config.train.batch_size) == (800, 256)


def test_the_study_tries_each_choice_both_ways() -> None:
    """Settings of the lines on which paper and released code differ, and of the schedule."""
    nothing, *others = (dotted(run.config.model_dump(mode="json")) for run in expand(read_suite("study-cifar10")))
    changed = {name for other in others for name in other if other[name] != nothing[name]}
    assert changed >= {
        "method.temperature", "method.target_mode", "method.warmup_view", "method.mix_per_pair", "method.ensemble",
        "method.networks", "augment.strong_ops", "train.schedule", "method.least_selected", "method.dynamic_lambda",
        "method.warmup", "method.temperature_start", "method.lambda_cr_start", "method.gamma_start", "train.lr",
        "train.batch_size", "train.weight_decay", "train.ema_decay",
    }  # fmt: skip
    # The test images are left alone.
    assert {(run["data.own_test"], run["data.test_share"]) for run in (nothing, *others)} == {(False, 0.1)}


def reckoned(run: BenchRun, warm_up: float, comix: float) -> float:
    """Seconds of the card by what an epoch of each kind takes, as the suites' headers reckon it."""
    method, epochs = run.config.method.model_dump(), run.config.train.epochs
    later = warm_up if method["scope"] == "none" else comix
    seconds = method["warmup"] * warm_up + (epochs - method["warmup"]) * later
    return float(seconds * (0.6 if method["networks"] == 1 else 1))


def parts_in_header(suite: str) -> list[list[BenchRun]]:
    """What the commands at the top of a suite's file run, each by itself."""
    lines = (line.removeprefix("#").strip() for line in suites()[suite].read_text(encoding="utf-8").splitlines())
    words = [shlex.split(line, comments=True) for line in lines if line.startswith(f"crosel bench {suite} ")]
    patterns = [[after for word, after in pairwise(line) if word == "--only"] for line in words]
    return [expand(read_suite(suite), only=only) for only in patterns]


@pytest.mark.parametrize("suite", ["study-cifar10", "fast-ablations"])
def test_the_sessions_in_a_header_are_the_whole_suite_and_share_no_run(suite: str) -> None:
    parts = parts_in_header(suite)
    assert len(parts) == 2
    assert sorted(run.name for part in parts for run in part) == sorted(names(read_suite(suite)))


def test_runs_of_the_study_take_the_same_minutes_and_a_session_its_time() -> None:
    parts = parts_in_header("study-cifar10")
    seconds = [[reckoned(run, 1.8, 4.4) for run in part] for part in parts]
    assert {round(run / 111, 1) for part in seconds for run in part} == {1.0}
    assert [round(sum(part) / 1.06 + 60, -1) for part in seconds] == [1420, 1640]


def test_the_short_ablations_take_the_time_that_is_said() -> None:
    """Runs that have not been run are taken to last as long as those of their kind."""
    lines = (RESULTS / "cifar10-fast-ablations.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, lines) if "note" not in run]  # which says that a run shared the card
    measured = {run["run"].removesuffix("-seed0"): run["seconds"] for run in runs}
    kinds = {"without-comix": 110, "one-network": 138}
    whole = [seconds for change, seconds in measured.items() if change not in kinds]
    assert {change: round(measured[change]) for change in kinds} == kinds
    assert (round(min(whole)), round(max(whole))) == (224, 227)

    def told(run: BenchRun) -> float:
        change = run.name.partition("=")[2]
        return next((s for kind, s in kinds.items() if kind in change), fmean(whole))

    assert [round(sum(map(told, part)), -1) for part in parts_in_header("fast-ablations")] == [1010, 1270]


# --- a part of a suite --------------------------------------------------------------------------------------------

GRID = {"method": ["cc", "proden"], "train.epochs": [30, 40]}


@pytest.mark.parametrize(
    ("only", "chosen"),
    [
        ("*", ["cc-epochs=30-seed0", "cc-epochs=40-seed0", "proden-epochs=30-seed0", "proden-epochs=40-seed0"]),
        ((), ["cc-epochs=30-seed0", "cc-epochs=40-seed0", "proden-epochs=30-seed0", "proden-epochs=40-seed0"]),
        ("digits-q0.3/cc-epochs=40-seed0", ["cc-epochs=40-seed0"]),  # a name is a pattern
        ("*epochs=40*", ["cc-epochs=40-seed0", "proden-epochs=40-seed0"]),
        ("*/[!c]*=?0-*", ["proden-epochs=30-seed0", "proden-epochs=40-seed0"]),
        (("*proden*", "*=40*"), ["cc-epochs=40-seed0", "proden-epochs=30-seed0", "proden-epochs=40-seed0"]),
    ],
)
def test_only_takes_runs_by_their_names_in_the_order_of_the_suite(only: Any, chosen: list[str]) -> None:
    assert names(make(grid=GRID), only=only) == [f"digits-q0.3/{name}" for name in chosen]


def test_only_goes_with_seeds_and_settings() -> None:
    (run,) = expand(make(grid=GRID), seeds=[3, 4], settings=["train.lr=0.3"], only="*/cc*=30-seed4")
    assert (run.name, run.config.train.lr) == ("digits-q0.3/cc-epochs=30-seed4", 0.3)


def test_runs_that_a_setting_makes_the_same_run_matter_only_where_both_are_wanted() -> None:
    shorter = {"settings": ["train.epochs=2"]}
    assert names(make(grid=GRID), only="*=30*", **shorter) == [
        "digits-q0.3/cc-epochs=30-seed0", "digits-q0.3/proden-epochs=30-seed0",
    ]  # fmt: skip
    with pytest.raises(
        UserError, match=r"epochs=30-seed0 and .*epochs=40-seed0 are the same run; --set train.epochs=2"
    ):
        expand(make(grid=GRID), only="*/cc*", **shorter)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("only", "says"),
    [
        ("cc-epochs", "no run matches --only cc-epochs; a pattern is for the whole name: try --only '*cc-epochs*'"),
        (
            ("*=30*", "*porden*=40*"),
            "no run matches --only '*porden*=40*'; the nearest are digits-q0.3/proden-epochs=40-seed0, ",
        ),
        ("*CC*=40*", "the nearest are digits-q0.3/cc-epochs=40-seed0, "),
        ("*-seed1", "no run matches --only '*-seed1'; the nearest are digits-q0.3/"),
        ("", "no run matches --only ''; the nearest are digits-q0.3/cc-epochs=30-seed0, "),
    ],
)  # fmt: skip
def test_a_pattern_without_a_run_names_what_may_have_been_meant(only: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        expand(make(grid=GRID), only=only)
    assert str(error.value).startswith("mine.yaml: ")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_list_shows_a_command_for_each_run(tmp_path: Path) -> None:
    line = list_lines(expand(make(grid={"method.criteria": [[1, 2]]})))[0]
    assert line == (
        "digits-q0.3/crosel-criteria=1+2-seed0: crosel train digits --method crosel --preset demo/digits "
        "--candidates uniform:q=0.3 --seed 0 --set 'method.criteria=[1, 2]' --set train.folds=0"
    )
    assert list_lines(expand(make()), tmp_path)[0].startswith("new ")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"gird": {}}, "unknown key 'gird' (did you mean 'grid'?)"),
        ({"seeds": 0}, "'seeds' must be a number from 1 to 10000"),
        ({"seeds": [1, 1]}, "different seeds"),
        ({"seeds": [[1]]}, "'seeds' must be a number"),
        ({"seeds": True}, "'seeds' must be a number"),
        ({"base": {}}, "'source' is missing"),
        ({"base": 3}, "'base' needs"),
        ({"base": {**BASE, "seed": 3}}, "give seeds as 'seeds'"),
        ({"grid": {"method": "cc"}}, "'grid.method' needs a list"),
        ({"grid": {"method": []}}, "'grid.method' needs a list"),
        ({"grid": {"a": [{"train.lr": 1}]}}, "settings without a name"),
        ({"grid": 3}, "'grid' needs lines"),
        ({"parts": {}}, "'parts' must be a list"),
        ({"parts": [3]}, "parts, item 1"),
        ({"parts": [{"bass": {}}]}, "parts, item 1: unknown key 'bass' (did you mean 'base'?)"),
        ({"grid": {"method": ["croesl"]}}, "did you mean 'crosel'?"),
        ({"grid": {"method.gama": [0.8]}}, "unknown setting 'method.gama' (did you mean 'method.gamma'?)"),
        ({"grid": {"train.lr": [-1]}}, "run digits-q0.3/crosel-lr=-1-seed0: setting 'train.lr'"),
        ({"base": {**BASE, "preset": "demo/digit"}}, "did you mean 'demo/digits'?"),
        ({"grid": {"a": {"b": {}, "c": {}}}}, "crosel-a=b-seed0 and digits-q0.3/crosel-a=c-seed0 are the same run"),
        ({"parts": [{}, {}]}, "two runs have the name digits-q0.3/crosel-seed0"),
    ],
)
def test_bad_suites(content: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        expand(make(**content))
    assert says in str(error.value)
    assert str(error.value).startswith("mine.yaml")


def test_names_and_files_of_suites(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown suite 'digist' .did you mean 'digits'"):
        read_suite("digist")
    with pytest.raises(UserError, match="no such file"):
        read_suite(str(tmp_path / "none.yaml"))
    path = tmp_path / "own.yaml"
    path.write_text("base: [", encoding="utf-8")
    with pytest.raises(UserError, match=r"own.yaml, line 1.*not valid YAML"):
        read_suite(str(path))
    path.write_text(yaml.safe_dump({"base": BASE}), encoding="utf-8")
    suite = read_suite(str(path))
    assert (suite.name, suite.title, suite.seeds) == ("own", "own", (0,))


def test_names_stay_inside_the_folder() -> None:
    suite = make(base={"source": "../../x y.npz"}, grid={"weight": {"../..": {"train.lr": 0.1}}})
    (name,) = names(suite)
    assert name == "x_y/crosel-weight=.._..-seed0"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"seeds": 10**20}, "'seeds' must be a number from 1 to 10000"),
        ({"seeds": 10**9}, "'seeds' must be a number from 1 to 10000"),
        ({"grid": {f"augment.a{i}": [0, 1, 2, 3] for i in range(30)}}, "more than 10000 runs"),
    ],
)
def test_suites_without_end_are_refused_at_once(content: dict[str, Any], says: str) -> None:
    """Found by changed inputs: a few bytes of seeds or grid stand for more runs than memory holds."""
    with pytest.raises(UserError, match=says):
        expand(make(**content))
