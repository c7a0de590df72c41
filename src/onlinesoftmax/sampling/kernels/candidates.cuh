// Lists of sort keys in the shared memory of a block: the candidates for the largest keys of a row.
//
// A block inserts the tokens of its slice that reach a threshold, which no more than the wanted number of tokens are
// above.  A list that grows too long is cut to the wanted number of tokens, which raises the threshold.

// Tokens of a thread that are read together, and of a block.
constexpr int EACH = VECTOR < 8 ? 8 / VECTOR : 1, TILE = THREADS * VECTOR * EACH;

// Keys of a list before a tile is inserted, and with it.
static_assert(CAPACITY == FEW + TILE, "room for one tile");

// Shared by the threads of a block.
struct Board {
    unsigned count;       // keys in the list
    float threshold;      // no token below it is inserted
    unsigned sums[3];
    uint64 found[2];
    unsigned counts[2];   // keys in other lists
};

// The largest number, of `bits` leading bits, that the numbers of at least n threads reach.
__device__ inline unsigned reached(unsigned own, int n, int bits) {
    unsigned found = 0;
#pragma unroll 1
    for (unsigned bit = 1u << 31; bits; bit /= 2, --bits) {
        const int count = __syncthreads_count(own >= (found | bit));
        if (count >= n) found |= bit;
        if (count == n) break;
    }
    return found;
}

// A number that only the n largest score words of a list reach, and those that equal the last of them.
__device__ inline unsigned reached(const uint64* list, int count, int n, Board* board) {
    const int thread = threadIdx.x;
    if (count <= THREADS) return reached(thread < count ? unsigned(list[thread] >> 32) : 0, n, 32);
    if (thread == 0) board->sums[0] = 0;
    __syncthreads();
    unsigned found = 0;
    int turn = 0;
#pragma unroll 1
    for (unsigned bit = 1u << 31; bit; bit /= 2) {
        const unsigned tried = found | bit;
        int sum = 0;
#pragma unroll 1
        for (int i = thread; i < count; i += THREADS) sum += unsigned(list[i] >> 32) >= tried;
        sum = add_lanes(sum);
        if (thread % 32 == 0) atomicAdd(&board->sums[turn], unsigned(sum));
        const int next = turn == 2 ? 0 : turn + 1;
        // All threads have read this sum before the last barrier.
        if (thread == 0) board->sums[next] = 0;
        __syncthreads();
        sum = int(board->sums[turn]), turn = next;
        if (sum >= n) found = tried;
        if (sum == n) break;
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

// Cuts a list to its n largest keys, and those that equal the last of them.
__device__ __noinline__ void cut(uint64* list, int n, Board* board) {
    const unsigned least = reached(list, board->count, n, board);
    compact(list, least, board);
    if (threadIdx.x == 0) board->threshold = fmax(finite_score(least), board->threshold);
    __syncthreads();
}

// Sorts a list from its largest key on; there is room for the next power of two of keys.
__device__ __noinline__ void sort(uint64* list, int count) {
    const int thread = threadIdx.x;
    int size = 32;
    while (size < count) size *= 2;
    if (size <= THREADS / 2) {
        // Adjacent threads count the keys above one key.
        const int parts = min(THREADS / size, 32), i = thread / parts;
        const uint64 own = i < count ? list[i] : 0;
        int rank = 0;
#pragma unroll 4
        for (int j = thread % parts; j < count; j += parts) rank += list[j] > own;
#pragma unroll 1
        for (int step = 1; step < parts; step *= 2) rank += across(rank, step);
        __syncthreads();
        if (i < count && thread % parts == 0) list[rank] = own;
        __syncthreads();
        return;
    }
#pragma unroll 1
    for (int i = count + thread; i < size; i += THREADS) list[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int run = 2; run <= size; run *= 2)
#pragma unroll 1
        for (int step = run / 2; step; step /= 2) {
#pragma unroll 1
            for (int i = thread; i < size / 2; i += THREADS) {
                const int a = 2 * i - (i & (step - 1)), b = a + step;
                const uint64 first = list[a], second = list[b];
                if ((first < second) == !(a & run)) list[a] = second, list[b] = first;
            }
            __syncthreads();
        }
}

// Appends the keys of this block to the list of block 0, behind the `offset` keys of the blocks before this one.
__device__ inline void gather(const Slice& slice, uint64* list, int count, uint64 offset) {
    if (slice.rank == 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) put_word(&list[offset + i], list[i], 0);
}
