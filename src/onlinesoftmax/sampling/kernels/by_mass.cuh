// A token of a row without top_k: the masses of all tokens are added, and a list has the tokens between two scores, of
// which one is the threshold of top_p.
//
// The counts of spread.cuh say where that is, nearly.  The sums are exact, and show whether it is there; if not, the
// window is moved.

// Keys in the list of the tokens between the scores, and in that of the tokens that may win.
constexpr int MOST_BETWEEN = 2048, MOST_RIVALS = 1024;
static_assert(MOST_BETWEEN + MOST_RIVALS <= CAPACITY - FEW, "both stand behind the list");
static_assert(MOST_ABOVE <= THREADS, "each thread reads one key of bin 0");

// Part of a bin that the window takes on both sides, for the errors of the estimate.
constexpr float MARGIN = 0.125f;

// Scores: a token from `high` on is kept, and one below `low` is not.
struct Window { float high, low; };

// About exp(RIVALS) tokens have a sum of score and noise above the logarithm of all masses, less RIVALS; that there is
// none has a probability of 10^-8.  The factor of chances has 0.1 % for rounding.
constexpr float RIVALS = 2.9f, EXP_RIVALS = 18.193f;

// The bin in which the masses of a row reach the goal of top_p, nearly, and the mass that is kept, nearly, in units of
// the largest.  All blocks compute the same.
struct Estimate { int bin; float mass; };

__device__ inline Estimate estimate(const Row& row, Slice& slice, const Spread& spread, Board* board, float least) {
    constexpr int OWN = SPREAD / THREADS;
    const int thread = threadIdx.x;
    Exchange& exchange = *slice.exchange;
    if (thread == 0) exchange.found[0] = 0, board->peak = 0;
    __syncthreads();
    unsigned counts[OWN] = {};
#pragma unroll 1
    for (int block = 0; block < CLUSTER; ++block) {
#pragma unroll
        for (int i = 0; i < OWN; i += 2) {
            const uint64 two = two_counts(spread, (thread * OWN + i) / 2, block);
            counts[i] += unsigned(two), counts[i + 1] += unsigned(two >> 32);
        }
        // Sums of whole numbers are the same in all blocks.
        const int above = int(exchange.blocks[slice.buffer ^ 1][block][3]);
        if (thread < above)
            atomicAdd(&exchange.found[0], mass_of(below(score_of(get_word(&spread.above[thread], block)), row.m), row.rate));
    }
    __syncthreads();
    float bins[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float z = fmin(spread.score(thread * OWN + i + 0.5f) - row.m, 0.0f);
        bins[i] = counts[i] * exp2f(z * row.rate);
        if (thread + i == 0) bins[i] = float(int64(exchange.found[0])) / (uint64(1) << MASS_BITS);
        if (thread * OWN + i == SPREAD - 1) bins[i] = 0;
        own += bins[i];
    }
    float total;
    const float before = slice.scan(own, total);
    const float goal = float(row.top_p) * total;
    // The bins in which the goal, and the least score of min_p, are: the last with less before them.
    int bin = -1;
    float sum = before;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (sum < goal) bin = thread * OWN + i;
        if (thread * OWN + i == int(fmax(fmin(spread.position(least), SPREAD - 1.0f), 0.0f))) exchange.found[1] = __float_as_uint(sum);
        sum += bins[i];
    }
    raise(&board->peak, unsigned(bin + 1));
    __syncthreads();
    const float mass = fmin(fmin(goal, total), __uint_as_float(unsigned(exchange.found[1])));
    return {max(int(board->peak) - 1, 0), fmax(mass, 1.0f)};
}

// The sums of a pass: masses of all tokens, of those above the window, and of those in it; the number of those above it.
enum { TOTAL, ABOVE, BETWEEN, NUMBER, LISTED, PASS_WORDS };

// The sums of all blocks, and the mass that top_p keeps; the lengths of both lists, in all blocks and in those before this.
struct Found {
    uint64 sums[PASS_WORDS], goal;
    unsigned between, rivals, between_before, rivals_before;
};

// One pass over the slice, which lists the tokens in the window, and those that may win.
__device__ inline void pass(
    const Row& row, const Slice& slice, Window window, float limit, uint64* between, uint64* rivals, Board* board,
    uint64 (&sums)[PASS_WORDS]
) {
    const float m = row.m, rate = row.rate;
    const uint64 seed = row.seed, offset = row.offset;
    unsigned number = 0;
    Chunk<X, VECTOR> now, next;
    slice.fetch(next, threadIdx.x * VECTOR);
#pragma unroll 1
    for (int i = threadIdx.x * VECTOR; i < slice.count; i += THREADS * VECTOR) {
        now = next;
        slice.fetch(next, i + THREADS * VECTOR);
        slice.complete(now, i);
#pragma unroll
        for (int group = 0; group < VECTOR; group += 4) {
            const unsigned token = unsigned(slice.begin + i + group);
            float chance[4];
            unsigned listed = 0, kept = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float x = wide(now, group + j), mass = raw_mass(__fadd_rn(x, -m), rate);
                const uint64 whole = __float2ull_rn(mass);
                sums[TOTAL] += whole, chance[j] = mass * limit;
                if (x >= window.high) sums[ABOVE] += whole, kept |= 1u << j;
                if (x >= window.low) listed |= 1u << j;
            }
            listed &= ~kept;
            if (!(kept | listed)) continue;
            number += __popc(kept);
            const Words words = philox(token / 4, offset, seed);
            unsigned won = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                // 1 - u is below -log(u), so a token wins only if 1 - u is below exp(score - sum).
                won |= unsigned(__uint_as_float(0x3f800000u | ~words.of[j] >> 9) <= 1 + chance[j]) << j;
            won &= kept | listed;
#pragma unroll 1
            for (unsigned left = won | listed; left; left &= left - 1) {
                const int j = __ffs(left) - 1;
                const float x = wide(slice.x[i + group + j]);   // the registers cannot be indexed
                const uint64 key = key_of(x, token + j);
                if (listed >> j & 1) {
                    sums[BETWEEN] += mass_of(__fadd_rn(x, -m), rate);
                    const unsigned at = atomicAdd(&board->counts[0], 1u);
                    if (at < MOST_BETWEEN) between[at] = key;
                }
                if (won >> j & 1) {
                    const unsigned at = atomicAdd(&board->counts[1], 1u);
                    if (at < MOST_RIVALS) rivals[at] = key;
                }
            }
        }
    }
    sums[NUMBER] = number;
}

// One pass of all blocks.
__device__ inline void pass_together(
    const Row& row, Slice& slice, Window window, float limit, uint64* between, uint64* rivals, Board* board, Found& found
) {
    if (threadIdx.x < 2) board->counts[threadIdx.x] = 0;
    __syncthreads();
    uint64 sums[PASS_WORDS] = {};
    pass(row, slice, window, limit, between, rivals, board, sums);
    slice.merge_threads(sums, [](uint64 (&to)[PASS_WORDS], const uint64* other) {
#pragma unroll
        for (int i = 0; i < PASS_WORDS; ++i) to[i] += other[i];
    });
    sums[LISTED] = uint64(board->counts[0]) << 32 | board->counts[1];
    uint64 total[PASS_WORDS] = {}, before = 0;
    slice.share(sums, [&](const uint64* of_block, int block) {
        before = block == slice.rank ? total[LISTED] : before;
#pragma unroll
        for (int i = 0; i < PASS_WORDS; ++i) total[i] += of_block[i];
    });
    if (threadIdx.x == 0) {
#pragma unroll
        for (int i = 0; i < PASS_WORDS; ++i) found.sums[i] = total[i];
        found.goal = row.goal(total[TOTAL]);
        found.between = unsigned(total[LISTED] >> 32), found.rivals = unsigned(total[LISTED]);
        found.between_before = unsigned(before >> 32), found.rivals_before = unsigned(before);
    }
    __syncthreads();
}

// The outcome in block 0, whose lists have the tokens of all blocks, and what is kept.
__device__ inline Outcome finish(
    const Row& row, Slice& slice, const Found& found, bool cuts, uint64* between, const uint64* rivals, Kept& kept
) {
    const int count = int(found.between);
    if (cuts) {
        sort(between, count);
        kept.key = row.with_ties(key_at_mass(row, slice, between, count, kept, found.sums[ABOVE], found.goal));
    }
    kept.least = row.least;
    uint64 sums[5] = {0, 0, 0, 0, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS)
        if (row.keeps(between[i], kept)) sums[0] += row.mass(between[i]), ++sums[2];
    Best best{-INF, 0};
#pragma unroll 1
    for (int i = threadIdx.x; i < found.rivals; i += THREADS)
        if (row.keeps(rivals[i], kept)) best.take(sum_of(row, rivals[i]), rivals[i]);
    sums[3] = ordered(best.sum), sums[4] = best.key;
    slice.merge_threads(sums, merge_outcomes);
    return {sums[0] + found.sums[ABOVE], 0, sums[2] + found.sums[NUMBER], sums[3], sums[4]};
}

// The outcome of a row, in block 0, in shared memory; false where its candidates do not fit the lists.
__device__ inline bool choose_by_mass(
    const Row& row, Slice& slice, const Spread& spread, uint64* list, Board* board, Found& found, Result& result
) {
    uint64 *const between = list + FEW, *const rivals = between + MOST_BETWEEN;
    // The masses need no care for scores that differ by more than a float32 number can.
    if (row.m == INF || row.m - -LARGEST_FLOAT32 == INF || row.rate < 1e-30f) return false;
    const float least = row.least == -INF ? -LARGEST_FLOAT32 : least_score(row.m, row.least);
    const Estimate near = estimate(row, slice, spread, board, least);
    const bool cuts = row.top_p < 1;
    Window window{INF, -INF};
    if (near.bin > 0) window.high = spread.score(near.bin - MARGIN);
    window = {fmax(window.high, least), fmax(spread.score(near.bin + 1 + MARGIN), least)};
    if (!cuts) window = {least, least};
    const float limit = EXP_RIVALS / (uint64(1) << MASS_BITS) / near.mass;
    bool reached = false;   // the goal of top_p
#pragma unroll 1
    for (int turn = 0; turn < 4; ++turn) {
        pass_together(row, slice, window, limit, between, rivals, board, found);
        const bool low = cuts && found.sums[ABOVE] >= found.goal;
        reached = cuts && found.sums[ABOVE] + found.sums[BETWEEN] >= found.goal;
        // Where min_p keeps less than top_p, the goal is not reached.
        if (!low && (reached || window.low == least)) break;
        if (turn == 3) return false;
        const float width = spread.width() * (2 * turn + 2);
        window = low ? Window{window.high + width, window.high} : Window{window.low, fmax(window.low - width, least)};
    }
    if (found.rivals > MOST_RIVALS || found.between > MOST_BETWEEN) return false;
    gather(slice, between, board->counts[0], found.between_before);
    gather(slice, rivals, board->counts[1], found.rivals_before);
    wait_for_cluster();
    uint64 failed[] = {0};
    if (slice.rank == 0) {
        Kept kept{0, -INF};
        const Outcome outcome = finish(row, slice, found, reached, between, rivals, kept);
        if (threadIdx.x == 0) result.kept = kept, result.outcome = outcome;
        // Tokens that are not among the rivals have smaller sums than this.
        failed[0] = outcome.sum < ordered(row.divisor * (natural_log(near.mass) - RIVALS));
    }
    bool fails = false;
    slice.share(failed, [&](const uint64* of_block, int) { fails |= of_block[0] != 0; });
    return !fails;
}
