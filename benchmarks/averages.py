"""What averaging logits or probabilities of the two networks makes of finished runs (setting `method.ensemble`).

    python benchmarks/averages.py RUN … --data DIR --out results/cifar10-study/averages.jsonl
    python benchmarks/averages.py table --out results/cifar10-study/averages.jsonl      # the figures in docs/study.md

The setting changes how a run predicts and nothing of how it trains, so that one run answers for both. The images are
those on which the run measured itself. Runs are told apart by the names of their folders: one file for each suite.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from record import Arguments, add, end_with, read, some

from crosel.errors import UserError
from crosel.methods.crosel import average_outputs
from crosel.runs.environment import environment
from crosel.runs.folder import load_run
from crosel.training.devices import pick_device
from crosel.training.trainer import predict_chunks


def measure(run: Path, data: Path | None, device: str) -> dict[str, Any]:
    session = load_run(run, pick_device(device), data_dir=data)
    x, y = session.data.x_test, session.data.y_test
    if x is None or y is None:
        raise UserError(f"{run}: has no images to measure it on; give it data.test_share when it is trained")
    with session.evaluating():
        outputs = torch.cat([logits.float().cpu() for _, logits in predict_chunks(session, x)], dim=1)
    truth = torch.from_numpy(y)
    guesses = {of: average_outputs(outputs, of).argmax(1) for of in ("logits", "probabilities")}
    known = environment(["python", *sys.argv], session.device)
    return {
        "run": run.name, "epoch": session.progress.epoch, "images": len(y),
        **{f"right_by_{of}": int((guess == truth).sum()) for of, guess in guesses.items()},
        "right_by_network": [int((one.argmax(1) == truth).sum()) for one in outputs],
        "predicted_otherwise": int((guesses["logits"] != guesses["probabilities"]).sum()),
        **{name: known.get(name) for name in ("commit", "started", "python", "torch")},
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| run | logits | probabilities | images predicted otherwise |", "|---|---|---|---|"]
    for row in rows:
        shares = [f"{100 * row[f'right_by_{of}'] / row['images']:.2f} %" for of in ("logits", "probabilities")]
        lines.append(f"| {row['run']} | {' | '.join(shares)} | {row['predicted_otherwise']} of {row['images']:,} |")
    return "\n".join(lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders, or 'table'")
    parser.add_argument("--data", type=Path, help="folder of the published files")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.runs == ["table"]:
        print(table(some(read(given.out), given.out)))
        return
    for run in map(Path, given.runs):
        if all(row["run"] != run.name for row in read(given.out)):
            add(measure(run, given.data, given.device), given.out)


if __name__ == "__main__":
    end_with(main)
