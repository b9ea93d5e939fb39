"""The review page in a process of its own, which can be killed, or in a thread, which starts at once."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from crosel.review.cards import Cards

# Forked from a process that has imported everything once; torch takes seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["crosel.review.app"])


class _Lines(io.TextIOBase):
    """Standard output that goes to the test, line by line."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def write(self, text: str) -> int:
        if text.strip():
            self._pipe.send(text)
        return len(text)


def _serve(run: Path, port: int, pipe: Connection) -> None:
    from crosel.review import serve_review

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = _Lines(pipe)
    serve_review(run, port, open_browser=False)


class Server:
    def __init__(self, run: Path, port: int = 0) -> None:
        self._lines, other = _context.Pipe(duplex=False)
        self.process = _context.Process(target=_serve, args=(run, port, other), daemon=True)
        self.process.start()
        other.close()
        line = self._line()
        self.address = line.rpartition(" at ")[2].strip()
        assert self.address.startswith("http://127.0.0.1:"), line

    def _line(self) -> str:
        assert self._lines.poll(60), "the server says nothing"
        return str(self._lines.recv())

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    def kill(self) -> None:
        self.process.kill()
        self.process.join(30)

    def stop(self) -> str:
        """Ctrl-C; returns what it says at the end."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGINT)
        self._line()
        last = self._line()
        self.process.join(30)
        assert self.process.exitcode == 0
        return last


@contextmanager
def served(examples: Cards, log: Path, **settings: Any) -> Iterator[str]:
    """The address of a page about these examples, for as long as the context lasts; `settings` are uvicorn's."""
    import uvicorn

    from crosel.review.app import build_app

    config = uvicorn.Config(
        build_app(examples, log, "token"), host="127.0.0.1", port=0, log_level="warning", **settings
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        for _ in range(500):
            if server.started:
                break
            time.sleep(0.02)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/?token=token"
    finally:
        server.should_exit = True
        thread.join(30)
