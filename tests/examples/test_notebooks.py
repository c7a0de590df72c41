"""Notebooks of the documentation: every cell runs, on a CPU, and draws its figures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from scripts import load

DOCS = Path(__file__).parents[2] / "docs"

NEEDED = {
    "head_without_logits": ("torch",), "machine_code": ("cuda", "triton"), "online_softmax": ("numpy",),
    "sampling_in_batches": ("torch",),
}  # fmt: skip
"""The packages of each notebook; `triton` brings the disassembler."""


@pytest.fixture(scope="module")
def notebooks() -> ModuleType:
    """The extension that runs the cells while the site is built."""
    for name in ("sphinx", "matplotlib"):
        pytest.importorskip(name, reason="the extension that runs notebooks needs it")
    return load(DOCS / "extensions" / "notebooks.py")


@pytest.mark.parametrize("path", sorted((DOCS / "notebooks").glob("*.md")), ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, notebooks: ModuleType) -> None:
    for name in NEEDED[path.stem]:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the notebook needs {name}")
    scope: dict[str, Any] = {"__name__": path.stem}
    cells = notebooks.cells(path)
    assert len(cells) == path.read_text(encoding="utf-8").count("```{code-cell}")
    found = [notebooks.run(code, scope) for code in cells]
    assert any(printed for printed, _ in found)
    figures = [figure for _, drawn in found for figure in drawn]
    assert figures
    assert all(figure.startswith("<svg") for figure in figures)


def test_a_cell_sees_the_cells_before_it_and_its_error_is_not_hidden(notebooks: ModuleType) -> None:
    scope: dict[str, Any] = {"__name__": "page"}
    assert notebooks.run("x = 2", scope) == ("", [])
    assert notebooks.run("print(x + 1)", scope) == ("3\n", [])
    with pytest.raises(NameError):
        notebooks.run("y", scope)
