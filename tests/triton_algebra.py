"""The algebra of kernels/triton/state.py: each function in a kernel of one block, for tests/laws.py.

A state has every accumulator of kernels/triton/state.py: l and zl, a plain sum, and an argmax.
Without a GPU the kernels run in Triton's interpreter (tests/conftest.py), on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from laws import Float64
from onlinesoftmax.kernels.triton import formulas, split, state
from onlinesoftmax.kernels.triton.formulas import OpConstants

TritonState = tuple[torch.Tensor, ...]
"""m and the parts of the accumulators, each of shape (1,)."""


@triton.jit
def _store(to, m, sums):
    tl.store(to[0], m)
    for k in tl.static_range(len(sums)):
        tl.store(to[1 + k], sums[k])


@triton.jit
def _load(state):
    sums = ()
    for k in tl.static_range(1, len(state)):
        sums += (tl.load(state[k]),)
    return tl.load(state[0]), sums


@triton.jit
def _elements(x_ptr, first, offs, inside, OP: tl.constexpr):
    """What operands.load returns for a plain row, whose first column is `first`."""
    x = tl.load(x_ptr + offs, mask=inside, other=-float("inf")).to(OP.acc)
    # The summand of the plain sum is the product of both.
    return x, tl.where(inside, 1.0, 0.0).to(OP.acc), inside, (state.key_of(x, inside), first + offs.to(tl.int64))


@triton.jit
def _of(x_ptr, to, first, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    m, sums = formulas.reduce(_elements(x_ptr, first, offs, offs < n, OP), 0, OP)
    _store(to, m, sums)


@triton.jit
def _of_both(x_ptr, to, first, cut, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs, one = tl.arange(0, BLOCK), tl.arange(0, 1)
    element = _elements(x_ptr, first, offs[None, :], offs[None, :] < cut, OP)
    more = _elements(x_ptr + cut, first + cut, offs[:, None], offs[:, None] < n - cut, OP)
    m, sums = formulas.reduce_both(element, 1, more, 0, OP)
    tl.store(to[0] + one, m)
    for k in tl.static_range(len(sums)):
        tl.store(to[1 + k] + one, sums[k])


@triton.jit
def _identity(to, OP: tl.constexpr):
    one = tl.arange(0, 1)
    m, sums = state.identity(1, OP)
    tl.store(to[0] + one, m)
    for k in tl.static_range(len(sums)):
        tl.store(to[1 + k] + one, sums[k])


@triton.jit
def _merge(a, b, to, OP: tl.constexpr):
    m_a, sums_a = _load(a)
    m_b, sums_b = _load(b)
    m, sums = state.merge(m_a, sums_a, m_b, sums_b, OP)
    _store(to, m, sums)


@triton.jit
def _merge_all(states, to, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    ms = tl.load(states[0] + offs, mask=offs < n, other=-float("inf"))
    m, sums = state.merge_all(ms, split.load_sums(states, offs, offs < n, OP), 0, OP)
    _store(to, m, sums)


@triton.jit
def _output(x_ptr, y_ptr, of_row, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(OP.acc)
    m, sums = _load(of_row)
    y = formulas.output(x, x, x == x, formulas.row_constants(m, sums, (), n, OP), OP)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _row_outputs(lse_ptr, largest_ptr, of_row, OP: tl.constexpr):
    m, sums = _load(of_row)
    tl.store(lse_ptr, formulas.row_output(m, sums, (), 1, 0, OP))
    tl.store(largest_ptr, formulas.row_output(m, sums, (), 1, 1, OP))


class TritonAlgebra:
    """Slices are 1-d tensors; a state is three tensors of shape (1,)."""

    name = "triton"
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    # The interpreter takes a millisecond or more for a kernel.
    examples = 10
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def array(self, values: Float64, dtype: str) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, getattr(torch, dtype))

    def numpy(self, x: torch.Tensor) -> Float64:
        return np.asarray(x.double().cpu())

    accumulators: Sequence[str] = ("weighted", "plain", "largest")

    def of(self, x: torch.Tensor, first: int = 0) -> TritonState:
        out, n = self._empty(x), x.numel()
        # Some slices of every length are reduced from two tiles at once, as the kernels do with unaligned rows.
        if bool(n and x[0] > 0) == n % 2:
            _run(_of, x, out, first, n, BLOCK=_block(x), OP=_constants(x))
        else:
            _run(_of_both, x, out, first, n // 3, n, BLOCK=_block(x), OP=_constants(x))
        return out

    def identity(self, like: torch.Tensor) -> TritonState:
        out = self._empty(like)
        _run(_identity, out, OP=_constants(like))
        return out

    def merge(self, a: TritonState, b: TritonState) -> TritonState:
        out = self._empty(a[0])
        _run(_merge, a, b, out, OP=_constants(a[0]))
        return out

    def merge_all(self, states: Sequence[TritonState]) -> TritonState:
        together = tuple(torch.cat(parts) for parts in zip(*states, strict=True))
        out = self._empty(ms := together[0])
        _run(_merge_all, together, out, ms.numel(), BLOCK=_block(ms), OP=_constants(ms))
        return out

    def parts(self, state: TritonState) -> tuple[float, float]:
        return float(state[0]), float(state[1])

    def accumulated(self, state: TritonState, name: str) -> float:
        if name == "largest":
            no_key = int(state[-2]) == torch.iinfo(state[-2].dtype).min
            return -1 if no_key else int(self._row_outputs(state)[1])
        m, l, zl, plain, *_ = (float(part) for part in state)
        # The kernel counts the x in zl from m.
        return plain if name == "plain" else zl + l * np.nan_to_num(m)

    def logsumexp(self, state: TritonState) -> float:
        return float(self._row_outputs(state)[0])

    def _row_outputs(self, state: TritonState) -> tuple[torch.Tensor, torch.Tensor]:
        """Lse and the largest index."""
        lse, largest = torch.full_like(state[0], torch.nan), torch.full_like(state[-1], -7)
        _run(_row_outputs, lse, largest, state, OP=_constants(lse))
        return lse, largest

    def softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._output(state, x, "softmax")

    def log_softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._output(state, x, "log_softmax")

    def _output(self, state: TritonState, x: torch.Tensor, name: str) -> Float64:
        y = torch.full_like(x, 12345.0)
        _run(_output, x, y, state, x.numel(), BLOCK=_block(x), OP=_constants(x, name))
        return self.numpy(y)

    def _empty(self, like: torch.Tensor) -> TritonState:
        """Room for a state, poisoned; sums that may cancel are kept in float64, as OP.exact asks for it."""
        dtype, key = (torch.float64, torch.int64) if like.dtype == torch.float64 else (torch.float32, torch.int32)
        dtypes = (dtype, dtype, torch.float64, torch.float64, key, torch.int64)
        return tuple(
            torch.full((1,), torch.nan if kind.is_floating_point else -7, dtype=kind, device=self.device)
            for kind in dtypes
        )


def _run(kernel: Any, *arguments: Any, **constants: Any) -> None:
    """One program; the interpreter would warn of a plain sum of inf and -inf."""
    with np.errstate(invalid="ignore"):
        kernel[(1,)](*arguments, **constants)


def _block(x: torch.Tensor) -> int:
    return triton.next_power_of_2(max(x.numel(), 1))


def _constants(x: torch.Tensor, name: str = "softmax") -> OpConstants:
    """The constants of an operation with scores and every accumulator."""
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    return OpConstants(
        name, scores=True, target=False, gradient=False, writes_elements=True, row_outputs=("lse", "largest"),
        row_fields=(0, 0), sums=("l", "zl", "wz", "largest_key", "largest_index"),
        kinds=("scaled", "scaled", "plain", "key", "index"), argmax=True, maximum=True, acc=acc, exact=True, zero=False,
    )  # fmt: skip
