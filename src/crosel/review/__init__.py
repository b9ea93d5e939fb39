"""`crosel review RUN`: a local web page to look through a run's labels and correct them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crosel.errors import UserError
from crosel.review.corrections import apply_corrections, export_corrections, read_corrections

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["apply_corrections", "export_corrections", "make_app", "read_corrections", "serve_review"]


def make_app(run: Path, token: str) -> FastAPI:
    """The page and its answers, for whoever knows the token."""
    _check_installed()
    from crosel.review.app import build_app
    from crosel.review.load import load_examples

    return build_app(load_examples(run), run / "review.jsonl", token)


def serve_review(run: Path, port: int = 0, open_browser: bool = True) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C; port 0 takes a free one."""
    _check_installed()
    from crosel.review.serve import serve

    serve(run, port, open_browser)


def _check_installed() -> None:
    try:
        import fastapi
        import uvicorn
    except ImportError as error:
        raise UserError(f"the review page needs {error.name}; install it with: pip install 'crosel[review]'") from None
    del fastapi, uvicorn
