"""Tables of runs made by hand, and what each format makes of awkward text."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from _made import make_run

from crosel.bench import expand, read_suite
from crosel.bench.tables import build, collect, main_figures, make_tables, paper, pick_format
from crosel.bench.tables.build import Estimate, ResultsTable, Row
from crosel.bench.tables.paper import METRICS, PaperFigure
from crosel.bench.tables.render import escape_latex, escape_markdown, latex_table, markdown_table
from crosel.errors import UserError


def rows_of(*folders: Path) -> tuple[Row, ...]:
    (table,) = build(collect(folders).finished)
    return table.rows


def test_mean_and_deviation_of_the_last_epoch(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.90, 0.92, 0.97)):
        make_run(tmp_path / f"crosel-seed{seed}", seed=seed, accuracy=accuracy, selection_ratio=0.5)
    (row,) = rows_of(tmp_path)
    assert row.seeds == (0, 1, 2)
    assert row.metrics["accuracy"].mean == pytest.approx(93)
    assert row.metrics["accuracy"].deviation == pytest.approx(13**0.5)  # (9 + 1 + 16) / 2
    assert row.metrics["selection_ratio"] == (50.0, 0.0, 3)
    assert "selection_accuracy" not in row.metrics
    assert row.seconds is not None
    assert row.seconds.mean == 30  # 10 + 20
    assert row.images_per_second is not None
    assert row.images_per_second.mean == 150
    assert (row.peak_memory_mib, row.hardware, row.epochs, row.network) == (50, ("NVIDIA H200",), 2, "wrn-16-4")
    text = make_tables([tmp_path]).text
    assert "| 3 | 93.00 ± 3.61 | 97.34 ± 0.05 | 50.00 ± 0.00 | 96.25 ± 0.12 |" in text
    assert "**" not in text  # one row has nothing to be better than


def test_best_in_bold_and_tested_over_shared_seeds(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.91, 0.92, 0.93)):
        make_run(tmp_path / f"crosel-{seed}", seed=seed, accuracy=accuracy)
    for seed, accuracy in enumerate((0.90, 0.90, 0.90)):
        make_run(tmp_path / f"cc-{seed}", method="cc", seed=seed, accuracy=accuracy)
    make_run(tmp_path / "lws-5", method="lws", seed=5, accuracy=0.5)
    crosel, lws, cc = rows_of(tmp_path)
    assert [row.method for row in (crosel, lws, cc)] == ["crosel", "lws", "cc"]
    assert [row.best for row in (crosel, lws, cc)] == [True, False, False]
    assert crosel.test is None
    assert lws.test is None  # no seed in common
    assert cc.test is not None
    assert cc.test.n == 3
    assert cc.test.t == pytest.approx(-2 * 3**0.5)
    text = make_tables([tmp_path]).text
    assert "**92.00 ± 1.00**" in text
    assert "| 0.074 (3) |" in text
    assert "paired t-test" in text


def test_groups_by_everything_but_the_seed(tmp_path: Path) -> None:
    make_run(tmp_path / "a", seed=0, accuracy=0.8)
    make_run(tmp_path / "b", seed=1, accuracy=0.9, sets=("train.log_every=7", "train.keep_checkpoints=5"))
    make_run(tmp_path / "c", seed=0, accuracy=0.7, sets=("train.lr=0.2",))
    make_run(tmp_path / "d", method="cc", accuracy=0.6)
    make_run(tmp_path / "e", seed=0, accuracy=0.8, epochs=3)
    rows = rows_of(tmp_path)
    assert [(row.method, row.epochs, dict(row.settings), row.seeds) for row in rows] == [
        ("crosel", 2, {"train.lr": 0.05}, (0, 1)),
        ("crosel", 2, {"train.lr": 0.2}, (0,)),
        ("crosel", 3, {"train.lr": 0.05}, (0,)),
        ("cc", 2, {"train.lr": 0.05}, (0,)),
    ]


def test_splits_that_follow_the_seed_are_one_row(tmp_path: Path) -> None:
    """… and so is one split for all seeds. Published figures of the set stand below."""
    for kind, split in (("own", lambda seed: seed), ("one", lambda seed: 0)):
        for seed in (0, 1, 2):
            sets = ("data.test_share=0.1", f"data.split_seed={split(seed)}")
            make_run(tmp_path / kind / str(seed), source="lost.mat", rule="", seed=seed, accuracy=0.7, sets=sets)
        (row,) = rows_of(tmp_path / kind)
        assert row.seeds == (0, 1, 2)
    assert "Published for lost.mat: 76.78 (ED-PLL" in make_tables([tmp_path / "own"]).text


def test_one_table_for_each_dataset_and_rule(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", rule="uniform:q=0.1")
    make_run(tmp_path / "c", source="/data/x.npz", rule="uniform:q=0.1")
    assert [(table.dataset, table.rule) for table in build(collect([tmp_path]).finished)] == [
        ("cifar10", "uniform:q=0.1"), ("cifar10", "uniform:q=0.5"), ("x.npz", "uniform:q=0.1"),
    ]  # fmt: skip


def test_unfinished_runs_are_marked_not_mixed_in(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracy=0.8)
    make_run(tmp_path / "b", seed=1, accuracy=0.1, done=1)
    make_run(tmp_path / "c", seed=2, done=0)
    collection = collect([tmp_path])
    assert [run.path.name for run in collection.finished] == ["a"]
    assert [run.path.name for run in collection.unfinished] == ["b", "c"]
    text = make_tables([tmp_path]).text
    assert text.count("| paper |") == 1  # of the accuracy: we have neither S-ratio nor S-acc here
    assert f"- Not finished: {tmp_path / 'b'} (epoch 1 of 2)" in text
    assert "80.00" in text


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", accuracy=0.8)
    make_run(tmp_path / "b" / "copy", accuracy=0.8)
    collection = collect([tmp_path, tmp_path / "a"])
    assert len(collection.finished) == 1
    assert collection.problems == (
        f"{tmp_path / 'b' / 'copy'} is a duplicate of {tmp_path / 'a' / 'run'} (same settings and seed)",
    )


def test_damaged_and_foreign_folders(tmp_path: Path) -> None:
    make_run(tmp_path / "good", accuracy=0.8, environment={"gpu": "X", "threads": 1, "command": ["--device=cpu"]})
    own = make_run(tmp_path / "own-method", method="cc", accuracy=0.7)
    config = own / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8").replace("name: cc", "name: of-mine"), encoding="utf-8")
    (own / "environment.json").write_text("[", encoding="utf-8")
    bad = make_run(tmp_path / "bad")
    (bad / "config.yaml").write_text("a: [", encoding="utf-8")
    empty = make_run(tmp_path / "empty")
    (empty / "config.yaml").write_text("seed: 0\n", encoding="utf-8")
    (tmp_path / "no-run").mkdir()
    (tmp_path / "no-run" / "config.yaml").write_text("x: 1\n", encoding="utf-8")
    collection = collect([tmp_path])
    assert [(run.method, run.hardware) for run in collection.finished] == [("crosel", "CPU, 1 thread"), ("of-mine", "")]
    assert len(collection.problems) == 2
    assert "bad/config.yaml, line 1" in collection.problems[0] + collection.problems[1]


def test_nothing_to_show(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        make_tables([tmp_path / "none"])
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(UserError) as error:
        make_tables([folder])
    assert str(error.value) == (f"{folder}: no runs found; give the --out folder of crosel train or crosel bench")
    run = make_run(folder / "a", done=1)
    with pytest.raises(UserError) as error:
        make_tables([folder])
    assert str(error.value) == (
        f"{folder}: no run is finished; continue the first with: crosel train --resume --out {run}"
    )
    (run / "config.yaml").write_text("seed: x\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"empty: no run can be read \(.*config.yaml: seed, method.name or source is"):
        make_tables([folder])


def test_without_true_labels(tmp_path: Path) -> None:
    make_run(tmp_path / "a", source="mine.csv", accuracy=None)
    make_run(tmp_path / "b", source="mine.csv", accuracy=None, method="cc")
    text = make_tables([tmp_path]).text
    assert "accuracy (%)" not in text
    assert "| crosel |" in text


# --- the paper's figures ------------------------------------------------------------------------------------------


def test_paper_figures_are_those_of_the_targets() -> None:
    assert main_figures("cifar10", "uniform:q=0.5", "cc")["accuracy"].mean == 81.01
    assert main_figures("cifar10", "uniform:q=0.50", "cc")["accuracy"].deviation == 0.38
    fine = main_figures("cifar100", "superclass:q=0.5", "crosel")
    assert (fine["accuracy"].mean, fine["accuracy"].deviation, len(fine)) == (83.34, None, 1)
    for dataset, rule, method in (
        ("digits", "uniform:q=0.5", "cc"), ("cifar10", "uniform:q=0.2", "cc"), ("cifar10", "union", "cc"),
        ("cifar10", "uniform:q=0.5", "mine"), ("cifar10", "uniform:q=-", "cc"),
    ):  # fmt: skip
        assert main_figures(dataset, rule, method) == {}
    assert "CVPR 2024" in paper()["source"]


def write_runs(folder: Path, suite: str) -> None:
    """A run for each variant of a suite, as if it had ended at 50 %."""
    for run in expand(read_suite(suite), seeds=1):
        path = folder / run.name
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(run.config.to_yaml(), encoding="utf-8")
        shares = dict.fromkeys(("test_accuracy", "selection_ratio", "oracle_selection_accuracy"), 0.5)
        row = {"epoch": run.config.train.epochs, **shares}
        (path / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


@pytest.mark.parametrize(
    ("suite", "ablations"),
    [
        ("paper-components", ["components cifar100 q=0.1"]),
        ("paper-scope", ["scope cifar10 q=0.5", "scope cifar100 q=0.1"]),
        ("paper-bank", ["t cifar10 q=0.3", "t cifar100 q=0.1"]),
        ("paper-gamma", ["gamma cifar10 q=0.3", "gamma cifar100 q=0.1"]),
        ("paper-networks", ["networks cifar10 q=0.5", "networks cifar100 q=0.1"]),
        ("paper-lambda", ["lambda_cr cifar10 q=0.5", "lambda_cr cifar100 q=0.1"]),
        ("paper-augmentation", [f"selected-batch augmentation {on}" for on in ("cifar10 q=0.3", "cifar100 q=0.1")]),
    ],
)  # fmt: skip
def test_each_ablation_suite_meets_the_papers_rows(tmp_path: Path, suite: str, ablations: list[str]) -> None:
    """Every variant of a suite has a figure of the paper beside it, and no figure of the paper is left over."""
    write_runs(tmp_path, suite)
    tables = build(collect([tmp_path]).finished)
    for table, ablation in zip(tables, ablations, strict=True):
        expected = sorted(row[0] for row in paper()["ablation"][ablation].values())
        # For the usual setting the main table is cited; the two differ once, by a last digit.
        assert sorted(row.paper["accuracy"].mean for row in table.rows) == pytest.approx(expected, abs=0.011)


def test_a_schedule_with_its_own_weight_still_meets_the_main_table_and_the_scopes(tmp_path: Path) -> None:
    make_run(tmp_path / "all", sets=("method.lambda_cr=1",))
    assert rows_of(tmp_path)[0].paper["accuracy"].mean == 97.34
    make_run(tmp_path / "none", sets=("method.lambda_cr=1", "method.scope=none"))
    assert [row.paper["accuracy"].mean for row in rows_of(tmp_path)] == [97.34, 81.01]
    make_run(tmp_path / "two", sets=("method.lambda_cr=2",))
    found = {(row.settings["method.scope"], row.settings["method.lambda_cr"]): row.paper for row in rows_of(tmp_path)}
    assert {key: figures["accuracy"].mean for key, figures in found.items()} == {
        ("all", 1.0): 95.94, ("none", 1.0): 81.01, ("all", 2.0): 96.8,
    }  # fmt: skip


def test_the_short_ablations_meet_the_papers_rows_and_say_of_which_data(tmp_path: Path) -> None:
    """The paper has the components for CIFAR-100 only; scope, networks and λ_d for CIFAR-10 with q=0.5 as well."""
    write_runs(tmp_path, "fast-ablations")
    rows = rows_of(tmp_path)
    expected = [
        row
        for ablation in ("components cifar100 q=0.1", "scope cifar10 q=0.5", "networks cifar10 q=0.5",
                         "lambda_cr cifar10 q=0.5")
        for name, row in paper()["ablation"][ablation].items()
        # All components, with co-mix and without, are rows of the scope; λ_cr = 2 is not tried.
        if "b3" not in name and name not in ("two", "2", "4")
    ]  # fmt: skip
    assert len(rows) == len(expected) == 12
    shown = sorted([row.paper[metric].mean for metric in METRICS] for row in rows)
    assert shown == sorted(expected)
    other = {row.paper["accuracy"].mean: row.paper["accuracy"].other_data for row in rows}
    assert {mean for mean, data in other.items() if data} == {73.12, 72.0, 77.04, 79.9}
    assert set(other.values()) == {"", "cifar100 q=0.1"}
    assert rows[0].paper["accuracy"].mean == 97.34  # nothing changed: first
    text = make_tables([tmp_path]).text
    (line,) = (line for line in text.splitlines() if "| criteria=1, scope=none |" in line)
    assert "| 73.12 | 50.00 | 90.32 | 50.00 | 95.15 | cifar100 q=0.1 |" in line
    assert "Unless stated otherwise: criteria=1+2+3, dynamic_lambda=true, lambda_cr=4, lambda_cr_start=1, " in text
    assert "The paper's nearest figures are for cifar100 q=0.1; its whole method reaches 84.07 ± 0.16 there." in text


def test_an_ablation_is_named_where_all_rows_are_it(tmp_path: Path) -> None:
    """Its figure of the paper is not the method's, and nothing else in the table would say so."""
    make_run(tmp_path / "alone", sets=("method.scope=none", "method.gamma=0.7"))
    (row,) = rows_of(tmp_path)
    assert row.paper["accuracy"].mean == 81.01
    assert row.settings == {"method.scope": "none"}  # γ is part of the schedule
    assert "| crosel | scope=none |" in make_tables([tmp_path]).text


@pytest.mark.parametrize(
    ("source", "rule", "change", "mean", "data"),
    [
        ("cifar10", "uniform:q=0.5", "method.gamma=0.8", 96.24, "cifar10 q=0.3"),
        ("cifar10", "uniform:q=0.3", "method.gamma=0.8", 96.24, ""),
        ("cifar100", "superclass:q=0.5", "method.networks=1", 81.39, "cifar100 q=0.1"),
        ("svhn", "uniform:q=0.5", "method.networks=1", 96.51, "cifar10 q=0.5"),
        ("digits", "uniform:q=0.5", "method.networks=1", math.nan, ""),
        ("cifar10", "", "method.networks=1", math.nan, ""),
    ],
)
def test_the_nearest_of_the_papers_data_are_taken(
    tmp_path: Path, source: str, rule: str, change: str, mean: float, data: str
) -> None:
    make_run(tmp_path / "usual", source=source, rule=rule)
    make_run(tmp_path / "changed", source=source, rule=rule, sets=(change,))
    name, _, value = change.partition("=")
    (row,) = (row for row in rows_of(tmp_path) if row.settings[name] == float(value))
    figure = row.paper.get("accuracy", PaperFigure(math.nan))
    assert figure.mean == pytest.approx(mean, nan_ok=True)
    assert figure.other_data == data


def test_held_out_examples_have_tables_of_their_own(tmp_path: Path) -> None:
    """The best of a study is chosen by them: it may not be taken for a result on the test set."""
    make_run(tmp_path / "result", accuracy=0.8)
    held_out = ("data.own_test=false", "data.test_share=0.1")
    make_run(tmp_path / "a", accuracy=0.95, sets=held_out)
    make_run(tmp_path / "b", accuracy=0.9, sets=(*held_out, "train.lr=0.2"))
    result, study = build(collect([tmp_path]).finished)
    assert (result.held_out, study.held_out) == (0, 0.1)
    assert [row.best for row in result.rows + study.rows] == [False, True, False]
    text = make_tables([tmp_path]).text
    assert "### cifar10, uniform:q=0.5, accuracy on 0.1 of the training examples, held out" in text
    assert "Held out: accuracy on held-out training examples, not on the test set" in text
    lines = list(csv.DictReader(io.StringIO(make_tables([tmp_path], "csv").text)))
    assert [line["held_out"] for line in lines] == ["0", "0.1", "0.1"]


def test_only_what_a_row_has_of_its_own_is_shown(tmp_path: Path) -> None:
    for name, sets in {"a": (), "b": ("method.gamma=0.8",), "c": ("train.lr=0.2",), "d": ("method.alpha=0.5",)}.items():
        make_run(tmp_path / name, sets=sets)
    make_run(tmp_path / "cc", method="cc")
    shown = [line.split(" | ")[1] for line in make_tables([tmp_path]).text.splitlines() if line.startswith("| c")]
    assert shown == ["", "alpha=0.5", "gamma=0.8", "train.lr=0.2", ""]
    assert "\nUnless stated otherwise: train.lr=0.05; crosel: alpha=0.75, gamma=0.9.\n" in make_tables([tmp_path]).text
    assert "held out. Where nothing" not in make_tables([tmp_path], "latex").text
    assert "uniform:q=0.5. Unless stated otherwise" in make_tables([tmp_path], "latex").text
    full = [line["settings"] for line in csv.DictReader(io.StringIO(make_tables([tmp_path], "csv").text))]
    assert full[0] == "alpha=0.75, gamma=0.9, train.lr=0.05"


def test_of_two_rows_neither_is_the_usual_one(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", sets=("train.lr=0.2",))
    text = make_tables([tmp_path]).text
    assert "| train.lr=0.05 |" in text
    assert "Unless stated otherwise" not in text


def test_what_the_paper_has_not_tried_has_no_figure(tmp_path: Path) -> None:
    make_run(tmp_path / "a", sets=("method.networks=1", "method.scope=none"))
    make_run(tmp_path / "b", sets=("method.criteria=[2]",))
    assert [dict(row.paper) for row in rows_of(tmp_path)] == [{}, {}]


def test_of_two_rows_the_paper_decides_what_is_an_ablation(tmp_path: Path) -> None:
    """Neither γ is the more frequent, so the one that departs from the paper's is no part of the schedule."""
    make_run(tmp_path / "a", sets=("method.gamma=0.3", "method.scope=none"))
    make_run(tmp_path / "b")
    found = {row.settings["method.scope"]: row.paper.get("accuracy") for row in rows_of(tmp_path)}
    assert found == {"none": None, "all": PaperFigure(97.34, 0.05)}


# --- formats ------------------------------------------------------------------------------------------------------


def awkward(**changes: Any) -> ResultsTable:
    values: dict[str, Any] = {
        "method": "a|b_", "settings": {"method.x_y": "50 % & *more*\n#1"}, "network": r"n\{1}$^~", "epochs": 3,
        "seeds": (0, 1), "metrics": {"accuracy": Estimate(91.234, 0.5, 2)}, "best": True, "hardware": ("<GPU>",),
    }  # fmt: skip
    return ResultsTable("my_data[1]", "uniform:q=0.1", (Row(**(values | changes)),))


def test_markdown_escapes() -> None:
    assert escape_markdown("a|b *c* `d` <e> [f] g_h _i_ \\") == r"a\|b \*c\* \`d\` \<e\> \[f\] g_h \_i\_ " + "\\\\"
    lines = markdown_table(awkward()).splitlines()
    assert lines[0] == r"### my_data\[1\], uniform:q=0.1"
    bare = [line.replace(r"\|", "").count("|") for line in lines[2:]]
    assert len(set(bare)) == 1  # as many cells in every line
    assert "**91.23 ± 0.50**" in lines[4]
    assert r"x_y=50 % & \*more\* #1" in lines[4]


def test_latex_escapes() -> None:
    assert escape_latex("50 % & a_b #1 {c} $^~\\ ± <") == (
        r"50 \% \& a\_b \#1 \{c\} \$\textasciicircum{}\textasciitilde{}\textbackslash{} $\pm$ $<$"
    )
    text = latex_table(awkward())
    assert r"\textbf{91.23 $\pm$ 0.50}" in text
    assert r"\caption{my\_data[1], uniform:q=0.1}" in text
    body = text.split(r"\midrule")[1].split(r"\bottomrule")[0].strip()
    columns = text.split(r"\begin{tabular}{")[1].split("}")[0]
    assert body.replace(r"\&", "").count("&") == len(columns) - 1
    assert body.endswith(r"\\")


def test_csv_reads_back(tmp_path: Path) -> None:
    make_run(tmp_path / "a", accuracy=0.91234567, sets=("method.criteria=[1, 2]",))
    make_run(tmp_path / "b", accuracy=0.8, method="cc", environment={"gpu": 'The "fast", one'})
    first, second = csv.DictReader(io.StringIO(make_tables([tmp_path], "csv").text))
    assert float(first["accuracy"]) == pytest.approx(91.234567)
    assert (first["best"], first["seeds"], first["n"], first["accuracy_sd"], first["settings"]) == (
        "1",
        "0",
        "1",
        "",
        "criteria=1+2",
    )
    assert (second["hardware"], second["paper_accuracy"], second["paper_accuracy_sd"]) == (
        'The "fast", one',
        "81.01",
        "0.38",
    )


def test_formats_by_name_and_ending() -> None:
    assert pick_format(None) == pick_format(None, Path("a.txt")) == "markdown"
    assert pick_format(None, Path("a.CSV")) == "csv"
    assert pick_format("latex", Path("a.csv")) == pick_format("latex", Path("a.xlsx")) == "latex"
    with pytest.raises(UserError, match=r"a\.xlsx: use one of the endings \.md, \.txt, \.csv, \.tex, or"):
        pick_format(None, Path("a.xlsx"))
    with pytest.raises(UserError, match=r"did you mean 'latex'"):
        pick_format("latx")
