"""Pages of the documentation: their Python code prints the output shown, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


NEEDED = {"losses": "triton", "jax": "jax"}
"""The package without which the code of a page cannot run; torch for the other pages."""


@pytest.mark.parametrize("page", ["tour", "state", "strategies", "numerics", "losses", "jax"])
def test_python_prints_the_output_shown(page: str) -> None:
    needed = NEEDED.get(page, "torch")
    pytest.importorskip(needed, reason=f"the code of {page}.md needs {needed}")
    scope: dict[str, Any] = {"__name__": page}
    blocks = BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"{page}.md", "exec"), scope)
        assert printed.getvalue() == shown, code


def test_the_pictures_are_those_that_the_code_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    committed = {path.name: path.read_text() for path in (DOCS / "figures").glob("*.svg")}
    drawn_by = re.search(r"Matplotlib v([\d.]+)", committed["row.svg"])
    assert drawn_by
    if version("matplotlib") != drawn_by[1]:
        pytest.skip(f"matplotlib {drawn_by[1]} drew the pictures, and other versions write other bytes")
    runpy.run_path(str(DOCS / "pictures.py"))["draw"](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == committed


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_links_between_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
