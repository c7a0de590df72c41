"""jax.export with a number of rows that is a symbol, for CPUs and GPUs in one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib")

import jax
import jax.numpy as jnp
from jax import export

import onlinesoftmax as osm

COLS = 40
X, LABELS = np.random.default_rng(0).standard_normal((5, COLS)).astype(np.float32), np.arange(5, dtype=np.int32)

CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "softmax": (
        lambda x, t: osm.jax.softmax(x, where=jnp.arange(COLS) < 9),
        lambda x, t: jax.nn.softmax(x, where=jnp.arange(COLS) < 9),
    ),
    "log_softmax of columns": (lambda x, t: osm.jax.log_softmax(x, 0), lambda x, t: jax.nn.log_softmax(x, 0)),
    "logsumexp of all": (lambda x, t: osm.jax.logsumexp(x), lambda x, t: jax.nn.logsumexp(x)),
    "cross_entropy": (
        lambda x, t: osm.jax.cross_entropy(x, t, reduction="mean", ignore_index=1),
        lambda x, t: (
            ((jax.nn.logsumexp(x, -1) - jnp.take_along_axis(x, t[:, None], 1)[:, 0]) * (t != 1)).sum() / (t != 1).sum()
        ),
    ),
    "token_logprobs": (
        lambda x, t: osm.jax.token_logprobs(x, t, scale=2.0).entropy,
        lambda x, t: -(jax.nn.softmax(2 * x) * jax.nn.log_softmax(2 * x)).sum(-1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_program_for_any_number_of_rows(name: str) -> None:
    ours, theirs = CALLS[name]
    (rows,) = export.symbolic_shape("rows")
    arguments = jax.ShapeDtypeStruct((rows, COLS), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)

    def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, t: (function(x, t), jax.grad(lambda x: jnp.sum(function(x, t) ** 2))(x))

    program = export.export(jax.jit(with_gradient(ours)), platforms=("cpu", "cuda"))(*arguments)
    assert program.platforms == ("cpu", "cuda")
    for found, want in zip(program.call(X, LABELS), with_gradient(theirs)(X, LABELS), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-6)


def test_a_forced_kernel_needs_sizes_that_are_known() -> None:
    (rows,) = export.symbolic_shape("rows")
    argument = jax.ShapeDtypeStruct((rows, COLS), jnp.float32)
    for how in ({"backend": "pallas"}, {"strategy": "looped"}):
        with pytest.raises(osm.PlanError, match="softmax: a kernel needs sizes that are known"):
            export.export(jax.jit(lambda x, how=how: osm.jax.softmax(x, **how)), platforms=("cuda",))(argument)
    export.export(jax.jit(lambda x: osm.jax.softmax(x, backend="eager", strategy="row")))(argument)
