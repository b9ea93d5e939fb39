"""Starting the page: a free port on 127.0.0.1, a new token, the browser."""

from __future__ import annotations

import asyncio
import contextlib
import html
import logging
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from crosel.errors import UserError
from crosel.review.app import build_app
from crosel.review.load import load_cards
from crosel.utils.text import counted

logger = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
HOST = "127.0.0.1"  # the page is only for users of this machine


class _InTime(H11Protocol):
    """A request must be there, whole, within `REQUEST_SECONDS`: half-sent ones would take all places."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_watching()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(REQUEST_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def serve(run: Path, port: int, open_browser: bool) -> None:
    listener = listen(port)  # first, so that a port in use is reported before a long start
    with contextlib.closing(listener):
        cards = load_cards(run)
        for note in cards.notes:
            logger.warning(note)
        token = secrets.token_urlsafe(24)
        app = build_app(cards, run / "review.jsonl", token)
        address = f"http://{HOST}:{listener.getsockname()[1]}/?token={token}"
        # No access log, which would contain the token. The protocols are fixed, whatever uvicorn finds installed.
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, ws="none", http=_InTime, loop="asyncio",
            limit_concurrency=256, h11_max_incomplete_event_size=16384, timeout_graceful_shutdown=2,
        )  # fmt: skip
        print(f"review {counted(cards.n, 'example')} at {address}", flush=True)
        print("every decision is saved at once; stop with Ctrl-C", flush=True)
        with _browser(address, open_browser), contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
            uvicorn.Server(config).run(sockets=[listener])
        done = int((app.state.log.decisions.kinds > 0).sum())
        app.state.log.close()
        print(f"{counted(done, 'decision')}: {run / 'review.jsonl'}", flush=True)


def listen(port: int) -> socket.socket:
    if not 0 <= port < 65536:
        raise UserError(f"--port {port}: a port is a number from 1 to 65535, or 0 for any free port")
    # asyncio sets TCP_NODELAY only on sockets that name their protocol. Without it every answer waits 40 ms for the
    # browser's acknowledgement.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart right after a stop
        listener.bind((HOST, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise UserError(f"--port {port} is not available ({reason}); choose another, or leave it out") from None
    return listener


@contextmanager
def _browser(address: str, open_browser: bool) -> Iterator[None]:
    """Open the browser through a private file: other users can read command lines, and with them the token."""
    if not open_browser:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="crosel-review-") as folder:
        page = Path(folder) / "open.html"
        page.write_text(
            f'<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer"><title>crosel</title>'
            f'<meta http-equiv="refresh" content="0; url={html.escape(address, quote=True)}">',
            encoding="utf-8",
        )
        with contextlib.suppress(webbrowser.Error, OSError):  # no browser here: the address is printed
            webbrowser.open(page.as_uri())
        yield
