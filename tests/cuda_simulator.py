"""CUDA kernels on the host with their arithmetic: every file of a kernel, compiled by g++, on simulated threads.

tests/cuda_machine.py has the threads, which wait for others at __syncthreads, at a shuffle, or for a message of another
block.  The blocks of a cluster, and all blocks of strategy `grid`, run at the same time; other blocks run one after
another.  Functions with inline assembly are replaced; everything else is compiled as it is.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_clusters import CLUSTERS, SEEN
from cuda_machine import BUILT_IN, DECLARATIONS, NUMBERS, load_kernel
from onlinesoftmax.kernels.cuda import merge, messages, params, reduction, source
from onlinesoftmax.kernels.cuda.arguments import OwnKernel
from onlinesoftmax.kernels.reduction import Reduction
from onlinesoftmax.kernels.request import Request
from onlinesoftmax.kernels.sharded import TENSORS, ShardedRows

REPLACED = {
    "numbers": {
        "inline float wide(float16 x)": "{ return bits_as<_Float16>(x.bits); }",
        "inline unsigned narrow_pair(float low, float high, float16)": (
            "{ return bits_as<unsigned short>(_Float16(low)) | bits_as<unsigned short>(_Float16(high)) << 16; }"
        ),
        "inline unsigned narrow_pair(float low, float high, bfloat16)": """{
            const auto half = [](float x) {
                const unsigned i = bits_as<unsigned>(x);
                return x != x ? 0x7fffu : (i + 0x7fff + (i >> 16 & 1)) >> 16;
            };
            return half(low) | half(high) << 16;
        }""",
        "inline unsigned max_pair<float16>(unsigned a, unsigned b)": "{ return max_halves<float16>(a, b); }",
        "inline unsigned max_pair<bfloat16>(unsigned a, unsigned b)": "{ return max_halves<bfloat16>(a, b); }",
        "inline uint64 policy_word()": "{ return 0; }",
        "inline W load_word(const W* from)": "{ return *counted(from); }",
        "inline uint2 load_word(const uint2* from)": "{ return *counted(from); }",
        "inline T load_one(const T* from)": "{ return *counted(from); }",
        "inline void store_word(W* to, W w)": "{ *counted(to) = w; }",
        "inline void let_next_kernel_begin()": "{}",
        "inline void wait_for_kernel_before()": "{}",
        "inline void copy_async(void* to, const void* from)": (
            "{ memcpy(to, counted(static_cast<const uint4*>(from)), 16); }"
        ),
        "inline void commit()": "{}",
        "inline void wait_groups(int pending)": "{}",
    },
    "channel": {
        "inline void put_word(uint64* to, uint64 word)": "{ __atomic_store_n(to, word, __ATOMIC_RELAXED); }",
        "inline void put_word(unsigned* to, unsigned word)": "{ __atomic_store_n(to, word, __ATOMIC_RELAXED); }",
        # A reader, which may wait for a word, lets the other threads and blocks run.
        "inline uint64 look_word(const uint64* from)": "{ return look(from); }",
        "inline unsigned look_word(const unsigned* from)": "{ return look(from); }",
        "inline void add_to_word(uint64* to, uint64 x)": "{ __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }",
        "inline uint64 add_and_look(uint64* to, uint64 x)": ("{ return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }"),
        "inline void prefetch(const void* at)": "{}",
        "inline void put_packet(void* to, uint64 low, uint64 high)": (
            "{ const uint64 all[] = {low, high}; lock_packets(); memcpy(to, all, 16); unlock_packets(); }"
        ),
        "inline void look_packet(const void* from, uint64& low, uint64& high)": """{
            uint64 all[2];
            yield(), lock_packets(), memcpy(all, from, 16), unlock_packets();
            low = all[0], high = all[1];
        }""",
    },
    "state": {
        "inline float exp2_approx(float x)": (
            "{ const float y = exp2f(x); return fabsf(y) < 1.17549435e-38f ? 0 : y; }"
        ),
        "inline float clamp(float t)": "{ return t < -128 ? -128 : t > 128 ? 128 : t; }",
    },
    "formulas": {"inline float reciprocal(float l)": "{ return 1 / l; }"},
    # A barrier counts its phases, below the arrivals that are missing and those of a phase.  A copy ends at once.
    "barrier": {
        "inline unsigned shared_address(const void* at)": "{ return 0; }",
        "inline void prepare_barrier(uint64* barrier, unsigned arrivals)": (
            "{ *barrier = uint64(arrivals) << 48 | uint64(arrivals) << 32; }"
        ),
        "inline void arrive(uint64* barrier)": """{
            const uint64 now = __atomic_sub_fetch(barrier, uint64(1) << 32, __ATOMIC_SEQ_CST);
            if (!(now >> 32 & 0xffff)) __atomic_fetch_add(barrier, 1 + (now >> 48 << 32), __ATOMIC_SEQ_CST);
        }""",
        "inline void arrive_and_expect(uint64* barrier, unsigned bytes)": "{ arrive(barrier); }",
        "inline void wait_for_phase(uint64* barrier, unsigned phase)": (
            "{ while (__atomic_load_n(barrier, __ATOMIC_SEQ_CST) % 2 == phase) yield(); }"
        ),
        "inline bool has_ended(uint64* barrier, unsigned phase)": (
            "{ return yield(), __atomic_load_n(barrier, __ATOMIC_SEQ_CST) % 2 != phase; }"
        ),
        "inline void copy_bulk(void* to, const void* from, unsigned bytes, uint64* barrier)": (
            # The thread has arrived before its copy, which the phase must wait for.
            "{ memcpy(to, counted(static_cast<const uint4*>(from)), bytes); release(barrier); }"
        ),
        "inline void fence_for_bulk_copies()": "{}",
    },
    "noise": {
        "inline void multiply(unsigned& low, unsigned& high, unsigned a, unsigned b)": (
            "{ const uint64 both = uint64(a) * b; low = unsigned(both), high = unsigned(both >> 32); }"
        ),
        "inline float log_of_two(float y)": "{ return logf(y) * 1.44269504f; }",
        "inline float reciprocal(float y)": "{ return 1 / y; }",
        "inline uint64 look_shared(const uint64* from)": "{ return look(from); }",
        "inline unsigned look_shared(const unsigned* from)": "{ return look(from); }",
    },
    "weights": {
        "inline float log_of_two(float y)": "{ return logf(y) * 1.44269504f; }",
        # The result is wrong by one unit in the last place.
        "inline float rough_reciprocal(float x)": "{ return __uint_as_float(__float_as_uint(1 / x) ^ (1 / x > 0)); }",
    },
    "lanes": {"inline unsigned first_of_addresses()": "{ return first_expert(); }"},
    "keys": {
        "inline float smallest_or_nan(float x, float y)": "{ return x != x || y != y ? x + y : x < y ? x : y; }",
        "inline unsigned word_of_choice(float x)": "{ return x == x ? word_of(x) : ~0u; }",
    },
    "threshold": {
        "inline unsigned add_above(unsigned rank, unsigned a, unsigned own)": "{ return rank + (a > own); }",
        "inline float larger_or_smaller(float a, float b, int smaller)": (
            "{ return smaller ? fmin(a, b) : fmax(a, b); }"
        ),
        "inline unsigned shift_in_below(unsigned mask, float x, float t)": "{ return mask << 1 | (x < t); }",
    },
    "scores": {
        "inline float power_of_two(float y)": "{ const float z = exp2f(y); return z < 1.18e-38f ? 0 : z; }",
        "inline float largest_or_nan(float x, float y)": "{ return x != x || y != y ? x + y : x < y ? y : x; }",
    },
    "exchange": {"inline void prefetch(const void* at)": "{}"},
    "lists": {"inline unsigned count_up(unsigned* word)": "{ return atomicAdd(word, 1u); }"},
    "by_mass": {
        "inline void count_above(unsigned& number, unsigned& listed, float x, Window window, unsigned bit)": (
            "{ if (x >= window.high) ++number; else if (x >= window.low) listed |= bit; }"
        ),
    },
    "masses": {
        "inline float plus_whole(float x, float rate)": (
            "{ const float y = fma(x, rate, WHOLE); return fma(x, rate, WHOLE - y) < 0 ? y - 1 : y; }"
        ),
        "inline uint64 shifted(unsigned x, unsigned bits)": "{ return bits < 64 ? (uint64(x) << 32) >> bits : 0; }",
    },
    "processes": {
        "inline uint64 now()": "{ return 0; }",
        "void fail()": "{ abort(); }",
    },
    "block_reduce": {
        "inline float warp_max(float m)": (
            "{ for (int step = 16; step; step /= 2) m = fmaxf(m, across(m, step)); return m; }"
        ),
    },
}
"""Functions with inline assembly, by file: the text before the body, and the body that replaces it."""

MAX_HALVES = """
template <class T> unsigned max_halves(unsigned a, unsigned b) {
    unsigned y = 0;
    for (int i = 0; i < 2; ++i) {
        const T x{(unsigned short)(a >> 16 * i)}, z{(unsigned short)(b >> 16 * i)};
        y |= unsigned(fmaxf(wide(x), wide(z)) == wide(x) ? x.bits : z.bits) << 16 * i;
    }
    return y;
}
"""

LOOK = """
// Accesses to tensors at addresses that are no multiple of their size, which are an error on a GPU.
extern "C" long misaligned = 0;
template <class Word> Word* counted(Word* at) {
    if (reinterpret_cast<unsigned long>(at) % sizeof(Word)) __atomic_fetch_add(&misaligned, 1, __ATOMIC_RELAXED);
    return at;
}
// An access to a packet is one instruction on a GPU.
static char packet_lock;
inline void lock_packets() { while (__atomic_test_and_set(&packet_lock, __ATOMIC_ACQUIRE)) {} }
inline void unlock_packets() { __atomic_clear(&packet_lock, __ATOMIC_RELEASE); }
template <class Word> Word look(const Word* from) {
    const Word word = __atomic_load_n(from, __ATOMIC_RELAXED);
    yield();
    return word;
}
"""

SHARED_ARRAY = re.compile(r"__shared__ (\w+) (\w+)(\[[^;]*\]);")
SHARED_MEMORY = (
    r"using \2_type = \1\3; alignas(16) __shared__ char \2_memory[sizeof(\2_type)]; "
    r"\2_type& \2 = reinterpret_cast<\2_type&>(\2_memory);"
)
"""A shared array, and bytes in its place: g++ would note in a variable that it has called the constructors."""

DRIVER = """
static const PARAMETER* parameters;
static void of_thread() { KERNEL(*parameters); }
// The first access of a thread of the host makes the memory of its thread-local variables.
static thread_local char any;
static void begin() { any = 1; }
static void between() { BETWEEN }
extern "C" void run(const PARAMETER* p, unsigned programs, unsigned team, unsigned together) {
    parameters = p;
    run_blocks(of_thread, begin, between, THREADS, programs, team, together);
}
"""

BETWEEN = {"cluster": "for (auto& beginning : beginnings) beginning = nullptr;"}


def simulated_source(request: Request) -> str:
    """The kernel of a request as C++ for the host."""
    strategy = request.plan.strategy
    parts = [source.prologue(request), *(_replaced(*file) for file in source.files_of(request))]
    shared = r"extern __shared__ (__align__\(LINE\) )?Chunk<X, VECTOR> memory\[\];"
    parts[-1] = re.sub(shared, "__shared__ Chunk<X, VECTOR> memory[1 << 14];", parts[-1])
    return _program(parts, "Params", source.kernel_name(request), BETWEEN.get(strategy, ""))


def _program(parts: list[str], parameter: str, kernel: str, between: str = "") -> str:
    """A kernel of these parts as C++ for the host.

    Args:
        parts: The files of the kernel, after `numbers`.
        parameter: Type of the kernel's parameter.
        kernel: Name of the kernel.
        between: Statements that run between blocks that do not run together.
    """
    numbers = _replaced("numeric/numbers").replace("// max_pair:", MAX_HALVES + "// max_pair:", 1)
    driver = DRIVER.replace("PARAMETER", parameter).replace("KERNEL", kernel)
    driver = driver.replace("BETWEEN", between)
    text = "\n".join([LOOK, SEEN, numbers, *parts, driver])
    return "\n".join([DECLARATIONS, NUMBERS, BUILT_IN, SHARED_ARRAY.sub(SHARED_MEMORY, text)])


@cache
def _replaced(name: str, package: str = source.__package__) -> str:
    """A file with the functions of REPLACED; no inline assembly may be left but what pins addresses."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    text = source.text(f"{name}.cuh", package)
    for before, body in REPLACED.get(name.rpartition("/")[2], {}).items():
        begin = text.index(before) + len(before)
        # A body ends on its line, or with the next brace at the beginning of a line.
        line = text.index("\n", begin)
        end = line if text[begin:line].rstrip().endswith("}") else text.index("\n}", begin) + 2
        text = f"{text[:begin]} {body}{text[end:]}"
    text = re.sub(r'asm volatile\("" : "\+[lr]"\([\w.]+\)\);', ";", text)
    assert not re.search(r"\basm\b", text), f"{name}.cuh has inline assembly that REPLACED does not know"
    return text


def simulate(
    request: Request, arrays: Mapping[str, NDArray[Any]], numbers: Mapping[str, float], folder: Path, *,
    at_once: bool = False, shard_mail: Sequence[NDArray[Any]] = (), number: int = 0,
) -> None:  # fmt: skip
    """Run a request's kernel on the host.

    Args:
        request: The request.
        arrays: Memory of every tensor of the request by name, operands and outputs, and "rest" where it has one;
            bfloat16 as uint16.
        numbers: Every number of the request, by name.
        folder: Where to put the shared libraries.
        at_once: True to run all blocks of `row` and `looped` at the same time.
        shard_mail: The mailboxes of each process that has a part of the rows, and its numbers of launches behind them;
            the kernels of all processes must run at the same time.
        number: The number of this launch among those that the host makes; 0 as in a CUDA graph.
    """
    task, plan = request.task, request.plan
    assert arrays.keys() == {*request.task.dtypes, *([params.REST] if request.rest else [])}
    assert numbers.keys() == request.task.numbers
    packed = params.pack(source.sizes_of(request), task.sizes, source.places_of(request))
    fields = np.frombuffer(bytearray(packed), np.uint64)
    for name, array in arrays.items():
        fields[params.FIELD_OF_POINTER[name]] = array.ctypes.data
    for name, value in numbers.items():
        fields[params.FIELD[name]] = struct.unpack("Q", struct.pack("d", value))[0]
    for name, box in zip(params.SHARD_MAIL[: len(shard_mail)], shard_mail, strict=True):
        fields[params.FIELD_OF_POINTER[name]] = box.ctypes.data
    if shard_mail:
        fields[params.FIELD["number"]] = number
        fields[params.FIELD["set_words"]] = set_words_of(shard_mail[0])
    words = {params.MAIL: messages.team_mail_words(request), params.LOSS_MAIL: source.loss_mail_words(request)}
    mail = {name: np.full(count, -1, np.int64) for name, count in words.items()}
    for name, memory in mail.items():
        fields[params.FIELD_OF_POINTER[name]] = memory.ctypes.data
    team = plan.splits if plan.strategy == "grid" else 1
    blocks = source.blocks(request)
    together = {"grid": blocks, "cluster": plan.splits}.get(plan.strategy, blocks if at_once else 1)
    library = load_kernel(simulated_source(request), folder, task.part.process if task.part else 0)
    library.run(ctypes.c_void_p(fields.ctypes.data), blocks // team, team, together)
    assert all((memory == -1).all() for memory in mail.values()), "the kernel left a message behind"
    assert not ctypes.c_long.in_dll(library, "misaligned").value, "accesses at addresses that are not aligned"


def set_words_of(mail: NDArray[Any]) -> int:
    """64-bit words of each set of the mailboxes of a process."""
    return int(mail.size - messages.COPIES * messages.LINE_WORDS) // messages.SETS


def simulate_reduction(one: Reduction, arrays: Mapping[str, NDArray[Any]], mail: Any, folder: Path) -> None:
    """Run a reduction on the host; all its blocks run at the same time.

    Args:
        one: The reduction.
        arrays: Memory of its inputs and of "out" by name; bfloat16 as uint16.
        mail: Memory of MAIL_WORDS words, all EMPTY.
        folder: Where to put the shared libraries.
    """
    launch = reduction.launch_of(one)
    fields = np.frombuffer(bytearray(launch.values), np.uint64)
    for name, array in {**arrays, "mail": mail}.items():
        fields[reduction.POINTERS.index(name)] = array.ctypes.data
    launch_reduction(one, fields.ctypes.data, launch.blocks, folder)


def launch_reduction(one: Reduction, parameter: int, blocks: int, folder: Path) -> None:
    """Run the kernel of a reduction on the host with the parameter at an address."""
    parts = [reduction.prologue(one), *map(_replaced, ("row/warp_shuffle", "channel/channel", "small/reduction"))]
    text = _program(parts, "Reduction", reduction.NAME)
    load_kernel(text, folder).run(ctypes.c_void_p(parameter), blocks, 1, blocks)


def launch_multiply(dtypes: tuple[str, str, str], parameter: int, blocks: int, folder: Path) -> None:
    """Run the kernel of a product on the host with the parameter at an address; dtypes as for multiply.source."""
    # It imports torch, which takes long, most of all under ThreadSanitizer.
    from onlinesoftmax.kernels.cuda import multiply

    kernel = multiply.source(*dtypes).removeprefix(source.text("numeric/numbers.cuh"))
    load_kernel(_program([kernel], "Product", multiply.NAME), folder).run(ctypes.c_void_p(parameter), blocks, 1, 1)


def simulate_sharded(kernel: str, rows: ShardedRows, arrays: Mapping[str, NDArray[Any]], folder: Path) -> None:
    """Run the kernel "merge" or "incoming" of sharded rows on the host.

    Args:
        kernel: Name of the kernel.
        rows: The rows.
        arrays: Memory of the tensors of `rows.names`; bfloat16 as uint16.
        folder: Where to put the shared libraries.
    """
    fields = np.frombuffer(bytearray(merge.launch_of(kernel, rows).values), np.uint64)
    for name in rows.names:
        fields[TENSORS.index(name)] = arrays[name].ctypes.data
    launch_sharded(kernel, rows, fields.ctypes.data, folder)


def launch_sharded(kernel: str, rows: ShardedRows, parameter: int, folder: Path) -> None:
    """Run a kernel of sharded rows on the host with the parameter at an address."""
    parts = [merge.prologue(rows.kind), _replaced("numeric/state"), _replaced("small/merge")]
    text = _program(parts, "ShardedRows", f"{kernel}_kernel")
    load_kernel(text, folder).run(ctypes.c_void_p(parameter), merge.launch_of(kernel, rows).blocks, 1, 1)


SIZES = re.compile(r"\b(THREADS|FEW|CAPACITY|SPREAD|MOST_(?:ABOVE|BETWEEN|CANDIDATES|RIVALS|SORTED)) = (\d+)\b")
"""Threads of a block that samples, and lengths of its lists."""


def simulated_own_source(kernel: OwnKernel, shape: Any) -> str:
    """A kernel that an operation brings as C++ for the host; arguments as for `simulate_own`."""
    parts = [kernel.prologue(shape), *(_replaced(*file) for file in kernel.places)]
    parts[-1] = parts[-1].replace("extern __shared__", "__shared__").replace("memory[];", "memory[1 << 14];")
    between = BETWEEN["cluster"] if "beginnings" in "".join(parts) else ""
    parameter = parts[-1].rpartition("__grid_constant__ ")[2].split()[0]
    return _program(parts, parameter, kernel.name, between)


def simulate_own(
    kernel: OwnKernel, shape: Any, arrays: Mapping[str, Any], numbers: Sequence[int], clusters: int, folder: Path,
    divisor: int = 1,
) -> None:  # fmt: skip
    """Run a kernel that an operation brings on the host.

    Args:
        kernel, shape: The kernel, and what it is compiled for.
        arrays: Its tensors, or their addresses, by name; those that are not given may be None.
        numbers: Its numbers.
        clusters: Number of clusters.
        folder: Where to put the shared libraries.
        divisor: What all SIZES are divided by.
    """
    assert arrays.keys() <= {*kernel.pointers}
    pointers = [_address(arrays.get(name)) for name in kernel.pointers]
    fields = np.array([*pointers, *numbers], np.int64)
    text = simulated_own_source(kernel, shape)
    library = load_kernel(SIZES.sub(lambda size: f"{size[1]} = {int(size[2]) // divisor}", text), folder)
    library.run(ctypes.c_void_p(fields.ctypes.data), clusters * shape.cluster, 1, shape.cluster)
    assert not ctypes.c_long.in_dll(library, "misaligned").value, "accesses at addresses that are not aligned"


def _address(array: Any) -> int:
    """The address of a tensor of NumPy or of PyTorch; an address itself; 0 for None."""
    if array is None or isinstance(array, int):
        return array or 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())
