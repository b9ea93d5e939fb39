"""Partial-label learning: train from candidate label sets, and get the true labels back."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = ["CroSelClassifier", "PartialLabelClassifier", "UserError", "__version__"]

from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.estimator import CroSelClassifier, PartialLabelClassifier


def __getattr__(name: str) -> Any:
    """Import the estimators on first use: torch takes seconds to load, `crosel --help` must not wait for it."""
    if name in ("CroSelClassifier", "PartialLabelClassifier"):
        return getattr(import_module("crosel.estimator"), name)
    raise AttributeError(f"module 'crosel' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What is there, with the estimators that are not imported yet: a shell completes their names."""
    return sorted({*globals(), *__all__})
