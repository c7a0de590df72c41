// The state (m, l) in CUDA: the recurrence, written once for this language.
//
// m = max(x), l = sum(exp(x - m)) of any slice of a row.  Lanes, warps, the blocks of a cluster and the blocks of
// a grid all reduce with `rescale`, which is `merge` for any number of states, and nothing else.  The laws are the
// table in tests/laws.py, shared with NumPy, torch, JAX and Triton.
//
// EXACT is set where the output has 24 bits or more.  FOLDED, for a softmax of 16 bits: exp(x - m) is
// 2^(x · log2(e) - s) with s = m · log2(e) rounded, in two instructions.  Its l is relative to that very s, so that
// nothing is lost when states with other m merge, however large m is; its log would be.

constexpr bool FOLDED = !EXACT && OP == Op::SOFTMAX && sizeof(ACC) == sizeof(float);

constexpr float LOG2E = 1.4426950216293335f;        // the float32 nearest to log2(e)
constexpr float LOG2E_LOW = 1.9259629911783e-08f;   // what it lacks
constexpr float LN2 = 0.6931471805599453f;
constexpr float LN2_LOW = -1.9046543e-9f;            // what it lacks

struct State { ACC m; SUM l; };

__device__ inline State identity() { return {-INF, 0}; }

// The bare instruction: results under 2^-126 are 0, which spares three more instructions an element.
__device__ inline float exp2_approx(float x) {
    float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}

// 2^±184 overflows and underflows as exp does, and the rest beside an infinite product would be NaN.  NaN stays.
__device__ inline float clamp(float t) {
    asm("max.NaN.f32 %0, %0, 0fC3000000;\n\tmin.NaN.f32 %0, %0, 0f43000000;" : "+f"(t));
    return t;
}

// Exp of t, a difference of two scores: at most 0, or +inf, or NaN.  The argument p = t · log2(e), rounded, is off by up
// to |t| / 2^24; EXACT returns that error as a factor of the result: exp(t) is 2^p · exp(rest), and rest is small.
__device__ inline double exp_of(double t) { return exp(t); }
__device__ inline float exp_of(float t) {
    if constexpr (!EXACT) return exp2_approx(t * LOG2E);
    t = clamp(t);
    const float p = __fmul_rn(t, LOG2E);
    const float rest = __fmaf_rn(-LN2_LOW, p, __fmaf_rn(-LN2, p, t));
    const float y = exp2_approx(p);
    return __fmaf_rn(y, rest, y);
}

// The same where it scales the l of a whole slice, and its error would be in every term.  The hardware's exp2 is off
// by -0.8 · 2^-24 on average; this keeps it for powers of two, where it has no error, and leaves the rest to a
// polynomial, minimax in relative error, that is right to 1.4 · 2^-24.
__device__ inline double scale_of(double t) { return exp(t); }
__device__ inline float scale_of(float t) {
    t = clamp(t);
    // Adding 1.5 · 2^23 rounds to an integer; f is what is left of t · log2(e), at most a half.
    const float n = __fadd_rn(__fmaf_rn(t, LOG2E, 12582912.0f), -12582912.0f);
    const float f = __fmaf_rn(t, LOG2E_LOW, __fmaf_rn(t, LOG2E, -n));
    float p = __fmaf_rn(f, 0.00015326471475418657f, 0.0013390807434916496f);
    p = __fmaf_rn(f, p, 0.009618505835533142f);
    p = __fmaf_rn(f, p, 0.05550359934568405f);
    p = __fmaf_rn(f, p, 0.24022647738456726f);
    p = __fmaf_rn(f, p, 0.6931471824645996f);
    return __fmaf_rn(f, p, 1.0f) * exp2_approx(n);
}

// What is subtracted before exp: the finite number nearest to m.  An infinite m would give m - m = NaN; so shifted, a
// slice of nothing but -inf has l = 0, and one with +inf has l = inf, which is what their logsumexp needs.
__device__ inline float finite(float m) { return fminf(fmaxf(m, -3.4028234663852886e38f), 3.4028234663852886e38f); }
__device__ inline double finite(double m) {
    return fmin(fmax(m, -1.7976931348623157e308), 1.7976931348623157e308);
}

// A shift by m: exp(x - m) is `term(x, shift(m))`.
struct Shift {
    ACC m;        // finite
    ACC factor;   // of x, where FOLDED
    ACC amount;   // factor · m, rounded
};

__device__ inline Shift shift(ACC m) {
    Shift s{finite(m), 1, 0};
    if constexpr (FOLDED) {
        // m · log2(e) may overflow.  Numbers that large lie so far apart that all terms are 0 or 1, whatever the base.
        s.factor = fabs(s.m) < 2.3e38f ? LOG2E : 0x1p-64f;
        // Rounded: the compiler would make one operation of it and the difference of two amounts.
        s.amount = __fmul_rn(s.m, s.factor);
    }
    return s;
}

__device__ inline ACC term(ACC x, Shift s) {
    if constexpr (FOLDED) return exp2_approx(fmaf(x, s.factor, -s.amount));
    else return exp_of(x - s.m);
}

// What turns an l relative to m_own into one relative to m, which is at least that.
__device__ inline ACC factor(ACC m_own, ACC m) {
    const Shift from = shift(m_own), to = shift(m);
    if constexpr (FOLDED) return exp2_approx(from.factor == to.factor ? from.amount - to.amount : m_own - to.m);
    else if constexpr (EXACT) return scale_of(m_own - to.m);
    else return exp_of(m_own - to.m);
}

// The l of a gradient is a plain sum, whatever its m says.
__device__ inline SUM rescale(State a, ACC m) {
    if constexpr (GRADIENT) return a.l;
    else return a.l * factor(a.m, m);
}

// The state of two slices laid end to end.
__device__ inline State merge(State a, State b) {
    const ACC m = fmax(a.m, b.m);
    return {m, rescale(a, m) + rescale(b, m)};
}
