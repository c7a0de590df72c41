"""The algebra of backends/triton/state.py: each function in a kernel of one block, for tests/laws.py.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py), on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from laws import Float64
from onlinesoftmax.kernels.triton import ops, state

TritonState = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def _of(x_ptr, m_ptr, l_ptr, n, BLOCK: tl.constexpr, ACC: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(ACC)
    m, l = state.of(x[None, :], 1, True)
    one = tl.arange(0, 1)
    tl.store(m_ptr + one, m)
    tl.store(l_ptr + one, l)


@triton.jit
def _of_both(x_ptr, m_ptr, l_ptr, cut, n, BLOCK: tl.constexpr, ACC: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < cut, other=-float("inf")).to(ACC)
    more = tl.load(x_ptr + cut + offs, mask=offs < n - cut, other=-float("inf")).to(ACC)
    m, l = state.of_both(x[None, :], 1, more[:, None], 0, True)
    one = tl.arange(0, 1)
    tl.store(m_ptr + one, m)
    tl.store(l_ptr + one, l)


@triton.jit
def _merge(m_a_ptr, l_a_ptr, m_b_ptr, l_b_ptr, m_ptr, l_ptr):
    m, l = state.merge(tl.load(m_a_ptr), tl.load(l_a_ptr), tl.load(m_b_ptr), tl.load(l_b_ptr), True)
    tl.store(m_ptr, m)
    tl.store(l_ptr, l)


@triton.jit
def _merge_all(ms_ptr, ls_ptr, m_ptr, l_ptr, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    ms = tl.load(ms_ptr + offs, mask=offs < n, other=-float("inf"))
    ls = tl.load(ls_ptr + offs, mask=offs < n, other=0.0)
    m, l = state.merge_all(ms[None, :], ls[None, :], 1, True)
    one = tl.arange(0, 1)
    tl.store(m_ptr + one, m)
    tl.store(l_ptr + one, l)


@triton.jit
def _finish(x_ptr, y_ptr, m_ptr, l_ptr, n, BLOCK: tl.constexpr, ACC: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(ACC)
    m, l = tl.load(m_ptr), tl.load(l_ptr)
    s, l, t = ops.term(m, l, n, OP, False)
    y = ops.finish(x, x, s, l, t, OP, True, False)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _result(lse_ptr, m_ptr, l_ptr):
    tl.store(lse_ptr, ops.result(tl.load(m_ptr), tl.load(l_ptr)))


class TritonAlgebra:
    """Slices are 1-d tensors; a state is two tensors of shape (1,)."""

    name = "triton"
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    # The interpreter takes a millisecond or more for a kernel.
    examples = 25
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def array(self, values: Float64, dtype: str) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, getattr(torch, dtype))

    def numpy(self, x: torch.Tensor) -> Float64:
        return np.asarray(x.double().cpu())

    def of(self, x: torch.Tensor) -> TritonState:
        m, l = self._empty(x)
        _of[(1,)](x, m, l, x.numel(), BLOCK=_block(x), ACC=_accumulator(x))
        return m, l

    def identity(self, like: torch.Tensor) -> TritonState:
        m, l = self._empty(like)
        return m.fill_(-torch.inf), l.fill_(0)

    def merge(self, a: TritonState, b: TritonState) -> TritonState:
        m, l = self._empty(a[0])
        _merge[(1,)](*a, *b, m, l)
        return m, l

    def merge_all(self, states: Sequence[TritonState]) -> TritonState:
        ms, ls = (torch.cat(parts) for parts in zip(*states, strict=True))
        m, l = self._empty(ms)
        _merge_all[(1,)](ms, ls, m, l, ms.numel(), BLOCK=_block(ms))
        return m, l

    def parts(self, state: TritonState) -> tuple[float, float]:
        return float(state[0]), float(state[1])

    def logsumexp(self, state: TritonState) -> float:
        lse, _ = self._empty(state[0])
        _result[(1,)](lse, *state)
        return float(lse)

    def softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._finish(state, x, "softmax")

    def log_softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._finish(state, x, "log_softmax")

    def _finish(self, state: TritonState, x: torch.Tensor, op: str) -> Float64:
        y = torch.full_like(x, 12345.0)
        _finish[(1,)](x, y, *state, x.numel(), BLOCK=_block(x), ACC=_accumulator(x), OP=op)
        return self.numpy(y)

    def _empty(self, like: torch.Tensor) -> TritonState:
        """Room for a state, poisoned."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        m, l = torch.full((2, 1), torch.nan, dtype=dtype, device=self.device)
        return m, l


class TwoTilesAlgebra(TritonAlgebra):
    """The same, with each slice's state taken from two tiles at once, as cut rows are."""

    name = "triton, two tiles"

    def of(self, x: torch.Tensor) -> TritonState:
        m, l = self._empty(x)
        _of_both[(1,)](x, m, l, x.numel() // 3, x.numel(), BLOCK=_block(x), ACC=_accumulator(x))
        return m, l


def _block(x: torch.Tensor) -> int:
    return triton.next_power_of_2(max(x.numel(), 1))


def _accumulator(x: torch.Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32
