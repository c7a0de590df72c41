"""The script in examples/ that a file of tests is named after."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from scripts import load


@pytest.fixture(scope="module")
def example(request: pytest.FixtureRequest) -> ModuleType:
    """The module, which is not part of the package."""
    return load(Path(__file__).parents[2] / "examples" / request.path.name.removeprefix("test_"))
