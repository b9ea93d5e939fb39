"""Partial-label learning: train from candidate label sets, and get the true labels back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Threads that wait for each other sleep instead of spinning. On a machine that has other work to do, spinning makes a
# small step on the CPU thirty times slower. It counts only where torch is not loaded yet, and a value of yours wins.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
__all__ = ["CroSelClassifier", "PartialLabelClassifier", "UserError", "__version__"]

from crosel.errors import UserError

if TYPE_CHECKING:
    from crosel.estimator import CroSelClassifier, PartialLabelClassifier


def __getattr__(name: str) -> Any:
    """Import the estimators on first use: torch takes seconds to load, `crosel --help` must not wait for it."""
    if name in ("CroSelClassifier", "PartialLabelClassifier"):
        from crosel import estimator

        return getattr(estimator, name)
    raise AttributeError(f"module 'crosel' has no attribute {name!r}")
