"""The recurrence in Pallas and the formulas of the operations: plain JAX, under the table of laws."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp

from laws import LAWS, Float64, Law
from onlinesoftmax.kernels.pallas import formulas, state
from pairs import with_every_pair


class PallasAlgebra:
    """The functions of kernels/pallas/state.py and formulas.py: plain JAX, in a kernel or not.

    States have every sum that an operation can ask for: l, zl for the entropy, and wz, a plain sum, for smoothing.
    """

    name, dtypes, examples = "pallas", ("float16", "bfloat16", "float32"), 6
    accumulators: Sequence[str] = ("weighted", "plain")
    # The score of the target, from which wz counts the scores, is 0.
    op = formulas.Op("cross_entropy", ("loss", "entropy"), numbers=(("smoothing", 0.5), ("z_loss", 0.0)))
    op = op.at_target(jnp.int32(0), jnp.float32(0), 1)

    def array(self, values: Float64, dtype: str) -> Any:
        return jnp.asarray(values.astype(jnp.dtype(dtype)))

    def numpy(self, x: Any) -> Float64:
        return np.asarray(x).astype(np.float64).reshape(-1)

    def of(self, x: Any, first: int = 0) -> state.State:
        wide = x.astype(jnp.float32)[None]
        return tuple(part.reshape(1, 1) for part in self.op.of((wide, wide))) if x.size else self.identity(x)

    def identity(self, like: Any) -> state.State:
        return self.op.identity((1, 1), jnp.float32)

    def merge(self, a: state.State, b: state.State) -> state.State:
        return self.op.merge(a, b)

    def merge_all(self, states: Sequence[state.State]) -> state.State:
        return self.op.merge_all(tuple(jnp.concatenate(parts, axis=1) for parts in zip(*states, strict=True)))

    def parts(self, a: state.State) -> tuple[float, float]:
        return float(a[0][0, 0]), float(a[1][0, 0])

    def logsumexp(self, a: state.State) -> float:
        return float(self.op.row_output("lse", a)[0, 0])

    def accumulated(self, a: state.State, name: str) -> float:
        """The sum of x * exp(x - m), where zl counts x from m; or the sum of x."""
        m, l, zl, wz = (float(part[0, 0]) for part in (state.shift(a[0]), *a[1:]))
        return wz if name == "plain" else zl + m * l

    def softmax(self, a: state.State, x: Any) -> Float64:
        return self._output("softmax", a, x)

    def log_softmax(self, a: state.State, x: Any) -> Float64:
        return self._output("log_softmax", a, x)

    def _output(self, name: str, a: state.State, x: Any) -> Float64:
        op, wide = formulas.Op(name), x.astype(jnp.float32)[None]
        return self.numpy(op.output(wide, wide, op.row_constants(a)).astype(x.dtype))


class OfSlices(PallasAlgebra):
    """The blocks of a cluster, of which there are a power of two."""

    name = "pallas, slices"

    def merge_all(self, states: Sequence[state.State]) -> state.State:
        nothing = [self.identity(None)] * ((1 << (len(states) - 1).bit_length()) - len(states))
        return self.op.merge(*states, *nothing)


def test_the_weighted_sum_merges_as_l_does() -> None:
    x = np.random.default_rng(9).normal(size=300) * 5
    x[7] = -np.inf
    kept = x[np.isfinite(x)]
    exact = (kept * np.exp(kept - kept.max())).sum()
    for algebra in (PallasAlgebra(), OfSlices()):
        parts = [algebra.of(algebra.array(part, "float32")) for part in np.split(x, [0, 7, 8, 150])]
        one_by_one = reduce(algebra.merge, parts)
        for merged in (one_by_one, algebra.merge_all(parts)):
            np.testing.assert_allclose(algebra.accumulated(merged, "weighted"), exact, rtol=1e-5)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_law(law: Law) -> None:
    law.test(PallasAlgebra())


def test_law_of_the_blocks_of_a_cluster() -> None:
    [law] = (law for law in LAWS if law.name.startswith("merge_all"))
    law.test(OfSlices())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_of_the_result_decides_whether_sums_are_exact(dtype: str) -> None:
    x, mask, bias = (jnp.ones((2, 3), kind) for kind in (dtype, bool, "float32"))
    row, column = jnp.ones(2), jnp.zeros(2, int)
    calls = [
        formulas.Op.for_call("softmax", {"x": x}),
        formulas.Op.for_call("softmax", {"x": x, "mask": mask}),
        formulas.Op.for_call("softmax", {"x": x, "bias": bias}),
        formulas.Op.for_call("softmax_backward", {"x": x, "dy": x}),
        formulas.Op.for_call("logsumexp_backward", {"x": x, "mask": mask, "m": row, "l": row, "dy": row}),
        formulas.Op.for_call("token_logprobs", {"x": x, "mask": mask, "target": column}, ("y", "m", "l", "entropy")),
    ]
    assert [op.exact for op in calls] == [dtype == "float32"] * len(calls)


def test_lanes_merge_into_the_state_of_their_row() -> None:
    x = jnp.asarray(np.random.default_rng(5).normal(size=(1, 640)) * 9, jnp.float32)
    lanes = state.identity((1, 64), jnp.float32)
    for i in range(10):
        m, l = state.of(x[:, 64 * i : 64 * i + 64, None])
        lanes = state.merge(lanes, (m[..., 0], l[..., 0]))
    for a, b in zip(state.merge_all(lanes), state.of(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


NAMES = "softmax", "softmax_backward", "log_softmax_backward"
SLICES = list(itertools.product(NAMES, (False, True), (1, 4, 5, 11), ((), (0,), (0, -1))))


@pytest.mark.parametrize(("name", "exact", "tiles", "edges"), with_every_pair(SLICES, lambda case: case))
def test_tiles_of_a_slice_make_its_state(name: str, exact: bool, tiles: int, edges: tuple[int, ...]) -> None:
    tiles += len(edges)
    a, b = (np.random.default_rng(seed).normal(size=(tiles, 32)).astype(np.float32) * 5 for seed in (6, 7))
    a, b, op = jnp.asarray(a), jnp.asarray(b), formulas.Op(name, exact=exact)
    made = [lambda i=i: (a[i], b[i]) for i in edges]
    with jax.enable_x64(exact):
        found = op.of_tiles(
            state.Tiles(made, lambda i: (a[i], b[i]), int(0 in edges), tiles - (-1 in edges)), jnp.float32
        )
    expected = op.of((a.reshape(1, -1), b.reshape(1, -1)))
    assert len(found) == len(expected) == (2 if op.rescaled else 1)
    for of_tiles, of_row in zip(found, expected, strict=True):
        np.testing.assert_allclose(of_tiles, of_row, rtol=1e-5, atol=1e-5)


def test_a_sum_of_float64_is_rounded_once() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.random.default_rng(0).normal(scale=3, size=(50, 700)))
        m, l = jax.jit(state.of)(x)
        terms = np.asarray(jnp.exp(x - m)).astype(np.longdouble)
        exact = terms.sum(-1, keepdims=True)
        assert (np.abs(np.asarray(l) - exact) <= 0.501 * np.spacing(exact.astype(float))).all()
        assert (np.abs(terms.astype(float).cumsum(-1)[:, -1:] - exact) > np.spacing(exact.astype(float))).any()


def test_a_reciprocal_in_two_parts() -> None:
    l = np.random.default_rng(8).uniform(1, 2e5, 4096).astype(np.float32)
    t, low = (np.asarray(part, np.float64) for part in state.reciprocal(jnp.asarray(l)))
    np.testing.assert_allclose(t + low, 1 / l.astype(np.float64), rtol=1e-11)
