"""The Python blocks of the pages about several processes, and their output in the order of the processes."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[2] / "docs"
PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)

CODE = "block.py"
"""File of the block that the processes run."""


class Block(NamedTuple):
    """A block, the output that the page shows, and the number of processes for which it is written."""

    code: str
    shown: str
    size: int


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page that say how many processes run them."""
    found = PYTHON.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    sizes = [re.search(r"# torchrun --nproc-per-node (\d)", code) for code, _ in found]
    blocks = [Block(*texts, int(size[1])) for texts, size in zip(found, sizes, strict=True) if size]
    assert len(blocks) == 2
    return blocks


def run_the_block(folder: Path) -> None:
    """Run the block, and write the output of this process to the file of its rank."""
    with (folder / f"{os.environ['RANK']}.txt").open("w") as printed, contextlib.redirect_stdout(printed):
        exec(compile((folder / CODE).read_text(), CODE, "exec"), {"__name__": "page"})
