"""Values of `onlinesoftmax.jax.cross_entropy` and `token_logprobs` and their gradients, against float64.

An error may be as large as that of the same formula in JAX's own float32 functions, and a unit in the last place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

from functools import partial

import jax
import jax.numpy as jnp
from exact_losses import (
    STRATEGIES,
    Call,
    assert_all_close,
    assert_leaves_close,
    both,
    classes,
    exact,
    exact_gradient,
    exact_loss,
    exact_results,
    exact_state,
    logits,
    number,
    results_written_out,
    wide,
    written_out,
)

import onlinesoftmax.jax as osj
from loss_formula import expected_loss, expected_tokens, pairs
from pairs import rest_exhaustive

NUMBERS: dict[str, dict[str, float]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "both": {"label_smoothing": 0.3, "z_loss": 1e-3},
}


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
    ("numbers", "dtype"),
    rest_exhaustive([*((numbers, "float32") for numbers in NUMBERS), ("plain", "bfloat16"), ("both", "float16")]),
)
def test_losses_are_as_good_as_in_jax(numbers: str, dtype: str) -> None:
    check_loss(logits(9, 1025, dtype=dtype), classes(9, cols=1025), NUMBERS[numbers])


RESULTS = [
    ("logprob", "float32"), ("entropy", "float16"), ("lse", "bfloat16"), ("all", "bfloat16"), ("all", "float32")
]  # fmt: skip


@pytest.mark.parametrize(("asked", "dtype"), RESULTS)
def test_log_probabilities_are_as_good_as_in_jax(asked: str, dtype: str) -> None:
    check_results(logits(9, 1025, dtype=dtype), classes(9, cols=1025), asked)


@pytest.mark.parametrize("strategy", [*(pytest.param(s, marks=pytest.mark.exhaustive) for s in (None, "row")), "split"])
def test_large_logits_do_not_cancel(strategy: str | None) -> None:
    x, target = logits(5, 519, by=1e4), classes(5, cols=519)
    forced = {} if strategy is None else {"backend": "pallas", "strategy": strategy}
    check_loss(x, target, {"label_smoothing": 0.1}, **forced)
    check_results(x, target, "all", **forced)


@pytest.mark.parametrize("strategy", rest_exhaustive(((name,) for name in STRATEGIES), lambda _: ("every option",)))
def test_kernels_with_every_option_give_what_xla_gives(strategy: str) -> None:
    x, target = logits(2, 3, 70) * 2, classes(2, 3, cols=70)
    scale = jnp.linspace(0.4, 1, 6).reshape(2, 3, 1)
    where = jnp.asarray(np.random.default_rng(3).random((3, 70)) < 0.7) | jnp.zeros((2, 3, 70), bool).at[
        jnp.arange(2)[:, None], jnp.arange(3), target
    ].set(True)

    def results(x: Any, scale: Any, **forced: Any) -> Any:
        arguments = {"where": where, "scale": scale, "softcap": 4.0, **forced}
        found = osj.token_logprobs(x, target, **arguments)
        return osj.cross_entropy(x, target, z_loss=0.1, **arguments), *found

    def with_gradients(**forced: Any) -> Any:
        number = lambda x, s: sum(jnp.sum(jnp.sin(t)) for t in results(x, s, **forced))  # noqa: E731  one use
        return jax.jit(lambda x, s: (results(x, s, **forced), jax.grad(number, (0, 1))(x, s)))(x, scale)

    ours, theirs = with_gradients(backend="pallas", strategy=strategy), with_gradients()
    assert_leaves_close(ours, theirs, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradient_of_a_likely_class_of_probabilities_is_rounded_once(dtype: str) -> None:
    """1 - p of a probability of 0.999 would be 0 in bfloat16, as in optax."""
    x = jnp.zeros((1, 8), dtype).at[0, 0].set(9.2)
    total = lambda x, labels: jnp.sum(osj.cross_entropy(x, labels).astype("float32"))  # noqa: E731  two uses
    found = jax.grad(total)(x, jax.nn.one_hot(jnp.zeros(1, int), 8))
    np.testing.assert_array_equal(found, jax.grad(total)(x, jnp.zeros(1, int)))
    assert found[0, 0] < -0.0007


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


COLS = 11

CHOICES: dict[str, tuple[Any, ...]] = {
    "rows": ((), (3, 2)),
    "labels": ("uint8", "probabilities"),
    "reduction": ("mean", "sum", "none"),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.03),
    "scale": (1.0, -0.5),
    "softcap": (None, 3.0),
    "ignore_index": (None, 4),
    "where": (None, "classes", "elements"),
}


def made(one: dict[str, Any], seed: int) -> tuple[Any, Any, dict[str, Any]]:
    """(logits, labels, options) of a combination; classes are the last axis."""
    options, rng = dict(one), np.random.default_rng(seed)
    rows, kind, where = options.pop("rows"), options.pop("labels"), options.pop("where")
    x = (3 * rng.standard_normal((*rows, COLS))).astype(np.float32)
    kept = np.arange(COLS) % 6 != 5 if where == "classes" else rng.uniform(size=x.shape) < 0.6
    if kind == "probabilities":
        # An index to ignore needs integer labels.
        options["ignore_index"] = None
        labels = rng.uniform(size=x.shape).astype(np.float32) * (1 if where is None else kept)
    else:
        labels = rng.integers(COLS - 6, size=rows).astype(kind)
        labels = np.where(labels == 4, 3, labels).astype(kind)
        if rows and options["ignore_index"] is not None:
            labels.reshape(-1)[1] = options["ignore_index"]
        kept = kept | (np.arange(COLS) == labels[..., None]) if where == "elements" else kept
    if where is not None:
        options["where"] = kept
    return x, labels, options


@pytest.mark.early
@pytest.mark.parametrize("how", [{}, {"backend": "pallas"}], ids=str)
def test_every_pair_of_options_is_as_written_by_hand(how: dict[str, Any]) -> None:
    choices = dict(CHOICES)
    if how:
        # Kernels take integers, and no smoothing with `where`.  The interpreter is slow, so it has fewer cases.
        choices |= {"rows": ((3, 2),), "labels": ("uint8",), "scale": (-0.5,), "where": (None, "classes")}
    calls = []
    for seed, one in enumerate(pairs(choices, seed=3)):
        if how and one["where"] and one["label_smoothing"]:
            continue
        x, labels, options = made(one, seed)
        dy = np.random.default_rng(seed).uniform(0.5, 1.5, x.shape[:-1]).astype(np.float32)
        calls.append((one, x, labels, options, dy if options["reduction"] == "none" else dy.max()))

    @jax.jit
    def results(given: Any) -> Any:
        found = []
        for (x, dy), (_, _, labels, options, _) in zip(given, calls, strict=True):
            y, vjp = jax.vjp(lambda x: osj.cross_entropy(x, labels, **options, **how), x)  # noqa: B023  called at once
            found.append((y, vjp(dy)[0]))
        return found

    found_of_all = results([(x, dy) for _, x, _, _, dy in calls])
    for (y, dx), (one, x, labels, options, dy) in zip(found_of_all, calls, strict=True):
        given = dict(options)
        mask, index = given.pop("where", None), given.pop("ignore_index")
        labels = labels.astype(np.float64 if labels.dtype.kind == "f" else np.int64)
        # The formula has classes as the second axis.
        second = lambda a: np.moveaxis(a, -1, 1) if a.ndim > 1 else a  # noqa: E731  one line in several places
        want = expected_loss(
            second(x.astype(np.float64)), second(labels) if labels.dtype.kind == "f" else labels,
            np.float64(dy), mask=None if mask is None else second(np.broadcast_to(mask, x.shape)),
            ignore_index=-100 if index is None else index, **given,
        )  # fmt: skip
        eps = np.finfo(np.float32).eps
        for name, found, right in (("loss", y, want.loss), ("gradient", second(np.asarray(dx)), want.gradient)):
            # A rounding error of the scores, which are below 16 in magnitude, for each number or for its whole size.
            bound = 16 * eps * max(1.0, float(np.abs(right).max(initial=0)))
            np.testing.assert_allclose(np.asarray(found, np.float64), right, 0, bound, err_msg=f"{name} of {one}")


TOKENS: list[tuple[tuple[int, ...], int, dict[str, Any]]] = [
    ((5, COLS), -1, {}), ((COLS, 3), 0, {"scale": -0.7, "ignore_index": 2}), ((COLS,), 0, {"softcap": 3.0}),
    ((2, COLS, 3), 1, {"where": True, "softcap": 4.0}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "axis", "options", "dtype"),
    rest_exhaustive(
        ((*one, dtype) for one in TOKENS for dtype in ("float32", "bfloat16")), lambda cell: (str(cell[:3]), cell[3])
    ), ids=str,
)  # fmt: skip
def test_several_elements_of_a_row(shape: tuple[int, ...], axis: int, options: dict[str, Any], dtype: str) -> None:
    rng, options = np.random.default_rng(len(shape)), dict(options)
    x = jnp.asarray(3 * rng.standard_normal(shape), dtype)
    index = rng.integers(COLS, size=(*shape[:axis], 4, *shape[axis % len(shape) + 1 :]) if axis >= 0 else (5, 4))
    last = np.moveaxis(index, axis, -1)
    # One element twice, and one out of range.
    last[..., 1] = last[..., 0]
    last[(0,) * last.ndim] = -5
    if "where" in options:
        options["where"] = rng.uniform(size=shape) < 0.7
    per_row = (*last.shape[:-1],)
    dys = [rng.uniform(size=shape).astype(np.float32) for shape in (index.shape, per_row, per_row)]

    @jax.jit
    def both(x: Any, dys: Any) -> Any:
        found, vjp = jax.vjp(lambda x: osj.token_logprobs(x, jnp.asarray(index), axis, **options), x)
        return found, vjp(osj.TokenLogprobs(*dys))[0]

    found, dx = both(x, dys)
    if "where" in options:
        options["mask"] = options.pop("where")
    want = expected_tokens(np.asarray(x, np.float64), index, axis, [np.float64(dy) for dy in dys], **options)
    for name, y in zip(("logprob", "entropy", "lse"), found, strict=True):
        np.testing.assert_allclose(np.asarray(y, np.float64), getattr(want, name), 0, 16 * 2.0**-23, err_msg=name)
    rounding = float(jnp.finfo(dtype).eps) * np.abs(want.gradient)
    assert dx.dtype == dtype
    assert (np.abs(np.asarray(dx, np.float64) - want.gradient) <= rounding + 64 * 2.0**-23).all()


def test_an_ignored_index_of_one_element() -> None:
    x, index = jnp.asarray(np.random.default_rng(0).standard_normal((3, COLS)), jnp.float32), jnp.array([1, -100, 4])

    def logprob(x: Any) -> Any:
        return osj.token_logprobs(x, index, ignore_index=-100).logprob

    assert logprob(x)[1] == 0
    np.testing.assert_allclose(logprob(x)[::2], jax.nn.log_softmax(x)[jnp.array([0, 2]), jnp.array([1, 4])], rtol=1e-6)
    dx = jax.grad(lambda x: logprob(x).sum())(x)
    assert (dx[1] == 0).all()
    assert (dx[::2] != 0).all()
    with pytest.raises(TypeError, match="ignore_index"):
        osj.token_logprobs(x, index, ignore_index=0.5)
    with pytest.raises(ValueError, match="index of shape"):
        osj.token_logprobs(x, jnp.zeros((2, 4), jnp.int32))
