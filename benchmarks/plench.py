"""PRODEN and CRDPLL under PLENCH's settings for rows of features, written from the equations: a peer on our splits.

One hidden layer of 500 with ReLU and no batch norm, Adam with 0.001 and a weight decay of 1e-5, batches of 128, columns
brought to mean 0 and deviation 1 over all rows, test rows included; the last step counts. Its own loop runs 60,000
steps; 3,000 are the default here, after which 20,000 changed nothing. PLENCH chooses among several such settings by its
validation rows; this is one of them. On rows of features CRDPLL's two views are the row itself.

    python benchmarks/plench.py --data DIR --splits 100-109 --out FILE
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_defaults import SETS, split
from record import Arguments, add, chosen, count, done, end_with, origin, seeds
from torch import Tensor, nn

from crosel.data import Dataset

HIDDEN, LR, DECAY, BATCH = 500, 1e-3, 1e-5, 128


def standardised(data: Dataset) -> Dataset:
    deviation = data.x.std(axis=0)
    return replace(data, x=(data.x - data.x.mean(axis=0)) / np.where(deviation > 0, deviation, 1))


def train(data: Dataset, method: str, seed: int, steps: int) -> float:
    """Test accuracy of the last step."""
    assert data.candidates is not None
    assert data.x_test is not None
    x, sets = torch.from_numpy(np.asarray(data.x, np.float32)), torch.from_numpy(data.candidates).float()
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(x.shape[1], HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, sets.shape[1]))
    optimiser = torch.optim.Adam(network.parameters(), lr=LR, weight_decay=DECAY)
    weights = sets / sets.sum(dim=1, keepdim=True)
    order, at = torch.randperm(len(x)), 0
    for step in range(steps):
        if at + BATCH > len(x):
            order, at = torch.randperm(len(x)), 0
        rows, at = order[at : at + BATCH], at + BATCH
        log_p = network(x[rows]).log_softmax(dim=1)
        if method == "proden":
            loss = -(weights[rows] * log_p).sum(dim=1).mean()
        else:
            rise = min(1.0, step / (steps / 2))
            loss = 2 * rise * divergence(weights[rows], log_p) + outside_loss(log_p, sets[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if method == "crdpll":  # by the network after the step
            with torch.no_grad():
                log_p = network(x[rows]).log_softmax(dim=1)
        inside = log_p.detach().exp() * sets[rows]
        weights[rows] = inside / inside.sum(dim=1, keepdim=True).clamp_min(1e-30)
    with torch.no_grad():
        answers = network(torch.from_numpy(np.asarray(data.x_test, np.float32))).argmax(dim=1).numpy()
    return float((answers == data.y_test).mean())


def divergence(weights: Tensor, log_p: Tensor) -> Tensor:
    """Mean over the batch of KL(w || p)."""
    return (torch.xlogy(weights, weights) - weights * log_p).sum(dim=1).mean()


def outside_loss(log_p: Tensor, sets: Tensor) -> Tensor:
    """Mean over the batch of Σ over labels outside the set of -log(1 - p)."""
    return -((1 - sets) * torch.log1p(-log_p.exp().clamp_max(1 - 1e-6))).sum(dim=1).mean()


def measure(folder: Path, name: str, method: str, number: int, steps: int) -> dict[str, Any]:
    start = time.perf_counter()
    data, _ = split(standardised(SETS[name](folder)), number, test=True)
    accuracy = train(data, method, number, steps)
    seconds = round(time.perf_counter() - start, 2)
    return {"set": name, "arm": f"PLENCH {method}", "split": number, "test": True, "n": data.n, "steps": steps,
            "accuracy": accuracy, "seconds": seconds}  # fmt: skip


def main() -> None:
    parser = Arguments(str(__doc__))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="lost;MSRCv2;BirdSong")
    parser.add_argument("--methods", default="proden;crdpll")
    parser.add_argument("--splits", type=seeds, default=[0, 1, 2])
    parser.add_argument("--steps", type=count, default=3000)
    parser.add_argument("--out", type=Path, required=True, help="jsonl file to add to; what it has is not run again")
    args = parser.parse_args()
    about, known = origin("hardware"), done(args.out, "set", "arm", "split")
    for number in args.splits:
        for name in chosen(args.sets, SETS, "--sets"):
            for method in args.methods.split(";"):
                if (name, f"PLENCH {method}", number) not in known:
                    row = measure(args.data, name, method, number, args.steps)
                    print(f"{name:25} {method:8} {number} {row['accuracy']:.4f} {row['seconds']}", flush=True)
                    add(row | about, args.out)


if __name__ == "__main__":
    end_with(main)
