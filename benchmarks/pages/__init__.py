"""The generated parts of the pages: a function for each block of text, and one for each chart."""

from __future__ import annotations

from collections.abc import Callable

from . import forward, limits, losses, others, peers, readme, steps, tokens
from .charts import CHARTS
from .records import Records

__all__ = ["BLOCKS", "CHARTS"]

_BLOCK = {"records": "Records", "return": "str"}

BLOCKS: dict[str, Callable[[Records], str]] = {
    name: function
    for module in (readme, forward, losses, others, limits, tokens, peers, steps)
    for name, function in vars(module).items()
    if not name.startswith("_") and getattr(function, "__annotations__", None) == _BLOCK
}
"""The blocks by the name in their markers: every public function of these modules from the records to a text."""
