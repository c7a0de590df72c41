"""The benchmark suites: named lists of shapes, operations and score options."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..core.task import ITEMSIZE
from .cases import FUSED, MEASURED, Case, Shape, known


class Entry(NamedTuple):
    """A case of a suite, without its dtype."""

    shape: Shape
    dim: int
    operation: str = "softmax"
    fused: tuple[str, ...] = ()
    with_gradient: bool = False
    reduction: str = ""

    def case(self, operation: str, dtype: str) -> Case:
        """The case in a dtype, of another operation if its name is not empty."""
        own = operation in ("", self.operation)
        return Case(
            operation or self.operation, self.shape, self.dim, dtype, self.fused, self.with_gradient,
            self.reduction if own else "",
        )  # fmt: skip


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


def _rows(*shapes: Shape, **kind: Any) -> tuple[Entry, ...]:
    """Entries of these shapes over the last dimension; `kind` has the other fields of Entry."""
    return tuple(Entry(shape, len(shape) - 1, **kind) for shape in shapes)


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

LOSSES = _rows(
    (8192, 128256), (4096, 50257), (8192, 32000), (4096, 262144), (16384, 4096),
    operation="cross_entropy", with_gradient=True,
) + _rows((8192, 128256), (8192, 32000), operation="cross_entropy", with_gradient=True, reduction="none")  # fmt: skip
"""The losses of training: a mean, and losses of rows that the caller weights."""

TOKENS = _rows((8192, 128256), (4096, 151936), (8192, 32000), operation="token_logprobs", with_gradient=True)
"""Log-probabilities and entropies of chosen tokens, as reinforcement learning differentiates them."""

READ_ONLY = tuple(
    entry
    for operation in ("logsumexp", "token_logprobs", "cross_entropy")
    for entry in _rows((65536, 1024), (8192, 8192), (8192, 32000), (512, 151936), (4096, 151936), (2048, 128256),
                       operation=operation)
)  # fmt: skip
"""Operations that read every element and write none."""

SHARDED = (
    _rows((8192, 128256), (8192, 32000), (4096, 262144), operation="cross_entropy", with_gradient=True)
    + _rows((1, 1 << 30), (8192, 128256))
    + _rows((8192, 128256), operation="token_logprobs", with_gradient=True)
)
"""Rows that are sharded over processes: shapes of the whole input."""

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
    "cross-entropy": Suite("cross-entropy with its gradient, for the vocabularies of models", LOSSES,
                           ("bfloat16", "float32")),
    "token-logprobs": Suite("log-probabilities and entropies with their gradient", TOKENS, ("bfloat16", "float32")),
    "read-only": Suite("one read of the input, without a gradient", READ_ONLY, ("bfloat16", "float32")),
    "distributed": Suite("rows that are sharded over the processes of torchrun", SHARDED, ("bfloat16",)),
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
    with_gradient: bool = False,
    reduction: str = "",
) -> list[Case]:
    """The cases of a suite; what is given replaces what the suite says.

    Args:
        suite: Name in SUITES.
        operations: Names in MEASURED.
        shapes: Shapes of the input.
        dim: The softmax dimension of these shapes; the last by default.
        dtypes: Names of dtypes.
        fused: Names of score options.
        with_gradient: True for calls with their gradient through autograd.
        reduction: "mean" or "none", for operations that have a reduction.

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
        kinds = dict.fromkeys(entry._replace(shape=(), dim=0) for entry in chosen)
        chosen = [kind._replace(shape=its_shape, dim=axis) for kind in kinds for its_shape, axis in places]
    if fused:
        in_order = tuple(name for name in FUSED if name in fused)
        chosen = [entry._replace(fused=in_order) for entry in chosen]
    if with_gradient:
        chosen = [entry._replace(with_gradient=True) for entry in chosen]
    found = [
        entry.case(operation, dtype)
        for operation in operations or [""]
        for dtype in dtypes or SUITES[suite].dtypes
        for entry in chosen
    ]
    if reduction:
        found = [replace(case, reduction=reduction) for case in found]
    # Entries that differ only in what was replaced are one case now.
    return list(dict.fromkeys(found))


def _axis(dim: int, shape: Shape) -> int:
    if not -len(shape) <= dim < len(shape):
        sizes = "x".join(map(str, shape))
        raise ValueError(f"dim {dim} is out of range for {sizes}: it must be from {-len(shape)} to {len(shape) - 1}")
    return dim % len(shape)
