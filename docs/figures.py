"""Draw the figures of the docs from the runs under results/: `python docs/figures.py` writes docs/images/*.svg.

Plain SVG, so that the same runs give the same bytes: a test draws them again and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import run_records
from run_records import Row

DOCS = Path(__file__).parent
WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 58, 20, 78, 46
COLOURS = ("#0b66c3", "#c2410c", "#15803d", "#7e22ce", "#57534e")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "1 4")  # lines can be told apart without colours too


@dataclass(frozen=True)
class Line:
    name: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Figure:
    title: str
    source: str  # where under results/ the numbers are: GROUP/NAME is line NAME of GROUP.jsonl
    lines: Sequence[Line]
    top: float = 1.0  # where the y axis ends
    bottom: float = 0.0
    percent: bool = True
    mark: tuple[float, str] | None = None  # a vertical line: epoch, text


def rows(run: str) -> list[Row]:
    """The epochs of the run at GROUP/NAME."""
    return run_records.rows(run_records.read_run(run))


def line(name: str, run: Sequence[Row], metric: str) -> Line:
    return Line(name, [(float(r["epoch"]), float(r[metric])) for r in run if r.get(metric) is not None])


def lines(runs: Mapping[str, Sequence[Row]], metric: str) -> list[Line]:
    return [line(name, run, metric) for name, run in runs.items()]


def mean_line(name: str, runs: Sequence[Sequence[Row]], metric: str) -> Line:
    """The mean over seeds, epoch by epoch."""
    together = zip(*runs, strict=True)
    return Line(name, [(float(r[0]["epoch"]), fmean(float(x[metric]) for x in r)) for r in together])


def end_of_warm_up(run: Sequence[Row]) -> tuple[float, str]:
    return sum(r["phase"] == "warm-up" for r in run) + 0.5, "warm-up ends"


# --- the figures ----------------------------------------------------------------------------------------------------


def figures() -> dict[str, Figure]:
    return one_run() | by_ambiguity() | own_data() | one_change() | ablations() | long_runs()


def one_run() -> dict[str, Figure]:
    folder = "cifar10-q0.5/crosel-seed0"
    run = rows(folder)
    selecting = [row for row in run if row["phase"] == "selection"]
    methods = {title: rows(f"cifar10-q0.5/{name}-seed0")
               for name, title in (("crosel", "CroSel"), ("proden", "PRODEN"), ("cc", "CC"))}  # fmt: skip
    return {
        "selection": Figure(
            "CIFAR-10, q = 0.5: what one run selects, and how right it is", folder,
            [line("S-acc", run, "oracle_selection_accuracy"), line("covering rate", run, "covering_rate"),
             line("test accuracy", run, "test_accuracy"), line("S-ratio", run, "selection_ratio")],
            mark=end_of_warm_up(run),
        ),
        "losses": Figure(
            "The same run: the weight of co-mix falls as more is selected", folder,
            [line("λ_d", selecting, "lambda_d"), line("co-mix loss", run, "loss_comix"),
             line("loss on selected labels", run, "loss_selected")], top=2, percent=False, mark=end_of_warm_up(run),
        ),
        "methods": Figure(
            "CIFAR-10, q = 0.5: test accuracy of three methods", "cifar10-q0.5",
            lines(methods, "test_accuracy"), bottom=0.25,
        ),
    }  # fmt: skip


def by_ambiguity() -> dict[str, Figure]:
    digits = {q: [rows(f"digits-q{q}/crosel-seed{seed}") for seed in range(3)] for q in ("0.3", "0.5")}
    return {
        "ambiguity": Figure(
            "Digits: share selected, mean of three seeds", "digits-q0.3, digits-q0.5",
            [mean_line(f"q = {q}", runs, "selection_ratio") for q, runs in digits.items()],
            mark=end_of_warm_up(digits["0.3"][0]),
        ),
    }  # fmt: skip


def own_data() -> dict[str, Figure]:
    names = {"default": "ramp-views-mixup", "CC": "cc", "warm-up and ramp": "ramp", "paper": "paper"}
    runs = {title: rows(f"own-data/cifar10-q0.5/{name}-seed0") for title, name in names.items()}
    return {
        "own-data": Figure(
            "10,000 images of CIFAR-10, q = 0.5: held-out accuracy", "own-data/cifar10-q0.5",
            lines(runs, "test_accuracy"),
        ),
    }  # fmt: skip


def one_change() -> dict[str, Figure]:
    early = {
        "A: T = 1, λ_cr = 4": rows("cifar10-q0.5-study/A"),
        "B: T 1 → 0.5, λ_cr = 1": rows("cifar10-q0.5-study/B"),
        "C: as B, γ from 0.6": rows("cifar10-q0.5-study/C"),
        "D: T = 0.5, γ from 0.6": rows("cifar10-q0.5-study/D"),
    }
    as_it_is = rows("cifar10-study/nothing-seed0")
    variants = {
        "as it is": as_it_is,
        "T = 0.5 at once": rows("cifar10-study/T-0.5-from-the-start-seed0"),
        "λ_cr = 4 at once": rows("cifar10-study/lambda-4-from-the-start-seed0"),
        "α = 0.25": rows("cifar10-study/milder-mixup-seed0"),
        "milder views": rows("cifar10-study/milder-strong-views-seed0"),
    }
    return {
        "study": Figure(
            "Share selected under four settings (CIFAR-10, 24 epochs)", "cifar10-q0.5-study",
            lines(early, "selection_ratio"), mark=end_of_warm_up(rows("cifar10-q0.5-study/A")),
        ),
        "variants": Figure(
            "CIFAR-10, q = 0.5, ResNet-18: share selected when one thing is changed", "cifar10-study",
            lines(variants, "selection_ratio"), mark=end_of_warm_up(as_it_is),
        ),
    }  # fmt: skip


def ablations() -> dict[str, Figure]:
    folder = "cifar10-fast-ablations"
    runs = {
        "all of CroSel": rows(f"{folder}/nothing-seed0"),
        "unselected": rows(f"{folder}/comix-of-the-unselected-seed0"),
        "λ_d = 2": rows(f"{folder}/lambda-2-fixed-seed0"),
        "one network": rows(f"{folder}/one-network-seed0"),
        "no co-mix": rows(f"{folder}/without-comix-seed0"),
    }
    return {
        "ablations": Figure(
            "CIFAR-10, q = 0.5, ResNet-18, 52 epochs: test accuracy", folder,
            lines(runs, "test_accuracy"), bottom=0.55, mark=end_of_warm_up(runs["all of CroSel"]),
        ),
    }  # fmt: skip


def long_runs() -> dict[str, Figure]:
    cifar = rows("cifar10-q0.5-30min/crosel-seed0")
    svhn = rows("svhn-q0.5-15min/crosel-seed0")
    hundred = rows("cifar100-q0.1-30min/crosel-seed0")
    superclass = rows("cifar100-superclass-q0.5-30min/crosel-seed0")
    return {
        "half-an-hour": Figure(
            "CIFAR-10, q = 0.5, WRN-16-8: 210 epochs", "cifar10-q0.5-30min/crosel-seed0",
            [line("S-acc", cifar, "oracle_selection_accuracy"), line("test accuracy", cifar, "test_accuracy"),
             line("S-ratio", cifar, "selection_ratio")], mark=end_of_warm_up(cifar),
        ),
        "handful": Figure(
            "SVHN, q = 0.5: each network, and the share that it learns from", "svhn-q0.5-15min/crosel-seed0",
            [line("accuracy of network 1", svhn, "test_accuracy_1"), line("of network 2", svhn, "test_accuracy_2"),
             line("selected for network 1", svhn, "selection_ratio_2"),
             line("for network 2", svhn, "selection_ratio_1")], mark=end_of_warm_up(svhn),
        ),
        "cifar100": Figure(
            "CIFAR-100, ResNet-18, q = 0.1 and superclass q = 0.5", "cifar100-…-30min",
            [*lines({"accuracy, q = 0.1": hundred, "accuracy, superclass": superclass}, "test_accuracy"),
             *lines({"selected, q = 0.1": hundred, "selected, superclass": superclass}, "selection_ratio")],
            mark=end_of_warm_up(hundred),
        ),
    }  # fmt: skip


# --- drawing --------------------------------------------------------------------------------------------------------


def draw(figure: Figure) -> str:
    last = max(x for each in figure.lines for x, _ in each.points)
    values = [y for each in figure.lines for _, y in each.points]
    assert figure.bottom <= min(values) <= max(values) <= figure.top, f"{figure.title}: a line leaves the frame"

    def at(x: float, y: float) -> tuple[float, float]:
        right, low = WIDTH - RIGHT, HEIGHT - BOTTOM
        share = (y - figure.bottom) / (figure.top - figure.bottom)
        return LEFT + (x - 1) / (last - 1) * (right - LEFT), low - share * (low - TOP)

    ends = "; ".join(f"{each.name} ends at {_number(each.points[-1][1], figure.percent)}" for each in figure.lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-family="sans-serif" '
        f'font-size="13" fill="#1c1917">',
        f"<title>{escape(figure.title)}: {escape(ends)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(figure.title)}</text>',
        *_axes(figure, int(last), at),
        *_legend(figure),
    ]
    for i, each in enumerate(figure.lines):
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in each.points)
        parts.append(f'<polyline points="{points}" {_stroke(i)}/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end" font-size="11" fill="#78716c">'
        f"results/{escape(figure.source)}</text></svg>\n"
    )
    return "\n".join(parts)


def _axes(figure: Figure, last: int, at) -> Iterator[str]:  # type: ignore[no-untyped-def]
    steps = 3 if figure.bottom else 4
    for i in range(steps + 1):
        value = figure.bottom + (figure.top - figure.bottom) * i / steps
        _, y = at(1, value)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e7e5e4"/>'
        text = f"{100 * value:.0f} %" if figure.percent else f"{value:.1f}"
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    step = 10 if last <= 150 else 30  # labels side by side
    for epoch in [1, *range(step, last + 1, step)]:
        x, y = at(epoch, figure.bottom)
        yield f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{epoch}</text>'
    yield f'<text x="{LEFT}" y="{HEIGHT - 8}">epoch</text>'
    if figure.mark:
        x, y = at(figure.mark[0], figure.bottom)
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{y:.1f}" stroke="#a8a29e" stroke-dasharray="4 4"/>'
        text = f'<text x="{x:.1f}" y="{TOP - 8}" text-anchor="middle" font-size="12" fill="#57534e">'
        yield f"{text}{figure.mark[1]}</text>"


def _legend(figure: Figure) -> Iterator[str]:
    room = (WIDTH - LEFT - RIGHT) / len(figure.lines)
    for i, each in enumerate(figure.lines):
        x = LEFT + i * room
        yield f'<line x1="{x:.1f}" x2="{x + 22:.1f}" y1="44" y2="44" {_stroke(i)}/>'
        yield f'<text x="{x + 27:.1f}" y="48" font-size="12">{escape(each.name)}</text>'


def _stroke(i: int) -> str:
    dash = f' stroke-dasharray="{DASHES[i]}"' if DASHES[i] else ""
    return f'fill="none" stroke="{COLOURS[i]}" stroke-width="2.2"{dash}'


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.2f}"


def main() -> None:
    for name, figure in figures().items():
        (DOCS / "images" / f"{name}.svg").write_text(draw(figure), encoding="utf-8")


if __name__ == "__main__":
    main()
