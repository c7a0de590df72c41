"""The package imports NumPy only, its public names exist, and a missing extra gives a sentence."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import onlinesoftmax
from onlinesoftmax.torch import namespace

FRAMEWORKS = ("torch", "triton", "jax", "jaxlib", "cuda", "typer", "rich", "safetensors", "ml_dtypes", "sklearn")


def loaded_after(code: str) -> set[str]:
    """Run `code` in a new interpreter; return the names of the frameworks that it has loaded."""
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


_WITHOUT_EXTRAS = """
import contextlib, io, json, os, pydoc, sys, tempfile

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FRAMEWORKS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

# importlib.util.find_spec returns None for a package that is not installed.
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] in FRAMEWORKS else find_spec(name, package)
)
sys.meta_path.insert(0, Refuse())
import numpy as np
import onlinesoftmax as osm

x = np.ones((2, 8), np.float32)
state = osm.State.of(x)
folder = tempfile.TemporaryDirectory()
path = lambda name: os.path.join(folder.name, name)
np.save(path("x.npy"), x)
np.save(path("b.npy"), np.ones(3, np.float16).view("V2"))
open(path("x.safetensors"), "wb").close()

def command_line():
    from onlinesoftmax.cli import main
    main()

WORKS = {
    **{name: lambda name=name: getattr(osm, name) for name in [*osm.__all__, "jax", "reference"]},
    **{f"{name}(array)": lambda name=name: getattr(osm, name)(x, mask=x > 0, bias=x, scale=2.0) for name in FUNCTIONS},
    "State": lambda: [osm.State.identity(x).merge(state), osm.State.merge_all([state]), state.logsumexp(),
                      state.softmax(x), state.log_softmax(x)],
    "sampling": lambda: [osm.sample(x, top_p=0.9), osm.topk_logprobs(x, 2), osm.verify(x, np.array([3]))],
    "routing": lambda: osm.router_z_loss(osm.route(x, 2, prob_sums=True)),
    "reference.online": lambda: osm.reference.online(x),
    "explain": lambda: [str(osm.explain((4, 5))), str(osm.explain((4, 5), device="h200")), str(osm.explain(x))],
    "explain for jax": lambda: str(osm.explain((4, 5), framework="jax")),
    "apply_file": lambda: osm.apply_file(path("x.npy"), path("y.npy")),
    "star import": lambda: exec("from onlinesoftmax import *", {}),
    "help": lambda: pydoc.render_doc(osm),
    "import onlinesoftmax.jax": lambda: exec("import onlinesoftmax.jax"),
    "import onlinesoftmax.lab.verify": lambda: exec("import onlinesoftmax.lab.verify"),
}
FAILS = {
    "nn": lambda: osm.nn,
    "import onlinesoftmax.nn": lambda: exec("import onlinesoftmax.nn"),
    "override": lambda: osm.override(),
    **{f"jax.{name}": lambda name=name: getattr(osm.jax, name) for name in FUNCTIONS},
    "from onlinesoftmax.jax import": lambda: exec("from onlinesoftmax.jax import softmax"),
    **{f"{name}(list)": lambda name=name: getattr(osm, name)([1.0, 2.0]) for name in FUNCTIONS},
    "compile cuda": lambda: osm.explain((4, 5), device="h200", backend="cuda").compile(),
    "compile triton": lambda: osm.explain((4, 5), device="h200", backend="triton").compile(),
    "explain triton": lambda: osm.explain((4, 5), backend="triton"),
    "apply_file of bfloat16": lambda: osm.apply_file(path("b.npy"), path("c.npy")),
    "apply_file of safetensors": lambda: osm.apply_file(path("x.safetensors"), path("y.safetensors")),
    "command line": command_line,
}

def outcome(run):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            run()
    except (Exception, SystemExit) as error:
        return [type(error).__name__, said.getvalue() or str(error)]
    return None

print(json.dumps([{name: outcome(run) for name, run in table.items()} for table in (WORKS, FAILS)]))
"""
"""Runs every public name where only NumPy is installed; prints [type, message] of each error, or null."""


@pytest.fixture(scope="module")
def without_extras() -> tuple[dict[str, list[str] | None], dict[str, list[str] | None]]:
    """Outcomes by name: of what works with NumPy alone, and of what needs an extra."""
    names = f"FRAMEWORKS = {FRAMEWORKS}\nFUNCTIONS = ('softmax', 'log_softmax', 'logsumexp')\n"
    source = Path(onlinesoftmax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", names + _WITHOUT_EXTRAS],
        env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    works, fails = json.loads(done.stdout)
    return works, fails


EXTRAS = {
    "nn": "torch", "import onlinesoftmax.nn": "torch", "override": "torch",
    "jax.softmax": "jax", "jax.log_softmax": "jax",
    "jax.logsumexp": "jax", "from onlinesoftmax.jax import": "jax", "softmax(list)": "torch",
    "log_softmax(list)": "torch", "logsumexp(list)": "torch", "compile cuda": "cuda", "compile triton": "triton",
    "explain triton": "triton", "apply_file of bfloat16": "cli", "apply_file of safetensors": "cli",
    "command line": "cli",
}  # fmt: skip
"""The extra that each use of the package needs."""


def test_numpy_alone_is_enough_for_all_that_needs_no_extra(without_extras: tuple[dict[str, object], ...]) -> None:
    assert {name: error for name, error in without_extras[0].items() if error is not None} == {}


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_extra_is_a_sentence_that_says_what_to_install(
    without_extras: tuple[dict[str, list[str]], ...], name: str
) -> None:
    assert set(without_extras[1]) == set(EXTRAS)
    _, message = without_extras[1][name]
    assert f"pip install 'onlinesoftmax[{EXTRAS[name]}]'" in message
    assert not message.startswith("No module named")


def test_the_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("onlinesoftmax")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("onlinesoftmax runs from its source folder here, without being installed")
    assert onlinesoftmax.__version__ == installed


def test_two_copies_of_the_package_wait_for_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package and a copy of it from the hub each look for the same module of torch, and do not ask each other."""
    (tmp_path / "awaited_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []
    for copy in ("package", "hub"):
        sys.meta_path.insert(0, namespace._After("awaited_by_two", lambda _, copy=copy: seen.append(copy)))
    importlib.import_module("awaited_by_two")
    assert seen == ["package", "hub"]
    assert not any(isinstance(finder, namespace._After) and finder.name == "awaited_by_two" for finder in sys.meta_path)
