"""The benchmark suites: named lists of shapes, operations and score options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..core.task import ITEMSIZE
from .cases import FUSED, MEASURED, Case, Shape, known


class Entry(NamedTuple):
    """A case of a suite, without its dtype."""

    shape: Shape
    dim: int
    operation: str = "softmax"
    fused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """A list of entries, with the dtypes that they are measured in.

    Attributes:
        description: The purpose of the suite.
        entries: The cases, without their dtypes.
        dtypes: Every entry is measured in each of these dtypes.
        repeat_ms: Milliseconds for each measurement.
    """

    description: str
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
"""Shapes of published softmax benchmarks: batches of equal size, vocabularies, one enormous row."""

ROWS_1024 = _rows(*((1024, 1 << k) for k in range(9, 16)))
"""Small batches: too few bytes to hide the time of a launch."""

ODD = _rows((131072, 1023), (65536, 1025), (16384, 8191))
"""Unaligned rows: most do not begin on 16 bytes."""

COLUMN = (Entry((32, 512, 4096), 1),)
"""A softmax dimension that is not the innermost."""

GRADIENTS = _rows(*((1 << 27 - k, 1 << k) for k in range(8, 16)), (2048, 128256), (1024, 262144),
                  operation="softmax_backward")  # fmt: skip
"""2^27 elements in rows of every length, and vocabularies."""

SCORES = tuple(
    entry
    for fused in ((), ("scale",), ("mask",), ("bias",), ("scale", "mask"))
    for entry in _rows((16384, 4096), (65536, 1024), (4096, 32768), fused=fused)
) + _rows((64, 1024, 1024), fused=("causal",))
"""The score options that models use, and the same shapes without any."""

SUITES: dict[str, Suite] = {
    "quick": Suite(
        "a few small shapes, measured in seconds even on a CPU",
        _rows((64, 512), (1024, 1024), (256, 16384)), ("bfloat16", "float32"), repeat_ms=50,
    ),
    "default": Suite(
        "one shape for each strategy and difficulty",
        _rows((524288, 128), (65536, 1000), (65536, 1024), (8192, 8192), (4096, 32768), (4096, 50257),
              (2048, 128256), (1, 1 << 24), (1024, 4096), (65536, 1025)) + COLUMN,
        ("bfloat16", "float32"),
    ),
    "full": Suite("published shapes, small batches, unaligned rows, columns", FIELD + ROWS_1024 + ODD + COLUMN,
                  ("bfloat16", "float32")),
    "gradients": Suite("the gradient of softmax: reads y and dy, writes dx", GRADIENTS, ("bfloat16", "float32")),
    "fused": Suite("softmax with score options, beside plain softmax", SCORES, ("bfloat16", "float32")),
    "cpu": Suite(
        "the time that our layer adds to PyTorch on a CPU, with many repetitions",
        _rows((64, 512), (1024, 64), (256, 256), (1024, 1024), (4096, 1024), (1024, 16384)),
        ("float32", "bfloat16"), repeat_ms=1000,
    ),
}  # fmt: skip
"""The suites by name."""


def cases(
    suite: str,
    operations: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dim: int | None = None,
    dtypes: Sequence[str] = (),
    fused: Sequence[str] = (),
) -> list[Case]:
    """The cases of a suite; what is given replaces what the suite says.

    Args:
        suite: Name in SUITES.
        operations: Names in MEASURED.
        shapes: Shapes of the input.
        dim: The softmax dimension of these shapes; the last by default.
        dtypes: Names of dtypes.
        fused: Names of score options.

    Raises:
        ValueError: a name is unknown, dim is out of range or comes without shapes, or a case makes no sense.

    Example:
        >>> [str(case) for case in cases("quick", shapes=[(4, 8)], dtypes=["float32"], fused=["mask", "scale"])]
        ['4x8 scale+mask']
    """
    known("suite", [suite], SUITES)
    known("operation", operations, MEASURED)
    known("dtype", dtypes, ITEMSIZE)
    known("score option", fused, FUSED)
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
    # Entries that differ only in what was replaced are one case now.
    return list(dict.fromkeys(found))


def _axis(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        sizes = "x".join(map(str, shape))
        raise ValueError(f"dim {dim} is out of range for {sizes}: it must be from {-len(shape)} to {len(shape) - 1}")
    return dim % len(shape)
