// The list of the experts of a token that may be chosen, which is sorted.

// A short list is rarely longer than three halves of LENGTH.  With at most four of these keys in a lane, keys are packed into
// words of 32 bits, and a team ranks RANKED of them in one pass, LANE_KEYS of each lane.  With more keys, loops over words of
// 64 bits are less code: with six keys of a lane they took 0.8 of the time on an H100.
__device__ constexpr int multiple_of(int unit, int least) { return (least + unit - 1) / unit * unit; }
constexpr int RANKED = multiple_of(TEAM < 4 ? 4 : TEAM, 3 * LENGTH / 2), LANE_KEYS = RANKED / TEAM;
constexpr bool PACKED = SHORT && LANE_KEYS <= 4;

struct alignas(16) FourKeys {
    unsigned of[4];
};

// Writes the first K of a packed list of `count` experts to the places of their ranks.  It reads four keys at a time.
template <class ExactKey>
__device__ inline void rank_list(const TeamMemory& memory, int count, const ExactKey& exact_key_of) {
    constexpr bool RANKS_ALL = RANKED >= CAPACITY;
    constexpr int USUAL = multiple_of(4, 3 * LENGTH / 2);   // keys that a short list hardly ever exceeds
    unsigned* const keys = reinterpret_cast<unsigned*>(memory.list);
    const unsigned* const experts = keys + CAPACITY;
    const int lane = threadIdx.x % TEAM, end = RANKS_ALL ? CAPACITY : (count + 3) / 4 * 4;
    const auto word_of_key = [&](float key, int expert) { return short_key(word_of_choice(key), expert); };
    Choice choice[LANE_KEYS];
    unsigned own[LANE_KEYS], rank[LANE_KEYS];
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) {
        const int j = lane + i * TEAM;
        choice[i].expert = j < count ? int(experts[j]) : 0, rank[i] = 0;
    }
    // Without a branch: the lane waits once for all its logits.  The key 0 is below all others.
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i) {
        choice[i].key = exact_key_of(choice[i].expert);
        own[i] = lane + i * TEAM < count ? word_of_key(choice[i].key, choice[i].expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < LANE_KEYS; ++i)
        if (lane + i * TEAM < end) keys[lane + i * TEAM] = own[i];
    bool fast = true;
    if (!RANKS_ALL && !all_teams(count <= RANKED)) {
        fast = false;
#pragma unroll 1
        for (int j = lane + RANKED; j < end; j += TEAM)
            keys[j] = j < count ? word_of_key(exact_key_of(int(experts[j])), experts[j]) : 0;
    }
    sync_team();
    if (fast) {
#pragma unroll (RANKS_ALL ? CAPACITY / 4 : 1)
        for (int j = 0; j < end; j += 4) {
            if (RANKS_ALL && j == USUAL && all_teams(count <= j)) break;
            const FourKeys four = reinterpret_cast<const FourKeys&>(keys[j]);
#pragma unroll
            for (int i = 0; i < 4 * LANE_KEYS; ++i) rank[i / 4] = add_above(rank[i / 4], four.of[i % 4], own[i / 4]);
        }
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i)
            if (own[i] && rank[i] < K) memory.chosen[rank[i]] = choice[i];
        sync_team();
        if (HAS_PLACE) return;
        // Equal keys have equal ranks, and so one place, to which one of the lanes writes: there is another expert than the
        // lane's own.  (racecheck reports these writes of equal keys as a hazard.)  CUDA promises this for the lanes of a
        // warp; with TEAM > 32, warps race for the place.  In any case a lane that has lost sees another expert, and the loop
        // below writes all places again.
#pragma unroll
        for (int i = 0; i < LANE_KEYS; ++i)
            if (own[i] && rank[i] < K && memory.chosen[rank[i]].expert != choice[i].expert) fast = false;
        if (!any_lane(!fast)) return;
    }
#pragma unroll 1
    for (int i = lane; i < count; i += TEAM) {
        const unsigned key = keys[i];
        const int own_expert = int(experts[i]);
        int before = 0;
#pragma unroll 1
        for (int j = 0; j < count; ++j) before += keys[j] > key || (keys[j] == key && int(experts[j]) < own_expert);
        if (before < K) memory.chosen[before] = {exact_key_of(own_expert), own_expert};
    }
    sync_team();
}

// Writes the first K of `count` different keys of 64 bits to the places of their ranks; the key after them is 0.
__device__ inline void rank_words(const TeamMemory& memory, int count) {
    constexpr int EACH = (3 * LENGTH / 2 + TEAM - 1) / TEAM;
#pragma unroll 1
    for (int first = threadIdx.x % TEAM; first < count; first += EACH * TEAM) {
        uint64 own[EACH];
        unsigned rank[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            own[i] = first + i * TEAM < count ? memory.list[first + i * TEAM] : 0, rank[i] = 0;
#pragma unroll 1
        for (int j = 0; j < count; j += 2) {
            const uint64 a = memory.list[j], b = memory.list[j + 1];
            // Keys are below 2^63: the sign of a difference tells which one is larger.
#pragma unroll
            for (int i = 0; i < EACH; ++i) rank[i] += unsigned((own[i] - a) >> 63) + unsigned((own[i] - b) >> 63);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (own[i] && rank[i] < K) memory.chosen[rank[i]] = choice_of_key(own[i]);
    }
    sync_team();
}

// The items that may be chosen, as bits: `count` of the team, `at` of them in the lanes before this one.  Returns false if
// keys with errors do not suffice.
template <bool NEAR> __device__ inline bool hits_of(
    const Route& p, const float (&z)[ITEMS], unsigned items, const TokenSoftmax& token, const TeamMemory& memory, Board& board,
    unsigned& hits, int& count, int& at
) {
    float keys[ITEMS], largest;
    if (HAS_BIAS) load_row(keys, p.bias, int(p.experts), 0.0f);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {   // items behind the end of the row have the logit -inf
        const float bias = HAS_BIAS ? keys[i] : 0;
        keys[i] = NEAR ? near_choice(z[i], bias) : choice_of(z[i], bias, token);
    }
    bool sure = true;
    if constexpr (GROUPED && NEAR) {
        items = items_of_near_groups(p, keys, items, sure);
    } else if constexpr (GROUPED) {
        float values[ITEMS];
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) values[i] = value_of(z[i], keys[i], token);
        if constexpr (GROUP_LANES > 0) items = items_of_groups(p, values, keys, items);
        else items = items_of_any_groups(p, values, keys, items, memory);
    }
    hits = SHORT ? items_by_maxima<NEAR>(keys, items, board, largest) : items_by_bits(keys, items, board);
    at = sum_before(__popc(hits), count, board);
    const bool fits = !SHORT || all_teams(count <= CAPACITY);
    if (NEAR) return fits && all_teams(sure);
    if (!fits) {
        hits = items_by_bits(keys, items, board);
        at = sum_before(__popc(hits), count, board);
    }
    return true;
}

// Puts the K chosen experts of a token into the team's memory: `chosen` of a short list, and the first keys of a long one.
//
// z: logits of the lane's items; `largest` becomes the largest one if the list is short and keys are logits.
__device__ inline void choose(
    const Route& p, const X* row, float (&z)[ITEMS], unsigned items, const TokenSoftmax& token, const TeamMemory& memory,
    Board& board, float& largest
) {
    const int lane = threadIdx.x % TEAM;
    if constexpr (NETWORK)
        if (choose_by_network(row, z, has_whole_chunks(int(p.experts)), memory, largest)) return;
    unsigned hits = 0;
    int count, at;
    if constexpr (HAS_BIAS || GROUPED) {
        bool found = false;
        if constexpr (NEARLY) found = hits_of<true>(p, z, items, token, memory, board, hits, count, at);
        if (!found) hits_of<false>(p, z, items, token, memory, board, hits, count, at);
    } else {
        hits = SHORT ? items_by_maxima(z, items, board, largest) : items_by_bits(z, items, board);
        at = sum_before(__popc(hits), count, board);
        if (SHORT && !all_teams(count <= CAPACITY)) {
            hits = items_by_bits(z, items, board);
            at = sum_before(__popc(hits), count, board);
        }
    }
    const auto exact_key_of = [&](int expert) {
        return choice_of(wide(row[expert]), HAS_BIAS ? p.bias[expert] : 0, token);
    };
    unsigned* const experts = reinterpret_cast<unsigned*>(memory.list) + CAPACITY;   // of a packed list
#pragma unroll 1
    for (; hits; hits &= hits - 1, ++at) {
        const unsigned item = __ffs(hits) - 1, expert = first_expert() + item / WIDTH * TEAM * WIDTH + item % WIDTH;
        if (PACKED) experts[at] = expert;
        else memory.list[at] = expert;
    }
    sync_team();
    if constexpr (PACKED) {
        rank_list(memory, count, exact_key_of);
        return;
    }
#pragma unroll 1
    for (int j = lane; j < count; j += TEAM) {
        const int expert = int(memory.list[j]);
        memory.list[j] = list_key(word_of_choice(exact_key_of(expert)), expert);
    }
    if (SHORT && lane == 0 && count % 2) memory.list[count] = 0;   // keys are read in pairs
    sync_team();
    if constexpr (SHORT) rank_words(memory, count);
    else sort_list<TEAM>(memory.list, count, CAPACITY, lane, [] { sync_team(); });
}
