"""SIGKILL to the review page while somebody decides: what was answered is there after the next start."""

from __future__ import annotations

import http.client
import json
import math
import random
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from _runs import Child, ForkServer
from _support import TINY, small_arrays
from soak.spread import spread

KILLS = 200
# The write of a decision, its flush, and what lies between them and the answer.
CHOSEN = (
    ("os:fsync", 40), ("os:write", 40), ("crosel.runs.corrections:DecisionLog._append", 40),
    ("crosel.runs.corrections:Decisions.decide", 40), ("crosel.runs.corrections:DecisionLog.undo", 5),
)  # fmt: skip


def soak(folder: Path, kills: int, seed: int, until: float = math.inf) -> Counter[str]:
    np.savez(folder / "digits.npz", **small_arrays())
    server, draw, score = ForkServer(folder), random.Random(seed), Counter[str]()
    run = folder / "run"
    code, _, err = server.run("train", folder / "digits.npz", *TINY, "--out", run)
    assert code == 0, err
    n = len(small_arrays()["y"])
    held: dict[int, dict[str, Any] | None] = {}  # what was answered, by row
    while score["kills"] < kills and time.monotonic() < until:
        target, calls = draw.choice(CHOSEN)
        trap = None
        if draw.random() < 0.3:
            target = "random"
        else:
            trap = {"target": target, "call": draw.randint(1, calls), "when": draw.choice(["before", "after"])}
        child = server.start("review", run, "--no-browser", trap=trap)
        stop = threading.Timer(draw.uniform(0.3, 2.0), child.signal, (signal.SIGKILL,))
        try:
            page = _Page(child)
        except AssertionError:  # the trap was in its start
            page = None
        stop.start()
        if page is not None:
            check(page, held)
            _decide(page, held, draw, n, score)
        code = child.wait()
        stop.cancel()
        stop.join()
        assert code == -signal.SIGKILL, f"{target}: exit {code}: {child.err}"
        assert "Traceback" not in child.err, child.err
        score["kills"] += 1
        score[target.partition(":")[2] or target] += 1
        if score["kills"] % 20 == 0:  # or the log grows without end
            (run / "review.jsonl").unlink()
            held.clear()
    child = server.start("review", run, "--no-browser")
    check(_Page(child), held)
    child.signal(signal.SIGTERM)
    child.wait()
    server.close()
    shutil.rmtree(run)
    return score


class _Page:
    """A client of a review page that is just starting."""

    def __init__(self, child: Child) -> None:
        end = time.monotonic() + 30
        while "stop with Ctrl-C" not in child.out:
            assert time.monotonic() < end, child.err
            assert Path(f"/proc/{child.pid}/cmdline").read_bytes(), child.err  # it is still there
            time.sleep(0.005)
        address = urlsplit(child.out.splitlines()[0].rpartition(" at ")[2])
        self.host = address.netloc
        self.headers = {"x-crosel-token": parse_qs(address.query)["token"][0], "content-type": "application/json"}
        self.connection = http.client.HTTPConnection(self.host, timeout=20)

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """The answer, or None where the server died before it."""
        try:
            self.connection.request(method, path, None if body is None else json.dumps(body), self.headers)
            answer = self.connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        assert answer.status == 200, content
        return json.loads(content)


def _decide(
    page: _Page, held: dict[int, dict[str, Any] | None], draw: random.Random, n: int, score: Counter[str]
) -> None:
    """Decide until the server is killed, noting what was answered."""
    while True:
        if draw.random() < 0.05:
            answer = page.ask("POST", "/api/undo")
            if answer is None:  # whatever it was about
                held.clear()
            row = answer["row"] if answer else -1
        else:
            row, label = draw.randrange(n), draw.choice([None, *range(10)])
            answer = page.ask("POST", "/api/decisions", {"row": row, "label": label})
        if answer is None:
            held.pop(row, None)  # the one under way: it may have been saved or not
            score["unanswered"] += 1
            return
        if row is not None:  # there was something to take back
            held[row] = answer["decided"]
        score["answered"] += 1


def check(page: _Page, held: dict[int, dict[str, Any] | None]) -> None:
    """Whatever was answered before is still so."""
    after: int | None = None
    found: dict[int, Any] = {}
    while True:
        answer = page.ask("GET", "/api/examples?sort=row" + ("" if after is None else f"&after={after}"))
        if answer is None or not answer["examples"]:
            break
        found |= {card["row"]: card["decided"] for card in answer["examples"]}
        after = answer["examples"][-1]["row"]
    if answer is None:
        return
    lost = {row: (decided, found.get(row)) for row, decided in held.items() if found.get(row) != decided}
    assert not lost, f"answered, and not there after a kill: {lost}"


def run(
    folder: Path, out: Path | None, kills: int = KILLS, seed: int = 7, workers: int = 1, minutes: float | None = None
) -> dict[str, Any]:
    score = sum(spread(soak, folder, kills, seed, workers, minutes), Counter[str]())
    if out is not None:
        (out / "decisions.json").write_text(json.dumps(score, indent=1) + "\n")
    assert minutes or score["kills"] == kills
    assert score["answered"] > score["kills"]
    return {**score, "answered_and_lost": 0}
