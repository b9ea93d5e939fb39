"""Why fewer examples are selected when CroSel's co-mix begins, what happens if only a few are selected, and what each
choice of the presets is worth to a small network.

    python benchmarks/fall_of_selection.py cut --data DIR --cut cut.npz
    python benchmarks/fall_of_selection.py run --cut cut.npz --arms "as it is;T 0.5 from the start" --seeds 0 --out FILE
    python benchmarks/fall_of_selection.py table --out FILE                   # the figures in docs/study.md

These are short runs on 10,000 *training* images of CIFAR-10 or, with `--source svhn`, of SVHN; 2,000 other training
images are held out. The test images are not used. `--candidates uniform:q=0.5` draws larger sets. FILE gets one line
for each run, with what was measured after every epoch. A run that is already there is not repeated. Arms with the same
warm-up share it: it is trained once, and each arm continues from its end with its own settings.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from changes import (
    aligned,
    balanced,
    both,
    missing_rows,
    no_comix,
    only,
    own_share,
    refreshed,
    selected_leave_no_trace,
    true_targets,
    weak_only,
    without_selected,
)
from record import Arguments, add, chosen, count, end_with, read, seeds, some
from sureness import calibration, criteria, method_of, pressure, views
from torch import Tensor, nn

from crosel.config import build_config
from crosel.data import Dataset, draw_candidates, load
from crosel.errors import Interrupted
from crosel.methods.crosel import average_outputs
from crosel.nn.casts import Conv2d
from crosel.nn.networks import ResidualNetwork
from crosel.runs.environment import environment
from crosel.training.build import build_session, resolve
from crosel.training.checkpoint import Checkpoint
from crosel.training.session import Session
from crosel.training.trainer import fit, predict_chunks

TRAINED, HELD_OUT = 10_000, 2_000


@dataclass(frozen=True)
class Task:
    preset: str
    rule: str
    settings: tuple[str, ...]


TASKS = {
    # So small a network is less sure than a large one. With γ = 0.9 nearly nothing would be selected.
    "cifar10": Task(
        "fast/cifar10-crosel",
        "uniform:q=0.3",
        ("train.epochs=34", "method.warmup=20", "method.ramp=7", "train.batch_size=64", "method.gamma=0.8"),
    ),
    # With more candidates it would not learn enough in its warm-up.
    "svhn": Task(
        "fast/svhn-crosel",
        "uniform:q=0.1",
        ("train.epochs=44", "method.warmup=24", "method.ramp=10", "train.batch_size=64", "method.least_selected=1"),
    ),
}


class HalvedNetwork(ResidualNetwork):
    """Two pre-activation blocks, 32 and 64 wide, after a stem that halves the image: a sixth of WRN-10-1's time."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__(16, (16, 32, 64), 1, classes, channels)
        self.stem = Conv2d(channels, 16, 4, stride=2, padding=1, bias=False)
        nn.init.kaiming_normal_(self.stem.weight, mode="fan_out", nonlinearity="relu")
        self.blocks = self.blocks[1:]


# --- what is changed ------------------------------------------------------------------------------------------------


Arm = tuple[tuple[str, ...], Callable[[Session], None] | None]
ARMS: dict[str, Arm] = {
    "as it is": ((), None),
    "warm-up goes on": ((), no_comix),
    "T 0.5 from the start": (("method.temperature_start=0.5",), None),
    "λ_cr from 0": (("method.lambda_cr_start=0",), None),
    "λ_cr 1": (("method.lambda_cr=1",), None),
    "co-mix on the unselected": (("method.scope=unselected",), None),
    "no MixUp": (("method.alpha=0.001",), None),  # the larger share is 1 but for one step in a thousand
    "two weak views": ((), weak_only),
    "two weak views, no MixUp": (("method.alpha=0.001",), weak_only),
    "true targets": ((), true_targets),
    "co-mix alone": ((), without_selected),
    "co-mix alone, T 0.5": (("method.temperature_start=0.5",), without_selected),
    "co-mix alone, α 0.25": (("method.alpha=0.25",), without_selected),
    "co-mix alone, T 0.5, α 0.25": (("method.temperature_start=0.5", "method.alpha=0.25"), without_selected),
    "T 0.5 from the start, α 0.25": (("method.temperature_start=0.5", "method.alpha=0.25"), None),
    "co-mix alone, no MixUp": (("method.alpha=0.001",), without_selected),
    "co-mix alone, two weak views": ((), both(without_selected, weak_only)),
    "co-mix alone, two weak views, no MixUp": (("method.alpha=0.001",), both(without_selected, weak_only)),
    "co-mix alone, true targets": ((), both(without_selected, true_targets)),
    "strong views in warm-up": (("method.warmup_view=strong",), None),
    "co-mix alone, strong views in warm-up": (("method.warmup_view=strong",), without_selected),
    "classes of the selected balanced": ((), balanced),
    "targets aligned": ((), aligned),
    "targets aligned, under 1 percent left out": (("method.least_selected=100",), aligned),
    "targets aligned, classes balanced": ((), both(aligned, balanced)),
    "targets aligned, co-mix alone": ((), both(aligned, without_selected)),
    "refreshed statistics": ((), refreshed),
    "T 1": (("method.temperature=1",), None),
    "λ_cr 4 from the start": (("method.lambda_cr_start=4",), None),
    "λ_d fixed": (("method.dynamic_lambda=false",), None),
    "γ falls to 0.6": (("method.gamma_start=0.8", "method.gamma=0.6"), None),
    "under 1 percent left out": (("method.least_selected=100",), None),
    "one λ a pair": (("method.mix_per_pair=true",), None),
    "targets in eval mode": (("method.target_mode=eval",), None),
    "γ 0.9": (("method.gamma=0.9",), None),
    "warm-up of 30": (("method.warmup=30", "train.epochs=44"), None),
    "α 0.25": (("method.alpha=0.25",), None),
    "milder strong views": (("augment.strong_ops=1", "augment.cutout=0.25"), None),
    "milder strong views, α 0.25": (("augment.strong_ops=1", "augment.cutout=0.25", "method.alpha=0.25"), None),
    "milder strong views, α 0.25, T 1": (
        ("augment.strong_ops=1", "augment.cutout=0.25", "method.alpha=0.25", "method.temperature=1"),
        None,
    ),
    "milder strong views, α 0.25, rows missing": (
        ("augment.strong_ops=1", "augment.cutout=0.25", "method.alpha=0.25"),
        missing_rows,
    ),
    "milder strong views, α 0.25, own share": (
        ("augment.strong_ops=1", "augment.cutout=0.25", "method.alpha=0.25"),
        own_share,
    ),
    "warm-up without augmentation": (("method.warmup_view=plain",), None),
    "lr 0.2": (("train.lr=0.2",), None),
    "lr 0.05": (("train.lr=0.05",), None),
    "weight decay 1e-3": (("train.weight_decay=0.001",), None),
    "weight decay 1e-4": (("train.weight_decay=0.0001",), None),
    "batch 128": (("train.batch_size=128",), None),
    "batch 32": (("train.batch_size=32",), None),
    "rate in steps": (("train.schedule=step",), None),
    "weights averaged": (("train.ema_decay=0.998",), None),
    "ten of one class": ((), only(10, 1)),
    "nine of nine classes": ((), only(9, 9)),
    "a hundred of one class": ((), only(100, 1)),
    "selected leave no trace": ((), selected_leave_no_trace),
    "ten of one class, no trace": ((), both(only(10, 1), selected_leave_no_trace)),
    "ten of one class, least 64": (("method.least_selected=64",), only(10, 1)),
}


# --- what is watched ------------------------------------------------------------------------------------------------


class Watch:
    def __init__(self, looks: Sequence[int]) -> None:
        self.looks = looks  # epochs after which networks are looked into, too
        self.epochs: list[dict[str, Any]] = []

    def on_step(self, session: Session, epoch: int, step: int, loss: float) -> None: ...
    def on_checkpoint(self, session: Session) -> None: ...

    def on_epoch(self, session: Session, row: dict[str, Any]) -> None:
        method, data = method_of(session), session.data
        assert data.x_test is not None
        assert data.y_test is not None
        logits = torch.cat([out for _, out in predict_chunks(session, data.x_test)], dim=1)
        truth = torch.from_numpy(data.y_test)
        names = ("epoch", "selection_ratio", "oracle_selection_accuracy", "test_accuracy", "test_accuracy_1",
                 "test_accuracy_2", "covering_rate", "lambda_d", "loss_selected", "loss_comix")  # fmt: skip
        line = {n.replace("test", "held_out"): round(row[n], 4) for n in names if n in row}
        by_probabilities = average_outputs(logits, "probabilities").argmax(1)
        line["held_out_accuracy_by_probabilities"] = round((by_probabilities == truth).float().mean().item(), 4)
        line["seconds"] = round(row["seconds"], 1)
        chosen = method.labels[0][method.selected[0]].long()
        line["selected_by_class"] = chosen.bincount(minlength=method.candidates.shape[1]).tolist()
        line |= criteria(method) | {"held_out_of_network_1": calibration(logits[0], truth)}
        if row["epoch"] in self.looks:
            line["views"] = views(session)
            if row["epoch"] >= 3 and bool(method.selected[1].any()):
                line["pressure"] = pressure(session)
            method.eval()
        self.epochs.append(line)


# --- runs -----------------------------------------------------------------------------------------------------------

Ended = tuple[dict[str, Tensor], dict[str, Any], list[dict[str, Any]]]  # tensors, state, what was watched


def begin(task: Task, settings: tuple[str, ...], seed: int, data: Dataset) -> Session:
    values = {"source": "cut.npz", "seed": seed, "candidates": task.rule}
    config = build_config(preset=task.preset, settings=[*task.settings, *settings], values=values)
    return build_session(
        resolve(config, data), data, torch.device("cpu"), make_network=lambda: HalvedNetwork(len(data.classes), 3)
    )


def warm_up(session: Session, looks: Sequence[int]) -> Ended:
    watch, last = Watch(looks), method_of(session).warmup
    with suppress(Interrupted):
        fit(session, (watch,), stop_requested=lambda: session.progress.epoch == last)
    return *session.state(), watch.epochs


def decides_warm_up(setting: str) -> bool:
    return setting.startswith(("train.", "method.warmup"))


def run(
    source: str, task: Task, arm: str, seed: int, data: Dataset, kept: Path, stop_after: int | None
) -> dict[str, Any]:
    settings, change = ARMS[arm]
    started, drawn = time.perf_counter(), draw_candidates(data, task.rule, seed)
    session = begin(task, settings, seed, drawn)
    first = method_of(session).warmup
    looks = [first, first + 1, first + 3, session.config.train.epochs]
    file = kept / ("-".join([source, task.rule, f"seed{seed}", *filter(decides_warm_up, settings)]) + ".pt")
    if not file.is_file():
        torch.save(warm_up(begin(task, settings, seed, drawn), looks), file)
    tensors, state, epochs = torch.load(file)
    session.restore(Checkpoint(tensors, state))
    if change:
        change(session)
    watch = Watch(looks)
    with suppress(Interrupted):
        fit(session, (watch,), stop_requested=lambda: session.progress.epoch - first == stop_after)
    known = environment(["python", *sys.argv])
    return {
        "source": source, "arm": arm, "seed": seed, "finished": session.progress.epoch == session.config.train.epochs,
        "settings": [*task.settings, *settings], "candidates": task.rule, "warm_up": first,
        "epochs": epochs + watch.epochs, "seconds": round(time.perf_counter() - started, 1),
        **{name: known.get(name) for name in ("commit", "started", "python", "torch")},
    }  # fmt: skip


def cut(source: str, folder: Path, out: Path) -> None:
    data = load(source, folder)
    assert data.y is not None
    order = np.random.default_rng(0).permutation(data.n)
    rest, held = order[:TRAINED], order[TRAINED : TRAINED + HELD_OUT]
    x = data.x.transpose(0, 2, 3, 1) if data.x.shape[1] == 3 else data.x
    np.savez(out, x=x[rest], y=data.y[rest], x_test=x[held], y_test=data.y[held])


def table(rows: list[dict[str, Any]]) -> str:
    def shares(values: Iterable[float | None]) -> str:
        return ", ".join("" if value is None else f"{100 * value:.1f} %" for value in values)

    lines = [
        "| arm | seed | S-ratio when warm-up ends, after 1, 2, 3, 4 epochs of co-mix | mean largest probability "
        "| held-out accuracy | network 1's | network 1 three epochs in, training images, by statistics of all "
        "(running), of plain, of selected images | last epoch: held-out accuracy, S-ratio, S-acc |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kinds = ("plain", "plain, statistics of plain images", "plain, statistics of selected images")
    for row in rows:
        first, last = row["epochs"][row["warm_up"] - 1 :][:5], row["epochs"][-1]
        ends = ("held_out_accuracy", "selection_ratio", "oracle_selection_accuracy")
        seen = first[3].get("views", {}) if len(first) > 3 else {}
        cells = [
            row["arm"], str(row["seed"]), shares(e["selection_ratio"] for e in first),
            ", ".join(f"{e['confidence']:.2f}" for e in first), shares(e["held_out_accuracy"] for e in first),
            shares(e["held_out_of_network_1"]["accuracy"] for e in first),
            shares(seen.get(kind, {}).get("accuracy") for kind in kinds),
            shares(last.get(name) for name in ends) if row["finished"] else "",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("what", choices=("cut", "run", "table"))
    parser.add_argument("--source", choices=tuple(TASKS), default="cifar10")
    parser.add_argument("--data", type=Path, help="folder of the published files")
    parser.add_argument("--candidates", metavar="RULE", help="how candidate sets are drawn, instead of as usual")
    parser.add_argument("--cut", type=Path, default=Path("cut.npz"))
    parser.add_argument("--kept", type=Path, default=Path(), help="folder that keeps warm-ups for other arms")
    parser.add_argument("--arms", default="as it is")
    parser.add_argument("--seeds", type=seeds, default="0", help="a range, as in 0-9, or a list, as in 0,3")
    parser.add_argument("--stop-after", type=count, help="stop after so many epochs of co-mix")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.what == "cut":
        cut(given.source, given.data, given.cut)
        return
    if given.out is None:
        parser.error(f"{given.what} needs --out")
    if given.what == "table":
        print(table(some(read(given.out), given.out)))
        return
    torch.set_num_threads(1)
    arms = chosen(given.arms, ARMS, "--arms")
    if not given.cut.is_file():
        parser.error(f"--cut {given.cut} is not there; 'cut' makes it")
    data, task = load(str(given.cut)), TASKS[given.source]
    if given.candidates:
        task = replace(task, rule=given.candidates)
    for seed in given.seeds:
        for arm in arms:
            this = (given.source, arm, seed, task.rule)
            if any(
                (row.get("source", "cifar10"), row["arm"], row["seed"], row["candidates"]) == this
                for row in read(given.out)
            ):
                continue
            row = run(given.source, task, arm, seed, data, given.kept, given.stop_after)
            add(row, given.out)
            print(table([row]).splitlines()[-1], row["seconds"], flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end_with(main)
