// A token of a row from the sorted list of its candidates, by block 0.

// What is kept of a row: the tokens whose sort keys, and scores less the largest, are at least these.
struct Kept { uint64 key; double least; };

// A row and its parameters, in shared memory.
struct Row {
    float m, rate, span;     // the largest score; the rate of the masses; the distance behind which they do not count
    double divisor, top_p;   // the temperature, 1 for a greedy row; the mass to keep
    double least;            // the least difference to the largest score that min_p keeps
    int64 k;                 // the number of tokens that top_k keeps; 0 for all
    uint64 seed, offset;     // one load has both
    double inverse;          // of the divisor
    int wanted;              // how many of the largest keys the lists must have
    bool first, greedy;      // `first` as in Sampling
    bool by_mass;            // all tokens may be kept: their masses have to be added
    bool fits, valid;        // `wanted` fits a list; the row has a distribution

    __device__ inline bool keeps(uint64 its, Kept kept) const {
        const float x = score_of(its);
        return its >= kept.key && below(x, m) > -INF && exactly_below(x, m) >= kept.least;
    }
    __device__ inline uint64 mass(uint64 its) const { return mass_of(score_of(its), m, rate); }
    // The mass that top_p keeps of a total.
    __device__ inline uint64 goal(uint64 total) const {
        const double wanted = ceil(top_p * double(int64(total)));
        return wanted < 1 ? 1 : min(uint64(wanted), total);
    }
    // The least key that is kept with this one: tokens with its score stay unless the first are wanted.
    __device__ inline uint64 with_ties(uint64 its) const { return first ? its : its >> 32 << 32; }
};

// The result of a row: masses of the kept tokens, and of all at the temperature 1; how many are kept; the winner's key.
struct Outcome { uint64 mass, raw, kept, winner; };

// What is kept of a row and what was sampled, in shared memory.
struct Result { Kept kept; Outcome outcome; };

// The sum of score, minus the largest, and noise.
__device__ inline double sum_of(const Row& row, uint64 key) {
    const double z = exactly_below(score_of(key), row.m);
    return row.greedy ? z : z + row.divisor * gumbel(token_of(key), row.offset, row.seed);
}

// The key of a sorted list at which the running sum of the masses, from `before` on, reaches the goal; a goal of 0
// stands for row.goal(the sum of the kept masses).
__device__ inline uint64 key_at_mass(
    const Row& row, Slice slice, const uint64* list, int count, Kept kept, uint64 before, uint64 goal
) {
    bool known = goal;
#pragma unroll 1
    for (bool done = false; !done;) {
        done = known;
        uint64 sum = before;
#pragma unroll 1
        for (int first = 0; first < count; first += THREADS) {
            const int i = first + threadIdx.x;
            const uint64 own = i < count && row.keeps(list[i], kept) ? row.mass(list[i]) : 0;
            uint64 total;
            const uint64 above = sum + slice.scan(own, total);
            sum += total;
            if (!known && count <= THREADS) goal = row.goal(sum), known = done = true;   // each thread still has its key
            if (known && above < goal && above + own >= goal) slice.exchange->found[0] = list[i];
        }
        if (!known) goal = row.goal(sum), known = true;
    }
    __syncthreads();
    return slice.exchange->found[0];
}

// The token of a list that wins among those that are kept, with every rounding of the formula, given to all threads.
namespace rare {
__device__ __noinline__ uint64 exact_winner(const Row& row, Slice slice, const uint64* list, int count, Kept kept) {
    Best best{-INF, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (row.keeps(list[i], kept)) best.take(sum_of(row, list[i]), list[i]);
    uint64 words[] = {ordered(best.sum), best.key};
    slice.merge_threads(words, merge_best);
    return words[1];
}
}

// The masses and the number of the kept keys of a list, and the winner among those of another list, for all threads.
struct Chosen { uint64 mass, number; Winner winner; };
__device__ inline Chosen sum_and_win(
    const Row& row, Slice slice, const uint64* list, int count, const uint64* rivals, int number, Kept kept
) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& of_warps = slice.exchange->of_warps;
    uint64 mass = 0;
    unsigned kept_keys = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (row.keeps(list[i], kept)) mass += row.mass(list[i]), ++kept_keys;
    Winner own{0, 0, 0};
#pragma unroll 1
    for (int i = THREADS - 1 - threadIdx.x; i < number; i += THREADS) {   // beside the warps of the masses
        const uint64 key = rivals[i];
        if (!row.keeps(key, kept)) continue;
        const float noise = -log_of_two(exponential(bits_of(token_of(key), row.offset, row.seed)));
        own.take(word_of(fma(below(score_of(key), row.m), row.rate, noise)), key);
    }
    // The lanes of a warp, and then the warps.
#pragma unroll 1
    for (bool warps = false;; warps = true) {
        own = own.of_lanes(), mass = sum_of_lanes(mass), kept_keys = __reduce_add_sync(~0u, kept_keys);
        if (warps) break;
        if (lane == 0) {
            of_warps[warp][0] = mass, of_warps[warp][1] = kept_keys;
            of_warps[warp][2] = uint64(own.word) << 32 | own.second, of_warps[warp][3] = own.key;
        }
        __syncthreads();
        const uint64* const words = of_warps[lane % WARPS];
        const bool counts = lane < WARPS;   // each warp counts once
        mass = counts ? words[0] : 0, kept_keys = counts ? unsigned(words[1]) : 0;
        own = counts ? Winner{unsigned(words[2] >> 32), unsigned(words[2]), words[3]} : Winner{0, 0, 0};
    }
    __syncthreads();   // before the words of warps are overwritten
    // A product with a smaller rate may be no normal number, which is too rough.
    if (own.word && !(own.certain() && row.rate > 1e-30f)) own.key = rare::exact_winner(row, slice, rivals, number, kept);
    return {mass, kept_keys, own};
}

// The outcome of a row of which a sorted list has all tokens that top_k keeps; narrows what is kept.
__device__ inline Outcome choose(const Row& row, Slice& slice, const uint64* list, int count, Kept& kept) {
    if (row.greedy) return {uint64(1) << MASS_BITS, 0, 1, list[0]};
    if (row.k && row.k <= count) kept.key = row.with_ties(list[row.k - 1]);
    if (row.top_p < 1) kept.key = max(kept.key, row.with_ties(key_at_mass(row, slice, list, count, kept, 0, 0)));
    kept.least = row.least;
    const Chosen chosen = sum_and_win(row, slice, list, count, list, count, kept);
    return {chosen.mass, 0, chosen.number, chosen.winner.key};
}
