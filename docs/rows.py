"""Write the tables of docs/rows.md from the runs under results/: `python docs/rows.py`.

A run belongs to a row if it was made with the row's settings, whatever its name: those of a preset as it is now, or of
an entry of a suite. Nothing is chosen by accuracy. A test writes the tables again and compares.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from crosel.bench import expand, read_suite
from crosel.bench.tables import Estimate, RunSummary, collect, estimate, main_figures
from crosel.bench.tables.build import deciding, group
from crosel.bench.tables.paper import PaperFigure, paper_cells, reference, whole_method
from crosel.bench.tables.render import estimate_text
from crosel.config import RunConfig, build_config
from crosel.runs.folder import first_difference
from crosel.training.build import filled_from_data
from crosel.utils.settings import dotted

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from run_records import groups, unpack

DOCS = Path(__file__).parent
PAGE = DOCS / "rows.md"
KEYS = {"accuracy": "test_accuracy", "S-ratio": "selection_ratio", "S-acc": "oracle_selection_accuracy"}
NOISE = 0.5  # points by which one seed's accuracy may differ from another's


@dataclass(frozen=True)
class Target:
    """What a setting must reach (in per cent) within some minutes of one H200."""

    title: str
    source: str
    rule: str
    preset: str
    minutes: int
    must: Mapping[str, float] = field(hash=False)

    @property
    def config(self) -> RunConfig:
        return build_config(preset=self.preset, values={"source": self.source, "candidates": self.rule})


TARGETS = (
    Target("CIFAR-10, q = 0.5", "cifar10", "uniform:q=0.5", "fast/cifar10-crosel", 10, {"accuracy": 95}),
    Target("CIFAR-10, q = 0.5", "cifar10", "uniform:q=0.5", "fast/cifar10-crosel-30min", 30,
           {"accuracy": 96.5, "S-ratio": 90, "S-acc": 99}),
    Target("CIFAR-10, q = 0.1", "cifar10", "uniform:q=0.1", "fast/cifar10-crosel", 10, {"accuracy": 95.5}),
    Target("CIFAR-10, q = 0.3", "cifar10", "uniform:q=0.3", "fast/cifar10-crosel", 10, {"accuracy": 95.5}),
    Target("CIFAR-100, q = 0.1", "cifar100", "uniform:q=0.1", "fast/cifar100-crosel", 30,
           {"accuracy": 78, "S-acc": 97}),
    Target("CIFAR-100, superclass, q = 0.5", "cifar100", "superclass:q=0.5", "fast/cifar100-crosel", 30,
           {"accuracy": 76}),
    Target("SVHN, q = 0.5", "svhn", "uniform:q=0.5", "fast/svhn-crosel", 15, {"accuracy": 96.5, "S-ratio": 90}),
)  # fmt: skip


def is_run_of(run: RunSummary, config: RunConfig) -> bool:
    """Whether the run was made with these settings, but for the seed."""
    if (run.dataset, run.rule, run.method) != (config.source, config.candidates, config.method.name):
        return False
    asked = deciding(dotted(config.model_dump(mode="json")))
    return first_difference(run.settings, asked, {*filled_from_data(config), "data.split_seed"}) is None


def gpu_runs(folder: Path) -> list[RunSummary]:
    """Finished runs of the paper's data on a GPU."""
    return [run for run in collect([folder]).finished if "NVIDIA" in run.hardware]


def recorded() -> list[RunSummary]:
    """Those under results/; groups of other names (`agreement`, `trials`) hold other measurements."""
    with tempfile.TemporaryDirectory() as folder:
        unpack([group for group in groups() if re.match("cifar|svhn", group.name)], Path(folder))
        return gpu_runs(Path(folder))


def mean(runs: Sequence[RunSummary], name: str) -> Estimate | None:
    values = [100 * float(run.last[KEYS[name]]) for run in runs if run.last.get(KEYS[name]) is not None]
    return estimate(values) if values else None


def share(value: Estimate | PaperFigure | None) -> str:
    return f"{estimate_text(value)} %" if value else ""


def measured(runs: Sequence[RunSummary]) -> list[str]:
    """Cells: accuracy, S-ratio, S-acc."""
    return [share(mean(runs, name)) for name in KEYS] if runs else ["not run", "", ""]


def kept(runs: Sequence[RunSummary]) -> list[str]:
    """Cells: seconds of all epochs, seeds, records."""
    seconds = [run.seconds for run in runs if run.seconds is not None]
    names = dict.fromkeys((run.path.parts[-2], re.sub(r"-seed\d+$", "-seedN", run.path.name)) for run in runs)
    return [
        f"{estimate(seconds).mean:.0f}" if seconds else "",
        ", ".join(map(str, sorted(run.seed for run in runs))),
        ", ".join(f"[{group}/{name}](../results/{group}.jsonl)" for group, name in names),
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- the tables ---------------------------------------------------------------------------------------------------


def targets(runs: Sequence[RunSummary]) -> str:
    rows = []
    for target in TARGETS:
        mine = [run for run in runs if is_run_of(run, target.config)]
        aim = main_figures(target.source, target.rule, "crosel")
        must = [f"{value:g} %" if name == "accuracy" else f"{name} {value:g} %" for name, value in target.must.items()]
        papers = [
            f"{'' if name == 'accuracy' else f'{name} '}{figure.mean:.2f} %"
            for name, figure in zip(KEYS, aim.values(), strict=False)
        ]
        rows.append([
            target.title, f"{target.minutes} min", ", ".join(must), ", ".join(papers), *measured(mine),
            shortfall(target, mine), *kept(mine), f"`{target.preset}`",
        ])  # fmt: skip
    head = ("setting", "at most", "target", "paper", "ours", "S-ratio", "S-acc", "reached", "seconds", "seeds",
            "record", "preset")  # fmt: skip
    return table(head, rows)


def shortfall(target: Target, runs: Sequence[RunSummary]) -> str:
    """ "yes", or by how much each target was missed."""
    if not runs:
        return ""
    missed = []
    for name, least in target.must.items():
        value = mean(runs, name)
        if value is None or value.mean < least:
            missed.append(f"{name} {f'{least - value.mean:.2f} short' if value else 'not known'}")
    longest = max((run.seconds or 0.0 for run in runs), default=0.0)
    if longest > 60 * target.minutes:
        missed.append(f"{longest - 60 * target.minutes:.0f} s too long")
    return ", ".join(missed) or "yes"


def others(runs: Sequence[RunSummary]) -> str:
    """Every other run of CroSel on test images of these settings: none is left out for its figures."""
    taken = [target.config for target in TARGETS] + [cell.config for cell in expand(read_suite("fast-ablations"))]
    rows = []
    for title, source, rule in dict.fromkeys((target.title, target.source, target.rule) for target in TARGETS):
        here = [
            run
            for run in runs
            if (run.dataset, run.rule, run.method, run.held_out) == (source, rule, "crosel", 0)
            and not any(is_run_of(run, config) for config in taken)
        ]
        rows += [
            [title, members[0].network, str(members[0].epochs), *measured(members), *kept(members)]
            for members in group(here)
        ]
    head = ("setting", "network", "epochs", "accuracy", "S-ratio", "S-acc", "seconds", "seeds", "record")
    return table(head, rows)


def runs_by_change(suite: str, runs: Sequence[RunSummary]) -> dict[str, tuple[RunConfig, list[RunSummary]]]:
    """By what is changed: the settings of a suite's entry, and its runs."""
    out = {}
    for cell in expand(read_suite(suite), seeds=1):
        change = cell.name.partition("=")[2].removesuffix("-seed0")
        out[change] = (cell.config, [run for run in runs if is_run_of(run, cell.config)])
    return out


def ablations(runs: Sequence[RunSummary]) -> str:
    """Each ablation beside the paper's row, and what it costs: on other data only the difference can be compared."""
    found = runs_by_change("fast-ablations", runs)
    settings = {change: dotted(config.model_dump(mode="json")) for change, (config, _) in found.items()}
    beside = reference("cifar10", list(settings.values()))
    whole = mean(found["nothing"][1], "accuracy")
    rows = []
    for change, (_, mine) in found.items():
        papers = list(paper_cells("cifar10", "uniform:q=0.5", "crosel", settings[change], beside).values())
        data = papers[0].other_data or "cifar10 q=0.5"
        theirs = papers[0].mean - whole_method(data).mean
        ours = mean(mine, "accuracy")
        cost = ours.mean - whole.mean if ours and whole else None
        rows.append([
            f"`{change}`", *measured(mine), *(share(PaperFigure(figure.mean)) for figure in papers), data,
            "" if cost is None else f"{cost:+.2f}", f"{theirs:+.2f}",
            "" if cost is None or change == "nothing" else agreement(cost, theirs), *kept(mine),
        ])  # fmt: skip
    head = ("change", "accuracy", "S-ratio", "S-acc", "paper: accuracy", "S-ratio", "S-acc", "paper's data",
            "difference, ours", "difference, paper", "agrees", "seconds", "seeds", "record")  # fmt: skip
    return table(head, rows)


def agreement(ours: float, papers: float) -> str:
    if abs(ours) < NOISE:
        return "too small to tell"
    return "yes" if ours * papers > 0 else "no"


def study(runs: Sequence[RunSummary]) -> str:
    found = runs_by_change("study-cifar10", runs)
    base = mean(found["nothing"][1], "accuracy")
    rows = []
    for change, (_, mine) in found.items():
        ours = mean(mine, "accuracy")
        difference = f"{ours.mean - base.mean:+.2f}" if ours and base else ""
        rows.append([f"`{change}`", *measured(mine), difference, *kept(mine)])
    head = ("change", "held-out accuracy", "S-ratio", "S-acc", "difference", "seconds", "seeds", "record")
    return table(head, rows)


TABLES = {"targets": targets, "others": others, "ablations": ablations, "study": study}
_PLACE = re.compile(r"(<!-- rows: (\w+) -->\n).*?(<!-- end -->)", re.S)


def filled(page: str, runs: Sequence[RunSummary]) -> str:
    """The page with its tables written anew."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](runs)}\n\n{found[3]}", page)


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), recorded()), encoding="utf-8")


if __name__ == "__main__":
    main()
