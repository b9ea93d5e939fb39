"""How long a report takes and how large it is. The whole command is timed, in a process of its own.

    crosel train cifar10 --data DIR --candidates uniform:q=0.3 --set train.epochs=2 --set method.warmup=1 \\
        --set method.bank_length=1 --set method.gamma=0.3 --set method.scope=none --set network.name=small-cnn \\
        --set network.width=8 --set train.batch_size=500 --set train.lr=0.05 --out RUN
    python benchmarks/report_size.py RUN --out report_size.json

The exit code is 1 if the report takes longer than --seconds or is larger than --megabytes.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Arguments, count, end_with, positive, save


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("run", type=Path, help="finished run folder")
    parser.add_argument("--repeats", type=count, default=3)
    parser.add_argument("--seconds", type=positive, default=15.0, help="limit for the fastest repeat")
    parser.add_argument("--megabytes", type=positive, default=8.0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    a = parser.parse_args()
    walls, processor = [], []
    with tempfile.TemporaryDirectory() as folder:
        page, plots = Path(folder) / "report.html", Path(folder) / "plots"
        command = [sys.executable, "-m", "crosel", "report", str(a.run), "--out", str(page), "--plots", str(plots)]
        for _ in range(a.repeats):
            before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            if code := subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
                return code  # it has said why
            walls.append(round(time.perf_counter() - began, 2))
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            processor.append(round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2))
        size = page.stat().st_size
        files = {path.suffix[1:]: 0 for path in plots.iterdir()}
        for path in plots.iterdir():
            files[path.suffix[1:]] += 1
    result = {
        "seconds": walls, "processor_seconds": processor, "bytes": size, "plots": files,
        "peak_memory_mib": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, 1),
    }  # fmt: skip
    save(result, a.out)
    return int(min(walls) > a.seconds or size > 1e6 * a.megabytes)


if __name__ == "__main__":
    end_with(main)
