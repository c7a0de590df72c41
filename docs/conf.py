"""Configuration of the documentation site: `make docs`."""

from __future__ import annotations

from typing import Any

import onlinesoftmax

project = "onlinesoftmax"
author = "The onlinesoftmax developers"
version = release = onlinesoftmax.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 4
# In docstrings, `name` is code.
default_role = "code"
napoleon_use_ivar = True
# The docstrings give shapes and dtypes; a signature shows names and defaults, each on a line of its own.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

html_theme = "furo"
# The dark style of the theme underlines names of modules, as if they were links.
pygments_dark_style = "github-dark"
html_title = f"onlinesoftmax {version}"
html_show_copyright = False
html_show_sphinx = False


def skip_fields_of_tuples(app: Any, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples: the docstring of the class describes them."""
    return True if type(found).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
