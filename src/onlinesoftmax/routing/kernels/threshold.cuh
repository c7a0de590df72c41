// The choice of the K experts of each token with the largest keys; of equal keys, the lower expert.
//
// A threshold is found that at least k keys reach, and hardly more.  The experts that reach it make a list, which is
// sorted.  For small k, the threshold is at most the k-th largest maximum of groups of keys; for large k, it is found bit by
// bit, and so are those among equal keys that a list has no room for.

struct Route {
    const X* x; const float* bias; const unsigned char* mask; const int* given;
    float* weights; int* indices; float* lse; int* counts; float* prob_sums;
    float* balance; float* z_loss; float* slopes;   // both losses, and their derivatives; null without LOSSES
    uint64* words;                     // where blocks add their counts and sums; between calls, all are 0
    int64 stride, tokens, experts;     // tokens of a sequence
    int64 parts;                       // blocks of a sequence
    int64 sequence_words;              // of `words`
    int64 groups, group_k, group_top, group_inverse;
    int64 team_words;                  // of shared memory
    int64 scale_bits, unit_bits;       // float32 numbers
};

// A chosen expert and the key by which it was chosen; without a bias, its logit.
struct alignas(8) Choice {
    float key;
    int expert;
};

// The memory of a team: its list, then its k choices if the list is short, then what groups of experts need.
//
// A list has 64-bit words; a packed one (ranking.cuh) has CAPACITY keys of 32 bits, then their experts.
struct TeamMemory {
    uint64* list;
    Choice* chosen;
    float* values;
    float* scores;
};

// Keys of chosen experts: the word of a choice, then the inverted expert.
constexpr int EXPERT_BITS = 13;
constexpr unsigned LAST_EXPERT = (1 << EXPERT_BITS) - 1;
__device__ inline uint64 list_key(unsigned word, int expert) {
    return uint64(word) << EXPERT_BITS | (LAST_EXPERT - expert);
}
__device__ inline int expert_of_key(uint64 key) { return int(LAST_EXPERT - (unsigned(key) & LAST_EXPERT)); }
__device__ inline Choice choice_of_key(uint64 key) {
    return {score_of_word(unsigned(key >> EXPERT_BITS)), expert_of_key(key)};
}

// In a packed list, keys of 32 bits: of 16-bit logits, which differ in the high bits, with the expert in the low ones.
constexpr bool HAS_PLACE = sizeof(X) == 2 && !HAS_BIAS;
__device__ inline unsigned short_key(unsigned word, int expert) {
    return HAS_PLACE ? (word & ~LAST_EXPERT) | (LAST_EXPERT - expert) : word;
}

// rank + (a > own).
__device__ inline unsigned add_above(unsigned rank, unsigned a, unsigned own) {
    asm("{\n\t.reg .u32 sum;\n\tadd.cc.u32 sum, %1, %2;\n\taddc.u32 %0, %0, 0;\n\t}" : "+r"(rank) : "r"(a), "r"(~own));
    return rank;
}

// mask * 2 + (x < t), for t other than 0; no x is below -inf, and NaN is never below.  This is the sign of x - t, but
// -0 - 0 is -0.
__device__ inline unsigned shift_in_below(unsigned mask, float x, float t) {
    return __funnelshift_r(__float_as_uint(x - t), mask, 31);
}

// The larger number, or the smaller one where `smaller` is not 0, in two instructions; for a selection the compiler has three.
__device__ inline float larger_or_smaller(float a, float b, int smaller) {
    float x = fmax(a, b);
    asm("{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %3, 0;\n\t@p min.f32 %0, %1, %2;\n\t}"
        : "+f"(x) : "f"(a), "f"(b), "r"(smaller));
    return x;
}

// Puts the larger of two numbers first.
__device__ inline void order(float& a, float& b) {
    const float larger = fmax(a, b);
    b = fmin(a, b), a = larger;
}

// Sorts eight numbers, the largest first, by a network of order(a, b).
template <class Order> __device__ inline void sort_eight(float* x, const Order& order) {
    constexpr int PAIRS[][2] = {{0, 2}, {1, 3}, {4, 6}, {5, 7}, {0, 4}, {1, 5}, {2, 6}, {3, 7}, {0, 1}, {2, 3},
                                {4, 5}, {6, 7}, {2, 4}, {3, 5}, {1, 4}, {3, 6}, {1, 2}, {3, 4}, {5, 6}};
#pragma unroll
    for (int i = 0; i < 19; ++i) order(x[PAIRS[i][0]], x[PAIRS[i][1]]);
}

// Heads: the HEADS maxima of a lane, each of every HEADS-th item.  Sorts them, the largest first, by a network.
__device__ inline void sort_heads(float (&heads)[HEADS]) {
    constexpr int OF_4[][2] = {{0, 2}, {1, 3}, {0, 1}, {2, 3}, {1, 2}};
    if constexpr (HEADS == 8) {
        sort_eight(heads, [](float& a, float& b) { order(a, b); });
    } else if constexpr (HEADS == 4) {
#pragma unroll
        for (int i = 0; i < 5; ++i) order(heads[OF_4[i][0]], heads[OF_4[i][1]]);
    } else if constexpr (HEADS == 2) {
        order(heads[0], heads[1]);
    }
}

// Lists of the largest heads are sorted by falling size: each has LENGTH of them, HELD in each of LISTED adjacent lanes.
constexpr int LENGTH = K > 8 ? 16 : K > 4 ? 8 : K > 2 ? 4 : K;
static_assert(!SHORT || K <= 16);
constexpr bool LONG_HEADS = HEADS >= LENGTH;   // a lane has heads for a list
constexpr int HELD = LENGTH == 1 ? 1 : LONG_HEADS ? LENGTH / 2 : HEADS, LISTED = LENGTH / HELD;

// Sorts lists, the largest number first, that lie in `lanes` adjacent lanes each and rise then fall, or fall then rise.
__device__ inline void sort_bitonic(float (&heads)[HEADS], int lanes) {
#pragma unroll
    for (int step = lanes / 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            heads[i] = larger_or_smaller(heads[i], across(heads[i], step), int(threadIdx.x) & step);
        }
#pragma unroll
    for (int step = HELD / 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < HELD; ++i)
            if (!(i & step)) order(heads[i], heads[i + step]);
}

// Makes each of the first COUNT heads use(head, other): place i gets place COUNT - 1 - i of the lane across `mask`.
template <int COUNT, class Use> __device__ inline void with_mirrored(float (&heads)[HEADS], int mask, const Use& use) {
    float others[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) others[i] = across(heads[COUNT - 1 - i], mask);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) heads[i] = use(heads[i], others[i]);
}

// The LENGTH-th largest of the sorted heads of a team in a warp, or the K-th one.
//
// Of two lists, the larger numbers of each place in one and its mirrored place in the other are the LENGTH largest.
__device__ inline float threshold_of_lists(float (&heads)[HEADS]) {
    const auto larger = [](float a, float b) { return fmax(a, b); };
    const auto ordered = [](int bit) {
        return [bit](float a, float b) { return larger_or_smaller(a, b, int(threadIdx.x) & bit); };
    };
    if (LENGTH > TEAM * HEADS) return -INF;
    if (TEAM == 1) return heads[K <= HEADS ? K - 1 : 0];
    float t = INF;
    if (LONG_HEADS && (TEAM == 2 || LENGTH == 1)) {
        if (LENGTH == 1) {
#pragma unroll
            for (int step = TEAM / 2; step; step /= 2) heads[0] = fmax(heads[0], across(heads[0], step));
            return heads[0];
        }
        // Each lane has one half of the places.
#pragma unroll
        for (int i = 0; i < (K + 1) / 2; ++i) t = fmin(t, fmax(heads[i], across(heads[K - 1 - i], 1)));
        return fmin(t, across(t, 1));
    }
    if constexpr (LONG_HEADS) {
        float others[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) others[i] = across(heads[LENGTH - 1 - i], 1);
#pragma unroll
        for (int i = 0; i < HELD; ++i) heads[i] = fmax(heads[i], others[i]);
        with_mirrored<HELD>(heads, 1, ordered(1));
        sort_bitonic(heads, 1);
    } else {
#pragma unroll
        for (int lanes = 1; lanes < LISTED; lanes *= 2) {
            with_mirrored<HELD>(heads, 2 * lanes - 1, ordered(lanes));
            sort_bitonic(heads, lanes);
        }
    }
#pragma unroll
    for (int step = LISTED; step < TEAM / 2; step *= 2) {
        with_mirrored<HELD>(heads, step | (LISTED - 1), larger);
        sort_bitonic(heads, LISTED);
    }
    if (TEAM > LISTED) {
        constexpr int MASK = TEAM / 2 | (LISTED - 1);
#pragma unroll
        for (int i = 0; i < (HELD + 1) / 2; ++i) t = fmin(t, fmax(heads[i], across(heads[HELD - 1 - i], MASK)));
        t = fmin(t, across(t, MASK));
    } else {
        t = heads[HELD - 1];
    }
#pragma unroll
    for (int step = 1; step < LISTED; step *= 2) t = fmin(t, across(t, step));
    return t;
}

// The K-th largest of the heads of a team, or a smaller one; -inf if there are fewer.  `largest` becomes the largest key that
// is not NaN.
__device__ inline float threshold_of(const float (&keys)[ITEMS], Board& board, float& largest) {
    float heads[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; ++i) heads[i] = keys[i];
#pragma unroll
    for (int i = HEADS; i < ITEMS; ++i) heads[i % HEADS] = fmax(heads[i % HEADS], keys[i]);
    // fmax and fmin of NaN and a both give a, so the network would duplicate a.
#pragma unroll
    for (int i = 0; i < HEADS; ++i) heads[i] = fmax(heads[i], -INF);
    sort_heads(heads);
    float top = largest = fold_team<Maximum>(heads[0], board);
    if constexpr (TEAM <= 32) return threshold_of_lists(heads);
#pragma unroll (K <= 8 ? K : 1)
    for (int j = 1; j < K; ++j) {
        const bool own = heads[0] == top;
#pragma unroll
        for (int i = 0; i < HEADS; ++i) heads[i] = own ? i + 1 < HEADS ? heads[i + 1] : -INF : heads[i];
        top = fold_team<Maximum>(heads[0], board);
    }
    return top;
}

// The items whose keys are no smaller than the K-th largest maximum, as bits; or may be, if the keys have errors.
template <bool NEAR = false> __device__ inline unsigned items_by_maxima(
    const float (&keys)[ITEMS], unsigned items, Board& board, float& largest
) {
    float t = threshold_of(keys, board, largest);
    if (NEAR) t -= error_of_key(t);
    if (t == 0) t = -1e-45f;   // shift_in_below takes no 0; no float32 number lies between
    unsigned below = 0;
#pragma unroll
    for (int i = ITEMS - 1; i >= 0; --i) below = shift_in_below(below, keys[i], t);
    return items & ~below;
}

// The word that items_by_bits keeps in the register of a key.
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
    int last = 1 << EXPERT_BITS;   // no expert is beyond
    if (!all_teams(few)) {
        // More equal keys than there is room for: those of the lowest experts.
        const int above = count_words(keys, found + 1, board), missing = K - (found == ~0u ? 0 : above);
        int before = -1;   // fewer than `missing` experts up to this one have the word `found`
#pragma unroll 1
        for (int step = 1 << EXPERT_BITS - 1; step; step /= 2)
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
