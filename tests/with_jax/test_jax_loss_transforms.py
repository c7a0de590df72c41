"""The losses under JAX's transforms: derivatives, batches, passes over the logits, arrays that are kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import re

import jax
import jax.numpy as jnp
import numpy as np
from exact_losses import Call, assert_all_close, both, classes, logits, number, results_written_out, written_out

import onlinesoftmax.jax as osj
from onlinesoftmax.jax import custom_op
from onlinesoftmax.jax.signature import Signature


def loss_and_results(x: Any, target: Any, **more: Any) -> tuple[Any, ...]:
    """Everything that is known of rows, by both functions."""
    loss = osj.cross_entropy(x, target, label_smoothing=0.1, z_loss=0.01, **more)
    return loss, *osj.token_logprobs(x, target, **more)


def all_written_out(x: Any, target: Any) -> tuple[Any, ...]:
    logprob, entropy, lse = results_written_out(x, target)
    return written_out(x, target, 0.1, 0.01), logprob, entropy, lse


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


def count(jaxpr: Any, name: str, counts: Callable[[Any], bool] = lambda params: True) -> int:
    """Number of primitives of a name in a program and the programs that it calls, by their parameters."""
    found = 0
    for equation in jaxpr.eqns:
        found += equation.primitive.name == name and counts(equation.params)
        inner = (p.jaxpr if hasattr(p, "jaxpr") else p for p in equation.params.values())
        found += sum(count(p, name, counts) for p in inner if hasattr(p, "eqns"))
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


COLS = 130
X, TARGET = logits(4, COLS), classes(4, cols=COLS)


def loss(x: Any, **more: Any) -> Any:
    return osj.cross_entropy(x, TARGET, reduction="mean", **more)


def unreduced(x: Any, **more: Any) -> Any:
    return jnp.mean(osj.cross_entropy(x, TARGET, **more))


def passes(f: Call) -> list[int]:
    """Number of passes over the logits of a program: losses alone, gradient alone, and both in one pass."""
    program = jax.make_jaxpr(f)(X).jaxpr
    forward, backward = (count(program, f"onlinesoftmax_cross_entropy{name}") for name in ("", "_backward"))
    both = count(program, "onlinesoftmax_cross_entropy", lambda params: params["call"].writes_gradient)
    return [forward - both, backward, both]


def test_the_gradient_is_written_only_where_it_is_asked_for() -> None:
    assert passes(loss) == [1, 0, 0]
    assert passes(jax.jit(loss)) == [1, 0, 0]
    assert passes(jax.grad(loss)) == [0, 0, 1]
    assert passes(jax.value_and_grad(jax.jit(loss))) == [0, 0, 1]
    assert passes(jax.grad(unreduced)) == [1, 1, 0]
    # The first pass of a checkpoint writes no gradient.
    assert passes(jax.value_and_grad(jax.checkpoint(loss))) == [1, 0, 1]


def products(f: Call, *arguments: Any) -> list[str]:
    """The multiplications of a compiled program over an array of the size of the logits."""
    text = jax.jit(f).lower(*arguments).compile().as_text()
    return re.findall(rf"\[4,{COLS}\]\S* multiply\(", text)


def test_xla_removes_the_multiplication_by_a_gradient_of_1() -> None:
    """The interpreter of the kernel computes with tiles of other shapes, so no product of its own is counted."""
    by_kernel = partial(loss, backend="pallas", strategy="looped")
    assert not products(jax.value_and_grad(by_kernel), X)
    assert not products(jax.grad(lambda x: by_kernel(x, ignore_index=3) + 2.0), X)
    assert len(products(jax.grad(lambda x: 1024 * by_kernel(x)), X)) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_xla_removes_the_multiplication_in_every_dtype(dtype: str) -> None:
    """The backward pass alone: the program of rows times 1 neither multiplies nor converts."""
    x = X.astype(dtype)
    call = Signature("scaled_rows", ("y",))
    by_one = lambda x: custom_op.bind(call, {"x": x, "dy": jnp.ones(4)})["y"]  # noqa: E731  two uses
    text = jax.jit(by_one).lower(x).compile().as_text()
    assert "multiply(" not in text
    assert "convert(" not in text
    np.testing.assert_array_equal(by_one(x), x)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_gradient_is_kept_and_not_the_logits(dtype: str) -> None:
    x = X.astype(dtype)
    _, vjp = jax.vjp(loss, x)
    (large,) = (t for t in jax.tree.leaves(vjp) if hasattr(t, "dtype") and t.size >= x.size)
    assert large.dtype == dtype
    np.testing.assert_array_equal(large, jax.grad(loss)(x))


def test_a_scaled_loss() -> None:
    scaled = jax.grad(lambda x, f: 3.5 * f(x) ** 2)
    assert_all_close(both(partial(scaled, f=loss), partial(scaled, f=unreduced), X))


MORE = pytest.mark.exhaustive


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, marks=MORE), pytest.param({"softcap": 3.0, "scale": 0.5}, marks=MORE),
        {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0},
    ],
    ids=str,
)  # fmt: skip
def test_derivatives_of_every_order(more: dict[str, float]) -> None:
    x, t = X[:, :7], logits(4, 7, seed=2)
    target = classes(4, cols=7)

    def every_way(reduction: str) -> Call:
        def f(x: Any) -> Any:
            found = osj.cross_entropy(x, target, reduction=reduction, **more)
            return found if reduction == "mean" else jnp.mean(found)

        def cubes(x: Any) -> Any:
            return jnp.sum(jax.grad(f)(x) ** 3)

        def results(x: Any, t: Any) -> Any:
            first = jax.jvp(f, (x,), (t,)), jax.grad(jax.checkpoint(f))(x), jax.vmap(jax.grad(f))(jnp.stack([x, t]))
            third = jax.grad(lambda x: jnp.sum(jax.grad(cubes)(x) * t))(x)
            return first, jax.hessian(f)(x), jax.jvp(jax.grad(f), (x,), (t,)), jax.grad(cubes)(x), third

        return results

    assert_all_close(both(every_way("mean"), every_way("none"), x, t))


def test_the_gradient_of_an_array_as_scale() -> None:
    def both_gradients(f: Call) -> Call:
        return jax.grad(lambda x, scale: f(x, scale=scale, softcap=4.0), (0, 1))

    assert_all_close(both(both_gradients(loss), both_gradients(unreduced), X, jnp.float32(0.3)))
