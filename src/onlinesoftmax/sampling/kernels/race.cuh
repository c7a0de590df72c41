// Sums of powers of two, and the keys of tokens, for unfiltered.cuh.
//
// The key of a token is e / E: e is the power of its logit, E = -log(u) its noise.  It is in the order of the logit divided
// by the temperature with Gumbel's noise, -log(E), and needs no logarithm where 1 - u, which is at most E, is too large.

// A sum of 2^(z * rate), in units of 2^n.
struct Powers {
    float rate, n;
    double total;   // a step is added up in float32

    __device__ inline float of(float z) const { return power_of_two(fma(z, rate, -n)); }
    // Chooses n for logits up to `peak`, and converts the sum.  Returns false for a peak whose exponent float32 rounds.
    __device__ inline bool choose_unit(float peak) {
        const float to = nearest(peak * rate);
        if (to == INF) return false;
        total *= exact_power(fmin(n - to, 127.0f)), n = to;
        return true;
    }
    // The nearest whole number, INF for one that float32 would not add exactly.
    static constexpr float MOST = 4194304;
    __device__ static inline float nearest(float y) {
        return fabs(y) < MOST ? __fadd_rn(__fadd_rn(y, 3 * MOST), -3 * MOST) : INF;
    }
};

// A thread whose terms of a step add up to more than this chooses a new n before it adds them.
constexpr float LARGE = 128;

// The integer key of a quotient e / E, above 0 and in units of 2^n: its base-2 logarithm, linear between powers of two,
// in units of 2^-23.  Keys with different n can be compared.
constexpr int64 KEY_OF_ONE = int64(1) << 62;
__device__ inline uint64 race_key(float key, float n) {
    return uint64(KEY_OF_ONE + int64(int(n)) * (1 << 23) + __float_as_int(key));
}
// The reciprocal of a key, plus 0.1 % for rounding: a token reaches the key only if e * limit is at least 1 - u.
__device__ inline float limit_of(uint64 key, float n) {
    const int64 bits = int64(key) - KEY_OF_ONE - int64(int(n)) * (1 << 23);
    if (!key || bits <= 0) return INF;
    return bits >= 254 << 23 ? 0 : 1.001f * reciprocal(__int_as_float(int(bits)));
}
// Keys that differ by less, 6e-5 of e / E, are compared exactly: the error of e / E is up to 1e-5.
constexpr uint64 CLOSE = 512;
