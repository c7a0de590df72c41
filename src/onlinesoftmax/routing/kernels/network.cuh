// The choice of few experts by a sorting network: no list of candidates in shared memory, and no loop whose length depends
// on the logits.
//
// A key is a logit whose low bits have given place to its inverted expert, so that of equal positive logits the lower
// expert comes first.  Each lane sorts its keys, and lanes merge their sorted keys.  If two neighbours among the K + 1
// largest keys differ in the expert alone, keys decide only if all K + 1 are positive and if in float32 all logits of the
// token have zeros in the low bits; otherwise `choose` makes a list after all.

// On an H100, 65536 x 64 top 6 took 0.94 of the time of lists, in bfloat16 0.86, and 2^20 x 8 top 2 0.67.  Where four
// lanes share a token, lists take less.
constexpr int SORTED = 8;   // keys of a list
constexpr bool NETWORK =
    SHORT && TEAM <= 2 && K <= SORTED && ITEMS % SORTED == 0 && !HAS_BIAS && !GROUPED && !REPLAY;

// All bits that the whole numbers below `count` need.
__device__ constexpr unsigned bits_below(unsigned count) { return count <= 1 ? 0 : bits_below((count + 1) / 2) * 2 + 1; }

// The low bits of a key that hold the inverted expert.  No expert has all of them, so that no code is 0: NaN stays NaN
// whatever its low bits were, and an infinity becomes NaN.
constexpr unsigned CODE = bits_below(TEAM * ITEMS + 1);

__device__ inline int expert_of_short_key(float key) { return int(~__float_as_uint(key) & CODE); }

// Puts the larger number first; a NaN becomes both.
__device__ inline void order_or_nan(float& a, float& b) {
    const float larger = largest_or_nan(a, b);
    b = smallest_or_nan(a, b), a = larger;
}

// Makes the list of the SORTED largest keys of two sorted lists; `mirrored` is the second one in ascending order.  Where K
// is SORTED, `next` becomes the largest of itself and of the keys that are left out.
__device__ inline void merge(float (&list)[SORTED], const float (&mirrored)[SORTED], float& next) {
#pragma unroll
    for (int i = 0; i < SORTED; ++i) {
        if (K == SORTED) next = largest_or_nan(next, smallest_or_nan(list[i], mirrored[i]));
        list[i] = largest_or_nan(list[i], mirrored[i]);
    }
#pragma unroll
    for (int step = SORTED / 2; step; step /= 2)
#pragma unroll
        for (int i = 0; i < SORTED; ++i)
            if (!(i & step)) order_or_nan(list[i], list[i + step]);
}

// The largest keys of the team, the largest first, and the `next` one behind the K-th; all NaN if one is.
__device__ inline void sort_keys(const float (&z)[ITEMS], bool whole, float (&list)[SORTED], float& next) {
    const unsigned mask = ~CODE | unsigned(first_expert());
    next = -LARGEST_FLOAT32;
#pragma unroll
    for (int first = 0; first < ITEMS; first += SORTED) {
        float keys[SORTED], mirrored[SORTED];
#pragma unroll
        for (int i = 0; i < SORTED; ++i) {
            // key = (z & ~CODE) | (CODE & ~expert).  The bits of the lane and those of item i never overlap, so that one
            // logic operation of three inputs makes it of the constant `code` and of `mask`.
            const unsigned code = CODE & ~unsigned(distance_of(first + i));
            const float key = __uint_as_float((__float_as_uint(z[first + i]) & mask & ~code) | (code & ~mask));
            keys[i] = first + i < ITEMS - WIDTH || whole ? key : -LARGEST_FLOAT32;
        }
        sort_eight(keys, [](float& a, float& b) { order_or_nan(a, b); });
#pragma unroll
        for (int i = 0; i < SORTED; ++i) {
            if (first == 0) list[i] = keys[i];
            mirrored[i] = keys[SORTED - 1 - i];
        }
        if (first) merge(list, mirrored, next);
    }
#pragma unroll
    for (int step = 1; step < TEAM; step *= 2) {
        float mirrored[SORTED];
#pragma unroll
        for (int i = 0; i < SORTED; ++i) mirrored[i] = across(list[SORTED - 1 - i], step);
        if (K == SORTED) next = largest_or_nan(next, across(next, step));
        merge(list, mirrored, next);
    }
    if (K < SORTED) next = list[K % SORTED];
}

// Writes the K chosen experts of a token to the team's memory.  Returns false, and writes nothing, if keys do not decide
// the choice for every token of the warp.  `largest` becomes the largest logit.
__device__ inline bool choose_by_network(
    const X* row, const float (&z)[ITEMS], bool whole, const TeamMemory& memory, float& largest
) {
    float list[SORTED], next;
    sort_keys(z, whole, list, next);
    bool equal = false;
#pragma unroll
    for (int j = 0; j < K; ++j) {
        const float after = j + 1 < K ? list[j + 1] : next;
        // The sign is left out: 0 equals -0.
        equal = equal || ((__float_as_uint(list[j]) ^ __float_as_uint(after)) & (~CODE << 1 >> 1)) == 0;
    }
    // Below the least normal number are the keys of negative logits and of -0, where a larger code makes a smaller key, and
    // those of 0, which equals -0.  A NaN has made all keys NaN.
    bool unsure = !(next >= 1.17549435e-38f);
    if (sizeof(X) == 4 && any_lane(equal)) {
        unsigned low = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) low |= __float_as_uint(z[i]);
#pragma unroll
        for (int step = 1; step < TEAM; step *= 2) low |= across(low, step);
        unsure = unsure || (low & CODE);
    }
    if (any_lane(equal && unsure)) return false;
    const int lane = threadIdx.x % TEAM;
    largest = wide(row[expert_of_short_key(list[0])]);
#pragma unroll
    for (int first = 0; first < K; first += TEAM) {
        float key = list[first];
#pragma unroll
        for (int i = 1; i < TEAM && first + i < K; ++i) key = lane == i ? list[first + i] : key;
        const int expert = expert_of_short_key(key);
        if (first + lane < K) memory.chosen[first + lane] = {wide(row[expert]), expert};
    }
    sync_team();
    return true;
}
