"""How well `outside` finds sets that miss the truth, and what dropping or taking such examples gives: digits.

    python benchmarks/missing_truth.py run --out DIR        # 35 runs, a minute each on one core; goes on where it was
    python benchmarks/missing_truth.py table --out DIR      # the tables of docs/missing-truth.md, and summary.jsonl
    python benchmarks/missing_truth.py keep --out DIR --to results/digits-missing-truth

Seeds 0 to 4; the last epoch of each. `held-out` is what choices were made by: the same with a quarter of the *training*
images in the place of the test images, seeds 0 and 1, at 20 %.

    python benchmarks/missing_truth.py held-out --out DIR
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

SEEDS = (0, 1, 2, 3, 4)
ETAS = (0.05, 0.1, 0.2)
MODES = ("keep", "drop", "take")
THRESHOLD = 0.5  # more than all other labels together; why not γ is in docs/missing-truth.md
GAMMA = 0.9  # what selection asks for
KEPT = ("config.yaml", "metrics.jsonl", "environment.json")


def runs() -> list[tuple[float, str, int]]:
    """Seed by seed, so that a stop leaves whole comparisons. At 5 % only the flags are wanted."""
    compared = [(eta, mode, seed) for seed in SEEDS for eta in (0.2, 0.1) for mode in ("keep", "drop")]
    return [
        *compared, *((0.05, "keep", seed) for seed in SEEDS),
        *((eta, "take", seed) for seed in SEEDS for eta in (0.2, 0.1)),
    ]  # fmt: skip


def name(eta: float, mode: str, seed: int) -> Path:
    return Path(f"eta{eta:g}") / f"{mode}-seed{seed}"


def held_out(out: Path) -> None:
    """Trials on held-out training images, into held-out.jsonl; what is there is not run again."""
    import dataclasses

    import numpy as np
    import torch

    from crosel.config import build_config
    from crosel.data import draw_candidates, load
    from crosel.session import build_session, resolve
    from crosel.train import fit

    path = out / "held-out.jsonl"
    known = path.read_text().splitlines() if path.is_file() else []
    done = {(row["outside"], row["seed"]) for row in map(json.loads, known)}
    for seed in (0, 1):
        for mode in MODES:
            if (mode, seed) in done:
                continue
            data = load("digits")
            order = np.random.default_rng(1000 + seed).permutation(data.n)
            held, rest = order[:337], order[337:]
            assert data.y is not None
            data = dataclasses.replace(
                data, x=data.x[rest], y=data.y[rest], x_test=data.x[held], y_test=data.y[held]
            )  # fmt: skip
            data = draw_candidates(data, "uniform:q=0.3,eta=0.2", seed)
            settings = [f"method.outside={mode}", f"method.outside_gamma={THRESHOLD}"]
            config = build_config(
                preset="demo/digits", settings=settings, values={"source": "digits", "seed": seed}
            )  # fmt: skip
            row = fit(build_session(resolve(config, data), data, torch.device("cpu")))[-1]
            line = {"eta": 0.2, "outside": mode, "seed": seed, "held_out_accuracy": row["test_accuracy"]}
            with path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(line, flush=True)


def train(out: Path, modes: list[str]) -> None:
    for eta, mode, seed in runs():
        folder = out / name(eta, mode, seed)
        if mode not in modes or (folder / "done").is_file():
            continue
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = [
            "train", "digits", "--preset", "demo/digits", "--candidates", f"uniform:q=0.3,eta={eta:g}",
            "--set", f"method.outside={mode}", "--set", f"method.outside_gamma={THRESHOLD}", "--device", "cpu",
            "--seed", str(seed), "--resume", "--out", str(name(eta, mode, seed)),
        ]  # fmt: skip
        # In the folder itself, so that the run's record of its command names no place of this machine.
        subprocess.run([sys.executable, "-m", "crosel", *command], check=True, cwd=out)


def summary(run: Path, eta: float, mode: str, seed: int) -> dict[str, Any]:
    """What a finished run says of its own training set, beside the truth; and its test accuracy, last epoch."""
    import numpy as np
    import torch

    from crosel.labels import label_table
    from crosel.run import load_run

    session = load_run(run, torch.device("cpu"))
    sets, truth = session.data.candidates, session.data.y
    assert sets is not None
    assert truth is not None
    missing = ~sets[np.arange(len(truth)), truth]
    out: dict[str, Any] = {"eta": eta, "outside": mode, "seed": seed, "missing": int(missing.sum())}
    for threshold in (GAMMA, THRESHOLD):
        table = label_table(session, outside_gamma=threshold)
        flagged = table.outside_labels >= 0
        final = np.where(flagged, table.outside_labels, table.labels)
        out[f"at_{threshold:g}"] = {
            "flagged": int(flagged.sum()), "missing": int((flagged & missing).sum()),
            "label_right": int((table.outside_labels == truth)[flagged].sum()),
            "labels_accuracy": float((final == truth).mean()),
        }  # fmt: skip
    row = session.progress.rows[-1]
    kept = (
        "test_accuracy", "test_accuracy_1", "test_accuracy_2", "covering_rate", "selection_ratio", "outside_ratio",
        "lambda_d",
    )  # fmt: skip
    return out | {"inside_accuracy": float((table.labels == truth).mean())} | {k: row[k] for k in kept if k in row}


def percent(values: list[float], digits: int = 1) -> str:
    """Mean, and the deviation over seeds."""
    mean = f"{100 * statistics.mean(values):.{digits}f}"
    return mean if len(values) < 2 else f"{mean} ± {100 * statistics.stdev(values):.{digits}f}"


def against_keep(rows: list[dict[str, Any]], eta: float, mode: str) -> str:
    """Mean difference of the test accuracy to plain training on the same sets, and the p of a paired t-test."""
    from crosel.tables.statistics import paired_t_test

    by = {m: {r["seed"]: r["test_accuracy"] for r in rows if (r["eta"], r["outside"]) == (eta, m)} for m in MODES}
    seeds = sorted(by["keep"].keys() & by[mode].keys())
    if mode == "keep" or len(seeds) < 2:
        return " | "
    ours, plain = ([by[m][seed] for seed in seeds] for m in (mode, "keep"))
    test = paired_t_test(ours, plain)
    return f"{100 * (statistics.mean(ours) - statistics.mean(plain)):+.2f} | {test.p:.3f} ({test.n})"


def tables(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| truth missing | asked of `outside` | seeds | flagged | precision | recall | new label right |",
        "|" + "---|" * 7,
    ]
    for eta in ETAS:
        for threshold in (GAMMA, THRESHOLD):
            runs = [r for r in rows if r["eta"] == eta and r["outside"] == "keep"]
            found = [(r["missing"], r[f"at_{threshold:g}"]) for r in runs]
            if found:
                sums = {key: sum(f[key] for _, f in found) for key in ("flagged", "missing", "label_right")}
                total, flagged = sum(missing for missing, _ in found), max(1, sums["flagged"])
                lines.append(
                    f"| {eta:.0%} | {threshold:g} | {len(found)} | {sums['flagged']} of {total} missing "
                    f"| {sums['missing'] / flagged:.3f} | {sums['missing'] / total:.3f} "
                    f"| {sums['label_right'] / flagged:.3f} |"
                )
    lines += [
        "",
        "| truth missing | `outside` | seeds | test accuracy | against keep | p | precision | recall | labels right |",
    ]
    lines.append("|" + "---|" * 9)
    for eta in ETAS:
        for mode in MODES:
            runs = [r for r in rows if r["eta"] == eta and r["outside"] == mode]
            if runs:
                at = [(r["missing"], r[f"at_{THRESHOLD:g}"]) for r in runs]
                flagged = sum(f["flagged"] for _, f in at)
                right = sum(f["missing"] for _, f in at)
                lines.append(
                    f"| {eta:.0%} | {mode} | {len(runs)} | {percent([r['test_accuracy'] for r in runs], 2)} "
                    f"| {against_keep(rows, eta, mode)} | {right / max(1, flagged):.3f} "
                    f"| {right / sum(missing for missing, _ in at):.3f} "
                    f"| {percent([f['labels_accuracy'] for _, f in at])} |"
                )
    return "\n".join(lines)


def keep(out: Path, to: Path) -> None:
    """Copy what belongs into the repository: no checkpoints, no pictures."""
    for run in runs():
        if (out / name(*run) / "done").is_file():
            (to / name(*run)).mkdir(parents=True, exist_ok=True)
            for file in KEPT:
                shutil.copy(out / name(*run) / file, to / name(*run) / file)
    shutil.copy(out / "summary.jsonl", to / "summary.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("run", "table", "keep", "held-out"))
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--to", type=Path, help="where `keep` puts records")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="only these")
    args = parser.parse_args()
    if args.verb == "run":
        train(args.out, args.modes)
    elif args.verb == "held-out":
        held_out(args.out)
    elif args.verb == "table":
        rows = [summary(args.out / name(*r), *r) for r in runs() if (args.out / name(*r) / "done").is_file()]
        (args.out / "summary.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(tables(rows))
    elif args.to is None:
        parser.error("keep needs --to")
    else:
        keep(args.out, args.to)


if __name__ == "__main__":
    main()
