"""Mathematics as MathML, which browsers draw without scripts and without a network; docutils converts LaTeX to it."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util import logging


def write(translator: Any, node: Any) -> None:
    """Write a formula in a line, or one of its own."""
    block = isinstance(node, nodes.math_block)
    try:
        written = tex2mathml(node.astext().strip(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("%s: %s", error, node.astext(), location=node)
        written = f"<code>{translator.encode(node.astext())}</code>"
    # A function before anything but a parenthesis has a thin space behind it.
    written = re.sub(r"<mo>&ApplyFunction;</mo>(?!\s*<mo[^>]*>\()", '<mspace width="0.17em"/>', written)
    translator.body.append(f'<div class="math">{written}</div>' if block else written)
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (write, None), (write, None))
    return {"parallel_read_safe": True}
