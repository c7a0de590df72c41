// Samples a token of each row of logits with filters, and lists the largest log-probabilities.
//
// One block:  owns `slice` adjacent tokens of a row; CLUSTER blocks own a row.
// Chosen:     where a filter or the largest log-probabilities are wanted.
// Bytes:      one read of the logits from memory.  A row without top_k is read twice, the second time from the L2.
// Limits:     rows of adjacent float32 or 16-bit logits, without score options; at most 2^23 - 1 tokens (masses.py).
//
// What is kept is what distribution.py keeps, bit for bit: masses are whole numbers, and every float32 operation behind
// them is rounded by itself.  So the order of additions, and the cut of a row, do not matter.
//
// A list holds the tokens that top_k keeps, and those of the largest log-probabilities (candidates.cuh, choose.cuh);
// by_mass.cuh adds the masses of rows without top_k; search.cuh takes the rows whose candidates do not fit the lists.

struct Sampling {
    const X* x;
    const float* temperature; const int64* top_k; const double* top_p; const double* min_p;   // null without the filter
    const int64* seed; const int64* offset;
    int64* token; float* logprob; float* lse; int64* kept; unsigned char* valid;
    int64* top_tokens; float* top_logprobs;
    int64 stride, cols, slice;
    int64 first;   // 1 to keep the lowest ids of the tokens that are equal at a threshold
    int64 raw;     // 1 for log-probabilities of all tokens at the temperature 1
    int64 top;     // number of the largest log-probabilities
};

// Reads the parameters of a row.
__device__ inline void prepare(const Sampling& p, int64 at, Row& row) {
    const float temperature = p.temperature[at];
    const double top_p = p.top_p ? p.top_p[at] : 1, min_p = p.min_p ? p.min_p[at] : 0;
    const int64 k = p.top_k ? p.top_k[at] : 0;
    row.seed = p.seed[at], row.offset = p.offset[at], row.first = p.first;
    row.valid = temperature >= 0 && temperature < INF && top_p == top_p && min_p == min_p;
    row.greedy = temperature == 0;
    row.k = k > 0 && k < p.cols ? k : 0, row.top_p = row.greedy ? 1 : top_p;
    row.divisor = row.greedy || !row.valid ? 1 : double(temperature);
    row.rate = fmin(float(LOG2_E / row.divisor), LARGEST_FLOAT32);
    row.least = row.greedy || !p.min_p ? -INF : row.divisor * natural_log(fmin(fmax(min_p, 0.0), 1.0));
    row.by_mass = !row.greedy && !row.k;
    // Behind this distance, 2^32 tokens have less than 1 - top_p of the mass together.
    row.span = row.by_mass ? float(row.divisor * (LOG_2 * 32 - natural_log(fmax(1 - row.top_p, 1e-9)))) : 0;
    const int64 wanted = max(p.top, row.greedy ? int64(1) : row.k);
    row.fits = wanted <= MOST_CANDIDATES, row.wanted = row.fits ? int(wanted) : 0;
}

// The result of the first pass: whether the lists are complete, and the number of keys in those of all blocks and in those
// of the blocks before this one.
struct Seen { bool fits; uint64 count, offset; };

// Reads the slice: lists the tokens that can be among the wanted ones, counts the scores, and finds the largest.
__device__ inline void first_pass(
    const Sampling& p, Row& row, Slice& slice, Spread& spread, uint64* list, Board* board, Seen& seen
) {
    const int thread = threadIdx.x;
    Chunk<X, VECTOR> now[EACH], next[EACH];
    const auto place = [&](int i) { return (i * THREADS + thread) * VECTOR; };
    const auto fetch = [&](int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) slice.fetch(next[i], tile + place(i));
    };
    const auto take = [&](int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) now[i] = next[i];
        if (tile + TILE > slice.count)
#pragma unroll
            for (int i = 0; i < EACH; ++i) slice.complete(now[i], tile + place(i));
    };
    fetch(0);
    // Lines that are wanted later move into the L2 cache: more of them than fit the registers.
    constexpr int AHEAD = 4, LINE = 128 / sizeof(X);
    static_assert((AHEAD - 1) * TILE <= THREADS * LINE, "each thread moves one line");
    const int early = TILE + thread * LINE;
    if (early < min(AHEAD * TILE, slice.count)) prefetch(slice.x + early);
    if (thread == 0) {
        board->count = 0, board->counts[0] = 0, board->peak = 0, board->trough = 0;
        prepare(p, blockIdx.x / CLUSTER, row);
        board->threshold = row.wanted ? -LARGEST_FLOAT32 : INF;
    }
#pragma unroll 1
    for (int i = thread; i < SPREAD; i += THREADS) spread.counts[i] = 0;
    open_cluster(slice.exchange);
    const int wanted = row.wanted;
    const bool counts = row.by_mass;

    // A first threshold: in each block, wanted / CLUSTER of the threads have a token above it.
    float peak = -INF, trough = INF;
    take(0);
    fetch(TILE);
#pragma unroll
    for (int i = 0; i < EACH * VECTOR; ++i) {
        const float x = wide(now[i / VECTOR], i % VECTOR);
        peak = fmax(peak, x), trough = fmin(trough, x > -INF ? x : INF);
    }
    raise(&board->peak, word_of(peak));
    if (counts) raise(&board->trough, ~word_of(trough));
    const unsigned enough = wanted ? reached(word_of(peak), (wanted + CLUSTER - 1) / CLUSTER, 20) : 0;
    __syncthreads();
    uint64 sample[] = {uint64(~enough) << 32 | board->peak, board->trough};
    if (CLUSTER > 1) {
        unsigned least = 0, most = 0, trough = 0;
        slice.share(sample, [&](const uint64* of_block, int) {
            least = max(least, unsigned(of_block[0] >> 32)), most = max(most, unsigned(of_block[0]));
            trough = max(trough, unsigned(of_block[1]));
        });
        sample[0] = uint64(least) << 32 | most, sample[1] = trough;
    }
    if (counts) spread.set(score_of_word(unsigned(sample[0])), score_of_word(~unsigned(sample[1])), row.span);
    if (thread == 0 && wanted) board->threshold = finite_score(~unsigned(sample[0] >> 32));
    __syncthreads();

    bool bad = false, fits = true;
#pragma unroll 1
    for (int tile = 0; tile < slice.count; tile += TILE) {
        if (tile) take(tile), fetch(tile + TILE);
        const int later = tile + AHEAD * TILE + thread * LINE;
        if (thread < TILE / LINE && later < slice.count) prefetch(slice.x + later);
        const float threshold = board->threshold;
        unsigned hits = 0, above = 0;
#pragma unroll
        for (int i = 0; i < EACH * VECTOR; ++i) {
            const float x = wide(now[i / VECTOR], i % VECTOR);
            hits |= unsigned(!(x < threshold)) << i;   // a NaN too
            peak = fmax(peak, x);
        }
        if (counts) {
#pragma unroll
            for (int i = 0; i < EACH * VECTOR; ++i) {
                const float at = spread.position(wide(now[i / VECTOR], i % VECTOR));
                above |= unsigned(at < 1) << i;
                spread.add(at);
            }
        }
        bool crowded = false;
        if (hits | above) {
            unsigned at = hits ? atomicAdd(&board->count, unsigned(__popc(hits))) : 0;
            crowded = at + __popc(hits) > FEW;
#pragma unroll 1
            for (unsigned left = hits | above; left; left &= left - 1) {
                const int i = __ffs(left) - 1, token = tile + place(i / VECTOR) + i % VECTOR;
                const float x = wide(slice.x[token]);   // the registers cannot be indexed
                const uint64 key = key_of(x, unsigned(slice.begin + token));
                bad |= x != x;
                if (hits >> i & 1 && at < CAPACITY) list[at] = key;
                at += hits >> i & 1;
                if (above >> i & 1) {
                    const unsigned place = atomicAdd(&board->counts[0], 1u);
                    if (place < MOST_ABOVE) spread.above[place] = key;
                }
            }
        }
        if (wanted && __syncthreads_or(crowded) && cut(list, wanted, word_of(INF), board) > FEW) {
            // Too many equal scores.  Nothing more is listed, but the rest of the slice may have the largest score, or NaN.
            slice.each([&](float x, unsigned) { peak = fmax(peak, x), bad |= x != x; });
            fits = false;
            break;
        }
    }
    raise(&board->peak, word_of(peak));
    bad = __syncthreads_or(bad);
    // Blocks cut their lists at the same time, and all lists together must fit.
    const int most = max(wanted, min(max(2 * wanted, THREADS), CAPACITY / CLUSTER));
    if (wanted && fits && board->count > most) cut(list, wanted, board->peak, board);
    const bool full = !fits || board->counts[0] > MOST_ABOVE;
    const uint64 words[] = {board->peak, uint64(bad) | uint64(full) << 1, board->count, board->counts[0]};
    uint64 largest = 0, flags = 0, count = 0, offset = 0;
    slice.share(words, [&](const uint64* of_block, int block) {
        largest = max(largest, of_block[0]), flags |= of_block[1];
        offset = block == slice.rank ? count : offset, count += of_block[2];
    });
    if (thread == 0) {
        row.m = score_of_word(unsigned(largest));
        row.valid = row.valid && !(flags & 1) && row.m > -INF;
        seen = {row.fits && flags < 2, count, offset};
    }
    __syncthreads();
}

// The mass of the row at the temperature 1.
__device__ inline uint64 raw_sum(Slice& slice, float m) {
    uint64 sum[] = {0};
#pragma unroll 1
    for (int i = threadIdx.x * VECTOR; i < slice.count; i += THREADS * VECTOR) {
        Chunk<X, VECTOR> at;
        slice.fetch(at, i), slice.complete(at, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[0] += mass_of(below(wide(at, j), m), float(LOG2_E));
    }
    slice.reduce(sum, [](uint64 (&to)[1], const uint64* other) { to[0] += other[0]; });
    return sum[0];
}

// Sorts the `wanted` largest keys of a list, and some more; m is the largest score.  Returns how many these are.
__device__ inline int sort_largest(uint64* list, int count, int wanted, float m, Board* board) {
    if (count > THREADS / 4 && count > wanted) {
        __syncthreads();
        if (threadIdx.x == 0) board->count = count;
        __syncthreads();
        count = cut(list, wanted, word_of(m), board);
    }
    sort(list, count);
    return count;
}

// The result of a row whose largest tokens are in the lists of the blocks, in block 0.
__device__ inline void choose_from_lists(
    const Row& row, Slice& slice, const Seen& seen, bool raw, uint64* list, Board* board, Result& result
) {
    gather(slice, list, board->count, seen.offset);
    const uint64 raw_mass = raw ? raw_sum(slice, row.m) : 0;
    wait_for_cluster();
    if (slice.rank) return;
    const int count = sort_largest(list, int(seen.count), row.wanted, row.m, board);
    Kept kept{0, -INF};
    const Outcome outcome = choose(row, slice, list, count, kept);
    if (threadIdx.x == 0) result = {kept, outcome}, result.outcome.raw = raw_mass;
}

// The result of a row of which all tokens may be kept, in block 0; false where its candidates do not fit the lists.
__device__ __noinline__ bool add_masses(
    const Row& row, Slice slice, const Seen& seen, int top, bool raw, Spread spread, uint64* list, Board* board,
    Found& found, Result& result
) {
    gather(slice, list, board->count, seen.offset);
    if (!choose_by_mass(row, slice, spread, list, board, found, result)) return false;
    const uint64 raw_mass = raw ? raw_sum(slice, row.m) : 0;
    if (slice.rank) return true;
    if (threadIdx.x == 0) result.outcome.raw = raw_mass;
    if (top) sort_largest(list, int(seen.count), top, row.m, board);
    return true;
}

// The result of any row, in block 0.
__device__ __noinline__ void search_row(
    const Row& row, Slice slice, int64 top, uint64* list, Board* board, Result& result
) {
    const float m = row.m;
    // Most masses beyond this distance from the largest are 0.
    Search search{slice, m, float(45 * LOG_2 * fmin(row.divisor, 1e30))};
    Kept kept{0, -INF};
    if (!row.greedy && row.k) {
        const auto weight = [&](float x, unsigned) { return uint64(below(x, m) > -INF); };
        if (row.k < search.add(weight)) kept.key = search.key_at(row.k, row.first, weight);
    }
    if (!row.greedy && row.top_p < 1) {
        const auto weight = [&](float x, unsigned token) {
            const float z = below(x, m);
            return z > -INF && key_of(x, token) >= kept.key ? mass_of(z, row.rate) : 0;
        };
        kept.key = max(kept.key, search.key_at(row.goal(search.add(weight)), row.first, weight));
    }
    kept.least = row.least;
    uint64 sums[5] = {0, 0, 0, 0, 0};
    Best best{-INF, 0};
    slice.each([&](float x, unsigned token) {
        const float z = below(x, m);
        const uint64 key = key_of(x, token);
        sums[1] += mass_of(z, float(LOG2_E));
        if (!row.keeps(key, kept)) return;
        sums[0] += mass_of(z, row.rate), ++sums[2];
        const float missing = row.greedy ? 0 : missing_noise(float(best.sum), z, float(row.divisor));
        if (missing < NOISE_BOUND) best.take(sum_of(row, key), key);
    });
    sums[3] = ordered(best.sum), sums[4] = best.key;
    slice.reduce(sums, merge_outcomes);
    if (top) search.collect(list, board, top);
    if (threadIdx.x == 0) result = {kept, {sums[0], sums[1], row.greedy ? 1 : sums[2], sums[3], sums[4]}};
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) sample_kernel(const __grid_constant__ Sampling p) {
    extern __shared__ Chunk<X, VECTOR> memory[];
    __shared__ Exchange exchange;
    __shared__ Board board;
    __shared__ Row row;
    __shared__ Result result;
    __shared__ Found sums;
    __shared__ Seen seen;
    const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER;
    const int64 at = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    Slice slice{p.x + at * p.stride + begin, &exchange, begin, int(min(p.slice, p.cols - begin)), rank, 0};
    uint64* const list = reinterpret_cast<uint64*>(&memory[0]);
    Spread spread{reinterpret_cast<unsigned*>(list + CAPACITY + MOST_ABOVE), list + CAPACITY, 0, 0};

    first_pass(p, row, slice, spread, list, &board, seen);
    if (row.valid) {
        bool done = seen.fits && seen.count <= (row.by_mass ? FEW : CAPACITY) && seen.count >= p.top;
        if (done && !row.by_mass) choose_from_lists(row, slice, seen, p.raw, list, &board, result);
        else if (done) done = add_masses(row, slice, seen, int(p.top), p.raw, spread, list, &board, sums, result);
        // Words of blocks may still be read: the buffers begin again.
        if (!done) wait_for_cluster(), search_row(row, slice, p.top, list, &board, result);
        __syncthreads();
    }
    // The threads of few warps compute logarithms: float64 is slow on some devices.
    if (rank || thread >= max(p.top, int64(32))) return;

    const Kept kept = result.kept;
    const Outcome found = result.outcome;
    const double log_sum = !row.valid || (row.greedy && !p.raw) ? 0
        : natural_log(double(int64(p.raw ? found.raw : found.mass))) - MASS_BITS * LOG_2;
    const double of_logprobs = p.raw ? 1 : row.divisor;   // the temperature that they refer to
    const auto logprob = [&](uint64 key) {
        const bool known = p.raw || (row.greedy ? key == found.winner : row.keeps(key, kept));
        return known ? float(exactly_below(score_of(key), row.m) / of_logprobs - log_sum) : -INF;
    };
    if (thread == 0) {
        p.token[at] = row.valid ? token_of(found.winner) : 0;
        p.logprob[at] = row.valid ? logprob(found.winner) : NOT_A_NUMBER;
        p.lse[at] = row.valid ? float(row.m / of_logprobs + log_sum) : NOT_A_NUMBER;
        p.kept[at] = row.valid ? found.kept : 0;
        p.valid[at] = row.valid;
    }
#pragma unroll 1
    for (int i = thread; i < p.top; i += THREADS) {
        p.top_tokens[at * p.top + i] = row.valid ? token_of(list[i]) : 0;
        p.top_logprobs[at * p.top + i] = row.valid ? logprob(list[i]) : NOT_A_NUMBER;
    }
}
