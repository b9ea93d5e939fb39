"""Sets that miss the truth, on digits: how well `outside` finds them, and what it helps to drop or take such examples.

    python benchmarks/missing_truth.py run --on held-out --out DIR --workers 2   # choices are based on these
    python benchmarks/missing_truth.py run --on test --out DIR --workers 2       # half a minute of one core per run
    python benchmarks/missing_truth.py table --out DIR                           # the tables of docs/missing-truth.md

DIR/held-out.jsonl and DIR/test.jsonl get one line for each run. A run that is already there is not repeated, and a
stop leaves whole pairs. `held-out` keeps a quarter of the *training* images apart, a different quarter for every
seed, and does not use the test images. Accuracies are those of the last epoch. `oracle` knows which sets miss the
truth and trains on the others.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from record import Arguments, add, count, digits, done, end_with, origin, read, seeds, some

from crosel.errors import UserError

SEEDS = "0-9"
ASKED = 0.0  # method.outside_gamma of `drop` and `take`: why so little is in docs/missing-truth.md
SHORT = 10  # epochs of a shorter warm-up; the preset has 20 of 40
GAMMA = 0.9  # what selection asks for
THRESHOLDS = (GAMMA, 0.5, 0.0)  # asked of the flag `outside` when a run is over
# Settings of the method; more is tried on held-out images than on test images.
VARIANTS: dict[str, dict[str, Any]] = {
    "keep": {},
    "drop": {"outside": "drop", "outside_gamma": ASKED},
    "take": {"outside": "take", "outside_gamma": ASKED},
    "drop at 0.5": {"outside": "drop", "outside_gamma": 0.5},
    "take at 0.5": {"outside": "take", "outside_gamma": 0.5},
    "oracle": {},
    "keep, short": {"warmup": SHORT},
    "drop, short": {"outside": "drop", "outside_gamma": ASKED, "warmup": SHORT},
}
PLANS = {
    "held-out": [(eta, variant) for eta in (0.1, 0.2) for variant in VARIANTS],
    "test": [
        *((eta, variant) for eta in (0.2, 0.1) for variant in ("keep", "drop", "take")),
        *((eta, variant) for eta in (0.05, 0.0) for variant in ("keep", "drop")),
        *((eta, variant) for eta in (0.2, 0.1) for variant in ("keep, short", "drop, short")),
    ],
}  # fmt: skip
CURVES = ("test_accuracy", "covering_rate", "selection_ratio", "outside_ratio")  # kept of every epoch


class Job(NamedTuple):
    on: str
    eta: float
    variant: str
    seed: int
    epochs: int | None = None  # fewer, to try this script


# --- one run ------------------------------------------------------------------------------------------------------


def prepare(job: Job) -> Any:
    """Digits with drawn sets; on request, held-out training images take the place of the test images."""
    import numpy as np

    from crosel.data import draw_candidates

    data = digits(job.seed, held_out=job.on == "held-out")
    data = draw_candidates(data, f"uniform:q=0.3,eta={job.eta:g}", job.seed)
    if job.variant == "oracle":
        assert data.candidates is not None
        assert data.y is not None
        good = data.candidates[np.arange(data.n), data.y]
        data = dataclasses.replace(data, x=data.x[good], y=data.y[good], candidates=data.candidates[good])
    return data


class Flags:
    """Counts after each epoch how many examples are flagged, and how many of them miss the truth."""

    def __init__(self, missing: Any) -> None:
        self.missing, self.counts = missing, []  # type: ignore[var-annotated]

    def on_step(self, session: Any, epoch: int, step: int, loss: float) -> None: ...
    def on_checkpoint(self, session: Any) -> None: ...
    def on_epoch(self, session: Any, row: dict[str, Any]) -> None:
        if session.config.method.outside != "keep":
            flagged = session.method.outside.found.cpu().numpy()
            self.counts.append((int(flagged.sum()), int((flagged & self.missing).sum())))


def run(job: Job) -> dict[str, Any]:
    import numpy as np
    import torch

    from crosel.config import build_config
    from crosel.runs.result import Result
    from crosel.training.build import build_session, resolve
    from crosel.training.trainer import fit

    torch.set_num_threads(1)
    started, data = time.perf_counter(), prepare(job)
    settings = [f"method.{name}={value}" for name, value in VARIANTS[job.variant].items()]
    if job.epochs:
        settings += [f"train.epochs={job.epochs}", f"method.warmup={job.epochs // 2}"]
    config = build_config(preset="demo/digits", settings=settings, values={"source": "digits", "seed": job.seed})
    session = build_session(resolve(config, data), data, torch.device("cpu"))
    missing = ~data.candidates[np.arange(data.n), data.y]
    watcher = Flags(missing)
    rows = fit(session, (watcher,))
    out = job._asdict() | {"accuracy": rows[-1]["test_accuracy"], "examples": data.n, "missing": int(missing.sum())}
    for threshold in THRESHOLDS:
        result = Result.of(session, outside_gamma=threshold)
        assert result.outside_labels is not None
        flagged = result.outside_labels >= 0
        final = np.where(flagged, result.outside_labels, result.labels)
        out[f"at_{threshold:g}"] = {
            "flagged": int(flagged.sum()), "missing": int((flagged & missing).sum()),
            "label_right": int((result.outside_labels == data.y)[flagged].sum()),
            "labels_right": float((final == data.y).mean()),
        }  # fmt: skip
    out |= {"prediction_right": float((result.probabilities.argmax(axis=1) == data.y).mean())}
    out |= {name: [round(row[name], 4) for row in rows] for name in CURVES if name in rows[-1]}
    return out | {
        "flags": watcher.counts, "lambda_d": rows[-1]["lambda_d"], "seconds": round(time.perf_counter() - started, 1),
        **origin("cpu_count"),
    }  # fmt: skip


def run_all(on: str, jobs: list[Job], out: Path, workers: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{on}.jsonl"
    known = done(path, "eta", "variant", "seed")
    jobs = [job for job in jobs if (job.eta, job.variant, job.seed) not in known]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for row in pool.imap_unordered(run, jobs):
            add(row, path)
            print(*(row[name] for name in ("eta", "variant", "seed", "accuracy", "seconds")), flush=True)


# --- tables -------------------------------------------------------------------------------------------------------


def percent(values: list[float], digits: int) -> str:
    """Mean and standard deviation over seeds."""
    from crosel.bench.tables.build import estimate

    mean, deviation, _ = estimate([100 * value for value in values])
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def against_keep(rows: list[dict[str, Any]], of: list[dict[str, Any]]) -> str:
    """Mean difference from plain training with the same sets and warm-up, its standard error, and p of a t-test."""
    from crosel.bench.tables.build import estimate, paired_t_test

    baseline = "keep, short" if of[0]["variant"].endswith("short") else "keep"
    plain = {(r["eta"], r["seed"]): r["accuracy"] for r in rows if r["variant"] == baseline}
    pairs = [(100 * r["accuracy"], 100 * plain[r["eta"], r["seed"]]) for r in of if (r["eta"], r["seed"]) in plain]
    if len(pairs) < 2 or of[0]["variant"] == baseline:
        return " | "
    ours, theirs = zip(*pairs, strict=True)
    mean, deviation, n = estimate([a - b for a, b in pairs])
    assert deviation is not None
    return f"{mean:+.2f} ± {deviation / n**0.5:.2f} | {paired_t_test(ours, theirs).p:.3f}"


def found(rows: list[dict[str, Any]], threshold: float) -> str:
    """Flagged of missing, precision, recall, and the share of right new labels, over all seeds."""
    at = [row[f"at_{threshold:g}"] for row in rows]
    flagged, right, labels = (sum(a[name] for a in at) for name in ("flagged", "missing", "label_right"))
    missing, some = sum(row["missing"] for row in rows), max(1, flagged)
    return f"{flagged} of {missing} | {right / some:.3f} | {right / missing:.3f} | {labels / some:.3f}"


def share(rows: list[dict[str, Any]], epoch: int) -> str:
    """Precision and recall of what was dropped or taken after an epoch."""
    if not rows[0]["flags"]:
        return ""
    flagged, right = (sum(row["flags"][epoch][i] for row in rows) for i in (0, 1))
    missing = sum(row["missing"] for row in rows)
    return f"{right / max(1, flagged):.3f}, {right / missing:.3f}" if missing else f"{flagged} flagged"


def tables(rows: list[dict[str, Any]]) -> str:
    cells = sorted({(row["eta"], row["variant"]) for row in rows}, key=lambda c: (c[0], list(VARIANTS).index(c[1])))
    lines = ["| truth missing | asked | flagged | precision | recall | new label right |", "|" + "---|" * 6]
    for eta, variant in cells:
        if variant == "keep" and eta:
            of = [row for row in rows if (row["eta"], row["variant"]) == (eta, variant)]
            lines += [f"| {eta:.0%} | {threshold:g} | {found(of, threshold)} |" for threshold in THRESHOLDS]
    lines += [
        "",
        "| truth missing | `outside` | seeds | accuracy | against keep | p | labels right | S-ratio | "
        "precision, recall: end of warm-up | end |",
        "|" + "---|" * 10,
    ]
    for eta, variant in cells:
        of = [row for row in rows if (row["eta"], row["variant"]) == (eta, variant)]
        warmup = len(of[0]["test_accuracy"]) // (4 if variant.endswith("short") else 2)
        lines.append(
            f"| {eta:.0%} | {variant} | {len(of)} | {percent([r['accuracy'] for r in of], 2)} "
            f"| {against_keep(rows, of)} | {percent([r[f'at_{ASKED:g}']['labels_right'] for r in of], 1)} "
            f"| {percent([r['selection_ratio'][-1] for r in of], 0)} | {share(of, warmup - 1)} | {share(of, -1)} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("verb", choices=("run", "table"))
    parser.add_argument("--on", choices=tuple(PLANS), help="which images accuracy is measured on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the records")
    parser.add_argument("--workers", type=count, default=1, help="runs at once, one thread each")
    parser.add_argument("--seeds", type=seeds, default=SEEDS, help="a range, as in 0-9, or a list, as in 0,3")
    parser.add_argument(
        "--only", nargs="+", default=list(VARIANTS), choices=tuple(VARIANTS), help="only these variants"
    )
    parser.add_argument("--rates", nargs="+", type=float, help="only these shares of sets without the truth")
    parser.add_argument("--epochs", type=count, help="fewer epochs than the preset has, for a trial")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the workers
    if args.verb == "run":
        if args.on is None:
            parser.error("run needs --on")
        jobs = [
            Job(args.on, eta, variant, seed, args.epochs)
            for seed in args.seeds
            for eta, variant in PLANS[args.on]
            if variant in args.only and (args.rates is None or eta in args.rates)
        ]
        if not jobs:
            raise UserError(f"--rates, --only: the plan for {args.on} has no such runs")
        run_all(args.on, jobs, args.out, args.workers)
        return
    recorded = {on: read(args.out / f"{on}.jsonl") for on in PLANS}
    some([row for rows in recorded.values() for row in rows], args.out)
    for on, rows in recorded.items():
        if rows:
            print(f"{on}\n\n{tables(rows)}\n")


if __name__ == "__main__":
    end_with(main)
