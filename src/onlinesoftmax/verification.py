"""The contract, checked on this machine: every backend × strategy × operation × dtype against float64.

A result is right when no element is further from the exact result than PyTorch's worst on the same
input, plus one unit in the last place (ulp) of the output dtype; and when infinities and NaNs are
PyTorch's.  float64 is itself on trial, so the exact result is computed in NumPy's long double.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import api, registry
from .candidates import TABLE
from .operation import FORWARD
from .plan import PlanError
from .problem import ITEMSIZE

Progress = Callable[[int, int], None]

INTERPRETER_ULPS = 4
"""Units that the contract adds in Triton's interpreter instead of 1: its multiply-add rounds twice, so the
kernels' corrections by fma are lost there, and its conversion to bfloat16 cuts off instead of rounding."""


@dataclass(frozen=True)
class Case:
    """One input: `make` gives it in float32 on the CPU, and the softmax runs over `dim`.

    Attributes:
        name: What is hard about it.
        make: The tensor, from a torch module.
        dim: The softmax dimension.
        view: What to do to the tensor once it is on its device with its dtype: strides, slices.
        quick: Whether a quick check includes it.
        heavy: Whether it is too large for Triton's interpreter.
    """

    name: str
    make: Callable[[Any], Any]
    dim: int = -1
    view: Callable[[Any], Any] = lambda x: x
    quick: bool = False
    heavy: bool = False

    def tensor(self, dtype: Any, device: str) -> Any:
        """The input."""
        import torch

        return self.view(self.make(torch).to(dtype).to(device))


def outliers(torch: Any, *shape: int) -> Any:
    """Normal numbers, one in a hundred of them times 20: some outputs matter, most underflow."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) < 0.01, 20 * x, x)


def specials(torch: Any, cols: int) -> Any:
    """One row for each way that infinities and NaN meet, one without any, one of -inf alone."""
    inf, nan = torch.inf, torch.nan
    mixtures = ((-inf,), (inf,), (nan,), (inf, nan), (inf, -inf), (-inf, nan))
    x = outliers(torch, len(mixtures) + 2, cols)
    for row, values in enumerate(mixtures):
        x[row, 3 : 3 + len(values)] = torch.tensor(values)
    x[-1] = -inf
    return x


def _sized(rows: int, cols: int, quick: bool = False) -> Case:
    return Case(f"{rows} x {cols}", lambda torch: outliers(torch, rows, cols), quick=quick)


def _view(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    view: Callable[[Any], Any] = lambda x: x,
    quick: bool = False,
    heavy: bool = False,
) -> Case:
    return Case(name, lambda torch: outliers(torch, *shape), dim, view, quick, heavy)


def _masked_head(torch: Any) -> Any:
    """Rows whose first many blocks hold nothing but -inf."""
    x = outliers(torch, 2, 40003)
    x[:, :36000] = -torch.inf
    return x


CASES: tuple[Case, ...] = (
    *(_sized(3, cols) for cols in (1, 2, 3, 31, 127, 1000, 1025)),
    _sized(3, 33),
    _sized(3, 1023, quick=True),
    _sized(1, 50257, quick=True),
    _view("one dimension", (257,), 0),
    _view("short rows", (13, 5), -1),
    _view("many short rows", (1300, 5), -1, heavy=True),
    _view("middle dimension", (2, 17, 9), 1),
    _view("wide middle dimension", (2, 100, 130), -2, heavy=True),
    _view("first of four", (33, 2, 3, 4), 0),
    _view("tall columns", (700, 8), 0, quick=True),
    _view("taller columns", (5000, 48), 0, heavy=True),
    _view("permuted", (2, 3, 2, 2, 33), 2, lambda x: x.permute(2, 0, 4, 1, 3)),
    _view("sliced", (3, 4, 3, 2, 40), -1, lambda x: x[1:, ::2, :, :1, 3:36]),
    _view("transposed", (65, 16), -1, lambda x: x.t()),
    _view("sliced columns", (5, 90), -1, lambda x: x[:, 1:80]),
    _view("strided columns", (5, 90), -1, lambda x: x[:, ::3]),
    _view("repeated row", (1, 50), -1, lambda x: x.expand(4, 50)),
    _view("repeated column", (4, 1), -1, lambda x: x.expand(4, 50)),
    _view("unaligned start", (1025,), -1, lambda x: x[1:].view(8, 128)),
    Case("infinities and NaN", lambda torch: specials(torch, 70), quick=True),
    Case(
        "infinities and NaN, transposed",
        lambda torch: specials(torch, 70),
        view=lambda x: x.t().contiguous().t(),
        quick=True,
    ),
    Case("-inf first", _masked_head),
)
"""Odd sizes, every kind of strides, and every special number."""


@dataclass(frozen=True)
class Exact:
    """One input with its exact result and PyTorch's, which every strategy is held against."""

    x: Any
    before: Any
    dim: int
    theirs: Any
    exact: np.ndarray
    theirs_wide: np.ndarray
    ulp: np.ndarray
    finite: np.ndarray

    @classmethod
    def of(cls, case: Case, operation: str, dtype: str, device: str) -> Exact:
        """Compute them."""
        import torch

        x = case.tensor(getattr(torch, dtype), device)
        theirs = getattr(torch, operation)(x, case.dim)
        exact, theirs_wide = exact_result(operation, _wide(x), case.dim), _wide(theirs)
        finite = np.isfinite(exact) & np.isfinite(theirs_wide)
        return cls(x, x.clone(), case.dim, theirs, exact, theirs_wide, ulp(exact, x.dtype), finite)

    @property
    def allowed(self) -> float:
        """PyTorch's largest error: the contract adds one ulp of each element."""
        return float(np.max(np.abs(self.theirs_wide - self.exact)[self.finite], initial=0))


def _wide(x: Any) -> np.ndarray:
    return np.asarray(x.double().cpu().numpy(), np.longdouble)


def exact_result(operation: str, x: np.ndarray, dim: int) -> np.ndarray:
    """The operation in NumPy's long double: float64 itself is on trial too."""
    m = np.max(x, dim, keepdims=True)
    e = np.exp(x - m)
    l = np.sum(e, dim, keepdims=True)
    if operation == "softmax":
        return np.asarray(e / l)
    if operation == "log_softmax":
        return np.asarray(x - m - np.log(l))
    return np.squeeze(np.where(np.isinf(m), m, m + np.log(l)), dim)


def ulp(value: np.ndarray, dtype: Any) -> np.ndarray:
    """One unit in the last place of `dtype` at each value."""
    import torch

    info = torch.finfo(dtype)
    size = np.clip(np.nan_to_num(np.abs(value), nan=1.0), info.smallest_normal, info.max)
    return np.asarray(np.exp2(np.floor(np.log2(size))) * info.eps)


@dataclass
class Cell:
    """One backend, strategy, operation and dtype: what was run, and the worst of it.

    Attributes:
        backend, strategy, operation, dtype: What was checked.
        cases: Inputs run.
        refused: Inputs that the planner refused, which is no failure.
        error, pytorch_error: Largest absolute error of a finite output; ours, and PyTorch's on the same inputs.
        ulps, pytorch_ulps: The same in ulps of the output dtype at the element with each input's largest error.
        of_allowed: Largest error over what the contract allows there; right up to 1.
        slack: Ulps that the contract adds to PyTorch's largest error.
        failures: What went wrong, one sentence an input.
        reason: Why nothing was run; None when something was.
    """

    backend: str
    strategy: str
    operation: str
    dtype: str
    cases: int = 0
    refused: int = 0
    error: float = 0.0
    pytorch_error: float = 0.0
    ulps: float = 0.0
    pytorch_ulps: float = 0.0
    of_allowed: float = 0.0
    slack: int = 1
    failures: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def result(self) -> str:
        """One of "pass", "fail", and "skipped" where nothing was run."""
        if self.failures:
            return "fail"
        return "pass" if self.cases else "skipped"

    def add(self, case: Case, oracle: Exact) -> None:
        """Run one input and keep what is worst."""
        try:
            call = getattr(api, self.operation)
            ours = call(oracle.x, case.dim, backend=self.backend, strategy=self.strategy)
        except PlanError as error:
            self.refused += 1
            self.reason = self.reason if self.cases else _last_line(error)
            return
        except Exception as error:  # whatever a kernel raises is a failure to report, not the end of the check
            self.cases, self.reason = self.cases + 1, None
            self.failures.append(f"{case.name}: {type(error).__name__}: {_last_line(error)}")
            return
        self.cases, self.reason = self.cases + 1, None
        if failure := self._compare(ours, oracle):
            self.failures.append(f"{case.name}: {failure}")

    def _compare(self, ours: Any, oracle: Exact) -> str | None:
        theirs, finite = oracle.theirs, oracle.finite
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"gives {tuple(ours.shape)} {ours.dtype}; PyTorch gives {tuple(theirs.shape)} {theirs.dtype}"
        if not oracle.x.equal(oracle.before) and not oracle.x.nan_to_num(nan=3.0).equal(
            oracle.before.nan_to_num(nan=3.0)
        ):
            return "the input was changed"
        wide = _wide(ours)
        self._keep_worst("pytorch_error", "pytorch_ulps", np.abs(oracle.theirs_wide - oracle.exact)[finite], oracle)
        special = (wide == oracle.theirs_wide) | np.isnan(wide) & np.isnan(oracle.theirs_wide)
        wrong = np.where(finite, ~np.isfinite(wide), ~special)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            there = f"{float(wide[first])} at {first}, where PyTorch has {float(oracle.theirs_wide[first])}"
            return f"{there}: {int(wrong.sum())} of {wide.size} outputs are wrong"
        error = np.abs(wide - oracle.exact)[finite]
        self._keep_worst("error", "ulps", error, oracle)
        part = float(np.max(error / (oracle.allowed + self.slack * oracle.ulp[finite]), initial=0))
        self.of_allowed = max(self.of_allowed, part)
        if part > 1:
            return f"error {float(np.max(error)):.2e}; PyTorch's own {oracle.allowed:.2e}"
        return None

    def _keep_worst(self, name: str, ulps_name: str, error: np.ndarray, oracle: Exact) -> None:
        if not error.size:
            return
        worst = int(np.argmax(error))
        found = {name: error[worst], ulps_name: error[worst] / oracle.ulp[oracle.finite][worst]}
        for key, value in found.items():
            setattr(self, key, max(getattr(self, key), float(value)))

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {**vars(self), "result": self.result}


def _last_line(error: Exception) -> str:
    """The planner's reason for the one strategy that was asked for, or an error's own last words."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # The planner's lines begin with the strategy, which is known here.
    return re.sub(r"^\s*\w+/\w+: ", "", lines[-1]).strip()


def pairs(backends: Sequence[str] = (), strategies: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(backend, strategy) of the planner's table that match; all where nothing is named.

    Raises:
        ValueError: a name is unknown, or no pair is left.
    """
    for what, names, known in (
        ("backend", backends, [row[0] for row in TABLE]),
        ("strategy", strategies, [row[1] for row in TABLE]),
    ):
        check_names(what, names, known)
    found = [(b, s) for b, s, _ in TABLE if (not backends or b in backends) and (not strategies or s in strategies)]
    if not found:
        raise ValueError(f"{' and '.join(backends)} has no strategy {' or '.join(strategies)}")
    return found


def check_names(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ValueError that lists `known` for the first name that is not one of them."""
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(dict.fromkeys(known))}")


def verify(
    *,
    backends: Sequence[str] = (),
    strategies: Sequence[str] = (),
    operations: Sequence[str] = (),
    dtypes: Sequence[str] = (),
    device: str = "cpu",
    quick: bool = False,
    progress: Progress | None = None,
) -> list[Cell]:
    """Check what is named, or everything: a cell for each backend, strategy, operation and dtype.

    A backend that cannot be used here has no cells.  Triton without a GPU needs TRITON_INTERPRET=1 in
    the environment before Triton is imported, and leaves out the inputs that are too large for it.

    Args:
        backends, strategies, operations, dtypes: Names; empty for all.
        device: "cpu" or "cuda": where the tensors are.
        quick: A few inputs instead of all.
        progress: Called as progress(done, total) after each input.

    Raises:
        ValueError: a name is unknown.
        ImportError: torch is not installed.

    Example:
        >>> [cell] = verify(backends=["eager"], operations=["softmax"], dtypes=["float32"], quick=True)
        >>> cell.result, cell.error <= cell.pytorch_error
        ('pass', True)
    """
    import torch

    check_names("operation", operations, list(FORWARD))
    check_names("dtype", dtypes, list(ITEMSIZE))
    operations, dtypes = operations or list(FORWARD), dtypes or list(ITEMSIZE)
    chosen = [pair for pair in pairs(backends, strategies) if registry.unavailable(pair[0]) is None]
    slow = "triton" in dict(chosen) and bool(registry.load("triton").interpreted())
    table = [
        Cell(b, s, operation, dtype, slack=INTERPRETER_ULPS if slow and b == "triton" else 1)
        for b, s in chosen
        for operation in operations
        for dtype in dtypes
    ]
    steps = list(_steps(table, quick, slow))
    # The interpreter computes in NumPy, which warns of the infinities and NaNs that are meant here.
    with torch.no_grad(), torch.autocast(torch.device(device).type, enabled=False), np.errstate(all="ignore"):
        for done, (case, group) in enumerate(steps, 1):
            oracle = Exact.of(case, group[0].operation, group[0].dtype, device)
            for cell in group:
                cell.add(case, oracle)
            if progress is not None:
                progress(done, len(steps))
    return table


def _steps(table: Sequence[Cell], quick: bool, slow: bool) -> Iterator[tuple[Case, list[Cell]]]:
    """Every input with the cells that take it: those of one operation and dtype share its exact result."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in table:
        groups.setdefault((cell.operation, cell.dtype), []).append(cell)
    for group in groups.values():
        for case in CASES:
            takes = [cell for cell in group if not (case.heavy and slow and cell.backend == "triton")]
            if takes and (case.quick or not quick):
                yield case, takes
