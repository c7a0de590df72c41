"""Importing the package costs nothing but NumPy, and its public face is complete."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onlinesoftmax

FRAMEWORKS = ("torch", "triton", "jax", "jaxlib", "cuda", "typer", "rich", "safetensors", "ml_dtypes", "sklearn")


def loaded_after(code: str) -> set[str]:
    """Which frameworks a fresh interpreter has loaded once it has run `code`."""
    report = f"\nimport sys\nprint(*[name for name in {FRAMEWORKS} if name in sys.modules])"
    source = Path(onlinesoftmax.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-c", code + report],
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def test_importing_the_package_loads_no_framework() -> None:
    assert loaded_after("import onlinesoftmax; dir(onlinesoftmax)") == set()


@pytest.mark.parametrize(
    "code",
    [
        "osm.State.of(x).merge(osm.State.of(x)).softmax(x)",
        "osm.softmax(x), osm.log_softmax(x), osm.logsumexp(x)",
        "from onlinesoftmax import reference; reference.online(x)",
    ],
)
def test_numpy_arrays_need_no_framework(code: str) -> None:
    setup = "import numpy as np, onlinesoftmax as osm\nx = np.ones((2, 8), np.float32)\n"
    assert loaded_after(setup + code) == set()


def test_planning_for_a_known_gpu_needs_no_framework() -> None:
    code = "import onlinesoftmax as osm; assert osm.explain((4096, 50257), device='h200').plan.backend == 'cuda'"
    assert loaded_after(code) == set()


@pytest.mark.parametrize("name", onlinesoftmax.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(onlinesoftmax, name) is not None
    assert name in dir(onlinesoftmax)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sofmax'"):
        _ = onlinesoftmax.sofmax


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("onlinesoftmax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("onlinesoftmax runs from its source folder here, without being installed")
    assert onlinesoftmax.__version__ == installed
