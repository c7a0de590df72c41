// The choice of the K experts of each token with the largest keys; of equal keys, the lower expert.
//
// A threshold is found that at least k keys reach, and hardly more.  The experts that reach it make a list, which is
// sorted.  For small k, the threshold is the k-th largest maximum of groups of keys; for large k, it is found bit by
// bit, and so are those among equal keys that a list has no room for.

struct Route {
    const X* x; const float* bias; const unsigned char* mask; const int* given;
    float* weights; int* indices; float* lse; int* counts; float* prob_sums;
    uint64* words;                     // where blocks add their counts and sums; between calls, all are 0
    int64 stride, tokens, experts;     // tokens of a sequence
    int64 parts;                       // blocks of a sequence
    int64 groups, group_k, group_top, group_inverse;
    int64 team_words;                  // of shared memory
    int64 scale_bits, unit_bits;       // float32 numbers
};

// The memory of a team: its list, then its k keys if the list is short, then what groups of experts need.
struct TeamMemory {
    uint64* list;
    uint64* chosen;
    float* values;
    float* scores;
};

// Keys of the list: the word of a choice, then the inverted expert.  They are below 2^63.
constexpr int EXPERT_BITS = 13;
constexpr unsigned LAST_EXPERT = (1 << EXPERT_BITS) - 1;
__device__ inline uint64 list_key(unsigned word, int expert) {
    return uint64(word) << EXPERT_BITS | (LAST_EXPERT - expert);
}
__device__ inline int expert_of_key(uint64 key) { return int(LAST_EXPERT - (unsigned(key) & LAST_EXPERT)); }
__device__ inline unsigned word_of_key(uint64 key) { return unsigned(key >> EXPERT_BITS); }

// rank + (a > own), for keys of the list, in three instructions.
__device__ inline unsigned add_above(unsigned rank, uint64 a, uint64 own) {
    return rank + (unsigned((own - a) >> 32) >> 31);
}

// mask * 2 + (x < t), for t > -inf but 0; a NaN is not below t.  The sign of x - t is right, but -0 - 0 is -0.
__device__ inline unsigned shift_in_below(unsigned mask, float x, float t) {
    return __funnelshift_r(__float_as_uint(x - t), mask, 31);
}

// Puts the larger of two heads first.
template <int A, int B> __device__ inline void order(float (&heads)[HEADS]) {
    const float a = heads[A], b = heads[B];
    heads[A] = fmax(a, b), heads[B] = fmin(a, b);
}

// Sorts the heads, the largest first, by a network.
__device__ inline void sort_heads(float (&heads)[HEADS]) {
    if constexpr (HEADS == 8) {
        order<0, 2>(heads), order<1, 3>(heads), order<4, 6>(heads), order<5, 7>(heads);
        order<0, 4>(heads), order<1, 5>(heads), order<2, 6>(heads), order<3, 7>(heads);
        order<0, 1>(heads), order<2, 3>(heads), order<4, 5>(heads), order<6, 7>(heads);
        order<2, 4>(heads), order<3, 5>(heads), order<1, 4>(heads), order<3, 6>(heads);
        order<1, 2>(heads), order<3, 4>(heads), order<5, 6>(heads);
    } else if constexpr (HEADS == 4) {
        order<0, 2>(heads), order<1, 3>(heads), order<0, 1>(heads), order<2, 3>(heads), order<1, 2>(heads);
    } else if constexpr (HEADS == 2) {
        order<0, 1>(heads);
    }
}

// The K-th largest of the HEADS maxima of each lane's items, equal ones of several lanes counted once; -inf if there are
// fewer.  `largest` becomes the first one.
__device__ inline float threshold_of(const float (&keys)[ITEMS], Board& board, float& largest) {
    float heads[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) heads[i] = keys[i];
#pragma unroll
    for (int i = HEADS; i < ITEMS; ++i) heads[i % HEADS] = fmax(heads[i % HEADS], keys[i]);
    // A NaN would leave a maximum twice in the network.
#pragma unroll
    for (int i = 0; i < HEADS; ++i) heads[i] = fmax(heads[i], -INF);
    sort_heads(heads);
    float top = largest = fold_team<Maximum>(heads[0], board);
#pragma unroll (K <= 8 ? K : 1)
    for (int j = 1; j < K; ++j) {
        const bool own = heads[0] == top;
#pragma unroll
        for (int i = 0; i < HEADS; ++i) heads[i] = own ? i + 1 < HEADS ? heads[i + 1] : -INF : heads[i];
        top = fold_team<Maximum>(heads[0], board);
    }
    return top;
}

// The items whose keys are no smaller than the K-th largest maximum, as bits.
__device__ inline unsigned items_by_maxima(
    const float (&keys)[ITEMS], unsigned items, Board& board, float& largest
) {
    float t = threshold_of(keys, board, largest);
    if (!(t > -INF)) return items;
    if (t == 0) t = -1e-45f;   // shift_in_below takes no 0; no float32 number lies between
    unsigned below = 0;
#pragma unroll
    for (int i = ITEMS - 1; i >= 0; --i) below = shift_in_below(below, keys[i], t);
    return items & ~below;
}

// The word of a key that items_by_bits has put in its place.
__device__ inline unsigned word_at(const float& key) { return __float_as_uint(key); }

// How many words of the team are no smaller than `least`.
__device__ inline int count_words(const float (&words)[ITEMS], unsigned least, Board& board) {
    int count = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) count += word_at(words[i]) >= least;
    return fold_team<Sum>(count, board);
}

// How many experts up to `last` have this word.
__device__ inline int count_equal(const float (&words)[ITEMS], unsigned word, int last, Board& board) {
    int count = 0;
    last -= first_expert();   // the compiler would keep the expert of each item in a register
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) count += word_at(words[i]) == word && distance_of(i) <= last;
    return fold_team<Sum>(count, board);
}

// The items with the K largest keys, and as many more as the list has room for, as bits.
//
// The keys become words for a while, in their registers.
__device__ inline unsigned items_by_bits(float (&keys)[ITEMS], unsigned items, Board& board) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) keys[i] = __uint_as_float(items >> i & 1 ? word_of_choice(keys[i]) : 0);
    unsigned found = 0;
    bool few = false;
#pragma unroll 1
    for (unsigned bit = 1u << 31; bit && !all_teams(few); bit /= 2) {
        const int count = count_words(keys, found | bit, board);
        if (!few && count >= K) found |= bit, few = count <= CAPACITY;
    }
    int last = 1 << 13;   // no expert is beyond
    if (!all_teams(few)) {
        // More equal keys than there is room for: those of the lowest experts.
        const int above = count_words(keys, found + 1, board), missing = K - (found == ~0u ? 0 : above);
        int before = -1;   // too few experts up to it
#pragma unroll 1
        for (int step = 1 << 12; step; step /= 2)
            if (count_equal(keys, found, before + step, board) < missing) before += step;
        if (!few) last = before + 1;
    }
    unsigned hits = 0;
    last -= first_expert();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const unsigned word = word_at(keys[i]);
        hits |= unsigned(word > found || (word == found && distance_of(i) <= last)) << i;
        keys[i] = items >> i & 1 ? score_of_word(word) : -INF;
    }
    return hits & items;
}

// The sum of the one or two largest values of a group; -inf does not count beside a number, and NaN is the largest.
__device__ inline float sum_of_two(const float* values, int size, int64 top) {
    float first = -INF, second = -INF;
    bool has_nan = false;
#pragma unroll 4
    for (int i = 0; i < size; ++i) {
        const float x = values[i];
        second = fmax(second, fmin(first, x)), first = fmax(first, x), has_nan |= x != x;
    }
    if (has_nan) return NOT_A_NUMBER;
    return top == 1 || second == -INF ? first : __fadd_rn(first, second);
}

// The same of any number of values: each pass finds the next one.
__device__ inline float sum_of_top(const float* values, int size, int64 top) {
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

// Leaves the items of the groups of experts with the largest scores.
__device__ inline unsigned items_of_groups(
    const Route& p, const float (&z)[ITEMS], const float (&keys)[ITEMS], unsigned items, const Of& token,
    const TeamMemory& memory
) {
    const int lane = threadIdx.x % TEAM, groups = int(p.groups), size = int(p.experts) / groups;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1) memory.values[expert_of(i)] = value_of(z[i], keys[i], token);
    sync_team();
#pragma unroll 1
    for (int group = lane; group < groups; group += TEAM) {
        const float* const values = memory.values + group * size;
        const int64 top = p.group_top;
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
        memory.values[group * size] = rank < p.group_k;
    }
    sync_team();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1) {
            const int group = int(expert_of(i) * uint64(p.group_inverse) >> 32);   // expert / size
            if (!memory.values[group * size]) items &= ~(1u << i);
        }
    sync_team();
    return items;
}

// Sorts the team's list of `count` keys, the largest first, and returns where its first K keys are.
__device__ inline const uint64* sort_list(const TeamMemory& memory, int count) {
    const int lane = threadIdx.x % TEAM;
    if (SHORT) {
        // The list has no equal keys: the rank of a key is its place.
        constexpr int EACH = (3 * K / 2 + TEAM - 1) / TEAM;   // the list is rarely longer
#pragma unroll 1
        for (int first = lane; first < count; first += EACH * TEAM) {
            uint64 own[EACH];
            unsigned rank[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                own[i] = first + i * TEAM < count ? memory.list[first + i * TEAM] : 0, rank[i] = 0;
#pragma unroll 1
            for (int j = 0; j < count; j += 2) {
                const uint64 a = memory.list[j], b = memory.list[j + 1];
#pragma unroll
                for (int i = 0; i < EACH; ++i) rank[i] = add_above(add_above(rank[i], a, own[i]), b, own[i]);
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i)
                if (own[i] && rank[i] < K) memory.chosen[rank[i]] = own[i];
        }
        sync_team();
        return memory.chosen;
    }
#pragma unroll 1
    for (int j = count + lane; j < CAPACITY; j += TEAM) memory.list[j] = 0;
    sync_team();
#pragma unroll 1
    for (int run = 2; run <= CAPACITY; run *= 2)
#pragma unroll 1
        for (int step = run / 2; step; step /= 2) {
#pragma unroll 1
            for (int i = lane; i < CAPACITY / 2; i += TEAM) {
                const int a = 2 * i - (i & (step - 1)), b = a + step;
                const uint64 first = memory.list[a], second = memory.list[b];
                if ((first < second) == !(a & run)) memory.list[a] = second, memory.list[b] = first;
            }
            sync_team();
        }
    return memory.list;
}

// The K chosen experts of a token, as keys of the list.
//
// keys: those of the lane's items, and -inf for experts that cannot be chosen; `largest` becomes the largest one of
// them if the list is short.
__device__ inline const uint64* choose(
    const Route& p, const X* row, float (&keys)[ITEMS], unsigned items, const Of& token, const TeamMemory& memory,
    Board& board, float& largest
) {
    const int lane = threadIdx.x % TEAM;
    unsigned hits = SHORT ? items_by_maxima(keys, items, board, largest) : items_by_bits(keys, items, board);
    int count, at = sum_before(__popc(hits), count, board);
    if (SHORT && !all_teams(count <= CAPACITY)) {
        hits = items_by_bits(keys, items, board);
        at = sum_before(__popc(hits), count, board);
    }
#pragma unroll 1
    for (; hits; hits &= hits - 1, ++at) {
        const unsigned item = __ffs(hits) - 1;
        memory.list[at] = first_expert() + item / WIDTH * TEAM * WIDTH + item % WIDTH;
    }
    sync_team();
#pragma unroll 1
    for (int j = lane; j < count; j += TEAM) {
        const int expert = int(memory.list[j]);
        const float key = choice_of(wide(row[expert]), HAS_BIAS ? p.bias[expert] : 0, token);
        memory.list[j] = list_key(word_of_choice(key), expert);
    }
    if (SHORT && lane == 0) memory.list[count] = 0;   // keys are read in pairs
    sync_team();
    return sort_list(memory, count);
}
