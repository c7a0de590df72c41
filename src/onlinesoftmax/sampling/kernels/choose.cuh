// A token of a row from the sorted list of its candidates, by block 0.

// What is kept of a row: the tokens whose sort keys, and scores less the largest, are at least these.
struct Kept { uint64 key; double least; };

// A row and its parameters, in shared memory.
struct Row {
    float m, rate, span;     // the largest score; the rate of the masses; the distance behind which they do not count
    double divisor, top_p;   // the temperature, 1 for a greedy row; the mass to keep
    double least;            // the score less the largest that min_p wants
    int64 k;                 // the number of tokens that top_k keeps; 0 for all
    uint64 seed, offset;
    int wanted;              // how many of the largest keys the lists must have
    bool first, greedy;      // `first` as in Sampling
    bool by_mass;            // all tokens may be kept: their masses have to be added
    bool fits, valid;        // `wanted` fits a list; the row has a distribution

    __device__ inline bool keeps(uint64 its, Kept kept) const {
        const float x = score_of(its);
        return its >= kept.key && below(x, m) > -INF && exactly_below(x, m) >= kept.least;
    }
    __device__ inline uint64 mass(uint64 its) const { return mass_of(below(score_of(its), m), rate); }
    // The mass that top_p keeps of a total.
    __device__ inline uint64 goal(uint64 total) const {
        const double wanted = ceil(top_p * double(int64(total)));
        return wanted < 1 ? 1 : min(uint64(wanted), total);
    }
    // The least key that is kept with this one: tokens with its score stay unless the first are wanted.
    __device__ inline uint64 with_ties(uint64 its) const { return first ? its : its >> 32 << 32; }
};

// What was sampled: masses of the kept tokens, and of all at the temperature 1; how many are kept; the largest sum of
// score and noise, in the order of integers, and the sort key of its token.
struct Outcome { uint64 mass, raw, kept, sum, winner; };

// What is kept of a row and what was sampled, in shared memory.
struct Result { Kept kept; Outcome outcome; };

__device__ inline void merge_outcomes(uint64 (&to)[5], const uint64* other) {
    to[0] += other[0], to[1] += other[1], to[2] += other[2];
    if (other[3] > to[3] || (other[3] == to[3] && unsigned(other[4]) > unsigned(to[4]))) to[3] = other[3], to[4] = other[4];
}

// The sum of score, less the largest, and noise.
__device__ inline double sum_of(const Row& row, uint64 key) {
    const double z = exactly_below(score_of(key), row.m);
    return row.greedy ? z : z + row.divisor * gumbel(token_of(key), row.offset, row.seed);
}

// The key of a sorted list at which the running sum of the masses, from `before` on, reaches the goal: that of all masses
// of the list if it is 0.
__device__ inline uint64 key_at_mass(
    const Row& row, Slice& slice, const uint64* list, int count, Kept kept, uint64 before, uint64 goal
) {
#pragma unroll 1
    for (bool again = true; again;) {
        again = !goal;
        uint64 sum = before;
#pragma unroll 1
        for (int first = 0; first < count; first += THREADS) {
            const int i = first + threadIdx.x;
            const uint64 own = i < count && row.keeps(list[i], kept) ? row.mass(list[i]) : 0;
            uint64 total;
            const uint64 above = sum + slice.scan(own, total);
            if (above < goal && above + own >= goal) slice.exchange->found[0] = list[i];
            sum += total;
        }
        if (again) goal = row.goal(sum);
    }
    __syncthreads();
    return slice.exchange->found[0];
}

// The outcome of a row of which a sorted list has all tokens that top_k keeps; narrows what is kept.
__device__ inline Outcome choose(const Row& row, Slice& slice, const uint64* list, int count, Kept& kept) {
    if (row.greedy) return {uint64(1) << MASS_BITS, 0, 1, 0, list[0]};
    if (row.k && row.k <= count) kept.key = row.with_ties(list[row.k - 1]);
    if (row.top_p < 1) kept.key = max(kept.key, row.with_ties(key_at_mass(row, slice, list, count, kept, 0, 0)));
    kept.least = row.least;
    uint64 sums[5] = {0, 0, 0, 0, 0};
    Best best{-INF, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const uint64 key = list[i];
        if (!row.keeps(key, kept)) continue;
        sums[0] += row.mass(key), ++sums[2];
        best.take(sum_of(row, key), key);
    }
    sums[3] = ordered(best.sum), sums[4] = best.key;
    slice.merge_threads(sums, merge_outcomes);
    return {sums[0], 0, sums[2], sums[3], sums[4]};
}
