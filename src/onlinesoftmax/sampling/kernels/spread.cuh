// The scores of a row, counted in bins, and the bin in which their masses reach a goal, nearly.
//
// The first tile of each block sets the bins: `top` is the largest score of these tiles.  Bin 0 has it and the few scores
// above, which a list has too; the others divide the scores from `top` down by equal distances.  The last bin has those
// that are far away, and -inf.

// Masses of some tokens, as float32 has them: the largest score, -inf for no token, and their sum over that score's mass.
struct Masses {
    float peak, sum;

    // Both in one word, which is never 0; of_word takes 0 for no token.
    __device__ inline uint64 word() const { return uint64(word_of(peak)) << 32 | __float_as_uint(sum); }
    __device__ static inline Masses of_word(uint64 word) {
        return {word ? score_of_word(unsigned(word >> 32)) : -INF, __uint_as_float(unsigned(word))};
    }
    // Those of all lanes together, for each of them.
    __device__ inline Masses of_lanes(float rate) const {
        const float largest = score_of_word(__reduce_max_sync(~0u, word_of(peak)));
        return {largest, add_lanes(peak > -INF ? sum * power_of_two((peak - largest) * rate) : 0)};
    }
};

struct Spread {
    unsigned* counts;   // SPREAD of them
    uint64* above;      // sort keys of bin 0, MOST_ABOVE of them
    float scale, shift; // a score has the part shift - scale * score of all bins before it, and half of a bin less
    float edge;         // a score in bin 0 reaches it

    // A float whose bits, less those of FIRST, are the number of the score's bin.  The sum is rounded to UNIT.  Four times the
    // bits of FIRST are 0 in 32 bits, so that an address needs no subtraction.
    static constexpr float FIRST = 2, UNIT = 0x1p-22f;
    __device__ inline float bin(float x) const { return fma(__saturatef(fma(x, -scale, shift)), UNIT * (SPREAD - 1), FIRST); }

    // The score at a position: b is the upper edge of bin b, and b + 1/2 its middle.
    __device__ inline float score(float position) const {
        return (shift - (position - 0.5f) * (1.0f / (SPREAD - 1))) * reciprocal(scale);
    }

    // The bins for rows whose sampled scores are from `least` to `top`, up to the distance `span`.
    __device__ inline void set(float top, float least, float span) {
        // Positions of 2^18 and less are exact enough.
        span = fmax(fmin(span, top - least), fmax(fabs(top) / 128, 1e-30f));
        scale = float(SPREAD - 2) / (SPREAD - 1) * reciprocal(span), shift = top * scale;
        // Without a score in the sample, bin 0 has all scores of usual size.
        if (top == -INF) scale = 1e-38f, shift = 0;
        edge = score(1 + 1.0f / 8);
    }

    // Counts a score, or NaN in bin 0.
    __device__ inline void add(float x) const { atomicAdd(counts - __float_as_int(FIRST) + __float_as_int(bin(x)), 1u); }
};
