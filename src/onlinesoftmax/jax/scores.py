"""Scores in JAX's own array functions, for the formulas in ops.py and targets.py, and for their derivatives.

`options` has ARRAY in the place of each array, and `arrays` has the arrays in the order of `options.arrays`.
"""

from __future__ import annotations

import jax.numpy as jnp

from ..core.arrays import Array, accumulator
from ..core.options import Functions, ScoreOptions
from ..core.options import scores as scores_of

FUNCTIONS = Functions(jnp.tanh, jnp.where)
"""The functions with which XLA computes the score formula of core/options.py."""


def scores(x: Array, arrays: tuple[Array, ...], options: ScoreOptions) -> Array:
    """The scores of logits x, in float32 or float64."""
    return scores_of(FUNCTIONS, x.astype(accumulator(x)), filled(x, arrays, options))


def filled(x: Array, arrays: tuple[Array, ...], options: ScoreOptions) -> ScoreOptions:
    """The options with arrays in place of ARRAY, in the dtype of the computation."""
    wide = accumulator(x)
    return options.filled(t if t.dtype == jnp.bool_ else t.astype(wide) for t in arrays)


def peak(x: Array, z: Array, options: ScoreOptions) -> Array:
    """The maximum score of each row.  The maximum of 16-bit logits is exact, and several times as fast as of scores."""
    if options.plain:
        return jnp.max(x, axis=-1, keepdims=True).astype(z.dtype)
    return jnp.max(z, axis=-1, keepdims=True)


def shift(m: Array) -> Array:
    """The finite number nearest to m, which is subtracted before exp."""
    return jnp.clip(m, jnp.finfo(m.dtype).min, jnp.finfo(m.dtype).max)


def masked(y: Array, arrays: tuple[Array, ...], options: ScoreOptions, fill: float) -> Array:
    """The output, with a number in place of elements where the mask is False."""
    mask = options.filled(arrays).mask
    return y if mask is None else jnp.where(mask, y, fill)
