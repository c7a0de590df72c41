"""The inputs of the check: odd sizes, every kind of strides, and every special number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One input of the check.

    Attributes:
        name: The difficulty that it tests.
        make: Makes the tensor in float32 on the CPU; the argument is the module torch.
        dim: The softmax dimension.
        view: Makes the view that is tested, with its strides, from the tensor on its device in its dtype.
        quick: True where a quick check includes the input.
        heavy: True where the input is too large for Triton's interpreter.
    """

    name: str
    make: Callable[[Any], Any]
    dim: int = -1
    view: Callable[[Any], Any] = lambda x: x
    quick: bool = False
    heavy: bool = False

    def tensor(self, dtype: Any, device: str) -> Any:
        """The input in this dtype on this device."""
        import torch

        return self.view(self.make(torch).to(dtype).to(device))


def outliers(torch: Any, *shape: int) -> Any:
    """Normal numbers, one in a hundred of them times 20: some outputs are large, most underflow."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(*shape, generator=generator)
    return torch.where(torch.rand(*shape, generator=generator) < 0.01, 20 * x, x)


def specials(torch: Any, cols: int) -> Any:
    """One row for each combination of infinities and NaN, one row without them, and one of -inf alone."""
    inf, nan = torch.inf, torch.nan
    mixtures = ((-inf,), (inf,), (nan,), (inf, nan), (inf, -inf), (-inf, nan))
    x = outliers(torch, len(mixtures) + 2, cols)
    for row, values in enumerate(mixtures):
        x[row, 3 : 3 + len(values)] = torch.tensor(values)
    x[-1] = -inf
    return x


def _sized(rows: int, cols: int, quick: bool = False) -> Case:
    return Case(f"{rows} x {cols}", lambda torch: outliers(torch, rows, cols), quick=quick)


def _view(
    name: str,
    shape: tuple[int, ...],
    dim: int,
    view: Callable[[Any], Any] = lambda x: x,
    quick: bool = False,
    heavy: bool = False,
) -> Case:
    return Case(name, lambda torch: outliers(torch, *shape), dim, view, quick, heavy)


def _masked_head(torch: Any) -> Any:
    """Rows that begin with many blocks of -inf."""
    x = outliers(torch, 2, 40003)
    x[:, :36000] = -torch.inf
    return x


CASES: tuple[Case, ...] = (
    *(_sized(3, cols) for cols in (1, 2, 3, 31, 127, 1000, 1025)),
    _sized(3, 33),
    _sized(3, 1023, quick=True),
    _sized(1, 50257, quick=True),
    _view("one dimension", (257,), 0),
    _view("short rows", (13, 5), -1),
    _view("many short rows", (1300, 5), -1, heavy=True),
    _view("middle dimension", (2, 17, 9), 1),
    _view("wide middle dimension", (2, 100, 130), -2, heavy=True),
    _view("first of four", (33, 2, 3, 4), 0),
    _view("tall columns", (700, 8), 0, quick=True),
    _view("taller columns", (5000, 48), 0, heavy=True),
    _view("permuted", (2, 3, 2, 2, 33), 2, lambda x: x.permute(2, 0, 4, 1, 3)),
    _view("sliced", (3, 4, 3, 2, 40), -1, lambda x: x[1:, ::2, :, :1, 3:36]),
    _view("transposed", (65, 16), -1, lambda x: x.t()),
    _view("sliced columns", (5, 90), -1, lambda x: x[:, 1:80]),
    _view("strided columns", (5, 90), -1, lambda x: x[:, ::3]),
    _view("repeated row", (1, 50), -1, lambda x: x.expand(4, 50)),
    _view("repeated column", (4, 1), -1, lambda x: x.expand(4, 50)),
    _view("unaligned start", (1025,), -1, lambda x: x[1:].view(8, 128)),
    Case("infinities and NaN", lambda torch: specials(torch, 70), quick=True),
    Case(
        "infinities and NaN, transposed",
        lambda torch: specials(torch, 70),
        view=lambda x: x.t().contiguous().t(),
        quick=True,
    ),
    Case("-inf first", _masked_head),
)
"""The inputs of a full check."""

QUICK_GRADIENTS = ("3 x 1023", "middle dimension", "tall columns", "infinities and NaN")
"""Names of the inputs of gradients in a quick check: fewer and smaller, because each runs a forward call too."""

QUICK_GRADIENT_DTYPES = ("bfloat16", "float32")
"""Dtypes of gradients in a quick check, where none is named."""
