"""Notebooks: pages in MyST's text format, whose cells run while the site is built.

Jupyter opens the same files with jupytext.  MyST-NB would start a process for each page, and needs thirty packages.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

CELL = re.compile(r"^```\{code-cell\} python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def cells(path: Path) -> list[str]:
    """The code of a notebook's cells."""
    return CELL.findall(path.read_text(encoding="utf-8"))


def run(code: str, scope: dict[str, Any]) -> tuple[str, list[str]]:
    """Run a cell, and return what it prints and its figures as SVG."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figures = []
    try:
        # Without a window, plt.show() only warns.
        with contextlib.redirect_stdout(io.StringIO()) as printed, patch.object(plt, "show"):
            exec(compile(code, scope["__name__"], "exec"), scope)
        for number in plt.get_fignums():
            with io.StringIO() as written:
                plt.figure(number).savefig(written, format="svg", bbox_inches="tight")
                # Without the XML declaration, the picture may stand inside HTML.
                figures.append(f"<svg{written.getvalue().partition('<svg')[2]}")
    finally:
        plt.close("all")
    return printed.getvalue(), figures


class Cell(SphinxDirective):
    """A cell, with its output and figures below it."""

    required_arguments, has_content = 1, True

    def run(self) -> list[nodes.Node]:
        """Run the code in the scope of the page."""
        code = "\n".join(self.content)
        scope = self.env.current_document.setdefault("notebook", {"__name__": self.env.docname})
        printed, figures = run(code, scope)
        found: list[nodes.Node] = [nodes.literal_block(code, code, language="python")]
        if printed:
            found.append(nodes.literal_block(printed, printed, language="text"))
        return found + [nodes.raw("", f'<figure class="cell">{figure}</figure>', format="html") for figure in figures]


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("code-cell", Cell)
    return {"parallel_read_safe": True}
