"""Fixture shared by the tests of this folder: a record of our functions that `override` calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import onlinesoftmax as osm


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of our public functions that `override` ran, in order."""
    # The table imports torch.  A conftest that fails to import stops the whole run, not only the tests of its folder.
    from spellings import SPELLINGS

    called: list[str] = []

    def recorded(name: str) -> Callable[..., Any]:
        function = getattr(osm, name)
        return lambda *args, **kwargs: (called.append(name), function(*args, **kwargs))[1]

    for name in SPELLINGS:
        monkeypatch.setattr(f"onlinesoftmax.api.{name}", recorded(name))
    return called
