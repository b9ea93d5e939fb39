"""Numbers in README, tables of docs and heads of presets are those of the records under results/, or the paper's."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest
from _blocks import ROOT, docs_script

from crosel.bench import expand, read_suite
from crosel.bench.tables import collect
from crosel.config import build_config
from crosel.presets import presets
from crosel.utils.yaml_files import read_yaml

METRICS = ("test_accuracy", "selection_ratio", "oracle_selection_accuracy")
_SHARE = re.compile(r"(\d+\.\d+) %|(\d+\.\d+) ± \d+\.\d+ %")


def recorded() -> list[float]:
    """Last epochs of all runs, alone and as means over seeds, in per cent."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for file in (ROOT / "results").rglob("*metrics.jsonl"):
        last = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
        kind = re.sub(r"-seed\d+", "", str(file.relative_to(ROOT)))
        for metric in METRICS:
            if last.get(metric) is not None:
                groups[kind, metric].append(100 * last[metric])
    return [value for values in groups.values() for value in (*values, fmean(values))]


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


@pytest.mark.parametrize("page", ["README.md", "docs/comparison.md"])
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


_GAVE = re.compile(r"(\w+:q=[\d.]+)[^:.]*: (\d+\.\d+) (?:± \d+\.\d+ )?%[^(]*\(results/([^),]+)[),]")
SHORT = {name: _GAVE.findall(head(name)) for name in presets() if name.startswith("fast/")}


@pytest.mark.parametrize("preset", [name for name, gave in SHORT.items() if gave])
def test_a_short_preset_has_the_settings_of_the_runs_that_it_names(preset: str) -> None:
    is_run_of = docs_script("rows").is_run_of
    source = preset.removeprefix("fast/").partition("-")[0]
    for rule, accuracy, folder in SHORT[preset]:
        config = build_config(preset=preset, values={"source": source, "candidates": rule})
        runs = [run for run in collect([ROOT / "results" / folder]).finished if is_run_of(run, config)]
        assert runs, f"{folder} has no run of {preset}"
        assert f"{fmean(100 * run.last['test_accuracy'] for run in runs):.2f}" == accuracy
        # How often it is tested decides its time.
        every = {read_yaml(run.path / "config.yaml")["train"]["evaluate_every"] for run in runs}
        assert every == {config.train.evaluate_every}


def test_short_presets_without_a_run_say_so() -> None:
    assert {name for name, gave in SHORT.items() if not gave} == {
        f"fast/svhn-{method}" for method in ("cc", "crdpll", "lws", "pico", "pop", "proden")
    }
    assert all("Not run." in head(name) for name, gave in SHORT.items() if not gave)


@pytest.mark.parametrize("suite", ["cifar10-q0.5", "cifar100-q0.1"])
def test_suites_of_equal_minutes_are_the_runs_that_were_made(suite: str) -> None:
    cells = expand(read_suite(f"equal-minutes-{suite.partition('-')[0]}"))
    runs = collect([ROOT / "results" / f"{suite}-4min"]).finished
    is_run_of = docs_script("rows").is_run_of
    matching = {cell.name: [run.path.name for run in runs if is_run_of(run, cell.config)] for cell in cells}
    assert matching == {f"{suite}/{run.path.name}": [run.path.name] for run in runs}
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


def speed_row(case: dict[str, Any]) -> str:
    """A row of the table of all cases, from the record of the benchmark."""
    fast, plain = case["fast"], case.get("plain")
    name = case["network"].replace("resnet", "ResNet").replace("wrn", "WRN")
    networks = 2 if case["method"] == "crosel" else 1
    cells = [
        name, case["batch"], case["method"], f"{fast['ms']:.2f}", f"{fast['ms'] / networks:.2f}",
        f"{plain['ms']:.1f}" if plain else "", f"{case['times_faster']:.1f}" if plain else "",
        f"{case['images_per_second']:,.0f}", f"{case['share_of_views']:.1%}".replace("%", " %"),
        f"{case['tflops']:.0f}", f"{case['share_of_matrix_rate']:.0%}".replace("%", " %"), f"{fast['peak_mib']:,.0f}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def test_every_row_of_the_table_of_speeds_is_recorded() -> None:
    files = ("h200.json", "h200-wrn-34-10.json")
    records = [json.loads((ROOT / "results/speed" / file).read_text(encoding="utf-8")) for file in files]
    recorded_rows = {speed_row(case) for record in records for case in record["cases"]}
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    rows = [" ".join(line.split()) for line in page.splitlines() if re.match(r"\| (WRN|ResNet)-\S+ \| \d+ \|", line)]
    assert len(rows) == 12
    assert [row for row in rows if row not in {" ".join(row.split()) for row in recorded_rows}] == []


def agreement_row(rows: list[dict[str, Any]]) -> str:
    """Cells of the table of agreement, from the record of one kind of walk."""
    alone = [row["largest_by_itself"] for row in rows]
    largest = [
        max(row["largest_from_the_same_weights"]["fast"] for row in rows),
        max(row["fast"] for row in alone),
        max(row["bfloat16 by PyTorch alone"] for row in alone),
        max(value for row in alone for name, value in row.items() if name.startswith("plain, last bit")),
    ]
    return " | ".join([str(len(rows)), *(re.sub("e-0", "e-", f"{value:.1e}") for value in largest)])


def test_the_fast_path_agrees_as_the_page_says() -> None:
    files = [ROOT / "results/agreement" / name for name in ("start.json", "start-wrn-28-2.json", "steep.json")]
    records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    page = (ROOT / "docs/performance.md").read_text(encoding="utf-8").replace("**", "")
    for record in records:
        for kind in {row["walk"] for row in record["rows"]}:
            assert agreement_row([row for row in record["rows"] if row["walk"] == kind]) in page
        assert all(all(row["agrees"].values()) for row in record["rows"])
    assert {record["rounding"] for record in records} == {2**-8}


def test_a_share_that_nobody_measured_is_found() -> None:
    assert shares("| a | 12.34 % | 98.81 ± 0.13 % |\nnot 56.78 % here") == ["12.34", "98.81"]
    assert is_known("98.81", [98.812])
    assert not is_known("12.34", [98.812])
