// The chosen experts of a token and their scores, up to rounding errors, for both kernels.

// OWN: most chosen experts of a lane.  KEPT: as many in registers, or 1, where a lane loads them one by one.
constexpr int OWN = (K + TEAM - 1) / TEAM, KEPT = OWN <= 4 ? OWN : 1;

// Adjacent places among the K of a token that a lane has, and stores at once.
constexpr int TOGETHER = KEPT < OWN ? 1 : OWN % 4 == 0 && K % 4 == 0 ? 4 : OWN % 2 == 0 && K % 2 == 0 ? 2 : 1;

struct Chosen {
    float x;
    int expert;      // -1 for none
    bool excluded;   // it has no weight
    float dweight;   // gradient of its weight, for gradient.cuh
};
__device__ inline Chosen chosen_of(float x, int expert, const float* bias, float dweight = 0) {
    return {x, expert, expert < 0 || x == -INF || (HAS_BIAS && bias[expert] == -INF), dweight};
}

// The chosen experts of a token that `load` finds by their place.
template <class Load> struct ChosenExperts {
    const Load& load;
    Chosen kept[KEPT];

    __device__ static inline int place(int i) {
        return int((i / TOGETHER * TEAM + threadIdx.x % TEAM) * TOGETHER + i % TOGETHER);
    }
    __device__ inline ChosenExperts(const Load& load) : load(load) {
        if constexpr (KEPT == OWN)
#pragma unroll
            for (int i = 0; i < OWN; ++i) kept[i] = place(i) < K ? load(place(i)) : Chosen{0, -1, true, 0};
    }
    // Calls use(expert, place) for each expert of the lane.
    template <class Use> __device__ inline void each(const Use& use) const {
        if constexpr (KEPT == OWN) {
#pragma unroll
            for (int i = 0; i < OWN; ++i)
                if (place(i) < K) use(kept[i], place(i));
        } else {
#pragma unroll 1
            for (int i = 0; i < OWN; ++i)
                if (place(i) < K) use(load(place(i)), place(i));
        }
    }
};

// Factor that makes a tiny sum of scores large enough for its reciprocal to be finite.
__device__ inline float scale_up(float sum) { return sum < 1e-30f ? 0x1p100f : 1; }

// 1 / x, nearly, for normal x up to 2^126; 0 beyond.
__device__ inline float rough_reciprocal(float x) {
    float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}

// 1 / x rounded correctly, for x from 1 to 2^126, and NaN for NaN: as a division, without its branch for other numbers.
__device__ inline float reciprocal(float x) {
    const float y = rough_reciprocal(x);
    return fma(y, fma(-x, y, 1.0f), y);
}

// The score of a logit, up to rounding errors; not for softmax, whose scores need the whole row.
__device__ inline float score(float x) {
    if (SCORE == Score::IDENTITY) return x;
    const float t = exp(-fabs(x));
    if (SCORE == Score::SIGMOID) return (x < 0 ? t : 1) * reciprocal(1 + t);
    // Below -15, sqrt(t) replaces sqrt(log(1 + t)): the relative error is below 8e-8.
    return x < -15 ? exp(x * 0.5f) : sqrt((x < 0 ? 0 : x) + log1p(t));
}

// log2(y) for normal numbers, 0, inf and NaN.  The error is at most 2^-22, absolute in (0.5, 2) and relative elsewhere (PTX
// ISA).
__device__ inline float log_of_two(float y) { float z; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(y)); return z; }

// exp(x - m); m is not -inf.  For m = inf: NaN at x = inf, otherwise 0.
__device__ inline float term_of(float x, float m) { return power_of_two((x - m) * float(LOG2_E)); }

// The shift of the logits of a token by the largest one, m, with one instruction before the power.  A term is exp(x - m) times
// 2^r, |r| <= 64, the same for all logits of a token; r comes from the rounding of `amount`, and log_of_sum removes it.  From
// |m| = 2^30 on the base is 2, as in state.cuh: of logits so far apart, all terms but those of m are nearly 0.
struct Shift {
    float m, factor, amount;

    // A NaN becomes the least number.
    __device__ explicit inline Shift(float largest) : m(fmin(fmax(largest, -LARGEST_FLOAT32), LARGEST_FLOAT32)) {
        factor = fabs(m) < 0x1p30f ? float(LOG2_E) : 1;
        amount = __fmul_rn(m, factor);
    }
    __device__ inline float term(float x) const { return power_of_two(fma(x, factor, -amount)); }

    // The logarithm of a sum of exponentials, of the sum of their terms.
    __device__ inline float log_of_sum(float sum) const {
        return m + (log_of_two(sum) + fma(-m, factor, amount)) * float(LOG_2);
    }
};

// The score of a chosen expert; of softmax the term, which is still to be divided by a sum of terms.
__device__ inline float score_of(const Chosen& one, const Shift& shift) {
    if (one.excluded) return 0;
    return SCORE == Score::SOFTMAX ? shift.term(one.x) : score(one.x);
}
