"""The losses under JAX's transforms: derivatives, batches, passes and memory of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from compared_programs import Call, assert_all_close, both, number
from exact_losses import classes, logits, results_written_out, written_out

import onlinesoftmax.jax as osj


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
