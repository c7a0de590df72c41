"""A benchmark case: an operation, a shape, the softmax dimension, a dtype, score options, with or without gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple

from ...core.declaration import Operation, Output, ValueKind
from ...core.options import SCORE_OPTIONS, ScoreOptions
from ...core.task import ITEMSIZE
from ...ops import OPERATIONS
from ..names import Shape, check_names

MEASURED = tuple(name for name, operation in OPERATIONS.items() if not (operation.backward and operation.has_target))
"""Names of the operations that the benchmark measures.

The gradient of an operation with a target column per row is measured through autograd only (`Case.with_gradient`).
"""

REDUCTIONS = {name: ("mean", "none") if operation.call_outputs else () for name, operation in OPERATIONS.items()}
"""Reductions that are measured, by operation; the first is the default, and without scalar outputs there are none."""

STATISTICS = {
    name: tuple(kept for kept in operation.kept_outputs if kept not in (operation.result.name, "lse", "m", "l"))
    for name, operation in OPERATIONS.items()
}
"""Names of the outputs that a call returns beside its main output, by operation: those that it keeps for a gradient."""

STATISTIC_WEIGHT = 0.125
"""Incoming gradient of a statistic over that of the main output: a power of two, so that the product is exact."""

GRADIENT, INCOMING = "gradient", "dy"
"""Names of the gradient with respect to the input, and of the incoming gradient of the main output."""

FUSED = tuple(SCORE_OPTIONS)
"""Names of the score options, in the order in which they are applied."""


SCALE, SOFTCAP = 0.125, 30.0
"""1 / sqrt(64), as in attention, and a bound that the outliers of the input reach."""

OPTION_VALUES: dict[str, Any] = {"scale": SCALE, "softcap": SOFTCAP, "causal": True}
"""The score options that are no tensors, by name."""


class Returned(NamedTuple):
    """One tensor that the function of a case returns.

    Attributes:
        name: Name of an output of the operation, or GRADIENT.
        kind: "element", "row", or "call" for a scalar.
        shape: Its shape.
        dtype: Name of its dtype.
    """

    name: str
    kind: ValueKind
    shape: Shape
    dtype: str


OTHERS_SLACK = 4
"""Factor of the tolerance of other libraries, which may choose to be a little less exact than the framework."""

Inputs = tuple[Any, ...]
"""Torch tensors, in the order of `Case.tensors`."""


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: Name in MEASURED.
        shape: Sizes of the contiguous input.
        dim: The softmax dimension, counted from 0.
        dtype: Dtype of the input and of the result.
        fused: Names of the score options, in the order of FUSED.
        with_gradient: True for the forward call and its gradient through autograd, as a user calls them.
        reduction: Reduction of the losses, in REDUCTIONS; by default the first.  Empty for other operations.
        calls: Number of calls that are measured together, each of the result of the one before; the time is that of
            one.  In JAX, they are one program.

    Raises:
        ValueError: a score option is unknown or the operation is not measured with it, causal leaves a query without a
            key, an operation with a reduction has its classes in another dimension than its signature says, the
            operation has no such reduction, with_gradient is given for a gradient, or the result of several calls is no
        input of the same function.

    Example:
        >>> case = Case("logsumexp", (4, 1024), 1, "float32")
        >>> str(case), case.read_bytes, case.write_bytes
        ('4x1024', 16384, 16)
        >>> str(Case("softmax", (4, 1024), 1, "float32", ("scale", "mask")))
        '4x1024 scale+mask'
        >>> loss = Case("cross_entropy", (4, 1024), 1, "float32", with_gradient=True)
        >>> str(loss), loss.passes, str(replace(loss, reduction="none"))
        ('4x1024 with gradient', 2, '4x1024 none with gradient')
        >>> str(Case("softmax", (4, 1024), 1, "float32", calls=8))
        '4x1024 in 8 calls'
    """

    operation: str
    shape: Shape
    dim: int
    dtype: str
    fused: tuple[str, ...] = ()
    with_gradient: bool = False
    reduction: str = ""
    calls: int = field(default=1, kw_only=True)

    differentiated: ClassVar[int] = 1
    """Number of the first tensors of which a call with a gradient returns the gradients."""

    def __post_init__(self) -> None:
        check_names("score option", self.fused, FUSED)
        if self.fused and (self.declaration.backward or self.with_gradient):
            raise ValueError(f"{self.operation} with {', '.join(self.fused)}: gradients have no score options here")
        if self.fused and self.declaration.has_target:
            raise ValueError(f"{self.operation} with {', '.join(self.fused)}: it has no score options here")
        if self.with_gradient and self.declaration.backward:
            raise ValueError(f"with_gradient: {self.operation} is itself a gradient; name {self.declaration.forward}")
        self._check_reduction()
        if self.calls > 1 and (self.with_gradient or self.declaration.backward or not self.writes_elements):
            raise ValueError(f"calls={self.calls}: the result of {self.operation} is no input of the same function")
        if "causal" in self.fused and (self.dim == 0 or self.shape[self.dim - 1] > self.shape[self.dim]):
            # With more queries than keys the first queries see no key, and their rows are NaN.
            raise ValueError(f"{self}: causal needs a dimension of queries before dim, no longer than dim")

    def _check_reduction(self) -> None:
        reductions = REDUCTIONS[self.operation]
        if not self.reduction and reductions:
            object.__setattr__(self, "reduction", reductions[0])
        if self.reduction and not reductions:
            raise ValueError(f"reduction={self.reduction!r}: {self.operation} has no reduction")
        if self.reduction:
            check_names("reduction", [self.reduction], reductions)
            if self.dim != min(1, len(self.shape) - 1):
                raise ValueError(f"dim={self.dim}: {self.operation} has its classes in dim 1, as PyTorch has them")

    def __str__(self) -> str:
        inner = self.dim == len(self.shape) - 1
        words = ["x".join(map(str, self.shape)) + ("" if inner else f" dim {self.dim}")]
        words += ["+".join(self.fused)] if self.fused else []
        # The default reduction is not worth a word in each line.
        words += [self.reduction] if self.reduction not in ("", *REDUCTIONS[self.operation][:1]) else []
        words += [f"in {self.calls} calls"] if self.calls > 1 else []
        return " ".join(words + ["with gradient"] * self.with_gradient)

    @property
    def declaration(self) -> Operation:
        """The declaration of the operation."""
        return OPERATIONS[self.operation]

    @property
    def elements(self) -> int:
        """Number of elements of the input."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.elements // self.shape[self.dim]

    @property
    def row_shape(self) -> Shape:
        """Shape of a tensor with one value per row."""
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def operands(self) -> int:
        """Number of tensors that the forward call takes."""
        return len(self.without_gradient.tensors)

    @property
    def without_gradient(self) -> Case:
        """The forward call alone."""
        return replace(self, with_gradient=False)

    @property
    def gradient(self) -> Case:
        """The gradient operation alone, which a call with a gradient runs too."""
        return replace(self, operation=self.declaration.gradient_name, with_gradient=False, reduction="")

    @property
    def also_checked(self) -> tuple[Case, ...]:
        """Cases whose results are checked with this one: a mean alone would hide one wrong row."""
        return (replace(self, reduction="none"),) if self.reduces_rows and not self.with_gradient else ()

    @property
    def reduces_rows(self) -> bool:
        """True where the main output is reduced to a scalar."""
        return self.reduction not in ("", "none")

    @property
    def returned(self) -> tuple[Returned, ...]:
        """The tensors that the function of the case returns: the gradient where there is one, then the outputs."""
        declaration = self.declaration
        names = (declaration.result.name, *STATISTICS[self.operation])
        outputs = [self._returned(declaration.output(name)) for name in names]
        gradient = Returned(GRADIENT, "element", self.shape, self.dtype)
        return (gradient, *outputs) if self.with_gradient else tuple(outputs)

    def _returned(self, output: Output) -> Returned:
        """An output as a caller gets it: a loss is in the accumulator's dtype inside kernels only."""
        wide = output.dtype == "accumulator" and not self.reduction
        dtype = self.accumulator if wide else self.dtype
        if self.reduces_rows:
            return Returned(output.name, "call", (), dtype)
        return Returned(output.name, output.kind, self.row_shape if output.kind == "row" else self.shape, dtype)

    @property
    def writes_elements(self) -> bool:
        """True where a value per element is written."""
        return any(result.kind == "element" for result in self.returned)

    @property
    def accumulator(self) -> str:
        """Name of the dtype in which states are kept."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def option_tensors(self) -> tuple[str, ...]:
        """Names of the score options that are tensors here, in the order in which a function takes them."""
        return tuple(name for name in self.fused if SCORE_OPTIONS[name].kind == "element")

    @property
    def option_values(self) -> dict[str, Any]:
        """The score options that are no tensors, by the name of the argument."""
        return {name: OPTION_VALUES[name] for name in self.fused if name in OPTION_VALUES}

    def score_options(self, tensors: Mapping[str, Any]) -> ScoreOptions:
        """All score options, for the array formula; `tensors` holds the bias and the mask by name."""
        return ScoreOptions(**self.option_values, **{name: tensors[name] for name in self.option_tensors})

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that a function takes: operands as declared, the incoming gradient, then options.

        A scalar loss has the incoming gradient 1, which is no argument.
        """
        operands = (
            operand.name for operand in self.declaration.operands if operand.kind != "call" and not operand.optional
        )
        incoming = (INCOMING,) if self.with_gradient and not self.reduces_rows else ()
        return (*operands, *incoming, *self.option_tensors)

    def dtype_of(self, name: str) -> str:
        """Name of the dtype of an operand or a score option.

        A per-row output that the forward operation keeps for its gradient stays in the accumulator's dtype.  The
        incoming gradient has the dtype of the main output.
        """
        if self.with_gradient and name == INCOMING:
            return self.returned[1].dtype
        kinds = {operand.name: operand.dtype for operand in self.declaration.operands}
        kinds |= {option.name: option.dtype for option in SCORE_OPTIONS.values()}
        if kinds[name] != "floating":
            return {"integer": "int64", "boolean": "bool"}[kinds[name]]
        wide = {output.name for output in self.declaration.forward.outputs if output.dtype == "accumulator"}
        return self.accumulator if self.declaration.backward and name in wide else self.dtype

    def shape_of(self, name: str) -> Shape:
        """Shape of an operand or a score option.  A bias has one value per column; a mask has one per element."""
        if name in self.option_tensors:
            column = (self.shape[self.dim], *[1] * (len(self.shape) - 1 - self.dim))
            return column if SCORE_OPTIONS[name].dtype == "floating" else self.shape
        if self.with_gradient and name == INCOMING:
            return self.returned[1].shape
        return self.row_shape if name in self.declaration.row_operands else self.shape

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor of the shape: the copy beside a case reads them once and writes them once."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of every tensor that is read, each element once; what backward must read again counts twice."""
        sizes = {**ITEMSIZE, "int64": 8, "bool": 1}
        once = sum(prod(self.shape_of(name)) * sizes[self.dtype_of(name)] for name in self.tensors)
        return once + self.tensor_bytes * self._reads_again

    @property
    def _reads_again(self) -> bool:
        """True where backward must read the input or the saved output: it waits for the incoming gradients of rows.

        The incoming gradient of a scalar is one number, by which a gradient that is already written is multiplied.
        """
        return self.with_gradient and not self.reduces_rows

    @property
    def write_bytes(self) -> int:
        """Bytes of the results."""
        return sum(prod(result.shape) * ITEMSIZE[result.dtype] for result in self.returned)

    @property
    def bytes(self) -> int:
        """The fewest bytes that any method moves: every input is read once, and the result is written once."""
        return self.read_bytes + self.write_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that the case needs: inputs, copy, two results and float64 pieces are held at once."""
        # Scores in elementary float32 operations take three more tensors of twice the bytes.
        needed = (self.declaration.inputs + 3 + 6 * bool(self.fused)) * self.tensor_bytes
        needed += self.elements * ("mask" in self.fused) + 6 * 8 * min(self.elements, 1 << 24)
        # Log-probabilities in elementary operations keep tensors of the accumulator's dtype, more with autograd.
        wide = 6 * self.with_gradient or 4 * self.declaration.has_target
        return needed + wide * self.elements * ITEMSIZE[self.accumulator]

    @property
    def passes(self) -> int:
        """Number of times that a tensor of the input's shape is read or written."""
        given = self.declaration.inputs + (self.with_gradient and self.shape_of(INCOMING) == self.shape)
        return given + self._reads_again + sum(result.kind == "element" for result in self.returned)

    def as_dict(self) -> dict[str, Any]:
        """Attributes and bytes, for JSON."""
        return {**asdict(self), "shape": list(self.shape), "fused": list(self.fused), "bytes": self.bytes}


class LogitsCase(Case):
    """A function of logits of two dimensions that reads them once, as logsumexp does; its other checks are its own."""

    axes: ClassVar[str]
    """Names of the dimensions."""

    float64_copies: ClassVar[int]
    """Tensors of the shape of the logits, in float64 or int64, that the check holds at once."""

    def __post_init__(self) -> None:
        if len(self.shape) != 2 or self.dim != 1:
            raise ValueError(f"{self.operation} needs two sizes, {self.axes}, got {self.shape}")

    @property
    def declaration(self) -> Operation:
        """The operation that reads the logits once."""
        return OPERATIONS["logsumexp"]

    @property
    def read_bytes(self) -> int:
        """Bytes of the logits."""
        return self.tensor_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes that the check takes."""
        return self.float64_copies * 8 * self.elements
