"""The algebra of kernels/cuda/numeric/state.cuh: each function in a kernel of one warp, for tests/laws.py.

Compiling needs no GPU; running does, and only then is torch imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from laws import Float64
from onlinesoftmax.core.device import known
from onlinesoftmax.core.problem import Problem
from onlinesoftmax.core.task import task_of
from onlinesoftmax.core.view import View, contiguous_view, row_view
from onlinesoftmax.kernels.cuda import compile, driver, source
from onlinesoftmax.kernels.cuda.strategy.row import proposals
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.ops import OPERATIONS
from onlinesoftmax.planner.plan import priced


class Form(NamedTuple):
    """An operation and the outputs it is asked for; both decide what a state keeps."""

    operation: str
    outputs: tuple[str, ...]


FORMS = (Form("softmax", ("y",)), Form("log_softmax", ("y",)), Form("log_softmax", ("y", "entropy")))
"""A state that is FOLDED where outputs have 16 bits, one that never is, and one that also keeps zl and the argmax."""

FOLDED, PLAIN, WEIGHTED = range(len(FORMS))
"""Their indices."""

CudaState = tuple[Any, ...]
"""The state of one slice in each of FORMS: its bytes, in a torch tensor."""

KERNELS = """
#line 1 "cuda_algebra"
// The index of the largest element; -1 in an empty slice.
__device__ inline double index_of(Argmax a) { return a.key ? a.index : -1; }
__device__ inline double index_of(Nothing) { return -1; }
extern "C" __global__ void algebra_of(const X* x, int64 first, int64 n, State* to) {
    ACC m = -INF;
    for (int64 i = threadIdx.x; i < n; i += 32) m = fmax(m, ACC(wide(x[i])));
    const Shift s = shift(m);
    Sums<SUM> sums{};
    for (int64 i = threadIdx.x; i < n; i += 32)
        sums += ops::summands<true>(wide(x[i]), 0, ops::term(wide(x[i]), s), s);
    More more{};
    for (int64 i = threadIdx.x; i < n; i += 32) more = merge(more, More::of_element(wide(x[i]), first + i));
    const State a = merge_lanes<32>(State{m, sums}.with(more));
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
extern "C" __global__ void algebra_output(const State* from, const X* x, int64 n, Y* y) {
    const ops::RowConstants r = ops::softmax_constants(*from, n);
    for (int64 i = threadIdx.x; i < n; i += 32) narrow(y[i], ops::output(wide(x[i]), 0, r));
}
extern "C" __global__ void algebra_parts(const State* from, double* to) {
    if (threadIdx.x) return;
    to[0] = from->m;
    to[1] = FOLDED ? double(ops::row_output<RowOutput::L>(*from)) : double(from->first());
    to[2] = ops::row_output<RowOutput::LSE>(*from);
    // The kernel keeps zl - m * l.
    to[3] = double(from->sums.of[SUM_ZL > 0 ? SUM_ZL : 0]) + double(from->first()) * finite(from->m);
    to[4] = index_of(from->more());
}
"""

PAIRS = (
    ("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "float32"), ("float64", "float64"),
    ("float32", "bfloat16"), ("float64", "float16"),
)  # fmt: skip
"""Dtypes of input and output: float32 and float64 states, EXACT and not."""


@cache
def algebra_source(form: Form, dtype: str, out: str) -> str:
    """The kernels above behind everything that a form with these dtypes is compiled from."""
    operation, shape, device = OPERATIONS[form.operation], (64, 1000), known("h200")
    tensors: dict[str, View] = {"x": contiguous_view(shape, dtype), "y": contiguous_view(shape, out)}
    wide = "float64" if "float64" in (dtype, out) else "float32"
    tensors |= {name: row_view(shape, 1, wide) for name in form.outputs[1:]}
    problem = Problem.of(task := task_of(operation, form.outputs, shape, 1, tensors))
    blocks = proposals.row(problem, device)
    assert not isinstance(blocks, str), blocks
    check = f"static_assert(sizeof(State) == {state_bytes(form, dtype, out)});\n"
    text = source.source(Request(task, priced(blocks[0], problem, device)))
    if form is FORMS[WEIGHTED]:
        # No operation that these kernels can compute asks for it.
        text = text.replace("constexpr bool KEEPS_ARGMAX = false;", "constexpr bool KEEPS_ARGMAX = true;")
    return text + KERNELS + check


def state_bytes(form: Form, dtype: str, out: str) -> int:
    """Bytes of a State: m, for each sum a float32, a float64 or two float64, and 16 bytes of the argmax."""
    sums = 2 if "entropy" in form.outputs else 1
    argmax = 16 * (form is FORMS[WEIGHTED])
    if "float64" in (dtype, out):
        return 8 + 16 * sums + argmax
    # A per-row output of 32 bits makes a state EXACT, as an output element of 32 bits does.
    return (8 + 8 * sums if out == "float32" or len(form.outputs) > 1 else 4 + 4 * sums) + argmax


@cache
def _kernel(form: Form, dtype: str, out: str, name: str) -> int:
    import torch

    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    return driver.load_kernel(compile.cubin(algebra_source(form, dtype, out), arch), f"algebra_{name}")


class CudaAlgebra:
    """Slices are 1-d tensors of `dtype` whose elements `out` holds exactly; observables come from states of one form.

    The laws compare l of a FOLDED state after its folding error is taken out, as `row_output` does.
    """

    examples = 25
    accumulators: Sequence[str] = ("weighted", "largest")
    device = "cuda"

    def __init__(self, dtype: str, out: str, form: int = PLAIN) -> None:
        self.name = f"cuda, {dtype} to {out}{', folded' if form == FOLDED else ''}"
        self.dtypes: Sequence[str] = (out,)
        self.dtype, self.out, self.form = dtype, out, form

    def array(self, values: Float64, dtype: str) -> Any:
        import torch

        return torch.from_numpy(values).to(self.device, getattr(torch, dtype)).to(getattr(torch, self.dtype))

    def numpy(self, x: Any) -> Float64:
        return np.asarray(x.double().cpu())

    def of(self, x: Any, first: int = 0) -> CudaState:
        return self._new("of", lambda form: (x, first, x.numel()))

    def identity(self, like: Any) -> CudaState:
        return self._new("identity", lambda form: ())

    def merge(self, a: CudaState, b: CudaState) -> CudaState:
        return self._new("merge", lambda form: (a[form], b[form], 1))

    def merge_all(self, states: Sequence[CudaState]) -> CudaState:
        import torch

        together = [torch.cat(parts) for parts in zip(*states, strict=True)]
        return self._new("merge_all", lambda form: (together[form], len(states)))

    def parts(self, state: CudaState) -> tuple[float, float]:
        m, l, *_ = self._parts(state, self.form)
        return m, l

    def accumulated(self, state: CudaState, name: str) -> float:
        return self._parts(state, WEIGHTED)[3 if name == "weighted" else 4]

    def logsumexp(self, state: CudaState) -> float:
        return self._parts(state, self.form)[2]

    def softmax(self, state: CudaState, x: Any) -> Float64:
        return self._output(state, FOLDED, x)

    def log_softmax(self, state: CudaState, x: Any) -> Float64:
        return self._output(state, PLAIN, x)

    def _output(self, state: CudaState, form: int, x: Any) -> Float64:
        import torch

        y = torch.full_like(x, 12345.0, dtype=getattr(torch, self.out))
        self._launch(form, "output", state[form], x, x.numel(), y)
        return self.numpy(y)

    def _parts(self, state: CudaState, form: int) -> list[float]:
        """[m, l, lse, zl, argmax], as the kernel computes them; the last two only of the form that keeps them."""
        import torch

        found = torch.full((5,), torch.nan, dtype=torch.float64, device=self.device)
        self._launch(form, "parts", state[form], found)
        parts: list[float] = found.tolist()
        return parts

    def _new(self, kernel: str, arguments: Any) -> CudaState:
        """The states that a kernel computes in each form, in poisoned bytes; `arguments(form)` are its arguments."""
        import torch

        states = []
        for i, form in enumerate(FORMS):
            size = state_bytes(form, self.dtype, self.out)
            states.append(torch.full((size,), 255, dtype=torch.uint8, device=self.device))
            self._launch(i, kernel, *arguments(i), states[-1])
        return tuple(states)

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


ALGEBRAS = [CudaAlgebra(*pair) for pair in PAIRS]
# Folding is arithmetic in float32.
ALGEBRAS += [CudaAlgebra(x, y, FOLDED) for x, y in PAIRS if x != "float64" and y in ("float16", "bfloat16")]
