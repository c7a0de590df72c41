"""A primitive with two results: the losses of rows, and their gradient, which one kernel writes in the forward pass.

The gradient is that of sum(dy * loss) over the rows, with respect to the logits.  Where no kernel runs, and where rows
are sharded along their columns, the gradient takes a second pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.interpreters import partial_eval as pe

from ..core.arrays import Array, accumulator
from ..core.options import ScoreOptions, softcap_slope
from ..core.task import ANY, Choice
from ..kernels import pallas
from ..ops import OPERATIONS
from . import array_types, exchange, ops, part, partitioning, primitives
from .scores import FUNCTIONS, filled, masked
from .targets import TargetOptions

Pair = tuple[Array, Array]
"""Results per row, as `plans.OUTPUTS` names them, along a last axis; and the gradient, of the shape of the logits."""


def bind(
    name: str, *operands: Array, options: ScoreOptions, target_options: TargetOptions, choice: Choice = ANY
) -> Pair:
    """Apply the primitive.

    Args:
        name: Name of a forward operation with a target whose kernels can write the gradient.
        operands: Logits, the arrays of the score options, the target of each row, and the factor dy of each row.
        options: Score options.  The scale is a number, and there is no bias.
        target_options: Options of the operation; `gradient` is set here.
        choice: The backend and the strategy that the caller forces.
    """
    params = {"options": options, "target_options": target_options._replace(gradient=True), "choice": choice}
    results, gradient = _PRIMITIVE.bind(*array_types.alike(operands), name=name, **params)
    return results, gradient


def in_two_passes(
    run: part.Run, name: str, *operands: Array, options: ScoreOptions, target_options: TargetOptions
) -> Pair:
    """The results by the operation and by its gradient, one after the other."""
    x, *beside, dy = operands
    params: dict[str, Any] = {"options": options, "target_options": target_options._replace(gradient=False)}
    results = run(name, x, *beside, **params)
    if options.mask is not None:
        # A row that the mask leaves without a class counts for nothing.
        dy = jnp.where(results[..., 2] == 0, 0, dy)
    given = jnp.stack([dy.astype(results.dtype), jnp.zeros_like(results[..., 0])], axis=-1)
    gradient = run(OPERATIONS[name].gradient_name, x, *beside, results, given, factor=float(options.scale), **params)
    return results, _of_logits(gradient, x, tuple(beside[:-1]), options)


def _of_logits(y: Array, x: Array, arrays: tuple[Array, ...], options: ScoreOptions) -> Array:
    """The gradient in the logits, from the scale times the gradient in the scores."""
    if options.softcap is None:
        return y
    wide = accumulator(x)
    slope = softcap_slope(FUNCTIONS, x.astype(wide), filled(x, arrays, options))
    # A row that counts for nothing may hold NaN.
    return masked(jnp.where(y == 0, 0, y.astype(wide) * slope), arrays, options, 0).astype(x.dtype)


def _formula(name: str, *operands: Array, **params: Any) -> Array:
    return ops.EAGER_FUNCTIONS[name](*operands, **params)


def _lowered(platform: str, *operands: Array, name: str, choice: Choice, **params: Any) -> Pair:
    """The primitive, as the plan for a platform says."""
    eager = partial(in_two_passes, _formula, name, **params)
    if primitives.kernel_plan(platform, choice, name, operands, params) is None:
        return eager(*operands)

    def on_device(names: exchange.Names, *operands: Array) -> Pair:
        if not names:
            return _run(platform, choice, name, *operands, **params)
        of_device = partial(primitives.run, platform, choice)

        def of_part(name: str, *operands: Array, **params: Any) -> Array:
            return part.apply(name, names, of_device, operands, **params)

        return in_two_passes(of_part, name, *operands, **params)

    has_row = [*primitives.have_row(name, operands, params["options"]), False, True]
    found: Pair = partitioning.by_rows(on_device, jax.eval_shape(eager, *operands), has_row, *operands)
    return found


def _run(platform: str, choice: Choice, name: str, *operands: Array, **params: Any) -> Pair:
    """The results for the rows of one device, as the plan for these rows says."""
    plan = primitives.kernel_plan(platform, choice, name, operands, params)
    options, target_options = params["options"], params["target_options"]
    if plan is None:
        return in_two_passes(_formula, name, *operands, **params)
    written, numbers = ops.outputs(name, target_options), ops.numbers(name, target_options)
    found = pallas.run(
        name, operands, plan, platform != "cuda", options, float(options.scale), outputs=written, numbers=numbers
    )
    kinds = {output.name: output.kind for output in OPERATIONS[name].outputs}
    per_row = tuple(y for each, y in zip(written, found, strict=True) if kinds[each] == "row")
    (gradient,) = (y for each, y in zip(written, found, strict=True) if kinds[each] == "element")
    return ops.stacked(per_row), gradient


def _abstract(*avals: Any, name: str, choice: Choice, **params: Any) -> Any:
    whole = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals)
    results, gradient = jax.eval_shape(partial(in_two_passes, _formula, name, **params), *whole)
    return (
        array_types.result_type(avals[0], results.shape, results.dtype, True),
        array_types.result_type(avals[0], gradient.shape, gradient.dtype, False),
    )


def _batch(operands: tuple[Array, ...], axes: tuple[int | None, ...], **params: Any) -> Any:
    """A batch is one more axis of rows."""
    return _PRIMITIVE.bind(*primitives.batched(operands, axes, params["options"]), **params), (0, 0)


def _jvp(primals: tuple[Array, ...], tangents: tuple[Any, ...], *, name: str, choice: Choice, **params: Any) -> Any:
    """The results and their changes with the logits; the primitives of the two passes have derivatives."""
    x, *beside = primals
    if type(tangents[0]) is ad.Zero:
        found = _PRIMITIVE.bind(*primals, name=name, choice=choice, **params)
        return found, [ad.Zero.from_primal_value(y) for y in found]  # type: ignore[attr-defined]  # it is there
    of_primitives = partial(primitives.bind, choice=choice)

    def passes(x: Array) -> Pair:
        return in_two_passes(of_primitives, name, x, *beside, **params)

    return jax.jvp(passes, (x,), (tangents[0],))


def _without_unused(used: list[bool], equation: Any) -> Any:
    """The equation of the operation alone where the gradient is not used, as in the first pass of a checkpoint."""
    if not any(used):
        return [False] * len(equation.invars), None
    if used[1]:
        return [True] * len(equation.invars), equation
    params = dict(equation.params)
    primitive = primitives.PRIMITIVES[params.pop("name")]
    params["target_options"] = params["target_options"]._replace(gradient=False)
    *read, _ = equation.invars
    smaller = equation.replace(invars=read, outvars=equation.outvars[:1], primitive=primitive, params=params)
    return [True] * len(read) + [False], smaller


def _make() -> Primitive:
    primitive = Primitive("onlinesoftmax_with_gradient")
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract)
    primitives.set_lowering(primitive, _lowered)
    batching.primitive_batchers[primitive] = _batch
    ad.primitive_jvps[primitive] = _jvp
    pe.dce_rules[primitive] = _without_unused
    return primitive


_PRIMITIVE = _make()
