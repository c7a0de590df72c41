"""Sparsemax, max(z - tau, 0) with the tau for which each row sums to 1, and its gradient.

The operand x of the gradient is the saved output, and dy is its gradient.

Source: Martins and Astudillo, "From Softmax to Sparsemax", arXiv:1602.02068.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onlinesoftmax.core.arrays import Array
from onlinesoftmax.core.declaration import ALL_OPTIONS, DY, GRADIENT_OPTIONS, Operation, Output, X
from onlinesoftmax.core.formulas import Formula

KERNELS = "sparsemax.kernels"

STEPS = 70
"""Halvings of the interval that holds tau: more than long double has bits."""


def _sparsemax(xp: Any, x: Array, axis: int, **_: Array) -> Array:
    m = xp.max(x, axis)
    # Less the maximum, so that tau lies between -1 and 0.
    w = x - m
    low = xp.where(m == m, -1.0, m)
    high = low + 1
    for _step in range(STEPS):
        tau = (low + high) / 2
        sums_to_more = xp.sum(xp.where(w > tau, w - tau, 0.0), axis) > 1
        low, high = xp.where(sums_to_more, tau, low), xp.where(sums_to_more, high, tau)
    tau = (xp.sum(xp.where(w > low, w, 0.0), axis) - 1) / xp.sum(xp.astype(w > low, x.dtype), axis)
    y = xp.where(w > tau, w - tau, 0.0)
    return xp.where((m == m) & ~xp.isinf(m), y, np.nan)


def _mean_of_support(xp: Any, x: Array, dy: Array, axis: int) -> Array:
    return xp.sum(xp.where(x > 0, dy, 0.0), axis) / xp.sum(xp.astype(x > 0, dy.dtype), axis)


def _gradient(xp: Any, x: Array, dy: Array, axis: int, **_: Array) -> Array:
    # 0 * x is NaN in the rows that have no sparsemax.
    return xp.where(x > 0, dy - _mean_of_support(xp, x, dy, axis), 0.0 * x)


FORWARD = Operation(
    "sparsemax", (X,), (), (Output("y", "element"),), ALL_OPTIONS, Formula({}, {"y": _sparsemax}),
    gradient_name="sparsemax_backward", saved=("y",), backends=(), kernels=KERNELS,
)  # fmt: skip

BACKWARD = Operation(
    "sparsemax_backward", (X, DY), (), (Output("y", "element"),), GRADIENT_OPTIONS,
    Formula({}, {"y": _gradient}, lambda xp, x, dy, axis, **_: (dy, _mean_of_support(xp, x, dy, axis))),
    scores=False, backends=(), kernels=KERNELS,
)  # fmt: skip
