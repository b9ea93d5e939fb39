"""The memory bank of predictions, and the three criteria by which it selects labels."""

from crosel.methods.bank import (
    MemoryBank,
    Selection,
    agreed_labels,
    confidence_is_high,
    label_is_candidate,
    label_is_stable,
)

__all__ = [
    "MemoryBank", "Selection", "agreed_labels", "confidence_is_high", "label_is_candidate", "label_is_stable",
]  # fmt: skip
