// The candidates for the largest keys of a row, in a list of sort keys in the shared memory of each block.
//
// A block inserts the tokens of its slice that reach a threshold, which no more than the wanted number of tokens are
// above.  A list that grows too long is cut to the wanted number of tokens, which raises the threshold.

// Tokens of a thread that are read together, and of a block.
constexpr int EACH = VECTOR < 8 ? 8 / VECTOR : 1, TILE = THREADS * VECTOR * EACH;

// Keys of a list before a tile is inserted, and with it.
static_assert(CAPACITY == FEW + TILE, "room for one tile");

// Shared by the threads of a block.
struct Board {
    unsigned count;          // keys in the list
    float threshold;         // no token below it is inserted
    unsigned peak, trough;   // words of the largest score so far, and of the least of the first tile, inverted
    unsigned counts[2];      // keys in other lists
};

// A number that at least n score words of a list reach, and at most half as many more if possible.  All are between
// `least` and `most`.
__device__ inline unsigned reached(const uint64* list, int count, int n, unsigned least, unsigned most) {
    unsigned bit = 1u << 31;
    while (bit && !((least ^ most) & bit)) bit /= 2;
    unsigned found = bit ? most & ~(2 * bit - 1) : most;   // the leading bits that all have
#pragma unroll 1
    for (; bit; bit /= 2) {
        const unsigned tried = found | bit;
        int sum = 0;
#pragma unroll 1
        for (int first = 0; first < count; first += THREADS) {
            const int i = first + threadIdx.x;
            sum += __syncthreads_count(i < count && unsigned(list[i] >> 32) >= tried);
        }
        if (sum >= n) found = tried;
        if (sum >= n && sum <= n + n / 2) break;
    }
    return found;
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

// Cuts a list to its n largest keys and some more, of which the largest has the score word `most`.  Returns how many
// keys are left: after the last barrier, other threads may insert keys.
__device__ __noinline__ int cut(uint64* list, int n, unsigned most, Board* board) {
    const unsigned least = reached(list, board->count, n, word_of(board->threshold), most);
    compact(list, least, board);
    const int count = int(board->count);
    if (threadIdx.x == 0) board->threshold = fmax(finite_score(least), board->threshold);
    __syncthreads();
    return count;
}
