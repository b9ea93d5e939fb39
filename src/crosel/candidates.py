"""Generators of candidate sets, and the rules that name them."""

from crosel.data.candidates import (
    Rule,
    apply_rule,
    drop_truth,
    instance_dependent,
    parse_rule,
    probabilities,
    superclass,
    uniform,
    uniform_sets,
)

__all__ = [
    "Rule", "apply_rule", "drop_truth", "instance_dependent", "parse_rule", "probabilities", "superclass", "uniform",
    "uniform_sets",
]  # fmt: skip
