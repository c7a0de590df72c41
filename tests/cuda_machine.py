"""The machine of tests/cuda_simulator.py: blocks and threads on the host, and how a program for it is compiled.

A thread of a block is a fiber, which runs until it waits for others.  A thread of the host runs one block after
another.  Shared variables are thread-local variables of this host thread, so a block finds the values of the block
before, as on a GPU.

The machine is a library of its own, which g++ compiles once.  A kernel sees only its declarations: standard headers,
and the code that they generate, take the compiler longer than the kernel itself.

In a process that has loaded ThreadSanitizer (tests/cuda_races.py), kernels are compiled for it, and the machine tells
ThreadSanitizer which fiber runs, and when two threads synchronize.  A shuffle synchronizes a warp here, as __syncwarp
does.  CUDA does not promise that, so a missing __syncwarp beside a shuffle is not found.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

COMPILER = shutil.which("g++")

DECLARATIONS = """
struct Dim { unsigned x, y, z; };
struct Barrier {
    int arrived, round;
    char rounds[2];   // addresses for `release` and `acquire`: one for even rounds, one for odd rounds
    void wait(int threads);
};
// The block of a thread of the host, and which of its fibers runs.
struct Block {
    Dim thread, place, grid;
    Barrier whole, warps[32];
    int votes;
    char lanes[32][2][32][16];
    unsigned char side[32][32];
};
// Libraries that are loaded late share little memory for the fast kind of thread-local variables (initial-exec), so
// only this pointer is of that kind.
extern __thread Block* simulated_block __attribute__((tls_model("initial-exec")));
// For ThreadSanitizer: after `acquire(at)`, a thread sees what other threads did before an earlier `release(at)` of the
// same address.
void release(void* at);
void acquire(void* at);
// A copy that ThreadSanitizer does not see.
void copy_unseen(void* to, const void* from, unsigned long size);
// Lets the other fibers of the block run until they wait.
void yield();
// Runs `kernel` in every thread of every block.  Each thread of the host first calls `begin` once.  Then `together`
// blocks run at the same time, one in each host thread; after each such group, one host thread calls `between`.  The
// number of blocks, programs * team, must be a multiple of `together`.
void run_blocks(void (*kernel)(), void (*begin)(), void (*between)(), unsigned threads, unsigned programs,
                unsigned team, unsigned together);
"""

NUMBERS = """
extern "C" void* memcpy(void*, const void*, decltype(sizeof 0)) noexcept;
extern "C" void* memset(void*, int, decltype(sizeof 0)) noexcept;
extern "C" void abort() noexcept;
#define OF_ONE(name) extern "C" double name(double) noexcept; extern "C" float name##f(float) noexcept; \\
    inline float name(float x) { return name##f(x); }
#define OF_TWO(name) extern "C" double name(double, double) noexcept; \\
    extern "C" float name##f(float, float) noexcept; inline float name(float x, float y) { return name##f(x, y); }
OF_ONE(ceil) OF_ONE(floor) OF_ONE(exp) OF_ONE(exp2) OF_ONE(log) OF_ONE(log1p) OF_ONE(sqrt) OF_ONE(tanh) OF_ONE(fabs)
OF_TWO(fmax) OF_TWO(fmin)
extern "C" double fma(double, double, double) noexcept;
extern "C" float fmaf(float, float, float) noexcept;
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
template <class T> constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T> constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }
"""
"""Declarations of the standard functions that kernels call, without the standard headers."""

BUILT_IN = """
#define __device__
#define __noinline__
#define __global__
#define __shared__ static thread_local
#define __grid_constant__
#define __launch_bounds__(...)
#define threadIdx simulated_block->thread
#define blockIdx simulated_block->place
#define gridDim simulated_block->grid
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
template <class A, class B> A bits_as(B b) { A a; memcpy(&a, &b, sizeof(a)); return a; }
inline float __int_as_float(int i) { return bits_as<float>(i); }
inline float __uint_as_float(unsigned i) { return bits_as<float>(i); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline unsigned long long __double_as_longlong(double x) { return bits_as<unsigned long long>(x); }
inline double __longlong_as_double(unsigned long long i) { return bits_as<double>(i); }
inline float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; } inline float __fadd_rn(float a, float b) { return a + b; }
inline unsigned long long __float2ull_rn(float x) { return (unsigned long long)__builtin_rintf(x); }
inline int __ffs(int x) { return __builtin_ffs(x); } inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = (unsigned long long)b << 32 | a;
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= unsigned(both >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return y;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return unsigned(((unsigned long long)high << 32 | low) >> (by & 31));
}
#define __syncthreads() simulated_block->whole.wait(THREADS)
// Returns how many threads of the block gave true.
inline int vote(bool x, int threads) {
    Block& block = *simulated_block;
    __atomic_fetch_add(&block.votes, x, __ATOMIC_RELAXED);
    block.whole.wait(threads);
    const int votes = __atomic_load_n(&block.votes, __ATOMIC_RELAXED);
    block.whole.wait(threads);
    // All threads have done so before the next vote ends.
    __atomic_fetch_sub(&block.votes, x, __ATOMIC_RELAXED);
    return votes;
}
#define __syncthreads_count(x) vote(x, THREADS)
#define __syncthreads_or(x) (vote(x, THREADS) != 0)
#define __syncwarp() simulated_block->warps[threadIdx.x / 32].wait(32)
// Returns the values that the lanes of a warp gave, after each lane has given one.  Exchanges use two buffers in turn.
// So a slow lane still finds the values of its exchange when other lanes have begun the next one.  No lane begins the
// exchange after that before all lanes have arrived at the next one.
template <class T> const char (*given_by_lanes(T x))[16] {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    char (*const place)[16] = simulated_block->lanes[warp][simulated_block->side[warp][lane] ^= 1];
    copy_unseen(place[lane], &x, sizeof(x));
    simulated_block->warps[warp].wait(32);
    return place;
}
template <class T> T exchange_lanes(T x, int lane) {
    copy_unseen(&x, given_by_lanes(x)[lane], sizeof(x));
    return x;
}
template <class T> T __shfl_sync(unsigned, T x, int lane) { return exchange_lanes(x, lane); }
template <class T> T __shfl_up_sync(unsigned, T x, int step, int width) {
    const int lane = threadIdx.x % 32;
    return exchange_lanes(x, lane % width >= step ? lane - step : lane);
}
template <class T> T __shfl_xor_sync(unsigned, T x, int step) { return exchange_lanes(x, threadIdx.x % 32 ^ step); }
inline bool __all_sync(unsigned, bool x) {
    const auto given = given_by_lanes(x);
    for (int i = 0; i < 32; ++i) if (copy_unseen(&x, given[i], 1), !x) return false;
    return true;
}
inline bool __any_sync(unsigned lanes, bool x) { return !__all_sync(lanes, !x); }
template <class Fold> unsigned fold_lanes(unsigned x, Fold fold) {
    const auto given = given_by_lanes(x);
    unsigned all, one;
    copy_unseen(&all, given[0], 4);
    for (int i = 1; i < 32; ++i) copy_unseen(&one, given[i], 4), all = fold(all, one);
    return all;
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    return fold_lanes(x, [](unsigned a, unsigned b) { return a > b ? a : b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
    return fold_lanes(x, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) { return fold_lanes(x, [](auto a, auto b) { return a | b; }); }
inline unsigned __ballot_sync(unsigned all, bool x) { return __reduce_or_sync(all, unsigned(x) << threadIdx.x % 32); }
template <class T> T atomicMax(T* to, T x) {
    T now = __atomic_load_n(to, __ATOMIC_SEQ_CST);
    while (now < x && !__atomic_compare_exchange_n(to, &now, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}
    return now;
}
template <class T> T atomicAdd(T* to, T x) { return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST); }
// ThreadSanitizer does not know fences.  So every fence here synchronizes with every earlier fence of any thread, even
// where no message was passed.  Races that this hides are not found.
inline void __threadfence() {
    static char all;
    acquire(&all), release(&all);
}
"""
"""CUDA's keywords, variables and functions."""

MACHINE = """
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <mutex>
#include <thread>
#include <vector>

__thread Block* simulated_block __attribute__((tls_model("initial-exec")));

// ThreadSanitizer's functions; null where it is not loaded.
extern "C" {
    [[gnu::weak]] void __tsan_acquire(void*);
    [[gnu::weak]] void __tsan_release(void*);
    [[gnu::weak]] void* __tsan_get_current_fiber();
    [[gnu::weak]] void* __tsan_create_fiber(unsigned);
    [[gnu::weak]] void __tsan_destroy_fiber(void*);
    [[gnu::weak]] void __tsan_switch_to_fiber(void*, unsigned);
}
void acquire(void* at) { if (__tsan_acquire) __tsan_acquire(at); }
void release(void* at) { if (__tsan_release) __tsan_release(at); }
// A switch of the fiber is no synchronization, which the flag 1 says.
static void announce(void* fiber) { if (__tsan_switch_to_fiber) __tsan_switch_to_fiber(fiber, 1); }
void copy_unseen(void* to, const void* from, unsigned long size) {
    for (unsigned long i = 0; i < size; ++i) static_cast<volatile char*>(to)[i] = static_cast<const char*>(from)[i];
}

// The first switch to a fiber uses setcontext.  Later switches use the compiler's long jumps, because setcontext makes
// a system call, and ThreadSanitizer replaces the library's longjmp.  A function may not jump to a place in itself, so
// the functions below are not inlined.
// A fiber sleeps at a barrier until another round begins, which costs less to ask than a switch to the fiber.
struct Fiber {
    ucontext_t context; void* place[5]; bool begun, done; void* announced; const Barrier* at; int round;
    bool sleeps() const { return at && at->round == round; }
};
struct Running : Block {
    std::vector<Fiber> fibers;
    void* scheduler[5];
    void* announced;
    void (*kernel)();
    bool some_went_on;
    char begun, ended;   // for ThreadSanitizer
};
static Running& running() { return *static_cast<Running*>(simulated_block); }
[[gnu::noinline]] static void leave(Running& r) {
    announce(r.announced);
    __builtin_longjmp(r.scheduler, 1);
}
[[gnu::noinline]] void yield() {
    if (!__builtin_setjmp(running().fibers[simulated_block->thread.x].place)) leave(running());
}
void Barrier::wait(int threads) {
    const int now = round;
    release(&rounds[now % 2]);
    if (++arrived == threads) arrived = 0, ++round;
    Fiber& fiber = running().fibers[simulated_block->thread.x];
    fiber.at = this, fiber.round = now;
    if (fiber.sleeps()) yield();
    acquire(&rounds[now % 2]);
    running().some_went_on = true;
}
static void fiber_begins() {
    // A fiber runs the kernel once for every block that its thread of the host takes.
    for (;;) {
        acquire(&running().begun);
        running().kernel();
        release(&running().ended);
        running().fibers[simulated_block->thread.x].done = true;
        yield();
    }
}
[[gnu::noinline]] static void enter(Fiber& fiber) {
    announce(fiber.announced);
    if (fiber.begun) __builtin_longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
[[gnu::noinline]] static void resume(Running& r, Fiber& fiber) {
    if (!__builtin_setjmp(r.scheduler)) enter(fiber);
}

// Stacks are kept: their memory takes long to make.  A power of two apart, they would share few lines of the caches.
constexpr size_t STACK = (1 << 18) + 17 * 64;
struct Stacks { char* memory; unsigned count; };
static std::vector<Stacks> kept;
static std::mutex of_kept;
static Stacks take_stacks(unsigned count) {
    const std::lock_guard<std::mutex> lock(of_kept);
    for (size_t i = 0; i < kept.size(); ++i)
        if (kept[i].count >= count) {
            const Stacks found = kept[i];
            kept.erase(kept.begin() + i);
            return found;
        }
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const memory = mmap(nullptr, count * STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) abort();
    return {static_cast<char*>(memory), count};
}
static void keep(Stacks stacks) { const std::lock_guard<std::mutex> lock(of_kept); kept.push_back(stacks); }

static void run_block(Running& r, Dim place) {
    r.place = place, r.whole = {}, memset(r.warps, 0, sizeof(r.warps)), r.votes = 0;
    for (Fiber& fiber : r.fibers) fiber.done = false, fiber.at = nullptr;
    release(&r.begun);
    bool backward = false;
    for (bool busy = true; busy; backward = !backward) {
        busy = r.some_went_on = false;
        // Both orders take turns, so that the first warp is not always the first to read what others overwrite.
        for (unsigned j = 0; j < r.fibers.size(); ++j) {
            const unsigned i = backward ? r.fibers.size() - 1 - j : j;
            if (!r.fibers[i].done) busy = true;
            if (!r.fibers[i].done && !r.fibers[i].sleeps()) r.thread.x = i, resume(r, r.fibers[i]);
        }
        // No fiber has passed a barrier, so this block may wait for a message: let host threads of other blocks run.
        if (!r.some_went_on) sched_yield();
    }
    acquire(&r.ended);
}

void run_blocks(void (*kernel)(), void (*begin)(), void (*between)(), unsigned threads, unsigned programs,
                unsigned team, unsigned together) {
    pthread_barrier_t ended;
    pthread_barrier_init(&ended, nullptr, together);
    // Blocks with the same remainder modulo `together` run in one thread of the host.
    const auto blocks_of = [&](unsigned first) {
        Running r{};
        r.fibers = std::vector<Fiber>(threads), r.kernel = kernel, r.grid = {programs, team, 1}, simulated_block = &r;
        r.announced = __tsan_get_current_fiber ? __tsan_get_current_fiber() : nullptr;
        begin();
        const Stacks stacks = take_stacks(threads);
        for (unsigned i = 0; i < threads; ++i) {
            ucontext_t& context = r.fibers[i].context;
            getcontext(&context);
            context.uc_stack.ss_sp = stacks.memory + i * STACK, context.uc_stack.ss_size = STACK;
            makecontext(&context, fiber_begins, 0);
            r.fibers[i].announced = __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr;
        }
        for (unsigned i = first; i < programs * team; i += together) {
            run_block(r, {i / team, i % team, 0});
            if (pthread_barrier_wait(&ended) == PTHREAD_BARRIER_SERIAL_THREAD) between();
            pthread_barrier_wait(&ended);
        }
        for (Fiber& fiber : r.fibers)
            if (__tsan_destroy_fiber) __tsan_destroy_fiber(fiber.announced);
        keep(stacks);
    };
    std::vector<std::thread> hosts;
    for (unsigned first = 0; first < together; ++first) hosts.emplace_back(blocks_of, first);
    for (std::thread& host : hosts) host.join();
    pthread_barrier_destroy(&ended);
}
"""

OPTIONS = [
    "-std=c++17", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fPIC", "-shared", "-x", "c++",
    # Otherwise, static variables of one name would be one variable in all kernels that are loaded.
    "-fno-gnu-unique",
    # Local variables begin with a pattern: one that is read before it is written must not happen to be zero.
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip


@cache
def load_machine(folder: Path) -> None:
    """Compile the machine into the folder unless it is there, and load it, so that kernels find its functions."""
    text = MACHINE.replace("\n__thread", DECLARATIONS + "\n__thread", 1)
    # Kernels are linked without the standard library and find the mathematical functions through the machine.
    library = compiled(["-O2", "-pthread", "-Wl,--no-as-needed", "-lm"], text, folder)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@cache
def load_kernel(text: str, folder: Path, process: int = 0) -> Any:
    """The library of a kernel; g++ compiles it unless it is in the folder.

    Args:
        text: The kernel, with DECLARATIONS, NUMBERS and BUILT_IN before it.
        folder: Where to put the libraries.
        process: Number of the simulated process.  Each has a copy of the library, with its own static variables.
    """
    load_machine(folder)
    # A kernel runs on few elements, in less time than g++ would take to optimize it.  Linking with the standard library
    # would take four times as long.
    options = ["-O0", "-fno-threadsafe-statics", "-nostdlib", "-fno-exceptions", "-fno-asynchronous-unwind-tables"]
    if hasattr(ctypes.CDLL(None), "__tsan_acquire"):
        options += ["-g1", "-gno-column-info", "-fsanitize=thread"]
    library = compiled(options, text, folder)
    return ctypes.CDLL(str(_copy(library, process) if process else library))


def _copy(library: Path, process: int) -> Path:
    copy, part = library.with_suffix(f".{process}.so"), library.with_suffix(".copy")
    with FileLock(library.with_suffix(".lock")):
        if not copy.exists():
            shutil.copyfile(library, part).rename(copy)
    return copy


def compiled(options: Sequence[str], text: str, folder: Path) -> Path:
    """The library that g++ makes of a program; it is in the folder afterwards, and may have been there before."""
    assert COMPILER is not None
    command = [COMPILER, *OPTIONS, "-", *options]
    age = Path(COMPILER).stat().st_mtime
    key = hashlib.sha256("\n".join([*command, f"{age}", text]).encode()).hexdigest()[:16]
    library, part = folder / f"{key}.so", folder / f"{key}.part"
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            done = subprocess.run([*command, "-o", str(part)], input=text, text=True, capture_output=True)
            assert not done.returncode, done.stderr[:4000]
            part.rename(library)
    return library
