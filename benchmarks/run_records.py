"""Runs as they lie under results/: one file for a group of runs, one line for each run.

    python benchmarks/run_records.py pack RUN_OR_BENCH … --out results/GROUP.jsonl
    python benchmarks/run_records.py unpack results/GROUP.jsonl … --to DIR        # run folders, for `crosel tables DIR`

A line holds the run's name, `config`, `environment` (command, commit, versions, hardware), `seconds` from start to end
where they are known, and `metrics`: a list for each metric, with a value (or null) for each epoch. Packing adds to the
file; a run that is there already is replaced. Folders of this machine are written as DIR.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Arguments, end_with

from crosel.errors import UserError
from crosel.utils.files import atomic_write
from crosel.utils.settings import read_yaml

RESULTS = Path(__file__).parents[1] / "results"

Run = dict[str, Any]
Row = dict[str, Any]


def groups(results: Path = RESULTS) -> list[Path]:
    """The files that hold runs; other measurements are JSON files, or lie in folders."""
    return sorted(results.glob("*.jsonl"))


def read_group(path: Path) -> dict[str, Run]:
    """The runs of a file, by name."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return {run["run"]: run for run in map(json.loads, lines)}


def read_run(place: str, results: Path = RESULTS) -> Run:
    """The run at GROUP/NAME."""
    group, _, name = place.partition("/")
    return read_group(results / f"{group}.jsonl")[name]


def rows(run: Run) -> list[Row]:
    """What metrics.jsonl held: an object for each epoch."""
    metrics: Mapping[str, Sequence[Any]] = run["metrics"]
    epochs = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    return [{name: value for name, value in epoch.items() if value is not None} for epoch in epochs]


def columns(epochs: Sequence[Row]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for epoch in epochs for name in epoch)
    return {name: [epoch.get(name) for epoch in epochs] for name in names}


# --- run folders ----------------------------------------------------------------------------------------------------


def find_runs(folder: Path) -> Iterator[tuple[str, Path]]:
    """Name and place of every run in or below a folder."""
    for config in sorted(folder.rglob("config.yaml")):
        if (config.parent / "metrics.jsonl").is_file():
            name = config.parent.relative_to(folder).as_posix()
            yield (folder.resolve().name if name == "." else name), config.parent


def read_folder(name: str, folder: Path) -> Run:
    config = read_yaml(folder / "config.yaml")
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    if data := config.get("data_dir"):
        config["data_dir"] = "DIR"
        environment["command"] = ["DIR" if word == data else word for word in environment["command"]]
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = _seconds(environment.get("started"), folder / "done")
    return {
        "run": name, "config": config, "environment": environment,
        **({} if seconds is None else {"seconds": seconds}), "metrics": columns(list(map(json.loads, lines))),
    }  # fmt: skip


def _seconds(started: str | None, done: Path) -> float | None:
    """From start to end, if the run has ended."""
    if started is None or not done.is_file():
        return None
    form = "%Y-%m-%dT%H:%M:%SZ"
    ended = done.read_text(encoding="utf-8").strip()
    return time.mktime(time.strptime(ended, form)) - time.mktime(time.strptime(started, form))


def pack(folders: Sequence[Path], out: Path) -> int:
    """Write the runs in or below these folders to a file; returns how many there were."""
    found = {name: read_folder(name, place) for folder in folders for name, place in find_runs(folder)}
    if not found:
        raise UserError(f"{', '.join(map(str, folders))}: no runs found; give a run folder, or a folder with several")
    write_group({**(read_group(out) if out.is_file() else {}), **found}, out)
    return len(found)


def write_group(runs: Mapping[str, Run], out: Path) -> None:
    lines = (json.dumps(runs[name], ensure_ascii=False, separators=(",", ":")) for name in sorted(runs))
    atomic_write(out, "".join(f"{line}\n" for line in lines))


def unpack(files: Sequence[Path], to: Path) -> None:
    """Run folders again: DIR/GROUP/NAME, with config, metrics, environment."""
    import yaml

    for file in files:
        for name, run in read_group(file).items():
            folder = to / file.stem / name
            folder.mkdir(parents=True, exist_ok=True)
            if "config" in run:  # what `crosel demo` left has none
                (folder / "config.yaml").write_text(yaml.safe_dump(run["config"], sort_keys=False), encoding="utf-8")
            (folder / "environment.json").write_text(json.dumps(run["environment"], indent=1) + "\n", encoding="utf-8")
            lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows(run))
            (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = Arguments(__doc__)
    parser.add_argument("mode", choices=("pack", "unpack"))
    parser.add_argument("paths", type=Path, nargs="+", help="folders with runs, or files to unpack")
    parser.add_argument("--out", type=Path, default=None, help="file to pack into")
    parser.add_argument("--to", type=Path, default=None, help="folder to unpack into")
    a = parser.parse_args()
    if a.mode == "pack":
        if a.out is None:
            raise UserError("pack needs --out; --help shows what there is")
        print(f"{a.out}: {pack(a.paths, a.out)} runs")
    else:
        if a.to is None:
            raise UserError("unpack needs --to; --help shows what there is")
        unpack(a.paths, a.to)


if __name__ == "__main__":
    end_with(main)
