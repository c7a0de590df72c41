"""The problem: what a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from .layout import power_of_two_divisor
from .operations import OPERATIONS

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of each dtype that the library takes."""


@dataclass(frozen=True)
class Problem:
    """What is to be computed, as far as the choice of a plan depends on it.

    Attributes:
        operation: Name in OPERATIONS.
        rows: Softmaxes to compute.
        cols: Elements of each.
        dtype: Dtype of the input.
        out_dtype: Dtype of the output; None for that of the input.
        contiguous: Whether the elements of a row are neighbours in memory.
        adjacent: Rows that lie side by side, element by element, when they are not.
        unit: Power of two that divides every row's length and beginning; None to take it from cols.
        peelable: Whether the output's rows begin alike, so that a row which begins anywhere can be cut
            into head, body and tail with the body on 16-byte boundaries in both.
        more_bytes: Bytes of what else is read, a bias or a mask, each element once.
        bias_bytes: Bytes of an element of a bias, which is on chip with the input's.
        masked: Whether a boolean mask is read.
        fused: Whether scores are made from the input while it is read, by whatever of the arguments.
    """

    operation: str
    rows: int
    cols: int
    dtype: str = "float32"
    out_dtype: str | None = None
    contiguous: bool = True
    adjacent: int = 1
    unit: int | None = None
    peelable: bool = True
    more_bytes: int = 0
    bias_bytes: int = 0
    masked: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if self.operation not in OPERATIONS:
            raise ValueError(f"unknown operation {self.operation!r}; operations: {', '.join(OPERATIONS)}")
        for name in filter(None, (self.dtype, self.out_dtype)):
            if name not in ITEMSIZE:
                raise ValueError(f"unknown dtype {name!r}; dtypes: {', '.join(ITEMSIZE)}")
        if self.rows < 0 or self.cols < 0:
            raise ValueError(f"rows and cols must not be negative, got {self.rows} x {self.cols}")

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the input."""
        return ITEMSIZE[self.dtype]

    @property
    def per_row(self) -> bool:
        """Whether a row gives one number."""
        return OPERATIONS[self.operation].per_row

    @property
    def inputs(self) -> int:
        """Tensors of rows × cols that are read."""
        return OPERATIONS[self.operation].inputs

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of all of these."""
        return self.cols * self.itemsize * self.inputs

    @property
    def read_bytes(self) -> int:
        """Bytes of everything that is read, once."""
        return self.rows * self.row_bytes + self.more_bytes

    @property
    def write_bytes(self) -> int:
        """Bytes of the output, written once."""
        return self.rows * (1 if self.per_row else self.cols) * ITEMSIZE[self.out_dtype or self.dtype]

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.itemsize

    @property
    def aligned_bytes(self) -> int:
        """Bytes, at most 16, that divide every contiguous row's length and beginning."""
        unit = power_of_two_divisor(self.cols) if self.unit is None else self.unit
        return min(16, unit * self.itemsize)

    @property
    def peels(self) -> bool:
        """Whether rows begin anywhere and are cut so that it does not matter; loads of 8 bytes do not need it."""
        return self.contiguous and self.peelable and self.aligned_bytes < 8 and self.cols >= 2 * self.vector
