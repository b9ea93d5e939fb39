"""Partial-label methods behind one contract (`base.py`). Importing this package registers them."""

from crosel.methods import cc, crdpll, crosel, lws, pico, pop, proden
from crosel.methods.base import Method, MethodSettings, find_method, methods, register

__all__ = [
    "Method",
    "MethodSettings",
    "cc",
    "crdpll",
    "crosel",
    "find_method",
    "lws",
    "methods",
    "pico",
    "pop",
    "proden",
    "register",
]
