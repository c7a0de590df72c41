"""Plans that cut small heads into chunks."""

from __future__ import annotations

import pytest

from onlinesoftmax.linear import plans


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens and columns fill a chunk."""
    small = {"TOKEN_TILE": 7, "COLUMN_TILE": 1, "FEWEST_TOKENS": 7, "FEWEST_COLUMNS": 4, "COLUMN_BYTES": 1}
    for name, value in small.items():
        monkeypatch.setattr(plans, name, value)
