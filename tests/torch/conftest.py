"""Fixtures shared by the tests of this folder: the ways that a call can take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from onlinesoftmax.torch import fast_path, loss_run


@pytest.fixture(params=[{}, {"backend": "triton"}], ids=["default", "triton"])
def path(request: pytest.FixtureRequest) -> dict[str, str]:
    """Arguments of a call that leave the backend open, and that force a Triton kernel, interpreted without a GPU."""
    return dict(request.param)


@pytest.fixture
def cacheable() -> Iterator[None]:
    """No call is prepared, before the test and after it."""
    fast_path.forget()
    yield
    fast_path.forget()


@pytest.fixture(params=["cacheable", "general"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way of cacheable calls, whose launches are kept, and the general way."""
    request.getfixturevalue("cacheable")
    if request.param == "general":
        monkeypatch.setattr(loss_run, "look_up", lambda *_: ((), None))
    return str(request.param)


@pytest.fixture
def prepared() -> Any:
    """A function that gives the number of prepared calls of public functions."""
    return lambda: sum(isinstance(key[0][0], tuple) for key in fast_path.PREPARED_CALLS)
