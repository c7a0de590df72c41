// The noise of a token, as formulas.py makes it, and the token with the largest key.

// A product as its two halves: in this form, the compiler multiplies once and moves nothing.
__device__ inline void multiply(unsigned& low, unsigned& high, unsigned a, unsigned b) {
    asm("{\n\t.reg .b64 both;\n\tmul.wide.u32 both, %2, %3;\n\tmov.b64 {%0, %1}, both;\n\t}"
        : "=r"(low), "=r"(high) : "r"(a), "r"(b));
}

// The generator in philox.py.
struct Generator {
    unsigned a, b, c, d, low, high;

    __device__ inline void turn() {
        unsigned upper_a, lower_a, upper_c, lower_c;
        multiply(lower_a, upper_a, a, 0xD2511F53u), multiply(lower_c, upper_c, c, 0xCD9E8D57u);
        a = upper_c ^ b ^ low, b = lower_c, c = upper_a ^ d ^ high, d = lower_a;
        low += 0x9E3779B9u, high += 0xBB67AE85u;
    }
};

// Its four words for four adjacent tokens; a stream is one use of the noise.  `BRIEF` is for callers that draw once: its rounds
// are a loop, because instructions take longer to come from memory than to run.
struct Words { unsigned of[4]; };
template <bool BRIEF = false>
__device__ inline Words philox(unsigned block, uint64 offset, uint64 seed, unsigned stream = 0) {
    Generator g{block, unsigned(offset), unsigned(offset >> 32), stream, unsigned(seed), unsigned(seed >> 32)};
    if constexpr (BRIEF) {
#pragma unroll 1
        for (int i = 0; i < ROUNDS; ++i) g.turn();
    } else {
#pragma unroll
        for (int i = 0; i < ROUNDS; ++i) g.turn();
    }
    return {{g.a, g.b, g.c, g.d}};
}

// Fast functions of float32 numbers.
__device__ inline float log_of_two(float y) {
    float z; asm("lg2.approx.f32 %0, %1;" : "=f"(z) : "f"(y)); return z;
}
__device__ inline float reciprocal(float y) {
    float z; asm("rcp.approx.f32 %0, %1;" : "=f"(z) : "f"(y)); return z;
}

// -log(u) for the uniform number u of random bits, with a relative error of 4e-6.
__device__ inline float exponential(unsigned bits) {
    const float above = fma(float(~bits), 0x1p-32f, 0x1p-33f), u = fma(float(bits), 0x1p-32f, 0x1p-33f);
    const float series = above * fma(above, fma(above, fma(above, fma(above, 0.2f, 0.25f), 0.33333333f), 0.5f), 1.0f);
    return above < 0.0625f ? series : -float(LOG_2) * log_of_two(u);
}

// log(sum * 2^n) with an error of 1e-7, in float32: the whole block would wait for a logarithm in float64.
__device__ inline double log_of(double sum, int n) {
    const int exponent = int(__double_as_longlong(sum) >> 52) - 1023;
    const float fraction = float(sum * __longlong_as_double(int64(1023 - exponent) << 52));
    return double(log(fraction)) + double(n + exponent) * LOG_2;
}

// One copy of the logarithm: instructions have to come from memory too.
__device__ __noinline__ double natural_log(double x) { return log(x); }

__device__ inline double uniform(unsigned bits) { return (bits + 0.5) * (1.0 / 4294967296.0); }

__device__ inline double gumbel(unsigned bits) {
    const double bound = -natural_log(uniform(bits));
    return rounded(-natural_log(bound) * 16777216.0) * (1.0 / 16777216.0);
}

// Doubles in the order of integers, above 0; and the double of such an integer, -INF of 0.
__device__ inline uint64 ordered(double x) {
    const uint64 bits = __double_as_longlong(x + 0.0);
    return int64(bits) < 0 ? ~bits : bits | uint64(1) << 63;
}
__device__ inline double number_of(uint64 ordered) {
    return ordered ? __longlong_as_double(ordered >> 63 ? ordered ^ uint64(1) << 63 : ~ordered) : -INF;
}

// The token with the largest sum of score and noise so far; of equal sums, the lower token id.
struct Best {
    double sum;
    uint64 key;   // sort key of the token; 0 without one
    // Returns true where the other token wins.
    __device__ inline bool take(double other, uint64 its) {
        const bool wins = other > sum || (other == sum && unsigned(its) > unsigned(key));
        if (wins) sum = other, key = its;
        return wins;
    }
};

// The same of an ordered sum and a key.
__device__ inline void merge_best(uint64 (&to)[2], const uint64* other) {
    if (other[0] > to[0] || (other[0] == to[0] && unsigned(other[1]) > unsigned(to[1]))) to[0] = other[0], to[1] = other[1];
}

// The random bits, and the noise, of one token.
__device__ inline unsigned bits_of(unsigned token, uint64 offset, uint64 seed, unsigned stream = 0) {
    const Words words = philox<true>(token / 4, offset, seed, stream);
    const unsigned low = token & 1 ? words.of[1] : words.of[0], high = token & 1 ? words.of[3] : words.of[2];
    return token & 2 ? high : low;
}
__device__ __noinline__ double gumbel(unsigned token, uint64 offset, uint64 seed) {
    return gumbel(bits_of(token, offset, seed));
}

// The largest 64-bit number of the lanes.
__device__ inline uint64 largest_of_lanes(uint64 x) {
    const unsigned high = __reduce_max_sync(~0u, unsigned(x >> 32));
    const unsigned low = __reduce_max_sync(~0u, unsigned(x >> 32) == high ? unsigned(x) : 0u);
    return uint64(high) << 32 | low;
}

// The winner among tokens by float32 numbers: the base-2 logarithms of mass and noise together.
struct Winner {
    unsigned word, second;   // those of the largest and of the second one, as word_of has them; 0 for none
    uint64 key;              // the sort key of the largest one's token

    __device__ inline void take(unsigned its, uint64 its_key) {
        second = max(second, min(word, its));
        if (its > word) word = its, key = its_key;
    }
    // The winner of all lanes, for each of them.
    __device__ inline Winner of_lanes() const {
        const unsigned largest = __reduce_max_sync(~0u, word);
        const unsigned token = __reduce_max_sync(~0u, word == largest ? unsigned(key) : 0u);
        const bool wins = word == largest && unsigned(key) == token;
        const unsigned score = __reduce_max_sync(~0u, wins ? unsigned(key >> 32) : 0u);
        return {largest, __reduce_max_sync(~0u, wins ? second : word), uint64(score) << 32 | token};
    }
    // The errors of both numbers together are smaller than this, for tokens with a chance.
    static constexpr float ERROR = 1e-4f;
    __device__ inline float sum() const { return word ? score_of_word(word) : -INF; }
    __device__ inline bool certain() const { return word && (!second || sum() - score_of_word(second) > ERROR); }
};

// The noise that a score z, less the largest, needs to reach a key, less a bound of the rounding errors.  All noise is
// below NOISE_BOUND.
constexpr float NOISE_BOUND = 23;
__device__ inline float missing_noise(float key, float z, float temperature) {
    if (key == -INF) return -INF;
    const float bound = fmin(key, LARGEST_FLOAT32);
    const float missing = (bound - z) / temperature - (1e-3f + 1e-6f * (fabs(bound) + fabs(z)) / temperature);
    return missing == missing ? missing : -INF;
}

// Loads a word of shared memory that other threads may be changing.
__device__ inline uint64 look_shared(const uint64* from) {
    uint64 word;
    asm volatile("ld.relaxed.cta.shared.b64 %0, [%1];" : "=l"(word) : "r"(unsigned(__cvta_generic_to_shared(from))));
    return word;
}
__device__ inline unsigned look_shared(const unsigned* from) {
    unsigned word;
    asm volatile("ld.relaxed.cta.shared.b32 %0, [%1];" : "=r"(word) : "r"(unsigned(__cvta_generic_to_shared(from))));
    return word;
}
