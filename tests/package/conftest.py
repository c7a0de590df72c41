"""The option that names built archives, for `make release-check`."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--archives", help="folder with a wheel and an sdist to test, instead of building both")
