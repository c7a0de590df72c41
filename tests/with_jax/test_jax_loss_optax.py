"""`onlinesoftmax.jax.cross_entropy` against the two functions of optax with the same arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from compared_programs import Call, assert_all_close, both, number
from exact_losses import classes, logits

import onlinesoftmax.jax as osj


@pytest.mark.parametrize("axis", [-1, 1, (2, 0)], ids=str)
def test_optax_with_integer_labels(axis: Any) -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    x, rng = logits(3, 4, 5), np.random.default_rng(5)
    axes = [a % 3 for a in (axis if isinstance(axis, tuple) else (axis,))]
    batch = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    target = classes(*batch, cols=int(np.prod([x.shape[a] for a in axes])))
    of_rows = jnp.asarray(rng.random(batch) < 0.5)
    # A label that is kept: optax reads the score of a label that is not.
    of_classes = jnp.asarray(rng.random(x.shape) < 0.5) | jax.nn.one_hot(target, 5, dtype=bool) if axis == -1 else None

    def of(f: Call) -> Call:
        loss = lambda x: tuple(f(x, target, axis, where) for where in (None, of_rows, of_classes))  # noqa: E731  two uses
        return lambda x: (loss(x), jax.grad(number(loss))(x))

    assert_all_close(both(of(osj.cross_entropy), of(optax.softmax_cross_entropy_with_integer_labels), x))


def test_optax_with_weights_of_classes() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    x, q = logits(3, 4, 5), jax.nn.softmax(logits(3, 4, 5, seed=3))
    rng = np.random.default_rng(6)
    of_classes, of_rows = jnp.asarray(rng.random((3, 4, 5)) < 0.5), jnp.asarray(rng.random((4, 5)) < 0.5)
    for axis, where in ((None, None), ((0, 2), None), (-1, of_classes), (0, of_rows)):
        ours = partial(osj.cross_entropy, axis=axis, where=where)
        theirs = partial(optax.softmax_cross_entropy, axis=axis, where=where)
        numbers = (lambda x, q, f=f: (jnp.sum(jnp.sin(f(x, q))), f(x, q)) for f in (ours, theirs))
        found = both(*(jax.value_and_grad(f, (0, 1), has_aux=True) for f in numbers), x, q)
        (value, (dx, dq)), (their_value, (their_dx, their_dq)) = found
        # A weight in a row without a class has the gradient NaN in optax.
        their_dq = jnp.where(jnp.isnan(their_dq), dq, their_dq)
        assert_all_close(((value, dx, dq), (their_value, their_dx, their_dq)))
    smoothed = lambda x, q: optax.softmax_cross_entropy(x, optax.smooth_labels(q, 0.2))  # noqa: E731  one use
    assert_all_close(both(partial(osj.cross_entropy, label_smoothing=0.2), smoothed, x, q))
