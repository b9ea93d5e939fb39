"""Losses on candidate sets, and the weights they are made of: pure functions of logits and sets."""

from crosel.methods.losses import (
    candidate_probabilities,
    cc_loss,
    log_one_minus_probability,
    one_hot,
    restrict,
    soft_cross_entropy,
)

__all__ = [
    "candidate_probabilities", "cc_loss", "log_one_minus_probability", "one_hot", "restrict", "soft_cross_entropy",
]  # fmt: skip
