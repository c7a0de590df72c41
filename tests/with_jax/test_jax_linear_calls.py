"""Calls of the head without logits: what is differentiated, transformations, and mistakes."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from jax_heads import IN_FLOAT32, TOKENS, assert_same, head, ours_of

import onlinesoftmax.jax as osj

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.parametrize(("wanted", "count"), [("", 1), ("x", 2), ("w", 2), ("xw", 3), ("b", 1)])
def test_frozen_arrays_cost_no_product(wanted: str, count: int) -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("counts operations of XLA, and a GPU's products are calls of cuBLAS")
    a = head("float32")

    def f(some: dict[str, Any], rest: dict[str, Any]) -> Any:
        return ours_of({**rest, **some})

    some = {name: a.pop(name) for name in wanted}
    program = jax.jit(jax.grad(f) if wanted else f).lower(some, a).compile()
    assert len(re.findall(r" dot\(", program.as_text())) == count


def test_transformations() -> None:
    """A batch of tokens, a batch of weights, a checkpoint, a scan: as calls one after another."""
    a = head("float32")
    del a["b"]
    x, w, target = a["x"], a["w"], a["target"]
    f = partial(osj.linear_cross_entropy, label_smoothing=0.1, memory=3 * 40 * 4)
    both = jax.jit(jax.value_and_grad(f, (0, 1)))
    each = [both(x[i], w, target[i]) for i in range(3)]
    assert_same(jax.vmap(both, (0, None, 0))(x, w, target), jax.tree.map(lambda *t: jnp.stack(t), *each))
    of_weights = jax.vmap(both, (None, 0, None))(x, jnp.stack([w, 2 * w]), target)
    assert_same(of_weights, jax.tree.map(lambda *t: jnp.stack(t), both(x, w, target), both(x, 2 * w, target)))
    logprobs = partial(osj.linear_token_logprobs, memory=IN_FLOAT32["columns"])
    with jax.checking_leaks():
        jax.jit(logprobs).lower(x, w, target)
    found = jax.vmap(logprobs, (0, None, 0))(x, w, jnp.maximum(target, 0))
    assert_same(found, osj.linear_token_logprobs(x, w, jnp.maximum(target, 0)), rtol=1e-5, atol=1e-6)
    kept = jax.make_jaxpr(jax.grad(jax.checkpoint(lambda x: jnp.sin(f(x, w, target)))))(x)
    assert sorted(re.findall(r"outputs=\((.*?)\)", str(kept))) == ["'loss',", "'loss', 'dx'"]
    summed = jax.lax.scan(lambda s, one: (s + f(one[0], w, one[1]), None), 0.0, (x, target))[0]
    assert_same(summed, sum(y for y, _ in each), rtol=1e-6)


def test_what_has_no_derivative_says_so() -> None:
    a = head("float32")
    x, w, target = a["x"], a["w"], a["target"]
    for memory in IN_FLOAT32.values():
        first = jax.grad(partial(osj.linear_cross_entropy, memory=memory))
        with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
            jax.jacrev(first)(x, w, target)
    ones, own = jnp.ones(TOKENS), osj.linear_token_loss
    cases = {
        "token_weight": lambda t: osj.linear_cross_entropy(x, w, target, token_weight=t),
        r"per_token\[0\]": lambda t: own(x, w, target, lambda y, entropy, lse, one: y * one, t),
        "an array outside of loss": lambda t: own(x, w, target, lambda y, *_: y * t[0, 0]),
    }
    for argument, f in cases.items():
        with pytest.raises(TypeError, match=f"{argument} has a gradient, which is not computed"):
            jax.grad(f)(ones)
    # A value without a gradient is no error.
    assert jax.grad(lambda x: own(x, w, target, lambda y, *_: y * ones[0, 0]))(x).shape == x.shape


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "linear_weight must be an array", {"linear_weight": None}),
        (ValueError, r"linear_weight must have shape \(classes, 7\)", {"linear_weight": jnp.zeros((11, 6))}),
        (ValueError, "linear_bias must have shape", {"linear_bias": jnp.zeros(10)}),
        (TypeError, "linear_weight has the dtype float16", {"linear_weight": jnp.zeros((11, 7), "float16")}),
        (TypeError, "input must be one of", {"input": jnp.zeros((3, 5, 7), int)}),
        (ValueError, "target has shape", {"target": jnp.zeros(15, int)}),
        (ValueError, r"; class labels are integers: target\.astype\(int\)$", {"target": jnp.zeros((3, 5))}),
        (TypeError, "target must have an integer dtype", {"target": jnp.zeros((3, 5), bool)}),
        (ValueError, "label_smoothing must be from 0 to 1", {"label_smoothing": 1.5}),
        (ValueError, "z_loss must be at least 0 and finite in float32, got nan", {"z_loss": float("nan")}),
        (ValueError, "z_loss must be at least 0 and finite in float32, got -1", {"z_loss": -1}),
        (ValueError, "scale must fit a float", {"scale": 10**400}),
        (ValueError, "reduction must be 'none', 'mean' or 'sum'", {"reduction": "median"}),
        (ValueError, "weight has shape", {"weight": jnp.zeros(3)}),
        (ValueError, "token_weight has shape", {"token_weight": jnp.zeros(15)}),
        (ValueError, "linear_weight has no elements", {"linear_weight": jnp.zeros((0, 7))}),
        (TypeError, "dtype must be floating point", {"dtype": int}),
        (ValueError, "memory is 10 bytes, and one token", {"memory": 10}),
        (TypeError, "scale must be a number", {"scale": "1"}),
        (ValueError, "scale has shape", {"scale": jnp.ones(15)}),
        (ValueError, "acc_dtype must be float32", {"acc_dtype": "bfloat16"}),
        (ValueError, "no such axis here", {"axis_name": "v"}),
    ],
)
def test_mistakes(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    given: dict[str, Any] = {"input": jnp.zeros((3, 5, 7)), "linear_weight": jnp.zeros((11, 7))}
    given["target"] = jnp.zeros((3, 5), int)
    with pytest.raises(error, match=message):
        osj.linear_cross_entropy(**{**given, **change})


def test_an_axis_of_vmap_is_no_axis_of_a_mesh() -> None:
    a = head("float32")
    of_part = partial(osj.linear_cross_entropy, axis_name="v")
    with pytest.raises(ValueError, match=r"must name axes of jax\.shard_map"):
        jax.vmap(of_part, (None, 0, None), axis_name="v")(a["x"], jnp.stack([a["w"]] * 2), a["target"])


def test_a_loss_that_returns_something_else() -> None:
    a = head("float32")
    for wrong in (lambda *_: 1, lambda logprob, *_: logprob[None]):
        with pytest.raises(ValueError, match="loss must return one floating-point number for each token"):
            osj.linear_token_loss(a["x"], a["w"], a["target"], wrong)
    with pytest.raises(TypeError, match="loss must be a function"):
        osj.linear_token_loss(a["x"], a["w"], a["target"], None)  # type: ignore[arg-type]
