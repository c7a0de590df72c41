// A row in the shared memory of a cluster: sums over its tokens, the place at which a sum reaches a goal, and the tokens
// that are furthest ahead.

constexpr int BINS = 128;

// Places of tokens: those of a block, and in block 0 those of all blocks.
struct Largest {
    uint64 own[LIST], all[LIST];
    unsigned count;
};

// Where the threads of a block, and the blocks of a cluster, leave words for each other.  The blocks store alternately in
// both sides: one that stores in a side has passed a barrier that the others enter when they have read it.
constexpr int WORDS = 5, WARPS = THREADS / 32;
struct Board {
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
    Board* board;
    int64 begin;      // the first token of the slice
    int count, rank;  // its tokens; the block's number in the cluster
    int side;         // side of the board that is stored in next

    // Calls use(score, token) for the thread's tokens.
    template <class Use> __device__ inline void each(Use use) const {
        for (int i = threadIdx.x; i < count; i += THREADS) use(wide(held[i]), unsigned(begin + i));
    }

    // Gives `words` of each block, which its thread 0 has, to all threads: fold(words of a block) for each block.
    template <int N, class Fold> __device__ inline void share(const uint64 (&words)[N], Fold fold) {
        const int thread = threadIdx.x;
        if (thread == 0)
#pragma unroll
            for (int i = 0; i < N; ++i) board->mine[i] = words[i];
        __syncthreads();
        if (thread < N * CLUSTER) put_word(&board->blocks[side][rank][thread % N], board->mine[thread % N], thread / N);
        wait_for_cluster(board);
        for (int block = 0; block < CLUSTER; ++block) fold(board->blocks[side][block]);
        side ^= 1;
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
            for (int i = 0; i < N; ++i) board->of_warps[warp][i] = words[i];
        __syncthreads();
        for (int other = 0; other < WARPS; ++other)
            if (other != warp) merge(words, board->of_warps[other]);
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

    // Adds the bins of all blocks, and finds the first bin up to which they add up to `goal`, the last bin otherwise:
    // board->found has its number and the sum of the bins before it.
    __device__ inline void find_bin(uint64 goal) {
        const int thread = threadIdx.x;
        __syncthreads();
        for (int i = thread; i < BINS * CLUSTER; i += THREADS)
            put_word(&board->bins_of_blocks[side][rank][i % BINS], board->bins[i % BINS], i / BINS);
        wait_for_cluster(board);
        if (thread < 32) {
            constexpr int EACH = BINS / 32;
            uint64 own[EACH], sum = 0;
            for (int i = 0; i < EACH; ++i) {
                own[i] = 0;
                for (int block = 0; block < CLUSTER; ++block) own[i] += board->bins_of_blocks[side][block][thread * EACH + i];
                sum += own[i];
            }
            uint64 before = sum;   // the sum of this lane's bins and of those of the lanes before
            for (int step = 1; step < 32; step *= 2) {
                const uint64 other = from_lane(before, thread >= step ? thread - step : 0);
                if (thread >= step) before += other;
            }
            before -= sum;
            const bool ends = thread == 31;
            for (int i = 0; i < EACH; ++i) {
                const bool last = ends && i == EACH - 1;
                if (before < goal && (before + own[i] >= goal || last))
                    board->found[0] = thread * EACH + i, board->found[1] = before;
                before += own[i];
            }
        }
        side ^= 1;
        __syncthreads();
    }

    __device__ inline void clear_bins() {
        for (int i = threadIdx.x; i < BINS; i += THREADS) board->bins[i] = 0;
        __syncthreads();   // before any thread adds
    }

    // The largest place up to which the tokens weigh at least `goal`, which is positive and at most what all of them
    // weigh.  The tokens with equal scores are ahead of it together, unless it is `exact`.
    //
    // A pass sorts the tokens into bins and keeps the bin in which the goal is reached: at first by their scores, which
    // spreads them, and then by their places, until one place is left.
    template <class Weight>
    __device__ inline uint64 place_at(uint64 goal, float m, float range, bool exact, Weight weight) {
        const float per_bin = BINS / range;
        const auto bin_of = [&](float x) {
            const float at = -below(x, m) * per_bin;
            return at < BINS - 1 ? int(at) : BINS - 1;
        };
        clear_bins();
        // The last bin has all that is far away.  It is where the goal is reached if it is not before, so nothing is added.
        each([&](float x, unsigned token) {
            const int bin = bin_of(x);
            const uint64 w = bin < BINS - 1 ? weight(x, token) : 0;
            if (w) atomicAdd(&board->bins[bin], w);
        });
        find_bin(goal);
        const int bin = int(board->found[0]);
        uint64 before = board->found[1], ends[] = {ALL, 0};
        each([&](float x, unsigned token) {
            if (bin_of(x) != bin || !weight(x, token)) return;
            const uint64 place = place_of(x, token);
            ends[0] = min(ends[0], place), ends[1] = max(ends[1], place);
        });
        reduce(ends, [](uint64 (&to)[2], const uint64* other) { to[0] = min(to[0], other[0]), to[1] = max(to[1], other[1]); });
        uint64 low = ends[0], high = ends[1];
        while (exact ? low < high : low >> 32 < high >> 32) {
            int shift = 0;
            while ((high - low) >> shift >= BINS) ++shift;
            clear_bins();
            each([&](float x, unsigned token) {
                const uint64 place = place_of(x, token);
                if (place < low || place > high) return;
                const uint64 w = weight(x, token);
                if (w) atomicAdd(&board->bins[(high - place) >> shift], w);
            });
            find_bin(goal - before);
            before += board->found[1];
            high -= board->found[0] << shift;
            const uint64 size = (uint64(1) << shift) - 1;
            low = high - low > size ? high - size : low;
        }
        return exact ? low : low >> 32 << 32;
    }

    // Gives block 0 the places of the `top` tokens that are furthest ahead, in any order.
    __device__ inline void collect(Largest& to, int64 top, float m, float range) {
        const uint64 from = place_at(top, m, range, true, [](float, unsigned) { return uint64(1); });
        if (threadIdx.x == 0) to.count = 0;
        __syncthreads();
        each([&](float x, unsigned token) {
            const uint64 place = place_of(x, token);
            if (place >= from) to.own[atomicAdd(&to.count, 1u)] = place;
        });
        __syncthreads();
        const uint64 own[] = {to.count};
        uint64 offset = 0;
        int block = 0;
        share(own, [&](const uint64* of_block) { offset += block++ < rank ? of_block[0] : 0; });
        for (unsigned i = threadIdx.x; i < to.count; i += THREADS) put_word(&to.all[offset + i], to.own[i], 0);
        wait_for_cluster(board);
    }
};
