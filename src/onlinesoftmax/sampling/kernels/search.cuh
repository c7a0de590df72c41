// The threshold of a filter, found in passes over the row: for rows whose candidates do not fit a list.
//
// A pass sorts the tokens into bins and keeps the bin in which the goal is reached: at first by their scores, over `span`
// from the largest on, which spreads them; then by the bits of their keys, until one key is left.

struct Search {
    Slice& slice;
    float m, span;   // the largest score of the row; the distance behind which most masses are 0

    // What all tokens of the row weigh together.
    template <class Weight> __device__ inline uint64 add(Weight weight) {
        uint64 total[1] = {0};
        slice.each([&](float x, unsigned token) { total[0] += weight(x, token); });
        slice.reduce(total, [](uint64 (&to)[1], const uint64* other) { to[0] += other[0]; });
        return total[0];
    }

    // Adds the bins of all blocks, and finds the first at which the running sum reaches `goal`, the last bin if none does:
    // slice.exchange->found has its number and the sum of the bins before it.
    __device__ inline void find_bin(uint64 goal) {
        const int thread = threadIdx.x;
        __syncthreads();
#pragma unroll 1
        for (int i = thread; i < BINS * CLUSTER; i += THREADS)
            put_word(&slice.exchange->bins_of_blocks[slice.bins_turn][slice.rank][i % BINS], slice.exchange->bins[i % BINS], i / BINS);
        wait_for_cluster();
        uint64 own = 0, total;
        if (thread < BINS)
#pragma unroll 1
            for (int block = 0; block < CLUSTER; ++block) own += slice.exchange->bins_of_blocks[slice.bins_turn][block][thread];
        const uint64 before = slice.scan(own, total);
        if (thread < BINS && before < goal && (before + own >= goal || thread == BINS - 1))
            slice.exchange->found[0] = thread, slice.exchange->found[1] = before;
        slice.bins_turn ^= 1;
        __syncthreads();
    }

    __device__ inline void clear_bins() {
#pragma unroll 1
        for (int i = threadIdx.x; i < BINS; i += THREADS) slice.exchange->bins[i] = 0;
        __syncthreads();   // before any thread adds
    }

    // The largest sort key K such that the tokens with keys from K on weigh at least `goal`, which is positive and at most
    // what all of them weigh.  Unless it is `exact`, K is below the keys of all tokens with its score.
    template <class Weight>
    __device__ inline uint64 key_at(uint64 goal, bool exact, Weight weight) {
        const float per_bin = BINS / span;
        const auto bin_of = [&](float x) {
            const float at = -below(x, m) * per_bin;
            return at < BINS - 1 ? int(at) : BINS - 1;
        };
        clear_bins();
        // The last bin has all that is far away.  It is where the goal is reached if it is not before, so nothing is added.
        slice.each([&](float x, unsigned token) {
            const int bin = bin_of(x);
            const uint64 w = bin < BINS - 1 ? weight(x, token) : 0;
            if (w) add_shared(&slice.exchange->bins[bin], w);
        });
        find_bin(goal);
        const int bin = int(slice.exchange->found[0]);
        uint64 before = slice.exchange->found[1], limits[] = {ALL, 0};
        slice.each([&](float x, unsigned token) {
            if (bin_of(x) != bin || !weight(x, token)) return;
            const uint64 key = key_of(x, token);
            limits[0] = min(limits[0], key), limits[1] = max(limits[1], key);
        });
        slice.reduce(limits, [](uint64 (&to)[2], const uint64* other) { to[0] = min(to[0], other[0]), to[1] = max(to[1], other[1]); });
        uint64 low = limits[0], high = limits[1];
        while (exact ? low < high : low >> 32 < high >> 32) {
            int shift = 0;
            while ((high - low) >> shift >= BINS) ++shift;
            clear_bins();
            slice.each([&](float x, unsigned token) {
                const uint64 key = key_of(x, token);
                if (key < low || key > high) return;
                const uint64 w = weight(x, token);
                if (w) add_shared(&slice.exchange->bins[(high - key) >> shift], w);
            });
            find_bin(goal - before);
            before += slice.exchange->found[1];
            high -= slice.exchange->found[0] << shift;
            const uint64 size = (uint64(1) << shift) - 1;
            low = high - low > size ? high - size : low;
        }
        return exact ? low : low >> 32 << 32;
    }

    // Gives block 0 the `top` largest sort keys, sorted, in its list.
    __device__ inline void collect(uint64* list, Board* board, int64 top) {
        const uint64 least = key_at(top, true, [](float, unsigned) { return uint64(1); });
        if (threadIdx.x == 0) board->count = 0;
        __syncthreads();
        slice.each([&](float x, unsigned token) {
            const uint64 key = key_of(x, token);
            if (key >= least) list[atomicAdd(&board->count, 1u)] = key;
        });
        __syncthreads();
        const uint64 own[] = {board->count};
        uint64 offset = 0;
        const Slice::Words shared = slice.share(own);
        for (int block = 0; block < slice.rank; ++block) offset += shared[block][0];
#pragma unroll 1
        for (int i = threadIdx.x; slice.rank && i < int(board->count); i += THREADS) put_word(&list[offset + i], list[i], 0);
        wait_for_cluster();
        if (slice.rank == 0) sort(list, int(top));
    }
};
