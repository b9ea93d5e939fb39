"""A server that drops, truncates, lies and ignores on request, and archives for it to serve."""

from __future__ import annotations

import contextlib
import hashlib
import io
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from crosel.data import download
from crosel.data.download import DATASETS, Published

FOLDER = "cifar-10-batches-py"
BIG = bytes(i * 7 % 251 for i in range(300_000))
MD5 = hashlib.md5(BIG).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `files`; `plan` holds what goes wrong with the next requests, in their order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.plan: list[str] = []
        self.seen: list[tuple[str, str | None]] = []  # path, Range

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        wish = self.headers.get("Range")
        self.server.seen.append((self.path, wish))
        trouble = self.server.plan.pop(0) if self.server.plan else ""
        content = self.server.files.get(self.path)
        if content is None or trouble == "404":
            self.send_error(404)
            return
        if trouble.isdecimal():
            self.send_error(int(trouble))
            return
        if trouble == "redirect":
            self.send_response(302)
            self.send_header("Location", "file:///etc/hostname")
            self.end_headers()
            return
        if trouble == "garbage":
            self.wfile.write(b"this is not HTTP\r\n\r\n")
            return
        if trouble.startswith("wrong"):
            content = b"\0" * len(content)
        start = int(wish.removeprefix("bytes=").rstrip("-")) if wish and trouble != "ignore range" else 0
        if start >= len(content):
            self.send_error(416)
            return
        body = content[start:]
        self.send_response(206 if start else 200)
        if start:
            shown = start + 5 if trouble == "elsewhere" else start
            self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
        if trouble == "huge":
            self.send_header("Content-Length", str(1 << 40))
        elif trouble != "no length":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if trouble.startswith("drop"):  # "drop 1000": after so many bytes, by a reset
            self.wfile.write(body[: int(trouble.split()[1])])
            self.wfile.flush()
            time.sleep(0.05)  # a reset may overtake what was sent before it
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            self.connection.close()
            return
        if trouble.startswith("truncate"):  # by a clean end
            body = body[: int(trouble.split()[1])]
        with contextlib.suppress(OSError):
            self.wfile.write(body)


@pytest.fixture(name="server")
def running_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("CROSEL_MIRROR", raising=False)
    waits: list[float] = []
    monkeypatch.setattr(download, "_sleep", waits.append)
    with Server() as running:
        running.files["/big"] = BIG
        running.waits = waits  # type: ignore[attr-defined]
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def archive(*members: tuple[str, bytes | str | tuple[str, str]]) -> bytes:
    """A tar.gz of (name, content), (name, "dir") and (name, (kind of link or device, target))."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                continue
            kind, info.linkname = (content, "") if isinstance(content, str) else content
            info.type = {
                "dir": tarfile.DIRTYPE, "symlink": tarfile.SYMTYPE, "link": tarfile.LNKTYPE, "fifo": tarfile.FIFOTYPE,
                "device": tarfile.CHRTYPE,
            }[kind]  # fmt: skip
            tar.addfile(info)
    return stream.getvalue()


GOOD = archive((FOLDER, "dir"), (f"{FOLDER}/data_batch_1", b"one"), (f"{FOLDER}/sub/meta", b"two"))


def publish(monkeypatch: pytest.MonkeyPatch, name: str, *files: tuple[str, bytes, str | None]) -> None:
    published = tuple(Published(url, hashlib.md5(content).hexdigest(), folder) for url, content, folder in files)
    monkeypatch.setitem(DATASETS, name, published)
