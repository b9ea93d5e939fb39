"""Choices that crosel has made for good, the other way: what paper or released code do, or might be read to do, and
what has no setting. Each is the unchanged cell of the suite `study-cifar10` (held-out *training* images, no test
images) with one change of the method.

    python benchmarks/fixed_choices.py run --data DIR --arms "the bank sees strong views" --out FILE
    python benchmarks/fixed_choices.py table --out FILE                       # the figures in docs/study.md

FILE gets one line for each run, with what was measured after every epoch. A run that is already there is not repeated.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from changes import missing_rows, own_share, strong_bank, targets_of_the_other
from record import Arguments, add, chosen, end_with, read, some

from crosel.bench.suite import expand, read_suite
from crosel.data import draw_candidates, load
from crosel.runs.environment import environment
from crosel.training.build import build_session, resolve
from crosel.training.devices import pick_device
from crosel.training.session import Session
from crosel.training.trainer import fit

KEPT = (
    "epoch", "phase", "test_accuracy", "test_accuracy_1", "test_accuracy_2", "selection_ratio", "selection_ratio_1",
    "selection_ratio_2", "oracle_selection_accuracy", "covering_rate", "approximated_accuracy", "lambda_d", "loss",
    "loss_selected", "loss_comix", "seconds",
)  # fmt: skip


def unchanged(session: Session) -> None: ...


ARMS: dict[str, Callable[[Session], None]] = {
    "as it is": unchanged,
    "the bank sees strong views": strong_bank,
    "rows are missing in the bank": missing_rows,
    "the other network makes the targets": targets_of_the_other,
    "λ_d by each network's own share": own_share,
}


class Watch:
    def __init__(self) -> None:
        self.epochs: list[dict[str, Any]] = []

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None: ...
    def on_checkpoint(self, session: Session) -> None: ...

    def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
        line = {name: row[name] for name in KEPT if name in row}
        self.epochs.append({n: round(v, 4) if isinstance(v, float) else v for n, v in line.items()})
        print(self.epochs[-1], flush=True)


def run(arm: str, folder: Path, device: str, settings: list[str]) -> dict[str, Any]:
    started = time.perf_counter()
    [cell] = expand(read_suite("study-cifar10"), data_dir=folder, settings=settings, only="*=nothing-*")
    config = cell.config
    data = draw_candidates(load(config.source, folder, config.data), config.candidates, config.seed)
    session = build_session(resolve(config, data), data, pick_device(device))
    watch = Watch()
    ARMS[arm](session)
    try:
        fit(session, (watch,))
    finally:
        mock.patch.stopall()
    known = environment(["python", *sys.argv], session.device)
    return {
        "arm": arm, "seed": config.seed, "settings": settings, "epochs": watch.epochs,
        "seconds": round(time.perf_counter() - started, 1),
        **{name: known.get(name) for name in ("commit", "started", "python", "torch", "gpu")},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | seed | held-out accuracy at epoch 20 | held-out accuracy | S-ratio | S-acc | approximated accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    names = ("test_accuracy", "selection_ratio", "oracle_selection_accuracy", "approximated_accuracy")
    for row in rows:
        at_20 = [epoch.get("test_accuracy") for epoch in row["epochs"] if epoch["epoch"] == 20]
        values = [*(at_20 or [None]), *(row["epochs"][-1].get(name) for name in names)]
        shown = ["" if value is None else f"{100 * value:.2f} %" for value in values]
        lines.append(f"| {row['arm']} | {row['seed']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("--data", type=Path, help="folder of the published files")
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by ';'; default: all")
    parser.add_argument("--set", action="append", default=[], help="a setting for every run, as in train.epochs=5")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.what == "table":
        print(table(some(read(given.out), given.out)))
        return
    for arm in chosen(given.arms, ARMS, "--arms"):
        if all((row["arm"], row["settings"]) != (arm, given.set) for row in read(given.out)):
            add(run(arm, given.data, given.device, given.set), given.out)


if __name__ == "__main__":
    end_with(main)
