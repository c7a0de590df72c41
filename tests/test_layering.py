"""The architecture as a table: imports point down only, and a framework is imported only where it must be.

Every import counts, those inside functions too.  Only the registry of the backends, and an operation that
asks for all declarations or for its own kernels, reach upwards, by name and when asked.
"""

from __future__ import annotations

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest

import onlinesoftmax

LAYERS: tuple[tuple[str, ...], ...] = (
    ("core",),
    ("ops",),
    (
        "planner",
        "files",
        "linear.plans",
        "linear.problem",
        "sampling.formulas",
        "sampling.keys",
        "sampling.masses",
        "sampling.philox",
        "sampling.results",
        "sampling.rules",
        "sampling.verification",
    ),
    ("routing.formulas", "routing.losses", "routing.presets", "routing.results", "routing.rules", "routing.selection"),
    ("kernels.cuda.strategy",),
    ("planner.strategies",),
    ("planner.plan",),
    ("kernels",),
    ("ops.*.kernels", "sampling.kernels"),
    ("routing.kernels",),
    ("torch", "jax"),
    ("numpy", "linear.*", "sampling.*", "sampling.kernels.*_launch"),
    ("routing.*", "routing.kernels.*_launch"),
    ("explanation", "distributed"),
    ("api", "linear"),
    ("linear.module",),
    ("routing",),
    ("routing.module",),
    ("nn", "overrides", "sampling"),
    ("",),
    ("lab", "lab.names", "lab.jax_on_torch"),
    ("lab.verify",),
    ("lab.bench",),
    ("lab.bench.sharded",),
    ("lab.report",),
    ("cli",),
    ("__main__",),
)
"""Bottom first.  A name stands for a module, or for a package and all in it; "" is the public face, __init__.py.  The
kernels that an operation brings stand in its room, and import the parts of the others.  The public functions of a head
stand in linear/__init__.py, those of routing and sampling in routing/__init__.py and sampling/__init__.py.

Nothing that users import stands above `lab`, which measures it; only the command line imports `lab`.
"""

FRAMEWORKS: dict[str, set[str]] = {
    "torch.*": {"torch"},
    "nn": {"torch"},
    "distributed": {"torch"},
    "linear.arguments": {"torch"},
    "linear.columns": {"torch"},
    "linear.formulas": {"torch"},
    "linear.module": {"torch"},
    "linear.operators": {"torch"},
    "linear.products": {"torch"},
    "linear.rows": {"torch"},
    "linear.run": {"torch"},
    "linear.sharing": {"torch"},
    "linear.support": {"torch"},
    "linear.tokens": {"torch"},
    "linear.traced": {"torch"},
    "distributed.*": {"torch"},
    "sampling.arguments": {"torch"},
    "sampling.eager": {"torch"},
    "sampling.kernels.*_launch": {"torch"},
    "sampling.operators": {"torch"},
    "sampling.order": {"torch"},
    "sampling.prepared": {"torch"},
    "sampling.run": {"torch"},
    "sampling.topk": {"torch"},
    "sampling.verification": {"torch"},
    "routing.arguments": {"torch"},
    "routing.kernels.*_launch": {"torch"},
    "routing.loss_run": {"torch"},
    "routing.module": {"torch"},
    "routing.operators": {"torch"},
    "routing.prepared": {"torch"},
    "routing.eager": {"torch"},
    "routing.run": {"torch"},
    "overrides.calls": {"torch"},
    "overrides.checkpoints": {"torch"},
    "overrides.consumers": {"torch"},
    "overrides.heads": {"torch"},
    "overrides.logits": {"torch"},
    "overrides.mode": {"torch"},
    "overrides.steps": {"torch"},
    "overrides.table": {"torch"},
    "jax": {"jax"},
    "jax.functions": {"jax"},
    "jax.linear": {"jax"},
    "jax.linear.*": {"jax"},
    "jax.loss_run": {"jax"},
    "jax.exchange": {"jax"},
    "jax.array_types": {"jax"},
    "jax.autograd": {"jax"},
    "jax.cuda_call": {"jax"},
    "jax.custom_op": {"jax"},
    "jax.eager": {"jax"},
    "jax.partitioning": {"jax"},
    "jax.prepare": {"jax"},
    "jax.loss_total": {"jax"},
    "jax.run": {"jax"},
    "jax.sampling": {"jax"},
    "jax.sampling.*": {"jax"},
    "jax.shards": {"jax"},
    "jax.wide": {"jax"},
    "jax.routing": {"jax"},
    "jax.routing.*": {"jax"},
    "kernels.pallas": {"jax"},
    "kernels.pallas.*": {"jax"},
    "kernels.triton.*": {"torch", "triton"},
    "ops.*.kernels.triton": {"torch", "triton"},
    "ops.*.kernels.pallas": {"jax"},
    "kernels.cuda.launch": {"torch"},
    "kernels.cuda.merge": {"torch"},
    "kernels.cuda.multiply": {"torch"},
    "kernels.cuda.reduction": {"torch"},
    "kernels.cuda.process_mailboxes": {"torch"},
    "lab.bench.check": {"torch"},
    "lab.bench.inputs": {"torch"},
    "lab.bench.measure": {"torch"},
    "lab.bench.host_times": {"torch"},
    "lab.bench.cold_suite": {"torch"},
    "lab.bench.heads.measure": {"torch"},
    "lab.bench.heads.steps": {"torch"},
    "lab.bench.routing.measure": {"torch"},
    "lab.bench.sampling.measure": {"torch"},
    "lab.bench.sampling.decoding": {"torch"},
    "lab.bench.sharded": {"torch"},
    "lab.bench.tune": {"torch"},
    "lab.bench.sharded.*": {"torch"},
    "lab.warm": {"torch"},
    "cli.*": {"typer", "rich"},
}
"""What modules import when they are imported themselves, beside NumPy; nothing where there is no entry."""

ROOT = Path(onlinesoftmax.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
"""Every module by its name in the package; "" is the public face."""


@dataclass(frozen=True)
class Import:
    """One imported module: `target` is relative to the package if `ours`, else the top-level name."""

    target: str
    ours: bool
    line: int
    on_import: bool


def imports_of(name: str) -> list[Import]:
    """Every import in a module of the package."""
    return _imports(FILES[name], package_of(name))


@cache
def _imports(path: Path, package: str) -> list[Import]:
    return list(_walk(ast.parse(path.read_text(encoding="utf-8")), package, on_import=True))


def _walk(node: ast.AST, package: str, on_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield from _resolved(alias.name, [], child.lineno, on_import)
        elif isinstance(child, ast.ImportFrom):
            parts = package.split(".") if package else []
            base = parts[: len(parts) - child.level + 1] if child.level else []
            module = ".".join(
                [*(["onlinesoftmax", *base] if child.level else []), *([child.module] if child.module else [])]
            )
            yield from _resolved(module, [alias.name for alias in child.names], child.lineno, on_import)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            yield from _walk(child, package, on_import=False)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, package, on_import and not inside)


def _resolved(module: str, names: list[str], line: int, on_import: bool) -> Iterator[Import]:
    """`from package import a, b` imports the modules a and b where they are modules, else the package."""
    top, _, rest = module.partition(".")
    if top != "onlinesoftmax":
        yield Import(top, False, line, on_import)
        return
    dotted = {".".join(filter(None, (rest, name))) for name in names}
    for target in {full if full in FILES else rest for full in dotted} or {rest}:
        yield Import(target, True, line, on_import)


def is_in(name: str, package: str) -> bool:
    """True for a module, and for a module in a package; each * in the package stands for any name."""
    return fnmatch(name, package) or fnmatch(name, f"{package}.*")


def layer(name: str) -> int:
    """The layer of a module, by the longest beginning of its name that is in LAYERS."""
    found = {each: i for i, names in enumerate(LAYERS) for each in names if is_in(name, each)}
    assert found, f"{name}: a new module; give it a place in LAYERS"
    return found[max(found, key=len)]


def package_of(name: str) -> str:
    """The sub-package that a module is in, itself included; "" for a module of the top."""
    return name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]


def points_down(name: str, target: str) -> bool:
    """Whether a module may import another: from a lower layer, or from its own folder but not from a sibling's."""
    if layer(target) != layer(name):
        return layer(target) < layer(name)
    in_folder = "." in name or FILES[name].name == "__init__.py"
    same_folder = in_folder and target.partition(".")[0] == name.partition(".")[0]
    own, other = package_of(name), package_of(target)
    return same_folder and (own.startswith(other) or other.startswith(own))


def not_below(name: str) -> list[str]:
    """A sentence about every import that does not point down."""
    return [
        f"{name}:{i.line} imports {i.target or 'onlinesoftmax'}, which is not below it"
        for i in imports_of(name)
        if i.ours and not points_down(name, i.target)
    ]


def test_imports_point_down() -> None:
    wrong = [sentence for name in FILES if name for sentence in not_below(name)]
    assert not wrong, "\n".join(wrong)


def test_no_import_is_circular() -> None:
    graph = {name: {i.target for i in imports_of(name) if i.ours} for name in FILES if name}
    graphlib.TopologicalSorter(graph).prepare()


def not_listed(name: str) -> list[str]:
    """A sentence about every framework that a module imports without leave."""
    listed = {"numpy"}.union(*(frameworks for module, frameworks in FRAMEWORKS.items() if fnmatch(name, module)))
    return [
        f"{name or '__init__'}:{i.line} imports {i.target} when it is imported; import it where it is used"
        for i in imports_of(name)
        if i.on_import and not i.ours and i.target not in sys.stdlib_module_names and i.target not in listed
    ]


def test_frameworks_are_imported_only_where_listed() -> None:
    wrong = [sentence for name in FILES for sentence in not_listed(name)]
    assert not wrong, "\n".join(wrong)


def test_every_name_in_the_table_exists() -> None:
    named = {name for names in LAYERS for name in names}
    assert {name.partition(".")[0] for name in named} == {name.partition(".")[0] for name in FILES}
    every = [*named, *(name.removesuffix(".*") for name in FRAMEWORKS)]
    assert {name for name in every if "*" not in name} <= set(FILES)


def test_the_checks_find_what_they_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form of import is seen, on a module that breaks both rules."""
    path = tmp_path / "plan.py"
    path.write_text(
        "import torch\n"
        "from . import strategies\n"
        "from .. import __version__\n"
        "def f():\n"
        "    import jax\n"
        "    from ..kernels.triton import row\n"
        "    import onlinesoftmax.api\n"
    )
    names = ("", "api", "kernels.triton", "kernels.triton.row", "planner.strategies", "planner.plan")
    monkeypatch.setattr(f"{__name__}.FILES", dict.fromkeys(names, path))
    found = {(i.target, i.ours, i.on_import) for i in imports_of("planner.plan")}
    assert found == {
        ("torch", False, True),
        ("planner.strategies", True, True),
        ("", True, True),
        ("jax", False, False),
        ("kernels.triton.row", True, False),
        ("api", True, False),
    }
    assert "planner.plan:6 imports kernels.triton.row, which is not below it" in not_below("planner.plan")
    [sentence] = not_listed("planner.plan")
    assert sentence.startswith("planner.plan:1 imports torch when it is imported")
