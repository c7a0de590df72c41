"""A call of a head without its arrays, and the axes that each array of it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from ...core.arrays import accumulator
from ...core.options import PLAIN, ScoreOptions
from ...core.plan_log import Kind, note_plan
from ...linear.plans import LinearPlan, plan_of
from ...linear.problem import LinearProblem, problem_of
from ..signature import Names

LAYOUTS = {
    "x": "th", "dx": "th", "weight": "ch", "dweight": "ch", "bias": "c", "dbias": "c", "class_weight": "c", "q": "tc",
    "z": "tc",
}  # fmt: skip
"""Axes of arrays by name: t for the axes of the tokens, h for hidden, c for classes."""

CONSTANT = "constant"
"""Beginning of the names of arrays that the loss of `linear_token_loss` uses, which every device has whole."""

GRADIENTS = {"x": "dx", "weight": "dweight", "bias": "dbias"}
"""Names of the gradients of a head, by the names of its arrays."""


def layout(name: str) -> str:
    """The axes of an array of a head, in the letters of LAYOUTS; most have a number for each token."""
    return "" if name.startswith(CONSTANT) else LAYOUTS.get(name, "t")


class HeadCall(NamedTuple):
    """A call of a head without its arrays; hashable.

    Attributes:
        kind: Name of the computation in head.py.
        outputs: Names of the results.
        options: Scale and softcap; ARRAY stands for a scale of each token.
        numbers: Label smoothing and z_loss, where they are not 0.
        memory: Most bytes of the buffers; None for the usual ones.
        names: Axes of `shard_map` along which the classes are sharded.
        summed: These axes if JAX does not check varying axes: the gradient of a result is then a part on each device.
        loss: The formula of `linear_token_loss` for one token; None elsewhere.
        dtype: Dtype of input, weight and bias.
        acc_dtype: Dtype in which chunks of tokens add up the gradient of the weight.
        sum_dtype: Dtype of the gradient of the weight, which is wider where it is a sum that is not rounded yet.
        padding: Number of classes of probability 0 behind the others, which make the products fast.
    """

    kind: str
    outputs: tuple[str, ...]
    options: ScoreOptions = PLAIN
    numbers: tuple[tuple[str, float], ...] = ()
    memory: int | None = None
    names: Names = ()
    summed: Names = ()
    loss: Any = None
    dtype: str = "float32"
    acc_dtype: str = "float32"
    sum_dtype: str = "float32"
    padding: int = 0

    def number(self, name: str) -> float:
        """Label smoothing or z_loss."""
        return dict(self.numbers).get(name, 0.0)

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the gradients that are computed."""
        return tuple(name for name in GRADIENTS.values() if name in self.outputs)

    @property
    def in_place(self) -> bool:
        """True where the gradient of the weight is added up in its own narrow dtype."""
        return self.acc_dtype == self.dtype == "bfloat16"


class Shards(NamedTuple):
    """Axes of the mesh along which the arrays of one device are parts of whole ones.

    Attributes:
        classes: Axes along which the classes are sharded: statistics of tokens are exchanged.
        of_input: Axes along which the gradient of the input is added up.
        of_weight: Axes along which the gradient of the weight is added up.
    """

    classes: Names = ()
    of_input: Names = ()
    of_weight: Names = ()


def plan_of_losses(call: HeadCall, arrays: Mapping[str, Any], outputs: tuple[str, ...]) -> LinearPlan:
    """The plan of losses with these outputs, from arrays, or shapes and dtypes.

    Raises:
        ValueError: no plan fits into the memory.
    """
    name = "linear_cross_entropy"
    problem = problem_of(name, *_sizes(outputs, arrays), whole_rows=True, in_place=call.in_place)
    return _noted(name, arrays, _plan(call, problem))


def takes_columns(call: HeadCall, arrays: Mapping[str, Any], each: bool) -> bool:
    """True where chunks of columns serve a loss best; `each` is True for a loss of each token."""
    everything = tuple(GRADIENTS.values())
    try:
        problem = problem_of("linear_cross_entropy", *_sizes(everything, arrays), each=each, in_place=call.in_place)
        return _plan(call, problem).name == "columns"
    except ValueError:
        # Fewer gradients may be wanted, and take less; if not, the plan of these says so.
        return False


def plan_of_statistics(call: HeadCall, arrays: Mapping[str, Any], outputs: tuple[str, ...]) -> LinearPlan:
    """The plan of statistics or of their gradient with these outputs; ValueError as for `plan_of_losses`."""
    name = "linear_token_logprobs"
    return _noted(name, arrays, _plan(call, problem_of(name, *_sizes(outputs, arrays))))


def columns_at_once(call: HeadCall, arrays: Mapping[str, Any]) -> int:
    """The number of columns of a chunk of statistics or of their gradient."""
    plan = plan_of_statistics(call, arrays, call.outputs)
    return plan.chunk if plan.name == "columns" else arrays["weight"].shape[0]


def _sizes(
    outputs: tuple[str, ...], arrays: Mapping[str, Any]
) -> tuple[tuple[int, int, int], str, tuple[bool, bool, bool]]:
    """Sizes, dtype and the wanted gradients of a problem: those that the outputs name."""
    x, weight = arrays["x"], arrays["weight"]
    of_x, of_weight, of_bias = (name in outputs for name in GRADIENTS.values())
    return (math.prod(x.shape[:-1]), x.shape[-1], weight.shape[0]), x.dtype.name, (of_x, of_weight, of_bias)


def _noted(name: str, arrays: Mapping[str, Any], plan: LinearPlan) -> LinearPlan:
    """The plan of a public function, with a line in the log if it is new; a trace does not know the device."""
    x, classes = arrays["x"], arrays["weight"].shape[0]
    text = plan.told(math.prod(x.shape[:-1]), classes, x.dtype.name)
    note_plan(Kind(name, tuple(x.shape), x.dtype.name, "JAX's device"), text, plan.reason)
    return plan


def _plan(call: HeadCall, problem: LinearProblem) -> LinearPlan:
    sizes = problem.tokens, problem.hidden, problem.classes
    if not all(isinstance(size, int) for size in sizes):
        return LinearPlan("stored", sizes[0], 1, problem.products, 0, problem.keeps, "jax.export: a size is a symbol")
    return plan_of(problem._replace(borrows=False), call.memory)


def types(call: HeadCall, arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the results of a call, from its arrays, or from their shapes and dtypes."""
    x, weight = arrays["x"], arrays["weight"]
    sizes = {"t": x.shape[:-1], "h": x.shape[-1:], "c": weight.shape[:1]}
    own = {"dx": x.dtype, "z": x.dtype, "dweight": call.sum_dtype, "largest": "int32"}
    return {
        name: jax.ShapeDtypeStruct(sum((sizes[axis] for axis in layout(name)), ()), own.get(name, accumulator(x)))
        for name in call.outputs
    }
