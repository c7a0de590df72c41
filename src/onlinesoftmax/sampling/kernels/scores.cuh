// The distance of a score from the largest, and its sort key, for the kernels that sample.

// Above every sort key and every token id.
constexpr uint64 ALL = ~uint64(0);

// 2^y, nearly.
__device__ inline float power_of_two(float y) {
    float z; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(z) : "f"(y)); return z;
}

// The larger number; NaN where one of both is NaN.
__device__ inline float largest_or_nan(float x, float y) {
    float z; asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y)); return z;
}

// The nearest whole number, of two the even one.
__device__ inline double rounded(double y) { return y + 6755399441055744.0 - 6755399441055744.0; }

// The score less the largest: 0 for the largest itself, which may be infinite; finite for finite scores.
__device__ inline float below(float x, float m) {
    const float z = __fadd_rn(x, -m);
    return x == m ? 0 : x == -INF || m == INF ? z : fmax(z, -LARGEST_FLOAT32);
}

// The score less the largest in float64, which holds the difference of any two finite float32 numbers.
__device__ inline double exactly_below(float x, float m) { return x == m ? 0 : double(x) - double(m); }

// Float32 numbers in the order of integers.
__device__ inline unsigned word_of(float x) {
    const int bits = __float_as_int(x + 0.0f);   // -0 becomes 0
    return unsigned(bits) ^ (unsigned(bits >> 31) | 0x80000000u);
}
__device__ inline float score_of_word(unsigned word) {
    const int bits = int(word ^ 0x80000000u);
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}

// The score of a word, or the least finite one where it is below, as a NaN may be.
__device__ inline float finite_score(unsigned word) {
    const float x = score_of_word(word);
    return x > -LARGEST_FLOAT32 ? x : -LARGEST_FLOAT32;
}

// The sort key of a token: larger for a larger score, and for the lower of two ids with equal scores.
__device__ inline uint64 key_of(float x, unsigned token) { return uint64(word_of(x)) << 32 | ~token; }

// The score of a sort key, and its token.
__device__ inline float score_of(uint64 key) { return score_of_word(unsigned(key >> 32)); }
__device__ inline unsigned token_of(uint64 key) { return ~unsigned(key); }

// The least score whose distance from the largest is at least `least`, which is at most 0.
__device__ inline float least_score(float m, double least) {
    unsigned word = word_of(-LARGEST_FLOAT32);   // all scores below that of `word` are too far away
    const unsigned largest = word_of(fmin(m, LARGEST_FLOAT32));
#pragma unroll 1
    for (unsigned step = 1u << 31; step; step /= 2)
        if (largest - word >= step && exactly_below(score_of_word(word + step - 1), m) < least) word += step;
    return score_of_word(word);
}
