"""The contract: one suite of cases that every backend × strategy × operation passes.

A result is right when its error against float64 is no larger than PyTorch's own on the same input,
plus one unit in the last place of the output dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import onlinesoftmax as osm
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.planner.strategies import TABLE

OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": osm.softmax,
    "log_softmax": osm.log_softmax,
    "logsumexp": osm.logsumexp,
}

GPU = torch.cuda.is_available()

# CUDA kernels have no interpreter: without a GPU they are compiled, by tests/kernels/test_cuda.py.
PLANS = tuple(
    f"{backend}/{strategy}" for backend, strategy, _ in TABLE if backend != "eager" and (GPU or backend != "cuda")
)
"""Every kernel strategy that runs here, as backend/strategy."""

ROW_PLANS = tuple(plan for plan in PLANS if plan != "triton/column")
"""Those that take rows whose elements are neighbours."""


def forced(plan: str) -> dict[str, str]:
    """The arguments that force one of PLANS."""
    backend, _, strategy = plan.partition("/")
    return {"backend": backend, "strategy": strategy}


SIZES = (1, 2, 3, 31, 33, 127, 1000, 1023, 1025, 50257)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def outliers(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal numbers, one in a hundred of them times 20: some outputs matter, most underflow."""
    return verification.outliers(torch, *shape).to(dtype).to(device)


@dataclass(frozen=True)
class Case:
    """One input: `make(dtype, device)` gives the tensor, and the softmax runs over `dim`."""

    name: str
    make: Callable[[torch.dtype, str], torch.Tensor]
    dim: int = -1

    def __str__(self) -> str:
        return self.name


def _sized(cols: int) -> Case:
    return Case(f"cols={cols}", lambda dtype, device: outliers(3, cols, dtype=dtype, device=device))


def _view(name: str, shape: tuple[int, ...], view: Callable[[torch.Tensor], torch.Tensor], dim: int = -1) -> Case:
    return Case(name, lambda dtype, device: view(outliers(*shape, dtype=dtype, device=device)), dim)


# More rows side by side than one program of `column` takes; the interpreter takes a second for some hundred rows.
WIDE = (2, 100, 130) if GPU else (1, 100, 66)

SIZE_CASES = [_sized(cols) for cols in SIZES]

SHAPE_CASES = [
    _view("1d", (257,), lambda x: x, 0),
    _view("many-short-rows", (130, 5), lambda x: x),
    _view("3d-middle", (3, 17, 9), lambda x: x, 1),
    _view("3d-middle-wide", WIDE, lambda x: x, -2),
    _view("4d-first", (33, 2, 3, 8), lambda x: x, 0),
    _view("5d-last", (2, 3, 2, 2, 40), lambda x: x, 4),
    _view("5d-permuted", (2, 3, 4, 5, 33), lambda x: x.permute(2, 0, 4, 1, 3), 2),
    _view("5d-sliced", (3, 4, 3, 5, 40), lambda x: x[1:, ::2, :, 1:4, 3:36]),
    _view("transposed", (65, 24), lambda x: x.t()),
    _view("transposed-dim0", (24, 65), lambda x: x.t(), 0),
    _view("sliced-columns", (7, 90), lambda x: x[:, 1:80]),
    _view("strided-columns", (7, 90), lambda x: x[:, ::3]),
    _view("expanded-rows", (1, 50), lambda x: x.expand(6, 50)),
    _view("expanded-columns", (6, 1), lambda x: x.expand(6, 50)),
    _view("unaligned-start", (1025,), lambda x: x[1:].view(8, 128)),
    _view("column-tall", (700, 48), lambda x: x, 0),
]


def _special(name: str, *values: float) -> Case:
    def make(dtype: torch.dtype, device: str) -> torch.Tensor:
        x = outliers(4, 70, dtype=dtype, device=device)
        x[1, 3 : 3 + len(values)] = torch.tensor(values, dtype=dtype, device=device)
        x[2] = values[0]
        return x

    return Case(name, make)


SPECIAL_CASES = [
    _special("-inf", -torch.inf),
    _special("+inf", torch.inf),
    _special("nan", torch.nan),
    _special("+inf-and-nan", torch.inf, torch.nan),
    _special("+inf-and--inf", torch.inf, -torch.inf),
    _special("-inf-and-nan", -torch.inf, torch.nan),
    Case(
        "strided-specials",
        lambda dtype, device: SPECIAL_CASES[2].make(dtype, device).repeat(1, 1, 9 if GPU else 1).permute(2, 1, 0),
        1,
    ),
    _view("-inf-head", (3, 609), lambda x: torch.where(torch.arange(609, device=x.device) < 600, -torch.inf, x)),
]  # fmt: skip


def assert_as_good_as_pytorch(
    ours: torch.Tensor, operation: str, x: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> None:
    """The contract's one assertion."""
    torch_function = getattr(torch, operation)
    theirs = torch_function(x if dtype is None else x.to(dtype), dim)
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    with np.errstate(all="ignore"):
        exact = verification.exact_result(operation, x.double().cpu().numpy().astype(np.longdouble), dim)
    ours_wide, theirs_wide = (t.double().cpu().numpy().astype(np.longdouble) for t in (ours, theirs))
    np.testing.assert_array_equal(np.isnan(ours_wide), np.isnan(theirs_wide))
    finite = np.isfinite(exact) & np.isfinite(theirs_wide)
    np.testing.assert_array_equal(ours_wide[~finite], theirs_wide[~finite])
    exact, ours_wide, theirs_wide = exact[finite], ours_wide[finite], theirs_wide[finite]
    error, allowed = np.abs(ours_wide - exact), np.max(np.abs(theirs_wide - exact), initial=0)
    excess = error - allowed - verification.ulp(exact, ours.dtype)
    assert np.all(excess <= 0), f"error {np.max(error):.3e}, PyTorch's own {allowed:.3e}"


def run_case(case: Case, operation: str, backend: str, strategy: str, dtype: torch.dtype, device: str) -> None:
    """One cell of the contract: a fresh output, then a poisoned one between guards."""
    x = case.make(dtype, device)
    before = x.clone()
    call = OPERATIONS[operation]
    ours = call(x, case.dim, backend=backend, strategy=strategy)
    assert ours.is_contiguous()
    assert_as_good_as_pytorch(ours, operation, x, case.dim)

    guard = 64
    buffer = torch.full((ours.numel() + 2 * guard,), torch.nan, dtype=dtype, device=device)
    buffer[:guard] = buffer[guard + ours.numel() :] = 7.0
    out = buffer[guard : guard + ours.numel()].view(ours.shape)
    assert call(x, case.dim, out=out, backend=backend, strategy=strategy) is out
    assert torch.equal(out.nan_to_num(nan=3.0), ours.nan_to_num(nan=3.0))
    assert (buffer[:guard] == 7).all()
    assert (buffer[guard + ours.numel() :] == 7).all()
    assert torch.equal(x.nan_to_num(nan=3.0), before.nan_to_num(nan=3.0)), "the input was changed"
