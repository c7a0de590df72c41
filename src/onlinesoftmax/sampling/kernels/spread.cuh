// The scores of a row, counted in bins, and the bin in which their masses reach a goal, nearly.
//
// The first tile of each block sets the bins: `top` is the largest score of these tiles.  Bin 0 has it and the few scores
// above, which a list has too; the others divide the scores from `top` down by equal distances.  The last bin has those
// that are far away, and -inf.

struct Spread {
    unsigned* counts;   // SPREAD of them
    uint64* above;      // sort keys of bin 0, MOST_ABOVE of them
    float scale, shift; // the position of a score among the bins is shift - scale * score

    __device__ inline float position(float x) const { return fma(x, -scale, shift); }

    __device__ inline float score(float position) const { return (shift - position) * width(); }
    __device__ inline float width() const { return 1 / scale; }   // of a bin

    // The bins for rows whose sampled scores are from `least` to `top`, up to the distance `span`.
    __device__ inline void set(float top, float least, float span) {
        // Positions of 2^18 and less are exact enough.
        span = fmax(fmin(span, top - least), fmax(fabs(top) / 128, 1e-30f));
        scale = (SPREAD - 2) / span, shift = top * scale + 0.5f;
        // Without a score in the sample, bin 0 has all.
        if (top == -INF) scale = 1e-38f, shift = 0;
    }

    __device__ inline void add(float position) const {
        atomicAdd(&counts[int(fmax(fmin(position, float(SPREAD - 1)), 0.0f))], 1u);
    }
};

// Two adjacent counts of a block, in one word.
__device__ inline uint64 two_counts(const Spread& spread, int pair, int block) {
    return get_word(reinterpret_cast<const uint64*>(spread.counts) + pair, block);
}
