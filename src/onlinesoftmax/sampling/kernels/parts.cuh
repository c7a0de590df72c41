// The result of a part of a row, and its merge within a warp, a block and a cluster, for unfiltered.cuh.

constexpr int WARPS = THREADS / 32;

// 2^n for a whole number n up to 127; 0 below the normal numbers.
__device__ inline float exact_power(float n) { return n < -126 ? 0 : __int_as_float((int(n) + 127) << 23); }

// Flags of a part: it has a NaN; it has logits whose powers float32 does not hold.
constexpr unsigned HAS_NAN = 1, IRREGULAR = 2;

// The result of a thread, a warp, a block or a row.
struct Part {
    uint64 key, second;   // the largest key and the one after it; 0 for none
    double sum;           // the sum of the powers, in units of 2^n
    unsigned token;       // the token of the largest key, and its logit
    float logit;
    int n;
    unsigned absent;      // tokens with -inf
    unsigned flags;
};
constexpr int LOWEST = -(1 << 28);   // the n of an empty sum: below every other
__device__ inline Part nothing() { return {0, 0, 0, ~0u, 0, LOWEST, 0, 0}; }

// Merges the parts of the lanes of a warp, for all of them; of equal keys, the lower token wins.
__device__ inline Part merge_lanes(Part a) {
    if (!(a.sum != 0)) a.n = LOWEST;
    Part to;
    to.n = int(__reduce_max_sync(~0u, unsigned(a.n) ^ 0x80000000u) ^ 0x80000000u);
    to.sum = add_lanes(a.sum != 0 ? a.sum * exact_power(float(a.n - to.n)) : a.sum);
    to.absent = __reduce_add_sync(~0u, a.absent);
    to.flags = __reduce_or_sync(~0u, a.flags);
    to.key = largest_of_lanes(a.key);
    to.token = ~__reduce_max_sync(~0u, a.key == to.key ? ~a.token : 0u);
    const bool wins = a.key == to.key && a.token == to.token;
    to.logit = __uint_as_float(__reduce_max_sync(~0u, wins ? __float_as_uint(a.logit) : 0u));
    to.second = largest_of_lanes(wins ? a.second : a.key);
    return to;
}

// A part as 64-bit words; the last one holds n, two bits of flags, and `absent`.
constexpr int PART_WORDS = 5;
__device__ inline uint64 word_of(const Part& a, int i) {
    if (i < 2) return i ? a.second : a.key;
    if (i == 2) return __double_as_longlong(a.sum);
    return i == 3 ? uint64(a.token) << 32 | __float_as_uint(a.logit) : uint64(unsigned(a.n * 4) | a.flags) << 32 | a.absent;
}
__device__ inline Part part_of(const uint64* words) {
    const int n_and_flags = int(words[4] >> 32);
    return {words[0], words[1], __longlong_as_double(words[2]), unsigned(words[3] >> 32),
            __uint_as_float(unsigned(words[3])), n_and_flags >> 2, unsigned(words[4]), unsigned(n_and_flags) & 3};
}

// Parts of warps, and in block 0 those of the blocks of the cluster, that wait for the merge.
struct PartBoard {
    uint64 of_warps[WARPS][PART_WORDS], of_blocks[CLUSTER][PART_WORDS];
    uint64 arrived;          // the barrier that counts the bytes of `of_blocks`
    uint64 bound;            // the largest key that the block has seen
    uint64 keys[WARPS];      // the largest key and logit of the first chunks
    unsigned peaks[WARPS];
    double ratio;
    int again;
};

// Merges the parts of the threads of a block, for its first warp.
__device__ inline Part merge_block(Part a, PartBoard& board) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = merge_lanes(a);
    if (lane < PART_WORDS) board.of_warps[warp][lane] = word_of(a, lane);
    __syncthreads();
    return warp ? a : merge_lanes(lane < WARPS ? part_of(board.of_warps[lane]) : nothing());
}

// Merges the parts of the blocks of a cluster, for the first warp of its first block.
__device__ inline Part merge_cluster(Part a, PartBoard& board, int rank) {
    if constexpr (CLUSTER > 1) {
        const int lane = threadIdx.x % 32;
        wait_for_beginnings();
        if (threadIdx.x < PART_WORDS) send(&board.of_blocks[rank][lane], word_of(a, lane), &board.arrived, 0);
        if (rank || threadIdx.x >= 32) return a;
        wait_for_messages(&board.arrived);
        a = merge_lanes(lane < CLUSTER ? part_of(board.of_blocks[lane]) : nothing());
    }
    return a;
}
