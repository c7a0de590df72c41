"""A benchmark case: an operation, a shape, the softmax dimension, a dtype and score options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..core.operations import OPERATIONS, Operation
from ..core.options import SCORE_OPTIONS
from ..core.task import ITEMSIZE

Shape = tuple[int, ...]

MEASURED = tuple(name for name, operation in OPERATIONS.items() if not operation.has_target)
"""Names of the operations that the benchmark measures: those without a target column per row."""

FUSED = tuple(SCORE_OPTIONS)
"""Names of the score options, in the order in which they are applied."""


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: Name in MEASURED.
        shape: Sizes of the contiguous input.
        dim: The softmax dimension, counted from 0.
        dtype: Dtype of the input and of the result.
        fused: Names of the score options, in the order of FUSED.

    Raises:
        ValueError: a score option is unknown or the operation is not measured with it, or causal leaves a query
            without a key.

    Example:
        >>> case = Case("logsumexp", (4, 1024), 1, "float32")
        >>> str(case), case.read_bytes, case.write_bytes
        ('4x1024', 16384, 16)
        >>> str(Case("softmax", (4, 1024), 1, "float32", ("scale", "mask")))
        '4x1024 scale+mask'
    """

    operation: str
    shape: Shape
    dim: int
    dtype: str
    fused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known("score option", self.fused, FUSED)
        if self.fused and self.backward:
            raise ValueError(f"{self.operation} with {', '.join(self.fused)}: gradients have no score options here")
        if "causal" in self.fused and (self.dim == 0 or self.shape[self.dim - 1] > self.shape[self.dim]):
            # With more queries than keys the first queries see no key, and their rows are NaN.
            raise ValueError(f"{self}: causal needs a dimension of queries before dim, no longer than dim")

    def __str__(self) -> str:
        inner = self.dim == len(self.shape) - 1
        sizes = "x".join(map(str, self.shape)) + ("" if inner else f" dim {self.dim}")
        return f"{sizes} {'+'.join(self.fused)}" if self.fused else sizes

    @property
    def declaration(self) -> Operation:
        """The declaration of the operation."""
        return OPERATIONS[self.operation]

    @property
    def backward(self) -> bool:
        """True for a gradient."""
        return self.declaration.backward

    @property
    def forward(self) -> str:
        """Name of the public function: the operation itself, or the one that it is the gradient of."""
        return self.declaration.forward.name

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
    def result_shape(self) -> Shape:
        """Shape of the result."""
        return self.row_shape if self.declaration.per_row else self.shape

    @property
    def accumulator(self) -> str:
        """Name of the dtype in which states are kept."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def option_tensors(self) -> tuple[str, ...]:
        """Names of the score options that are tensors here, in the order in which a function takes them."""
        return tuple(name for name in self.fused if SCORE_OPTIONS[name].kind == "element")

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that a function takes: the operands in the order of the declaration, then options."""
        operands = (
            operand.name for operand in self.declaration.operands if operand.kind != "call" and not operand.optional
        )
        return (*operands, *self.option_tensors)

    def dtype_of(self, name: str) -> str:
        """Name of the dtype of an operand or a score option.

        A per-row output that the forward operation keeps for its gradient stays in the accumulator's dtype.
        """
        kinds = {operand.name: operand.dtype for operand in self.declaration.operands}
        kinds |= {option.name: option.dtype for option in SCORE_OPTIONS.values()}
        if kinds[name] != "floating":
            return {"integer": "int64", "boolean": "bool"}[kinds[name]]
        wide = {output.name for output in self.declaration.forward.outputs if output.dtype == "accumulator"}
        return self.accumulator if self.backward and name in wide else self.dtype

    def shape_of(self, name: str) -> Shape:
        """Shape of an operand or a score option.  A bias has one value per column; a mask has one per element."""
        if name in self.option_tensors:
            column = (self.shape[self.dim], *[1] * (len(self.shape) - 1 - self.dim))
            return column if SCORE_OPTIONS[name].dtype == "floating" else self.shape
        return self.row_shape if name in self.declaration.row_operands else self.shape

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor of the shape: the copy beside a case reads them once and writes them once."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of every tensor that is read, each element once."""
        sizes = {**ITEMSIZE, "int64": 8, "bool": 1}
        return sum(prod(self.shape_of(name)) * sizes[self.dtype_of(name)] for name in self.tensors)

    @property
    def write_bytes(self) -> int:
        """Bytes of the result."""
        return prod(self.result_shape) * ITEMSIZE[self.dtype]

    @property
    def bytes(self) -> int:
        """The fewest bytes that any method moves: every input is read once, and the result is written once."""
        return self.read_bytes + self.write_bytes

    @property
    def passes(self) -> int:
        """Number of tensors of the input's shape that are read or written."""
        return self.declaration.inputs + (not self.declaration.per_row)

    def as_dict(self) -> dict[str, Any]:
        """Attributes and bytes, for JSON."""
        return {**asdict(self), "shape": list(self.shape), "fused": list(self.fused), "bytes": self.bytes}


def known(what: str, names: Iterable[str], table: Iterable[str]) -> None:
    """Raise a ValueError that lists the table for the first name that is not in it."""
    for name in names:
        if name not in table:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(table)}")


def parse_shape(text: str) -> Shape:
    """The shape that a text describes: sizes with x, X, × or * between them; a size may be a power, as in 2^20.

    Raises:
        ValueError: the text describes no shape; the message quotes it.

    Example:
        >>> parse_shape("4096x50257"), parse_shape("1*2^20")
        ((4096, 50257), (1, 1048576))
    """
    sizes = []
    for part in re.split(r"[xX×*]", text.strip()):
        match = re.fullmatch(r"\s*(\d{1,19})(?:\^(\d{1,2}))?\s*", part)
        if not match:
            raise ValueError(f"shape {text!r}: expected sizes with x between them, as in 4096x50257")
        sizes.append(int(match[1]) ** int(match[2] or 1))
    if min(sizes) < 1:
        raise ValueError(f"shape {text!r}: every size must be at least 1")
    if prod(sizes) >= 1 << 62:
        raise ValueError(f"shape {text!r}: more elements than any memory holds")
    return tuple(sizes)
