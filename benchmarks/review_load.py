"""How fast the review page answers when several people, or one with many tabs, use it at once.

    python benchmarks/review_load.py --clients 8 --seconds 20 --out review_load.json
    python benchmarks/review_load.py --clients 50 --seconds 300      # longer: no error, and memory does not grow
    python benchmarks/review_load.py --run RUN                       # the examples of a real run

Without --run, it makes up as many examples as CIFAR-10 has. The server and the clients each have their own process
and use only the loopback address. A client asks again as soon as it has its answer: for pages under random filters,
thumbnails, classes, decisions. The benchmark ends after --seconds or --requests, whichever comes first. The exit code
is 1 after an error, or if the 95th percentile is over --limit.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import Arguments, count, end_with, positive, save

TOKEN = "load"


def examples(n: int, k: int) -> Any:
    from crosel.review.cards import Cards
    from crosel.runs.labels import FLAGS
    from crosel.runs.result import NetworkLabels, Result, TrainingSet

    draw = np.random.default_rng(0)
    p = draw.dirichlet(np.full(k, 0.2), n).astype(np.float16)
    sets = draw.random((n, k)) < 0.3
    labels = p.argmax(axis=1)
    sets[np.arange(n), labels] = True
    about = TrainingSet(
        tuple(f"class {j}" for j in range(k)), sets, (3, 32, 32), "load",
        given_ids=[f"train/{i:06d}.png" for i in range(n)],
    )  # fmt: skip
    flags = draw.choice(len(FLAGS), n, p=[0.7, 0.05, 0.15, 0.1]).astype(np.int8)
    x = draw.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8)
    networks = NetworkLabels(
        np.stack([labels, labels]).astype(np.int32), draw.random((2, n)).astype(np.float32),
        draw.random((2, n)) < 0.8, draw.integers(0, 40, (2, n)).astype(np.int32),
        draw.integers(0, k, (2, 3, n)).astype(np.int32), draw.random((2, 3, n)).astype(np.float32),
    )  # fmt: skip
    confidence = p.max(axis=1).astype(np.float32)
    result = Result(about, labels, confidence, flags, np.full(n, 2), networks, probabilities=p)
    return Cards(result, x, "load", "made-up examples")


def serve(run: Path | None, n: int, k: int, log: Path, ready: Any) -> None:
    import asyncio

    import uvicorn

    from crosel.review.app import build_app, listen
    from crosel.review.cards import load_cards

    listener = listen(0)
    began = time.perf_counter()
    found = examples(n, k) if run is None else load_cards(run)
    app = build_app(found, log, TOKEN)
    seconds = time.perf_counter() - began
    ready.send((listener.getsockname()[1], found.n, len(found.classes), round(seconds, 2)))
    config = uvicorn.Config(app, log_level="warning", access_log=False, ws="none", http="h11", limit_concurrency=256)
    asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def one_request(draw: random.Random, n: int, k: int) -> tuple[str, str, str, bytes | None]:
    """Kind, method, address, body."""
    row = draw.randrange(n)
    chance = draw.random()
    if chance < 0.5:
        wanted = f"sort={draw.choice(('least', 'most', 'row'))}"
        if draw.random() < 0.5:
            wanted += f"&label={draw.randrange(k)}&within={draw.choice(('label', 'candidates'))}"
        if draw.random() < 0.3:
            wanted += f"&flag={draw.choice(('none', 'outside', 'disputed', 'unsure'))}"
        if draw.random() < 0.3:
            wanted += f"&low={draw.random() / 2:.3f}&high={0.5 + draw.random() / 2:.3f}"
        if draw.random() < 0.2:
            wanted += f"&text={draw.randrange(1000)}"
        if draw.random() < 0.4:
            wanted += f"&state={draw.choice(('undecided', 'decided'))}"
        if draw.random() < 0.5:
            wanted += f"&after={row}"
        return "page", "GET", f"/api/examples?{wanted}", None
    if chance < 0.85:
        return "thumbnail", "GET", f"/image/{row}.png?v=load", None
    if chance < 0.9:
        return "classes", "GET", f"/api/classes/{row}", None
    if chance < 0.92:
        return "undo", "POST", "/api/undo", b"{}"
    return "decision", "POST", "/api/decisions", json.dumps({"row": row, "label": draw.randrange(k)}).encode()


def clients(port: int, a: argparse.Namespace, out: Any) -> None:
    times: list[tuple[str, float]] = []
    errors: list[str] = []
    end = time.monotonic() + a.seconds
    left = threading.Semaphore(a.requests)

    def work(number: int) -> None:
        draw = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"x-crosel-token": TOKEN, "content-type": "application/json"}
        while time.monotonic() < end and left.acquire(blocking=False):
            kind, method, address, body = one_request(draw, a.examples, a.classes)
            began = time.perf_counter()
            try:
                connection.request(method, address, body, headers)
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    errors.append(f"{address}: {answer.status}")
            except (OSError, http.client.HTTPException) as error:
                errors.append(f"{address}: {error!r}")
                connection.close()
            times.append((kind, 1000 * (time.perf_counter() - began)))
        connection.close()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(a.clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out.send((times, errors, time.perf_counter() - began))


def memory_mib(pid: int) -> float | None:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:  # not Linux
        return None
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def figures(times: list[float]) -> dict[str, float]:
    p50, p95, p99 = np.percentile(times, (50, 95, 99))
    return {"count": len(times), "p50_ms": round(p50, 2), "p95_ms": round(p95, 2), "p99_ms": round(p99, 2),
            "max_ms": round(max(times), 2)}  # fmt: skip


def main() -> int:
    parser = Arguments(__doc__)
    parser.add_argument("--clients", type=count, default=8)
    parser.add_argument("--seconds", type=positive, default=20.0)
    parser.add_argument("--requests", type=count, default=1_000_000)
    parser.add_argument("--run", type=Path, default=None, help="run folder; default: made-up examples")
    parser.add_argument("--examples", type=count, default=50_000)
    parser.add_argument("--classes", type=count, default=10)
    parser.add_argument("--limit", type=positive, default=100.0, help="limit for the 95th percentile, in ms")
    parser.add_argument("--out", type=Path, default=None, help="JSON file to write")
    a = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "review.jsonl"
        port_in, port_out = context.Pipe(duplex=False)
        server = context.Process(target=serve, args=(a.run, a.examples, a.classes, log, port_out), daemon=True)
        server.start()
        port, a.examples, a.classes, ready_in = port_in.recv()
        times_in, times_out = context.Pipe(duplex=False)
        load = context.Process(target=clients, args=(port, a, times_out), daemon=True)
        load.start()
        memory: list[float | None] = []
        cpu = processor_seconds(server.pid or 0)
        while not times_in.poll(max(1.0, a.seconds / 20)):
            memory.append(memory_mib(server.pid or 0))
        times, errors, seconds = times_in.recv()
        memory.append(memory_mib(server.pid or 0))
        cpu = processor_seconds(server.pid or 0) - cpu
        load.join(10)
        server.kill()
        server.join(10)
        lines = log.read_text().count("\n")
    written = sum(kind in ("decision", "undo") for kind, _ in times)
    result = {
        "source": "made-up examples" if a.run is None else "a run", "seconds_to_load": ready_in,
        "clients": a.clients, "examples": a.examples, "classes": a.classes, "seconds": round(seconds, 1),
        "requests_per_second": round(len(times) / seconds, 1), "errors": len(errors), "first_errors": errors[:5],
        "server_processor_ms_per_request": round(1000 * cpu / len(times), 2),
        "all": figures([t for _, t in times]),
        "by_kind": {kind: figures([t for k, t in times if k == kind]) for kind in sorted({k for k, _ in times})},
        "lines_written": lines, "writes_acknowledged": written, "server_memory_mib": memory,
    }  # fmt: skip
    save(result, a.out)
    return int(bool(errors) or result["all"]["p95_ms"] > a.limit)


if __name__ == "__main__":
    end_with(main)
