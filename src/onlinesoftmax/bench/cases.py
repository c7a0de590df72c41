"""What is measured: operation × shape × softmax dimension × dtype, and the named lists of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..operation import OPERATIONS
from ..problem import ITEMSIZE

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: Name in OPERATIONS.
        shape: Sizes of the contiguous input.
        dim: The softmax dimension, counted from 0.
        dtype: Dtype of input and output.

    Example:
        >>> case = Case("logsumexp", (4, 1024), 1, "float32")
        >>> str(case), case.read_bytes, case.write_bytes
        ('4x1024', 16384, 16)
    """

    operation: str
    shape: Shape
    dim: int
    dtype: str

    def __str__(self) -> str:
        inner = self.dim == len(self.shape) - 1
        return "x".join(map(str, self.shape)) + ("" if inner else f" dim {self.dim}")

    @property
    def elements(self) -> int:
        """Elements of the input."""
        return prod(self.shape)

    @property
    def read_bytes(self) -> int:
        """Bytes of the input."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def write_bytes(self) -> int:
        """Bytes of the output."""
        return self.read_bytes // (self.shape[self.dim] if OPERATIONS[self.operation].per_row else 1)

    @property
    def bytes(self) -> int:
        """The fewest bytes that any method moves: the input read once, the output written once."""
        return self.read_bytes + self.write_bytes

    def as_dict(self) -> dict[str, Any]:
        """Attributes and bytes, for JSON."""
        return {**asdict(self), "shape": list(self.shape), "bytes": self.bytes}


@dataclass(frozen=True)
class Suite:
    """A named list of shapes, each with its softmax dimension, and the dtypes they are measured in."""

    what: str
    shapes: tuple[tuple[Shape, int], ...]
    dtypes: tuple[str, ...]
    repeat_ms: int = 100


def _rows(*shapes: Shape) -> tuple[tuple[Shape, int], ...]:
    return tuple((shape, len(shape) - 1) for shape in shapes)


FIELD = _rows(
    (1048576, 64), (524288, 128), (262144, 256), (131072, 512), (65536, 1000), (65536, 1024), (32768, 2048),
    (16384, 4096), (8192, 8192), (4096, 16384), (4096, 32768), (4096, 50257), (2048, 128256), (1024, 262144),
    (1, 1 << 20), (1, 1 << 24), (1, 1 << 28),
)  # fmt: skip
"""The shapes that the field publishes: batches of equal size, vocabularies, one enormous row."""

ROWS_1024 = _rows(*((1024, 1 << k) for k in range(9, 16)))
"""Too few bytes to hide a launch: what a small batch costs."""

ODD = _rows((131072, 1023), (65536, 1025), (16384, 8191))
"""Rows that do not begin on 16 bytes."""

COLUMN = (((32, 512, 4096), 1),)
"""A softmax dimension that is not the innermost."""

SUITES: dict[str, Suite] = {
    "quick": Suite(
        "a few small shapes, seconds even on a CPU",
        _rows((64, 512), (1024, 1024), (256, 16384)), ("bfloat16", "float32"), repeat_ms=50,
    ),
    "default": Suite(
        "one shape for each strategy and difficulty",
        _rows((524288, 128), (65536, 1000), (65536, 1024), (8192, 8192), (4096, 32768), (4096, 50257),
              (2048, 128256), (1, 1 << 24), (1024, 4096), (65536, 1025)) + COLUMN,
        ("bfloat16", "float32"),
    ),
    "full": Suite("the table of the field, small batches, odd rows, columns", FIELD + ROWS_1024 + ODD + COLUMN,
                  ("bfloat16", "float32")),
    "cpu": Suite(
        "what our layer adds to torch on a CPU, with repetitions enough to tell",
        _rows((64, 512), (1024, 64), (256, 256), (1024, 1024), (4096, 1024), (1024, 16384)),
        ("float32", "bfloat16"), repeat_ms=1000,
    ),
}  # fmt: skip
"""The lists by name."""


def parse_shape(text: str) -> Shape:
    """A shape as one types it: sizes with x, X, × or * between; a size may be a power, as in 2^20.

    Raises:
        ValueError: it is not one, in a sentence that quotes it.

    Example:
        >>> parse_shape("4096x50257"), parse_shape("1*2^20")
        ((4096, 50257), (1, 1048576))
    """
    sizes = []
    for part in re.split(r"[xX×*]", text.strip()):
        match = re.fullmatch(r"\s*(\d{1,19})(?:\^(\d{1,2}))?\s*", part)
        if not match:
            raise ValueError(f"shape {text!r}: expected sizes with x between, as in 4096x50257")
        sizes.append(int(match[1]) ** int(match[2] or 1))
    if min(sizes) < 1:
        raise ValueError(f"shape {text!r}: every size must be at least 1")
    if prod(sizes) >= 1 << 62:
        raise ValueError(f"shape {text!r}: more elements than any memory holds")
    return tuple(sizes)


def cases(
    suite: str,
    operations: Sequence[str] = ("softmax",),
    shapes: Sequence[Shape] = (),
    dim: int | None = None,
    dtypes: Sequence[str] = (),
) -> list[Case]:
    """The cases of a suite, or of shapes instead of the suite's, in order.

    Args:
        suite: Name in SUITES.
        operations: Names in OPERATIONS.
        shapes: Shapes that replace those of the suite.
        dim: The softmax dimension of these shapes, the last by default.
        dtypes: Dtypes that replace those of the suite.

    Raises:
        ValueError: a name is unknown, or dim is out of range, or dim comes without shapes.
    """
    _known("suite", [suite], SUITES)
    _known("operation", operations, OPERATIONS)
    _known("dtype", dtypes, ITEMSIZE)
    if dim is not None and not shapes:
        raise ValueError("a dim needs a shape: each shape of a suite has its own")
    chosen = SUITES[suite].shapes
    if shapes:
        chosen = tuple((shape, _axis(-1 if dim is None else dim, shape)) for shape in shapes)
    return [
        Case(operation, shape, axis, dtype)
        for operation in dict.fromkeys(operations)
        for dtype in dict.fromkeys(dtypes or SUITES[suite].dtypes)
        for shape, axis in chosen
    ]


def _known(what: str, names: Sequence[str], table: dict[str, Any]) -> None:
    for name in names:
        if name not in table:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(table)}")


def _axis(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        sizes = "x".join(map(str, shape))
        raise ValueError(f"dim {dim} is out of range for {sizes}: from {-len(shape)} to {len(shape) - 1}")
    return dim % len(shape)


def make_input(case: Case, device: Any) -> Any:
    """The input on a torch device: normal numbers, one in a hundred of them times 20, the same every time.

    With normal numbers alone every output would be small and an error in the maximum would not show.
    """
    import torch

    x = torch.empty(case.shape, dtype=getattr(torch, case.dtype), device=device)
    generator = torch.Generator(device).manual_seed(case.elements)
    # By pieces, so that the float32 scratch stays small beside a row of 2^28.
    for piece in x.view(-1).split(1 << 24):
        fresh = torch.randn(piece.numel(), device=device, generator=generator)
        outlier = torch.rand(piece.numel(), device=device, generator=generator) < 0.01
        piece.copy_(fresh.mul_(torch.where(outlier, 20.0, 1.0)))
    return x
