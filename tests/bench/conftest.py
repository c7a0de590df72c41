"""A plan as on a GPU, for kernels that run in an interpreter."""

from __future__ import annotations

import pytest

from onlinesoftmax import explanation
from onlinesoftmax.core import device


@pytest.fixture
def planned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` as on an H200, with whose numbers the interpreter's launches are planned."""
    monkeypatch.setattr(explanation, "_machine", lambda name, x, framework: device.known(name or "h200"))
