// Lists the largest scores of a row with their log-probabilities, and counts the scores that come before a target's.
//
// One block:  owns `slice` adjacent tokens of a row; CLUSTER blocks own a row.
// Chosen:     for topk_logprobs of up to MOST tokens.
// Bytes:      one read of the logits.
// Limits:     rows of adjacent float32 or 16-bit logits, without score options; fewer than 2^31 tokens.
//
// A block lists the tokens of its slice that reach a threshold.  The first step of all blocks sets it, so that as many
// tokens as are wanted reach it.  A list that has become long is cut to as many, which raises the threshold.  Steps go
// through a slice by rising id, so a token of a later step is listed only if its score is larger than the last one kept.

struct TopK {
    const X* x; const int64* target;   // null unless TARGET
    float* values; int64* indices; float* logprobs; float* lse; float* target_logprob; int64* target_rank;
    int64 stride, cols, slice;
    int64 wanted;                      // number of tokens to list
};

// The list of a block, shared by its threads.
struct List {
    uint64* keys;            // CAPACITY of them
    unsigned count;          // keys of the list, and of those for which it had no room
    unsigned missed;         // if one had no room: the first place that is not filled, inverted
    float threshold;         // no token below it is listed
    unsigned least_of_ids;   // no inverted token id is smaller
    unsigned peak;           // word of the largest score
    unsigned bins[BINS];
    uint64 found[2];
    double log_sum;          // logarithm of the sum of exp(score - largest)
};

// NaN comes before all scores, whatever its sign.
__device__ inline uint64 rank_key(float x, unsigned token) { return key_of(x == x ? x : NOT_A_NUMBER, token); }

// A sum of exp(x - m) in float32 with its rounding error.  m is finite, and the largest score so far where that is.
struct ExpSum {
    float m, sum, error;

    __device__ static inline float term_of(float x, float m) { return power_of_two((x - m) * float(LOG2_E)); }
    __device__ inline void raise_to(float peak) {
        const float to = fmin(peak, LARGEST_FLOAT32);
        if (!(to > m)) return;
        const float factor = term_of(m, to);
        sum *= factor, error *= factor, m = to;
    }
    __device__ inline void add(float part) {
        const float to = sum + part;
        error += part - (to - sum), sum = to;
    }
    // The sum in units of exp(to), where `to` is at least m.
    __device__ inline double in_units_of(float to) const {
        const double all = sum < INF ? double(sum) + error : sum;   // NaN if the sum is
        return all * term_of(m, to);
    }
};

// Cuts a list to its n largest keys, and up to `more` others, by bins of keys, each a part of one before.  Returns the
// score of the last one.  Inline: a call would move the registers of the loop over the steps to memory.
__device__ inline float cut(List* list, int n, int more) {
    constexpr int OWN = (CAPACITY + THREADS - 1) / THREADS;
    const int thread = threadIdx.x, count = int(list->count);
    uint64 own[OWN];
    unsigned most = 0, least = 0;   // `least` is inverted
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
        own[i] = thread + i * THREADS < count ? list->keys[thread + i * THREADS] : 0;
        if (own[i]) most = max(most, unsigned(own[i] >> 32)), least = max(least, ~unsigned(own[i] >> 32));
    }
    if (thread < 2) list->bins[thread] = 0;
    __syncthreads();
    raise(&list->bins[0], most), raise(&list->bins[1], least);
    __syncthreads();
    uint64 high = uint64(list->bins[0]) << 32 | ~0u, low = uint64(~list->bins[1]) << 32;
    int missing = n;
#pragma unroll 1
    for (bool all = false; !all;) {
        int shift = 0;
        while ((high - low) >> shift >= BINS) ++shift;
        __syncthreads();   // before the bins and what was found are overwritten
        if (thread < BINS) list->bins[thread] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; ++i)
            if (own[i] >= low && own[i] <= high && own[i]) atomicAdd(&list->bins[(high - own[i]) >> shift], 1u);
        __syncthreads();
        if (thread < 32) {
            // Each lane adds adjacent bins.
            constexpr int EACH = BINS / 32;
            unsigned sums[EACH], sum = 0;
#pragma unroll
            for (int i = 0; i < EACH; ++i) sum += sums[i] = list->bins[thread * EACH + i];
            unsigned up_to = sum;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const unsigned other = from_lane(up_to, thread >= step ? thread - step : thread);
                if (thread >= step) up_to += other;
            }
            unsigned before = up_to - sum;
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (before < missing && before + sums[i] >= missing)
                    list->found[0] = thread * EACH + i, list->found[1] = uint64(before) << 32 | sums[i];
                before += sums[i];
            }
        }
        __syncthreads();
        high -= list->found[0] << shift;
        const uint64 size = (uint64(1) << shift) - 1;
        low = high - low > size ? high - size : low;
        missing -= int(list->found[1] >> 32);
        all = int(unsigned(list->found[1])) <= missing + more;
        // Token ids begin with zeros, which keys invert.
        if (high >> 32 == low >> 32) low = max(low, high >> 32 << 32 | list->least_of_ids);
    }
    if (thread == 0) list->count = 0, list->bins[0] = 0;
    __syncthreads();
    unsigned last = 0;   // inverted
#pragma unroll
    for (int i = 0; i < OWN; ++i)
        if (own[i] >= low && own[i]) {
            list->keys[atomicAdd(&list->count, 1u)] = own[i];
            last = max(last, ~unsigned(own[i] >> 32));
        }
    raise(&list->bins[0], last);
    __syncthreads();
    return score_of_word(~list->bins[0]);
}

// The distance of the thread's token i of a step from its first one.
__device__ inline unsigned place_in_step(int i) { return i / VECTOR * THREADS * VECTOR + i % VECTOR; }

// The least float32 number above x, which is not +inf.
__device__ inline float next_above(float x) { return score_of_word(word_of(x) + 1); }

// How many keys beyond the wanted number a cut list may keep.
__device__ inline int spare(int wanted) { return wanted / 8 + SPARE; }

// Ends a step after which the list is long, or had no room: inserts the tokens that are waiting, and cuts the list.
//
// The list has room for the keys that a cut keeps, and for AT_ONCE keys of each thread.
__device__ inline void insert_waiting(
    List* list, const Chunk<X, VECTOR>* chunks, unsigned token, unsigned waiting, int wanted
) {
    const unsigned count = min(list->count, ~list->missed);
    __syncthreads();
    if (threadIdx.x == 0) list->count = count, list->missed = 0;
    __syncthreads();
    const int more = spare(wanted);
    float last = -INF;
#pragma unroll 1
    for (int first = 0;; first += AT_ONCE, waiting >>= AT_ONCE) {
        if (list->count > wanted + more) last = cut(list, wanted, more);
        if (first == TOKENS || !__syncthreads_or(waiting != 0)) break;
#pragma unroll 1
        for (unsigned left = waiting & ((1u << AT_ONCE) - 1); left; left &= left - 1) {
            const int i = first + __ffs(left) - 1;
            const float x = wide(chunks[i / VECTOR * THREADS].at[i % VECTOR]);
            if (!(x < last)) list->keys[atomicAdd(&list->count, 1u)] = rank_key(x, token + place_in_step(i));
        }
        __syncthreads();
    }
    // Of equal scores, those of later steps come behind the last one.
    if (threadIdx.x == 0 && last != -INF) list->threshold = last < INF ? next_above(last) : INF;
    __syncthreads();
}

// The target of a row, and its place in the slice.
struct Target {
    float score, above;   // the score of the target, and the next one above
    int at;               // its place in the slice: 0, or the number of tokens, if it lies before or behind it
    bool inside, counts;  // it is a token; the tokens before it are counted in the steps
};

// Adds the tokens of a step to the sum and to the list, and counts those before the target.  Returns false if the list
// has become long; `waiting` are the thread's tokens for which it had no room.
__device__ inline bool take_step(
    const Stream& stream, unsigned step, unsigned begin, int wanted, const Target& target, List* list, ExpSum& sum,
    int& before, unsigned& waiting
) {
    float z[TOKENS], peak = -INF, part = 0;
    stream.take(z, step);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) peak = fmax(peak, z[i]);
    sum.raise_to(peak);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) part += ExpSum::term_of(z[i], sum.m);
    sum.add(part);
    if (TARGET) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const float limit = int(Stream::chunk(step, i / VECTOR)) < target.at ? target.score : target.above;
            before += !(z[i] < limit);
        }
    }
    const float threshold = list->threshold;
    bool crowded = false;
    waiting = 0;
    if (wanted && (peak >= threshold || part != part)) {
        unsigned hits = 0;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) hits |= unsigned(!(z[i] < threshold)) << i;   // a NaN too
        unsigned at = atomicAdd(&list->count, unsigned(__popc(hits)));
        crowded = at + __popc(hits) > FEW;
        if (at + __popc(hits) > CAPACITY) waiting = hits, hits = 0, atomicMax(&list->missed, ~at);
#pragma unroll 1
        for (; hits; hits &= hits - 1, ++at) {
            const int i = __ffs(hits) - 1;
            const float x = wide(stream.place(step, i / VECTOR)->at[i % VECTOR]);   // registers cannot be indexed
            list->keys[at] = rank_key(x, begin + Stream::chunk(step, 0) + place_in_step(i));
        }
    }
    return !__syncthreads_or(crowded);
}

// Sets the threshold: in each block, wanted / CLUSTER of the threads, or of their parts of AT_ONCE tokens, have a token
// in the first step that reaches it.
__device__ inline void set_threshold(Slice& slice, const float (&z)[TOKENS], float peak, int wanted, List* list) {
    constexpr int PARTS = TOKENS / AT_ONCE;
    const int of_block = (wanted + CLUSTER - 1) / CLUSTER;
    unsigned enough = 0;
    if (wanted && of_block <= THREADS / 8) {
        enough = bits_reached(word_of(peak), of_block, 20);
    } else if (wanted && of_block <= PARTS * THREADS / 2) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            float of_part = -INF;
#pragma unroll
            for (int j = 0; j < AT_ONCE; ++j) of_part = fmax(of_part, z[i * AT_ONCE + j]);
            const unsigned at = i * THREADS + threadIdx.x;
            list->keys[at] = key_of(of_part, at);
        }
        if (threadIdx.x == 0) list->count = PARTS * THREADS;
        __syncthreads();
        enough = word_of(cut(list, of_block, spare(of_block)));
        if (threadIdx.x == 0) list->count = 0;
    }
    uint64 least = enough;
    if (CLUSTER > 1) {
        const uint64 own[] = {enough};
        const Slice::Words shared = slice.share(own);
#pragma unroll 1
        for (int block = 0; block < CLUSTER; ++block) least = min(least, shared[block][0]);
    }
    if (threadIdx.x == 0) list->threshold = finite_score(unsigned(least));
    __syncthreads();
}

// Appends tokens with -inf by rising id to a list of all others, until it has the wanted number of keys.
__device__ __noinline__ void append_absent(Slice slice, const X* row, int64 cols, int count, int wanted, List* list) {
#pragma unroll 1
    for (int64 first = 0; first < cols && count < wanted; first += THREADS) {
        const int64 i = first + threadIdx.x;
        const bool absent = i < cols && wide(row[i]) == -INF;
        int total;
        const int at = count + slice.scan(int(absent), total);
        if (absent && at < wanted) list->keys[at] = key_of(-INF, unsigned(i));
        count += total;
    }
    __syncthreads();
}

// Writes the results of a row whose largest keys are in the list of block 0.
__device__ inline void write_row(
    const TopK& p, Slice& slice, int64 row, List* list, int count, float m, double sum, const Target& target,
    uint64 before
) {
    const int wanted = int(p.wanted), thread = threadIdx.x;
    const bool regular = sum > 0 && sum < INF;   // the row has a softmax
    if (thread == 0) list->log_sum = log(sum), list->count = count;
    if (count < wanted) {
        append_absent(slice, p.x + row * p.stride, p.cols, count, wanted, list);
        count = wanted;
    } else {
        __syncthreads();
        // A list of up to half as many keys as threads is sorted fast.
        if (count > max(THREADS / 2, wanted)) cut(list, wanted, max(THREADS / 2 - wanted, 0)), count = int(list->count);
    }
    if (count) sort(list->keys, count);
    const double log_sum = list->log_sum;
    const auto logprob = [&](float x) { return regular ? float(double(x) - m - log_sum) : NOT_A_NUMBER; };
    if (thread == 0) {
        p.lse[row] = regular ? float(m + log_sum) : float(log_sum);
        if (TARGET) {
            p.target_logprob[row] = target.inside ? logprob(target.score) : NOT_A_NUMBER;
            p.target_rank[row] = target.inside ? int64(before + 1) : 0;
        }
    }
#pragma unroll 1
    for (int i = thread; i < wanted; i += THREADS) {
        const uint64 key = list->keys[i];
        const float x = score_of(key);
        p.values[row * wanted + i] = x, p.indices[row * wanted + i] = token_of(key), p.logprobs[row * wanted + i] = logprob(x);
    }
}

// What the steps counted too many: in the chunk of the target, all tokens were taken to come before it.
__device__ inline int correction(const Slice& slice, const Target& target) {
    const int first = target.at / VECTOR * VECTOR, i = first + int(threadIdx.x);
    if (threadIdx.x >= VECTOR || i < target.at || first == target.at || first >= slice.count) return 0;
    return (i < slice.count ? wide(slice.x[i]) : -INF) == target.score;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) topk_kernel(const __grid_constant__ TopK p) {
    extern __shared__ Chunk<X, VECTOR> memory[];
    __shared__ Exchange exchange;
    __shared__ List list;
    const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER, wanted = int(p.wanted);
    const int64 row = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    const unsigned count = unsigned(min(p.slice, p.cols - begin));
    const X* const x = p.x + row * p.stride + begin;
    // This load goes first: it would wait behind those of the logits.
    const int64 of_target = TARGET ? load_one(p.target + row) : 0;
    const unsigned whole = count / TILE, steps = whole + (count % TILE != 0);
    Stream stream{x, x + thread * VECTOR, memory + thread, count, steps, whole, {}};
    stream.begin();
    Slice slice{x, &exchange, begin, int(count), rank, 0};
    Target target{0, 0, 0, TARGET && of_target >= 0 && of_target < p.cols, false};
    if (target.inside) {
        target.score = wide(load_one(p.x + row * p.stride + of_target));
        target.counts = target.score < INF, target.above = target.counts ? next_above(target.score) : 0;
        target.at = int(min(max(of_target - begin, int64(0)), int64(count)));
    }
    if (thread == 0) {
        exchange.prepare();
        list.keys = reinterpret_cast<uint64*>(memory + STAGES * LOADS * THREADS);
        list.count = 0, list.missed = 0, list.peak = 0, list.least_of_ids = ~max(unsigned(p.cols), unsigned(TOKENS * THREADS));
    }
    open_cluster(&exchange);

    stream.arrive(0);
    float z[TOKENS], peak = -INF;
    stream.take(z, 0);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) peak = fmax(peak, z[i]);
    raise(&list.peak, word_of(peak));
    set_threshold(slice, z, peak, wanted, &list);
    ExpSum sum{fmin(finite_score(list.peak), LARGEST_FLOAT32), 0, 0};
    int before = 0;   // below 0 in a thread that corrects what another one counted
    for (unsigned step = 0; step < steps;) {
        unsigned waiting;
        while (take_step(stream, step, unsigned(begin), wanted, target, &list, sum, before, waiting)) {
            stream.follow(step);
            if (++step == steps) break;
            stream.arrive(step);
        }
        if (step == steps) break;
        insert_waiting(&list, stream.place(step, 0), unsigned(begin) + Stream::chunk(step, 0), waiting, wanted);
        stream.follow(step);
        if (++step < steps) stream.arrive(step);
    }

    if (TARGET && target.inside && target.counts) before -= correction(slice, target);
    if (TARGET && target.inside && !target.counts) {
        const uint64 key = rank_key(target.score, unsigned(of_target));
        before = 0;
        slice.each([&](float x, unsigned token) { before += rank_key(x, token) > key; });
    }
    __syncthreads();   // the peak of the first step is read no more
    raise(&list.peak, word_of(sum.m));
    __syncthreads();
    if (wanted && CLUSTER > 1 && list.count > max(wanted, CAPACITY / CLUSTER)) cut(&list, wanted, 0);
    float m = fmin(score_of_word(list.peak), LARGEST_FLOAT32);
    uint64 words[] = {uint64(__double_as_longlong(sum.in_units_of(m))), uint64(int64(before))};
    slice.merge_threads(words, [](uint64 (&to)[2], const uint64* other) {
        to[0] = __double_as_longlong(__longlong_as_double(to[0]) + __longlong_as_double(other[0])), to[1] += other[1];
    });
    int listed = int(list.count);
    double total = __longlong_as_double(words[0]);
    if (CLUSTER > 1) {
        const uint64 own[] = {words[0], words[1], uint64(word_of(m)) << 32 | unsigned(listed)};
        uint64 offset = 0, all = 0, passed = 0, largest = 0;
        const Slice::Words shared = slice.share(own);
#pragma unroll 1
        for (int block = 0; block < CLUSTER; ++block) {
            const uint64* const of_block = shared[block];
            if (block == rank) offset = all;
            all += unsigned(of_block[2]), passed += of_block[1], largest = max(largest, of_block[2] >> 32);
        }
        m = score_of_word(unsigned(largest)), total = 0;
#pragma unroll 1
        for (int block = 0; block < CLUSTER; ++block) {
            const uint64* const of_block = shared[block];
            const float own = score_of_word(unsigned(of_block[2] >> 32));
            total += __longlong_as_double(of_block[0]) * ExpSum::term_of(own, m);
        }
        gather(slice, list.keys, listed, offset);
        if (rank) return;
        wait_for_keys(slice, int(all) - listed, 0);
        listed = int(all), words[1] = passed;
    }
    write_row(p, slice, row, &list, listed, m, total, target, words[1]);
}
