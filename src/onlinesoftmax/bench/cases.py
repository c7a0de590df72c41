"""What is measured: operation × shape × softmax dimension × dtype × what is fused, and the named lists of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, NamedTuple

from ..core.operations import OPERATIONS
from ..core.task import ITEMSIZE

Shape = tuple[int, ...]

FUSED = ("scale", "softcap", "bias", "mask", "causal")
"""What a softmax can be measured with, in the order in which it is applied."""


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Attributes:
        operation: Name in OPERATIONS.
        shape: Sizes of the contiguous input.
        dim: The softmax dimension, counted from 0.
        dtype: Dtype of input and output.
        fused: Names in FUSED, in its order: what is fused at load.

    Raises:
        ValueError: `fused` is unknown, not for this operation, or causal leaves a query without a key.

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
        _known("thing to fuse", self.fused, FUSED)
        if self.fused and self.operation != "softmax":
            raise ValueError(f"{self.operation} with {', '.join(self.fused)}: only softmax is measured with these")
        if "causal" in self.fused and (self.dim == 0 or self.shape[self.dim - 1] > self.shape[self.dim]):
            # The first queries of more queries than keys would see none: NaN, which no speed is about.
            raise ValueError(f"{self}: causal needs a dimension of queries before dim, no longer than dim")

    def __str__(self) -> str:
        inner = self.dim == len(self.shape) - 1
        sizes = "x".join(map(str, self.shape)) + ("" if inner else f" dim {self.dim}")
        return f"{sizes} {'+'.join(self.fused)}" if self.fused else sizes

    @property
    def backward(self) -> bool:
        """Whether it is a gradient."""
        return OPERATIONS[self.operation].backward

    @property
    def forward(self) -> str:
        """The public function, whose gradient it may be."""
        return OPERATIONS[self.operation].forward.name

    @property
    def elements(self) -> int:
        """Elements of the input."""
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Softmaxes."""
        return self.elements // self.shape[self.dim]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor of the shape: what the copy beside a case reads, and writes."""
        return self.elements * ITEMSIZE[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of everything that is read, each element once; a mask has a byte for each."""
        operation, itemsize = OPERATIONS[self.operation], ITEMSIZE[self.dtype]
        bias = self.shape[self.dim] * itemsize if "bias" in self.fused else 0
        mask = self.elements if "mask" in self.fused else 0
        # The gradient of logsumexp reads its output and that one's gradient.
        per_row = 0 if operation.reduces else 2 * self.rows * itemsize
        return operation.inputs * self.tensor_bytes + bias + mask + per_row

    @property
    def write_bytes(self) -> int:
        """Bytes of the output."""
        return self.rows * ITEMSIZE[self.dtype] if OPERATIONS[self.operation].per_row else self.tensor_bytes

    @property
    def bytes(self) -> int:
        """The fewest bytes that any method moves: inputs read once, the output written once."""
        return self.read_bytes + self.write_bytes

    def as_dict(self) -> dict[str, Any]:
        """Attributes and bytes, for JSON."""
        return {**asdict(self), "shape": list(self.shape), "fused": list(self.fused), "bytes": self.bytes}


class Entry(NamedTuple):
    """A case of a suite, but for its dtype."""

    shape: Shape
    dim: int
    operation: str = "softmax"
    fused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A named list of entries, and the dtypes they are measured in."""

    what: str
    entries: tuple[Entry, ...]
    dtypes: tuple[str, ...]
    repeat_ms: int = 100


def _rows(*shapes: Shape, operation: str = "softmax", fused: tuple[str, ...] = ()) -> tuple[Entry, ...]:
    return tuple(Entry(shape, len(shape) - 1, operation, fused) for shape in shapes)


FIELD = _rows(
    (1048576, 64), (524288, 128), (262144, 256), (131072, 512), (65536, 1000), (65536, 1024), (32768, 2048),
    (16384, 4096), (8192, 8192), (4096, 16384), (4096, 32768), (4096, 50256), (4096, 50257), (2048, 65536),
    (2048, 128256), (1024, 262144), (256, 1 << 20), (16, 1 << 22),
    (1, 1 << 20), (1, 1 << 22), (1, 1 << 24), (1, 1 << 26), (1, 1 << 28),
)  # fmt: skip
"""The shapes that the field publishes: batches of equal size, vocabularies, one enormous row."""

ROWS_1024 = _rows(*((1024, 1 << k) for k in range(9, 16)))
"""Too few bytes to hide a launch: what a small batch costs."""

ODD = _rows((131072, 1023), (65536, 1025), (16384, 8191))
"""Rows that do not begin on 16 bytes."""

COLUMN = (Entry((32, 512, 4096), 1),)
"""A softmax dimension that is not the innermost."""

GRADIENTS = _rows(*((1 << 27 - k, 1 << k) for k in range(8, 16)), (2048, 128256), (1024, 262144),
                  operation="softmax_backward")  # fmt: skip
"""As many elements in rows of every length, and vocabularies."""

SCORES = tuple(
    entry
    for fused in ((), ("scale",), ("mask",), ("bias",), ("scale", "mask"))
    for entry in _rows((16384, 4096), (65536, 1024), (4096, 32768), fused=fused)
) + _rows((64, 1024, 1024), fused=("causal",))
"""What a model does to its logits before the softmax, and the same shapes without it."""

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
    "gradients": Suite("softmax's gradient: y and dy in, dx out", GRADIENTS, ("bfloat16", "float32")),
    "fused": Suite("what is fused at load, beside plain softmax", SCORES, ("bfloat16", "float32")),
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
    operations: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dim: int | None = None,
    dtypes: Sequence[str] = (),
    fused: Sequence[str] = (),
) -> list[Case]:
    """The cases of a suite, or of shapes instead of the suite's, in order.

    Args:
        suite: Name in SUITES.
        operations: Names in OPERATIONS that replace those of the suite.
        shapes: Shapes that replace those of the suite.
        dim: The softmax dimension of these shapes, the last by default.
        dtypes: Dtypes that replace those of the suite.
        fused: Names in FUSED that replace what the suite fuses.

    Raises:
        ValueError: a name is unknown, or dim is out of range, or dim comes without shapes, or a case makes no sense.

    Example:
        >>> [str(case) for case in cases("quick", shapes=[(4, 8)], dtypes=["float32"], fused=["mask", "scale"])]
        ['4x8 scale+mask']
    """
    _known("suite", [suite], SUITES)
    _known("operation", operations, OPERATIONS)
    _known("dtype", dtypes, ITEMSIZE)
    _known("thing to fuse", fused, FUSED)
    if dim is not None and not shapes:
        raise ValueError("a dim needs a shape: each shape of a suite has its own")
    chosen: Iterable[Entry] = SUITES[suite].entries
    if shapes:
        places = [(shape, _axis(-1 if dim is None else dim, shape)) for shape in shapes]
        kinds = dict.fromkeys((entry.operation, entry.fused) for entry in chosen)
        chosen = [Entry(*place, *kind) for kind in kinds for place in places]
    if fused:
        in_order = tuple(name for name in FUSED if name in fused)
        chosen = [entry._replace(fused=in_order) for entry in chosen]
    found = [
        Case(operation or entry.operation, entry.shape, entry.dim, dtype, entry.fused)
        for operation in operations or [""]
        for dtype in dtypes or SUITES[suite].dtypes
        for entry in chosen
    ]
    # A suite may differ only in what was replaced.
    return list(dict.fromkeys(found))


def _known(what: str, names: Iterable[str], table: Iterable[str]) -> None:
    for name in names:
        if name not in table:
            raise ValueError(f"unknown {what} {name!r}; there are: {', '.join(table)}")


def _axis(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        sizes = "x".join(map(str, shape))
        raise ValueError(f"dim {dim} is out of range for {sizes}: from {-len(shape)} to {len(shape) - 1}")
    return dim % len(shape)
