"""Gradients of masked rows by the CUDA kernels, run by the host (tests/cuda_simulator.py).

A masked element has no gradient: not in a fully masked row, and not in a row that holds NaN.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuda_machine import COMPILER
from cuda_simulator import simulate
from cuda_targets import PROPOSALS, STRATEGY_COLS, aligned, small_plan
from onlinesoftmax.core.task import Flags, TensorSpec, row_spec, task_of
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS

GRADIENTS = ("softmax_backward", "log_softmax_backward", "logsumexp_backward")

ROWS = 4


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed")
@pytest.mark.parametrize("operation", GRADIENTS)
@pytest.mark.parametrize("strategy", PROPOSALS)
def test_masked_elements_have_no_gradient(strategy: str, operation: str, folder: Path) -> None:
    declared, cols, rng = OPERATIONS[operation], STRATEGY_COLS[strategy][0], np.random.default_rng(0)
    x = rng.standard_normal((ROWS, cols))
    mask = rng.uniform(size=x.shape) < 0.5
    mask[1] = False
    mask[2, 0], x[2, 0] = True, np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.log(np.exp(np.where(mask, x, -np.inf)).sum(1))
        log_p = np.where(mask, x, -np.inf) - lse[:, None]
        p = np.where(mask, np.exp(log_p), 0)
    saved = {"softmax_backward": np.exp(log_p), "log_softmax_backward": log_p, "logsumexp_backward": x}[operation]
    elements, per_row = TensorSpec((cols, 1), "float32"), row_spec((ROWS, cols), 1, "float32")
    tensors = {"x": elements, "y": elements, "mask": TensorSpec((cols, 1), "bool")}
    tensors |= {one.name: per_row if one.kind == "row" else elements for one in declared.operands[1:]}
    task = task_of(declared, ("y",), (ROWS, cols), 1, tensors, Flags(frozenset(), False, False, wide=True))
    given = {"x": saved, "mask": mask, "y": np.full(x.shape, 1e4), "lse": lse}
    given["dy"] = rng.standard_normal(ROWS if "dy" in declared.row_operands else x.shape)
    arrays = {name: aligned(np.ascontiguousarray(given[name], dtype)) for name, dtype in task.dtypes.items()}
    request = Request(task, small_plan(strategy, ROWS, cols, "float32", peel=True, terms=False))
    simulate(request, arrays, {}, folder)
    found, dy = arrays["y"], given["dy"] if given["dy"].ndim == 2 else given["dy"][:, None]
    right = {
        "softmax_backward": p * (dy - (p * dy).sum(1, keepdims=True)),
        "log_softmax_backward": dy - p * dy.sum(1, keepdims=True),
        "logsumexp_backward": p * dy,
    }[operation]
    assert (found[~mask] == 0).all()
    assert np.isnan(found[2][mask[2]]).all()
    np.testing.assert_allclose(found[0][mask[0]], right[0][mask[0]], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[3][mask[3]], right[3][mask[3]], rtol=1e-5, atol=1e-6)
