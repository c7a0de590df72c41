"""Every pair of options of the losses under every reduction, against the formulas in tests/loss_formula.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onlinesoftmax.jax as osj
from loss_formula import expected_loss, expected_tokens, pairs

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
    for seed, one in enumerate(pairs(choices, seed=3)):
        if how and one["where"] and one["label_smoothing"]:
            continue
        x, labels, options = made(one, seed)
        dy = np.random.default_rng(seed).uniform(0.5, 1.5, x.shape[:-1]).astype(np.float32)
        dy = dy if options["reduction"] == "none" else dy.max()

        @jax.jit
        def both(x: Any, dy: Any) -> Any:
            y, vjp = jax.vjp(lambda x: osj.cross_entropy(x, labels, **options, **how), x)  # noqa: B023  called at once
            return y, vjp(dy)[0]

        y, dx = both(x, dy)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis", "options"), TOKENS, ids=str)
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
    found, vjp = jax.vjp(lambda x: osj.token_logprobs(x, jnp.asarray(index), axis, **options), x)
    dys = [rng.uniform(size=y.shape).astype(np.float32) for y in found]
    (dx,) = vjp(osj.TokenLogprobs(*map(jnp.asarray, dys)))
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
