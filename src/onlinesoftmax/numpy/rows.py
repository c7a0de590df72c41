"""Rows of a NumPy array, some at a time, in float64: their scores, and the values for the formulas of the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.arrays import Array, namespace
from ..core.options import ScoreOptions
from ..core.state import shift
from ..ops.reference import with_sums
from . import scores_of

ELEMENTS = 1 << 18
"""Elements that are computed at a time: their float64 arrays lie in a processor's cache."""


def shifted(
    operation: str, z: Array, axis: int, beside: dict[str, Any], outputs: tuple[str, ...]
) -> tuple[dict[str, Array], Array]:
    """(inputs of the formulas, offset).

    The offset is the row maximum limited to finite numbers, and is subtracted from the scores to keep precision.
    """
    xp = namespace(z)
    m = xp.max(z, axis)
    offset = shift(xp, m)
    return with_sums(operation, xp, {"x": z - offset, "m": m - offset, **beside}, axis, *outputs), offset


def float64_scores(x: Array, element_index: Any, options: ScoreOptions | None) -> Array:
    """The scores of some rows in float64."""
    wide = x[element_index].astype(np.float64)
    if options is None:
        return wide
    arrays = {name: part(getattr(options, name), x, element_index) for name in ("scale", "mask")}
    return scores_of(wide, options._replace(**arrays))


def part(t: Any, x: Array, element_index: Any) -> Any:
    """The elements of a score option that belong to some rows of x."""
    return np.broadcast_to(t, x.shape)[element_index] if isinstance(t, np.ndarray) and t.ndim else t


def cuts(shape: tuple[int, ...], axis: int) -> Iterator[tuple[Any, Any]]:
    """(element_index, row_index) of a few rows at a time: index of these rows in the logits, and in per-row arrays.

    The rows are cut along the longest dimension other than `axis`.
    """
    elements, others = math.prod(shape), [i for i in range(len(shape)) if i != axis]
    if not others:
        if elements:
            yield (slice(None),), ()
        return
    along = max(others, key=lambda i: shape[i])
    step = max(1, ELEMENTS * shape[along] // max(1, elements))
    for first in range(0, shape[along] if elements else 0, step):
        index = [slice(None)] * len(shape)
        index[along] = slice(first, first + step)
        yield tuple(index), tuple(index[:axis] + index[axis + 1 :])
