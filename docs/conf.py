"""Sphinx: `make docs` builds the site into docs/_build/html. Nothing in it is loaded from elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

from crosel import __version__

project = "crosel"
author = "the crosel developers"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "mathml", "reference", "docstrings"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "crosel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
smartquotes = False  # they would turn --out into –out
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3

default_role = "code"  # docstrings write `name`
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "Bools": "NDArray[bool]"}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
