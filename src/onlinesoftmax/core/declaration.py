"""The declaration of an operation: what it reads, what it sums, what it writes, and its array formulas.

A declaration determines shapes and dtypes of outputs, custom-operator schemas, kernel parameters, bytes moved,
benchmark cases and verification cases.  Each operation is declared in its room in `ops`; here stands what they share.
Strategies never ask which operation they serve; they ask whether it writes elements, per-row results, or both.

To declare an operation is the first step of CONTRIBUTING.md, "To add an operation".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Literal

from .accumulators import Accumulator as Kind
from .accumulators import PlainSum, ScaledSum
from .formulas import Formula

ValueKind = Literal["element", "row", "call"]
"""Which values an operand or an output has: one per element of the input, one per row, or one per call."""


def accumulator_dtype(*dtypes: str) -> str:
    """Name of the dtype in which a call on tensors of these dtypes accumulates."""
    return "float64" if "float64" in dtypes else "float32"


@dataclass(frozen=True)
class Operand:
    """A tensor or a number that an operation reads.

    Attributes:
        name: Its name in kernels, in custom operators and in `Task.operands`.
        kind: "element", "row" or "call".
        dtype: "floating", "integer" or "boolean".
        optional: True where a call may leave the operand out.
        number: True where it is a number of the call, not a tensor.
    """

    name: str
    kind: ValueKind
    dtype: Literal["floating", "integer", "boolean"] = "floating"
    optional: bool = False
    number: bool = False


@dataclass(frozen=True)
class Accumulator:
    """The declaration of what a state keeps over a row beside the maximum m.

    Attributes:
        name: Its name.  The exponent sum of softmax is "l": its weight w is 1.
        kind: Class of the accumulator.
        only_with: Name of the optional operand without which it is not needed; empty where there is none.
    """

    name: str
    kind: type[Kind] = ScaledSum
    only_with: str = ""

    @property
    def rescaled(self) -> bool:
        """True where two states merge it with the same factors as l."""
        return self.kind is ScaledSum


@dataclass(frozen=True)
class Output:
    """A tensor that an operation writes.

    Attributes:
        name: Its name in kernels and in `Task.outputs`.
        kind: "element", "row" or "call".  An operation has at most one output per element, and any number per row.  An
            output per call is reduced from all rows; only the CUDA kernels write it.
        dtype: "result" for the dtype that the caller asks for, "input" for the dtype of the input, "accumulator" for
            float32 (float64 in float64), "index" for int64.
        exact: True if a float32 value of this output needs float32 accuracy.  False if the caller receives it in the
            dtype of the result, so 16-bit accuracy can be enough.
        needs: Names of the accumulators from which the output is computed.
        on_request: True where the output is written only if the caller asks for it.
    """

    name: str
    kind: ValueKind
    dtype: Literal["result", "input", "accumulator", "index"] = "result"
    needs: tuple[str, ...] = ("l",)
    on_request: bool = False
    exact: bool = True

    def dtype_of(self, x: str, result: str) -> str:
        """Name of its dtype.

        Args:
            x: Dtype of the input.
            result: Dtype that the caller asks for.

        >>> Output("lse", "row", "accumulator").dtype_of("bfloat16", "bfloat16")
        'float32'
        """
        return {"result": result, "input": x, "accumulator": accumulator_dtype(x, result), "index": "int64"}[self.dtype]


@dataclass(frozen=True, eq=False)
class Operation:
    """One member of the softmax family.

    Attributes:
        name: Name of the public function; with "_backward" for its gradient.
        operands: Tensors and numbers that it reads, the input first.
        accumulators: Sums over a row that its outputs can need; empty if rows are not reduced.
        outputs: Tensors that it can write, the main output first.
        options: Names of the score options that its kernels apply (core/options.py).
        formula: Its sums and outputs, for every array library.
        gradient_name: Name of the operation that computes its gradient with respect to the input; empty for a gradient.
        saved: Names of the operands and outputs that a forward call keeps for its gradient.
        scores: True where the input is a logit, which the score options turn into a score.
        may_keep_terms: True if y = c * exp(z - m) + d, with c and d constant along the row.  A kernel may then hold the
            terms exp(z - m) instead of the logits.
        backends: Backends that have its formulas, so that their strategies can run it; None for all.  Eager has them
            where PyTorch has a function of this name; forced, and on a CPU, it takes the formula above for any other.
        kernels: Module of the operation's own kernels: "onlinesoftmax.ops.sparsemax.kernels"; empty without them.
    """

    name: str
    operands: tuple[Operand, ...]
    accumulators: tuple[Accumulator, ...]
    outputs: tuple[Output, ...]
    options: tuple[str, ...]
    formula: Formula
    gradient_name: str = ""
    saved: tuple[str, ...] = ()
    scores: bool = True
    may_keep_terms: bool = False
    # Backends and kernels that run the operation.
    backends: tuple[str, ...] | None = None
    kernels: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        # An operation is compared by identity, so a pickle refers to the declaration.
        return _by_name, (self.name,)

    def __str__(self) -> str:
        return self.name

    @cached_property
    def element_operands(self) -> tuple[str, ...]:
        """Names of the tensors that every call reads element by element, the input first."""
        return tuple(operand.name for operand in self.operands if operand.kind == "element" and not operand.optional)

    @cached_property
    def row_operands(self) -> tuple[str, ...]:
        """Names of the tensors that have one value per row."""
        return tuple(operand.name for operand in self.operands if operand.kind == "row")

    @cached_property
    def call_operands(self) -> tuple[str, ...]:
        """Names of the operands that have one value per call."""
        return tuple(operand.name for operand in self.operands if operand.kind == "call")

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """Names of the operands that are numbers, not tensors."""
        return tuple(operand.name for operand in self.operands if operand.number)

    @property
    def has_target(self) -> bool:
        """True where each row has a target column."""
        return TARGET.name in self.row_operands

    @property
    def inputs(self) -> int:
        """Number of tensors that every call reads element by element."""
        return len(self.element_operands)

    @property
    def reduces(self) -> bool:
        """True where a row is reduced to a state before anything is written."""
        return bool(self.accumulators)

    @cached_property
    def result(self) -> Output:
        """The main output: what the public function returns."""
        return self.outputs[0]

    @cached_property
    def per_row(self) -> bool:
        """True where the main output has one value per row."""
        return self.result.kind == "row"

    @property
    def backward(self) -> bool:
        """True for a gradient."""
        return not self.gradient_name

    def runs_on(self, backend: str) -> bool:
        """True where the strategies of a backend can run it, beside its own kernels."""
        return self.backends is None or backend in self.backends

    def check_mergeable(self) -> None:
        """Raise an error where results do not follow from the merged states of parts of a row.

        Raises:
            NotImplementedError: the operation has no sums, or kernels that make other results of them.
        """
        if self.kernels or not self.forward.reduces:
            raise NotImplementedError(
                f"{self}() is not available if the softmax dimension is sharded: its results do not follow from states"
            )

    @cached_property
    def own_strategies(self) -> tuple[tuple[str, str, Callable[..., Any]], ...]:
        """(backend, strategy, its proposals) of its own kernels, whose module is imported when asked for."""
        return tuple(importlib.import_module(self.kernels).STRATEGIES) if self.kernels else ()

    @cached_property
    def forward(self) -> Operation:
        """The forward operation of a gradient; the operation itself if it is a forward operation."""
        return next((other for other in declared().values() if other.gradient_name == self.name), self)

    @cached_property
    def always(self) -> tuple[str, ...]:
        """Names of the outputs that every call writes."""
        return tuple(output.name for output in self.outputs if not output.on_request)

    @cached_property
    def call_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that have one value per call."""
        return tuple(output.name for output in self.outputs if output.kind == "call")

    @cached_property
    def kept_outputs(self) -> tuple[str, ...]:
        """Names of the outputs that a call with a gradient writes: the result and what the gradient reads."""
        named = {output.name for output in self.outputs}
        return tuple(dict.fromkeys((self.result.name, *(name for name in self.saved if name in named))))

    def has_accumulator_dtype(self, operand: str) -> bool:
        """True where an operand is an output of the forward operation that is kept in the accumulator's dtype."""
        return any(output.name == operand and output.dtype == "accumulator" for output in self.forward.outputs)

    def output(self, name: str) -> Output:
        """The output of this name."""
        return next(output for output in self.outputs if output.name == name)

    def follows_input(self, output: Output) -> bool:
        """True where an output is the gradient with respect to the logits, which are the input."""
        return output.kind == "element" and self.scores and (self.backward or output.dtype == "input")

    def written(self, outputs: tuple[str, ...]) -> tuple[Output, ...]:
        """The declarations of these outputs, in the order of the declaration."""
        return tuple(output for output in self.outputs if output.name in outputs)

    def named(self, outputs: Any) -> tuple[str, ...]:
        """Names of outputs that a user gives, checked and in the order of the declaration."""
        if isinstance(outputs, str) or not isinstance(outputs, Sequence):
            raise TypeError(f"outputs must be a tuple of names, not {type(outputs).__name__}")
        names = [output.name for output in self.outputs]
        wrong = [name for name in outputs if name not in names]
        if wrong or not outputs:
            reason = f"{self.name} has no output {wrong[0]!r}" if wrong else "at least one name is needed"
            raise ValueError(f"outputs: {reason}; there are: {', '.join(names)}")
        return tuple(name for name in names if name in outputs)

    def summed(self, outputs: tuple[str, ...], given: Collection[str] = ()) -> tuple[Accumulator, ...]:
        """The accumulators that these outputs need, in the order of the declaration.

        Args:
            outputs: Names of the outputs that are written.
            given: Names of the operands that the call has.
        """
        needed = {name for output in self.written(outputs) for name in output.needs}
        return tuple(
            sum_ for sum_ in self.accumulators
            if sum_.name in needed and (not sum_.only_with or sum_.only_with in given)
        )  # fmt: skip


@cache
def declared() -> Mapping[str, Operation]:
    """Every operation by name: `OPERATIONS` of the rooms, which import this module and so are found when asked for."""
    operations: Mapping[str, Operation] = importlib.import_module("..ops", __package__).OPERATIONS
    return operations


def _by_name(name: str) -> Operation:
    return declared()[name]


X = Operand("x", "element")
DY = Operand("dy", "element")
TARGET = Operand("target", "row", "integer")
"""Column of each row: the true class, or the chosen token.  A column out of range selects nothing."""

EXPONENT_SUM = Accumulator("l")
MEAN_SUM = Accumulator("zl")
"""`sum(z * exp(z - m))`: over l, the mean score of a row under its softmax."""

SUMS = (EXPONENT_SUM, MEAN_SUM)
"""The sums of every forward operation."""

PRODUCT_SUM = Accumulator("dot", PlainSum)
"""Sum over a row in the gradient of softmax, of x * dy, and of log-softmax, of dy."""

STATISTICS: tuple[Output, ...] = (
    Output("lse", "row", "accumulator", on_request=True),
    Output("m", "row", "accumulator", on_request=True),
    Output("l", "row", "accumulator", on_request=True),
    Output("entropy", "row", "accumulator", needs=("l", "zl"), on_request=True),
)
"""More outputs of every forward operation, on request: lse is m + log(l); m is finite; entropy is lse - zl / l."""

INEXACT_STATISTICS = tuple(replace(output, exact=False) for output in STATISTICS)
"""The same statistics where 16-bit accuracy can be enough (`Output.exact`)."""

STATE = (Operand("m", "row"), Operand("l", "row"))
"""The state of each row.

Gradients read m and l, not lse: rounding lse would put one error into every probability.
"""

ALL_OPTIONS = ("scale", "softcap", "bias", "mask", "causal")
"""Names of all score options; core/options.py declares them."""

GRADIENT_OPTIONS = ("scale", "softcap", "mask", "causal")
"""Names of the options of the gradients that read the saved output instead of the logits."""
