// A token of a row without top_k: the masses of all tokens are added, and a list has the tokens between two scores, of
// which one is the threshold of top_p.
//
// The counts of spread.cuh say where that is, nearly.  The sums are exact, and show whether it is there; if not, the
// window is moved.

// Keys in the list of the tokens between the scores, and in that of the tokens that may win.
constexpr int MOST_BETWEEN = 2048, MOST_RIVALS = 1024;

// Scores: a token from `high` on is kept, and one below `low` is not.
struct Window { float high, low; };

// About exp(RIVALS) tokens have a sum of score and noise above the logarithm of all masses, less RIVALS; that there is
// none has a probability of 10^-8.  The factor of chances has 0.1 % for rounding.
constexpr float RIVALS = 2.9f, EXP_RIVALS = 18.193f;

// The bin in which the masses of a row reach the goal of top_p, nearly, and the mass that is kept, nearly.
struct Estimate { int bin; uint64 mass; };

__device__ inline Estimate estimate(const Row& row, Slice& slice, const Spread& spread, float x_least) {
    constexpr int PAIRS = SPREAD / 2 / THREADS;
    const int thread = threadIdx.x;
    Exchange& exchange = *slice.exchange;
    uint64 bins[2 * PAIRS], sum[2] = {0, 0};   // sums: of bin 0, and of what min_p keeps
    unsigned counts[2 * PAIRS] = {};
#pragma unroll 1
    for (int block = 0; block < CLUSTER; ++block)
#pragma unroll
        for (int i = 0; i < PAIRS; ++i) {
            const uint64 two = two_counts(spread, thread * PAIRS + i, block);
            counts[2 * i] += unsigned(two), counts[2 * i + 1] += unsigned(two >> 32);
        }
#pragma unroll 1
    for (int block = 0; block < CLUSTER; ++block) {
        const int above = int(exchange.blocks[slice.buffer ^ 1][block][3]);
#pragma unroll 1
        for (int i = thread; i < above; i += THREADS) {
            const float x = score_of(get_word(&spread.above[i], block));
            const uint64 mass = mass_of(below(x, row.m), row.rate);
            sum[0] += mass, sum[1] += x >= x_least ? mass : 0;
        }
    }
    uint64 own = 0;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
        const int bin = thread * 2 * PAIRS + i;
        const float x = spread.score(bin + 0.5f);
        bins[i] = bin ? __float2ull_rn(counts[i] * raw_mass(fmin(x - row.m, 0.0f), row.rate)) : 0;
        own += bins[i], sum[1] += x >= x_least ? bins[i] : 0;
    }
    slice.merge_threads(sum, [](uint64 (&to)[2], const uint64* other) { to[0] += other[0], to[1] += other[1]; });
    if (thread == 0) bins[0] = sum[0], own += sum[0];
    uint64 total, before = slice.scan(own, total);
    const uint64 goal = row.goal(max(total, uint64(1)));
    if (thread == 0) exchange.found[0] = SPREAD - 1;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) {
        if (before < goal && before + bins[i] >= goal) exchange.found[0] = thread * 2 * PAIRS + i;
        before += bins[i];
    }
    __syncthreads();
    const uint64 mass = min(row.top_p < 1 ? goal : total, sum[1]);
    return {int(exchange.found[0]), max(mass, uint64(1) << MASS_BITS)};
}

// The sums of a pass: masses of all tokens, of those above the window, and of those in it; the number of those above it.
enum { TOTAL, ABOVE, BETWEEN, NUMBER, LISTED, PASS_WORDS };

// The same of all blocks; the lengths of the lists, and the keys of the blocks before this one.
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
                else if (x >= window.low) sums[BETWEEN] += whole, listed |= 1u << j;
            }
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
                const uint64 key = key_of(wide(slice.x[i + group + j]), token + j);
                if (listed >> j & 1) {
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

// The outcome of a row, in block 0; false where its candidates do not fit the lists.
__device__ inline bool choose_by_mass(
    const Row& row, Slice& slice, const Spread& spread, uint64* list, Board* board, Found& found, Kept& kept, Outcome& outcome
) {
    uint64 *const between = list + FEW, *const rivals = between + MOST_BETWEEN;
    // The masses need no care for scores that differ by more than a float32 number can.
    if (row.m == INF || row.m - -LARGEST_FLOAT32 == INF || row.rate < 1e-30f) return false;
    const float least = row.least == -INF ? -LARGEST_FLOAT32 : least_score(row.m, row.least);
    const Estimate near = estimate(row, slice, spread, least);
    const bool cuts = row.top_p < 1;
    Window window{INF, -INF};
    if (near.bin) window.high = spread.score(near.bin - 0.25f);
    window = {fmax(window.high, least), fmax(spread.score(near.bin + 1.25f), least)};
    if (!cuts) window = {least, least};
    const float limit = EXP_RIVALS / float(int64(near.mass));
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
        outcome = finish(row, slice, found, reached, between, rivals, kept);
        // Tokens that are not among the rivals have smaller sums than this.
        if (threadIdx.x == 0) {
            const double bound = row.divisor * (natural_log(double(int64(near.mass))) - MASS_BITS * LOG_2 - RIVALS);
            failed[0] = outcome.sum < ordered(bound);
        }
    }
    bool fails = false;
    slice.share(failed, [&](const uint64* of_block, int) { fails |= of_block[0] != 0; });
    return !fails;
}
