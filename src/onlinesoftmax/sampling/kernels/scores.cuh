// What the kernel that samples computes of one score: its mass, and its sort key.
//
// The masses are those of distribution.py, bit for bit: every float32 operation behind them is rounded by itself.

// Above every sort key and every token id.
constexpr uint64 ALL = ~uint64(0);

// The nearest whole number, of two the even one.
__device__ inline float rounded(float y) { return __fadd_rn(__fadd_rn(y, 12582912.0f), -12582912.0f); }
__device__ inline double rounded(double y) { return y + 6755399441055744.0 - 6755399441055744.0; }

// The score less the largest: 0 for the largest itself, which may be infinite; finite for finite scores.
__device__ inline float below(float x, float m) {
    return x == m ? 0 : x == -INF || m == INF ? -INF : fmax(__fadd_rn(x, -m), -LARGEST_FLOAT32);
}

// The score less the largest in float64, which holds the difference of any two finite float32 numbers.
__device__ inline double exactly_below(float x, float m) { return x == m ? 0 : double(x) - double(m); }

// exp(z / temperature) in units of 2^-MASS_BITS, as masses_of in distribution.py.
__device__ inline uint64 mass_of(float z, float rate) {
    float y = __fmul_rn(z, rate);
    y = y > -64 ? y : -64;
    const float n = rounded(y), f = __fadd_rn(y, -n);
    constexpr float of[] = {POWER_0, POWER_1, POWER_2, POWER_3, POWER_4, POWER_5, POWER_6};
    float power = of[6];
#pragma unroll
    for (int i = 5; i >= 0; --i) power = __fadd_rn(__fmul_rn(power, f), of[i]);
    power *= __int_as_float((int(n) + MASS_BITS + 127) << 23);
    // From 2^23 on, a float is a whole number.
    if (power < 8388608) power = __fadd_rn(__fadd_rn(power, 8388608.0f), -8388608.0f);
    return uint64(power);
}

// The sort key of a token: larger for a larger score, and for the lower of two ids with equal scores.
__device__ inline uint64 key_of(float x, unsigned token) {
    const int bits = __float_as_int(x + 0.0f);   // -0 becomes 0
    return uint64(unsigned(bits ^ (bits >> 31 & 0x7fffffff)) ^ 0x80000000u) << 32 | ~token;
}

// The score of a sort key.
__device__ inline float score_of(uint64 key) {
    const int bits = int(unsigned(key >> 32) ^ 0x80000000u);
    return __int_as_float(bits ^ (bits >> 31 & 0x7fffffff));
}
