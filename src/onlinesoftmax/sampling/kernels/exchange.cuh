// Words that the threads of a block, and the blocks of a cluster, merge; and the slice of a row that a block reads.
//
// Most loops are not unrolled: a row takes microseconds, and each line of instructions has to come from memory first.

// Where threads and blocks leave words for each other.  With two buffers in turn, a block overwrites one only after a
// barrier of the cluster that every block reaches after it has read it.
constexpr int WORDS = 8, WARPS = THREADS / 32, BINS = 128;   // BINS of search.cuh
struct Exchange {
    uint64 of_warps[WARPS][WORDS];
    uint64 blocks[2][CLUSTER][WORDS];
    uint64 bins[THREADS];
    uint64 bins_of_blocks[2][CLUSTER][BINS];
    uint64 found[3];
};

// Moves the line of this address to the L2 cache.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

// A slice of a row, and this thread's view of it.
struct Slice {
    const X* x;       // the first token of the slice
    Exchange* exchange;
    int64 begin;      // its number in the row
    int count, rank;  // the tokens of the slice; the block's number in the cluster
    int buffer;       // the buffer that is stored in next
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

    // Gives `words` of each block, which all its threads have, to all threads: fold(words, block) for each block.
    template <int N, class Fold> __device__ inline void share(const uint64 (&words)[N], Fold fold) {
        if (threadIdx.x < CLUSTER)
#pragma unroll
            for (int i = 0; i < N; ++i) put_word(&exchange->blocks[buffer][rank][i], words[i], threadIdx.x);
        wait_for_cluster();
#pragma unroll 1
        for (int block = 0; block < CLUSTER; ++block) fold(&exchange->blocks[buffer][block][0], block);
        buffer ^= 1;
    }

    // The merge of the words of all threads of the cluster.
    template <int N, class Merge> __device__ inline void reduce(uint64 (&words)[N], Merge merge) {
        merge_threads(words, merge);
        if (CLUSTER == 1) return;
        uint64 total[N];
        share(words, [&](const uint64* of_block, int block) {
            if (block) merge(total, of_block);
            else
#pragma unroll
                for (int i = 0; i < N; ++i) total[i] = of_block[i];
        });
#pragma unroll
        for (int i = 0; i < N; ++i) words[i] = total[i];
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
