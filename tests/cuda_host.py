"""CUDA strategies on the host: the real kernels, compiled by g++, with the arithmetic replaced by bookkeeping.

The files that decide which elements a block owns are compiled as they are: the generated Params, FILES and the
strategy.  The replacements below stand for the other files.  Element i of x has the code i + 1, so the place of
`summands` counts how often each element is reduced, `store` how often each is written, and a kernel that is right
copies x to y.  The threads of a launch run one after another; no state is exchanged.
"""

from __future__ import annotations

import ctypes
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_machine import NUMBERS as STANDARD
from cuda_machine import compiled
from onlinesoftmax.core.task import ITEMSIZE
from onlinesoftmax.kernels.cuda import params, source
from onlinesoftmax.kernels.request import Request

COMPILER = shutil.which("g++") or shutil.which("clang++")

FILES = ("loss_mail", "operands", "slice")
"""Files that are compiled as they are, besides the strategy."""

NUMBERS = """
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)
using int64 = long long;
using uint64 = unsigned long long;
struct Dim { unsigned x, y, z; };
static Dim threadIdx, blockIdx, gridDim;
static void __syncthreads() {}
struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using DoubleDouble = double;
#define INF (1.0 / 0.0)

// Bookkeeping: how often each element was reduced and written, and how often an access was misaligned or outside.
static unsigned char *reduced, *written;
static const char *x_begin, *x_end, *y_begin, *y_end;
static int64 elements, misaligned, outside;

template <class T> double wide(T x) { return x; }
inline double wide(float16 x) { return x.bits; }
inline double wide(bfloat16 x) { return x.bits; }
template <class T> void narrow(T& y, double x) { y = T(x); }
inline void narrow(float16& y, double x) { y.bits = (unsigned short)(x); }
inline void narrow(bfloat16& y, double x) { y.bits = (unsigned short)(x); }
template <class T> void clear(T& x, bool) { narrow(x, 0); }
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Chunk { T at[N]; };
template <class T, int N> double wide(const Chunk<T, N>& from, int i) { return wide(from.at[i]); }
template <class T, int N> double wide_again(const Chunk<T, N>& from, int i) { return wide(from.at[i]); }
template <class T> unsigned max_pair(unsigned a, unsigned) { return a; }
template <class T> float max_half(unsigned) { return 0; }
template <class T, int N, class A> Chunk<T, N> narrow(const A (&from)[N]) {
    Chunk<T, N> to;
    for (int i = 0; i < N; ++i) narrow(to.at[i], from[i]);
    return to;
}
enum class CachePolicy { NORMAL, LONG, SHORT };
template <int WIDTH, class T> bool allowed(const T* at, const char* begin, const char* end) {
    const char* const first = reinterpret_cast<const char*>(at);
    misaligned += reinterpret_cast<uint64>(first) % (WIDTH * sizeof(T)) != 0;
    const bool inside = first >= begin && first + WIDTH * sizeof(T) <= end;
    outside += !inside;
    return inside;
}
template <int WIDTH, CachePolicy POLICY, class T, int N> void load(Chunk<T, N>& to, const T* from, int64 step) {
    constexpr int W = WIDTH < N ? WIDTH : N;
    for (int i = 0; i < N; i += W) {
        const T* const at = from + (W == 1 ? i * step : i);
        if (allowed<W>(at, x_begin, x_end)) memcpy(&to.at[i], at, W * sizeof(T));
        else memset(&to.at[i], 0, W * sizeof(T));
    }
}
template <int WIDTH, CachePolicy POLICY, class T, int N> void store(T* to, const Chunk<T, N>& from, int64 step) {
    constexpr int W = WIDTH < N ? WIDTH : N;
    for (int i = 0; i < N; i += W) {
        T* const at = to + (W == 1 ? i * step : i);
        if (!allowed<W>(at, y_begin, y_end)) continue;
        memcpy(at, &from.at[i], W * sizeof(T));
        for (int j = 0; j < W; ++j) ++written[at + j - reinterpret_cast<const T*>(y_begin)];
    }
}
template <class T> T load_one(const T* from) { return *from; }
inline void copy_async(void* to, const void* from) {
    if (allowed<16>(static_cast<const char*>(from), x_begin, x_end)) memcpy(to, from, 16);
    else memset(to, 0, 16);
}
inline void commit() {}
inline void let_next_kernel_begin() {}
inline void wait_for_kernel_before() {}
inline void wait_groups(int) {}
"""

STATE = """
constexpr bool USES_MAXIMUM = false;
template <class T> struct Sums { T of[SUMS]; };
template <class T, class U> Sums<T>& operator+=(Sums<T>& a, const Sums<U>&) { return a; }
struct State { ACC m; Sums<SUM> sums; };
inline State identity() { return {}; }
template <class T> struct PlainOf { using type = T; };
struct Shift { ACC m, amount; };
inline Shift shift(ACC) { return {}; }
"""

MAIL = """
constexpr uint64 EMPTY = ~uint64(0);
template <int SIZE> struct WordOf { using type = uint64; };
inline uint64 bits(double) { return 0; }
template <class T> void from_bits(uint64, T&) {}
template <class T> T look_word(const T*) { return 0; }
inline void put_word(uint64*, uint64) {}
"""

TOTAL = """
namespace scalar_loss {
inline bool only_counts(const Params&) { return false; }
inline unsigned block_of_rows(const Params&) { return blockIdx.x; }
inline void count_in_teams(const Params&) {}
template <int OWNED> void add_losses(const Params&, int64) {}
inline void add_losses_of_team(const Params&) {}
}  // namespace scalar_loss
"""

OPS = """
namespace ops {
using Summand = SUM;
using LaneSum = SUM;
constexpr bool READS_WEIGHTS = false;
struct RowConstants { bool zero; ACC target_gradient; };
using WeightedScore = SUM;
inline WeightedScore weighted_score(ACC, ACC) { return 0; }
inline ACC peak(ACC a) { return a; }
inline ACC term(ACC a, Shift) { return a; }
template <bool CLAMP> Sums<Summand> summands(ACC a, ACC, ACC, Shift) {
    if (a > 0 && a <= elements) ++reduced[int64(a) - 1];
    return {};
}
inline RowConstants row_constants(const Params&, const Row&, const RowOperands&, CallConstants, State) { return {}; }
inline ACC output_of_term(ACC e, ACC, RowConstants) { return e; }
inline ACC output(ACC a, ACC, RowConstants) { return a; }
inline RowConstants relative(RowConstants r, ACC, ACC) { return r; }
inline void write_rows(const Params& p, const Row&, int64 row, const RowOperands&, CallConstants, State) {
    p.lse[row_offset(p, p.lse_place, row)] += 1;
}
}  // namespace ops
"""

EXCHANGE = """
template <int WARPS> State merge_warps(State a, State*) { return a; }
template <int WIDTH> State merge_lanes(State a) { return a; }
template <class S> State extend(State a, S& slice) { slice.sum(0); return a; }
template <int LANES, class S> State reduce(S& slice, State*) { slice.sum(0); return {}; }
inline void expect_states(uint64*) {}
inline void announce_beginning() {}
inline void wait_for_beginnings() {}
inline void send(State*, State, uint64*, int) {}
inline void wait_for_states(uint64*) {}
struct Launch {};
inline Launch this_launch(const Params&, int) { return {}; }
template <int LANES>
State complete_row(
    const Params&, Launch, const Row&, RowOperands&, CallConstants, State state, int64, int, bool = true) {
    return state;
}
inline void prefetch_mailboxes(const Params&, Launch, int64, int) {}
struct Team {
    int size, rank;
    Team() : size(gridDim.y), rank(blockIdx.y) {}
};
struct Mailboxes {
    Mailboxes(const Params&, const Team&) {}
    State merge(State a, unsigned, State*) const { return a; }
    void clear(unsigned) const {}
};
"""

DRIVER = """
Chunk<X, VECTOR> memory[1 << 16];
extern "C" void run(const Params* p, const unsigned* grid, unsigned char* of_reduced, unsigned char* of_written,
                    int64 count, int64* errors) {
    reduced = of_reduced, written = of_written, elements = count, misaligned = outside = 0;
    x_begin = reinterpret_cast<const char*>(p->x), x_end = x_begin + count * sizeof(X);
    y_begin = reinterpret_cast<const char*>(p->y), y_end = y_begin + count * sizeof(Y);
    gridDim = {grid[0], grid[1], 1};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (threadIdx.x = 0; threadIdx.x < unsigned(THREADS); ++threadIdx.x) KERNEL(*p);
    errors[0] = misaligned, errors[1] = outside;
}
"""


def host_source(request: Request) -> str:
    """The kernel of a request as C++ for the host."""
    real = {name: _without_asm(source.text(f"{name}.cuh")) for name in (*FILES, request.plan.strategy)}
    numbers = STANDARD + NUMBERS
    mail = MAIL + real["loss_mail"]
    parts = [numbers, source.prologue(request), STATE, mail, real["operands"], OPS, real["slice"], EXCHANGE, TOTAL]
    return "\n".join([*parts, real[request.plan.strategy], DRIVER.replace("KERNEL", source.kernel_name(request))])


def _without_asm(text: str) -> str:
    """A file without inline assembly; the real files here only pin addresses with it."""
    return re.sub(r"asm volatile\([^;]*\);", ";", text)


@cache
def _library(text: str, folder: Path) -> Any:
    assert COMPILER is not None
    command = (COMPILER, "-std=c++17", "-w", "-O0", "-shared", "-fPIC", "-x", "c++", "-")
    return ctypes.CDLL(str(compiled(command, text, folder)))


def check_ownership(request: Request, folder: Path) -> None:
    """Run a request's kernel on the host; every element is reduced once, written once, and no other is touched.

    x has `rows` rows whose strides are those of the request; it begins on 128 bytes.
    """
    layout, plan = request.layout, request.plan
    # A single row has no stride.
    rows_apart = layout.x.strides[0] or layout.cols
    count = rows_apart * (layout.rows - 1) + layout.cols
    codes = {2: np.uint16, 4: np.float32, 8: np.float64}[ITEMSIZE[request.dtypes["x"]]]
    assert count < np.iinfo(np.uint16).max or codes is not np.uint16, "an element's code has 16 bits"
    x, y = _aligned(count, codes), _aligned(count, codes)
    x[:], y[:] = np.arange(1, count + 1), 0
    owned = np.zeros(rows_apart * layout.rows, bool)
    owned.reshape(layout.rows, rows_apart)[:, : layout.cols] = True
    owned = owned[:count]
    reduced, written = np.zeros(count, np.uint8), np.zeros(count, np.uint8)
    per_row = np.zeros(layout.rows, request.dtypes["lse"])

    places = {name: (side.strides, side.col) for name, side in layout.sides.items()}
    packed = bytearray(params.pack(source.sizes_of(request), layout.sizes, places))
    fields = np.frombuffer(packed, np.uint64)
    for name, array in {"x": x, "y": y, "lse": per_row}.items():
        fields[params.FIELD_OF_POINTER[name]] = array.ctypes.data
    team = plan.splits if plan.strategy == "grid" else 1
    grid, errors = np.array([plan.programs // team, team], np.uint32), np.zeros(2, np.int64)
    arrays = (fields, grid, reduced, written)
    _library(host_source(request), folder).run(
        *(ctypes.c_void_p(array.ctypes.data) for array in arrays), ctypes.c_longlong(count),
        ctypes.c_void_p(errors.ctypes.data),
    )  # fmt: skip
    assert errors.tolist() == [0, 0], "misaligned accesses and accesses outside the tensors"
    assert (reduced == owned).all(), f"reduced other than once: {np.flatnonzero(reduced != owned)[:10]}"
    assert (written == owned).all(), f"written other than once: {np.flatnonzero(written != owned)[:10]}"
    assert (y == np.where(owned, x, 0)).all(), "elements are written to where they were read"
    assert (per_row == 1).all(), "each row has its per-row output written once"


def _aligned(count: int, dtype: Any) -> NDArray[Any]:
    """An array whose first element lies on 128 bytes."""
    raw = np.zeros(count * np.dtype(dtype).itemsize + 128, np.uint8)
    begin = -raw.ctypes.data % 128
    return raw[begin : begin + count * np.dtype(dtype).itemsize].view(dtype)
