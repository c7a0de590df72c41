// Element types, and loads and stores of up to 16 bytes per instruction, the most that GPUs before sm_100 can move.
//
// No header is included: users have NVRTC, which comes as a Python package, and need no CUDA toolkit.

struct float16 { unsigned short bits; };
struct bfloat16 { unsigned short bits; };
using int64 = long long;
using uint64 = unsigned long long;

#define INF __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

__device__ inline float wide(float16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
__device__ inline float wide(bfloat16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ inline float wide(float x) { return x; }
__device__ inline double wide(double x) { return x; }

// A float64 sum and its rounding error, so that a sum of any length is rounded once.  An infinite sum has no error.
struct DoubleDouble {
    double high, low;
    DoubleDouble() = default;
    __device__ inline DoubleDouble(double x) : high(x), low(0) {}
    __device__ inline DoubleDouble(double high, double low) : high(high), low(low) {}
    __device__ inline explicit operator double() const { return high + low; }
};
__device__ inline DoubleDouble operator+(DoubleDouble a, DoubleDouble b) {
    const double sum = a.high + b.high, part = sum - a.high;
    const double error = (a.high - (sum - part)) + (b.high - part);
    return {sum, fabs(sum) == INF ? 0 : a.low + b.low + error};
}
__device__ inline DoubleDouble& operator+=(DoubleDouble& a, DoubleDouble b) { return a = a + b; }
__device__ inline DoubleDouble operator*(DoubleDouble a, double b) {
    const double product = a.high * b;
    return {product, fabs(product) == INF ? 0 : fma(a.high, b, -product) + a.low * b};
}
// The difference is rounded to float64: the result is an element, not a sum.
__device__ inline double operator-(DoubleDouble a, double b) { return a.high - b + a.low; }

// Converts two numbers to 16 bits in one instruction, rounded to nearest.
__device__ inline unsigned narrow_pair(float low, float high, float16) {
    unsigned y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
__device__ inline unsigned narrow_pair(float low, float high, bfloat16) {
    unsigned y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y;
}
__device__ inline void narrow(float16& y, float x) { y.bits = narrow_pair(x, 0, y); }
__device__ inline void narrow(bfloat16& y, float x) { y.bits = narrow_pair(x, 0, y); }
__device__ inline void narrow(float& y, double x) { y = float(x); }
__device__ inline void narrow(double& y, double x) { y = x; }
__device__ inline void narrow(int64& y, int64 x) { y = x; }

// Sets x to the neutral element of a reduction: 0 for a sum, -inf for a maximum.
__device__ inline void clear(float16& x, bool zero) { x.bits = zero ? 0 : 0xfc00; }
__device__ inline void clear(bfloat16& x, bool zero) { x.bits = zero ? 0 : 0xff80; }
__device__ inline void clear(float& x, bool zero) { x = zero ? 0 : -INF; }
__device__ inline void clear(double& x, bool zero) { x = zero ? 0 : -INF; }

// N neighbouring elements as they lie in memory.
template <class T, int N> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Chunk { T at[N]; };

// Element i, widened.  Two bfloat16 share a register, and one instruction widens either.
template <class T, int N> __device__ inline auto wide(const Chunk<T, N>& from, int i) { return wide(from.at[i]); }
template <int N> __device__ inline float wide(const Chunk<bfloat16, N>& from, int i) {
    if constexpr (N == 1) return wide(from.at[0]);
    const unsigned pair = reinterpret_cast<const unsigned&>(from.at[i & ~1]);
    return __uint_as_float(i & 1 ? pair & 0xffff0000u : pair << 16);
}

// Element i, widened by a different instruction.  If both uses of an element had the same instruction, the compiler
// would widen once and keep the result in twice the registers.
template <class T, int N> __device__ inline auto wide_again(const Chunk<T, N>& from, int i) { return wide(from, i); }
template <int N> __device__ inline float wide_again(const Chunk<bfloat16, N>& from, int i) {
    if constexpr (N == 1) return wide(from.at[0]);
    return __uint_as_float(__byte_perm(reinterpret_cast<const unsigned&>(from.at[i & ~1]), 0, i & 1 ? 0x3244 : 0x1044));
}
template <int N> __device__ inline float wide_again(const Chunk<float16, N>& from, int i) {
    if constexpr (N == 1) return wide(from.at[0]);
    const unsigned half = __byte_perm(reinterpret_cast<const unsigned&>(from.at[i & ~1]), 0, i & 1 ? 0x4432 : 0x4410);
    return wide(float16{(unsigned short)half});
}

// max_pair: elementwise maximum of two registers that hold two 16-bit numbers each.  max_half: the larger of the two
// numbers in a register.  A NaN loses against a number.
template <class T> __device__ inline unsigned max_pair(unsigned a, unsigned) { return a; }
template <> __device__ inline unsigned max_pair<float16>(unsigned a, unsigned b) {
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a;
}
template <> __device__ inline unsigned max_pair<bfloat16>(unsigned a, unsigned b) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b)); return a;
}
template <class T> __device__ inline float max_half(unsigned a) {
    const Chunk<T, 2> pair = reinterpret_cast<const Chunk<T, 2>&>(a);
    return fmaxf(float(wide(pair, 0)), float(wide(pair, 1)));
}

template <class T, int N, class A> __device__ inline Chunk<T, N> narrow(const A (&from)[N]) {
    Chunk<T, N> to;
    if constexpr (sizeof(T) == 2 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2)
            reinterpret_cast<unsigned&>(to.at[i]) = narrow_pair(float(from[i]), float(from[i + 1]), T{});
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) narrow(to.at[i], from[i]);
    }
    return to;
}

// The unsigned integer of SIZE bytes, 4 or 8.
template <int SIZE> struct WordOf { using type = uint64; };
template <> struct WordOf<4> { using type = unsigned; };

// The unsigned integer that one instruction moves, by its size.
template <int BYTES> struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

// Eviction from L2: LONG keeps a line that will be read again, SHORT evicts a line before others.
enum class CachePolicy { NORMAL, LONG, SHORT };

template <CachePolicy POLICY> __device__ inline uint64 policy_word() {
    uint64 p;
    if constexpr (POLICY == CachePolicy::LONG) asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(p));
    else asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p));
    return p;
}

// volatile: the compiler issues a load where it stands, ahead of arithmetic on earlier loads, and never twice.
template <CachePolicy POLICY, class W> __device__ inline W load_word(const W* from) {
    W w;
    if constexpr (sizeof(W) == 16) {
        if constexpr (POLICY == CachePolicy::NORMAL)
            asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from));
        else
            asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                         : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w) : "l"(from), "l"(policy_word<POLICY>()));
    } else {
        w = *reinterpret_cast<const volatile W*>(from);
    }
    return w;
}
template <CachePolicy POLICY> __device__ inline uint2 load_word(const uint2* from) {
    uint2 w;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(from));
    return w;
}

// One element.  relaxed: the assembler rarely moves the load behind the first use of another one.
template <class T> __device__ inline T load_one(const T* from) {
    using W = typename Word<sizeof(T)>::type;
    W w;
    if constexpr (sizeof(T) == 8)
        asm volatile("ld.relaxed.cta.global.v2.u32 {%0, %1}, [%2];" : "=r"(w.x), "=r"(w.y) : "l"(from));
    else if constexpr (sizeof(T) == 4) asm volatile("ld.relaxed.cta.global.u32 %0, [%1];" : "=r"(w) : "l"(from));
    else if constexpr (sizeof(T) == 2) asm volatile("ld.relaxed.cta.global.u16 %0, [%1];" : "=h"(w) : "l"(from));
    else w = *reinterpret_cast<const volatile W*>(from);
    return reinterpret_cast<const T&>(w);
}

template <CachePolicy POLICY, class W> __device__ inline void store_word(W* to, W w) {
    if constexpr (sizeof(W) == 16) {
        if constexpr (POLICY == CachePolicy::NORMAL)
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                         :: "l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
        else
            asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
                         :: "l"(to), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "l"(policy_word<POLICY>()) : "memory");
    } else {
        *to = w;
    }
}

// Moves WIDTH elements an instruction.  Where WIDTH is 1, elements are `step` apart; step 0 reads one element N times.
template <int WIDTH, CachePolicy POLICY, class T, int N>
__device__ inline void load(Chunk<T, N>& to, const T* from, int64 step) {
    constexpr int W = WIDTH < N ? WIDTH : N;
    using Unit = typename Word<W * sizeof(T)>::type;
#pragma unroll
    for (int i = 0; i < N; i += W)
        reinterpret_cast<Unit&>(to.at[i]) =
            load_word<POLICY>(reinterpret_cast<const Unit*>(from + (W == 1 ? i * step : i)));
}

template <int WIDTH, CachePolicy POLICY, class T, int N>
__device__ inline void store(T* to, const Chunk<T, N>& from, int64 step) {
    constexpr int W = WIDTH < N ? WIDTH : N;
    using Unit = typename Word<W * sizeof(T)>::type;
#pragma unroll
    for (int i = 0; i < N; i += W)
        store_word<POLICY>(
            reinterpret_cast<Unit*>(to + (W == 1 ? i * step : i)), reinterpret_cast<const Unit&>(from.at[i]));
}

// Programmatic dependent launch (sm_90): a kernel may begin before the previous kernel on the stream has ended.  The
// previous kernel permits it with let_next_kernel_begin, or by its end.  wait_for_kernel_before returns when the previous
// kernel has ended and its stores are visible.  Every thread of a kernel that is launched early calls it before it loads
// anything that an unfinished kernel writes, and before its first store.
__device__ inline void let_next_kernel_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Copies 16 bytes from global to shared memory without a register, asynchronously.
__device__ inline void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

// Ends a group of copies.
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups, up to 7, are under way; the instruction takes a constant.
__device__ inline void wait_groups(int pending) {
    switch (pending) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 7;" ::: "memory");
    }
}
