"""Numbers in README, tables of docs and heads of presets are those of the records under results/, or the paper's."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest
from _blocks import ROOT, docs_script
from run_records import groups, read_group, rows

from crosel.bench import expand, read_suite
from crosel.bench.tables import RunSummary
from crosel.config import RunConfig, build_config
from crosel.presets import presets

RunsOf = Callable[[str, RunConfig], list[RunSummary]]
METRICS = ("test_accuracy", "selection_ratio", "oracle_selection_accuracy")
_SHARE = re.compile(r"(\d+\.\d+) %|(\d+\.\d+) ± \d+\.\d+ %")


def recorded() -> list[float]:
    """Last epochs of all runs, alone and as means over seeds, in per cent."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for group in groups():
        for name, run in read_group(group).items():
            last = rows(run)[-1]
            for metric in METRICS:
                if metric in last:
                    found[group.stem, re.sub(r"-seed\d+", "", name), metric].append(100 * last[metric])
    for line in (ROOT / "results" / "photographs" / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for metric in ("accuracy", "labels_right"):
            found["photographs", row["method"], metric].append(100 * row[metric])
    for line in (ROOT / "results" / "photographs" / "views.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found["views", f"{row['method']} {row['views']}", "accuracy"].append(100 * row["accuracy"])
    for line in (ROOT / "results" / "fine-tuning" / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for metric in ("test_accuracy", "test_accuracy_1", "test_accuracy_2"):
            found["fine-tuning", row["source"], metric].append(100 * row[metric])
    return [value for values in found.values() for value in (*values, fmean(values))]


def published(tree: Any) -> Iterator[float]:
    """Every number in the paper's tables."""
    if isinstance(tree, dict | list):
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from published(branch)
    elif isinstance(tree, float):
        yield tree


def shares(text: str) -> list[str]:
    """Numbers with a per cent sign in the rows of tables."""
    return percentages("\n".join(line for line in text.splitlines() if line.startswith("|")))


def percentages(text: str) -> list[str]:
    return [alone or mean for alone, mean in _SHARE.findall(text)]


def is_known(share: str, known: list[float]) -> bool:
    digits = len(share.partition(".")[2])
    return any(f"{value:.{digits}f}" == share for value in known)


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md", "docs/recipes/photographs.md"])
def test_shares_come_from_records(page: str) -> None:
    paper = json.loads((ROOT / "src" / "crosel" / "bench" / "tables" / "paper.json").read_text(encoding="utf-8"))
    known = recorded() + list(published(paper))
    found = shares((ROOT / page).read_text(encoding="utf-8"))
    assert len(found) >= 6
    assert [share for share in found if not is_known(share, known)] == []


def test_presets_say_what_they_gave() -> None:
    known = recorded()
    found = [share for name in presets() for share in percentages(head(name))]
    assert len(found) >= 10
    assert [share for share in found if not is_known(share, known)] == []


def head(preset: str) -> str:
    """The header of a preset, in one line."""
    return " ".join(presets()[preset].header.values())


_GAVE = re.compile(r"(\w+:q=[\d.]+)[^:.]*: (\d+\.\d+) (?:± \d+\.\d+ )?%[^(]*\(results/([^),]+)\.jsonl[),]")
SHORT = {name: _GAVE.findall(head(name)) for name in presets() if name.startswith("fast/")}


@pytest.fixture(scope="module")
def runs_of() -> RunsOf:
    """The runs of a group that were made with these settings."""
    script = docs_script("rows")
    recorded_runs = script.recorded()
    return lambda group, config: [
        run for run in recorded_runs if run.path.parts[-2] == group and script.is_run_of(run, config)
    ]


@pytest.mark.parametrize("preset", [name for name, gave in SHORT.items() if gave])
def test_a_short_preset_has_the_settings_of_the_runs_that_it_names(preset: str, runs_of: RunsOf) -> None:
    source = preset.removeprefix("fast/").partition("-")[0]
    for rule, accuracy, group in SHORT[preset]:
        config = build_config(preset=preset, values={"source": source, "candidates": rule})
        runs = runs_of(group, config)
        assert runs, f"{group} has no run of {preset}"
        assert f"{fmean(100 * run.last['test_accuracy'] for run in runs):.2f}" == accuracy
        # How often it is tested decides its time.
        records = read_group(ROOT / "results" / f"{group}.jsonl")
        every = {records[run.path.name]["config"]["train"]["evaluate_every"] for run in runs}
        assert every == {config.train.evaluate_every}


def test_short_presets_without_a_run_say_so() -> None:
    assert {name for name, gave in SHORT.items() if not gave} == {
        f"fast/svhn-{method}" for method in ("cc", "crdpll", "lws", "pico", "pop", "proden")
    }
    assert all("Not run." in head(name) for name, gave in SHORT.items() if not gave)


@pytest.mark.parametrize("suite", ["cifar10-q0.5", "cifar100-q0.1"])
def test_suites_of_equal_minutes_are_the_runs_that_were_made(suite: str, runs_of: RunsOf) -> None:
    cells = expand(read_suite(f"equal-minutes-{suite.partition('-')[0]}"))
    matching = {cell.name: [run.path.name for run in runs_of(f"{suite}-4min", cell.config)] for cell in cells}
    made = read_group(ROOT / "results" / f"{suite}-4min.jsonl")
    assert matching == {f"{suite}/{name}": [name] for name in made}
    assert len(cells) == 7


def reckoned(preset: str, train: int, test: int) -> float:
    """Seconds of a run's epochs alone on an H200, from those timed with CIFAR-10's 50,000 and 10,000 images."""
    record = json.loads((ROOT / "results/speed/h200-resnet-18-epochs.json").read_text(encoding="utf-8"))
    config = build_config(preset=preset, values={"source": "digits"})
    (fast,) = [case["fast"] for case in record["cases"] if case["method"] == config.method.name]
    assert (config.network.name, config.train.batch_size) == ("resnet-18", 128)
    steps = math.ceil(train / 128) / math.ceil(50_000 / 128)
    tests = math.ceil(config.train.epochs / config.train.evaluate_every)  # the last epoch always has one
    passes = fast["epoch_passes_s"] * (train + test) / 60_000
    return float(config.train.epochs * steps * fast["epoch_train_s"] + tests * passes)


IMAGES = {"cifar10": (50_000, 10_000), "cifar100": (50_000, 10_000), "svhn": (73_257, 26_032)}


@pytest.mark.parametrize("preset", [name for name in SHORT if "crosel" not in name])
def test_short_presets_of_other_methods_take_the_same_minutes(preset: str) -> None:
    seconds = reckoned(preset, *IMAGES[preset.removeprefix("fast/").partition("-")[0]])
    assert 220 <= seconds <= 225  # and four minutes with start and end
    assert f"{seconds:.0f} s of them epochs" in head(preset)


def test_a_share_that_nobody_measured_is_found() -> None:
    assert shares("| a | 12.34 % | 98.81 ± 0.13 % |\nnot 56.78 % here") == ["12.34", "98.81"]
    assert is_known("98.81", [98.812])
    assert not is_known("12.34", [98.812])
