"""The algebra of backends/cuda/state.cuh: each function in a kernel of one warp, for tests/laws.py.

Compiling needs no GPU; running does, and only then is torch imported.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from laws import Float64
from onlinesoftmax.core.device import known
from onlinesoftmax.core.layout import rows_of
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.kernels.cuda import compile, driver, source
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.planner.plan import price
from onlinesoftmax.planner.strategies import cuda

FORMS = ("softmax", "log_softmax")
"""Operations whose states differ where a softmax of 16 bits is FOLDED; the second one's is a plain (m, l)."""

CudaState = tuple[Any, Any]
"""The state of one slice for each of FORMS: its bytes, in a torch tensor."""

KERNELS = """
#line 1 "cuda_algebra"
extern "C" __global__ void algebra_of(const X* x, int64 n, State* to) {
    ACC m = -INF;
    for (int64 i = threadIdx.x; i < n; i += 32) m = fmax(m, ACC(wide(x[i])));
    SUM l = 0;
    for (int64 i = threadIdx.x; i < n; i += 32) l += term(wide(x[i]), shift(m));
    const State a = merge_lanes<32>({m, l});
    if (threadIdx.x == 0) *to = a;
}
extern "C" __global__ void algebra_identity(State* to) {
    if (threadIdx.x == 0) *to = identity();
}
extern "C" __global__ void algebra_merge(const State* a, const State* b, int64 n, State* to) {
    for (int64 i = threadIdx.x; i < n; i += 32) to[i] = merge(a[i], b[i]);
}
extern "C" __global__ void algebra_merge_all(const State* from, int64 n, State* to) {
    State a = identity();
    for (int64 i = threadIdx.x; i < n; i += 32) a = merge(a, from[i]);
    a = merge_lanes<32>(a);
    if (threadIdx.x == 0) *to = a;
}
extern "C" __global__ void algebra_finish(const State* from, const X* x, int64 n, Y* y) {
    const ops::Term t = ops::term(*from, n);
    for (int64 i = threadIdx.x; i < n; i += 32) narrow(y[i], ops::finish(wide(x[i]), 0, t));
}
extern "C" __global__ void algebra_parts(const State* from, double* to) {
    if (threadIdx.x == 0) to[0] = from->m, to[1] = double(from->l), to[2] = ops::result(*from);
}
"""

PAIRS = (
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float64"),
    ("float32", "bfloat16"), ("float64", "float16"),
)  # fmt: skip
"""Dtypes of input and output: float32 and float64 states, EXACT and not."""


@cache
def algebra_source(form: str, dtype: str, out: str) -> str:
    """The kernels above behind everything that a softmax of these dtypes is compiled from."""
    problem, device = Problem(form, 64, 1000, dtype, out), known("h200")
    blocks = cuda.row(problem, device)
    assert not isinstance(blocks, str), blocks
    layout = rows_of((64, 1000), 1, (1000, 1), (1000, 1))
    request = Request(form, price(blocks[0], problem, device), layout, {"x": dtype, "y": out}, frozenset(("x", "y")))
    check = f"static_assert(sizeof(State) == {state_bytes(dtype, out)});\n"
    return source.source(request) + KERNELS + check


def state_bytes(dtype: str, out: str) -> int:
    """Bytes of a State: m, and an l of float32, float64, or two float64."""
    if "float64" in (dtype, out):
        return 24
    return 16 if out == "float32" else 8


@cache
def _kernel(form: str, dtype: str, out: str, name: str) -> int:
    import torch

    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return driver.load_kernel(compile.cubin(algebra_source(form, dtype, out), arch), f"algebra_{name}")


class CudaAlgebra:
    """Slices are 1-d tensors of `dtype` whose elements `out` holds exactly."""

    examples = 25
    device = "cuda"

    def __init__(self, dtype: str, out: str) -> None:
        self.name = f"cuda, {dtype} to {out}"
        self.dtypes: Sequence[str] = (out,)
        self.dtype, self.out = dtype, out

    def array(self, values: Float64, dtype: str) -> Any:
        import torch

        return torch.from_numpy(values).to(self.device, getattr(torch, dtype)).to(getattr(torch, self.dtype))

    def numpy(self, x: Any) -> Float64:
        return np.asarray(x.double().cpu())

    def of(self, x: Any) -> CudaState:
        return self._new("of", lambda form: (x, x.numel()))

    def identity(self, like: Any) -> CudaState:
        return self._new("identity", lambda form: ())

    def merge(self, a: CudaState, b: CudaState) -> CudaState:
        return self._new("merge", lambda form: (a[form], b[form], 1))

    def merge_all(self, states: Sequence[CudaState]) -> CudaState:
        import torch

        together = [torch.cat(parts) for parts in zip(*states, strict=True)]
        return self._new("merge_all", lambda form: (together[form], len(states)))

    def parts(self, state: CudaState) -> tuple[float, float]:
        m, l, _ = self._parts(state, 1)
        return m, l

    def logsumexp(self, state: CudaState) -> float:
        return self._parts(state, 1)[2]

    def softmax(self, state: CudaState, x: Any) -> Float64:
        return self._finish(state, 0, x)

    def log_softmax(self, state: CudaState, x: Any) -> Float64:
        return self._finish(state, 1, x)

    def _finish(self, state: CudaState, form: int, x: Any) -> Float64:
        import torch

        y = torch.full_like(x, 12345.0, dtype=getattr(torch, self.out))
        self._launch(form, "finish", state[form], x, x.numel(), y)
        return self.numpy(y)

    def _parts(self, state: CudaState, form: int) -> tuple[float, float, float]:
        """M, l and what the kernel calls their logsumexp."""
        import torch

        found = torch.full((3,), torch.nan, dtype=torch.float64, device=self.device)
        self._launch(form, "parts", state[form], found)
        m, l, lse = found.tolist()
        return m, l, lse

    def _new(self, kernel: str, arguments: Any) -> CudaState:
        """What a kernel makes in each form, in poisoned bytes; its arguments come from the index of the form."""
        import torch

        size = state_bytes(self.dtype, self.out)
        first, second = (torch.full((size,), 255, dtype=torch.uint8, device=self.device) for _ in FORMS)
        self._launch(0, kernel, *arguments(0), first)
        self._launch(1, kernel, *arguments(1), second)
        return first, second

    def _launch(self, form: int, name: str, *values: Any) -> None:
        import torch

        numbers = [value if isinstance(value, int) else value.data_ptr() for value in values]
        fields = (ctypes.c_uint64 * len(numbers))(*numbers)
        parameters = (ctypes.c_void_p * len(numbers))(
            *(ctypes.addressof(fields) + 8 * i for i in range(len(numbers)))
        )  # fmt: skip
        config = driver.launch_config(1, 1, 32, 0, 1, False)
        config.stream = torch.cuda.current_stream().cuda_stream
        kernel = _kernel(FORMS[form], self.dtype, self.out, name)
        status = driver.library().cuLaunchKernelEx(ctypes.byref(config), ctypes.c_void_p(kernel), parameters, None)
        driver.check(status, f"launching algebra_{name}")


class FoldedAlgebra(CudaAlgebra):
    """The same, with (m, l) and the logsumexp of a softmax of 16 bits, whose l is relative to 2^(m · log2(e)), rounded.

    States of one m have the same base, and so the laws compare their l as it is.
    """

    def __init__(self, dtype: str, out: str) -> None:
        super().__init__(dtype, out)
        self.name += ", folded"

    def parts(self, state: CudaState) -> tuple[float, float]:
        m, l, _ = self._parts(state, 0)
        return m, l

    def logsumexp(self, state: CudaState) -> float:
        m, l = self.parts(state)
        if math.isnan(l) or l in (0, math.inf):
            return math.nan if math.isnan(l) else math.inf if l else -math.inf
        log2e = np.float32(1.4426950216293335)
        return (float(np.float32(m) * log2e) + math.log2(l)) / float(log2e)


ALGEBRAS = [CudaAlgebra(*pair) for pair in PAIRS]
# Folding is arithmetic in float32.
ALGEBRAS += [FoldedAlgebra(x, y) for x, y in PAIRS if x != "float64" and y in ("float16", "bfloat16")]
