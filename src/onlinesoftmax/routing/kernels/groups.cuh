// The groups of experts with the largest scores, to which the choice of a token is limited.
//
// With GROUP_LANES, a chunk of that many adjacent lanes has the experts of one group: their scores are merged by shuffles.
// Groups of other sizes, and scores of more than two experts, go through shared memory.

// The two largest values of some experts; NaN is the largest.
struct BestTwo {
    float first, second;
};
__device__ inline BestTwo merged(BestTwo a, BestTwo b) {
    return {largest_or_nan(a.first, b.first), fmax(fmin(a.first, b.first), fmax(a.second, b.second))};
}
__device__ inline BestTwo merged(BestTwo a, float b) {
    return {largest_or_nan(a.first, b), fmax(fmin(a.first, b), a.second)};
}
__device__ inline BestTwo across(BestTwo a, int step) { return {across(a.first, step), across(a.second, step)}; }

// The score of a group: the sum of the one or two largest values; -inf does not count beside a number.
__device__ inline float score_of_group(BestTwo best, int top) {
    return top == 1 || best.second == -INF ? best.first : __fadd_rn(best.first, best.second);
}

// After the merge, the lanes of a chunk have the scores of different chunks: bit 0 of a lane chooses the half of them, and
// so on.  The number of chunks is rounded up to a power of two.
constexpr int PADDED_CHUNKS = CHUNKS > 16 ? 32 : CHUNKS > 8 ? 16 : CHUNKS > 4 ? 8 : CHUNKS > 2 ? 4 : CHUNKS;
constexpr int OF_GROUP = GROUP_LANES > 0 ? GROUP_LANES : TEAM;
static_assert(GROUP_LANES == 0 || (PADDED_CHUNKS <= GROUP_LANES && TEAM <= 32));

// The first lane with the score of chunk c.
__device__ constexpr int lane_of_chunk(int c) {
    int lane = 0;
    for (int bit = 1; bit < PADDED_CHUNKS; bit *= 2) lane |= c & bit ? PADDED_CHUNKS / 2 / bit : 0;
    return lane;
}

// The bit of a lane that orders its group and that of the lane across `mask`.
__device__ constexpr int deciding_bit(int mask) {
    const int of_chunks = mask & (PADDED_CHUNKS - 1);
    if (of_chunks) return of_chunks & -of_chunks;
    int bit = 1;
    while (2 * bit <= mask) bit *= 2;
    return bit;
}

// The two best values of the group of which the lane has the score.
__device__ inline BestTwo best_of_group(const float (&values)[ITEMS]) {
    const int lane = threadIdx.x % TEAM;
    BestTwo best[PADDED_CHUNKS];
#pragma unroll
    for (int c = 0; c < PADDED_CHUNKS; ++c) {
        best[c] = {c < CHUNKS ? values[c * WIDTH] : -INF, -INF};
#pragma unroll
        for (int i = 1; i < (c < CHUNKS ? WIDTH : 0); ++i) best[c] = merged(best[c], values[c * WIDTH + i]);
    }
#pragma unroll
    for (int step = 1; step < PADDED_CHUNKS; step *= 2)
#pragma unroll
        for (int i = 0; i < PADDED_CHUNKS / 2 / step; ++i) {
            const BestTwo low = best[i], high = best[i + PADDED_CHUNKS / 2 / step];
            const bool takes_high = lane & step;
            best[i] = merged(takes_high ? high : low, across(takes_high ? low : high, step));
        }
#pragma unroll
    for (int step = PADDED_CHUNKS; step < OF_GROUP; step *= 2) best[0] = merged(best[0], across(best[0], step));
    return best[0];
}

// Leaves the items of the groups whose lanes say that they are kept, and their keys.
__device__ inline unsigned keep_items(float (&keys)[ITEMS], unsigned items, bool is_kept) {
    const unsigned lanes = __ballot_sync(~0u, is_kept) >> (threadIdx.x % 32 / OF_GROUP * OF_GROUP);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const bool keeps = lanes >> lane_of_chunk(c) & 1;
        if (!keeps) items &= ~((1u << WIDTH) - 1 << c * WIDTH);
#pragma unroll
        for (int i = c * WIDTH; i < (c + 1) * WIDTH; ++i) keys[i] = keeps ? keys[i] : -INF;
    }
    return items;
}

// The items of the groups that are kept, by exact values.
__device__ inline unsigned items_of_groups(
    const Route& p, const float (&values)[ITEMS], float (&keys)[ITEMS], unsigned items
) {
    const int lane = threadIdx.x % TEAM;
    const float score = score_of_group(best_of_group(values), int(p.group_top));
    int first = 0;   // expert of the group of which the lane has the score
#pragma unroll
    for (int c = 1; c < CHUNKS; ++c)
        if (lane % PADDED_CHUNKS == lane_of_chunk(c)) first = c * TEAM * WIDTH;
    const unsigned own = first + lane / OF_GROUP * (OF_GROUP * WIDTH) < int(p.experts) ? word_of_choice(score) : 0;
    int rank = 0;
#pragma unroll
    for (int mask = 1; mask < TEAM; ++mask)
        if (!(mask & (OF_GROUP - PADDED_CHUNKS)))   // those lanes have equal scores
            rank += across(own, mask) > own - ((lane & deciding_bit(mask)) && own);
    return keep_items(keys, items, own && rank < int(p.group_k));
}

// The items of the groups that are kept, by keys with errors; `sure` becomes false where they may decide.
//
// Each lane allows for twice the error of its own score: of two groups, the one with the larger error sees the other.
__device__ inline unsigned items_of_near_groups(const Route& p, float (&keys)[ITEMS], unsigned items, bool& sure) {
    const BestTwo best = best_of_group(keys);
    const float score = score_of_group(best, int(p.group_top));
    const float error = 2 * (error_of_key(best.first) + (best.second == -INF ? 0 : error_of_key(best.second)));
    // A group without a key, as behind the end of the row, has the error inf; -inf + inf would be NaN.
    const float high = score == -INF ? -INF : score + error, low = score - error;
    int above = 0, perhaps = 0;   // groups with larger scores, and with scores that may be larger
#pragma unroll
    for (int mask = 1; mask < TEAM; ++mask)
        if (!(mask & (OF_GROUP - PADDED_CHUNKS))) {
            const float other = across(score, mask);
            above += other > high, perhaps += !(other < low);
        }
    sure = perhaps < int(p.group_k) || above >= int(p.group_k);
    return keep_items(keys, items, perhaps < int(p.group_k));
}

// The same for values in shared memory.
__device__ inline float sum_of_two(const float* values, int size, int top) {
    BestTwo best{-INF, -INF};
#pragma unroll 4
    for (int i = 0; i < size; ++i) best = merged(best, values[i]);
    return score_of_group(best, top);
}

// The same of any number of values: each pass finds the next one.
__device__ inline float sum_of_top(const float* values, int size, int top) {
    float sum = 0;
    uint64 before = 0;
#pragma unroll 1
    for (int j = 0; j < top; ++j) {
        uint64 best = 0;
#pragma unroll 4
        for (int i = 0; i < size; ++i) {
            const uint64 key = uint64(word_of_choice(values[i])) << 32 | unsigned(~i);
            if (key > best && (j == 0 || key < before)) best = key;
        }
        const float value = values[~unsigned(best)];
        before = best;
        sum = j == 0 ? value : __fadd_rn(sum, value == -INF ? 0 : value);
    }
    return sum;
}

// The items of the groups with the largest scores, for groups of any size.
__device__ inline unsigned items_of_any_groups(
    const Route& p, const float (&values)[ITEMS], float (&keys)[ITEMS], unsigned items, const TeamMemory& memory
) {
    const int lane = threadIdx.x % TEAM, groups = int(p.groups), size = int(p.experts) / groups;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1) memory.values[expert_of(i)] = values[i];
    sync_team();
#pragma unroll 1
    for (int group = lane; group < groups; group += TEAM) {
        const float* const values = memory.values + group * size;
        const int top = int(p.group_top);
        memory.scores[group] = top <= 2 ? sum_of_two(values, size, top) : sum_of_top(values, size, top);
    }
    sync_team();
#pragma unroll 1
    for (int group = lane; group < groups; group += TEAM) {
        const unsigned own = word_of_choice(memory.scores[group]);
        int rank = 0;
#pragma unroll 4
        for (int i = 0; i < groups; ++i) {
            const unsigned other = word_of_choice(memory.scores[i]);
            rank += other > own || (other == own && i < group);
        }
        // The values are read no more: the first one of a group tells whether the group is kept.
        memory.values[group * size] = rank < int(p.group_k);
    }
    sync_team();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1) {
            const int group = int(expert_of(i) * uint64(p.group_inverse) >> 32);   // expert / size
            if (!memory.values[group * size]) items &= ~(1u << i), keys[i] = -INF;
        }
    sync_team();
    return items;
}
