// A token of a row without top_k: the masses of all tokens are added, and a list has the tokens between two scores, of
// which one is the threshold of top_p.  Another list has the tokens that may win, from the first pass.
//
// The counts of spread.cuh say where the threshold is, nearly.  The sums are exact, and show whether it is there; if not,
// the window is moved.

// Keys in the list of the tokens between the scores.
constexpr int MOST_BETWEEN = 2048;
static_assert(2 * MOST_BETWEEN <= CAPACITY - FEW, "the list, and keys that are picked of it, stand behind the other list");

// Part of a bin that the window takes on both sides, for the errors of the estimate; and bins with few tokens that it takes
// too.  Where tokens are few, one may have so much of the mass that its place in a bin counts: of rows with 30 large tokens
// and top_p = 0.99, a few were read three times, and 512 took twice as long.
constexpr float MARGIN = 0.125f;
constexpr unsigned MORE_TOKENS = 32;
constexpr int MORE_BINS = 16;   // lanes of half a warp

// Scores: a token from `high` on is kept, and one below `low` is not.
struct Window { float high, low; };

// Replaces the counts of each block by the sums of those of all blocks.  A block adds a part of them and gives it to the
// others, because words of other blocks come slowly.  `room` is for SPREAD / 2 words.
__device__ inline void add_counts(const Slice& slice, const Spread& spread, uint64* room) {
    constexpr int PAIRS = SPREAD / 2 / CLUSTER;   // of a part; a word has two counts
    uint64* const pairs = reinterpret_cast<uint64*>(spread.counts) + slice.rank * PAIRS;
    uint64* const added = &slice.exchange->added;
#pragma unroll 1
    for (int i = threadIdx.x; i < SPREAD / 2; i += THREADS) room[i] = get_word(&pairs[i % PAIRS], i / PAIRS);
    __syncthreads();   // before the counts of this part are overwritten
    if (threadIdx.x == 0) expect_words(added, SPREAD / 2);
#pragma unroll 1
    for (int i = threadIdx.x; i < SPREAD / 2; i += THREADS) {
        uint64 sum = 0;
#pragma unroll
        for (int block = 0; block < CLUSTER; ++block) sum += room[block * PAIRS + i % PAIRS];
        send_word(&pairs[i % PAIRS], sum, added, i / PAIRS);
    }
    wait_for_words(added, 0);
}

// The bin in which the masses of a row reach the goal of top_p, nearly.  All blocks compute the same.
__device__ inline int estimate(const Row& row, Slice& slice, const Spread& spread, uint64* room, Board* board) {
    constexpr int OWN = SPREAD / THREADS;
    const int thread = threadIdx.x, lane = thread % 32;
    if (thread == 0) board->peak = 0;
    if (CLUSTER > 1) add_counts(slice, spread, room);
    const float first = Masses::of_word(lane < CLUSTER ? slice.shared()[lane][0] : 0).of_lanes(row.rate).sum;
    float bins[OWN], own = 0;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        const float z = fmin(spread.score(thread * OWN + i + 0.5f) - row.m, 0.0f);
        bins[i] = spread.counts[thread * OWN + i] * power_of_two(z * row.rate);
        if (thread + i == 0) bins[i] = first;
        if (thread * OWN + i == SPREAD - 1) bins[i] = 0;
        own += bins[i];
    }
    float total;
    const float before = slice.scan(own, total);
    const float goal = float(row.top_p) * total;
    // The last bin with less before it.
    int bin = -1;
    float sum = before;
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        if (sum < goal) bin = thread * OWN + i;
        sum += bins[i];
    }
    raise(&board->peak, unsigned(bin + 1));
    __syncthreads();
    return max(int(board->peak) - 1, 0);
}

// Adjacent bins: the first one, and the one behind the last.
struct Bins { int first, end; };

// These bins, and on each side up to MORE_BINS that have fewer than MORE_TOKENS tokens together; bin 0, which has no upper
// edge, is not among them.
__device__ inline Bins widened(const Spread& spread, Bins bins) {
    // Each half of a warp looks at the bins on one side.
    const int lane = threadIdx.x % 32, i = lane % MORE_BINS, bin = lane < MORE_BINS ? bins.first - 1 - i : bins.end + i;
    unsigned tokens = bin > 0 && bin < SPREAD ? spread.counts[bin] : MORE_TOKENS;
#pragma unroll 1
    for (int step = 1; step < MORE_BINS; step *= 2) {
        const unsigned before = from_lane(tokens, i >= step ? lane - step : lane);
        if (i >= step) tokens += before;
    }
    const unsigned few = __ballot_sync(~0u, tokens < MORE_TOKENS);
    return {bins.first - __popc(few & ((1u << MORE_BINS) - 1)), bins.end + __popc(few >> MORE_BINS)};
}

// The words of a pass: masses of all tokens, of those above the window, and of those in it; the number of those above it,
// and of those in it, in all blocks and in those before this one; the word of the largest score in the window, and the
// inverted one of the least.
enum { TOTAL, ABOVE, BETWEEN, NUMBER_ABOVE, LISTED, BEFORE, MOST, LEAST, PASS_WORDS };
static_assert(PASS_WORDS == WORDS, "a lane for each word");

// The words of all blocks, and the mass that top_p keeps.
struct Found {
    uint64 words[PASS_WORDS], goal;
    bool equal;   // all listed scores are equal, and stay or go together: the lists are not needed, and may be too long
};

// The sums of a thread.
struct OwnSums { uint64 total, above, between; unsigned number_above; };

// Counts a score above the window, and sets a bit for one in the window.
__device__ inline void count_above(unsigned& number, unsigned& listed, float x, Window window, unsigned bit) {
    asm("{\n\t.reg .pred above, between;\n\tsetp.ge.f32 above, %2, %3;\n\tsetp.ge.and.f32 between, %2, %4, !above;\n\t"
        "@above add.u32 %0, %0, 1;\n\t@between or.b32 %1, %1, %5;\n\t}"
        : "+r"(number), "+r"(listed) : "f"(x), "f"(window.high), "f"(window.low), "r"(bit));
}

// One pass over the slice, which lists the tokens in the window.  It begins with the tiles that were read last: of a slice
// that the L2 cache does not hold, these are still there.
__device__ __noinline__ OwnSums sum_masses(const Row& row, Slice slice, Window window, uint64* between, Board* board) {
    const float rate = row.rate;
    const unsigned right = RIGHT + __float_as_uint(plus_whole(row.m, rate));
    uint64 total = 0, of_above = 0, of_between = 0;
    unsigned number = 0, most = 0, least = 0;
    Tiles tiles;
    const int last = Tiles::last(slice);
#pragma unroll 1
    for (int tile = last; tile >= 0; tile -= TILE) {
        __syncwarp();   // the threads that have listed tokens go on with the others
        tiles.read_backward(slice, tile);
        unsigned listed = 0;
#pragma unroll
        for (int i = 0; i < OWN_TOKENS; ++i) {
            const float x = tiles.score(i);
            const uint64 mass = mass_of_near(x, rate, right);
            total += mass, of_above += x >= window.high ? mass : 0;
            count_above(number, listed, x, window, 1u << i);
        }
#pragma unroll 1
        for (; listed; listed &= listed - 1) {
            const int i = __ffs(listed) - 1;
            const uint64 key = key_of(tiles.pick(i), unsigned(slice.begin) + tile + Tiles::token(i));
            append(between, MOST_BETWEEN, &board->counts[0], key);
            most = max(most, unsigned(key >> 32)), least = max(least, ~unsigned(key >> 32));
        }
    }
    raise(&board->limits[0], most), raise(&board->limits[1], least);
    __syncthreads();
    const int count = int(min(board->counts[0], unsigned(MOST_BETWEEN)));
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) of_between += row.mass(between[i]);
    return {total, of_above, of_between, number};
}

// One pass of all blocks; an inbox without keys is not used.
__device__ inline void pass_together(
    const Row& row, Slice& slice, Window window, uint64* between, Inbox<MOST_BETWEEN> inbox, Board* board, Found& found
) {
    if (threadIdx.x == 0) board->counts[0] = board->limits[0] = board->limits[1] = 0;
    __syncthreads();
    const OwnSums own = sum_masses(row, slice, window, between, board);
    if (inbox.keys) inbox.send(slice, between, board->counts[0]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto& of_warps = slice.exchange->of_warps;
    const uint64 sums[] = {sum_of_lanes(own.total), sum_of_lanes(own.above), sum_of_lanes(own.between)};
    const unsigned number = __reduce_add_sync(~0u, own.number_above);
    if (lane == 0)
        of_warps[warp][TOTAL] = sums[0], of_warps[warp][ABOVE] = sums[1], of_warps[warp][BETWEEN] = sums[2],
        of_warps[warp][NUMBER_ABOVE] = number;
    __syncthreads();
    // The lanes of the first warp with equal numbers, modulo WORDS, merge one word.
    const int i = lane % WORDS, part = lane / WORDS;
    const auto merge = [&](uint64 a, uint64 b) { return i >= MOST ? max(a, b) : a + b; };
    const auto merge_parts = [&](uint64 word) {
        word = merge(word, across(word, WORDS));
        return merge(word, across(word, 2 * WORDS));
    };
    uint64 word = 0;
    if (warp == 0) {
#pragma unroll 1
        for (int of = part; of < WARPS && i <= NUMBER_ABOVE; of += 32 / WORDS) word += of_warps[of][i];
        word = merge_parts(word);
        if (i > NUMBER_ABOVE) word = i < MOST ? board->counts[0] : board->limits[i - MOST];
    }
    const Slice::Words shared = slice.share_lanes(word);
    if (warp == 0) {
        word = 0;
#pragma unroll 1
        for (int block = part; block < (i == BEFORE ? slice.rank : CLUSTER); block += 32 / WORDS)
            word = merge(word, shared[block][i]);
        __syncwarp();
        word = merge_parts(word);
        if (lane < WORDS) found.words[lane] = word;
        __syncwarp();
        if (lane == 0) {
            const uint64* const words = found.words;
            found.goal = row.goal(words[TOTAL]);
            found.equal = unsigned(words[MOST]) == ~unsigned(words[LEAST]) && !row.first;
            if (found.equal) found.words[BETWEEN] = words[LISTED] * row.mass(words[MOST] << 32);
        }
    }
    __syncthreads();
}

namespace rare {
// The threshold of top_p among `count` keys; the tokens above all of them have the mass `above`.
__device__ __noinline__ uint64 threshold_of_many(
    const Row& row, Slice slice, uint64* keys, int count, uint64 above, uint64 goal
) {
    sort(keys, count);
    return row.with_ties(key_at_mass(row, slice, keys, count, {0, -INF}, above, goal));
}
}

// The threshold of top_p, which is in the window, whose keys a list has.  `picked` is room for as many keys.
__device__ inline uint64 threshold(
    const Row& row, Slice& slice, const Found& found, Window window, const uint64* between, uint64* picked, Board* board
) {
    const int count = int(found.words[LISTED]);
    Range range{word_of(window.low), word_of(fmin(window.high, row.m)), found.words[ABOVE], 0};
    int few;
    bool equal;
    do {
        narrow<uint64>(range, slice, between, count, found.goal, [&](uint64 key) { return row.mass(key); });
        if (threadIdx.x == 0) board->counts[0] = board->limits[0] = board->limits[1] = 0;
        __syncthreads();
        unsigned most = 0, least = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) {
            const unsigned word = unsigned(between[i] >> 32);
            if (word < range.low || word > range.high) continue;
            picked[atomicAdd(&board->counts[0], 1u)] = between[i];
            most = max(most, word), least = max(least, ~word);
        }
        raise(&board->limits[0], most), raise(&board->limits[1], least);
        __syncthreads();
        few = int(board->counts[0]), equal = board->limits[0] == ~board->limits[1];
    } while (few > 32 && !equal);
    if (equal && !row.first) return uint64(board->limits[0]) << 32;
    if (few > 32) return rare::threshold_of_many(row, slice, picked, few, range.above, found.goal);
    // A lane has a key, and wants the masses of those from it on.  Each warp adds some of them.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint64 own = lane < few ? picked[lane] : 0;
    uint64 part = 0, sum = range.above;
#pragma unroll 1
    for (int i = warp; i < few; i += WARPS) part += picked[i] >= own ? row.mass(picked[i]) : 0;
    uint64* const parts = slice.exchange->bins;
    parts[threadIdx.x] = part;
    __syncthreads();
#pragma unroll 4
    for (int i = 0; i < WARPS; ++i) sum += parts[i * 32 + lane];
    // The largest key that reaches the goal.
    return row.with_ties(largest_of_lanes(lane < few && sum >= found.goal ? own : 0));
}

// The outcome of a row, in block 0, in shared memory; false where search_row has to take it.  `count` is the
// number of all rivals that the first pass has listed, and `peak` the score that their bound refers to; `coming` keys are on
// the way to block 0.
__device__ inline bool choose_by_mass(
    const Row& row, Slice& slice, const Spread& spread, uint64* list, Rivals rivals, int count, int coming, float peak,
    Board* board, Found& found, Result& result
) {
    uint64 *const between = list + FEW, *const picked = between + MOST_BETWEEN;
    const float least = row.least == -INF ? -LARGEST_FLOAT32 : least_score(row.m, row.least);
    const bool cuts = row.top_p < 1;
    Window window{least, least};
    Bins bins{0, 0};
    // The edges of a window: MARGIN outside the bins, or inside the last one by which they were widened, because the next bin
    // may have many tokens.
    const auto high_of = [&](int first, int own_first) {
        return first > 0 ? fmax(spread.score(first < own_first ? first + MARGIN : first - MARGIN), least) : INF;
    };
    const auto low_of = [&](int end, int own_end) {
        return end < SPREAD ? fmax(spread.score(end > own_end ? end - MARGIN : end + MARGIN), least) : least;
    };
    if (cuts) {
        const int bin = estimate(row, slice, spread, between, board);
        bins = widened(spread, {bin, bin + 1});
        window = {high_of(bins.first, bin), low_of(bins.end, bin + 1)};
    }
    const Inbox<MOST_BETWEEN> inbox{picked};
    const auto listed_by_lane = [&] { return unsigned(slice.shared()[threadIdx.x % CLUSTER][LISTED]); };
    bool reached = false, is_there = false;   // the goal of top_p; the threshold in the window
    int turn = 0;
#pragma unroll 1
    for (; turn < 4; ++turn) {
        // A second list could come before the first one has been taken.
        pass_together(row, slice, window, between, {turn ? nullptr : picked}, board, found);
        if (turn == 0) inbox.take(slice, between, listed_by_lane(), found.words[LISTED] <= MOST_BETWEEN);
        if (found.words[LISTED] > MOST_BETWEEN && !found.equal) break;
        const bool low = cuts && found.words[ABOVE] >= found.goal;
        reached = cuts && found.words[ABOVE] + found.words[BETWEEN] >= found.goal;
        // Where min_p keeps less than top_p, the goal is not reached.
        if (!low && (reached || window.low == least)) { is_there = true; break; }
        const int step = 2 * turn + 2;
        const Bins next = low ? Bins{max(bins.first - step, 0), bins.first} : Bins{bins.end, min(bins.end + step, SPREAD)};
        bins = widened(spread, next);
        window = low ? Window{high_of(bins.first, next.first), window.high} : Window{window.low, low_of(bins.end, next.end)};
    }
    if (is_there && !found.equal) {
        const unsigned its = listed_by_lane(), lane = threadIdx.x % 32;
        const auto late = [&](unsigned count) { return turn ? count : count - inbox.early(count); };
        gather(slice, between, int(late(board->counts[0])), found.words[BEFORE]);
        coming += int(__reduce_add_sync(~0u, lane && lane < CLUSTER ? late(its) : 0));
    }
    wait_for_keys(slice, coming, 0);
    if (!is_there) return false;
    uint64 words[] = {0, 0, 0};   // what the blocks have to know where the winner is not among the rivals
    if (slice.rank == 0) {
        Kept kept{0, row.least};
        if (reached)
            kept.key = found.equal ? found.words[MOST] << 32
                : threshold(row, slice, found, window, between, picked, board);
        const int listed = found.equal ? 0 : int(found.words[LISTED]);
        Chosen chosen = sum_and_win(row, slice, between, listed, rivals.list, count, kept);
        if (found.equal) chosen.mass = found.words[BETWEEN], chosen.number = found.words[LISTED];
        const Winner winner = chosen.winner;
        const uint64 mass = chosen.mass + found.words[ABOVE];
        if (threadIdx.x == 0) {
            result.kept = kept;
            result.outcome = {mass, 0, chosen.number + found.words[NUMBER_ABOVE], winner.key};
        }
        words[0] = !rivals.include(winner, (peak - row.m) * row.rate), words[1] = kept.key, words[2] = mass;
    }
    slice.tell(words);
    if (!words[0]) return true;
    const int next = rare::win_again(row, slice, {words[1], row.least}, words[2], rivals, board, result);
    slice.turn = next < 0 ? ~next : next;
    return next >= 0;
}
