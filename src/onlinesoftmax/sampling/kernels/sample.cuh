// Samples a token of each row of logits with filters, and lists the largest log-probabilities.
//
// One block:  owns `slice` adjacent tokens of a row; CLUSTER blocks own a row.
// Chosen:     where a filter or the largest log-probabilities are wanted.
// Bytes:      one read of the logits from memory.  A row without top_k is read again, from the L2 or, if HELD, from shared
//             memory, and once more for raw log-probabilities, or where the rivals do not suffice.
// Limits:     rows of adjacent float32 or 16-bit logits, without score options; at most 2^23 - 1 tokens (masses.py).
//
// The kept tokens are those of formulas.py, bit for bit: masses are whole numbers (masses.py), so that the order of
// additions, and the cut of a row, do not matter.
//
// A list holds the tokens that top_k keeps, and those of the largest log-probabilities (candidates.cuh, choose.cuh).  Of
// rows without top_k, the first read lists the tokens that may win, and by_mass.cuh adds the masses in the second one.
// search.cuh takes the rows whose candidates do not fit the lists.
//
// A pass is a function of its own, so that its loop does not spill what the rest of the kernel holds in registers.

// The result of the first pass: whether the lists are complete; the keys in the lists of all blocks, and of those before this
// one, of candidates and of rivals; how many candidates block 0 lacks; the largest score of the first tiles.
struct Seen { bool fits; uint64 count, offset, rivals, rivals_offset; unsigned late; float peak; };

// Keys of an inbox in the place of the rivals and the counts, for rows that have none.
constexpr int ROOM_WITHOUT_COUNTS = MOST_RIVALS + MOST_ABOVE + SPREAD / 2;

// Reads the tiles of a slice, of which the first one is in a cache.  It LISTS the tokens that can be among the wanted ones,
// if any are; of rows without top_k, it COUNTS the scores.
template <bool COUNTS, bool LISTS>
__device__ __noinline__ Reading read_slice(
    const Row& row, Slice slice, Spread spread, Rivals rivals, uint64* list, Board* board, float peak
) {
    const int wanted = row.wanted;
    Reading reading{peak, false, true};
    Tiles tiles;
    tiles.begin(slice);
    bool crowded = false;
    float own_threshold = -LARGEST_FLOAT32;
#pragma unroll 1
    for (int tile = 0; tile < slice.count; tile += TILE) {
        __syncwarp();   // the threads that have listed tokens go on with the others
        tiles.take(slice, tile);
        const int turn = tile / TILE;
        if (LISTS && wanted && turn > 1 && !(turn & (turn - 1)) && __ffs(turn) % 2) {
            // After 4, 16, 64 and so on tiles.  So many threads have seen this score, or more.
            own_threshold = finite_score(reached(word_of(reading.peak), wanted, board->of_warps));
        }
        const float threshold = LISTS ? fmax(board->threshold, own_threshold) : INF;
        const float largest = tiles.largest();
        reading.peak = fmax(reading.peak, largest);
        unsigned won = 0, hits = 0;
        if (COUNTS) {
#pragma unroll
            for (int i = 0; i < OWN_TOKENS; ++i) spread.add(tiles.score(i));
            won = rivals.among(tiles, unsigned(slice.begin + tile), row.seed, row.offset);
        }
        // Most threads have no token that reaches it, not even their largest; NaN does.
        const float least = !COUNTS ? threshold : LISTS ? fmin(threshold, spread.edge) : spread.edge;
        if (!(largest < least))
#pragma unroll
            for (int i = 0; i < OWN_TOKENS; ++i) hits |= unsigned(!(tiles.score(i) < least)) << i;
        unsigned at = 0;
        if (!COUNTS && hits) {
            at = atomicAdd(&board->count, unsigned(__popc(hits)));
            crowded |= at + __popc(hits) > FEW;
        }
#pragma unroll 1
        for (unsigned left = hits | won; left; left &= left - 1) {
            const int i = __ffs(left) - 1;
            const float x = tiles.pick(i);   // above -inf, so it is in the slice
            const uint64 key = key_of(x, unsigned(slice.begin) + tile + Tiles::token(i));
            reading.bad |= x != x;
            if (!COUNTS) {
                if (at < CAPACITY) list[at] = key;
                ++at;
                continue;
            }
            if (LISTS && !(x < threshold)) crowded |= append(list, CAPACITY, &board->count, key) >= FEW;
            if (spread.bin(x) == Spread::FIRST) append(spread.above, MOST_ABOVE, &board->counts[0], key);
            if (won >> i & 1 && x > -INF) append(rivals.list, MOST_RIVALS, &board->counts[1], key);
        }
        // There is room for two tiles.
        if (LISTS && wanted && tile / TILE % 2 && __syncthreads_or(crowded)) {
            crowded = false;
            if (cut(list, wanted, ~0u, slice, board) > FEW) {
                // Too many equal scores.  Nothing more is listed, but the rest of the slice may have the largest score,
                // or NaN.
                slice.each([&](float x, unsigned) { reading.peak = fmax(reading.peak, x), reading.bad |= x != x; });
                reading.fits = false;
                break;
            }
        }
    }
    return reading;
}

// Reads the slice: lists the tokens that can be among the wanted ones, and finds the largest score.  Of rows without top_k,
// counts the scores, and lists the rivals.
__device__ inline void first_pass(
    const Sampling& p, Row& row, Slice& slice, Spread& spread, Rivals& rivals, uint64* list, Board* board, Seen& seen
) {
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    Given given;
    Tiles tiles;
    if (!HELD) tiles.begin(slice);
    if (thread == 0 || thread == 32 || thread == 64) given.load(p, blockIdx.x / CLUSTER);
    // The parameters would arrive behind these many copies.
    if (HELD) tiles.copy(slice);
    const int early = TILE + thread * LINE;
    if (!HELD && early < min(AHEAD * TILE, slice.count)) prefetch(slice.x + early);
    if (thread == 0) {
        slice.exchange->prepare();
        board->count = 0, board->peak = 0, board->trough = 0;
        board->counts[0] = board->counts[1] = 0;
        prepare(p, given, row);
        board->threshold = row.wanted ? -LARGEST_FLOAT32 : INF;
    }
    if (thread == 32) prepare_least(given, row);
    if (thread == 64) prepare_rate(given, row);
#pragma unroll 1
    for (int i = thread; i < SPREAD; i += THREADS) spread.counts[i] = 0;
    open_cluster(slice.exchange);
    const int wanted = row.wanted;
    const bool counts = BY_MASS && row.by_mass;

    // A threshold: in each block, wanted / CLUSTER of the threads have a token that reaches it, in the first tile or in all.
    const bool whole = HELD && !counts && wanted && wanted <= CLUSTER * THREADS / 2;
    float peak = -INF, trough = INF;
    bool bad = false;
    // If not, the rest of the slice is under way while the blocks look at their first tiles.
    if (HELD) wait_groups(whole ? 0 : 1);
#pragma unroll 1
    for (int tile = 0; tile < (whole ? slice.count : 1); tile += TILE) {
        tiles.take(slice, tile);
        peak = largest_or_nan(peak, tiles.largest());
    }
    if (peak != peak) peak = -INF, bad = true;
    Masses masses{peak, 0};
    if (counts) {
#pragma unroll
        for (int i = 0; i < OWN_TOKENS; ++i) {
            const float x = tiles.score(i);
            trough = fmin(trough, x > -INF ? x : INF), masses.sum += power_of_two((x - peak) * row.rate);
        }
        raise(&board->trough, ~word_of(trough));
        masses = masses.of_lanes(row.rate);
        if (lane == 0) slice.exchange->of_warps[warp][0] = masses.word();
    }
    const unsigned enough = wanted ? reached(word_of(peak), (wanted + CLUSTER - 1) / CLUSTER, board->of_warps) : 0;
    __syncthreads();
    if (counts) masses = Masses::of_word(lane < WARPS ? slice.exchange->of_warps[lane][0] : 0).of_lanes(row.rate);
    unsigned not_enough = ~enough, trough_word = board->trough;
    if (CLUSTER > 1) {
        // A lane has the words of a block.
        const uint64 sample[] = {uint64(not_enough) << 32 | trough_word, masses.word()};
        const uint64* const words = slice.share(sample)[lane % CLUSTER];
        not_enough = __reduce_max_sync(~0u, unsigned(words[0] >> 32));
        if (counts) {
            trough_word = __reduce_max_sync(~0u, unsigned(words[0]));
            masses = Masses::of_word(lane < CLUSTER ? words[1] : 0).of_lanes(row.rate);
        }
    }
    if (counts) {
        spread.set(masses.peak, score_of_word(~trough_word), row.span);
        // The mass that top_p keeps, nearly: that of the first tiles for the whole row, but the largest token counts once.
        const float more = fmax(float(p.cols) / (CLUSTER * TILE), 1.0f);
        rivals.expect(masses.peak, row.rate, fmax((masses.sum - 1) * more + 1, 1.0f) * fmax(float(row.top_p), 0.1f));
    }
    if (thread == 0 && wanted) board->threshold = finite_score(~not_enough);
    if (HELD && !whole) wait_groups(0);
    __syncthreads();

    Reading reading{peak, bad, false};
    if (whole) reading = list_held(wanted, slice, list, board, peak, bad);
    if (counts && !wanted) reading = read_slice<true, false>(row, slice, spread, rivals, list, board, peak);
    else if (counts) reading = read_slice<true, true>(row, slice, spread, rivals, list, board, peak);
    else if (!reading.fits) reading = read_slice<false, true>(row, slice, spread, rivals, list, board, peak);
    raise(&board->peak, word_of(reading.peak));
    bad = __syncthreads_or(reading.bad);
    const bool fits = reading.fits;
    // Blocks cut their lists at the same time, and all lists together must fit; by_mass.cuh needs the room behind FEW.
    const int room = counts ? FEW : CAPACITY;
    const int most = max(wanted, min(max(2 * wanted, THREADS), room / CLUSTER));
    if (wanted && fits && board->count > (CLUSTER > 1 ? most : FEW)) cut(list, wanted, board->peak, slice, board);
    const bool full = !fits || board->counts[0] > MOST_ABOVE;
    const Inbox<ROOM_WITHOUT_COUNTS> inbox{rivals.list};
    if (!counts) inbox.send(slice, list, board->count);
    Masses above{score_of_word(board->peak), 0};
    if (counts && warp == 0) {
        // The first bin has no upper edge, so its few tokens are added one by one.
#pragma unroll 1
        for (unsigned i = lane; i < min(board->counts[0], unsigned(MOST_ABOVE)); i += 32)
            above.sum += power_of_two((score_of(spread.above[i]) - above.peak) * row.rate);
        above.sum = add_lanes(above.sum);
    }
    const uint64 words[] = {
        above.word(), uint64(bad) | uint64(full) << 1, board->count, board->counts[0], board->counts[1]
    };
    // A lane has the words of a block.  Where scores are counted, every block looks at the counts of all.
    const uint64* const its = slice.share(words, counts)[lane % CLUSTER];
    const auto add = [&](int i, int blocks) { return __reduce_add_sync(~0u, lane < blocks ? unsigned(its[i]) : 0); };
    const unsigned largest = __reduce_max_sync(~0u, unsigned(its[0] >> 32)), flags = __reduce_or_sync(~0u, unsigned(its[1]));
    const unsigned count = add(2, CLUSTER), offset = add(2, slice.rank);
    const unsigned listed = unsigned(its[2]), of_lane = lane && lane < CLUSTER ? listed : 0;
    const unsigned late = __reduce_add_sync(~0u, of_lane - inbox.early(of_lane));
    const unsigned its_rivals = add(4, CLUSTER), rivals_offset = add(4, slice.rank);
    if (!counts) inbox.take(slice, list, listed, count <= MOST_SORTED);
    if (thread == 0) {
        row.m = score_of_word(largest);
        row.valid = row.valid && !(flags & 1) && row.m > -INF;
        seen = {row.fits && flags < 2, count, offset, its_rivals, rivals_offset, late, masses.peak};
    }
    __syncthreads();
}

// The mass of the row at the temperature 1.
namespace rare {
__device__ __noinline__ uint64 raw_sum(Slice slice, float m) {
    uint64 sum[] = {0};
#pragma unroll 1
    for (int i = threadIdx.x * VECTOR; i < slice.count; i += THREADS * VECTOR) {
        Chunk<X, VECTOR> at;
        slice.fetch(at, i), slice.complete(at, i);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) sum[0] += mass_of(wide(at, j), m, float(LOG2_E));
    }
    slice.reduce(sum, [](uint64 (&to)[1], const uint64* other) { to[0] += other[0]; });
    return sum[0];
}
}

// Sorts the `wanted` largest keys of a list, and some more; m is the largest score.  Returns how many these are.
__device__ inline int sort_largest(uint64* list, int count, int wanted, float m, Slice& slice, Board* board) {
    if (count > THREADS / 2 && count > wanted) {
        __syncthreads();
        if (threadIdx.x == 0) board->count = count;
        __syncthreads();
        count = cut(list, wanted, word_of(m), slice, board);
    }
    sort(list, count);
    return count;
}

// The result of a row whose largest tokens are in the lists of the blocks, in block 0.
__device__ inline void choose_from_lists(
    const Row& row, Slice slice, const Seen& seen, bool raw, uint64* list, Board* board, Result& result
) {
    // A list that was too long for the inbox.
    if (!Inbox<ROOM_WITHOUT_COUNTS>::early(board->count)) gather(slice, list, board->count, seen.offset);
    const uint64 raw_mass = raw ? rare::raw_sum(slice, row.m) : 0;
    if (slice.rank) return;
    if (seen.late) wait_for_keys(slice, int(seen.late), 0);
    const int count = sort_largest(list, int(seen.count), row.wanted, row.m, slice, board);
    Kept kept{0, -INF};
    const Outcome outcome = choose(row, slice, list, count, kept);
    if (threadIdx.x == 0) result = {kept, outcome}, result.outcome.raw = raw_mass;
}

namespace rare {
// The same out of line, for a kernel that mostly adds masses: only its rows with a top_k, or greedy ones, need it.
__device__ __noinline__ void choose_apart(
    const Row& row, Slice slice, const Seen& seen, bool raw, uint64* list, Board* board, Result& result
) {
    choose_from_lists(row, slice, seen, raw, list, board, result);
}
}

// The result of a row of which all tokens may be kept, in block 0.  Returns -1, or the next `turn` of the slice where
// search_row has to take the row.
__device__ __noinline__ int choose_without_lists(
    const Row& row, Slice slice, const Seen& seen, int top, bool raw, Spread spread, Rivals rivals, uint64* list, Board* board,
    Found& found, Result& result
) {
    // by_mass.cuh adds WHOLE to the product of m and the rate, and its winner needs a rate that is a normal number.
    if (!(fabs(row.m) < INF && fabs(row.m * row.rate) < NEAR && row.rate > 1e-30f)) return slice.turn;
    gather(slice, list, board->count, seen.offset);
    const bool fit = seen.rivals <= MOST_RIVALS;
    if (fit) gather(slice, rivals.list, board->counts[1], seen.rivals_offset);
    const int count = fit ? int(seen.rivals) : 0;
    const int coming = int(seen.count) - int(board->count) + (fit ? count - int(board->counts[1]) : 0);
    if (!choose_by_mass(row, slice, spread, list, rivals, count, coming, seen.peak, board, found, result)) return slice.turn;
    const uint64 raw_mass = raw ? rare::raw_sum(slice, row.m) : 0;
    if (slice.rank) return -1;
    if (threadIdx.x == 0) result.outcome.raw = raw_mass;
    if (top) sort_largest(list, int(seen.count), top, row.m, slice, board);
    return -1;
}

// The result of any row, in block 0.
namespace rare {
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
            const uint64 key = key_of(x, token);
            return z > -INF && key >= kept.key ? row.mass(key) : 0;
        };
        kept.key = max(kept.key, search.key_at(row.goal(search.add(weight)), row.first, weight));
    }
    kept.least = row.least;
    uint64 sums[] = {0, 0, 0}, words[2];
    Best best{-INF, 0};
    slice.each([&](float x, unsigned token) {
        const float z = below(x, m);
        const uint64 key = key_of(x, token);
        sums[1] += mass_of(x, m, float(LOG2_E));
        if (!row.keeps(key, kept)) return;
        sums[0] += row.mass(key), ++sums[2];
        const float missing = row.greedy ? 0 : missing_noise(float(best.sum), z, float(row.divisor));
        if (missing < NOISE_BOUND) best.take(sum_of(row, key), key);
    });
    slice.reduce(sums, [](uint64 (&to)[3], const uint64* other) { to[0] += other[0], to[1] += other[1], to[2] += other[2]; });
    words[0] = ordered(best.sum), words[1] = best.key;
    slice.reduce(words, merge_best);
    if (top) search.collect(list, board, top);
    if (threadIdx.x == 0) result = {kept, {sums[0], sums[1], row.greedy ? 1 : sums[2], words[1]}};
}
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
    Slice slice{p.x + at * p.stride + begin, &exchange, begin, int(min(p.slice, p.cols - begin)), rank, 0, 0, nullptr};
    uint64* const list = reinterpret_cast<uint64*>(&memory[0]);
    Rivals rivals{list + CAPACITY, 0, 0, 0};
    uint64* const above = list + CAPACITY + MOST_RIVALS;
    Spread spread{reinterpret_cast<unsigned*>(above + MOST_ABOVE), above, 0, 0, 0};
    slice.held = reinterpret_cast<Chunk<X, VECTOR>*>(spread.counts + SPREAD);

    first_pass(p, row, slice, spread, rivals, list, &board, seen);
    if (row.valid) {
        bool done = seen.fits && seen.count <= (row.by_mass ? FEW : MOST_SORTED) && seen.count >= p.top;
        if (done && !BY_MASS) choose_from_lists(row, slice, seen, p.raw, list, &board, result);
        else if (done && !row.by_mass) rare::choose_apart(row, slice, seen, p.raw, list, &board, result);
        else if (done) {
            const int turn = choose_without_lists(row, slice, seen, int(p.top), p.raw, spread, rivals, list, &board, sums, result);
            if (turn >= 0) slice.turn = turn, done = false;
        }
        // Words of blocks may still be read.
        if (!done) wait_for_cluster(), rare::search_row(row, slice, p.top, list, &board, result);
        __syncthreads();
    }
    // The threads of few warps compute logarithms: float64 is slow on some devices.
    if (rank || thread >= max(p.top, int64(32))) return;

    const Kept kept = result.kept;
    const Outcome found = result.outcome;
    const bool kept_counts = row.valid && !row.greedy;
    // The kept tokens, or all of them at the temperature 1.
    const double log_sum = !(p.raw ? row.valid : kept_counts) ? 0
        : log_of(over_largest(p.raw ? found.raw : found.mass, row.m, p.raw ? float(LOG2_E) : row.rate), 0);
    const double rate = p.raw ? 1 : row.inverse;   // of the log-probabilities
    const auto logprob = [&](uint64 key) {
        const bool known = p.raw || (row.greedy ? key == found.winner : row.keeps(key, kept));
        return known ? float(exactly_below(score_of(key), row.m) * rate - log_sum) : -INF;
    };
    if (thread == 0) {
        p.token[at] = row.valid ? token_of(found.winner) : 0;
        p.logprob[at] = row.valid ? logprob(found.winner) : NOT_A_NUMBER;
        p.lse[at] = row.valid ? float(row.m * rate + log_sum) : NOT_A_NUMBER;
        p.kept[at] = row.valid ? found.kept : 0;
        p.valid[at] = row.valid;
        if (p.kept_key) {
            p.kept_key[at] = row.greedy ? found.winner : kept.key;
            p.kept_sum[at] = kept_counts ? over_largest(found.mass, row.m, row.rate) : 1;
        }
    }
#pragma unroll 1
    for (int i = thread; i < p.top; i += THREADS) {
        p.top_tokens[at * p.top + i] = row.valid ? token_of(list[i]) : 0;
        p.top_logprobs[at * p.top + i] = row.valid ? logprob(list[i]) : NOT_A_NUMBER;
    }
}
