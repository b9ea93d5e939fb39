"""The tables of docs/rows.md: they are those of the records, and they say what a run under results/ would change."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from _blocks import docs_script

from crosel.bench import expand, read_suite
from crosel.config import RunConfig


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    return docs_script("rows")


def write_run(
    folder: Path, config: RunConfig, accuracy: float, seed: int = 0, seconds: float = 500.0, gpu: str = "NVIDIA H200"
) -> None:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.model_copy(update={"seed": seed}).to_yaml(), encoding="utf-8")
    last = {
        "epoch": config.train.epochs, "test_accuracy": accuracy, "selection_ratio": 0.91,
        "oracle_selection_accuracy": 0.995, "seconds": seconds,
    }  # fmt: skip
    (folder / "metrics.jsonl").write_text(json.dumps(last) + "\n", encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"gpu": gpu, "command": []}), encoding="utf-8")


def lines(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_the_page_is_written_from_the_records(rows: ModuleType) -> None:
    page = rows.PAGE.read_text(encoding="utf-8")
    assert rows.filled(page, rows.recorded()) == page, "results/ has changed: python docs/rows.py"
    assert all(f"<!-- rows: {name} -->" in page for name in rows.TABLES)


def test_a_page_without_tables_gets_all_of_them(rows: ModuleType) -> None:
    page = "".join(f"text\n\n<!-- rows: {name} -->\n<!-- end -->\n" for name in rows.TABLES)
    text = rows.filled(page, [])
    assert text.count("text\n") == text.count("\n| --- |") == len(rows.TABLES)
    assert text.count("not run") == 7 + 12 + 28
    assert rows.filled(text, []) == text


def test_runs_fill_the_row_of_their_preset(rows: ModuleType, tmp_path: Path) -> None:
    ten, thirty = rows.TARGETS[0].config, rows.TARGETS[1].config
    for seed, accuracy in enumerate((0.951, 0.953, 0.949)):
        write_run(tmp_path / "cifar10-three-seeds" / f"crosel-seed{seed}", ten, accuracy, seed)
    write_run(tmp_path / "cifar10-long" / "crosel-seed0", thirty, 0.96, seconds=1810)
    often = ten.model_copy(update={"train": ten.train.model_copy(update={"evaluate_every": 5})})
    write_run(tmp_path / "cifar10-fourth" / "crosel-seed3", often, 0.951, 3)  # looked at more seldom: the same run
    write_run(tmp_path / "cifar10-cpu" / "crosel-seed4", ten, 0.1, 4, gpu="")
    runs = rows.gpu_runs(tmp_path)
    first, second, third, *_ = lines(rows.targets(runs))
    records = ", ".join(
        f"[cifar10-{group}/crosel-seedN](../results/cifar10-{group}.jsonl)" for group in ("fourth", "three-seeds")
    )
    assert first[4:11] == ["95.10 ± 0.16 %", "91.00 ± 0.00 %", "99.50 ± 0.00 %", "yes", "500", "0, 1, 2, 3", records]
    assert second[7:9] == ["accuracy 0.50 short, 10 s too long", "1810"]
    assert third[:5] == ["CIFAR-10, q = 0.1", "10 min", "95.5 %", "97.31 %, S-ratio 99.09 %, S-acc 99.79 %", "not run"]
    assert lines(rows.others(runs)) == []


def test_the_suite_fast_bars_runs_every_row(rows: ModuleType, tmp_path: Path) -> None:
    for cell in expand(read_suite("fast-targets")):
        write_run(tmp_path / cell.name, cell.config, 0.97)
    assert {line[4] for line in lines(rows.targets(rows.gpu_runs(tmp_path)))} == {"97.00 %"}
    assert len(expand(read_suite("fast-targets"))) == len(rows.TARGETS)


def test_runs_with_other_settings_are_listed_and_not_taken_for_the_preset(rows: ModuleType, tmp_path: Path) -> None:
    ten = rows.TARGETS[0].config
    longer = ten.model_copy(update={"train": ten.train.model_copy(update={"epochs": 73})})
    held_out = ten.model_copy(update={"data": ten.data.model_copy(update={"own_test": False, "test_share": 0.1})})
    write_run(tmp_path / "cifar10-longer" / "crosel-seed0", longer, 0.97)
    write_run(tmp_path / "cifar10-held-out" / "crosel-seed0", held_out, 0.99)
    runs = rows.gpu_runs(tmp_path)
    assert {line[4] for line in lines(rows.targets(runs))} == {"not run"}
    (other,) = lines(rows.others(runs))
    assert other[:4] == ["CIFAR-10, q = 0.5", "wrn-16-8", "73", "97.00 %"]


def test_what_the_data_decide_tells_no_runs_apart(rows: ModuleType, tmp_path: Path) -> None:
    target = rows.TARGETS[-1]
    resolved = target.config.model_copy(update={"augment": target.config.augment.model_copy(update={"flip": False})})
    write_run(tmp_path / "svhn" / "crosel-seed0", resolved, 0.97)
    assert lines(rows.targets(rows.gpu_runs(tmp_path)))[-1][4] == "97.00 %"


def test_ablations_are_compared_by_what_they_cost(rows: ModuleType, tmp_path: Path) -> None:
    accuracies = {"nothing": 0.93, "in-the-set": 0.90, "one-network": 0.935, "lambda-1": 0.932}
    for change, (config, _) in rows.runs_by_change("fast-ablations", []).items():
        if change in accuracies:
            write_run(tmp_path / "cifar10-ablations" / f"crosel-change={change}-seed0", config, accuracies[change])
    runs = rows.gpu_runs(tmp_path)
    found = {line[0].strip("`"): line for line in lines(rows.ablations(runs))}
    assert found["nothing"][1:11] == [
        "93.00 %", "91.00 %", "99.50 %", "97.34 %", "96.25 %", "99.44 %", "cifar10 q=0.5", "+0.00", "+0.00", "",
    ]  # fmt: skip
    assert found["in-the-set"][7:11] == ["cifar100 q=0.1", "-3.00", "-7.03", "yes"]
    assert found["one-network"][8:11] == ["+0.50", "-0.83", "no"]
    assert found["lambda-1"][8:11] == ["+0.20", "-1.40", "too small to tell"]
    assert found["without-comix"][1:11] == [
        "not run", "", "", "81.01 %", "90.23 %", "89.72 %", "cifar10 q=0.5", "", "-16.33", "",
    ]  # fmt: skip
    assert lines(rows.others(runs)) == []


def test_the_study_is_of_held_out_images(rows: ModuleType, tmp_path: Path) -> None:
    found = rows.runs_by_change("study-cifar10", [])
    write_run(tmp_path / "cifar10-study" / "crosel-change=nothing-seed0", found["nothing"][0], 0.80)
    write_run(tmp_path / "cifar10-study" / "crosel-change=T-1-seed0", found["T-1"][0], 0.78)
    runs = rows.gpu_runs(tmp_path)
    by_change = {line[0]: line for line in lines(rows.study(runs))}
    assert by_change["`T-1`"][1:6] == ["78.00 %", "91.00 %", "99.50 %", "-2.00", "500"]
    assert by_change["`lr-0.2`"][1] == "not run"
    assert {line[4] for line in lines(rows.targets(runs))} == {"not run"}
