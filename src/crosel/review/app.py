"""The web application: the page, and the API that it calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, FastAPI, HTTPException, Query, Request, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict

from crosel.errors import UserError
from crosel.report.page import style
from crosel.review.cards import FEATURES, Cards
from crosel.review.guard import Guard
from crosel.review.search import STATES, Queue, Sort, State
from crosel.review.search import Query as Wanted
from crosel.runs.corrections import corrections_csv
from crosel.runs.decisions import Decision, DecisionLog
from crosel.runs.labels import FLAGS

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
    for routes in (page_routes(), image_routes(review), search_routes(review), decision_routes(review)):
        app.include_router(routes)
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


def page_routes() -> APIRouter:
    routes = APIRouter()
    page = _file("page.html")
    files = {
        "page.js": ("text/javascript; charset=utf-8", _file("page.js")),
        "page.css": ("text/css; charset=utf-8", _file("page.css")),
        "style.css": ("text/css; charset=utf-8", style().encode()),  # shared with the report
    }

    @routes.get("/")
    async def show_page() -> Response:
        return Response(page, media_type="text/html; charset=utf-8")

    @routes.get("/favicon.ico")
    async def no_icon() -> Response:
        return Response(status_code=204)

    @routes.get("/static/{name}")
    async def static(name: Literal["page.js", "page.css", "style.css"]) -> Response:
        kind, content = files[name]
        return Response(content, media_type=kind)

    return routes


def image_routes(review: Review) -> APIRouter:
    routes, cards = APIRouter(), review.cards
    cache = {"cache-control": "private, max-age=86400, immutable"}  # the address contains the version of the data

    @routes.get("/image/{row}.png")
    async def image(row: Row, large: bool = False) -> Response:
        review.check_row(row)
        if not cards.has_images:
            raise HTTPException(404, "no images")
        if cards.has_small_images:
            content = cards.png_of(row)
        else:
            content = await run_in_threadpool(cards.large_png if large else cards.png_of, row)
        return Response(content, media_type="image/png", headers=cache)

    return routes


# --- searching ----------------------------------------------------------------------------------------------------


def search_routes(review: Review) -> APIRouter:
    routes, cards = APIRouter(), review.cards

    @routes.get("/api/run")
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

    @routes.get("/api/examples")
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

    @routes.get("/api/classes/{row}")
    async def all_classes(row: Row) -> Response:
        review.check_row(row)
        return _json(cards.all_classes(row))

    return routes


# --- decisions ----------------------------------------------------------------------------------------------------


def decision_routes(review: Review) -> APIRouter:
    """None of them is async, so that waiting for the disk does not block other requests."""
    routes, cards = APIRouter(), review.cards

    @routes.post("/api/decisions")
    def decide(new: NewDecision) -> Response:
        review.check_row(new.row)
        review.check_label(new.label)
        try:
            review.decide(new.row, new.label)
        except UserError as error:
            raise HTTPException(507, f"not saved: {error}") from None
        return _json({"row": new.row, "decided": review.decided(new.row), "progress": review.progress()})

    @routes.post("/api/undo")
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

    @routes.get("/corrections.csv")
    def export() -> Response:
        content = corrections_csv(review.decisions, cards.ids, cards.classes)
        headers = {"content-disposition": 'attachment; filename="corrections.csv"'}
        return Response(content, media_type="text/csv; charset=utf-8", headers=headers)

    return routes


def _json(content: Any) -> Response:
    # The values are plain JSON types already; FastAPI's conversion would take most of the time.
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _file(name: str) -> bytes:
    return (resources.files("crosel.review") / name).read_bytes()
