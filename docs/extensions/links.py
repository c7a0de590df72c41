"""Links from code in the text to the objects that it names, and a check of the words that the search must find."""

from __future__ import annotations

import json
import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

MODULES = {
    "jax": "onlinesoftmax.jax", "distributed": "onlinesoftmax.distributed", "command_line": "", "environment": "",
}  # fmt: skip
"""The module whose functions a page means by bare names, none for names of commands; elsewhere the package."""

FOUND = {
    "huggingface": "models", "trainer": "training", "cite": "start", "cache": "environment", "onnx": "onnx",
    "windows": "start", "amd": "start",
}  # fmt: skip
"""Words that people search for, and the page that the search must give, among others."""


def link(app: Any, doctree: Any) -> None:
    """Let code in a line refer to the object of its name; code that is no name stays as it is."""
    module = MODULES.get(app.env.docname, "onlinesoftmax")
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext().removesuffix("()")
        for short, name_of_module in (("osm.", "onlinesoftmax."), ("osj.", "onlinesoftmax.jax."), ("np.", "numpy.")):
            name = name_of_module + name.removeprefix(short) if name.startswith(short) else name
        inside = (nodes.reference, nodes.title, addnodes.pending_xref)
        # `jax` is the package of this name.
        if re.fullmatch(r"(?!jax$)[A-Za-z_][\w.]*", name) and not isinstance(literal.parent, inside):
            attributes = {"refdomain": "py", "reftype": "obj", "reftarget": name, "py:module": module}
            reference = addnodes.pending_xref("", refdoc=app.env.docname, refwarn=False, **attributes)
            literal.replace_self(reference)
            reference += literal


def link_pages(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Let a docstring that names a page, as docs/state.md, refer to it."""
    lines[:] = [re.sub(r"docs/(\w+)\.md", r":doc:`/\1`", line) for line in lines]


def check_search(app: Any, failed: Exception | None) -> None:
    """Warn of words that the search does not find on their pages."""
    if failed is None and app.builder.format == "html":
        text = (app.outdir / "searchindex.js").read_text(encoding="utf-8")
        index = json.loads(text[text.index("{") : text.rindex("}") + 1])
        for word, page in FOUND.items():
            stem = app.builder.indexer.lang.stem(word)
            found = [index[kind].get(stem, []) for kind in ("terms", "titleterms")]
            pages = {index["docnames"][i] for ids in found for i in (ids if isinstance(ids, list) else [ids])}
            if page not in pages:
                logging.getLogger(__name__).warning("the search for %r does not find %s", word, page)


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("doctree-read", link)
    app.connect("autodoc-process-docstring", link_pages)
    app.connect("build-finished", check_search)
    return {"parallel_read_safe": True}
