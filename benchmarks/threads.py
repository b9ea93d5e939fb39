"""How long a run on a CPU takes, alone and beside a second one, by what its threads do while they wait for each other.

    python benchmarks/threads.py --out results/speed/threads.json

Every case trains the same few epochs of digits in processes of its own. Cases take turns, `--rounds` times, so that
other work on the machine slows all of them. The times are those of all epochs; of two runs at once, that of the slower
one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Arguments, count, end_with, save

NAMES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
CASES: dict[str, dict[str, str]] = {
    "as crosel starts": {},  # a thread a core, GOMP_SPINCOUNT=10000
    "GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},  # what the library does unless told otherwise
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


def seconds(case: dict[str, str], runs: int, epochs: int, network: list[str]) -> float:
    """Of all epochs of the slowest of some runs at once."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES} | case
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / str(run) for run in range(runs)]
        command = [sys.executable, "-m", "crosel", "train", "digits", "--preset", "demo/digits", "--candidates",
                   "uniform:q=0.3", "--set", f"train.epochs={epochs}", *network, "--out"]  # fmt: skip
        started = [
            subprocess.Popen(
                [*command, str(out)], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            for out in outs
        ]
        codes = [process.wait() for process in started]
        assert not any(codes), f"exit codes {codes}"
        lines = [(out / "metrics.jsonl").read_text(encoding="utf-8").splitlines() for out in outs]
    return max(sum(json.loads(line)["seconds"] for line in each) for each in lines)


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--epochs", type=count, default=6)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="as crosel train takes it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    network = [word for value in given.set for word in ("--set", value)]
    found: dict[str, dict[str, list[float]]] = {name: {"alone": [], "two at once": []} for name in CASES}
    for _ in range(given.rounds):
        for name, case in CASES.items():
            for runs, key in ((1, "alone"), (2, "two at once")):
                found[name][key].append(round(seconds(case, runs, given.epochs, network), 2))
                print(f"{name}, {key}: {found[name][key][-1]} s", file=sys.stderr)
    save({"cores": os.cpu_count(), "seconds": found}, given.out)


if __name__ == "__main__":
    end_with(main)
