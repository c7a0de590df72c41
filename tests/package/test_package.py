"""The archives that a release uploads: their files, metadata, version and types."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path, PurePosixPath

import pytest

import onlinesoftmax

ROOT = Path(__file__).parents[2]
VERSION = onlinesoftmax.__version__


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


RECORDS = ("h200-cross-entropy.json", "h200-rows1024.json", "h200-token-logprobs.json")
ADDED = {"onlinesoftmax/commit.txt", *(f"onlinesoftmax/lab/report/shipped/{name}" for name in RECORDS)}
"""Files that the build adds."""


def files_of_the_package() -> set[str]:
    """Every file under src, relative to it, except those that Python compiled."""
    found = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def archives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this source."""
    # The option exists only in a run of this folder alone.
    if built := request.config.getoption("archives", None):
        return Path(built).resolve()
    if not importlib.util.find_spec("hatchling"):
        pytest.skip("hatchling, which builds the package, is not installed")
    folder = tmp_path_factory.mktemp("archives")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(archives: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(archives / f"onlinesoftmax-{VERSION}-py3-none-any.whl")


@pytest.fixture(scope="module")
def distribution(wheel: zipfile.ZipFile) -> Distribution:
    return PathDistribution(zipfile.Path(wheel, f"onlinesoftmax-{VERSION}.dist-info/"))


def test_the_wheel_holds_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    info = f"onlinesoftmax-{VERSION}.dist-info"
    names = set(wheel.namelist())
    assert {name for name in names if not name.startswith(f"{info}/")} == files_of_the_package() | ADDED
    assert re.fullmatch(r"[0-9a-f]{40}( dirty)?\n", wheel.read("onlinesoftmax/commit.txt").decode())
    assert f"{info}/licenses/LICENSE" in names
    suffixes = {PurePosixPath(name).suffix for name in names}
    assert {".cuh", ".json", ".typed"} <= suffixes, "kernels, tables of measured times, and the mark of a typed package"


def test_the_sdist_holds_what_the_tests_need(archives: Path) -> None:
    with tarfile.open(archives / f"onlinesoftmax-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert {f"src/{name}" for name in files_of_the_package() | ADDED} <= names
    assert tests <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "CITATION.cff", "Makefile", "requirements-dev.txt"} <= names
    assert {"examples/demo.py", "benchmarks/tables.py", "benchmarks/pages/records.py", "docs/performance.md"} <= names
    assert not [name for name in names if name.startswith("benchmarks/results")]


def test_the_version_is_the_same_everywhere(distribution: Distribution) -> None:
    assert distribution.version == VERSION
    assert re.findall(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE) == [VERSION]
    headings = re.findall(r"^## \[(.*)", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == f"Unreleased]: {VERSION}" or headings[0].startswith(f"{VERSION}] - ")
    assert 'path = "src/onlinesoftmax/__init__.py"' in read("pyproject.toml"), "the build reads the version there"


def test_the_python_versions_are_the_same_everywhere(distribution: Distribution) -> None:
    classifiers = distribution.metadata.get_all("Classifier") or []
    versions = [name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.\d+$", name)]
    assert versions == [f"3.{minor}" for minor in range(10, 10 + len(versions))]
    assert distribution.metadata["Requires-Python"] == f">={versions[0]}"
    workflow = read(".github/workflows/checks.yml")
    assert re.findall(r"^ +(3\.\d+)$", workflow, re.MULTILINE) == versions
    assert f"Python {versions[0]} or newer" in read("README.md")


def test_every_extra_is_in_the_readme(distribution: Distribution) -> None:
    extras = set(distribution.metadata.get_all("Provides-Extra") or []) - {"dev"}
    rows = set(re.findall(r"^\| `(\w+)` \|", read("README.md"), re.MULTILINE))
    assert extras <= rows


USE = """
import onlinesoftmax as osm

reveal_type(osm.__version__)
reveal_type(osm.explain((4, 5)).plan.strategy)
osm.softmax([1.0], dim="rows")
"""


def test_mypy_sees_the_types_of_the_installed_package(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy checks the types")
    venv.create(tmp_path / "environment", symlinks=True)
    [site] = (tmp_path / "environment").glob("lib/*/site-packages")
    wheel.extractall(site)
    (tmp_path / "use.py").write_text(USE)
    python = tmp_path / "environment" / "bin" / "python"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--python-executable", python, "use.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    said = re.findall(r"^use.py:(\d+): (\w+): (.*)$", done.stdout, re.MULTILINE)
    assert [line for line, *_ in said] == ["4", "5", "6"], done.stdout + done.stderr
    assert [text for _, kind, text in said if kind == "note"] == ['Revealed type is "str"', 'Revealed type is "str"']
    assert '"dim"' in said[2][2]


def test_windows_and_macos_lack_nothing_that_is_needed(tmp_path: Path) -> None:
    """A process without the modules and functions that Windows lacks, and without the packages that macOS lacks."""
    pytest.importorskip("torch", reason="the functions on tensors are tried")
    script, source = Path(__file__).with_name("other_system.py"), Path(onlinesoftmax.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path],
        env={**os.environ, "PYTHONPATH": str(source)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def messages() -> list[str]:
    """The texts of the sources, the workflows and the pages, in which commands of pip stand."""
    folders = ("src", "docs", "examples", "benchmarks", ".github", "hub")
    every = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path for path in every if path.suffix in {".py", ".md", ".yml", ".html"}]
    return [path.read_text(encoding="utf-8") for path in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md")]


def test_every_extra_that_is_named_exists(distribution: Distribution) -> None:
    extras = set(distribution.metadata.get_all("Provides-Extra") or [])
    named = re.findall(r"(?:onlinesoftmax|'\.)\[([^\]{}]+)\]", "\n".join(messages()))
    assert {extra for names in named for extra in names.split(",")} <= extras
    assert len(named) > 10


def test_every_extra_that_is_asked_for_by_name_exists(distribution: Distribution) -> None:
    """Messages take the extra from an argument: `needing("torch", ...)`, `module_missing("cuda.core", "cuda")`."""
    extras = set(distribution.metadata.get_all("Provides-Extra") or [])
    text = "\n".join(messages())
    asked = {*re.findall(r'needing\("(\w+)"', text), *re.findall(r'module_missing\("[\w.]+", "(\w+)"\)', text)}
    assert asked >= {"torch", "jax", "cuda", "triton"}
    assert asked <= extras


def test_the_conda_recipe_has_the_dependencies_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    recipe, pyproject = yaml.safe_load(read("recipe/recipe.yaml")), tomllib.loads(read("pyproject.toml"))
    project, needs = pyproject["project"], recipe["requirements"]
    assert recipe["context"]["version"] == VERSION
    assert recipe["package"]["name"] == project["name"]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"]
    [(command, function)] = project["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{command} = {function}"]
    python = f"python {project['requires-python']}"
    assert needs["run"] == [python, *map(of_conda, project["dependencies"])]
    extras = {each for name, some in project["optional-dependencies"].items() if name != "dev" for each in some}
    asked = {each for each in map(of_conda, extras) if " " in each}
    assert sorted(needs["run_constraints"]) == sorted(asked)
    assert set(map(of_conda, pyproject["build-system"]["requires"])) <= set(needs["host"])


def of_conda(requirement: str) -> str:
    """A requirement as conda writes it: name and version, without extras and markers."""
    name, version = re.fullmatch(r"([\w.-]+)(?:\[[^\]]*\])?([^;]*)(?:;.*)?", requirement).groups()  # type: ignore[union-attr]  # all match
    return f"{'pytorch' if name == 'torch' else name} {version.strip()}".strip()


def test_the_workflow_publishes_tags_by_pinned_actions() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    text = read(".github/workflows/checks.yml")
    jobs = yaml.safe_load(text)["jobs"]
    used = [step["uses"] for job in jobs.values() for step in job["steps"] if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name)] == []
    assert len(re.findall(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", text, re.MULTILINE)) == len(used), (
        "each names its version"
    )
    for name, what in (("publish", "pypi-publish"), ("publish-site", "deploy-pages")):
        assert jobs[name]["if"] == "github.event_name == 'push' && github.ref_type == 'tag'"
        assert {"tests", "package"} <= set(jobs[name]["needs"])
        assert what in jobs[name]["steps"][-1]["uses"]
        assert jobs[name]["environment"]
