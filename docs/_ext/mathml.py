"""Equations as MathML, made while the site is built: no script and no font has to come from elsewhere."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

_BARE_FRACTION = re.compile(r"\\frac\s*[^{\s]")

logger = logging.getLogger(__name__)


def _render(translator: Any, node: nodes.Element, block: bool) -> None:
    tex = node.astext()
    try:
        if _BARE_FRACTION.search(tex):  # docutils would take both digits for the numerator
            raise MathError("write \\frac{1}{2}, with braces")
        equation = tex2mathml(tex, as_block=block)
    except MathError as error:  # with -W this ends the build, at the place of the equation
        logger.warning("cannot be put into MathML: %s (%s)", tex, error, location=node)
        equation = translator.encode(tex)
    translator.body.append(f'<div class="math">{equation}</div>\n' if block else equation)
    raise nodes.SkipNode


def _inline(translator: Any, node: nodes.math) -> None:
    _render(translator, node, block=False)


def _block(translator: Any, node: nodes.math_block) -> None:
    _render(translator, node, block=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
