"""`onlinesoftmax.jax.cross_entropy` and `token_logprobs` against float64, and against optax where it is installed.

An error may be as large as that of the same formula in JAX's own float32 functions, and a unit in the last place.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")

import jax
import jax.numpy as jnp

import onlinesoftmax
import onlinesoftmax.jax as osj
from onlinesoftmax import PlanError
from onlinesoftmax.core.arrays import namespace
from onlinesoftmax.core.device import known
from onlinesoftmax.core.reference import evaluate
from onlinesoftmax.jax import primitives

STRATEGIES = ("row", "looped", "split")
NUMBERS: dict[str, dict[str, float]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-3},
}
Call = Callable[..., Any]


def logits(*shape: int, dtype: str = "float32", seed: int = 0, by: float = 0.0) -> Any:
    """Normal numbers, one in a hundred times 20, all of them shifted."""
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=shape) * np.where(rng.random(shape) < 0.01, 20, 1) + by, dtype)


def classes(*shape: int, cols: int, seed: int = 1) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(0, cols, shape), jnp.int32)


def wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def exact(name: str, x: Any, target: Any, output: str = "y", **values: Any) -> Any:
    """One output of the reference in float64, for rows along the last axis; values per row lack that axis."""
    # A number that is 0 is not given.
    rows = {key: wide(v)[..., None] if np.ndim(v) else v for key, v in values.items() if np.ndim(v) or v}
    given = {"x": wide(x), "target": np.asarray(target)[..., None], **rows}
    with np.errstate(all="ignore"):
        found = evaluate(name, namespace(given["x"]), given, -1, output)
    return found if found.shape == given["x"].shape else found[..., 0]


def exact_loss(x: Any, target: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    return exact("cross_entropy", x, target, "loss", smoothing=label_smoothing, z_loss=z_loss)


def exact_gradient(x: Any, target: Any, dy: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    numbers = {"smoothing": label_smoothing, "z_loss": z_loss}
    return exact("cross_entropy_backward", x, target, dy=dy, **exact_state("cross_entropy", x, target), **numbers)


def exact_state(name: str, x: Any, target: Any) -> dict[str, Any]:
    """M and l of each row."""
    return {output: exact(name, x, target, output) for output in ("m", "l")}


def exact_results(x: Any, target: Any) -> list[Any]:
    """logprob, entropy and lse.  The entropy does not depend on a shift, which would cancel in the reference."""
    shifted = wide(x) - wide(x).max(-1, keepdims=True)
    return [exact("token_logprobs", t, target, name) for t, name in ((x, "y"), (shifted, "entropy"), (x, "lse"))]


def written_out(x: Any, target: Any, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Any:
    """The loss in JAX's own functions, in float32, rounded to the dtype of x."""
    log_p = jax.nn.log_softmax(x.astype(jnp.float32))
    q = (1 - label_smoothing) * jax.nn.one_hot(target, x.shape[-1]) + label_smoothing / x.shape[-1]
    loss = -jnp.sum(q * log_p, -1) + z_loss * jax.nn.logsumexp(x.astype(jnp.float32), -1) ** 2
    return loss.astype(x.dtype)


def results_written_out(x: Any, target: Any) -> Any:
    """logprob, entropy and lse in JAX's own functions, in float32."""
    log_p = jax.nn.log_softmax(x.astype(jnp.float32))
    logprob = jnp.take_along_axis(log_p, target[..., None], -1)[..., 0]
    return logprob, -jnp.sum(jnp.exp(log_p) * log_p, -1), jax.nn.logsumexp(x.astype(jnp.float32), -1)


def assert_as_good(ours: Any, theirs: Any, reference: Any, scale: Any = 1.0) -> None:
    """Errors of ours are at most the largest of theirs, and a unit in the last place; `scale` is that of each row."""
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape == reference.shape
    with np.errstate(all="ignore"):
        unit = np.spacing(np.abs(reference).astype(np.float32)).astype(np.float64)
    unit *= 2.0 ** (23 - jnp.finfo(ours.dtype).nmant)
    scale = np.abs(wide(scale))[..., None] if np.ndim(scale) == reference.ndim - 1 else np.abs(wide(scale))
    allowed = (np.abs(wide(theirs) - reference) / scale).max() * scale
    allowed = allowed + np.maximum(unit, float(jnp.finfo(ours.dtype).smallest_normal))
    error = np.abs(wide(ours) - reference)
    assert (error <= allowed).all(), np.max(error / allowed)


def with_gradient(f: Call, x: Any, dy: Any) -> tuple[Any, Any]:
    """The result, and the gradient in x for the gradient dy of the result."""

    def both(x: Any) -> Any:
        y, vjp = jax.vjp(f, x)
        return y, vjp(jax.tree.map(lambda t, like: t.astype(like.dtype), dy, y))[0]

    return jax.jit(both)(x)


def check_loss(x: Any, target: Any, numbers: dict[str, float], **forced: Any) -> None:
    """The loss and its gradient are as good as JAX's own."""
    dy = logits(*target.shape, seed=7).astype(x.dtype)
    (ours, dx), (theirs, their_dx) = (
        with_gradient(f, x, dy)
        for f in (
            lambda x: osj.cross_entropy(x, target, **numbers, **forced),
            lambda x: written_out(x, target, **numbers),
        )
    )
    assert_as_good(ours, theirs, exact_loss(x, target, **numbers))
    assert_as_good(dx, their_dx, exact_gradient(x, target, dy, **numbers), wide(dy))


ASKED = {"logprob": (1, 0, 0), "entropy": (0, 1, 0), "lse": (0, 0, 1), "all": (1, 1, 1)}


def check_results(x: Any, target: Any, asked: str, **forced: Any) -> None:
    """The three results and the gradient of those that are asked for are as good as JAX's own."""
    weights = [logits(*target.shape, seed=8 + i) * part for i, part in enumerate(ASKED[asked])]
    (ours, dx), (theirs, their_dx) = (
        with_gradient(f, x, tuple(weights))
        for f in (
            lambda x: tuple(osj.token_logprobs(x, target, **forced)),
            lambda x: results_written_out(x, target),
        )
    )
    references = exact_results(x, target)
    for found, other, reference in zip(ours, theirs, references, strict=True):
        assert_as_good(found, other, reference)
    shifted = wide(x) - wide(x).max(-1, keepdims=True)
    dy, dentropy, dlse = map(wide, weights)
    cotangents = {"dy": dy, "dlse": dlse, "entropy": references[1], "dentropy": dentropy}
    state = exact_state("token_logprobs", shifted, target)
    reference = exact("token_logprobs_backward", shifted, target, **cotangents, **state)
    assert_as_good(dx, their_dx, reference, sum(map(np.abs, (dy, dentropy, dlse))))


@pytest.mark.parametrize(
    ("numbers", "dtype"), [*((numbers, "float32") for numbers in NUMBERS), ("plain", "bfloat16"), ("both", "float16")]
)
def test_losses_are_as_good_as_in_jax(numbers: str, dtype: str) -> None:
    check_loss(logits(9, 1025, dtype=dtype), classes(9, cols=1025), NUMBERS[numbers])


RESULTS = [
    ("logprob", "float32"), ("entropy", "float16"), ("lse", "bfloat16"), ("all", "bfloat16"), ("all", "float32")
]  # fmt: skip


@pytest.mark.parametrize(("asked", "dtype"), RESULTS)
def test_log_probabilities_are_as_good_as_in_jax(asked: str, dtype: str) -> None:
    check_results(logits(9, 1025, dtype=dtype), classes(9, cols=1025), asked)


@pytest.mark.parametrize("strategy", [None, "row", "split"])
def test_large_logits_do_not_cancel(strategy: str | None) -> None:
    x, target = logits(5, 519, by=1e4), classes(5, cols=519)
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    check_loss(x, target, {"label_smoothing": 0.1}, **forced)
    check_results(x, target, "all", **forced)


CASES = [
    ("row", (7, 33), "both", "bfloat16"), ("looped", (5, 577), "both", "float16"),
    ("split", (2, 5001), "both", "float32"),
    ("looped", (7, 33), "plain", "float32"), ("split", (5, 577), "smoothing", "bfloat16"),
    ("row", (2, 5001), "z_loss", "float32"), ("split", (9, 33), "z_loss", "float16"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "shape", "numbers", "dtype"), CASES, ids=str)
def test_kernels_of_losses(strategy: str, shape: tuple[int, int], numbers: str, dtype: str) -> None:
    target = classes(shape[0], cols=shape[1]).at[0].set(0).at[-1].set(shape[1] - 1)
    check_loss(logits(*shape, dtype=dtype), target, NUMBERS[numbers], backend="pallas", strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "shape", "dtype"),
    [("row", (7, 33), "float32"), ("looped", (5, 577), "bfloat16"), ("split", (2, 5001), "float16")],
    ids=str,
)
def test_kernels_of_log_probabilities(strategy: str, shape: tuple[int, int], dtype: str) -> None:
    target = classes(shape[0], cols=shape[1])
    check_results(logits(*shape, dtype=dtype), target, "all", backend="pallas", strategy=strategy)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_with_every_option_give_what_xla_gives(strategy: str) -> None:
    x, target = logits(2, 3, 70) * 2, classes(2, 3, cols=70)
    where = jnp.asarray(np.random.default_rng(3).random((3, 70)) < 0.7) | jnp.zeros((2, 3, 70), bool).at[
        jnp.arange(2)[:, None], jnp.arange(3), target
    ].set(True)

    def results(x: Any, scale: Any, **forced: Any) -> Any:
        arguments = {"where": where, "scale": scale, "softcap": 4.0, **forced}
        found = osj.token_logprobs(x, target, **arguments)
        return osj.cross_entropy(x, target, z_loss=0.1, **arguments), *found

    def with_gradients(**forced: Any) -> Any:
        number = lambda x, s: sum(jnp.sum(jnp.sin(t)) for t in results(x, s, **forced))  # noqa: E731  one use
        return jax.jit(lambda x, s: (results(x, s, **forced), jax.grad(number, (0, 1))(x, s)))(x, jnp.float32(0.7))

    ours, theirs = with_gradients(backend="pallas", strategy=strategy), with_gradients()
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_wrong_labels_give_nan_and_no_gradient(strategy: str | None) -> None:
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    x = logits(5, 70).at[3, 4].set(jnp.nan)
    target = jnp.asarray([0, -1, 70, -100, 69])

    @jax.jit
    def results(x: Any) -> Any:
        loss, vjp = jax.vjp(lambda x: osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1, **forced), x)
        found, vjp_of_found = jax.vjp(lambda x: osj.token_logprobs(x[:3], target[:3], **forced), x)
        of_logprob = osj.TokenLogprobs(jnp.ones(3), jnp.zeros(3), jnp.zeros(3))
        return loss, vjp(jnp.ones(5))[0], found, vjp_of_found(of_logprob)[0]

    loss, dx, found, dx_of_logprob = results(x)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, True, True, False])
    np.testing.assert_array_equal(np.any(wide(dx) != 0, -1), [True, False, False, False, True])
    np.testing.assert_array_equal(np.isnan(found.logprob), [False, True, True])
    assert np.isfinite(found.entropy).all()
    np.testing.assert_array_equal(np.any(wide(dx_of_logprob) != 0, -1), [True, False, False, False, False])


ROWS = {
    "-inf": [-np.inf, -np.inf, -np.inf],
    "a -inf": [-np.inf, 1.0, 0.0],
    "another -inf": [1.0, -np.inf, 0.0],
    "+inf": [1.0, np.inf, 0.0],
    "+inf at the target": [np.inf, 1.0, 0.0],
    "NaN": [0.0, np.nan, 0.0],
    "large": [3e38, -3e38, 0.0],
}
"""Rows whose target is the first element."""


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_special_rows(strategy: str | None) -> None:
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    # A row of numbers lies between any two special rows.
    x = jnp.asarray([values for row in ROWS.values() for values in (row, [0.0, 1.0, 2.0])], jnp.float32)
    target = jnp.zeros(len(x), jnp.int32)

    @jax.jit
    def results(x: Any) -> Any:
        loss = partial(osj.cross_entropy, labels=target, **forced)
        dx = jax.grad(lambda x: jnp.sum(loss(x)))(x)
        return loss(x), loss(x, label_smoothing=0.1), osj.token_logprobs(x, target, **forced), dx

    loss, smoothed, found, dx = results(x)
    infinite = np.isinf(wide(x).max(-1))
    np.testing.assert_allclose(loss, np.where(infinite, np.nan, exact_loss(x, target)).astype(np.float32), rtol=1e-6)
    expected = np.where(infinite, np.nan, exact_loss(x, target, label_smoothing=0.1)).astype(np.float32)
    # The sum of a row with 3e38 and -3e38 is finite, and each of its terms may be infinite in float32.
    np.testing.assert_allclose(smoothed[:-2], expected[:-2], rtol=1e-6)
    for ours, name in zip(found, ("y", "entropy", "lse"), strict=True):
        expected = exact("token_logprobs", x, target, name).astype(np.float32)
        expected[infinite & (name == "y")] = np.nan
        if name == "entropy":
            # The entropy of a row with 3e38 is the difference of two such numbers in the reference.
            expected[-2] = 0
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    assert np.isnan(dx[infinite]).any(-1).all()
    finite = np.isfinite(loss)
    np.testing.assert_allclose(dx[finite], exact_gradient(x, target, np.ones(len(x)))[finite], rtol=1e-6, atol=1e-7)


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


def both(f: Call, g: Call, *arguments: Any) -> Any:
    """The results of two functions, compiled as one program."""
    return jax.jit(lambda *arguments: (f(*arguments), g(*arguments)))(*arguments)


def assert_all_close(pair: tuple[Any, Any], tolerance: float = 1e-5) -> None:
    """Every array of the first result is close to that of the second."""
    for a, b in zip(*map(jax.tree.leaves, pair), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=2e-6)


@pytest.mark.parametrize("one_hot", [False, True])
def test_smoothing_is_spread_over_the_classes_that_are_kept(one_hot: bool) -> None:
    x, kept = logits(4, 6), jnp.asarray([0, 2, 3])
    where = jnp.zeros(6, bool).at[kept].set(True)[None]
    small = jnp.asarray([0, 1, 2, 1])
    labels = jax.nn.one_hot(kept[small], 6) if one_hot else kept[small]
    few = lambda x: osj.cross_entropy(x[:, kept], small, label_smoothing=0.3, z_loss=0.1)  # noqa: E731  one use
    ours = lambda x: osj.cross_entropy(x, labels, where=where, label_smoothing=0.3, z_loss=0.1)  # noqa: E731  one use
    assert_all_close(both(ours, few, x))
    assert_all_close(both(jax.grad(lambda x: jnp.sum(ours(x))), jax.grad(lambda x: jnp.sum(few(x))), x))


def test_where_leaves_classes_out() -> None:
    x = jnp.asarray([[jnp.nan, 0.0, 0.0], [jnp.nan, 1.0, 0.0], [jnp.nan, 1.0, jnp.nan], [-jnp.inf, -jnp.inf, 0.0]])
    where = jnp.asarray([[False, True, True], [False, True, True], [False, False, False], [False, True, False]])
    labels = jnp.asarray([1, 0, 0, 1])

    @jax.jit
    def results(x: Any) -> Any:
        of_labels = partial(osj.cross_entropy, labels=labels, where=where, z_loss=1.0)
        of_weights = partial(osj.cross_entropy, labels=jax.nn.one_hot(labels, 3), where=where, z_loss=1.0)
        losses = [(f(x), jax.grad(lambda x, f=f: f(x)[0] + f(x)[2])(x)) for f in (of_labels, of_weights)]
        return losses, osj.token_logprobs(x, labels, where=where)

    losses, found = results(x)
    for loss, dx in losses:
        np.testing.assert_allclose([loss[0], loss[2]], [np.log(2) + np.log(2) ** 2, 0], rtol=1e-6)
        assert np.isfinite(dx[:3]).all()
        np.testing.assert_array_equal(dx[2], 0)
    # An integer label that is left out has probability 0.
    assert losses[0][0][1] == np.inf
    np.testing.assert_allclose(found.logprob[:2], [-np.log(2), -np.inf], rtol=1e-6)
    np.testing.assert_allclose(found.lse, [np.log(2), np.log(1 + np.e), -np.inf, -np.inf], rtol=1e-6)


def loss_and_results(x: Any, target: Any, **more: Any) -> tuple[Any, ...]:
    """Everything that is known of rows, by both functions."""
    loss = osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01, **more)
    return loss, *osj.token_logprobs(x, target, **more)


def all_written_out(x: Any, target: Any) -> tuple[Any, ...]:
    logprob, entropy, lse = results_written_out(x, target)
    return written_out(x, target, 0.1, 0.01), logprob, entropy, lse


def number(f: Call) -> Call:
    """A number that every result counts for, each in its own way."""
    return lambda *arguments: sum(jnp.sum(jnp.sin((i + 1) * t)) for i, t in enumerate(f(*arguments)))


def test_derivatives_and_batches() -> None:
    x, t, target = logits(2, 3, 11), logits(2, 3, 11, seed=2), classes(2, 3, cols=11)

    def every_way(f: Call) -> Call:
        def results(x: Any, t: Any) -> Any:
            of_x = lambda x: f(x, target)  # noqa: E731  several uses
            gradient = jax.grad(number(f))
            batches = jax.vmap(f, (1, 1))(x, target), jax.vmap(f, (0, None))(x, target[0]), jax.vmap(f)(x, target)
            batches = *batches, jax.vmap(f, (None, 0))(x[0], target), jax.vmap(gradient)(x, target)
            return (
                of_x(x),
                gradient(x, target),
                jax.jvp(of_x, (x,), (t,)),
                jax.jvp(lambda x: gradient(x, target), (x,), (t,)),
                batches,
            )

        return results

    assert_all_close(both(every_way(loss_and_results), every_way(all_written_out), x, t), 5e-5)
    checkpointed = jax.grad(jax.checkpoint(number(loss_and_results)))
    assert_all_close(both(checkpointed, jax.grad(number(all_written_out)), x, target), 5e-5)


def test_second_derivatives() -> None:
    x, target = logits(2, 5), classes(2, cols=5)

    ours, theirs = (jax.hessian(number(f)) for f in (loss_and_results, all_written_out))
    assert_all_close(both(ours, theirs, x, target), 1e-4)


def test_a_kernel_in_a_batch() -> None:
    x, target = logits(2, 3, 70), classes(2, 3, cols=70)
    results = partial(osj.token_logprobs, backend="pallas", strategy="looped")
    f, g = (jax.vmap(jax.grad(number(h)), (None, 0)) for h in (results, results_written_out))
    assert_all_close(both(f, g, x[0], target), 5e-5)
    loss = partial(osj.cross_entropy, label_smoothing=0.1, backend="pallas", strategy="looped")
    f, g = (jax.vmap(h, (0, None)) for h in (loss, partial(written_out, label_smoothing=0.1)))
    assert_all_close(both(f, g, x, target[0]), 5e-5)


def count(jaxpr: Any, name: str) -> int:
    """Number of primitives of a name in a program and the programs that it calls."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name
        inner = (p.jaxpr if hasattr(p, "jaxpr") else p for p in equation.params.values())
        found += sum(count(p, name) for p in inner if hasattr(p, "eqns"))
    return found


def test_a_gradient_is_one_forward_and_one_backward_pass() -> None:
    x, target = logits(3, 7), classes(3, cols=7)

    def three(x: Any) -> Any:
        return number(lambda x: tuple(osj.token_logprobs(x, target)))(x)

    def loss(x: Any) -> Any:
        return jnp.mean(osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.1))

    for f, name in ((three, "token_logprobs"), (loss, "cross_entropy")):
        program = jax.make_jaxpr(jax.grad(f))(x).jaxpr
        assert count(program, f"onlinesoftmax_{name}") == 1
        assert count(program, f"onlinesoftmax_{name}_backward") == 1


@pytest.mark.parametrize("weights", [False, True])
def test_nothing_of_the_size_of_the_logits_is_kept(weights: bool) -> None:
    x, target = logits(8, 1000, dtype="bfloat16"), classes(8, cols=1000)
    labels = jax.nn.one_hot(target, 1000, dtype="bfloat16") if weights else target
    _, vjp = jax.vjp(lambda x: osj.cross_entropy(x, labels, label_smoothing=0.1, z_loss=0.1, softcap=30.0), x)
    large = [t.dtype.name for t in jax.tree.leaves(vjp) if hasattr(t, "dtype") and t.size >= x.size]
    # The logits in 16 bits, and the weights.
    assert set(large) == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_dtypes(dtype: str) -> None:
    x, target = logits(3, 7, dtype=dtype), classes(3, cols=7).astype("uint8")
    assert jax.eval_shape(osj.cross_entropy, x, target).dtype == dtype
    assert jax.eval_shape(osj.cross_entropy, x, jax.nn.one_hot(target, 7)).dtype == dtype
    assert {t.dtype.name for t in jax.eval_shape(osj.token_logprobs, x, target)} == {"float32"}
    gradient = jax.grad(lambda x: jnp.sum(osj.cross_entropy(x, target).astype("float32")))
    assert jax.eval_shape(gradient, x).dtype == dtype


def test_float64() -> None:
    with jax.enable_x64(True):
        x, target = logits(3, 70, dtype="float64"), jnp.asarray([0, 1 << 32, 69])
        known_rows = jnp.asarray([0, 2])
        for forced in ({}, {"backend": "pallas", "strategy": "looped"}):
            loss = osj.cross_entropy(x, target, label_smoothing=0.1, **forced)
            assert loss.dtype == jnp.float64
            expected = exact_loss(x, target, label_smoothing=0.1)
            np.testing.assert_allclose(loss[known_rows], expected[known_rows], rtol=1e-14)
            assert jnp.isnan(loss[1])
            found = osj.token_logprobs(x, target, **forced)
            assert found.entropy.dtype == jnp.float64
            np.testing.assert_allclose(found.entropy, exact_results(x, target)[1], rtol=1e-13)


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (1,), (1, 1)], ids=str)
def test_empty_and_small(shape: tuple[int, ...]) -> None:
    x, target = jnp.ones(shape), jnp.zeros(shape[:-1], jnp.int32)
    loss, found = osj.cross_entropy(x, target), osj.token_logprobs(x, target)
    assert loss.shape == found.logprob.shape == found.entropy.shape == found.lse.shape == shape[:-1]
    np.testing.assert_array_equal(loss, np.nan if shape[-1] == 0 else 0)
    assert osj.token_logprobs(x, target, entropy=False).entropy is None


X, LABELS = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
REFUSED = [
    ({"logits": [1.0]}, TypeError, "logits must be an array, not list"),
    ({"logits": jnp.ones((2, 3), int)}, TypeError, "logits must be floating point, got int32"),
    ({"axis": 2}, ValueError, "axis 2 is out of range"),
    ({"scale": "2"}, TypeError, "scale must be a number"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"where": jnp.ones((2, 3))}, ValueError, "where must be boolean"),
    (
        {"where": jnp.ones((4, 3), bool)},
        ValueError,
        r"where of shape \(4, 3\) does not broadcast to logits of \(2, 3\)",
    ),
    ({"backend": "cuda"}, PlanError, "no backend='cuda' with strategy=None for JAX"),
]
REFUSED_LOSSES = [
    ({"labels": jnp.zeros(3, int)}, ValueError, r"integer labels must have the shape \(2,\) of the logits"),
    ({"labels": jnp.zeros((2, 3), int)}, ValueError, r"integer labels must have the shape \(2,\)"),
    ({"labels": jnp.zeros((2, 4))}, ValueError, r"labels of shape \(2, 4\) do not broadcast"),
    ({"labels": [0, 1]}, TypeError, "labels must be an array, not list"),
    ({"label_smoothing": -0.1}, ValueError, "label_smoothing must lie between 0 and 1, got -0.1"),
    ({"label_smoothing": "0"}, TypeError, "label_smoothing must be a number, not str"),
    ({"z_loss": -1.0}, ValueError, "z_loss must not be negative"),
    ({"labels": jnp.ones((2, 3)), "backend": "pallas"}, PlanError, "labels with a weight per class have no kernel"),
    (
        {"where": jnp.ones(3, bool)[None], "label_smoothing": 0.1, "strategy": "looped"}, PlanError,
        "label_smoothing with where has no kernel",
    ),
]  # fmt: skip
REFUSED_LOGPROBS = [
    ({"index": jnp.zeros(2)}, TypeError, "index must be integers, got float32"),
    ({"index": jnp.zeros(3, int)}, ValueError, r"integer index must have the shape \(2,\)"),
    ({"entropy": 1}, TypeError, "entropy must be a bool, not int"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED + REFUSED_LOSSES, ids=lambda t: str(t)[:40])
def test_what_cross_entropy_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        osj.cross_entropy(**({"logits": X, "labels": LABELS} | arguments))
    assert str(caught.value).startswith("cross_entropy: ")


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED + REFUSED_LOGPROBS, ids=lambda t: str(t)[:40])
def test_what_token_logprobs_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        osj.token_logprobs(**({"logits": X, "index": LABELS} | arguments))
    assert str(caught.value).startswith("token_logprobs: ")


def test_plans() -> None:
    """Kernels run on a GPU, and XLA on a CPU."""
    x, target = (jax.ShapeDtypeStruct((4096, *s), d) for s, d in (((50257,), jnp.bfloat16), ((), jnp.int32)))
    results, gradients = (jax.ShapeDtypeStruct((4096, n), jnp.float32) for n in (3, 2))
    for name in ("cross_entropy", "token_logprobs"):
        for operation, operands in ((name, (x, target)), (f"{name}_backward", (x, target, results, gradients))):
            assert primitives.plan_for(operation, operands, known("h200")).backend == "pallas"
            assert primitives.plan_for(operation, operands, known("cpu")).backend == "eager"


def test_four_devices() -> None:
    """In a process of its own: rows stay where they are, also where a kernel runs, and torch is never imported."""
    code = """
import sys, jax, jax.numpy as jnp, onlinesoftmax as osm
from jax.sharding import NamedSharding, PartitionSpec as P
x, target = jnp.arange(8 * 6 * 10.0).reshape(8, 6, 10) % 7, jnp.arange(48).reshape(8, 6) % 10
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for forced in ({}, {"backend": "pallas", "strategy": "looped"}):
    def f(x, target):
        found = osm.jax.token_logprobs(x, target, **forced)
        return osm.jax.cross_entropy(x, target, label_smoothing=0.1, **forced), *found
    def gradient(x, target):
        return jax.grad(lambda x: sum(jnp.sum(t ** 2) for t in f(x, target)))(x)
    for g, spec in ((gradient, P("a", "b")), (f, P("b", None, "a") if forced else P("a", "b"))):
        place = lambda t, spec: jax.device_put(t, NamedSharding(mesh, spec))
        cut = place(x, spec), place(target, P(*spec[:2]))
        program = jax.jit(g).lower(*cut).compile()
        for ours, whole in zip(jax.tree.leaves(program(*cut)), jax.tree.leaves(g(x, target))):
            assert jnp.allclose(ours, whole, rtol=1e-5, atol=1e-5), (forced, spec)
        assert len(spec) == 3 or "all-gather" not in program.as_text(), (forced, g, spec)
    mapped = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("a", "b"), P("a", "b")), out_specs=P("a", "b")))
    for ours, whole in zip(mapped(x, target), f(x, target)):
        assert jnp.allclose(ours, whole, rtol=1e-5, atol=1e-5)
assert "torch" not in sys.modules
print("fine")
"""
    environment = {
        "PYTHONPATH": str(Path(onlinesoftmax.__file__).parents[1]),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert result.stdout == "fine\n", result.stderr
