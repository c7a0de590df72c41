"""The types of the public functions: mypy and pyright check tests/typed/calls.py, and names agree with the tables."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import onlinesoftmax
from onlinesoftmax import api
from onlinesoftmax.core import annotations
from onlinesoftmax.kernels.registry import BACKENDS
from onlinesoftmax.planner.strategies import FOR_JAX, FORCED_CUDA, TABLE

SOURCE, TYPED = Path(onlinesoftmax.__file__).parents[1], Path(__file__).parent / "typed"
ROOT = SOURCE.parent


def errors(*command: str) -> str:
    """Run a type checker as a module of this Python; its output if it finds an error."""
    environment = {**os.environ, "MYPYPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


def needs(*modules: str) -> None:
    for module in (*modules, "torch", "jaxlib"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("needs the settings of the source folder")


@pytest.mark.early
# `make lint`, a part of .ci/run, gives mypy the same file.
@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.exhaustive), "basedpyright"])
def test_a_type_checker_finds_the_types_and_the_mistakes(checker: str, tmp_path: Path) -> None:
    needs(checker)
    if checker == "mypy":
        options = ["--config-file", str(ROOT / "pyproject.toml"), str(TYPED / "calls.py")]
    else:
        settings = {
            "include": [str(TYPED)], "extraPaths": [str(SOURCE)], "typeCheckingMode": "standard",
            "reportUnnecessaryTypeIgnoreComment": "error", "pythonVersion": "3.10",
        }  # fmt: skip
        path = tmp_path / "pyrightconfig.json"
        path.write_text(json.dumps(settings))
        options = ["--project", str(path), "--pythonpath", sys.executable]
    assert errors(checker, *options) == ""


def test_literal_names_are_those_of_the_tables() -> None:
    assert get_args(annotations.Backend) == tuple(BACKENDS)
    assert set(get_args(annotations.Strategy)) == {row[1] for row in TABLE}


def test_literal_names_are_those_of_the_tables_in_jax() -> None:
    needs()
    from onlinesoftmax.jax import functions

    assert set(get_args(functions.Backend)) == {row[0] for row in (*FORCED_CUDA, *FOR_JAX)}
    assert set(get_args(functions.Strategy)) == {row[1] for row in (*FORCED_CUDA, *FOR_JAX)}
    check_options(functions.LogsumexpOptions, functions.logsumexp)


def check_options(options: Any, function: Any, *more: str) -> None:
    """Compare the options of an overload with the arguments by keyword of the function."""
    parameters = inspect.signature(function).parameters.values()
    by_keyword = {each.name for each in parameters if each.kind is each.KEYWORD_ONLY}
    assert set(options.__annotations__) == by_keyword - set(more)


def test_overloads_have_every_argument() -> None:
    check_options(annotations.LossOptions, api.cross_entropy, "return_stats")
