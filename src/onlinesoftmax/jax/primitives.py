"""The operations as primitives of JAX: their derivatives, their batches, and their lowering for each platform.

The plan is made when a program is lowered for a platform, not when it is traced: the same function may run on a CPU
and on a GPU.  `choice` is the backend and the strategy that the caller forces.

A derivative is a primitive too.  Let J = diag(y) - y yᵀ; softmax changes by J t where its scores change by t.  J is its
own transpose, so one kernel serves forward and reverse mode.  The other operations have a pair of primitives, a
tangent and its transpose, the gradient.  So grad runs two kernels, and JAX makes jvp, vjp, linearize, hessian and
checkpoint from the same rules.  XLA's operations compute third and higher derivatives.

Arrays keep all their axes, and the last axis is reduced.  Arrays beside x have the same number of axes, each as long
as x's or 1, so that nothing is broadcast in memory, and a batch is one more axis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.arrays import Array
from ..core.device import Device, known
from ..core.options import PLAIN, ScoreOptions
from ..core.task import ANY, Choice, Task
from ..kernels import pallas
from ..ops import OPERATIONS
from ..planner.plan import Plan, PlanError
from ..planner.strategies import FOR_JAX
from . import array_types, exchange, ops, part, partitioning, plans, targets
from .device import to_lower_for
from .targets import PLAIN_TARGET, TargetOptions


def bind(name: str, *operands: Array, choice: Choice = ANY, **params: Any) -> Array:
    """Apply a primitive to arrays.

    `params` are `options`, `factor`, `target_options` and `axis_name`, as in jax/ops.py.
    """
    result: Array = PRIMITIVES[name].bind(*array_types.alike(operands), choice=choice, **params)
    return result


def check(name: str, choice: Choice) -> None:
    """Check that JAX has the forced backend and strategy; the plan shows later if they can run.

    Raises:
        PlanError: there is no such backend, or the backend has no such strategy.
    """
    pairs = {(row[0], row[1]) for row in FOR_JAX}
    backend, strategy, _ = choice
    fitting = [pair for pair in pairs if backend in (None, pair[0]) and strategy in (None, pair[1])]
    if not fitting:
        raise PlanError(
            f"{name}: no backend={backend!r} with strategy={strategy!r} for JAX; there are "
            + ", ".join(sorted("/".join(pair) for pair in pairs))
        )


def plan_for(
    name: str, operands: tuple[Any, ...], device: Device, choice: Choice = ANY, options: ScoreOptions = PLAIN,
    target_options: TargetOptions = PLAIN_TARGET,
) -> Plan:  # fmt: skip
    """The plan for an operation on arrays of these shapes and dtypes.

    Args:
        name: Name in OPERATIONS.
        operands: Arrays, or shapes and dtypes, as for the function of this name in jax/ops.py.
        device: The device of the arrays.
        choice: The backend and the strategy that the caller forces.
        options: The score options.
        target_options: Options of an operation with a target.

    Raises:
        PlanError: the forced backend or strategy cannot run; the message lists every reason.
    """
    planner = plans.planner_for(device, choice, operands[0].dtype.name)
    return planner.plan(task_for(name, operands, options, target_options), choice)


def task_for(
    name: str, operands: tuple[Any, ...], options: ScoreOptions = PLAIN, target_options: TargetOptions = PLAIN_TARGET
) -> Task:
    """The task of an operation on arrays of these shapes and dtypes."""
    x, *arrays = (plans.ArraySpec(t.shape, t.dtype.name) for t in (operands[0], *operands[OPERATIONS[name].inputs :]))
    named = dict(zip(options.arrays, arrays, strict=False))
    numbers = frozenset(options.given) & {"scale", "softcap"} - named.keys()
    numbers |= {number for number, _ in ops.numbers(name, target_options)}
    return plans.task_for(name, ops.outputs(name, target_options), x, named, numbers)


def _lowered(name: str, platform: str, *operands: Array, choice: Choice, **params: Any) -> Array:
    """A primitive, as the plan for a platform says."""
    operands, params = _without_classes(name, operands, params)
    eager, of_device = partial(ops.EAGER_FUNCTIONS[name], **params), partial(run, platform, choice)
    if kernel_plan(platform, choice, name, operands, params) is None:
        return eager(*operands)

    def on_device(names: exchange.Names, *operands: Array) -> Array:
        return part.apply(name, names, of_device, operands, **params) if names else of_device(name, *operands, **params)

    has_row = [*have_row(name, operands, params.get("options", PLAIN)), not OPERATIONS[name].per_row]
    return partitioning.by_rows(on_device, jax.eval_shape(eager, *operands), has_row, *operands)


def have_row(name: str, operands: tuple[Array, ...], options: ScoreOptions) -> list[bool]:
    """True for the operands whose last axis is a row: the inputs of the operation and the arrays of the options."""
    elements = OPERATIONS[name].inputs + len(options.arrays)
    return [i < elements for i in range(len(operands))]


def run(platform: str, choice: Choice, name: str, *operands: Array, **params: Any) -> Array:
    """An operation on the arrays of one device.

    The plan is made for the rows and the columns of one device: XLA may be the fastest for fewer of them.
    """
    operands, params = _without_classes(name, operands, params)
    plan = kernel_plan(platform, choice, name, operands, params)
    if plan is None:
        return ops.EAGER_FUNCTIONS[name](*operands, **params)
    target_options = params.pop("target_options", PLAIN_TARGET)
    written, numbers = ops.outputs(name, target_options), ops.numbers(name, target_options)
    found = pallas.run(name, operands, plan, platform != "cuda", outputs=written, numbers=numbers, **params)
    return ops.stacked(found)


def _without_classes(
    name: str, operands: tuple[Array, ...], params: dict[str, Any]
) -> tuple[tuple[Array, ...], dict[str, Any]]:
    """The operands and the params, for a gradient of sharded rows those of a gradient of whole rows if possible."""
    target_options = params.get("target_options", PLAIN_TARGET)
    if name not in OPERATIONS or not target_options.classes or target_options.smoothing:
        return operands, params
    operands, target_options = targets.local_backward(name, operands, target_options)
    return operands, params | {"target_options": target_options}


def kernel_plan(
    platform: str, choice: Choice, name: str, operands: tuple[Array, ...], params: dict[str, Any]
) -> Plan | None:
    """The plan for a platform; None where XLA's operations run."""
    target_options = params.get("target_options", PLAIN_TARGET)
    if name not in OPERATIONS or "axis_name" in params or target_options.classes:
        # There is no kernel for the tangents of forward mode, for an exchange, and for a gradient that spreads a part
        # of the target over the classes of other devices.
        return None
    if not all(isinstance(size, int) for t in operands for size in t.shape):
        # jax.export: a size is a symbol, and a kernel is made for numbers.
        if choice.backend == "pallas" or (choice.backend is None and choice.strategy not in (None, "row")):
            raise PlanError(f"{name}: a kernel needs sizes that are known, and the shape is {operands[0].shape}")
        return None
    device = to_lower_for() if platform == "cuda" else known("cpu")
    chosen = plan_for(name, operands, device, choice, params.get("options", PLAIN), target_options)
    return chosen if chosen.backend == "pallas" else None


def _make(name: str) -> Primitive:
    """The primitive of this name, with all of its rules."""
    primitive, function = Primitive(f"onlinesoftmax_{name}"), ops.EAGER_FUNCTIONS[name]

    def abstract(*avals: Any, choice: Choice, **params: Any) -> Any:
        # An exchange does not change a shape.
        params.pop("axis_name", None)
        result = jax.eval_shape(partial(function, **params), *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals))
        return array_types.result_type(avals[0], result.shape, result.dtype, name in ops.PER_ROW)

    primitive.def_abstract_eval(abstract)
    set_lowering(primitive, partial(_lowered, name))
    batching.primitive_batchers[primitive] = partial(_batch, name)
    ad.primitive_jvps[primitive] = partial(_jvp if name in ops.TANGENTS else _linear_jvp, name)
    if name in ops.EXCHANGING:
        batching.fancy_primitive_batchers[primitive] = partial(_batch_of_devices, name)
    if name in ops.TRANSPOSES:
        ad.primitive_transposes[primitive] = partial(_transpose, name)
    return primitive


def set_lowering(primitive: Primitive, lowered: Callable[..., Any]) -> None:
    """Give a primitive its lowering for each platform; outside of `jit` the primitive is compiled by itself.

    Where JAX wants to run operations one by one, XLA's operations run, or the kernel that the caller forces: under
    `jax.disable_jit`, and when `jax_debug_nans` looks for the operation that made a NaN.

    Args:
        primitive: The primitive.
        lowered: Function of the platform, "cuda" or "any", of the operands, and of the parameters of the primitive.
    """

    def implementation(*operands: Array, **params: Any) -> Any:
        # JAX has this setting in every version, but does not declare it.
        if jax.config.jax_disable_jit or _one_by_one.wanted:  # type: ignore[attr-defined]
            return lowered("any", *operands, **params)
        return _compiled(primitive, *operands, items=tuple(params.items()))

    primitive.def_impl(implementation)
    partitioning.register(primitive)
    for platform in (None, "cuda"):
        lowering = mlir.lower_fun(partial(lowered, platform or "any"), multiple_results=primitive.multiple_results)
        mlir.register_lowering(primitive, array_types.of_plain_arrays(lowering), platform=platform)


class _OneByOne(threading.local):
    """`wanted` is True while a thread runs the body of `_compiled`: to trace it, or without `jit` to find a NaN."""

    wanted = False


_one_by_one = _OneByOne()


@partial(jax.jit, static_argnums=0, static_argnames="items")
def _compiled(primitive: Primitive, *operands: Array, items: tuple[tuple[str, Any], ...]) -> Any:
    before, _one_by_one.wanted = _one_by_one.wanted, True
    try:
        return primitive.bind(*operands, **dict(items))
    finally:
        _one_by_one.wanted = before


def _batch(name: str, operands: tuple[Array, ...], axes: tuple[int | None, ...], **params: Any) -> tuple[Array, int]:
    """A batch is one more axis of rows."""
    return bind(name, *batched(operands, axes, params.get("options", PLAIN)), **params), 0


def batched(operands: tuple[Array, ...], axes: tuple[int | None, ...], options: ScoreOptions) -> list[Array]:
    """The operands of a batch, with the batch as their first axis.

    An operand without a batch gets an axis of size 1 if it is an array of the score options, else one of full size.
    """
    size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
    beside = len(options.arrays)

    def to_front(i: int, x: Array, axis: int | None) -> Array:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0)
        x = x[None]
        return x if 0 < i <= beside else jnp.broadcast_to(x, (size, *x.shape[1:]))

    return [to_front(i, x, axis) for i, (x, axis) in enumerate(zip(operands, axes, strict=True))]


def _batch_of_devices(
    name: str, axis: Any, operands: tuple[Array, ...], axes: tuple[int | None, ...], **params: Any
) -> tuple[Array, int | None]:
    """A batch of a primitive that exchanges a sum; the batch itself may be the axis of the exchange."""
    if axis.name in params.get("axis_name", ()):
        del params["choice"]
        formula = partial(ops.EAGER_FUNCTIONS[name], **params)
        return jax.vmap(formula, in_axes=axes, axis_name=axis.name, axis_size=axis.size)(*operands), 0
    if all(one is None for one in axes):
        return bind(name, *operands, **params), None
    return _batch(name, operands, axes, **params)


def _jvp(
    name: str, primals: tuple[Array, ...], tangents: tuple[Any, ...], *, options: ScoreOptions, choice: Choice,
    **more: TargetOptions,
) -> tuple[Array, Any]:  # fmt: skip
    """The result of an operation and its change."""
    y = bind(name, *primals, options=options, choice=choice, **more)
    names = ("x", *options.arrays)
    x, *arrays = primals[: len(names)]
    changes = (None if type(t) is ad.Zero else t for t in tangents)
    # A target, which follows the arrays, is an integer and does not change.
    named = dict(zip(names, changes, strict=False))
    change, factor = ops.score_tangent(x, tuple(arrays), options, named)
    if change is None:
        return y, _nothing(y)
    return y, ops.tangent(name, partial(bind, choice=choice), primals, y, (change, factor), options, **more)


def _nothing(y: Array) -> Any:
    """The tangent of a value that does not change."""
    return ad.Zero.from_primal_value(y)  # type: ignore[attr-defined]  # it is there, in every version


def _linear_jvp(
    name: str, primals: tuple[Array, ...], tangents: tuple[Any, ...], *, choice: Choice, **params: Any
) -> tuple[Array, Any]:
    """The result of a primitive that is linear in its last operand, and its change.

    A change of the last operand goes through the same primitive; for the others JAX differentiates the formula.
    """
    result = bind(name, *primals, choice=choice, **params)
    *fixed, last = tangents
    parts = [] if type(last) is ad.Zero else [bind(name, *primals[:-1], last, choice=choice, **params)]
    changed = [i for i, t in enumerate(fixed) if type(t) is not ad.Zero]
    if changed:

        def function(*operands: Array) -> Array:
            given = dict(zip(changed, operands, strict=True))
            return ops.EAGER_FUNCTIONS[name](*(given.get(i, primal) for i, primal in enumerate(primals)), **params)

        parts.append(jax.jvp(function, [primals[i] for i in changed], [fixed[i] for i in changed])[1])
    return result, sum(parts[1:], parts[0]) if parts else _nothing(result)


def _transpose(name: str, cotangent: Any, *operands: Any, **params: Any) -> tuple[Any, ...]:
    """The gradient in the last operand of a primitive that is linear in it."""
    *fixed, last = operands
    if type(cotangent) is ad.Zero:
        return (*(None for _ in fixed), ad.Zero(last.aval))
    return (*(None for _ in fixed), bind(ops.TRANSPOSES[name], *fixed, cotangent, **params))


PRIMITIVES: dict[str, Primitive] = {name: _make(name) for name in ops.EAGER_FUNCTIONS}
