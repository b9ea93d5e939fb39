"""Is crosel's loop slower than one written by hand? CC on scikit-learn's digits, on the CPU, in one process.

    python benchmarks/plain_loop.py --out results/plain-loop.json

The hand-written loop is what a tutorial would have: index, normalise, forward, loss, backward, step, running loss.
crosel's step does the same work behind its contract, with the same network and loss. The two take many short turns,
and each goes first in every other round, so that a busy machine slows both. The result is the median of the turns'
ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import Arguments, end_with, save

from crosel.config import build_config
from crosel.data import draw_candidates, load
from crosel.training.build import build_session, resolve
from crosel.training.session import Session
from crosel.training.step import TrainStep

STEPS, TURNS = 21, 60  # an epoch of digits has 21 whole batches


def open_session() -> Session:
    values = {
        "source": "digits", "method": {"name": "cc", "view": "plain"},
        "train": {"epochs": 1, "batch_size": 64, "weight_decay": 5e-4},
    }  # fmt: skip
    data = draw_candidates(load("digits"), "uniform:q=0.3", 0)
    return build_session(resolve(build_config(settings=[], values=values), data), data, torch.device("cpu"))


def by_hand(session: Session) -> Callable[[], None]:
    network, normalise = session.method.networks[0], session.normalise
    x, candidates = session.train.x, session.method.candidates
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def epoch() -> None:
        running, order = 0.0, torch.randperm(len(x))
        for step in range(STEPS):
            index = order[64 * step : 64 * (step + 1)]
            logits = network(normalise(x[index]))
            inside = logits.masked_fill(~candidates[index], -torch.inf)
            loss = (logits.logsumexp(dim=1) - inside.logsumexp(dim=1)).mean()
            running += loss.item()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    return epoch


def by_crosel(session: Session) -> Callable[[], None]:
    stepper, streams = TrainStep(session), session.method.streams()

    def epoch() -> None:
        index = session.train.draw_epoch_indices(streams, STEPS, 64, session.generator)
        for step in range(STEPS):
            stepper(streams, {name: table[step] for name, table in index.items()}, 0.05)

    return epoch


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    loops = {"by hand": by_hand(open_session()), "crosel": by_crosel(open_session())}
    times: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(TURNS + 1):
        for name, loop in sorted(loops.items(), reverse=turn % 2 == 0):
            start = time.perf_counter()
            loop()
            if turn:  # the first turn warms up
                times[name].append(1e3 * (time.perf_counter() - start) / STEPS)
    ms = {name: statistics.median(values) for name, values in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["crosel"], times["by hand"], strict=True))
    result = {"ms_a_step": ms, "crosel_over_by_hand": ratio, "all_ms": times}
    print(f"{ms}; crosel / by hand = {ratio:.3f}")
    save(result, options.out)


if __name__ == "__main__":
    end_with(main)
