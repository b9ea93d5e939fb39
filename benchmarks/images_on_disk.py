"""More images than memory: how fast they are written and read, and what training on them takes.

    python benchmarks/images_on_disk.py make FOLDER --images 200000        # JPEGs; names of the same few files
    python benchmarks/images_on_disk.py rates FOLDER --out results/images-on-disk/rates.jsonl
    python benchmarks/images_on_disk.py memory FOLDER --out results/images-on-disk/memory.jsonl
    python benchmarks/images_on_disk.py ranks --out results/images-on-disk/ranks.jsonl
    python benchmarks/images_on_disk.py steps FOLDER --network timm/resnet50 --out results/images-on-disk/h200.jsonl

`rates` decodes `--part` images to nowhere and to a new store in turn, then reads them back in random batches; seconds
of the processor stand beside, for machines that have other work. `memory` runs train, predict and report as processes
under a memory limit that keeps the images on disk. Their memory beyond the page cache (RssAnon and RssShmem) is sampled
ten times a second; `import` is what a process has before it does anything. `ranks` trains with two and with four ranks
on images of 8x8, and on four times as many, and says by how many bytes an example a rank has grown. `steps` computes
the same steps in turn with images from the store and from the device's memory. A `--network` of timm's is fine-tuned
from random weights; with it, `memory` only trains, with images that the device does not hold. Runs are interrupted
after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from record import Arguments, add, count, end_with, origin

CLASSES, FILES = 10, 2000
TINY = """
from torch import nn

def network(classes, shape):
    inputs = shape[0] * (shape[1] // 16) * (shape[2] // 16)
    return nn.Sequential(nn.AvgPool2d(16), nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, classes))
"""


def make(folder: Path, images: int, side: int) -> None:
    """Photograph-like JPEGs, a little larger than `side`; names beyond the first few are links to the same files."""
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(images + images // 50):
        part = "train" if i < images else "test"
        path = folder / part / f"class {i % CLASSES}" / f"{i:07d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if i >= FILES:
            first = i % FILES  # of the same class
            os.link(folder / "train" / f"class {first % CLASSES}" / f"{first:07d}.jpg", path)
            continue
        coarse = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        coarse[:, :, 0] = 25 * (i % CLASSES)
        picture = Image.fromarray(coarse).resize((side * 5 // 4, side * 9 // 8), Image.Resampling.BICUBIC)
        noisy = np.asarray(picture, np.int16) + rng.integers(-12, 13, (side * 9 // 8, side * 5 // 4, 1))
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(path, quality=87)


# --- rates --------------------------------------------------------------------------------------------------------


def rates(folder: Path, side: int, part: int, rounds: int) -> dict[str, Any]:
    from crosel.data import images
    from crosel.data.settings import DataSettings
    from crosel.data.store import ImageStore
    from crosel.utils.system import workers

    settings = DataSettings(image_size=side)
    paths = sorted(folder.glob("train/*/*.jpg"))[:part]
    shape = (len(paths), 3, side, side)
    found: dict[str, list[float]] = {"decoded": [], "stored": [], "read at random": [], "checked and read": []}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in found}
    order = np.random.default_rng(0).permutation(len(paths))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".rates-") as scratch:
        for number in range(rounds):
            store = ImageStore(Path(scratch), f"images-{number}", shape)

            def decode(keep: Any) -> None:
                images.ImageReader(paths, settings).decode(range(len(paths)), keep)

            def write(store: ImageStore = store) -> None:
                store.begin()
                decode(store.put)
                store.finish()

            def gather(stored: Any) -> None:
                for start in range(0, len(order), 256):
                    stored.read(order[start : start + 256])

            def timed(name: str, work: Any) -> None:
                began, cpu_began = time.perf_counter(), time.process_time()
                work()
                found[name].append(len(paths) / (time.perf_counter() - began))
                cpu_seconds[name].append(time.process_time() - cpu_began)

            both = [("decoded", lambda: decode(lambda rows, pixels: None)), ("stored", write)]
            for name, work in both if number % 2 else both[::-1]:
                timed(name, work)
            stored = store.images()
            for name in ("checked and read", "read at random"):  # from the page cache
                timed(name, lambda stored=stored: gather(stored))
    return {
        "images": len(paths), "side": side, "threads": workers(), "images_per_second": found,
        "stored_by_decoded": statistics.median(s / d for s, d in zip(found["stored"], found["decoded"], strict=True)),
        "cpu_seconds": cpu_seconds,
        "jpeg_bytes": statistics.mean(path.stat().st_size for path in paths[:500]),
    }  # fmt: skip


# --- memory -------------------------------------------------------------------------------------------------------


INTERRUPTED = 130  # crosel's exit code


def watched(command: list[str], folder: Path, limit: int, **environment: str) -> dict[str, Any]:
    """Run a command, for `limit` seconds at most; the most memory that it had beyond the page cache, and in all, as
    /proc says it."""
    began, interrupted, beyond, rss = time.perf_counter(), False, 0, 0
    values = {**os.environ, "OMP_NUM_THREADS": "1", **environment, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{folder}"}
    log = folder / "log.txt"
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, env=values, stdout=stream, stderr=stream)
        while process.poll() is None:
            try:
                now = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
                anonymous, shared, all_of_it = (int(now[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmRSS"))
                beyond, rss = max(beyond, anonymous + shared), max(rss, all_of_it)
            except (OSError, ValueError, KeyError):  # it has just ended
                pass
            time.sleep(0.1)
            if not interrupted and time.perf_counter() - began > limit:
                process.send_signal(signal.SIGINT)
                interrupted = True
    text = log.read_text()
    print(text[-600:], file=sys.stderr)
    if process.returncode not in (0, INTERRUPTED if interrupted else 0):
        raise SystemExit(f"{' '.join(command[3:])}: exit {process.returncode}")
    seconds = time.perf_counter() - began
    return {
        "command": command[3:5], "seconds": seconds, "interrupted": interrupted,
        "peak_beyond_page_cache": beyond * 1024, "peak_rss": rss * 1024, "said": text.splitlines()[-3:],
    }  # fmt: skip


def network_settings(folder: Path, network: str, side: int) -> list[str]:
    """Settings of a small network, or of a backbone with random weights that goes on learning."""
    if not network.startswith("timm/"):
        (folder / "tiny_network.py").write_text(TINY)
        return ["network.name=tiny_network:network", f"data.image_size={side}"]
    weights = folder / "weights.safetensors"
    if not weights.exists():
        import timm
        import torch
        from safetensors.torch import save_file

        torch.manual_seed(0)
        model = timm.create_model(network.removeprefix("timm/"), pretrained=False, num_classes=0)
        save_file(model.state_dict(), weights)
    return [f"network.name={network}", "network.freeze=false", f"network.weights={weights}", f"network.size={side}"]


def memory(folder: Path, a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    work = folder / ".work"
    work.mkdir(exist_ok=True)
    shutil.rmtree(work / "run", ignore_errors=True)
    settings = network_settings(work, a.network, a.side)
    settings += ["method.bank_length=1", "method.gamma=0.2", "method.scope=none", "method.networks=1"]
    settings += [f"train.epochs={a.epochs}", f"train.batch_size={a.batch}"]
    tiny = a.network == "tiny"
    settings += ["method.warmup_view=plain", "method.selected_view=plain"] if tiny else ["train.data_on=host"]
    crosel = [sys.executable, "-m", "crosel"]
    sets = ["--candidates", "uniform:q=0.3", "--trust-code"]
    sets += [part for item in settings for part in ("--set", item)]
    alone = "import crosel.methods, torch; torch.zeros(1, device='cuda' if torch.cuda.is_available() else 'cpu')"
    commands = {
        "import": [sys.executable, "-c", f"{alone}; import time; time.sleep(1)"],  # what a run begins with
        "train": [*crosel, "train", str(folder), *sets, "--out", "run"],
        "predict": [*crosel, "predict", "run", str(folder / "train"), "--trust-code", "--out", "predictions.csv"],
        "report": [*crosel, "report", "run", "--out", "report.html"],
    }
    if not tiny:  # on a GPU for minutes
        commands = {name: commands[name] for name in ("import", "train")}
    shape = {"images": sum(1 for _ in folder.glob("t*/*/*.jpg")), "side": a.side}
    common = {"network": a.network, "epochs": a.epochs, "limit_gb": a.limit, "batch": a.batch, **shape}
    for name, command in commands.items():
        found = watched(command, work, a.seconds, CROSEL_MEMORY_GB=a.limit)
        rows = work / "run" / "metrics.jsonl"
        if name == "train" and rows.exists():
            found["metrics"] = [json.loads(line) for line in rows.read_text().splitlines()]
        yield {"what": name, **common, **found}


# --- steps --------------------------------------------------------------------------------------------------------


def steps(folder: Path, a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The same steps with images from the store and from the device's memory, in turn."""
    import torch
    from speed import begin, wait

    from crosel.config import build_config
    from crosel.data import draw_candidates, load
    from crosel.data.settings import DataSettings
    from crosel.data.store import StoredImages
    from crosel.training.build import build_session, resolve
    from crosel.training.devices import pick_device
    from crosel.training.step import TrainStep

    work, device = folder / ".work", pick_device("auto")
    work.mkdir(exist_ok=True)
    sys.path.append(str(work))  # of the small network
    settings = [*network_settings(work, a.network, a.side), f"train.batch_size={a.batch}", "train.epochs=4"]
    began = time.perf_counter()
    data = draw_candidates(load(str(folder), settings=DataSettings(image_size=a.side)), "uniform:q=0.3", 0)
    assert isinstance(data.x, StoredImages), "give a smaller --limit: these images stay in memory"
    opened = time.perf_counter() - began
    warm, epoch = 10, 3  # CroSel is past its warm-up in epoch 3 of 4
    for method in a.methods.split(","):
        runs, found = {}, {"store": [], "device": []}
        for place in found:
            own = [*settings, f"train.data_on={'host' if place == 'store' else 'device'}"]
            config = build_config(settings=own, values={"source": str(folder), "method": {"name": method}})
            whole = replace(data, x=np.asarray(data.x)) if place == "device" and device.type == "cpu" else data
            session = begin(build_session(resolve(config, whole, device), whole, device, trust_code=True), epoch)
            streams = session.method.streams()
            table = session.train.draw_epoch_indices(
                streams, warm + a.rounds * a.steps, session.batch_size, session.generator
            )
            runs[place] = session, TrainStep(session), streams, table

        def compute(place: str, number: int, runs: Any = runs) -> None:
            session, step, streams, table = runs[place]
            for _ in range(number):
                at = session.progress.step
                step(streams, {name: rows[at] for name, rows in table.items()}, 0.01)
                session.progress.step += 1

        for place in found:
            compute(place, warm)
        for number in range(a.rounds):
            for place in list(found)[:: 1 if number % 2 else -1]:
                wait(device)
                began = time.perf_counter()
                compute(place, a.steps)
                wait(device)
                found[place].append(a.steps * a.batch / (time.perf_counter() - began))
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        yield {
            "method": method, "network": a.network, "side": a.side, "batch": a.batch, "images": data.n,
            "streams": len(table), "opened_seconds": opened, "images_per_second": found, "device_memory": memory,
            "store_by_device": statistics.median(s / d for s, d in zip(found["store"], found["device"], strict=True)),
        }  # fmt: skip


# --- ranks --------------------------------------------------------------------------------------------------------


def rank(rank: int, size: int, meet: str, n: int, method: str, folder: str) -> None:
    import torch

    from crosel.config import build_config
    from crosel.data.dataset import Dataset
    from crosel.data.store import ImageStore
    from crosel.training.build import build_session, resolve
    from crosel.training.trainer import fit
    from crosel.utils.distributed import process_group

    def anonymous() -> int:
        line = next(s for s in Path("/proc/self/status").read_text().splitlines() if s.startswith("RssAnon"))
        return int(line.split()[1]) * 1024

    torch.set_num_threads(1)
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], anonymous())

    with process_group(rank, size, torch.device("cpu"), f"file://{meet}") as world:
        store = ImageStore(Path(folder), f"images-{n}", (n, 1, 8, 8))
        sets = np.zeros((n, CLASSES), bool)
        sets[np.arange(n), np.arange(n) % CLASSES] = sets[:, 3] = True
        data = Dataset(store.images(), tuple("0123456789"), sets)
        del store
        threading.Thread(target=sample, daemon=True).start()
        settings = ["train.epochs=2", "train.batch_size=2048", "network.name=small-cnn", "network.width=2"]
        settings += ["method.warmup=1", "method.bank_length=3"] if method == "crosel" else ["method.view=plain"]
        values = {"source": "random", "method": {"name": method}}
        config = resolve(build_config(settings=settings, values=values), data)
        session = build_session(config, data, torch.device("cpu"), world=world)
        fit(session)
        done.set()
        if rank == 1:  # rank 0 alone writes a run folder
            print(json.dumps({"peak": peak[0], "loss": session.progress.rows[-1]["loss"]}))


def ranks(sizes: list[int], method: str, many: int) -> Iterator[dict[str, Any]]:
    from crosel.data.dataset import Dataset
    from crosel.data.store import ImageStore

    many = many // 40_000 * 40_000
    few = many // 4
    with tempfile.TemporaryDirectory() as folder:
        for n in (few, many):
            store, rng = ImageStore(Path(folder), f"images-{n}", (n, 1, 8, 8)), np.random.default_rng(0)
            for start in range(0, n, 10_000):
                store.put(range(start, start + 10_000), rng.integers(0, 256, (10_000, 1, 8, 8), dtype=np.uint8))
            store.finish()
            assert Dataset(store.images(), tuple("0123456789")).fingerprint  # ranks find it, as rank 0 leaves it
        for size in sizes:
            peaks = {}
            for n in (few, many):
                meet = f"{folder}/meet-{size}-{n}"
                command = [sys.executable, __file__, "rank", "--size", str(size), "--meet", meet, "--n", str(n),
                           "--method", method, "--folder", folder]  # fmt: skip
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                processes = [
                    subprocess.Popen([*command, "--rank", str(r)], stdout=subprocess.PIPE, text=True, env=environment)
                    for r in range(size)
                ]
                said = [process.communicate()[0] for process in processes]
                assert all(process.returncode == 0 for process in processes)
                peaks[n] = json.loads(said[1])["peak"]
            grown = (peaks[many] - peaks[few]) / (many - few)
            yield {"ranks": size, "method": method, "classes": CLASSES, "peaks": peaks, "bytes_an_example": grown}


def main() -> None:
    parser = Arguments(description="More images than memory: rates, memory, ranks.")
    parser.add_argument("what", choices=["make", "rates", "memory", "ranks", "rank", "steps"])
    parser.add_argument("source", nargs="?", type=Path, help="folder of the images")
    parser.add_argument("--images", type=count, help="default: 200000 to make, 1200000 for ranks")
    parser.add_argument("--side", type=count, default=160)
    parser.add_argument("--part", type=count, default=4000, help="images of a round of rates")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--limit", default="4", help="CROSEL_MEMORY_GB")
    parser.add_argument("--batch", type=count, default=256)
    parser.add_argument("--network", default="tiny", help="tiny, or a backbone timm/NAME")
    parser.add_argument("--epochs", type=count, default=2, help="of memory")
    parser.add_argument("--steps", type=count, default=100, help="steps of a round")
    parser.add_argument("--methods", default="cc,crosel", help="of steps")
    parser.add_argument("--seconds", type=count, default=36_000, help="after which memory interrupts a run")
    parser.add_argument("--sizes", default="2,4", help="numbers of ranks")
    parser.add_argument("--method", default="cc")
    parser.add_argument("--out", type=Path)
    for name in ("--rank", "--size", "--n"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    for name in ("--meet", "--folder"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.what == "rank":
        rank(a.rank, a.size, a.meet, a.n, a.method, a.folder)
        return
    if (a.source is None) == (a.what != "ranks"):
        parser.error(f"{a.what} {'needs' if a.source is None else 'takes no'} folder of images")
    if a.what == "make":
        make(a.source.resolve(), a.images or 200_000, a.side)
        return
    if a.out is None:
        parser.error(f"{a.what} needs --out")
    os.environ.setdefault("CROSEL_MEMORY_GB", a.limit)
    rows: Any
    if a.what == "ranks":
        rows = ranks([int(size) for size in a.sizes.split(",")], a.method, a.images or 1_200_000)
    elif a.what == "rates":
        rows = [rates(a.source.resolve(), a.side, a.part, a.rounds)]
    elif a.what == "steps":
        rows = steps(a.source.resolve(), a)
    else:
        rows = memory(a.source.resolve(), a)
    for row in rows:
        add({"benchmark": a.what} | row | {"load": os.getloadavg()[0]} | origin("gpu", "cpu_count"), a.out)
        print(json.dumps(row))


if __name__ == "__main__":
    end_with(main)
