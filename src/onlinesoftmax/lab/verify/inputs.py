"""The inputs of the check: odd sizes, every kind of strides, and every special number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def _masked_head(torch: Any, *shape: int) -> Any:
    """Rows that begin with many blocks of -inf."""
    x = outliers(torch, *shape)
    x[:, :36000] = -torch.inf
    return x


@dataclass(frozen=True)
class Case:
    """One input of the check.

    Attributes:
        name: The difficulty that it tests.
        shape: Arguments of `make`: the shape of the tensor, or for `specials` the number of columns.
        dim: The softmax dimension.
        view: Makes the view that is tested, with its strides, from the tensor on its device in its dtype.
        make: Makes the tensor in float32 on the CPU; the first argument is the module torch.
        quick: True where a quick check includes the input.
        heavy: True where the input is too large for Triton's interpreter.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = -1
    view: Callable[[Any], Any] = lambda x: x
    make: Callable[..., Any] = outliers
    quick: bool = False
    heavy: bool = False

    def tensor(self, dtype: Any, device: str) -> Any:
        """The input in this dtype on this device."""
        import torch

        return self.view(self.make(torch, *self.shape).to(dtype).to(device))


CASES: tuple[Case, ...] = (
    *(Case(f"3 x {cols}", (3, cols)) for cols in (1, 2, 3, 31, 127, 1000, 1025, 33)),
    Case("3 x 1023", (3, 1023), quick=True),
    Case("1 x 50257", (1, 50257), quick=True),
    Case("one dimension", (257,), 0),
    Case("short rows", (13, 5)),
    Case("many short rows", (1300, 5), heavy=True),
    Case("middle dimension", (2, 17, 9), 1),
    Case("wide middle dimension", (2, 100, 130), -2, heavy=True),
    Case("first of four", (33, 2, 3, 4), 0),
    Case("tall columns", (700, 8), 0, quick=True),
    Case("taller columns", (5000, 48), 0, heavy=True),
    Case("permuted", (2, 3, 2, 2, 33), 2, lambda x: x.permute(2, 0, 4, 1, 3)),
    Case("sliced", (3, 4, 3, 2, 40), view=lambda x: x[1:, ::2, :, :1, 3:36]),
    Case("transposed", (65, 16), view=lambda x: x.t()),
    Case("sliced columns", (5, 90), view=lambda x: x[:, 1:80]),
    Case("strided columns", (5, 90), view=lambda x: x[:, ::3]),
    Case("repeated row", (1, 50), view=lambda x: x.expand(4, 50)),
    Case("repeated column", (4, 1), view=lambda x: x.expand(4, 50)),
    Case("unaligned start", (1025,), view=lambda x: x[1:].view(8, 128)),
    Case("infinities and NaN", (70,), make=specials, quick=True),
    Case("infinities and NaN, transposed", (70,), view=lambda x: x.t().contiguous().t(), make=specials, quick=True),
    Case("-inf first", (2, 40003), make=_masked_head),
)
"""The inputs of a full check."""

QUICK_GRADIENTS = ("3 x 1023", "middle dimension", "tall columns", "infinities and NaN")
"""Names of the inputs of gradients in a quick check: fewer and smaller, because each runs a forward call too."""

QUICK_GRADIENT_DTYPES = ("bfloat16", "float32")
"""Dtypes of gradients in a quick check, where none is named."""
