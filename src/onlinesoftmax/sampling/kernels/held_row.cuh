// A row in the shared memory of a cluster: sums over its tokens, the sort key at which a sum reaches a goal, and the
// tokens with the largest keys.

constexpr int BINS = 128;

// The largest sort keys: those of a block, and in block 0 those of all blocks.
struct Largest {
    uint64 own[MOST_TOP], all[MOST_TOP];
    unsigned count;
};

// Where the threads of a block, and the blocks of a cluster, leave words for each other.  With two buffers in turn, a
// block overwrites one only after a barrier of the cluster that every block reaches after it has read it.
constexpr int WORDS = 5, WARPS = THREADS / 32;
struct Exchange {
    uint64 of_warps[WARPS][WORDS];
    uint64 mine[WORDS];
    uint64 blocks[2][CLUSTER][WORDS];
    uint64 bins[BINS];
    uint64 bins_of_blocks[2][CLUSTER][BINS];
    uint64 found[2];
};

// A row in the shared memory of a cluster, and this thread's view of it.
struct Slice {
    const X* held;
    Exchange* exchange;
    int64 begin;      // the first token of the slice
    int count, rank;  // its tokens; the block's number in the cluster
    int buffer;       // the buffer that is stored in next

    // Calls use(score, token) for the thread's tokens.
    template <class Use> __device__ inline void each(Use use) const {
        for (int i = threadIdx.x; i < count; i += THREADS) use(wide(held[i]), unsigned(begin + i));
    }

    // Gives `words` of each block, which its thread 0 has, to all threads: fold(words of a block) for each block.
    template <int N, class Fold> __device__ inline void share(const uint64 (&words)[N], Fold fold) {
        const int thread = threadIdx.x;
        if (thread == 0)
#pragma unroll
            for (int i = 0; i < N; ++i) exchange->mine[i] = words[i];
        __syncthreads();
        if (thread < N * CLUSTER) put_word(&exchange->blocks[buffer][rank][thread % N], exchange->mine[thread % N], thread / N);
        wait_for_cluster();
        for (int block = 0; block < CLUSTER; ++block) fold(exchange->blocks[buffer][block]);
        buffer ^= 1;
    }

    // The merge of the words of all threads of the cluster: merge(to, words) merges two of them.
    template <int N, class Merge> __device__ inline void reduce(uint64 (&words)[N], Merge merge) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 16; step; step /= 2) {
            uint64 other[N];
#pragma unroll
            for (int i = 0; i < N; ++i) other[i] = across(words[i], step);
            merge(words, other);
        }
        if (lane == 0)
#pragma unroll
            for (int i = 0; i < N; ++i) exchange->of_warps[warp][i] = words[i];
        __syncthreads();
        for (int other = 0; other < WARPS; ++other)
            if (other != warp) merge(words, exchange->of_warps[other]);
        if (CLUSTER == 1) {
            __syncthreads();
            return;
        }
        bool begun = false;
        const uint64 (&own)[N] = words;
        uint64 total[N];
        share(own, [&](const uint64* of_block) {
            if (begun) merge(total, of_block);
            else
                for (int i = 0; i < N; ++i) total[i] = of_block[i];
            begun = true;
        });
        for (int i = 0; i < N; ++i) words[i] = total[i];
    }

    // What all tokens of the row weigh together.
    template <class Weight> __device__ inline uint64 add(Weight weight) {
        uint64 total[1] = {0};
        each([&](float x, unsigned token) { total[0] += weight(x, token); });
        reduce(total, [](uint64 (&to)[1], const uint64* other) { to[0] += other[0]; });
        return total[0];
    }

    // Adds the bins of all blocks, and finds the first at which the running sum reaches `goal`, the last bin if none does:
    // exchange->found has its number and the sum of the bins before it.
    __device__ inline void find_bin(uint64 goal) {
        const int thread = threadIdx.x;
        __syncthreads();
        for (int i = thread; i < BINS * CLUSTER; i += THREADS)
            put_word(&exchange->bins_of_blocks[buffer][rank][i % BINS], exchange->bins[i % BINS], i / BINS);
        wait_for_cluster();
        if (thread < 32) {
            constexpr int EACH = BINS / 32;
            uint64 own[EACH], sum = 0;
            for (int i = 0; i < EACH; ++i) {
                own[i] = 0;
                for (int block = 0; block < CLUSTER; ++block) own[i] += exchange->bins_of_blocks[buffer][block][thread * EACH + i];
                sum += own[i];
            }
            uint64 before = sum;   // the sum of this lane's bins and of those of the lanes before
            for (int step = 1; step < 32; step *= 2) {
                const uint64 other = from_lane(before, thread >= step ? thread - step : 0);
                if (thread >= step) before += other;
            }
            before -= sum;
            const bool has_last = thread == 31;
            for (int i = 0; i < EACH; ++i) {
                const bool last = has_last && i == EACH - 1;
                if (before < goal && (before + own[i] >= goal || last))
                    exchange->found[0] = thread * EACH + i, exchange->found[1] = before;
                before += own[i];
            }
        }
        buffer ^= 1;
        __syncthreads();
    }

    __device__ inline void clear_bins() {
        for (int i = threadIdx.x; i < BINS; i += THREADS) exchange->bins[i] = 0;
        __syncthreads();   // before any thread adds
    }

    // The largest sort key K such that the tokens with keys from K on weigh at least `goal`, which is positive and at most
    // what all of them weigh.  Unless it is `exact`, K is below the keys of all tokens with its score.
    //
    // A pass sorts the tokens into bins and keeps the bin in which the goal is reached: at first by their scores, over
    // `span` from the largest on, which spreads them; then by the bits of their keys, until one key is left.
    template <class Weight>
    __device__ inline uint64 key_at(uint64 goal, float m, float span, bool exact, Weight weight) {
        const float per_bin = BINS / span;
        const auto bin_of = [&](float x) {
            const float at = -below(x, m) * per_bin;
            return at < BINS - 1 ? int(at) : BINS - 1;
        };
        clear_bins();
        // The last bin has all that is far away.  It is where the goal is reached if it is not before, so nothing is added.
        each([&](float x, unsigned token) {
            const int bin = bin_of(x);
            const uint64 w = bin < BINS - 1 ? weight(x, token) : 0;
            if (w) atomicAdd(&exchange->bins[bin], w);
        });
        find_bin(goal);
        const int bin = int(exchange->found[0]);
        uint64 before = exchange->found[1], limits[] = {ALL, 0};
        each([&](float x, unsigned token) {
            if (bin_of(x) != bin || !weight(x, token)) return;
            const uint64 key = key_of(x, token);
            limits[0] = min(limits[0], key), limits[1] = max(limits[1], key);
        });
        reduce(limits, [](uint64 (&to)[2], const uint64* other) { to[0] = min(to[0], other[0]), to[1] = max(to[1], other[1]); });
        uint64 low = limits[0], high = limits[1];
        while (exact ? low < high : low >> 32 < high >> 32) {
            int shift = 0;
            while ((high - low) >> shift >= BINS) ++shift;
            clear_bins();
            each([&](float x, unsigned token) {
                const uint64 key = key_of(x, token);
                if (key < low || key > high) return;
                const uint64 w = weight(x, token);
                if (w) atomicAdd(&exchange->bins[(high - key) >> shift], w);
            });
            find_bin(goal - before);
            before += exchange->found[1];
            high -= exchange->found[0] << shift;
            const uint64 size = (uint64(1) << shift) - 1;
            low = high - low > size ? high - size : low;
        }
        return exact ? low : low >> 32 << 32;
    }

    // Gives block 0 the `top` largest sort keys, in any order.
    __device__ inline void collect(Largest& to, int64 top, float m, float span) {
        const uint64 least = key_at(top, m, span, true, [](float, unsigned) { return uint64(1); });
        if (threadIdx.x == 0) to.count = 0;
        __syncthreads();
        each([&](float x, unsigned token) {
            const uint64 key = key_of(x, token);
            if (key >= least) to.own[atomicAdd(&to.count, 1u)] = key;
        });
        __syncthreads();
        const uint64 own[] = {to.count};
        uint64 offset = 0;
        int block = 0;
        share(own, [&](const uint64* of_block) { offset += block++ < rank ? of_block[0] : 0; });
        for (unsigned i = threadIdx.x; i < to.count; i += THREADS) put_word(&to.all[offset + i], to.own[i], 0);
        wait_for_cluster();
    }
};
