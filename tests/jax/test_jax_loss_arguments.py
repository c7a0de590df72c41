"""Arguments of the losses: dtypes, errors that name the argument, and the plan for a device."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jaxlib", reason="jax is not installed")

import jax
import jax.numpy as jnp
from exact_losses import classes, logits

import onlinesoftmax.jax as osj
from onlinesoftmax import PlanError
from onlinesoftmax.core.device import known
from onlinesoftmax.jax import custom_op
from onlinesoftmax.jax.plans import outputs_of
from onlinesoftmax.jax.signature import Signature


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e5m2"])
def test_dtypes(dtype: str) -> None:
    x, target = logits(3, 7, dtype=dtype), classes(3, cols=7).astype("uint8")
    assert jax.eval_shape(osj.cross_entropy, x, target).dtype == dtype
    assert jax.eval_shape(osj.cross_entropy, x, jax.nn.one_hot(target, 7)).dtype == dtype
    assert {t.dtype.name for t in jax.eval_shape(osj.token_logprobs, x, target)} == {"float32"}
    gradient = jax.grad(lambda x: jnp.sum(osj.cross_entropy(x, target).astype("float32")))
    assert jax.eval_shape(gradient, x).dtype == dtype


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
    ({"reduction": "avg"}, ValueError, "reduction must be 'none', 'mean' or 'sum', got 'avg'"),
    ({"reduction": None}, ValueError, "reduction must be 'none', 'mean' or 'sum', got None"),
    ({"ignore_index": 1.0}, TypeError, "ignore_index must be an int or None, not float"),
    ({"ignore_index": True}, TypeError, "ignore_index must be an int or None, not bool"),
    ({"ignore_index": 1, "labels": jnp.ones((2, 3))}, ValueError, "ignore_index needs integer labels, got float32"),
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
    """Kernels run on a GPU, and XLA on a CPU, also where the losses and the gradient are written in one pass."""
    operands = {"x": jax.ShapeDtypeStruct((4096, 50257), jnp.bfloat16)}
    for name in ("cross_entropy", "token_logprobs"):
        for operation in (name, f"{name}_backward"):
            call = Signature(operation, outputs_of(operation))
            assert custom_op.plan_for(call, operands, known("h200")).backend == "pallas"
            assert custom_op.plan_for(call, operands, known("cpu")).backend == "eager"
    call = Signature("cross_entropy", outputs_of("cross_entropy", gradient=True))
    one_pass = custom_op.plan_for(call, operands, known("h200"))
    assert (one_pass.backend, one_pass.reads) == ("pallas", 1)
    assert one_pass.bytes_moved > 2 * 4096 * 50257 * 2
