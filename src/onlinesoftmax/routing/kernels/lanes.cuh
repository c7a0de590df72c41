// The lanes that share a token: which logits each of them holds, and sums, maxima and lists that they make together.
//
// TEAM adjacent threads share a token, and TEAMS teams make a block: a team is a part of a warp, or the whole block.  A
// lane holds ITEMS logits: CHUNKS chunks of WIDTH adjacent ones, TEAM * WIDTH apart.

constexpr int ITEMS = CHUNKS * WIDTH, TEAMS = THREADS / TEAM, LANES = TEAM < 32 ? TEAM : 32;
static_assert(ITEMS <= 32 && THREADS % TEAM == 0 && (TEAM <= 32 || TEAMS == 1));

// AT_ONCE: tokens that a warp, or a block that is one team, takes at a time.  UNITS: how many such warps a block has.
constexpr int AT_ONCE = TEAM < 32 ? 32 / TEAM : 1, UNITS = TEAM > 32 ? 1 : WARPS;

// The first token of a warp of part `part` of a sequence.  A warp takes AT_ONCE adjacent tokens, then moves by token_step,
// so that all multiprocessors have tokens until the end.
__device__ inline int first_token(int part, int parts) {
    return ((TEAM > 32 ? 0 : int(threadIdx.x / 32)) * parts + part) * AT_ONCE;
}
__device__ inline int token_step(int parts) { return UNITS * parts * AT_ONCE; }
__device__ inline int token_of_team() { return TEAM > 32 ? 0 : int(threadIdx.x % 32 / TEAM); }

// The expert of a lane's item i: that of its first item, and a constant distance from there on.
__device__ inline int first_expert() { return int(threadIdx.x % TEAM * WIDTH); }
__device__ constexpr int distance_of(int i) { return i / WIDTH * TEAM * WIDTH + i % WIDTH; }
__device__ inline int expert_of(int i) { return first_expert() + distance_of(i); }

// The first expert, hidden from the compiler, which else turns sums into ORs and computes each address apart.
__device__ inline unsigned first_of_addresses() {
    unsigned first = unsigned(first_expert()); asm("" : "+r"(first)); return first;
}

// A bit for each item of the lane that is an expert: only the last chunk may lie behind the row's end, and not with WHOLE.
__device__ inline bool has_whole_chunks(int experts) { return WHOLE || expert_of(ITEMS - WIDTH) < experts; }
__device__ inline unsigned own_items(int experts) {
    return (~0u >> (32 - ITEMS)) >> (has_whole_chunks(experts) ? 0 : WIDTH);
}

// Loads the lane's part of a row; items behind its end become `rest`.
template <class T> __device__ inline void load_row(float (&z)[ITEMS], const T* row, int experts, float rest) {
    constexpr int LOADED = WIDTH * sizeof(T) <= 16 ? WIDTH : 16 / sizeof(T);   // by one instruction
    Chunk<T, WIDTH> chunks[CHUNKS];
    const bool whole = has_whole_chunks(experts);
    const T* const own = row + first_of_addresses();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (c < CHUNKS - 1 || whole) load<LOADED, CachePolicy::NORMAL>(chunks[c], own + distance_of(c * WIDTH), 1);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        z[i] = i < ITEMS - WIDTH || whole ? wide(chunks[i / WIDTH], i % WIDTH) : rest;
}

__device__ inline void sync_team() {
    if constexpr (TEAM > 32) __syncthreads();
    else __syncwarp();
}

// Shared memory for one number of each warp, where TEAM > 32.  Calls use two sides in turn, so that one barrier a call is
// enough.
struct Board {
    unsigned (*of_warps)[WARPS];
    int side;
};

struct Sum {
    template <class T> __device__ static inline T of(T a, T b) { return a + b; }
};
struct Maximum {
    // The larger number; of a number and NaN, the number.
    __device__ static inline float of(float a, float b) { return fmax(a, b); }
};

// The fold of the numbers of a team's lanes, for all of them, in the same order on every run.  T has 32 bits.
template <class Fold, class T> __device__ inline T fold_team(T x, Board& board) {
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) x = Fold::of(x, across(x, step));
    if constexpr (TEAM > 32) {
        const int side = board.side ^= 1;
        if (threadIdx.x % 32 == 0) board.of_warps[side][threadIdx.x / 32] = reinterpret_cast<unsigned&>(x);
        __syncthreads();
        x = reinterpret_cast<const T&>(board.of_warps[side][0]);
#pragma unroll
        for (int i = 1; i < WARPS; ++i) x = Fold::of(x, reinterpret_cast<const T&>(board.of_warps[side][i]));
    }
    return x;
}

// True if a condition holds in every lane of the warp.  With TEAM > 32, it must be equal in all threads of the block.
__device__ inline bool all_teams(bool x) { return TEAM > 32 ? x : __all_sync(~0u, x); }

// True if a condition holds in any lane of the warp; with TEAM > 32, in any thread of the block.
__device__ inline bool any_lane(bool x) { return TEAM > 32 ? __syncthreads_or(x) : __any_sync(~0u, x); }

// The sum of the numbers of the team's lanes before this one; `total` becomes that of all lanes.
__device__ inline int sum_before(int x, int& total, Board& board) {
    const int lane = threadIdx.x % 32;
    int up_to = x;
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const int other = __shfl_up_sync(~0u, up_to, step, LANES);
        if (lane % LANES >= step) up_to += other;
    }
    total = from_lane(up_to, lane | (LANES - 1));
    if constexpr (TEAM > 32) {
        const int side = board.side ^= 1, of_warp = total, warp = threadIdx.x / 32;
        if (lane == 0) board.of_warps[side][warp] = of_warp;
        __syncthreads();
        total = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            if (i == warp) up_to += total;
            total += int(board.of_warps[side][i]);
        }
    }
    return up_to - x;
}
