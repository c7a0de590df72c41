"""Configuration of the documentation site: `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import onlinesoftmax

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "onlinesoftmax"
author = "The onlinesoftmax developers"
version = release = onlinesoftmax.__version__

extensions = [
    "myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.intersphinx", "sphinx.ext.napoleon",
    "sphinx_copybutton", "mathml", "signatures", "links", "notebooks",
]  # fmt: skip
templates_path = ["templates"]
exclude_patterns = ["templates"]

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_math_renderer = "mathml"

# In docstrings, `name` is code, and a link if it is the name of an object.
default_role = "py:obj"
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_custom_sections = ["Shape", "Source"]
# The file signatures.py writes the types; a signature with many arguments has one on each line.
autodoc_typehints = "none"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
python_display_short_literal_types = True

# The objects of other projects that the pages name, so that a build needs no network.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", "objects/python.txt"),
    "numpy": ("https://numpy.org/doc/stable", "objects/numpy.txt"),
    "torch": ("https://docs.pytorch.org/docs/stable", "objects/torch.txt"),
    "jax": ("https://docs.jax.dev/en/latest", "objects/jax.txt"),
    "optax": ("https://optax.readthedocs.io/en/latest", "objects/optax.txt"),
}

# Input has a button, and output has none.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
# The dark style of the theme underlines names of modules, as if they were links.
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = f"onlinesoftmax {version}"
html_show_copyright = False
html_show_sphinx = False


def skip_inner_members(app: Any, what: str, name: str, found: Any, skip: bool, options: Any) -> bool | None:
    """Leave out properties and fields: the docstring of a class describes those that are for users."""
    kind = type(found).__name__
    return True if "property" in kind or kind == "_tuplegetter" or name in ("extra_repr", "facts") else None


def delete_old_pages(app: Any) -> None:
    """Delete the pages of the reference whose objects api.md lists no more; autosummary writes the others."""
    listed = re.findall(r"^   ~?([\w.]+)$", (app.srcdir / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    for page in (app.srcdir / "reference").glob("*.rst"):
        if page.stem.removeprefix("onlinesoftmax.") not in listed:
            page.unlink()


def setup(app: Any) -> None:
    """Called by Sphinx."""
    # Before Sphinx looks for pages.
    app.connect("config-inited", lambda app, config: delete_old_pages(app))
    app.connect("autodoc-skip-member", skip_inner_members)
