"""Rows of a NumPy array, some at a time, in float64: their scores, and the values for the formulas of the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.arrays import Array, namespace
from ..core.options import ScoreOptions
from ..core.reference import with_sums
from ..core.state import shift
from . import scores_of

ELEMENTS = 1 << 18
"""Elements that are computed at a time: their float64 arrays lie in a processor's cache."""


def shifted(
    operation: str, z: Array, axis: int, beside: dict[str, Any], outputs: tuple[str, ...]
) -> tuple[dict[str, Array], Array]:
    """(values for the formulas of scores less their maximum, that maximum): an offset of the scores costs no digits."""
    xp = namespace(z)
    m = xp.max(z, axis)
    least = shift(xp, m)
    return with_sums(operation, xp, {"x": z - least, "m": m - least, **beside}, axis, *outputs), least


def float64_scores(x: Array, cut: Any, options: ScoreOptions | None) -> Array:
    """The scores of some rows in float64."""
    wide = x[cut].astype(np.float64)
    if options is None:
        return wide
    arrays = {name: part(getattr(options, name), x, cut) for name in ("scale", "mask")}
    return scores_of(wide, options._replace(**arrays))


def part(t: Any, x: Array, cut: Any) -> Any:
    """The elements of a score option that belong to some rows of x."""
    return np.broadcast_to(t, x.shape)[cut] if isinstance(t, np.ndarray) and t.ndim else t


def cuts(shape: tuple[int, ...], axis: int) -> Iterator[tuple[Any, Any]]:
    """(place of the elements, place of the rows) of a few rows at a time, cut along the longest other dimension."""
    elements, others = math.prod(shape), [i for i in range(len(shape)) if i != axis]
    if not others:
        if elements:
            yield (slice(None),), ()
        return
    along = max(others, key=lambda i: shape[i])
    step = max(1, ELEMENTS * shape[along] // max(1, elements))
    for first in range(0, shape[along] if elements else 0, step):
        cut = [slice(None)] * len(shape)
        cut[along] = slice(first, first + step)
        yield tuple(cut), tuple(cut[:axis] + cut[axis + 1 :])
