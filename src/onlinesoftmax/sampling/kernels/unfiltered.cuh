// Samples a token of each row of logits without a filter, in one pass that holds no logits.
//
// One block:  owns `slice` adjacent tokens of a row; CLUSTER blocks own a row.
// Chosen:     without top_k, top_p, min_p and top_logprobs.
// Bytes:      one read of the logits; a second one of the rare rows that `add_exactly` takes.
// Limits:     rows of adjacent float32 or 16-bit logits, without score options; at most 2^23 - 1 tokens (masses.py).
//
// The sampled token has the largest x / temperature - log(E), where E = -log(u); so it has the largest key e / E, where
// e = exp(x / temperature) is also the token's term of the sum.  docs/sampling_kernels.md says how the pass leaves out
// logarithms, and why the token is nevertheless that of the formula.

struct Unfiltered {
    const X* x;
    const float* temperature; const int64* seed; const int64* offset;   // null for the numbers below
    int64* token; float* logprob; float* lse; int64* kept; unsigned char* valid;
    int64 stride, cols, slice;
    int64 temperature_bits, seed_number, offset_number;   // the same for all rows
};

__device__ inline bool any_lane(bool x) { return !__all_sync(~0u, !x); }

// The parameters of a row, and the beginning of this block's slice.
struct RowParameters {
    float temperature;
    uint64 seed, offset;
    unsigned begin;   // the first token of the slice
};

// Chooses new units of the sums for a step with large terms; flags a step that has NaN or infinity, and returns false.
__device__ inline bool choose_units(Part& own, const Stream& stream, unsigned step, Powers& race, Powers& mass) {
    float z[TOKENS], peak = -INF;
    bool has_nan = false;
    stream.take(z, step);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) peak = fmax(peak, z[i]), has_nan |= z[i] != z[i];
    const bool fits = !has_nan && race.choose_unit(peak) && (!RAW || mass.choose_unit(peak));
    own.flags |= has_nan ? HAS_NAN : fits ? 0 : IRREGULAR;
    return fits;
}
// The sum of the powers of a step.
__device__ inline float sum_of_step(const Stream& stream, unsigned step, const Powers& powers) {
    float z[TOKENS], part = 0;
    stream.take(z, step);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) part += powers.of(z[i]);
    return part;
}

// One pass over the slice of a greedy row.
__device__ inline void add_greedily(Part& own, Powers& mass, Stream& stream, const RowParameters& row, unsigned steps) {
    float top = -INF;
    for (unsigned step = 0; step < steps; ++step) {
        if (ALIGNED || step) stream.arrive(step);
        float z[TOKENS], peak = -INF, part = 0;
        stream.take(z, step);
        bool has_nan = false;
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            peak = fmax(peak, z[i]), has_nan |= z[i] != z[i];
            if (RAW) part += mass.of(z[i]);
        }
        if (has_nan) own.flags |= HAS_NAN;
        if (peak > top) {
            top = peak;
            unsigned token = 0;
#pragma unroll
            for (int i = TOKENS - 1; i >= 0; --i)
                if (z[i] == peak) token = Stream::token(step, i / 4) + i % 4;
            own.token = row.begin + token, own.logit = peak, own.key = key_of(peak, own.token);
        }
        if (RAW) {
            if (!(part <= LARGE)) part = choose_units(own, stream, step, mass, mass) ? sum_of_step(stream, step, mass) : 0;
            mass.total += part;
        }
        stream.follow(step);
    }
}

// The key of one token of the thread, the one with the largest logit of its first chunk: the winner's key is no smaller.
__device__ inline uint64 first_key(const float (&z)[VECTOR], const RowParameters& row, float rate) {
    float peak = z[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < VECTOR; ++i)
        if (z[i] > peak) peak = z[i], at = i;
    const float n = Powers::nearest(peak * rate);
    if (!(n < INF)) return 0;
    const Words words = philox((row.begin + Stream::token(0, at / 4)) / 4, row.offset, row.seed);
    const unsigned low = at & 1 ? words.of[1] : words.of[0], high = at & 1 ? words.of[3] : words.of[2];
    const float e = power_of_two(fma(peak, rate, -n));
    return race_key(e * reciprocal(exponential(at & 2 ? high : low)), n);
}

// Computes the keys of four adjacent tokens of each lane, and keeps the largest two keys of the thread.
__device__ inline void race_group(
    Part& own, const Powers& race, const Stream& stream, const RowParameters& row, unsigned step, int group
) {
    // The noise is computed again.  The statement hides that from the compiler, which would hold the noise of every step.
    uint64 seed = row.seed;
    asm volatile("" : "+l"(seed));
    float z[4], best = 0, second = 0;
    stream.take_group(z, step, group);
    const unsigned token = row.begin + Stream::token(step, group);
    const Words words = philox(token / 4, row.offset, seed);
    int at = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        // -inf never wins, and add_exactly takes the rows that have +inf.
        const float e = fabs(z[j]) < INF ? race.of(z[j]) : 0, key = e * reciprocal(exponential(words.of[j]));
        second = fmax(second, fmin(best, key));
        if (key > best) best = key, at = j;
    }
    const uint64 key = best > 0 ? race_key(best, race.n) : 0, after = second > 0 ? race_key(second, race.n) : 0;
    if (key > own.key) {
        own.second = max(own.key, after), own.key = key, own.token = token + at;
        own.logit = at & 2 ? at & 1 ? z[3] : z[2] : at & 1 ? z[1] : z[0];
    } else {
        own.second = max(own.second, key);
    }
}

// One pass over the slice of a sampled row; `mass` is not used unless RAW.  A token of the block has the key `known`.
__device__ inline void add_with_noise(
    Part& own, Powers& race, Powers& mass, Stream& stream, const RowParameters& row, unsigned steps, PartBoard& board,
    uint64 known
) {
    float limit = limit_of(known, race.n);
    unsigned block = (row.begin + Stream::token(0, 0)) / 4;   // of the noise: that of the thread's first four tokens
    // `left` counts down: the compiler would otherwise compute the number of steps again in every step.
    for (unsigned step = 0, left = steps; left; --left, ++step, block += TILE / 4) {
        if (ALIGNED || step) stream.arrive(step);
        float z[TOKENS], part = 0, of_mass = 0, products = 0;
        unsigned near[GROUPS];
        stream.take(z, step);
        const uint64 bound = look_shared(&board.bound);
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const Words words = philox(block + Stream::distance(group) / 4, row.offset, row.seed);
            float of_group = 0;
            near[group] = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float x = z[group * 4 + j], e = race.of(x);
                of_group += e;
                if (RAW) of_mass += mass.of(x);
                if (j % 2) products = fma(z[group * 4 + j - 1], x, products);
                // 1 + u is rounded up to a multiple of 2^-23.  The sum is below 2 if the token cannot reach `known`.
                near[group] |= __float_as_uint(fma(e, limit, __uint_as_float((words.of[j] >> 9) + 0x3f800002u)));
            }
            part += of_group;
        }
        // A bit of the exponent, set in float32 numbers from 2 on, in infinity and in NaN.
        constexpr unsigned FROM_TWO = 0x40000000;
        const bool close = (near[0] | near[1] | near[2] | near[3]) & FROM_TWO, odd = !(fabs(products) < INF);
        const bool large = !(part <= LARGE) || (RAW && !(of_mass <= LARGE));
        if (any_lane(close || odd || large || bound > known)) {
            if (any_lane(odd)) {
                stream.take(z, step);
#pragma unroll
                for (int i = 0; i < TOKENS; ++i) own.absent += z[i] == -INF;
            }
            if (large) {
                const bool fits = choose_units(own, stream, step, race, mass);
                part = fits ? sum_of_step(stream, step, race) : 0;
                of_mass = RAW && fits ? sum_of_step(stream, step, mass) : 0;
            }
            known = max(known, bound);
            if (any_lane(close || large)) {
                unsigned groups = 0;
#pragma unroll
                for (int group = 0; group < GROUPS; ++group) groups |= (large || near[group] & FROM_TWO) << group;
                groups = __reduce_or_sync(~0u, groups);
#pragma unroll 1
                for (int group = 0; group < GROUPS; ++group)
                    if (groups >> group & 1) race_group(own, race, stream, row, step, group);
                known = max(known, largest_of_lanes(own.key));
                if (known > bound && threadIdx.x % 32 == 0) atomicMax(&board.bound, known);
            }
            limit = limit_of(known, race.n);
        }
        race.total += part;
        if (RAW) mass.total += of_mass;
        stream.follow(step);
    }
}

// Calls use(logit, token) for the thread's tokens of a row, in their order.
template <class Use> __device__ inline void each_logit(const X* x, int64 cols, Use use) {
    constexpr int AT_ONCE = 8;   // loads under way: a thread would wait for each one alone
    for (int64 i = threadIdx.x; i < cols; i += AT_ONCE * THREADS) {
        X logits[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) logits[j] = load_one(x + min(i + j * THREADS, cols - 1));
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            if (i + j * THREADS < cols) use(wide(logits[j]), unsigned(i + j * THREADS));
    }
}

// Writes the results of a row; returns false for a valid row whose roundings would matter.
__device__ inline bool write_row(
    const Unfiltered& p, int64 row, const RowParameters& parameters, const Part& own, double ratio, float rate
) {
    const float temperature = parameters.temperature;
    const bool greedy = temperature == 0, sane = temperature >= 0 && temperature < INF, certain = greedy && !RAW;
    const bool valid = sane && !(own.flags & HAS_NAN) && (greedy ? own.key && own.logit > -INF : own.absent != p.cols);
    // The power of the largest logit alone is 0.7 or more, unless float32 does not hold the exponents.
    const bool summed = certain || (!own.flags && own.sum >= 0.25 && fabs(ratio - 1) < 1e-6 && rate > 1e-36f);
    if (valid && !(summed && (greedy || own.key - own.second >= CLOSE))) return false;
    const double log_sum = log_of(own.sum, own.n), logprob = (own.logit * double(rate) * LOG_2 - log_sum) * ratio;
    p.token[row] = valid ? own.token : 0;
    p.logprob[row] = !valid ? NOT_A_NUMBER : certain ? 0 : float(logprob);
    p.lse[row] = !valid ? NOT_A_NUMBER : certain ? own.logit : float(log_sum * ratio);
    p.kept[row] = !valid ? 0 : greedy ? 1 : p.cols - own.absent;
    p.valid[row] = valid;
    return true;
}

// Samples a row again with every rounding of the formula, in two passes of the first block.
__device__ __noinline__ void add_exactly(
    const Unfiltered& p, int64 row, const RowParameters& parameters, PartBoard& board
) {
    const X* const x = p.x + row * p.stride;
    Part first = nothing();
    each_logit(x, p.cols, [&](float z, unsigned token) { first.key = max(first.key, key_of(z, token)); });
    __syncthreads();   // the board is read no more
    first = merge_block(first, board);
    if (threadIdx.x == 0) board.keys[0] = first.key, board.bound = 0;
    __syncthreads();
    const float m = score_of(board.keys[0]), temperature = parameters.temperature;
    const bool greedy = temperature == 0;
    const double divisor = greedy ? 1 : double(temperature);
    const float rate = RAW ? float(LOG2_E) : fmin(float(LOG2_E / divisor), LARGEST_FLOAT32);
    Part own = nothing();
    each_logit(x, p.cols, [&](float logit, unsigned token) {
        const float z = below(logit, m);
        own.absent += z == -INF;
        if (z == -INF) return;
        own.sum += double(int64(mass_of(logit, m, rate)));
        // As in `add_with_noise`, most tokens need no logarithm.  2^32 is a little less than 4.3e9.
        const float missing = missing_noise(float(number_of(look_shared(&board.bound))), z, float(divisor));
        const unsigned bits = bits_of(token, parameters.offset, parameters.seed);
        if (!greedy && (missing >= NOISE_BOUND || float(~bits) > exp(-missing) * 4.3e9f)) return;
        const uint64 key = ordered(exactly_below(logit, m) + (greedy ? 0 : divisor * gumbel(bits)));
        if (key > own.key) own.key = key, own.token = token, own.logit = logit;
        if (key > look_shared(&board.bound)) atomicMax(&board.bound, key);
    });
    own.n = 0;
    own = merge_block(own, board);
    if (threadIdx.x) return;
    const double log_sum = log(own.sum / double(int64(mass_of(m, m, rate)))), of_logprobs = RAW ? 1 : divisor;
    p.token[row] = own.token;
    p.logprob[row] = float(exactly_below(own.logit, m) / of_logprobs - log_sum);
    p.lse[row] = float(m / of_logprobs + log_sum);
    p.kept[row] = greedy ? 1 : p.cols - own.absent;
    p.valid[row] = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) unfiltered_kernel(const __grid_constant__ Unfiltered p) {
    extern __shared__ Chunk<X, VECTOR> memory[];
    __shared__ PartBoard board;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % CLUSTER;
    const int64 row = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    const unsigned count = unsigned(min(p.slice, p.cols - begin));
    const X* const x = p.x + row * p.stride + begin;
    // These loads go first: they would wait behind those of the logits.
    const RowParameters parameters{
        p.temperature ? load_one(p.temperature + row) : __uint_as_float(unsigned(p.temperature_bits)),
        uint64(p.seed ? load_one(p.seed + row) : p.seed_number),
        uint64(p.offset ? load_one(p.offset + row) : p.offset_number), unsigned(begin)};
    const unsigned whole = count / TILE, all = whole + (count % TILE != 0);
    Stream stream{x, x + threadIdx.x * VECTOR, memory + threadIdx.x, count, all, whole, {}};
    stream.begin();
    if (CLUSTER > 1) {
        if (threadIdx.x == 0 && rank == 0) expect_bytes(&board.arrived, sizeof(board.of_blocks));
        announce_beginning();
    }
    const float temperature = parameters.temperature;
    const bool greedy = temperature == 0, sane = temperature >= 0 && temperature < INF;
    const float rate = fmin(float(LOG2_E) / temperature, LARGEST_FLOAT32);
    // The rate is rounded: logarithms of sums of powers have to be multiplied by this ratio.
    if (threadIdx.x == 0) board.bound = 0, board.ratio = RAW ? LOG2_E / float(LOG2_E) : LOG2_E / (double(temperature) * rate);

    // The largest logit of the first chunks decides in which units the powers are added up.
    float z[VECTOR], peak = -INF;
    stream.peek(z);
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) peak = fmax(peak, z[i]);
    const unsigned peak_of_warp = __reduce_max_sync(~0u, unsigned(key_of(peak, 0) >> 32));
    uint64 known = largest_of_lanes(greedy ? 0 : first_key(z, parameters, rate));
    if (lane == 0) board.peaks[warp] = peak_of_warp, board.keys[warp] = known;
    __syncthreads();
    peak = score_of(uint64(__reduce_max_sync(~0u, lane < WARPS ? board.peaks[lane] : 0u)) << 32);
    known = largest_of_lanes(lane < WARPS ? board.keys[lane] : 0);
    const auto powers = [&](float rate) {
        Powers made{rate, -Powers::MOST, 0};
        made.choose_unit(peak);
        return made;
    };
    Powers race = powers(rate), mass = powers(float(LOG2_E));
    const unsigned steps = sane ? all : 0;
    Part own = nothing();
    if (!greedy) add_with_noise(own, race, mass, stream, parameters, steps, board, known);
    else add_greedily(own, mass, stream, parameters, steps);
    if (!RAW) mass = race;
    own.sum = mass.total, own.n = int(mass.n);
    own = merge_block(own, board);
    // Logits past the end of the slice have been counted.
    own.absent -= steps * TILE - count;
    own = merge_cluster(own, board, rank);
    if (rank) return;
    if (threadIdx.x == 0) board.again = !write_row(p, row, parameters, own, board.ratio, mass.rate);
    __syncthreads();
    if (board.again) add_exactly(p, row, parameters, board);
}
