"""The algebra of kernels/triton/state.py: each function in a kernel of one block, for tests/laws.py.

A state has l and zl, so the laws of l also test further accumulators.
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
from onlinesoftmax.kernels.triton.ops import OpConstants

TritonState = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""m, l and zl, each of shape (1,)."""


@triton.jit
def _store(m_ptr, l_ptr, zl_ptr, m, sums):
    tl.store(m_ptr, m)
    tl.store(l_ptr, sums[0])
    tl.store(zl_ptr, sums[1])


@triton.jit
def _of(x_ptr, m_ptr, l_ptr, zl_ptr, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(OP.acc)
    m, sums = ops.reduce(x, x, 0, OP)
    _store(m_ptr, l_ptr, zl_ptr, m, sums)


@triton.jit
def _of_both(x_ptr, m_ptr, l_ptr, zl_ptr, cut, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    one = tl.arange(0, 1)
    x = tl.load(x_ptr + offs, mask=offs < cut, other=-float("inf")).to(OP.acc)[None, :]
    more = tl.load(x_ptr + cut + offs, mask=offs < n - cut, other=-float("inf")).to(OP.acc)[:, None]
    m, sums = ops.reduce_both(x, x, 1, more, more, 0, OP)
    _store(m_ptr + one, l_ptr + one, zl_ptr + one, m, sums)


@triton.jit
def _merge(
    m_a_ptr, l_a_ptr, zl_a_ptr, m_b_ptr, l_b_ptr, zl_b_ptr, m_ptr, l_ptr, zl_ptr, OP: tl.constexpr,
):  # fmt: skip
    sums_a, sums_b = (tl.load(l_a_ptr), tl.load(zl_a_ptr)), (tl.load(l_b_ptr), tl.load(zl_b_ptr))
    m, sums = state.merge(tl.load(m_a_ptr), sums_a, tl.load(m_b_ptr), sums_b, OP)
    _store(m_ptr, l_ptr, zl_ptr, m, sums)


@triton.jit
def _merge_all(ms_ptr, ls_ptr, zls_ptr, m_ptr, l_ptr, zl_ptr, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    ms = tl.load(ms_ptr + offs, mask=offs < n, other=-float("inf"))
    ls = tl.load(ls_ptr + offs, mask=offs < n, other=0.0)
    zls = tl.load(zls_ptr + offs, mask=offs < n, other=0.0)
    m, sums = state.merge_all(ms, (ls, zls), 0, OP)
    _store(m_ptr, l_ptr, zl_ptr, m, sums)


@triton.jit
def _output(x_ptr, y_ptr, m_ptr, l_ptr, zl_ptr, n, BLOCK: tl.constexpr, OP: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < n, other=-float("inf")).to(OP.acc)
    constants = ops.row_constants(tl.load(m_ptr), (tl.load(l_ptr), tl.load(zl_ptr)), (), n, OP)
    y = ops.output(x, x, x == x, constants, OP)
    tl.store(y_ptr + offs, y.to(y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _logsumexp(y_ptr, m_ptr, l_ptr, zl_ptr, OP: tl.constexpr):
    tl.store(y_ptr, ops.row_output(tl.load(m_ptr), (tl.load(l_ptr), tl.load(zl_ptr)), (), 1, 0, OP))


class TritonAlgebra:
    """Slices are 1-d tensors; a state is three tensors of shape (1,)."""

    name = "triton"
    dtypes: Sequence[str] = ("float16", "bfloat16", "float32", "float64")
    # The interpreter takes a millisecond or more for a kernel.
    examples = 25
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def array(self, values: Float64, dtype: str) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device, getattr(torch, dtype))

    def numpy(self, x: torch.Tensor) -> Float64:
        return np.asarray(x.double().cpu())

    accumulators: Sequence[str] = ("weighted",)

    def of(self, x: torch.Tensor, first: int = 0) -> TritonState:
        out = self._empty(x)
        _of[(1,)](x, *out, x.numel(), BLOCK=_block(x), OP=_constants(x))
        return out

    def identity(self, like: torch.Tensor) -> TritonState:
        m, l, zl = self._empty(like)
        return m.fill_(-torch.inf), l.fill_(0), zl.fill_(0)

    def merge(self, a: TritonState, b: TritonState) -> TritonState:
        out = self._empty(a[0])
        _merge[(1,)](*a, *b, *out, OP=_constants(a[0]))
        return out

    def merge_all(self, states: Sequence[TritonState]) -> TritonState:
        ms, ls, zls = (torch.cat(parts) for parts in zip(*states, strict=True))
        out = self._empty(ms)
        _merge_all[(1,)](ms, ls, zls, *out, ms.numel(), BLOCK=_block(ms), OP=_constants(ms))
        return out

    def parts(self, state: TritonState) -> tuple[float, float]:
        return float(state[0]), float(state[1])

    def accumulated(self, state: TritonState, name: str) -> float:
        """The accumulator with weight x, sum(x * exp(x - m)); the kernel counts x from m."""
        m, l, zl = (float(part) for part in state)
        return zl + l * np.nan_to_num(m)

    def logsumexp(self, state: TritonState) -> float:
        lse = torch.full_like(state[0], torch.nan)
        _logsumexp[(1,)](lse, *state, OP=_constants(lse))
        return float(lse)

    def softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._output(state, x, "softmax")

    def log_softmax(self, state: TritonState, x: torch.Tensor) -> Float64:
        return self._output(state, x, "log_softmax")

    def _output(self, state: TritonState, x: torch.Tensor, name: str) -> Float64:
        y = torch.full_like(x, 12345.0)
        _output[(1,)](x, y, *state, x.numel(), BLOCK=_block(x), OP=_constants(x, name))
        return self.numpy(y)

    def _empty(self, like: torch.Tensor) -> TritonState:
        """Room for a state, poisoned; zl is kept in float64, as `state` keeps weighted sums where OP.exact is set."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        m, l = torch.full((2, 1), torch.nan, dtype=dtype, device=self.device)
        return m, l, torch.full((1,), torch.nan, dtype=torch.float64, device=self.device)


class TwoTilesAlgebra(TritonAlgebra):
    """The same with the state of each slice reduced from two tiles at once, as the kernels do with unaligned rows."""

    name = "triton, two tiles"

    def of(self, x: torch.Tensor, first: int = 0) -> TritonState:
        out = self._empty(x)
        _of_both[(1,)](x, *out, x.numel() // 3, x.numel(), BLOCK=_block(x), OP=_constants(x))
        return out


def _block(x: torch.Tensor) -> int:
    return triton.next_power_of_2(max(x.numel(), 1))


def _constants(x: torch.Tensor, name: str = "softmax") -> OpConstants:
    """The constants of an operation with scores and the sums l and zl."""
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    return OpConstants(
        name, scores=True, target=False, gradient=False, writes_elements=True, row_outputs=("lse",), row_fields=(0,),
        sums=("l", "zl"), rescaled=(True, True), maximum=True, acc=acc, exact=True, zero=False,
    )  # fmt: skip
