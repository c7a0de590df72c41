"""Several outputs of one call: the elements and every per-row output, from each kernel strategy.

The outputs are compared with numbers of 80 bits.  A result may have PyTorch's own error on the same input, and one unit
in the last place besides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from contract import GPU, OPERATIONS, PLANS, assert_as_good_as_pytorch, outliers
from onlinesoftmax.core.call import Call, Settings
from onlinesoftmax.core.options import ScoreOptions
from onlinesoftmax.core.task import Choice
from onlinesoftmax.lab import verify as verification
from onlinesoftmax.ops import FORWARD
from onlinesoftmax.ops import OPERATIONS as DECLARATIONS
from onlinesoftmax.torch import eager, prepare

PLAIN = tuple(name for name in FORWARD if not DECLARATIONS[name].has_target)
"""Operations without a target; tests/torch/test_losses.py and test_token_logprobs.py hold those with one."""

DEVICE = "cuda" if GPU else "cpu"
OUTPUTS = ("y", "lse", "m", "l", "entropy")
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def aligned(dtype: torch.dtype) -> torch.Tensor:
    return outliers(3, 72, dtype=dtype, device=DEVICE)


def unaligned(dtype: torch.dtype) -> torch.Tensor:
    return outliers(5, 37, dtype=dtype, device=DEVICE)


def sliced(dtype: torch.dtype) -> torch.Tensor:
    return outliers(4, 3, 90, dtype=dtype, device=DEVICE)[1:, :, 1:80]


def long(dtype: torch.dtype) -> torch.Tensor:
    """Rows of several tiles and several slices."""
    return outliers(2, 20011, dtype=dtype, device=DEVICE)


def special(dtype: torch.dtype) -> torch.Tensor:
    x = outliers(7, 70, dtype=dtype, device=DEVICE)
    inf, nan = torch.inf, torch.nan
    x[1], x[2, 3], x[3, 5], x[4, 7] = -inf, -inf, inf, nan
    x[5, :66] = -inf
    x[6, 8:11] = torch.tensor([inf, nan, -inf], dtype=dtype)
    return x


CONTIGUOUS = (aligned, unaligned, sliced, long, special)


def wide(t: torch.Tensor) -> Any:
    return t.detach().double().cpu().numpy().astype(np.longdouble)


def run(plan: str, operation: str, x: torch.Tensor, dim: int, options: ScoreOptions | None = None) -> Any:
    """All outputs by name."""
    settings = Settings(dim, None, False, Choice(*plan.split("/")))
    return dict(zip(OUTPUTS, prepare.run(Call(DECLARATIONS[operation], x, settings, options), OUTPUTS), strict=True))


def row_outputs(z: Any, xp: Any, dim: int) -> dict[str, Any]:
    """The per-row outputs for scores z, by PyTorch or by NumPy."""
    m = z.max(dim) if xp is np else z.amax(dim)
    e = xp.exp(z - xp.expand_dims(m, dim)) if xp is np else torch.exp(z - m.unsqueeze(dim))
    l = e.sum(dim)
    lse = m + xp.log(l)
    mean = xp.where(e > 0, z * e, xp.zeros_like(e)).sum(dim) / l
    return {"lse": lse, "m": m, "l": l, "entropy": lse - mean, "mean": mean}


def check_row_outputs(got: dict[str, torch.Tensor], z: torch.Tensor, dim: int) -> None:
    """The per-row outputs against those of the scores z."""
    accumulator = torch.float64 if z.dtype == torch.float64 else torch.float32
    with np.errstate(all="ignore"):
        exact = row_outputs(wide(z), np, dim)
    theirs = row_outputs(z.to(accumulator), torch, dim)
    lse = exact["lse"]
    finite = np.isfinite(lse)
    largest = torch.finfo(accumulator).max
    # A row of only -inf, and a row with +inf, have an exponent sum that PyTorch's arithmetic does not give.
    top = wide(z).max(dim)
    empty, infinite = top == -np.inf, top == np.inf
    lse[empty], lse[infinite] = -np.inf, np.inf
    for name in OUTPUTS[1:]:
        assert got[name].dtype == accumulator
        assert got[name].shape == tuple(lse.shape)
    for name, in_empty, in_infinite in (("lse", -np.inf, np.inf), ("m", -largest, largest), ("l", 0, np.inf)):
        ours = wide(got[name])
        np.testing.assert_array_equal(ours[empty], in_empty, name)
        np.testing.assert_array_equal(ours[infinite], in_infinite, name)
    with_nan = np.isnan(top)
    for name in ("lse", "l", "entropy"):
        assert np.isnan(wide(got[name])[with_nan]).all(), name
    np.testing.assert_array_equal(wide(got["m"])[finite], exact["m"][finite])
    for name in ("lse", "l", "entropy"):
        # Entropy is a difference of two numbers, so its unit is that of the two.
        terms = (lse, exact["mean"]) if name == "entropy" else (exact[name],)
        unit = sum(verification.ulp(term[finite], accumulator) for term in terms)
        if accumulator == torch.float64:
            # No wider sum is left: a sum of n terms as a tree rounds log2(n) times.
            unit = unit * np.ceil(np.log2(z.shape[dim]))
        ours, own = (np.abs(wide(t[name])[finite] - exact[name][finite]) for t in (got, theirs))
        allowed = np.max(own, initial=0)
        assert np.all(ours <= allowed + unit), f"{name}: error {np.max(ours):.3e}, PyTorch's own {allowed:.3e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", PLAIN)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if not plan.endswith("/column")])
def test_elements_and_rows_in_one_call(plan: str, operation: str, dtype: torch.dtype) -> None:
    for make in CONTIGUOUS:
        x = make(dtype)
        if plan == "cuda/row" and (make, dtype) == (long, torch.float64):
            # The registers of one block do not hold it.
            continue
        got = run(plan, operation, x, -1)
        assert_as_good_as_pytorch(got["y"], operation, x, -1)
        check_row_outputs(got, x, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operation", PLAIN)
@pytest.mark.parametrize("plan", PLANS)
def test_rows_that_lie_side_by_side(plan: str, operation: str, dtype: torch.dtype) -> None:
    """A softmax dimension that is strided: one tile of columns, several, and rows with special values."""
    cases = [(outliers(2, 5, 37, 8, dtype=dtype, device=DEVICE)[:, 0], 1)]
    if GPU or plan.endswith("/column"):
        cases += [(outliers(5000, 8, dtype=dtype, device=DEVICE), 0), (special(dtype).repeat(2, 1).T.contiguous(), 0)]
    for x, dim in cases:
        got = run(plan, operation, x, dim)
        assert_as_good_as_pytorch(got["y"], operation, x, dim)
        check_row_outputs(got, x, dim)


@pytest.mark.parametrize("plan", [plan for plan in PLANS if not plan.endswith("/column")])
def test_row_outputs_are_of_scores(plan: str) -> None:
    x = outliers(6, 40, dtype=torch.float32, device=DEVICE)
    mask = torch.rand(40, generator=torch.Generator().manual_seed(3)).to(DEVICE) > 0.5
    bias = outliers(6, 40, dtype=torch.float32, device=DEVICE).flip(0)
    options = ScoreOptions(scale=-0.5, softcap=20.0, bias=bias, mask=mask, causal=True)
    got = run(plan, "softmax", x, -1, options)
    z, _ = eager.scores_of(x, -1, options, x.dtype)
    check_row_outputs(got, z, -1)
    torch.testing.assert_close(got["y"], OPERATIONS["softmax"](z, -1))
