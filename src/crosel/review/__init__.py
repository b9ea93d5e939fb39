"""`crosel review RUN`: a local web page to look through a run's labels and correct them."""

from __future__ import annotations

from pathlib import Path

from crosel.errors import UserError
from crosel.runs.corrections import apply_corrections, export_corrections, read_corrections

__all__ = ["apply_corrections", "export_corrections", "read_corrections", "serve_review"]


def serve_review(run: Path, port: int = 0, open_browser: bool = True) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C; port 0 takes a free one."""
    try:
        import fastapi
        import uvicorn
    except ImportError as error:
        raise UserError(f"the review page needs {error.name}; install it with: pip install 'crosel[review]'") from None
    del fastapi, uvicorn
    from crosel.review.app import serve

    serve(run, port, open_browser)
