"""The house rules that a program can check: operation names, widths of signatures, lengths, the way of a call."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import onlinesoftmax
from onlinesoftmax.ops import OPERATIONS

ROOT = Path(onlinesoftmax.__file__).parent
PYTHON = sorted(ROOT.rglob("*.py"))
CUDA = sorted(ROOT.rglob("*.cuh"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))

MOST_PARAMETERS = 8
MOST_FIELDS = 16
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def name(path: Path) -> str:
    """The path in the package; that of a test begins with tests/."""
    return path.relative_to(Path(__file__).parents[1] if path in TESTS else ROOT).as_posix()


def may_name_operations(path: Path) -> bool:
    """True for the rooms of the operations, and the `formulas` of a language: they hold what an operation means."""
    of_language = path.stem == "formulas" and name(path).startswith(("kernels/", "torch/"))
    return of_language or name(path).startswith("ops/")


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a function in the Triton language, and for a Pallas kernel, which takes references to its arrays."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list) or node.name.endswith("_kernel")


def is_public(path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef, names: set[str]) -> bool:
    """True for a public function, a command, and the module of a public function."""
    where = name(path)
    public = where in (
        "api.py",
        "nn.py",
        "explanation/__init__.py",
        "distributed/__init__.py",
        "distributed/linear/__init__.py",
        "distributed/sampling/__init__.py",
        "files/apply.py",
        "linear/__init__.py",
        "linear/module.py",
        "routing/__init__.py",
        "routing/module.py",
        "sampling/__init__.py",
        "jax/functions.py",
        "jax/linear/__init__.py",
        "jax/routing/__init__.py",
        "jax/sampling/__init__.py",
    )
    return (public and (node.name in names or node.name == "__init__")) or where.startswith("cli/")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function of the package."""
    for path in PYTHON:
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def compared_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of every comparison with the name of an operation."""
    for node in nodes:
        if isinstance(node, ast.Compare):
            constants = [part for side in (node.left, *node.comparators) for part in ast.walk(side)]
        elif isinstance(node, ast.match_case):
            constants = list(ast.walk(node.pattern))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # x.startswith("softmax") is a comparison too.
            constants = list(node.args) if node.func.attr in ("startswith", "endswith", "removesuffix") else []
        else:
            continue
        for part in constants:
            if isinstance(part, ast.Constant) and (part.value in OPERATIONS or part.value == "_backward"):
                yield node.lineno if hasattr(node, "lineno") else 0, part.value


def test_no_code_compares_with_the_name_of_an_operation() -> None:
    found = [
        f"{name(path)}:{line} compares with {value!r}"
        for path in PYTHON
        if not may_name_operations(path)
        for line, value in compared_names(nodes_of(path))
    ]
    assert not found, "\n".join(found)


def test_no_cuda_file_but_formulas_asks_which_operation_it_serves() -> None:
    asks = [name(path) for path in CUDA if re.search(r"\bOp::\w+|\bOP\b", path.read_text())]
    assert not [path for path in asks if not path.endswith("formulas.cuh")]


def test_the_search_finds_every_form_of_comparison() -> None:
    source = (
        'a = op == "softmax"\n'
        'b = op in ("x", "logsumexp")\n'
        'match op:\n    case "log_softmax": pass\n'
        'c = op.endswith("_backward")\n'
        'd = TABLE["softmax"]\n'
    )
    assert {value for _, value in compared_names(ast.walk(ast.parse(source)))} == {
        "softmax",
        "logsumexp",
        "log_softmax",
        "_backward",
    }


def test_types_are_asked_for_in_tuples() -> None:
    """torch.compile of PyTorch 2.9 and 2.10 cannot trace `isinstance(x, int | float)`."""
    unions = [
        f"{name(path)}:{node.lineno}"
        for path in PYTHON
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        if any(isinstance(part, ast.BinOp) for part in ast.walk(node.args[1])) and "None" not in ast.unparse(node)
    ]
    assert unions == []


def test_signatures_are_narrow() -> None:
    public = {*onlinesoftmax.__all__, *OPERATIONS, "apply_file", "explain"}
    wide = []
    for path, node in functions():
        if is_kernel(node):
            continue
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([argument for argument in arguments if argument.arg not in ("self", "cls", "ctx")])
        if count > MOST_PARAMETERS and not is_public(path, node, public):
            wide.append(f"{name(path)}:{node.lineno} {node.name} takes {count} parameters")
    assert not wide, "\n".join(wide)


def test_records_are_narrow() -> None:
    """Sixteen fields in commented groups read better than three records; a record with more holds several things."""
    wide = []
    for path in PYTHON:
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef) and _is_record(node):
                count = sum(isinstance(child, ast.AnnAssign) for child in node.body)
                if count > MOST_FIELDS and not name(path).startswith(("lab/", "kernels/")):
                    wide.append(f"{name(path)}:{node.lineno} {node.name} has {count} fields")
    assert not wide, "\n".join(wide)


def _is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(d) for d in node.decorator_list) or any(
        "NamedTuple" in ast.unparse(base) for base in node.bases
    )


def test_files_are_short() -> None:
    long = [name(path) for path in (*PYTHON, *CUDA, *TESTS) if len(path.read_text().splitlines()) > LONGEST_FILE]
    assert not long, f"{long}: where is the seam?"


def test_functions_are_short() -> None:
    long = []
    for path, node in functions():
        begin = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
        length = (node.end_lineno or 0) - (begin or 0)
        if length > LONGEST_FUNCTION:
            long.append(f"{name(path)}:{node.lineno} {node.name} has {length} lines")
    assert not long, "\n".join(long)


def test_half_of_the_files_have_at_most_150_lines() -> None:
    lengths = sorted(len(path.read_text().splitlines()) for path in PYTHON if path.name != "__init__.py")
    assert lengths[len(lengths) // 2] <= 150


def rooms_of(call: Callable[[], object]) -> set[str]:
    """The folders and modules at the top of the package whose functions a call enters."""
    found = set()

    def profile(frame: object, event: str, _: object) -> None:
        module = frame.f_globals.get("__name__", "")  # type: ignore[attr-defined]  # a frame
        if event == "call" and module.partition(".")[0] == "onlinesoftmax":
            found.add(module.removeprefix("onlinesoftmax").lstrip(".").partition(".")[0] or "__init__")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("gradient", [False, True])
def test_a_call_passes_through_few_rooms(gradient: bool) -> None:
    torch = pytest.importorskip("torch", reason="a call on a tensor needs torch")
    pytest.importorskip("triton", reason="the call runs a Triton kernel")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, bias = torch.randn(1, 2, 33, device=device, requires_grad=gradient), torch.randn(2, 33, device=device)

    def call() -> None:
        y = onlinesoftmax.softmax(x, -1, bias=bias, causal=True, backend="triton")
        if gradient:
            y.sum().backward()

    onlinesoftmax.softmax(torch.randn(3, 2, 33, device=device), backend="triton")
    first, again = rooms_of(call), rooms_of(call)
    assert first - {"core"} <= {"__init__", "api", "torch", "planner", "kernels"}
    assert again - {"core"} <= {"__init__", "api", "torch", "kernels"}


def test_every_test_that_is_collected_has_a_cell_in_make_test(exhaustive: dict[str, list[bool]]) -> None:
    """A check of which every cell is `exhaustive` repeats no other."""
    assert not [function for function, cells in exhaustive.items() if all(cells)]
    [command] = re.findall(r"^test:.*\n\t(.*)", (ROOT.parents[1] / "Makefile").read_text(), re.MULTILINE)
    assert command.endswith("-m 'gpu or not exhaustive'")


def test_files_of_tests_have_different_names() -> None:
    """Pytest imports a file without its folder, so that of two files with one name it finds only the first."""
    files = [path.name for path in TESTS if path.name not in ("conftest.py", "__init__.py")]
    assert sorted(files) == sorted({*files})
