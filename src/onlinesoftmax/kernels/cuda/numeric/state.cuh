// The state of a slice of a row, and the recurrence that merges states: written once for CUDA.
//
// A state is m = max(z) and one or more sums over the slice.  A rescaled sum is multiplied by a factor when states merge:
// l = sum(exp(z - m)), and zl = sum((z - m) * exp(z - m)), relative to m because a large m would cost all digits of the
// entropy, lse - m - zl / l.  A plain sum is added, as the dot product of a gradient.  tests/laws.py has the laws.
//
// EXACT is true where an output is float32 or float64, so that sums and exp must be more accurate than a 16-bit output
// needs.  FOLDED is for outputs of 16 bits that depend on an element only through its term: exp(z - m) is
// 2^(z * log2(e) - s), where s is m * log2(e) rounded, in two instructions.  The sums are relative to the rounded s, so
// merging states with different m loses nothing, however large m is.  `folding_error` gives the rounding error of s
// times ln(2), which only per-row outputs need.  The exponents of zl are then in base 2.

constexpr bool FOLDED = !EXACT && ONLY_TERMS && sizeof(ACC) == sizeof(float);
// A kernel that reads a saved output uses m only to find the masked rows that give zeros.
constexpr bool USES_MAXIMUM = !READS_SAVED_OUTPUT || ZERO;

constexpr float LOG2E = 1.4426950216293335f;        // the float32 nearest to log2(e)
constexpr float LOG2E_LOW = 1.9259629911783e-08f;   // log2(e) - LOG2E
constexpr float LN2 = 0.6931471805599453f;
constexpr float LN2_LOW = -1.9046543e-9f;           // ln(2) - LN2

// The sums of a state; SUM_L, SUM_ZL, SUM_WZ and SUM_DOT are positions, -1 where a state does not keep that sum.
template <class T> struct Sums { T of[SUMS]; };

template <class T, class U> __device__ inline Sums<T>& operator+=(Sums<T>& a, const Sums<U>& b) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) a.of[i] += b.of[i];
    return a;
}
template <class T> __device__ inline Sums<T> operator+(Sums<T> a, const Sums<T>& b) { return a += b; }

// The accumulators of a state that are no sums.  Each has an identity, of which all bits are 0; of_element, merge and
// finish; and WORDS, its number of words of 32 bits in a message (state_words.cuh).
//
// The index of the largest key, as torch.argmax has it: NaN is the largest, and of equal keys the smaller index wins.
struct Argmax {
    using Key = typename WordOf<sizeof(ACC)>::type;
    static constexpr int WORDS = 2 + sizeof(Key) / 4;
    int64 index;
    Key key;   // 0 in an empty slice

    // Unsigned integers in the order of the numbers.  Negative numbers have the opposite order as integers; -0 equals 0.
    static __device__ inline Key key_of(ACC x) {
        constexpr Key SIGN = Key(1) << (8 * sizeof(Key) - 1);
        if (x != x) return ~Key(0);
        const Key word = bits_of(x == 0 ? 0 : x);
        return word & SIGN ? ~word : word | SIGN;
    }
    static __device__ inline unsigned bits_of(float x) { return __float_as_uint(x); }
    static __device__ inline uint64 bits_of(double x) { return __double_as_longlong(x); }

    static __device__ inline Argmax of_element(ACC x, int64 index) { return {index, key_of(x)}; }
    __device__ inline int64 finish() const { return index; }
};
__device__ inline Argmax merge(Argmax a, Argmax b) {
    return b.key > a.key || (b.key == a.key && b.index < a.index) ? b : a;
}

// In the place of accumulators that a kernel does not keep.
struct Nothing {
    static constexpr int WORDS = 0;
    static __device__ inline Nothing of_element(ACC, int64) { return {}; }
    __device__ inline int64 finish() const { return 0; }
};
__device__ inline Nothing merge(Nothing a, Nothing) { return a; }

template <bool> struct MoreOf { using type = Nothing; };
template <> struct MoreOf<true> { using type = Argmax; };
using More = typename MoreOf<KEEPS_ARGMAX>::type;

template <class M> struct StateWith {
    ACC m;
    Sums<SUM> sums;
    M further;
    // The first sum: l, or the dot product of a gradient, or the number that is given instead of a reduced state.
    __device__ inline SUM first() const { return sums.of[0]; }
    __device__ inline M more() const { return further; }
    __device__ inline StateWith with(M more) const { return {m, sums, more}; }
};
template <> struct StateWith<Nothing> {
    ACC m;
    Sums<SUM> sums;
    __device__ inline SUM first() const { return sums.of[0]; }
    __device__ inline Nothing more() const { return {}; }
    __device__ inline StateWith with(Nothing) const { return *this; }
};
using State = StateWith<More>;

__device__ inline State identity() { return {-INF, {}}; }

// A row of only -inf has l = 0, and a row with +inf an infinite l; neither has a softmax.
__device__ inline bool has_softmax(ACC l) { return l > 0 && l < INF; }

// The bare instruction: results under 2^-126 are 0, which saves three instructions an element.
__device__ inline float exp2_approx(float x) {
    float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}

// Limits t to [-128, 128], where exp overflows and underflows as it should.  Without the limit, an infinite t would
// make p infinite and `rest` NaN.  NaN stays NaN.
__device__ inline float clamp(float t) {
    asm("max.NaN.f32 %0, %0, 0fC3000000;\n\tmin.NaN.f32 %0, %0, 0f43000000;" : "+f"(t));
    return t;
}

// exp(t) of a difference t of two scores: t <= 0, or +inf, or NaN.  The argument p = t * log2(e) is rounded, with an
// error of up to |t| / 2^24: exp(t) = 2^p * exp(rest).  EXACT multiplies the result by 1 + rest, about exp(rest).
__device__ inline double exp_of(double t) { return exp(t); }
__device__ inline float exp_of(float t) {
    if constexpr (!EXACT) return exp2_approx(t * LOG2E);
    t = clamp(t);
    const float p = __fmul_rn(t, LOG2E);
    const float rest = __fmaf_rn(-LN2_LOW, p, __fmaf_rn(-LN2, p, t));
    const float y = exp2_approx(p);
    return __fmaf_rn(y, rest, y);
}

// exp(t) where it scales the sums of a whole slice, so that its error is in every term.  The hardware's exp2 has a mean
// error of -0.8 * 2^-24, except for powers of two, where it has none.  This function uses exp2 for powers of two and a
// polynomial for the rest: minimax in relative error, at most 1.4 * 2^-24.
__device__ inline double scale_of(double t) { return exp(t); }
__device__ inline float scale_of(float t) {
    t = clamp(t);
    // Adding 1.5 * 2^23 rounds to an integer n; f = t * log2(e) - n is at most a half.
    const float n = __fadd_rn(__fmaf_rn(t, LOG2E, 12582912.0f), -12582912.0f);
    const float f = __fmaf_rn(t, LOG2E_LOW, __fmaf_rn(t, LOG2E, -n));
    float p = __fmaf_rn(f, 0.00015326471475418657f, 0.0013390807434916496f);
    p = __fmaf_rn(f, p, 0.009618505835533142f);
    p = __fmaf_rn(f, p, 0.05550359934568405f);
    p = __fmaf_rn(f, p, 0.24022647738456726f);
    p = __fmaf_rn(f, p, 0.6931471824645996f);
    return __fmaf_rn(f, p, 1.0f) * exp2_approx(n);
}

// The finite number nearest to m.  An infinite m would give m - m = NaN.  With a finite one, a slice of only -inf has
// l = 0 and a slice with +inf has l = inf; both give the right logsumexp.
__device__ inline float finite(float m) { return fminf(fmaxf(m, -3.4028234663852886e38f), 3.4028234663852886e38f); }
__device__ inline double finite(double m) {
    return fmin(fmax(m, -1.7976931348623157e308), 1.7976931348623157e308);
}

// The shift of scores by m: `term(z, shift(m))` is exp(z - m).
struct Shift {
    ACC m;        // finite
    ACC factor;   // FOLDED: multiplies z and m
    ACC amount;   // FOLDED: factor * m, rounded
};

__device__ inline Shift shift(ACC m) {
    Shift s{finite(m), 1, 0};
    if constexpr (FOLDED) {
        // The rounding error of m * log2(e) grows with m, and two to its power would overflow or underflow.  From 2^30
        // on, neighbouring float32 numbers are at least 64 apart.  Terms are then 1 or at most 2^-64 in both bases,
        // so base 2 is used, which has no rounding error.
        s.factor = fabs(s.m) < 0x1p30f ? LOG2E : 1;
        // Rounded here: the compiler would contract the product and a difference of two amounts to one instruction.
        s.amount = __fmul_rn(s.m, s.factor);
    }
    return s;
}

// Natural logarithm of the factor by which FOLDED sums are off, because the amount is rounded.
__device__ inline ACC folding_error(Shift s) {
    if constexpr (FOLDED) return fmaf(-s.m, s.factor, s.amount) * LN2;
    else return 0;
}

// The exponent of a term: z - m, or its multiple by log2(e) where it is FOLDED.
__device__ inline ACC exponent(ACC z, Shift s) { return FOLDED ? fma(z, s.factor, -s.amount) : z - s.m; }

__device__ inline ACC term(ACC z, Shift s) {
    if constexpr (FOLDED) return exp2_approx(exponent(z, s));
    else return exp_of(exponent(z, s));
}

// The factor that turns sums relative to m_own into sums relative to m, where m >= m_own.
__device__ inline ACC factor(ACC m_own, ACC m) {
    const Shift from = shift(m_own), to = shift(m);
    if constexpr (FOLDED) return exp2_approx(from.factor == to.factor ? from.amount - to.amount : m_own - to.m);
    else if constexpr (EXACT) return scale_of(m_own - to.m);
    else return exp_of(m_own - to.m);
}

// The type of a sum without its rounding error.
template <class T> struct PlainOf { using type = T; };
template <> struct PlainOf<DoubleDouble> { using type = double; };

// The sums of a state relative to m, which is at least its own; plain sums stay as they are.
__device__ inline Sums<SUM> rescale(State a, ACC m) {
    if constexpr (RESCALED != 0) {
        const ACC f = factor(a.m, m);
        if constexpr (SUM_ZL > 0) {
            // The exponents become relative to the new m.  Below -1000 the factor is 0, and -inf * 0 would be NaN.
            const ACC lower = fmax(FOLDED ? shift(a.m).amount - shift(m).amount : a.m - m, ACC(-1000));
            if (a.m < m) a.sums.of[SUM_ZL] += PlainOf<SUM>::type(a.sums.of[0]) * lower;
        }
#pragma unroll
        for (int i = 0; i < SUMS; ++i)
            if (RESCALED >> i & 1) a.sums.of[i] = a.sums.of[i] * f;
    }
    return a.sums;
}

// The state of two slices together.
__device__ inline State merge(State a, State b) {
    const ACC m = fmax(a.m, b.m);
    return State{m, rescale(a, m) + rescale(b, m)}.with(merge(a.more(), b.more()));
}
