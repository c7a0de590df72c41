"""The generated parts of the pages: a function for each block of text, and one for each chart."""

from __future__ import annotations

from collections.abc import Callable

from . import forward, limits, losses, others, readme
from .charts import CHARTS
from .records import Records

__all__ = ["BLOCKS", "CHARTS"]

BLOCKS: dict[str, Callable[[Records], str]] = {
    name: block for module in (readme, forward, losses, others, limits) for name, block in module.BLOCKS.items()
}
"""The function that makes each block, by the name in its marker."""
