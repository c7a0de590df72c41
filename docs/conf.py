"""Configuration of the documentation site: `make docs`."""

from __future__ import annotations

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
html_title = f"onlinesoftmax {version}"
html_show_copyright = False
html_show_sphinx = False
