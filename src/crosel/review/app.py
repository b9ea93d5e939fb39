"""The page and the answers it asks for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, HTTPException, Query, Response
from fastapi import Path as InPath
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict

from crosel.errors import UserError
from crosel.labels import FLAGS
from crosel.report.page import style
from crosel.review.corrections import corrections_csv
from crosel.review.examples import STATES, Examples
from crosel.review.examples import Query as Wanted
from crosel.review.guard import Guard
from crosel.review.store import Decision, DecisionLog

PAGE = 60

Row = Annotated[int, InPath(ge=0, le=2**31)]
RowInQuery = Annotated[int | None, Query(ge=0, le=2**31)]
Share = Annotated[float, Query(ge=0, le=1, allow_inf_nan=False)]


class NewDecision(BaseModel):
    """A label for an example, or none: skipped."""

    model_config = ConfigDict(extra="forbid", strict=True)
    row: int
    label: int | None


def build_app(examples: Examples, log_path: Path, token: str) -> FastAPI:
    log = DecisionLog(log_path, examples.ids, examples.classes)
    decisions = log.decisions

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        log.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_middleware(Guard, token=token)
    app.state.examples, app.state.log = examples, log

    def check_row(row: int | None) -> None:
        if row is not None and row >= examples.n:
            raise HTTPException(404, "no such example")

    def check_label(label: int | None) -> None:
        if label is not None and not 0 <= label < len(examples.classes):
            raise HTTPException(422, "no such class")

    def progress() -> dict[str, Any]:
        counts = decisions.counts()
        return {**counts, "done": sum(counts.values()), "n": examples.n}

    def decided(row: int) -> dict[str, Any] | None:
        decision = decisions.get(row)
        return None if decision is None else {"decision": decision.kind, "label": decision.label}

    files = {
        "page.js": ("text/javascript; charset=utf-8", _file("crosel.review", "page.js")),
        "page.css": ("text/css; charset=utf-8", _file("crosel.review", "page.css")),
        "style.css": ("text/css; charset=utf-8", style().encode()),  # one look with the report
    }
    page = _file("crosel.review", "page.html")

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

    @app.get("/image/{row}.png")
    async def image(row: Row) -> Response:
        check_row(row)
        if not examples.has_images:
            raise HTTPException(404, "no pictures")
        cache = {"cache-control": "private, max-age=86400, immutable"}  # the address names the data's version
        if examples.has_small_images:
            content = examples.picture(row)
        else:
            content = await run_in_threadpool(examples.picture, row)
        return Response(content, media_type="image/png", headers=cache)

    @app.get("/api/run")
    async def about() -> Response:
        present = {FLAGS[code] for code in set(examples.flags.tolist())}
        return _json({
            "name": examples.name, "about": examples.about, "classes": examples.classes, "images": examples.has_images,
            "flags": [flag for flag in FLAGS if flag and flag in present], "version": examples.version,
            "states": STATES, "notes": [*examples.notes, *_log_notes(log)], "progress": progress(), "page": PAGE,
        })  # fmt: skip

    @app.get("/api/examples")
    async def find(
        label: Annotated[int | None, Query()] = None,
        within: Literal["label", "candidates"] = "label",
        flag: Literal["any", "none", "outside", "disputed", "unsure"] = "any",
        low: Share = 0.0,
        high: Share = 1.0,
        text: Annotated[str, Query(max_length=200)] = "",
        state: Literal["all", "undecided", "decided", "changed", "skipped"] = "all",
        sort: Literal["least", "most", "row"] = "least",
        after: RowInQuery = None,
        before: RowInQuery = None,
        limit: Annotated[int, Query(ge=1, le=PAGE)] = PAGE,
    ) -> Response:
        check_label(label)
        check_row(after)
        check_row(before)
        chosen_flag = None if flag == "any" else "" if flag == "none" else flag
        wanted = Wanted(label, within, chosen_flag, low, high, text, state, sort, after, before, limit)
        answer = examples.find(wanted, decisions)
        cards = examples.cards(answer.rows)
        for card in cards:
            card["decided"] = decided(card["row"])
        return _json({"total": answer.total, "start": answer.start, "examples": cards, "progress": progress()})

    @app.get("/api/classes/{row}")
    async def all_classes(row: Row) -> Response:
        check_row(row)
        return _json(examples.all_classes(row))

    @app.post("/api/decisions")
    def decide(new: NewDecision) -> Response:  # not async: waiting for the disk must not hold up the others
        if not 0 <= new.row < examples.n:
            raise HTTPException(404, "no such example")
        check_label(new.label)
        if new.label is None:
            decision = Decision("skip")
        elif new.label == examples.labels[new.row]:
            decision = Decision("accept", new.label)
        else:
            decision = Decision("choose" if examples.sets[new.row, new.label] else "outside", new.label)
        try:
            log.decide(new.row, decision)
        except UserError as error:
            raise HTTPException(507, f"not saved: {error}") from None
        return _json({"row": new.row, "decided": decided(new.row), "progress": progress()})

    @app.post("/api/undo")
    def undo() -> Response:
        try:
            row = log.undo()
        except UserError as error:
            raise HTTPException(507, f"not saved: {error}") from None
        if row is None:
            return _json({"row": None, "progress": progress()})
        card = {**examples.card(row), "decided": decided(row)}
        return _json({"row": row, "decided": decided(row), "example": card, "progress": progress()})

    @app.get("/corrections.csv")
    def export() -> Response:
        content = corrections_csv(decisions, examples.ids, examples.classes)
        headers = {"content-disposition": 'attachment; filename="corrections.csv"'}
        return Response(content, media_type="text/csv; charset=utf-8", headers=headers)

    return app


def _json(content: Any) -> Response:
    # Our own values are plain already: FastAPI's walk over them would cost more than all the rest.
    return Response(json.dumps(content, separators=(",", ":")), media_type="application/json")


def _file(package: str, name: str) -> bytes:
    return (resources.files(package) / name).read_bytes()


def _log_notes(log: DecisionLog) -> list[str]:
    count = len(log.passed_over)
    if not count:
        return []
    return [f"{count} line{'' if count == 1 else 's'} of review.jsonl cut short or not of this run: passed over"]
