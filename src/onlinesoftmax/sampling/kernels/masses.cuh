// The mass of a score, as masses.py defines it, bit for bit.

// x * 2^(32 - bits), rounded down; 0 from 64 bits on, and for a negative number of bits, which is huge as an unsigned one.
__device__ inline uint64 shifted(unsigned x, unsigned bits) {
    uint64 y; asm("{\n\t.reg .b64 both;\n\tmov.b64 both, {0, %1};\n\tshr.u64 %0, both, %2;\n\t}" : "=l"(y) : "r"(x), "r"(bits));
    return y;
}

// 2^(g - 1) in units of 2^-FRACTION_BITS; g is from 1 to 2.
__device__ inline unsigned mantissa_of(float g) {
    constexpr float of[] = {POWER_0, POWER_1, POWER_2, POWER_3, POWER_4, POWER_5};
    float power = of[5];
#pragma unroll
    for (int i = 4; i >= 0; --i) power = fma(power, g, of[i]);
    // The bits of a number from 1 to 2, less those of 1/2: 1 becomes 2^23, and 2 becomes 2^24.
    static_assert(FRACTION_BITS == 23, "those of float32");
    return __float_as_uint(power) - 0x3f000000;
}

// The octave of a score is the whole part of its product with the rate.  These are the `bits` of shifted that give the mass
// of a score in the octave of the largest one.
constexpr int RIGHT = 32 - (MASS_BITS - FRACTION_BITS);

// The sum of WHOLE and a number y up to NEAR is a whole number in float32: its bits, less those of WHOLE, are a rounded y.
constexpr float WHOLE = 12582912.0f, NEAR = 2097152.0f;   // 1.5 * 2^23, 2^21
// x * rate + WHOLE, rounded down.
__device__ inline float plus_whole(float x, float rate) { return __fmaf_rd(x, rate, WHOLE); }

// Functions that most calls do not need.  The assembler sorts functions by name, and these come last, because code near the
// beginning of a kernel arrives sooner (docs/sampling_kernels.md).
namespace rare {
// The octave of a score, in float64, which holds the product.
__device__ inline double octave_of(float x, float rate) { return floor(double(x) * rate); }

// The mass of a score where its product with the rate, or that of the largest, is not below NEAR; 0 for NaN.
__device__ __noinline__ uint64 mass_of_far(float x, float m, float rate) {
    const double y = double(x) * rate, octave = octave_of(x, rate), octaves = x == m ? 0 : octave_of(m, rate) - octave;
    const double fraction = fabs(y) < INF ? rounded((y - octave) * (1 << FRACTION_BITS)) : 0;
    const unsigned mantissa = mantissa_of(float(1 + fraction * (1.0 / (1 << FRACTION_BITS))));
    return octaves < 64 ? shifted(mantissa, RIGHT + int(octaves)) : 0;
}
}

// The mass of a score whose product with the rate is below NEAR; `right` is RIGHT plus the bits of plus_whole(m, rate).
__device__ inline uint64 mass_of_near(float x, float rate, unsigned right) {
    const float y = plus_whole(x, rate);
    // The sum is from 1 to 2, both included, where float32 numbers are multiples of 2^-23.
    const unsigned mantissa = mantissa_of(fma(x, rate, (WHOLE + 1) - y));
    // A sum far below WHOLE has bits that differ so much that the mass is 0.
    return shifted(mantissa, right - __float_as_uint(y));
}

// The mass of a score in a row with the largest score m.
__device__ inline uint64 mass_of(float x, float m, float rate) {
    if (!(fabs(x * rate) < NEAR && fabs(m * rate) < NEAR)) return rare::mass_of_far(x, m, rate);
    return mass_of_near(x, rate, RIGHT + __float_as_uint(plus_whole(m, rate)));
}

// A mass, over the mass of the largest token.
__device__ inline double over_largest(uint64 mass, float m, float rate) {
    return double(int64(mass)) / double(int64(mass_of(m, m, rate)));
}
