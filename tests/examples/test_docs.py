"""Pages of the documentation: their code and commands print the output shown, and their links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import onlinesoftmax
from onlinesoftmax.kernels.cuda.compile import nvrtc_version

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs"
PACKAGE = Path(onlinesoftmax.__file__).parent
PYTHON = re.compile(r"^```python\n(.*?)^```\n(?:\n?```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n\+\+\+ (\S+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


NEEDED = {
    "losses": "triton",
    "jax": "jax",
    "models": "transformers",
    "sampling": "torch jax",
    "routing": "torch jax",
    "moving": "torch jax",
    "training": "transformers",
    "files": "torch safetensors",
    "export": "torch jax",
    "onnx": "onnxscript onnxruntime",
}
"""The packages without which the code of a page cannot run; torch for the other pages."""


def text_of(page: str) -> str:
    """The text of a page; skips the test if other compilers are installed than those whose output the page shows."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for compiler, shown in re.findall(r"\*\*(NVRTC|Triton) ([\d.]+)\*\*", text):
        installed = installed_compilers()[compiler]
        if installed != shown:
            pytest.skip(f"{page}.md shows the output of {compiler} {shown}, and here is {installed or 'none'}")
    return text


def installed_compilers() -> dict[str, str | None]:
    """The versions of the compilers that `explain` calls; None for one that is missing."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {"NVRTC": nvrtc_version() if importlib.util.find_spec("cuda") else None, "Triton": triton}


OTHERWISE = {"distributed", "sharded_heads", "troubleshooting"}
"""Pages whose code is not run here: it is for several processes, or switches on logs."""

WITH_CODE = [
    str(path.relative_to(DOCS).with_suffix(""))
    for path in sorted(DOCS.rglob("*.md")) if PYTHON.search(path.read_text(encoding="utf-8"))
]  # fmt: skip

MARKS = {
    # PyTorch's exporter calls deprecated functions of PyTorch.
    "onnx": pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    "jax": pytest.mark.early,
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=MARKS.get(page, ())) for page in WITH_CODE if page not in OTHERWISE]
)
def test_python_prints_the_output_shown(page: str) -> None:
    for needed in NEEDED.get(page, "torch").split():
        pytest.importorskip(needed, reason=f"the code of {page}.md needs {needed}")
    scope: dict[str, Any] = {"__name__": page}
    blocks = PYTHON.findall(text_of(page))
    assert blocks
    for code, shown in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, f"{page}.md", "exec"), scope)
        assert printed.getvalue() == shown, code


RUN = """
import json, sys
from typer.testing import CliRunner
from onlinesoftmax.cli import build
print(json.dumps([CliRunner().invoke(build(), words).output for words in json.loads(sys.argv[1])]))
"""


@pytest.mark.early
@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands on the pages are for bash")
def test_commands_print_the_output_shown(tmp_path: Path) -> None:
    """One process runs all commands of all pages, and bash what follows in their pipes."""
    pytest.importorskip("typer", reason="the command line needs typer")
    commands = []
    for page in ("plans", "compiler", "command_line"):
        text = "".join(CONSOLE.findall(text_of(page)))
        found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
        assert found, page
        commands += found
    # The pages describe ordinary use, without Triton's interpreter, which compiles nothing.
    unset = ("TRITON_INTERPRET", "ONLINESOFTMAX_CACHE_MAXSIZE")
    env = {key: value for key, value in os.environ.items() if key not in unset}
    env |= {"PYTHONPATH": str(PACKAGE.parent), "PYTHONIOENCODING": "utf-8", "LC_ALL": "C"}
    words = [shlex.split(command.partition(" | ")[0]) for command, _ in commands]
    assert all(name == "onlinesoftmax" for name, *_ in words)
    np.save(tmp_path / "logits.npy", np.zeros((4, 8), np.float32))
    run = [sys.executable, "-c", RUN, json.dumps([arguments for _, *arguments in words])]
    done = subprocess.run(run, cwd=tmp_path, env=env, stdout=subprocess.PIPE, encoding="utf-8", check=True)
    for (command, shown), output in zip(commands, json.loads(done.stdout), strict=True):
        piped = ["bash", "-c", f"onlinesoftmax() {{ cat; }}\n{command}"]
        done = subprocess.run(piped, env=env, input=output, capture_output=True, encoding="utf-8", check=False)
        assert done.stdout + done.stderr == shown, command


def test_every_command_is_on_the_page_of_commands_and_takes_the_options_shown() -> None:
    typer = pytest.importorskip("typer", reason="the command line needs typer")
    from onlinesoftmax.cli import build

    commands = typer.main.get_command(build()).commands
    sections = re.findall(r"^## (\S+)$", (DOCS / "command_line.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(sections) == set(commands)
    for page in ("command_line", "files", "environment"):
        blocks = re.findall(r"^```bash\n(.*?)^```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
        for line in "".join(blocks).splitlines():
            name, *arguments = shlex.split(line.partition("onlinesoftmax ")[2], comments=True)
            commands[name].make_context(name, arguments)


@pytest.mark.early
def test_the_backend_of_the_page_passes_the_contract(tmp_path: Path) -> None:
    """Its two files and the lines of its diffs are added to a copy of the package.  The backend is for a CPU."""
    text = text_of("backend")
    package = tmp_path / "src" / "onlinesoftmax"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    files = [code for code, _ in PYTHON.findall(text) if code.startswith("# src/onlinesoftmax/")]
    assert len(files) == 2
    for code in files:
        path = tmp_path / code.partition("\n")[0].removeprefix("# ")
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
    for name, lines in DIFF.findall(text):
        path = tmp_path / name
        before, after = ("".join(re.findall(rf"^[ {sign}](.*\n)", lines, re.MULTILINE)) for sign in ("-", "+"))
        assert path.read_text().count(before) == 1, (name, before)
        path.write_text(path.read_text().replace(before, after))
    contract = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=tests"]
    env = os.environ | {"PYTHONPATH": str(package.parent), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*contract, "tests/test_contract.py", "-k", "tiled"],
        cwd=TESTS.parent, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.search(r"\d\d passed", done.stdout), done.stdout + done.stderr
    assert "failed" not in done.stdout


def test_the_pictures_are_those_that_the_code_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    committed = {path.name: path.read_text() for path in (DOCS / "figures").glob("*.svg")}
    drawn_by = re.search(r"Matplotlib v([\d.]+)", committed["row.svg"])
    assert drawn_by
    if version("matplotlib") != drawn_by[1]:
        pytest.skip(f"matplotlib {drawn_by[1]} drew the pictures, and other versions write other bytes")
    runpy.run_path(str(DOCS / "pictures.py"))["draw"](tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == committed


def test_functions_in_the_picture_of_calls_exist_and_stand_on_its_page() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib draws the pictures")
    pytest.importorskip("torch", reason="the picture names functions of sharded rows")
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    for wanted in runpy.run_path(str(DOCS / "pictures.py"))["CALLS"].values():
        for _, function in wanted:
            assert callable(attrgetter(function)(onlinesoftmax))
            assert f"`{function}`" in text


def test_every_example_is_on_its_page_and_has_a_test() -> None:
    of_processes = (TESTS / "distributed" / "files.py").read_text(encoding="utf-8")
    text = (DOCS / "examples.md").read_text(encoding="utf-8")
    for script in (TESTS.parent / "examples").glob("*.py"):
        assert f"(../examples/{script.name})" in text
        # The processes of tests/distributed run the example of several processes.
        assert (Path(__file__).parent / f"test_{script.name}").exists() or script.name in of_processes


def test_every_public_name_is_on_the_page_of_the_reference() -> None:
    pytest.importorskip("torch", reason="two modules import torch")
    listed = set(re.findall(r"^   ~?([\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    names = {name for name in onlinesoftmax.__all__ if name != "__version__"}
    for module in ("nn", "distributed", "jax"):
        names |= {f"{module}.{name}" for name in getattr(onlinesoftmax, module).__all__}
    assert names <= listed


@pytest.mark.parametrize("project", ["python", "numpy", "torch", "jax", "optax"])
def test_objects_of_other_projects_that_the_site_links_exist(project: str) -> None:
    if project not in ("python", "numpy"):
        pytest.importorskip(project, reason="it has the objects")
    rows = (DOCS / "objects" / f"{project}.txt").read_text(encoding="utf-8").splitlines()[3:]
    assert rows == sorted(rows, key=lambda row: row.split()[0].lower())
    for name, kind, _ in map(str.split, rows):
        # PyTorch 2.13 added this module; None is no attribute of a module.
        if name not in ("torch.nn.LinearCrossEntropyLoss", "None"):
            assert pkgutil.resolve_name(name if "." in name or kind == "mod" else f"builtins.{name}")


def test_signatures_of_the_reference_have_types_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="it writes the signatures")
    pytest.importorskip("torch", reason="the types are PyTorch's")
    monkeypatch.syspath_prepend(DOCS / "extensions")
    write = importlib.import_module("signatures").write
    args, returned = write(None, "function", "", onlinesoftmax.cross_entropy, None, None, None)
    either = "torch.Tensor | numpy.ndarray"
    assert args.startswith(f"(input: {either}, target: {either}, weight: {either} | None = None, ignore_index: int =")
    assert "reduction: Literal['none', 'mean', 'sum'] = 'mean'" in args
    assert returned == f"{either} | tuple[{either}, onlinesoftmax.core.call.LossStatistics[{either}]]"
    args, returned = write(None, "method", "", onlinesoftmax.State.merge, None, None, None)
    assert args == "(other: onlinesoftmax.core.state.State)"
    assert write(None, "class", "", onlinesoftmax.State, None, None, None) == ("", "")


PAGES = [TESTS.parent / "README.md", TESTS.parent / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
FILES = [f"/{path.relative_to(TESTS.parent).as_posix()}" for top in FOLDERS for path in (TESTS.parent / top).rglob("*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_folders_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.cuh|/))`", page.read_text(encoding="utf-8")))
    missing = [name for name in named if not any(f"{file}/".endswith(f"/{name.rstrip('/')}/") for file in FILES)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_files_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
