// Samples a token of each row of logits.
//
// One block:  owns `slice` adjacent tokens of a row, in shared memory; CLUSTER blocks own a row.
// Chosen:     where the blocks of a cluster hold a row.
// Bytes:      one read of the logits.
// Limits:     rows of adjacent float32 or 16-bit logits, without score options; at most 2^32 - 1 tokens.
//
// What is kept is what distribution.py keeps, bit for bit: masses are whole numbers, and every float32 operation behind
// them is rounded by itself.  So the order of additions, and the cut of a row, do not matter.

struct Sampling {
    const X* x;
    const float* temperature; const int64* top_k; const double* top_p; const double* min_p;   // null without the filter
    const int64* seed; const int64* offset;
    int64* token; float* logprob; float* lse; int64* kept; unsigned char* valid;
    int64* top_tokens; float* top_logprobs;
    int64 stride, cols, slice;
    int64 first;   // 1 to keep the lowest ids of the tokens that are equal at a threshold
    int64 raw;     // 1 for log-probabilities of all tokens at the temperature 1
    int64 top;     // number of the largest log-probabilities
};

extern "C" __global__ void __launch_bounds__(THREADS) sample_kernel(const __grid_constant__ Sampling p) {
    extern __shared__ Chunk<X, VECTOR> memory[];
    __shared__ Exchange exchange;
    __shared__ Largest largest;
    const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER;
    const int64 row = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    const int count = int(min(p.slice, p.cols - begin));
    const X* const x = p.x + row * p.stride + begin;
    X* const held = memory[0].at;
    open_cluster(&exchange);

    // The slice, the largest logit, whether one is NaN, and how many are above -inf.
    float largest_own = -INF;
    uint64 of_row[3] = {0, 0, 0};
    const auto observe = [&](float logit) {
        largest_own = fmax(largest_own, logit);
        of_row[1] |= logit != logit, of_row[2] += logit > -INF;
    };
    for (int i = thread * VECTOR; i < count; i += THREADS * VECTOR) {
        Chunk<X, VECTOR> chunk;
        if (ALIGNED && i + VECTOR <= count) {
            load<VECTOR, CachePolicy::NORMAL>(chunk, x + i, 1);
            memory[i / VECTOR] = chunk;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) observe(wide(chunk, j));
        } else {
            for (int j = i; j < min(i + VECTOR, count); ++j) held[j] = x[j], observe(wide(held[j]));
        }
    }
    of_row[0] = key_of(largest_own, 0) >> 32;
    Slice slice{held, &exchange, begin, count, rank, 0};
    slice.reduce(of_row, [](uint64 (&to)[3], const uint64* other) {
        to[0] = max(to[0], other[0]), to[1] |= other[1], to[2] += other[2];
    });
    const float m = score_of(of_row[0] << 32), temperature = p.temperature[row];
    const double top_p = p.top_p ? p.top_p[row] : 1, min_p = p.min_p ? p.min_p[row] : 0;
    const bool greedy = temperature == 0, sane = temperature >= 0 && temperature < INF && top_p == top_p && min_p == min_p;
    const bool valid = sane && !of_row[1] && m > -INF;
    const double divisor = greedy ? 1 : double(temperature);
    const float rate = fmin(float(LOG2_E / divisor), LARGEST_FLOAT32);
    // Most masses beyond this distance from the largest are 0.
    const float span = float(45 * LOG_2 * fmin(divisor, 1e30));

    // The sort key, and the score less the largest, that a token needs to be kept.
    uint64 key = 0;
    double least = -INF;
    if (FILTERS && valid && !greedy) {
        if (p.top_k && p.top_k[row] > 0) {
            const auto weight = [&](float logit, unsigned) { return uint64(below(logit, m) > -INF); };
            const uint64 k = uint64(p.top_k[row]), finite = m == INF ? slice.add(weight) : of_row[2];
            if (k < finite) key = slice.key_at(k, m, span, p.first, weight);
        }
        if (top_p < 1) {
            const auto weight = [&](float logit, unsigned token) {
                const float z = below(logit, m);
                return z > -INF && key_of(logit, token) >= key ? mass_of(z, rate) : 0;
            };
            const uint64 total = slice.add(weight);
            const double wanted = ceil(top_p * double(int64(total)));
            const uint64 goal = wanted < 1 ? 1 : min(uint64(wanted), total);
            key = max(key, slice.key_at(goal, m, span, p.first, weight));
        }
        if (p.min_p) least = divisor * log(fmin(min_p, 1.0));
    }
    const auto is_kept = [&](float logit, unsigned token) {
        return below(logit, m) > -INF && (!FILTERS || key_of(logit, token) >= key && exactly_below(logit, m) >= least);
    };

    // The masses of the kept tokens, and of all at the temperature 1; how many are kept; the largest key and its token.
    uint64 sums[5] = {0, 0, 0, 0, ALL};
    Best best{-INF, ALL};
    if (valid) {
        const float raw_rate = float(LOG2_E);
        const uint64 seed = p.seed[row], offset = p.offset[row];
        float bound = -INF;   // the warp's largest key so far
        for (int tile = 0; tile < count; tile += THREADS * 4) {
            const int i = tile + thread * 4;
            unsigned kept = 0;
            float peak = -INF;
            for (int j = 0; j < 4 && i + j < count; ++j) {
                const float logit = wide(held[i + j]), z = below(logit, m);
                if (p.raw) sums[1] += mass_of(z, raw_rate);
                if (!is_kept(logit, unsigned(begin + i + j))) continue;
                kept |= 1u << j, sums[0] += mass_of(z, rate), ++sums[2], peak = fmax(peak, z);
            }
            const float missing = greedy ? 0 : missing_noise(bound, peak, float(divisor));
            bool better = false;
            if (kept && missing < NOISE_BOUND) {
                // A token wins only with noise above `missing`, so only if 1 - u, which is below -log(u), is below
                // exp(-missing).  The factor is 2^32, and 0.1 % more for rounding.
                const float limit = exp(-missing) * 4.3e9f;
                const Words words = greedy ? Words{} : philox(unsigned((begin + i) / 4), offset, seed);
                for (int j = 0; j < 4; ++j) {
                    if (!(kept >> j & 1) || (!greedy && float(~words.of[j]) > limit)) continue;
                    const float logit = wide(held[i + j]);
                    const double z = exactly_below(logit, m);
                    better |= best.take(greedy ? z : z + divisor * gumbel(words.of[j]), uint64(begin + i + j));
                }
            }
            if (!__all_sync(~0u, !better)) bound = largest_of_lanes(float(best.key));
        }
        sums[3] = ordered(best.key), sums[4] = best.token;
    }
    slice.reduce(sums, [](uint64 (&to)[5], const uint64* other) {
        to[0] += other[0], to[1] += other[1], to[2] += other[2];
        if (other[3] > to[3] || (other[3] == to[3] && other[4] < to[4])) to[3] = other[3], to[4] = other[4];
    });
    if (p.top && valid) slice.collect(largest, p.top, m, span);
    if (rank) return;

    const double log_sum = p.raw || !greedy ? log(double(int64(sums[p.raw ? 1 : 0]))) - MASS_BITS * LOG_2 : 0;
    const double of_logprobs = p.raw ? 1 : divisor;   // the temperature that they refer to
    const uint64 sampled = sums[4];
    const auto logprob = [&](float logit, uint64 token) {
        const bool kept = p.raw || (greedy ? token == sampled : is_kept(logit, unsigned(token)));
        return kept ? float(exactly_below(logit, m) / of_logprobs - log_sum) : -INF;
    };
    if (thread == 0) {
        p.token[row] = valid ? sampled : 0;
        p.logprob[row] = valid ? logprob(wide(p.x[row * p.stride + sampled]), sampled) : NOT_A_NUMBER;
        p.lse[row] = valid ? float(m / of_logprobs + log_sum) : NOT_A_NUMBER;
        p.kept[row] = !valid ? 0 : greedy ? 1 : sums[2];
        p.valid[row] = valid;
    }
    for (int i = thread; i < p.top; i += THREADS) {
        int64 at = row * p.top;
        if (!valid) {
            p.top_tokens[at + i] = 0, p.top_logprobs[at + i] = NOT_A_NUMBER;
            continue;
        }
        const uint64 one = largest.all[i];
        for (int j = 0; j < p.top; ++j) at += largest.all[j] > one;
        const unsigned token = ~unsigned(one);
        p.top_tokens[at] = token, p.top_logprobs[at] = logprob(score_of(one), token);
    }
}
