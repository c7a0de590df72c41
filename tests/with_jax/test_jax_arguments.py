"""Arguments of every function: dtypes, errors that name the argument, and the plan for a device."""

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
    mean = jax.value_and_grad(lambda x: osj.cross_entropy(x, target, reduction="mean"))
    assert [(t.dtype, t.shape) for t in jax.eval_shape(mean, x)] == [(dtype, ()), (dtype, (3, 7))]


class NotAnArray:
    """A 0-d array of another library."""

    shape, dtype = (), "another.float32"


X, LABELS = jnp.ones((2, 3)), jnp.zeros(2, jnp.int32)
CALLS: dict[str, dict[str, Any]] = {
    "softmax": {"x": X},
    "log_softmax": {"x": X},
    "logsumexp": {"a": X, "axis": -1},
    "cross_entropy": {"logits": X, "labels": LABELS},
    "token_logprobs": {"logits": X, "index": LABELS},
}
"""Arguments of every function, the input first."""

Refused = tuple[dict[str, Any], type[Exception], str]

REFUSED: list[Refused] = [
    ({"input": [1.0, 2.0]}, TypeError, "(x|logits) must be an array, not list"),
    ({"axis": 2}, ValueError, "axis 2 is out of range for an array with 2 axes"),
    ({"axis": (0, -2)}, ValueError, "names an axis twice"),
    ({"axis": 1.0}, TypeError, "axis must be an int"),
    ({"where": jnp.ones((2, 3))}, ValueError, "where must be boolean"),
    (
        {"where": jnp.ones((4, 3), bool)}, ValueError,
        r"where of shape \(4, 3\) does not broadcast to (x's|logits of) \(2, 3\)",
    ),
    ({"where": object()}, TypeError, "where must be an array, not object"),
    ({"scale": "2"}, TypeError, "scale must be a number"),
    ({"scale": NotAnArray()}, TypeError, "scale must be a number"),
    ({"scale": [1.0]}, TypeError, "scale must be a number"),
    ({"scale": jnp.ones(2, int)}, TypeError, "scale must be a number or a floating-point array"),
    ({"scale": jnp.ones(2)}, ValueError, r"scale of shape \(2,\) does not broadcast to (x's|logits of) \(2, 3\)"),
    ({"scale": jnp.ones(3)}, ValueError, r"scale must .* one number per row.* shape \(1, 3\)"),
    ({"softcap": 0.0}, ValueError, "softcap must be positive"),
    ({"softcap": -1.0}, ValueError, "softcap must be positive"),
    ({"softcap": "1"}, TypeError, "softcap must be a number"),
    ({"softcap": 10**400}, ValueError, "softcap must be positive and finite in float32"),
    ({"scale": 10**400}, ValueError, "scale must fit a float"),
    ({"backend": "triton"}, PlanError, "no backend='triton' with strategy=None for JAX; there are cuda/cluster"),
    ({"backend": "eager", "strategy": "split"}, PlanError, "no backend='eager' with strategy='split'"),
]  # fmt: skip
"""Arguments that every function refuses; "input" is the first one."""

BIASES: list[Refused] = [
    ({"bias": jnp.ones((2, 2, 3))}, ValueError, "bias of shape"),
    ({"bias": jnp.ones(3, int)}, TypeError, "bias must be floating point"),
    ({"bias": "1"}, TypeError, "bias must be an array, not str"),
]
ELEMENTS: list[Refused] = [
    *BIASES,
    ({"x": jnp.ones(3, bool)}, TypeError, "x must be a number array, not bool"),
    ({"scale": jnp.ones((2, 1)), "axis": 0}, ValueError, "scale must .* one number per row"),
]
INTEGERS: Refused = ({"logits": jnp.ones((2, 3), int)}, TypeError, "logits must be floating point, got int32")
MORE: dict[str, list[Refused]] = {
    "softmax": ELEMENTS,
    "log_softmax": ELEMENTS,
    "logsumexp": BIASES,
    "cross_entropy": [
        INTEGERS,
        ({"labels": jnp.zeros(3, int)}, ValueError, r"integer labels must have the shape \(2,\) of the logits"),
        ({"labels": jnp.zeros((2, 3), int)}, ValueError, r"integer labels must have the shape \(2,\)"),
        ({"labels": jnp.zeros((2, 4))}, ValueError, r"labels of shape \(2, 4\) do not broadcast"),
        ({"labels": jnp.zeros(2)}, ValueError, r"; class labels are integers: labels\.astype\(int\)$"),
        ({"labels": [0, 1]}, TypeError, "labels must be an array, not list"),
        ({"label_smoothing": -0.1}, ValueError, "label_smoothing must be from 0 to 1, got -0.1"),
        ({"label_smoothing": "0"}, TypeError, "label_smoothing must be a number, not str"),
        ({"z_loss": -1.0}, ValueError, "z_loss must be at least 0 and finite in float32, got -1.0"),
        ({"z_loss": 10**400}, ValueError, "z_loss must be at least 0 and finite in float32"),
        ({"z_loss": 1e39}, ValueError, "z_loss must be at least 0 and finite in float32"),
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
    ],
    "token_logprobs": [
        INTEGERS,
        ({"index": jnp.zeros(2)}, TypeError, "index must be integers, got float32"),
        ({"index": jnp.zeros(3, int)}, ValueError, r"integer index must have the shape \(2,\)"),
        ({"entropy": 1}, TypeError, "entropy must be a bool, not int"),
        ({"support": (LABELS, LABELS)}, ValueError, r"support's offsets must have rows \+ 1 = 3 elements, got 2"),
        ({"support": (LABELS, [0, 1, 2])}, TypeError, "support's offsets must be an array, not list"),
        ({"support": (LABELS, LABELS), "axis": None}, ValueError, "support needs a single axis, got None"),
        ({"support": (LABELS, LABELS), "axis_name": "x"}, ValueError, "support does not work with axis_name"),
        ({"support": (LABELS, LABELS), "index": LABELS[:1]}, ValueError, r"index of shape \(1,\) has other rows"),
    ],
}  # fmt: skip


CASES = [(name, *refused) for name in CALLS for refused in REFUSED + MORE[name]]


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"), CASES, ids=[f"{name}-{message[:40]}" for name, _, _, message in CASES]
)
def test_what_is_refused(name: str, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    first = next(iter(CALLS[name]))
    arguments = {first if argument == "input" else argument: value for argument, value in arguments.items()}
    with pytest.raises(error, match=message) as caught:
        getattr(osj, name)(**(CALLS[name] | arguments))
    assert str(caught.value).startswith(f"{name}: ")


def test_plans() -> None:
    """Kernels run on a GPU, and XLA on a CPU, also where the losses and the gradient are written in one pass."""
    operands = {"x": jax.ShapeDtypeStruct((4096, 50257), jnp.bfloat16)}
    for name in ("cross_entropy", "token_logprobs"):
        for operation in (name, f"{name}_backward"):
            call = Signature(operation, outputs_of(operation))
            assert custom_op.plan_for(call, operands, known("h200")).backend == "cuda"
            assert custom_op.plan_for(call, operands, known("cpu")).backend == "eager"
    call = Signature("cross_entropy", outputs_of("cross_entropy", gradient=True))
    one_pass = custom_op.plan_for(call, operands, known("h200"))
    assert (one_pass.backend, one_pass.reads) == ("cuda", 1)
    assert one_pass.bytes_moved > 2 * 4096 * 50257 * 2
