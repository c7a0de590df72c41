"""The operations as primitives of JAX: their types, their batches, and their lowering for each platform.

The plan is made when a program is lowered for a platform, not when it is traced: the same function may run on a CPU
and on a GPU.  autograd.py has the derivatives, which are primitives too.

A primitive has two parameters, the names of its operands and the signature of the call.  Arrays keep all their axes,
and the last axis is reduced.  Arrays of the score options have as many axes as x, each as long as x's or 1, so that
nothing is broadcast in memory, and a batch is one more axis.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import batching, mlir

from ..core.arrays import Array
from ..core.device import Device, known
from ..core.plan_log import Kind, note_plan
from ..core.task import Choice, Task
from ..kernels import pallas
from ..ops import OPERATIONS
from ..planner.plan import Plan, PlanError
from ..planner.strategies import JAX_WITH_CUDA, strategies_of
from . import array_types, cuda_call, partitioning, plans, shards
from .device import is_on, to_lower_for
from .eager import FORMULAS
from .signature import Names, Signature, Values


def bind(call: Signature, operands: Mapping[str, Array]) -> Values:
    """Apply the primitive of a call to arrays, the input "x" first; the results by name."""
    # JAX sorts the keys of a dictionary that passes through a transform.
    operands = {"x": operands["x"], **operands}
    arrays = array_types.alike(tuple(operands.values()))
    return dict(zip(call.outputs, PRIMITIVES[call.name].bind(*arrays, names=tuple(operands), call=call), strict=True))


def check(name: str, choice: Choice) -> None:
    """Check that JAX has the forced backend and strategy; the plan shows later if they can run.

    Raises:
        PlanError: there is no such backend, or the backend has no such strategy.
    """
    pairs = {(row[0], row[1]) for row in strategies_of(OPERATIONS[name], JAX_WITH_CUDA)[0]}
    fitting = [pair for pair in pairs if choice.backend in (None, pair[0]) and choice.strategy in (None, pair[1])]
    if not fitting:
        raise PlanError(
            f"{name}: no backend={choice.backend!r} with strategy={choice.strategy!r} for JAX; there are "
            + ", ".join(sorted("/".join(pair) for pair in pairs))
        )


def plan_for(call: Signature, operands: Mapping[str, Any], device: Device) -> Plan:
    """The plan for a call on arrays, or shapes and dtypes, on a device.

    Raises:
        PlanError: the forced backend or strategy cannot run; the message lists every reason.
    """
    task, no_cuda = task_for(call, operands), None
    if _state.exports:
        no_cuda = "programs of jax.export have no custom calls of other libraries"
    elif not cuda_call.takes(call, operands):
        no_cuda = "no CUDA kernel has the gradient of the logsumexp of a loss"
    found = plans.planner_for(device, call.choice, task, operands["x"].dtype.name, no_cuda=no_cuda)
    return found.plan(task, call.choice)


def task_for(call: Signature, operands: Mapping[str, Any]) -> Task:
    """The task of a call on arrays, or shapes and dtypes."""
    if call.choice.backend == "cuda":
        operands = jax.eval_shape(partial(cuda_call.operands_of, call), dict(operands))
        call = cuda_call.of_scores(call)
    specs = {name: plans.array_view(operands[name].shape, operands[name].dtype.name) for name in call.options.arrays}
    numbers = frozenset(call.options.given) & {"scale", "softcap"} - specs.keys() | {name for name, _ in call.numbers}
    if call.choice.backend == "cuda":
        numbers |= cuda_call.numbers_of(call, OPERATIONS[call.name].scores).keys()
        specs |= cuda_call.row_operands(call, operands)
    x = operands["x"]
    return plans.task_for(call.name, call.outputs, x.shape, x.dtype.name, specs, numbers)


def kernel_plan(platform: str, call: Signature, operands: Mapping[str, Array]) -> Plan | None:
    """The plan for a platform; None where XLA's operations run."""
    if call.operation is None or call.axis_name or call.classes:
        # There is no kernel for the tangents of forward mode, for an exchange, and for a gradient that spreads a part
        # of the target over the classes of other devices.
        return None
    if call.choice.backend == "cuda" and not cuda_call.takes(call, operands):
        return None
    if not all(isinstance(size, int) for t in operands.values() for size in t.shape):
        # jax.export: a size is a symbol, and a kernel is made for numbers.
        if call.choice.backend in ("cuda", "pallas") or (
            call.choice.backend is None and call.choice.strategy not in (None, "row")
        ):
            raise PlanError(f"{call.name}: a kernel needs sizes that are known, and the shape is {operands['x'].shape}")
        return None
    device, x = to_lower_for() if platform == "cuda" else known("cpu"), operands["x"]
    plan = plan_for(call, operands, device)
    note_plan(Kind(call.name, tuple(x.shape), x.dtype.name, plan.device), repr(plan), plan.reason)
    if plan.backend == "cuda" and call.choice.backend is None:
        # The task of a CUDA kernel has more numbers and dtypes than that of a Pallas kernel.
        plan = plan_for(forced(call, plan), operands, device)
    return None if plan.backend == "eager" else plan


def forced(call: Signature, plan: Plan) -> Signature:
    """The call that forces the backend and the strategy of its plan."""
    return call._replace(choice=Choice(plan.backend, plan.strategy))


def run_eager(call: Signature, operands: Mapping[str, Array]) -> Values:
    """The results of a call by its formula."""
    if call.writes_gradient:
        return shards.in_two_passes(run_eager, call, operands)
    results = FORMULAS[call.name](call, **operands)
    return {name: results[name] for name in call.outputs}


def run(platform: str, call: Signature, operands: Mapping[str, Array]) -> Values:
    """The results of a call on the arrays of one device.

    The plan is made for the rows and the columns of one device: XLA may be the fastest for fewer of them.
    """
    call, operands = shards.without_classes(call, operands)
    plan = kernel_plan(platform, call, operands)
    if plan is None:
        return run_eager(call, operands)
    if plan.backend == "cuda":
        own = forced(call, plan)
        return cuda_call.run(own, operands, task_for(own, operands), plan, to_lower_for())
    # A kernel that writes the gradient with the losses multiplies it by the scale.
    factor = float(call.options.scale) if call.writes_gradient else call.factor
    return pallas.run(
        call.name, operands, plan, platform != "cuda", call.options, factor, outputs=call.outputs, numbers=call.numbers
    )


def _lowered(platform: str, *arrays: Array, names: tuple[str, ...], call: Signature) -> list[Array]:
    """A primitive, as the plan for a platform says."""
    call, operands = shards.without_classes(call, dict(zip(names, arrays, strict=True)))
    if call.choice.backend == "cuda" and is_on("gpu", operands["x"]):
        # JAX runs operations one by one.
        platform = "cuda"
    if kernel_plan(platform, call, operands) is None:
        return list(run_eager(call, operands).values())

    given = tuple(operands)

    # JAX keeps this function after the trace, whose arrays it must not hold.
    def on_device(axis_name: Names, *arrays: Array) -> list[Array]:
        of_device, local = partial(run, platform), dict(zip(given, arrays, strict=True))
        results = shards.run_shards(of_device, axis_name, call, local) if axis_name else of_device(call, local)
        return [results[name] for name in call.outputs]

    assert call.operation is not None
    elements = {*call.operation.element_operands, *call.options.arrays}
    types = jax.eval_shape(partial(run_eager, call), operands)
    results = [types[name] for name in call.outputs]
    has_row = [*(name in elements for name in operands), *(t.ndim == operands["x"].ndim for t in results)]
    found: list[Array] = partitioning.by_rows(on_device, results, has_row, *operands.values())
    return found


def _abstract(*avals: Any, names: tuple[str, ...], call: Signature) -> list[Any]:
    # An exchange does not change a shape.
    whole = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in zip(names, avals, strict=True)}
    results = jax.eval_shape(partial(run_eager, call._replace(axis_name=())), whole)
    return [array_types.result_type(avals[0], results[name].shape, results[name].dtype) for name in call.outputs]


class _State(threading.local):
    """The state of a thread.

    Attributes:
        one_by_one: True while it runs the body of `compiled`: to trace it, or without `jit` to find a NaN.
        exports: True while it lowers a program of `jax.export`.
    """

    one_by_one = exports = False


_state = _State()


def primitive(
    name: str, lowered: Callable[..., list[Array]], abstract: Callable[..., list[Any]],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    runs_on: Callable[[str, Any], str] = lambda platform, _: platform,
) -> Primitive:  # fmt: skip
    """A primitive without derivatives and batches; its parameters are `names` and `call`, which are hashable.

    Args:
        name: Its name.
        lowered: Function of a platform, the operands and the parameters that returns the results.
        abstract: Function of the types of the operands and the parameters that returns the types of the results.
        within: Makes the context in which `lowered` is traced and its operations are lowered.
        runs_on: Function of a platform and the context of a lowering that returns the platform for `lowered`.
    """
    made = Primitive(f"onlinesoftmax_{name}")
    made.multiple_results = True

    @partial(jax.jit, static_argnames=("names", "call"))
    def compiled(*arrays: Array, **params: Any) -> list[Array]:
        before, _state.one_by_one = _state.one_by_one, True
        try:
            found: list[Array] = made.bind(*arrays, **params)
            return found
        finally:
            _state.one_by_one = before

    def implementation(*arrays: Array, **params: Any) -> list[Array]:
        """The primitive outside of `jit`, compiled by itself.

        XLA's operations, or the kernel that the caller forces, run where JAX runs operations one by one: under
        `jax.disable_jit`, and when `jax_debug_nans` looks for the operation that made a NaN.
        """
        # JAX has this setting in every version, but does not declare it.
        if jax.config.jax_disable_jit or _state.one_by_one:  # type: ignore[attr-defined]
            with within():
                return lowered("any", *arrays, **params)
        return compiled(*arrays, **params)

    made.def_impl(implementation)
    made.def_abstract_eval(abstract)
    partitioning.register(made)

    def lower(platform: str | None, context: Any, *values: Any, **params: Any) -> Any:
        rule = partial(lowered, runs_on(platform or "any", context))
        lowering = mlir.lower_fun(rule, multiple_results=True)
        before, _state.exports = _state.exports, context.module_context.lowering_parameters.for_export
        try:
            with within():
                sizes = _in_default_integers(context.dim_var_values)
                return array_types.of_plain_arrays(lowering)(context.replace(dim_var_values=sizes), *values, **params)
        finally:
            _state.exports = before

    for platform in (None, "cuda"):
        mlir.register_lowering(made, partial(lower, platform), platform=platform)
    return made


def _in_default_integers(numbers: Any) -> tuple[Any, ...]:
    """The sizes of a lowering, and the index of its platform, in the integers that JAX has by default.

    With 64-bit types switched on, JAX expects wider ones than the program has.
    """
    wanted = mlir.ir.RankedTensorType.get([], mlir.dtype_to_ir_type(jnp.dtype(jnp.result_type(int))))
    # JAX does not declare the functions of the dialect.
    convert = stablehlo.convert  # type: ignore[attr-defined]
    return tuple([t if t.type == wanted else convert(wanted, t) for t in numbers])


def _batch(
    arrays: tuple[Array, ...], axes: tuple[int | None, ...], *, names: tuple[str, ...], call: Signature
) -> tuple[list[Array], list[int | None]]:
    """A batch is one more axis of rows, the first.

    An operand without a batch gets an axis of size 1 if it is an array of the score options, else one of full size.
    """
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)

    def to_front(name: str, x: Array, axis: int | None) -> Array:
        if axis is not None:
            return jnp.moveaxis(x, axis, 0)
        return x[None] if name in call.options.arrays else jnp.broadcast_to(x[None], (size, *x.shape))

    operands = {name: to_front(name, x, axis) for name, x, axis in zip(names, arrays, axes, strict=True)}
    return list(bind(call, operands).values()), [0] * len(call.outputs)


def _batch_of_devices(
    axis: Any, arrays: tuple[Array, ...], axes: tuple[int | None, ...], *, names: tuple[str, ...], call: Signature
) -> tuple[list[Array], list[int | None]]:
    """Batch a primitive when JAX names the batch axis.

    If the call exchanges sums over that axis, the formula runs under `vmap`, which does the exchange.
    """
    if axis.name in call.axis_name:

        def formula(*arrays: Array) -> list[Array]:
            return list(run_eager(call, dict(zip(names, arrays, strict=True))).values())

        results = jax.vmap(formula, in_axes=axes, axis_name=axis.name, axis_size=axis.size)(*arrays)
        return results, [0] * len(results)
    if all(one is None for one in axes):
        return list(bind(call, dict(zip(names, arrays, strict=True))).values()), [None] * len(call.outputs)
    return _batch(arrays, axes, names=names, call=call)


def _make(name: str) -> Primitive:
    """The primitive of an operation, or of another formula in eager.py."""
    made = primitive(name, _lowered, _abstract)
    batching.primitive_batchers[made] = _batch
    batching.fancy_primitive_batchers[made] = _batch_of_devices
    return made


PRIMITIVES: dict[str, Primitive] = {name: _make(name) for name in FORMULAS}
