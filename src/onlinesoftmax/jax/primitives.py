"""The operations as primitives of JAX: their derivatives, their batches, and who computes them on which platform.

Who does is decided when a program is lowered for a platform, not when it is traced: the same function may run on a
CPU and on a GPU.  `who` is the backend and the strategy that were forced, or None for each.

A derivative is a primitive too.  For softmax, y = softmax(z) changes by J t where z changes by t, J being
diag(y) - y yᵀ; as J is its own transpose, one kernel serves forward and reverse mode.  The others come in pairs,
a tangent and its transpose, the gradient.  So grad runs two kernels, and JAX makes the rest of it: jvp, vjp,
linearize, hessian, checkpoint.  What comes after a second derivative is left to XLA's operations.

Arrays keep all their axes; the last is the one that is reduced.  Arrays beside x have the same number of axes,
each as long as x's or 1, so that nothing is broadcast in memory, and a batch is one more axis.
"""

from __future__ import annotations

import math
from functools import partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.arrays import Array
from ..core.device import Device, known
from ..core.operations import OPERATIONS
from ..core.problem import Problem
from ..core.scores import PLAIN, Scores, accumulator
from ..core.task import ITEMSIZE, Choice, Flags, Task, TensorSpec, contiguous_spec, row_spec, task_of
from ..kernels import pallas
from ..planner.measured import table_for
from ..planner.plan import Plan, PlanError, plan
from ..planner.strategies import FOR_JAX
from ..planner.strategies.pallas import LARGEST
from . import ops as xla
from . import partitioning as partitioned
from .device import to_lower_for

TRANSPOSES = {
    "softmax_backward": "softmax_backward",
    "log_softmax_tangent": "log_softmax_backward",
    "log_softmax_backward": "log_softmax_tangent",
    "logsumexp_tangent": "logsumexp_backward",
    "logsumexp_backward": "logsumexp_tangent",
}
"""What is linear in its last operand, and its transpose."""

TANGENTS = {
    "softmax": "softmax_backward",
    "log_softmax": "log_softmax_tangent",
    "logsumexp": "logsumexp_tangent",
}
"""An operation, and what a change of its scores does to its result."""


Who = tuple[str | None, str | None]


def bind(name: str, *operands: Array, who: Who = (None, None), **params: Any) -> Array:
    """One operation on arrays: `spec` and `factor` as in backends/xla.py."""
    result: Array = PRIMITIVES[name].bind(*operands, who=who, **params)
    return result


def check(name: str, who: Who) -> None:
    """Raise PlanError where there is no such backend, or no such strategy of it; whether it can run shows later."""
    pairs = {(row[0], row[1]) for row in FOR_JAX}
    backend, strategy = who
    fitting = [pair for pair in pairs if backend in (None, pair[0]) and strategy in (None, pair[1])]
    if not fitting:
        raise PlanError(
            f"{name}: no backend={backend!r} with strategy={strategy!r} for JAX; there are "
            + ", ".join(sorted("/".join(pair) for pair in pairs))
        )


def plan_for(
    name: str, operands: tuple[Any, ...], device: Device, who: Who = (None, None), spec: Scores = PLAIN,
    factor: float = 1.0, interpret: bool = False,
) -> Plan:  # fmt: skip
    """The plan for an operation on arrays of these shapes and dtypes, to be run there or interpreted.

    Raises:
        PlanError: what was forced cannot run; the message lists every reason.
    """
    x = operands[0]
    rows, cols, dtype = math.prod(x.shape[:-1]), x.shape[-1], x.dtype.name
    missing = []
    if dtype not in ITEMSIZE:
        missing.append(("pallas", f"kernels take {', '.join(ITEMSIZE)}, not {dtype}"))
    elif max(rows, cols) > LARGEST:
        missing.append(("pallas", f"{rows} x {cols}: a kernel's indices end at {LARGEST}"))
    if interpret:
        missing.append(("pallas/cluster", "Mosaic is not interpreted"))
    elif find_spec("absl") is None:
        missing.append(("pallas/cluster", "JAX's Mosaic needs absl-py: pip install absl-py"))
    problem = Problem.of(_task(name, operands, spec, dtype if dtype in ITEMSIZE else "float32"))
    return plan(problem, device, Choice(*who), missing, table_for(device), FOR_JAX)


def _task(name: str, operands: tuple[Any, ...], spec: Scores, dtype: str) -> Task:
    """The task of an operation on arrays of these shapes, which XLA lays out contiguously."""
    operation, shape = OPERATIONS[name], operands[0].shape
    whole, per_row = contiguous_spec(shape, dtype), row_spec(shape, len(shape) - 1, dtype)
    written = operation.written(operation.always)
    kinds = {t.name: t.kind for t in operation.operands} | {t.name: t.kind for t in written}
    tensors = {name: whole if kind == "element" else per_row for name, kind in kinds.items()}
    for option, array in zip(spec.names, operands[1:], strict=False):
        strides = zip(array.shape, contiguous_spec(array.shape, dtype).strides, strict=True)
        steps = tuple(0 if size == 1 else step for size, step in strides)
        tensors[option] = TensorSpec(steps, array.dtype.name)
    numbers = {"scale"} if isinstance(spec.scale, float) and spec.scale != 1 else set()
    numbers |= {"softcap"} if spec.softcap is not None else set()
    return task_of(operation, operation.always, shape, len(shape) - 1, tensors, Flags(frozenset(numbers)))


def _lowered(name: str, platform: str, *operands: Array, who: Who, **params: Any) -> Array:
    """An operation as the plan for a platform has it."""
    eager = partial(xla.OPERATIONS[name], **params)
    if name not in OPERATIONS:
        # The tangents of forward mode have no kernel, whoever computes the rest.
        return eager(*operands)
    on_gpu = platform == "cuda"
    # The interpreter, which is for those who ask for it, needs some GPU's numbers to plan with.
    device = to_lower_for() if on_gpu else known("h200" if who[0] == "pallas" else "cpu")

    def planned(operands: tuple[Array, ...]) -> Plan:
        return plan_for(name, operands, device, who, **params, interpret=not on_gpu)

    def kernel(*operands: Array) -> Array:
        # Of a part of the rows XLA may be the faster.
        chosen = planned(operands)
        if chosen.backend == "pallas":
            return pallas.run(name, operands, chosen, not on_gpu, **params)
        return eager(*operands)

    if planned(operands).backend == "eager":
        return eager(*operands)
    return partitioned.by_rows(kernel, jax.eval_shape(eager, *operands), *operands)


def _make(name: str) -> Primitive:
    primitive, function = Primitive(f"onlinesoftmax_{name}"), xla.OPERATIONS[name]

    def abstract(*avals: Any, who: Who, **params: Any) -> Any:
        result = jax.eval_shape(partial(function, **params), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return avals[0].update(shape=result.shape, dtype=result.dtype, weak_type=False)

    def implementation(*operands: Array, **params: Any) -> Array:
        return _compiled(name, *operands, items=tuple(params.items()))

    primitive.def_impl(implementation)
    primitive.def_abstract_eval(abstract)
    partitioned.register(primitive)
    for platform in (None, "cuda"):
        lowering = mlir.lower_fun(partial(_lowered, name, platform or "any"), multiple_results=False)
        mlir.register_lowering(primitive, lowering, platform=platform)
    batching.primitive_batchers[primitive] = partial(_batch, name)
    ad.primitive_jvps[primitive] = partial(_jvp if name in TANGENTS else _linear_jvp, name)
    if name in TRANSPOSES:
        ad.primitive_transposes[primitive] = partial(_transpose, name)
    return primitive


@partial(jax.jit, static_argnames=("name", "items"))
def _compiled(name: str, *operands: Array, items: tuple[tuple[str, Any], ...]) -> Array:
    return bind(name, *operands, **dict(items))


def _batch(name: str, operands: tuple[Array, ...], axes: tuple[int | None, ...], **params: Any) -> tuple[Array, int]:
    """A batch is one more axis of rows; what has no batch has one of size 1, or all of it where it goes with x."""
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    beside = params["spec"].arrays if "spec" in params else 0

    def to_front(i: int, x: Array, axis: int | None) -> Array:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0)
        x = x[None]
        return x if 0 < i <= beside else jnp.broadcast_to(x, (size, *x.shape[1:]))

    moved = [to_front(i, x, axis) for i, (x, axis) in enumerate(zip(operands, axes, strict=True))]
    return bind(name, *moved, **params), 0


def _jvp(
    name: str, primals: tuple[Array, ...], tangents: tuple[Any, ...], *, spec: Scores, who: Who
) -> tuple[Array, Any]:
    """The result, and what a change of the scores does to it."""
    x, *arrays = primals
    y = bind(name, *primals, spec=spec, who=who)
    change, factor = _score_tangent(x, tuple(arrays), tangents, spec)
    if change is None:
        return y, _nothing(y)
    if name == "logsumexp":
        whole = bind(TANGENTS[name], *primals, y, change, spec=spec, factor=factor, who=who)
        # Of the state (m, l), l changes for both; one that is infinite does not change.
        l = jnp.where(jnp.isfinite(y[..., 1]), y[..., 1], 0)
        return y, jnp.stack([jnp.zeros_like(whole), whole * l], axis=-1)
    out = bind(TANGENTS[name], y, change, factor=factor, who=who)
    mask = spec.named(tuple(arrays))[2]
    # The log of a masked element is -inf whatever the others are.
    return y, out if mask is None or name == "softmax" else jnp.where(mask, out, 0)


def _score_tangent(
    x: Array, arrays: tuple[Array, ...], tangents: tuple[Any, ...], spec: Scores
) -> tuple[Array | None, float]:
    """The change of the scores, and a number to multiply it by; None where nothing that they are made of changes."""
    t_x, *t_arrays = (None if type(t) is ad.Zero else t for t in tangents)
    mask = spec.named(arrays)[2]
    if spec.linear and t_x is not None:
        return t_x if mask is None else jnp.where(mask, t_x, 0), float(spec.scale)
    wide = accumulator(x)
    parts = []
    if t_x is not None:
        parts.append(xla.slope(x, arrays, spec) * t_x.astype(wide))
    for name, t in zip(spec.names, t_arrays, strict=True):
        if name == "scale" and t is not None:
            parts.append(xla.scale_slope(x, arrays, spec) * x.astype(wide) * t.astype(wide))
        elif name == "bias" and t is not None:
            parts.append(t.astype(wide))
    if not parts:
        return None, 1.0
    change = jnp.broadcast_to(sum(parts[1:], parts[0]), x.shape).astype(x.dtype)
    return change if mask is None else jnp.where(mask, change, 0), 1.0


def _nothing(y: Array) -> Any:
    """The tangent of what does not change."""
    return ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]  # it is there, in every version


def _linear_jvp(
    name: str, primals: tuple[Array, ...], tangents: tuple[Any, ...], *, who: Who, **params: Any
) -> tuple[Array, Any]:
    """Of what is linear in its last operand: itself; of the others, what JAX makes of XLA's operations."""
    result = bind(name, *primals, who=who, **params)
    *fixed, last = tangents
    parts = [] if type(last) is ad.Zero else [bind(name, *primals[:-1], last, who=who, **params)]
    if any(type(t) is not ad.Zero for t in fixed):
        function = lambda *operands: xla.OPERATIONS[name](*operands, primals[-1], **params)  # noqa: E731
        changes = tuple(map(ad.instantiate_zeros, fixed))
        parts.append(jax.jvp(function, primals[:-1], changes)[1])
    return result, sum(parts[1:], parts[0]) if parts else _nothing(result)


def _transpose(name: str, cotangent: Any, *operands: Any, **params: Any) -> tuple[Any, ...]:
    *fixed, last = operands
    if type(cotangent) is ad.Zero:
        return (*(None for _ in fixed), ad.Zero(last.aval))
    return (*(None for _ in fixed), bind(TRANSPOSES[name], *fixed, cotangent, **params))


PRIMITIVES: dict[str, Primitive] = {name: _make(name) for name in xla.OPERATIONS}
