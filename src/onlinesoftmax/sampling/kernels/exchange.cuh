// Words that the threads of a block, and the blocks of a cluster, merge; and the slice of a row that a block reads.
//
// Most loops are not unrolled: a row takes microseconds, and each line of instructions has to come from memory first.

// Where threads and blocks leave words for each other.  With two buffers in turn, a block overwrites one only after it has
// the next words of every block, which a block sends after it has read those before.
constexpr int WORDS = 8, WARPS = THREADS / 32, BINS = 128;   // BINS of search.cuh
struct Exchange {
    uint64 of_warps[WARPS][WORDS];
    uint64 blocks[2][CLUSTER][WORDS];
    uint64 bins[THREADS];
    uint64 bins_of_blocks[2][CLUSTER][BINS];
    uint64 found[3];
    uint64 arrived[2];    // barriers that count the words in `blocks`
    uint64 gathered;      // and those of a list
    uint64 early, added;  // and of an inbox, and sums of counts

    // Before the cluster opens, by one thread.
    __device__ inline void prepare() {
        if (CLUSTER > 1)
            prepare_words(&arrived[0]), prepare_words(&arrived[1]), prepare_words(&gathered), prepare_words(&early),
            prepare_words(&added);
    }
};

// Moves the line of this address to the L2 cache.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

// The sum of the numbers of all lanes, for each of them: one instruction adds 22 bits of all.
__device__ inline uint64 sum_of_lanes(uint64 own) {
    constexpr int BITS = 22;
    uint64 sum = 0;
#pragma unroll
    for (int at = 0; at < 64; at += BITS)
        sum += uint64(__reduce_add_sync(~0u, unsigned(own >> at) & ((1u << BITS) - 1))) << at;
    return sum;
}

// A slice of a row, and this thread's view of it.
struct Slice {
    const X* x;       // the first token of the slice
    Exchange* exchange;
    int64 begin;      // its number in the row
    int count, rank;  // the tokens of the slice; the block's number in the cluster
    int turn;         // words that were shared so far; the next ones go to the buffer turn % 2
    int bins_turn;    // the buffer for bins that is stored in next
    Chunk<X, VECTOR>* held;   // its copy in shared memory (tiles.cuh)

    // Adjacent tokens from number i of the slice on, without a branch, so that nothing waits for them before their use.
    // Near and behind the end, others are loaded: `complete` replaces them.
    __device__ inline void fetch(Chunk<X, VECTOR>& to, int i) const {
        if (ALIGNED) {
            if (count >= VECTOR) load<VECTOR, CachePolicy::NORMAL>(to, x + min(i, count / VECTOR * VECTOR - VECTOR), 1);
        } else if (count) {
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) to.at[j] = x[min(i + j, count - 1)];
        }
    }
    // Makes fetched tokens those from number i on; -inf behind the end.
    __device__ inline void complete(Chunk<X, VECTOR>& fetched, int i) const {
        if (i + VECTOR <= count) return;
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            if (i + j < count) fetched.at[j] = x[i + j];
            else clear(fetched.at[j], false);
        }
    }

    // Calls use(score, token) for the thread's tokens.
    template <class Use> __device__ inline void each(Use use) const {
#pragma unroll 1
        for (int i = threadIdx.x; i < count; i += THREADS) use(wide(x[i]), unsigned(begin + i));
    }

    // The merge of the words of all threads of the block, for each of them: merge(to, words) merges two of them.
    template <int N, class Merge> __device__ inline void merge_threads(uint64 (&words)[N], Merge merge) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const auto merge_lanes = [&](int lanes) {
#pragma unroll 1
            for (int step = lanes / 2; step; step /= 2) {
                uint64 other[N];
#pragma unroll
                for (int i = 0; i < N; ++i) other[i] = across(words[i], step);
                merge(words, other);
            }
        };
        merge_lanes(32);
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < N; ++i) exchange->of_warps[warp][i] = words[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = exchange->of_warps[lane % WARPS][i];
        merge_lanes(WARPS);
        __syncthreads();   // before the words of warps are overwritten
    }
    // Gives `words` of each block, which its first warp has, to all threads: returns them by block.  All threads of the block
    // have to meet between two calls.  With `stores`, every block sees all earlier stores of the others too.
    using Words = const uint64 (*)[WORDS];
    template <int N> __device__ inline Words share(const uint64 (&words)[N], bool stores = false) {
        const int buffer = turn & 1;
        uint64* const arrived = &exchange->arrived[buffer];
        if (CLUSTER > 1) {
            // The threads of the block have met, so that one warp shows the stores of all.
            if (stores && threadIdx.x < 32) show_stores();
            if (threadIdx.x == 0) expect_words(arrived, N * CLUSTER);
            if (threadIdx.x < CLUSTER)
#pragma unroll
                for (int i = 0; i < N; ++i) send_word(&exchange->blocks[buffer][rank][i], words[i], arrived, threadIdx.x);
            wait_for_words(arrived, turn >> 1 & 1);
        } else {
            if (threadIdx.x == 0)
#pragma unroll
                for (int i = 0; i < N; ++i) exchange->blocks[buffer][0][i] = words[i];
            __syncthreads();
        }
        ++turn;
        return shared();
    }

    // The words that were given last.
    __device__ inline Words shared() const { return exchange->blocks[(turn - 1) & 1]; }

    // As share, for the first warp alone: each of its lanes has the word of its number, modulo WORDS.
    __device__ inline Words share_lanes(uint64 word) {
        const int buffer = turn & 1, i = threadIdx.x % WORDS;
        uint64* const arrived = &exchange->arrived[buffer];
        ++turn;
        if (threadIdx.x >= 32) return shared();
        if (CLUSTER > 1) {
            if (threadIdx.x == 0) expect_words(arrived, WORDS * CLUSTER);
#pragma unroll 1
            for (int block = threadIdx.x / WORDS; block < CLUSTER; block += 32 / WORDS)
                send_word(&exchange->blocks[buffer][rank][i], word, arrived, block);
            wait_for_words(arrived, (turn - 1) >> 1 & 1);
        } else {
            if (threadIdx.x < WORDS) exchange->blocks[buffer][0][i] = word;
            __syncwarp();
        }
        return shared();
    }

    // Gives the words of block 0, which does not wait, to the other blocks.
    template <int N> __device__ inline void tell(uint64 (&words)[N]) {
        if (CLUSTER == 1) return;
        const int buffer = turn & 1;
        uint64* const arrived = &exchange->arrived[buffer];
        if (threadIdx.x == 0) expect_words(arrived, rank ? N : 0);
        if (rank == 0 && threadIdx.x && threadIdx.x < CLUSTER)
#pragma unroll
            for (int i = 0; i < N; ++i) send_word(&exchange->blocks[buffer][0][i], words[i], arrived, threadIdx.x);
        if (rank) {
            wait_for_words(arrived, turn >> 1 & 1);
#pragma unroll
            for (int i = 0; i < N; ++i) words[i] = exchange->blocks[buffer][0][i];
        }
        ++turn;
    }

    // The merge of the words of all threads of the cluster.
    template <int N, class Merge> __device__ inline void reduce(uint64 (&words)[N], Merge merge) {
        merge_threads(words, merge);
        if (CLUSTER == 1) return;
        const Words shared = share(words);
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = shared[0][i];
#pragma unroll 1
        for (int block = 1; block < CLUSTER; ++block) merge(words, shared[block]);
    }

    // The sum of the numbers of the threads before this one; `total` is that of all threads of the block.
    template <class T> __device__ inline T scan(T own, T& total) {
        T* const of_warps = reinterpret_cast<T*>(exchange->of_warps);
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const auto before = [&](T x) {
            T sum = x;
#pragma unroll 1
            for (int step = 1; step < 32; step *= 2) {
                const T other = from_lane(sum, lane >= step ? lane - step : lane);
                if (lane >= step) sum += other;
            }
            total = from_lane(sum, 31);
            const T others = from_lane(sum, lane ? lane - 1 : 0);
            return lane ? others : T(0);
        };
        const T of_lanes = before(own);
        if (lane == 0) of_warps[warp] = total;
        __syncthreads();
        const T of_others = before(lane < WARPS ? of_warps[lane] : T(0));
        __syncthreads();   // before the words of warps are overwritten
        return from_lane(of_others, warp) + of_lanes;
    }
};
