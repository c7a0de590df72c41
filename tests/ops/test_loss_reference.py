"""The formulas in the rooms of the losses, with which kernels are compared, against those of tests/loss_formula.py."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from loss_formula import expected_loss, expected_tokens
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.ops.reference import evaluate

ROWS, COLS = 6, 7


def numbers(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def state_of(x: Any) -> dict[str, Any]:
    m = x.max(1, keepdims=True)
    return {"m": m, "l": np.exp(x - m).sum(1, keepdims=True)}


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(("weighted", "smoothing", "z_loss"), [*itertools.product([False, True], [0, 0.1], [0, 0.03])])
def test_losses(weighted: bool, smoothing: float, z_loss: float, ignores: bool) -> None:
    x, target, dy = 3 * numbers(ROWS, COLS, seed=1), np.array([0, 6, 2, 2, 5, 1]), numbers(ROWS, 1, seed=2)
    index, weight = 2 if ignores else -100, numbers(COLS, seed=3) ** 2 if weighted else None
    counts = target != index
    given: dict[str, Any] = {"x": x, "target": target[:, None]}
    if ignores:
        given["ignore_index"] = index
    if smoothing:
        given["smoothing"] = smoothing
    if z_loss:
        given["z_loss"] = z_loss
    for reduction, output in (("none", "loss"), ("sum", "total_loss"), ("mean", "mean_loss")):
        w = weight
        if weight is not None and z_loss and reduction == "mean":
            # The callers scale the weights in this way, so that z_loss is averaged over the rows that count.
            w = weight * counts.sum() / weight[target[counts]].sum()
        if w is not None:
            given |= {"weight": w, "weight_sum": w.sum()}
        incoming = dy[:, 0] if reduction == "none" else 1.0
        options = {"weight": weight, "ignore_index": index, "label_smoothing": smoothing, "z_loss": z_loss}
        want = expected_loss(x, target, incoming, reduction=reduction, **options)
        found = evaluate("cross_entropy", namespace(x), given, 1, output)
        np.testing.assert_allclose(found.reshape(want.loss.shape), want.loss, rtol=1e-13)
        divisor = (counts.sum() if w is None else w[target[counts]].sum()) if reduction == "mean" else 1.0
        to_rows = dy if reduction == "none" else np.full((ROWS, 1), 1 / divisor)
        gradient = evaluate("cross_entropy_backward", namespace(x), {**given, **state_of(x), "dy": to_rows}, 1)
        np.testing.assert_allclose(gradient, want.gradient, rtol=1e-12, atol=1e-14)


def test_log_probabilities() -> None:
    x, index, dys = 3 * numbers(ROWS, COLS, seed=4), np.array([0, 6, 2, 7, -1, 1])[:, None], numbers(3, ROWS, 1, seed=5)
    want = expected_tokens(x, index, 1, [dys[0], dys[1, :, 0], dys[2, :, 0]])
    given = {"x": x, "target": index}
    for name, output in (("y", want.logprob[:, 0]), ("entropy", want.entropy), ("lse", want.lse)):
        np.testing.assert_allclose(evaluate("token_logprobs", namespace(x), given, 1, name)[:, 0], output, rtol=1e-13)
    more = {"dy": dys[0], "dentropy": dys[1], "dlse": dys[2], "entropy": want.entropy[:, None]}
    gradient = evaluate("token_logprobs_backward", namespace(x), {**given, **state_of(x), **more}, 1)
    np.testing.assert_allclose(gradient, want.gradient, rtol=1e-12, atol=1e-14)
