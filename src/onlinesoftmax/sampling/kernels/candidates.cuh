// The candidates for the largest keys of a row, in a list of sort keys in the shared memory of each block.
//
// A block inserts the tokens of its slice that reach a threshold, which at least the wanted number of tokens of the row
// reach.  A list that grows too long is cut to the wanted number of tokens, which raises the threshold.

// Where keys are wanted, threads look every second tile whether the list is too long.
static_assert(CAPACITY >= FEW + 2 * TILE, "room for two tiles");

// Shared by the threads of a block.
struct Board {
    unsigned count;          // keys in the list
    float threshold;         // no token below it is inserted, but NaN
    unsigned peak;           // the word of the largest score so far; later, of another number
    unsigned trough;         // the inverted word of the least score above -inf of the first tile
    unsigned counts[2];      // keys in other lists
    unsigned limits[2];      // the word of the largest score in a window, and the inverted one of the least
    unsigned of_warps[WARPS];
};

// A number that those of at least n lanes reach: lanes with equal numbers count once.
__device__ inline unsigned reached_by_lanes(unsigned own, int n) {
    unsigned found = 0;
#pragma unroll 1
    for (; n; --n) {
        found = __reduce_max_sync(~0u, own);
        own = own == found ? 0 : own;
    }
    return found;
}

// A number that those of at least n threads reach, and hardly more; 0 for more than three of four threads.  Each warp gives
// its n-th largest number, n = `each`, and three of four warps, or less, reach the result.
__device__ inline unsigned reached(unsigned own, int n, unsigned* of_warps) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = (n + WARPS * 3 / 4 - 1) / (WARPS * 3 / 4);
    if (each > 32) return 0;
    own = reached_by_lanes(own, each);
    if (lane == 0) of_warps[warp] = own;
    __syncthreads();
    return reached_by_lanes(lane < WARPS ? of_warps[lane] : 0, (n + each - 1) / each);
}

// The score words of a list, from the largest down, at which a running sum of weights reaches a goal: they are from
// `low` to `high`, and weigh `own`; what is above them weighs `above`.
struct Range { unsigned low, high; uint64 above, own; };

// Adds to a number in shared memory.  The addition of 64 bits is a loop, in which threads that add to one number wait for each
// other; those of 32 bits are not.
__device__ inline void add_shared(unsigned* to, unsigned more) { atomicAdd(to, more); }
__device__ inline void add_shared(uint64* to, uint64 more) {
    unsigned* const halves = reinterpret_cast<unsigned*>(to);   // the lower one first
    const unsigned low = unsigned(more), before = atomicAdd(&halves[0], low);
    const unsigned high = unsigned(more >> 32) + (before + low < low);
    if (high) atomicAdd(&halves[1], high);
}

// Narrows the range, which has the goal, to one of equal parts: weight(key) is added up in numbers of type T.
template <class T, class Weight>
__device__ inline void narrow(Range& range, Slice& slice, const uint64* list, int count, uint64 goal, Weight weight) {
    const int thread = threadIdx.x;
    T* const bins = reinterpret_cast<T*>(slice.exchange->bins);
    uint64* const found = slice.exchange->found;
    int shift = 0;
    while ((range.high - range.low) >> shift >= THREADS) ++shift;
    bins[thread] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < count; i += THREADS) {
        const unsigned word = unsigned(list[i] >> 32);
        if (word >= range.low && word <= range.high) add_shared(&bins[(range.high - word) >> shift], weight(list[i]));
    }
    __syncthreads();
    const T own = bins[thread];
    T total;
    const uint64 above = range.above + slice.scan(own, total);
    // Only the keys of NaN can miss the goal.
    if (above < goal && (above + own >= goal || thread == THREADS - 1)) found[0] = thread, found[1] = above, found[2] = own;
    __syncthreads();
    const unsigned size = (1u << shift) - 1;
    range.high -= unsigned(found[0]) << shift;
    range.low = range.high - range.low > size ? range.high - size : range.low;
    range.above = found[1], range.own = found[2];
}

// Removes the keys from a list whose score words are below `least`.
__device__ inline void compact(uint64* list, unsigned least, Board* board) {
    const int thread = threadIdx.x, count = board->count;
    __syncthreads();
    if (thread == 0) board->count = 0;
#pragma unroll 1
    for (int first = 0; first < count; first += THREADS) {
        const uint64 key = first + thread < count ? list[first + thread] : 0;
        __syncthreads();   // before keys are overwritten
        if (key && unsigned(key >> 32) >= least) list[atomicAdd(&board->count, 1u)] = key;
    }
    __syncthreads();
}

// Cuts a list of n or more keys to its n largest keys, and those near or equal to the last; `most`
// is the score word of the largest.  Returns how many are left: board->count may have grown by then.
__device__ __noinline__ int cut(uint64* list, int n, unsigned most, Slice slice, Board* board) {
    Range range{word_of(board->threshold), most, 0, 0};
    do narrow<unsigned>(range, slice, list, board->count, n, [](uint64) { return 1u; });
    while (range.low < range.high && range.above + range.own > n + max(n / 4, 14));
    compact(list, range.low, board);
    const int count = int(board->count);
    if (threadIdx.x == 0) board->threshold = fmax(finite_score(range.low), board->threshold);
    __syncthreads();
    return count;
}

// A thread's view of the slice: the largest score; whether there is NaN; whether the list is complete.
struct Reading { float peak; bool bad, fits; };

// Lists the candidates of a slice that shared memory holds, with a threshold that is good for all of it: most threads have no
// token that reaches it, not even their largest, `peak`.  The list is empty where it does not fit.
__device__ inline Reading list_held(int wanted, Slice slice, uint64* list, Board* board, float peak, bool bad) {
    Reading reading{peak, bad, true};
    const float threshold = board->threshold;
    if (!(peak < threshold))
#pragma unroll 1
        for (int first = 0; first < slice.count; first += 32 / OWN_TOKENS * TILE) {
            // A bit for each token of several tiles: reads of shared memory that nothing waits for overlap.
            const int end = min(slice.count, first + 32 / OWN_TOKENS * TILE);
            unsigned hits = 0, bit = 1;
#pragma unroll 2
            for (int tile = first; tile < end; tile += TILE) {
                Tiles tiles;
                tiles.take(slice, tile);
#pragma unroll
                for (int i = 0; i < OWN_TOKENS; ++i) hits |= tiles.score(i) >= threshold ? bit << i : 0;
                bit <<= OWN_TOKENS;
            }
#pragma unroll 1
            for (; hits; hits &= hits - 1) {
                const int i = __ffs(hits) - 1, token = first + i / OWN_TOKENS * TILE + Tiles::token(i % OWN_TOKENS);
                const float x = wide(slice.held[token / VECTOR], token % VECTOR);
                append(list, CAPACITY, &board->count, key_of(x, unsigned(slice.begin + token)));
            }
        }
    __syncthreads();
    // There are more keys where many are equal, and where a block has so few tokens above -inf that the threshold is none.
    const unsigned count = board->count;
    reading.fits = count <= CAPACITY && (count <= FEW || cut(list, wanted, ~0u, slice, board) <= FEW);
    __syncthreads();
    if (threadIdx.x == 0 && !reading.fits) board->count = 0;
    __syncthreads();
    return reading;
}
