"""The web application: the page, the API that it calls, and the server on a port of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import logging
import secrets
import socket
import tempfile
import webbrowser
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import h11
import uvicorn
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from uvicorn.protocols.http.h11_impl import H11Protocol

from crosel.errors import UserError
from crosel.report.page import style
from crosel.review.cards import FEATURES, STATES, Cards, Queue, Sort, State, load_cards
from crosel.review.cards import Query as Wanted
from crosel.review.guard import Guard
from crosel.runs.corrections import Decision, DecisionLog, corrections_csv
from crosel.runs.labels import FLAGS
from crosel.utils.text import counted

logger = logging.getLogger(__name__)

PAGE = 60

Row = Annotated[int, InPath(ge=0, le=2**31)]
RowInQuery = Annotated[int | None, Query(ge=0, le=2**31)]
Share = Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)]


class NewDecision(BaseModel):
    """A label for an example; None: skipped."""

    model_config = ConfigDict(extra="forbid", strict=True)
    row: int
    label: int | None


def build_app(cards: Cards, log_path: Path, token: str) -> FastAPI:
    review = Review(cards, DecisionLog(log_path, cards.ids, cards.classes))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        review.log.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(RequestValidationError, _refuse_values)
    app.add_middleware(Guard, token=token)
    app.state.cards, app.state.log = cards, review.log
    add_page(app)
    add_images(app, review)
    add_search(app, review)
    add_decisions(app, review)
    return app


async def _refuse_values(_: Request, error: Exception) -> Response:
    # Without the values themselves, as FastAPI would send them: NaN is no JSON.
    found = error.errors() if isinstance(error, RequestValidationError) else ()
    return JSONResponse({"detail": [{"loc": e["loc"], "msg": e["msg"]} for e in found]}, 422)


class Review:
    """The examples with the decisions about them."""

    def __init__(self, cards: Cards, log: DecisionLog) -> None:
        self.cards, self.log, self.decisions = cards, log, log.decisions

    def check_row(self, row: int | None) -> None:
        if row is not None and not 0 <= row < self.cards.n:
            raise HTTPException(404, "no such example")

    def check_label(self, label: int | None) -> None:
        if label is not None and not 0 <= label < len(self.cards.classes):
            raise HTTPException(422, "no such class")

    def progress(self) -> dict[str, Any]:
        counts = self.decisions.counts()
        return {**counts, "done": sum(counts.values()), "n": self.cards.n}

    def decided(self, row: int) -> dict[str, Any] | None:
        decision = self.decisions.get(row)
        return None if decision is None else {"decision": decision.kind, "label": decision.label}

    def decide(self, row: int, label: int | None) -> None:
        if label is None:
            decision = Decision("skip")
        elif label == self.cards.result.labels[row]:
            decision = Decision("accept", label)
        else:
            decision = Decision("choose" if self.cards.examples.candidates[row, label] else "outside", label)
        self.log.decide(row, decision)


# --- static files --------------------------------------------------------------------------------------------


def add_page(app: FastAPI) -> None:
    page = _file("page.html")
    files = {
        "page.js": ("text/javascript; charset=utf-8", _file("page.js")),
        "page.css": ("text/css; charset=utf-8", _file("page.css")),
        "style.css": ("text/css; charset=utf-8", style().encode()),  # shared with the report
    }

    @app.get("/")
    async def show_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    @app.get("/favicon.ico")
    async def no_icon() -> Response:
        return Response(status_code=204)

    @app.get("/static/{name}")
    async def static(name: Literal["page.js", "page.css", "style.css"]) -> Response:
        kind, content = files[name]
        return Response(content, media_type=kind)


def add_images(app: FastAPI, review: Review) -> None:
    cards = review.cards
    cache = {"cache-control": "private, max-age=86400, immutable"}  # the address contains the version of the data

    @app.get("/image/{row}.png")
    async def image(row: Row, large: bool = False) -> Response:
        review.check_row(row)
        if not cards.has_images:
            raise HTTPException(404, "no images")
        if cards.has_small_images:
            content = cards.png_of(row)
        else:
            content = await run_in_threadpool(cards.large_png if large else cards.png_of, row)
        return Response(content, media_type="image/png", headers=cache)


# --- searching ----------------------------------------------------------------------------------------------------


def add_search(app: FastAPI, review: Review) -> None:
    cards = review.cards

    @app.get("/api/run")
    async def about() -> Response:
        flags = cards.result.flags.tolist()
        present, outside = {FLAGS[code] for code in set(flags)}, flags.count(FLAGS.index("outside"))
        return _json({
            "name": cards.name, "about": cards.about, "classes": cards.classes, "images": cards.has_images,
            "flags": [flag for flag in FLAGS if flag and flag in present], "outside": outside,
            "version": cards.examples.fingerprint, "states": STATES,
            "notes": [*cards.notes, *review.log.skipped_lines.warnings()],
            "progress": review.progress(), "page": PAGE, "columns": (cards.examples.columns or ())[:FEATURES],
        })  # fmt: skip

    @app.get("/api/examples")
    async def find(
        queue: Queue = "all",
        label: Annotated[int | None, Query()] = None,
        within: Literal["label", "candidates"] = "label",
        flag: Literal["any", "none", "outside", "disputed", "unsure"] = "any",
        low: Share = 0.0,
        high: Share = 1.0,
        text: Annotated[str, Query(max_length=200)] = "",
        state: State = "all",
        sort: Sort = "least",
        after: RowInQuery = None,
        before: RowInQuery = None,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    ) -> Response:
        review.check_label(label)
        review.check_row(after)
        review.check_row(before)
        chosen_flag = None if flag == "any" else "" if flag == "none" else flag
        wanted = Wanted(queue, label, within, chosen_flag, low, high, text, state, sort, after, before, limit)
        answer = cards.find(wanted, review.decisions)
        found = [card | {"decided": review.decided(card["row"])} for card in cards.cards(answer.rows)]
        return _json({"total": answer.total, "start": answer.start, "examples": found, "progress": review.progress()})

    @app.get("/api/classes/{row}")
    async def all_classes(row: Row) -> Response:
        review.check_row(row)
        return _json(cards.all_classes(row))


# --- decisions ----------------------------------------------------------------------------------------------------


def add_decisions(app: FastAPI, review: Review) -> None:
    """None of them is async, so that waiting for the disk does not block other requests."""
    cards = review.cards

    @app.post("/api/decisions")
    def decide(new: NewDecision) -> Response:
        review.check_row(new.row)
        review.check_label(new.label)
        try:
            review.decide(new.row, new.label)
        except UserError as error:
            raise HTTPException(507, f"not saved: {error}") from None
        return _json({"row": new.row, "decided": review.decided(new.row), "progress": review.progress()})

    @app.post("/api/undo")
    def undo() -> Response:
        try:
            row = review.log.undo()
        except UserError as error:
            raise HTTPException(507, f"not saved: {error}") from None
        if row is None:
            return _json({"row": None, "progress": review.progress()})
        decided = review.decided(row)
        card = cards.card(row) | {"decided": decided}
        return _json({"row": row, "decided": decided, "example": card, "progress": review.progress()})

    @app.get("/corrections.csv")
    def export() -> Response:
        content = corrections_csv(review.decisions, cards.ids, cards.classes)
        headers = {"content-disposition": 'attachment; filename="corrections.csv"'}
        return Response(content, media_type="text/csv; charset=utf-8", headers=headers)


def _json(content: Any) -> Response:
    # The values are plain JSON types already; FastAPI's conversion would take most of the time.
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _file(name: str) -> bytes:
    return (resources.files("crosel.review") / name).read_bytes()


# --- a port, a token, the browser -----------------------------------------------------------------------------------

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
