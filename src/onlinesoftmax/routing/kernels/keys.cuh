// The numbers by which experts are chosen, equal to those of selection.py to the last bit, except near_choice: every
// operation is rounded.

// The smaller number; NaN where one of both is NaN.
__device__ inline float smallest_or_nan(float x, float y) {
    float z; asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z;
}

// 2^y for y in [-125, 125], to which y is bounded; NaN for NaN.
__device__ inline float bounded_power(float y) {
    constexpr float ROUND = 12582912.0f;   // 1.5 * 2^23: a sum with it is rounded to a whole number
    constexpr float of[] = {POWER_0, POWER_1, POWER_2, POWER_3, POWER_4, POWER_5, POWER_6};
    const float bounded = smallest_or_nan(largest_or_nan(y, -125.0f), 125.0f), sum = __fadd_rn(bounded, ROUND);
    const float f = __fadd_rn(bounded, -__fadd_rn(sum, -ROUND));
    float power = of[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) power = __fadd_rn(__fmul_rn(power, f), of[i]);
    // The shift leaves the whole number, which becomes an exponent; the product is exact.
    return __fmul_rn(power, __uint_as_float((__float_as_uint(sum) << 23) + 0x3f800000u));
}
__device__ inline float exactly_exp(float x) { return bounded_power(__fmul_rn(x, float(LOG2_E))); }

// Numbers of a token from which its scores of softmax follow: the largest logit and, with a bias, the sum of the powers.
struct TokenSoftmax {
    float m, sum;
};

__device__ inline float exact_softmax(float x, float m) { return exactly_exp(x == m ? 0 : __fadd_rn(x, -m)); }

// The score of a logit.
__device__ inline float exact_score(float x, const TokenSoftmax& token) {
    if (SELECTION == Score::IDENTITY) return x;
    if (SELECTION == Score::SOFTMAX) {
        const float e = exact_softmax(x, token.m);
        return HAS_BIAS ? e / token.sum : e;
    }
    if (SELECTION == Score::SIGMOID) return reciprocal(__fadd_rn(1, exactly_exp(-x)));
    constexpr float half_log[] = {HALF_LOG_0, HALF_LOG_1, HALF_LOG_2, HALF_LOG_3, HALF_LOG_4};
    const float t = exactly_exp(-fabs(x)), u = t / __fadd_rn(2, t), v = __fmul_rn(u, u);
    float log = half_log[4];
#pragma unroll
    for (int i = 3; i >= 0; --i) log = __fadd_rn(__fmul_rn(log, v), half_log[i]);
    return sqrt(__fadd_rn(x < 0 ? 0 : x, __fmul_rn(2 * u, log)));
}

// The key of an expert, by which it is chosen: the larger one first.
__device__ inline float choice_of(float x, float bias, const TokenSoftmax& token) {
    if (!HAS_BIAS) return x;
    return x == -INF ? -INF : __fadd_rn(exact_score(x, token), bias);
}

// Sigmoids with a bias are first computed in seven instructions; exactly, each takes thirty.  exactly_exp and near_choice
// raise 2 to the same rounded number, so their powers differ by less than 2^-21 of them.  So the score is wrong by less than
// 1e-6, and the key by less than half of error_of_key: the product is -inf for -inf, and at most 5e-7 otherwise.  Where such
// errors may decide, keys are computed exactly.
constexpr bool NEARLY = SHORT && HAS_BIAS && SELECTION == Score::SIGMOID && (!GROUPED || GROUP_LANES > 0);
__device__ inline float near_choice(float x, float bias) {
    constexpr float LEAST = 1.4e-45f;
    return fma(fmin(x, 0.0f), LEAST, rough_reciprocal(1 + power_of_two(-x * float(LOG2_E))) + bias);
}
__device__ inline float error_of_key(float key) { return fma(fabs(key), 1e-6f, 4e-6f); }

// The number that an expert adds to the score of its group.
__device__ inline float value_of(float x, float choice, const TokenSoftmax& token) {
    if (HAS_BIAS || !SCORED_GROUPS) return choice;
    return x == -INF ? -INF : exact_score(x, token);
}

// The TokenSoftmax of a token, 0 where no score is a softmax.
__device__ inline TokenSoftmax softmax_of_token(const float (&z)[ITEMS], unsigned items, Board& board) {
    TokenSoftmax token{0, 0};
    if (SELECTION != Score::SOFTMAX || !(HAS_BIAS || SCORED_GROUPS)) return token;
    float m = -INF;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) m = fmax(m, z[i]);
    token.m = fold_team<Maximum>(m, board);
    if (!HAS_BIAS) return token;
    // Whole numbers up to 2^53, added in three parts, since fold_team takes 32-bit words.
    uint64 mass = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const float e = exact_softmax(z[i], token.m);
        if (items >> i & 1 && e == e) mass += __float2ull_rn(e * float(uint64(1) << MASS_BITS));
    }
    const unsigned low = fold_team<Sum>(unsigned(mass) & 0xffffu, board);
    const unsigned middle = fold_team<Sum>(unsigned(mass >> 16) & 0xffffu, board);
    const unsigned high = fold_team<Sum>(unsigned(mass >> 32), board);
    const uint64 sum = low + (uint64(middle) << 16) + (uint64(high) << 32);
    token.sum = float(double(sum)) * (1.0f / float(uint64(1) << MASS_BITS));
    return token;
}

// The order of keys as that of whole numbers: NaN comes first, and 0 equals -0.  word_of adds 0, and a sum that is NaN has the
// bits 0x7fffffff on a GPU.
__device__ inline unsigned word_of_choice(float x) { return word_of(x); }
