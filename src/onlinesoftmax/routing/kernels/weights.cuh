// The chosen experts of a token and their scores, up to rounding errors, for both kernels.

// The chosen experts that a lane has, and whether it keeps them in registers.
constexpr int OWN = (K + TEAM - 1) / TEAM, KEPT = OWN <= 4 ? OWN : 1;

// Adjacent places that a lane has, for stores of all of them at once.
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

// The factor for scores before they are divided by their sum: the reciprocal of the least sums would be infinite.
__device__ inline float scale_up(float sum) { return sum < 1e-30f ? 0x1p100f : 1; }

// 1 / x, nearly, for x from 1 to 2^126; 0 beyond.
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
    // Below -15, log(1 + t) is t in float32.
    return x < -15 ? exp(x * 0.5f) : sqrt((x < 0 ? 0 : x) + log1p(t));
}

// The nearest finite number; NaN becomes the least.
__device__ inline float shift_of(float m) { return fmin(fmax(m, -LARGEST_FLOAT32), LARGEST_FLOAT32); }

// exp(x - m) for the shift m.
__device__ inline float term_of(float x, float m) { return power_of_two((x - m) * float(LOG2_E)); }

// The score of a chosen expert: with OF_CHOSEN, in units of exp(shift).
__device__ inline float score_of(const Chosen& one, float shift, float lse) {
    if (one.excluded) return 0;
    if (SCORE != Score::SOFTMAX) return score(one.x);
    return OF_CHOSEN ? term_of(one.x, shift) : exp(one.x - lse);
}

// The logarithm of a number from 1 on, of 0 or of NaN.  Its absolute error is below 2e-7 up to 2, and its relative error below
// 4e-7 above: of the instruction 2^-22.6 and 2^-22, and of the product two roundings.
__device__ inline float log_of_sum(float y) {
    float z; asm("lg2.approx.f32 %0, %1;" : "=f"(z) : "f"(y)); return z * float(LOG_2);
}
