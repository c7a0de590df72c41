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
    const float* temperature; const int64* top_k; const float* top_p; const float* min_p;   // null without the filter
    const int64* seed; const int64* offset;
    int64* token; float* logprob; float* lse; int64* kept; unsigned char* valid;
    int64* top_tokens; float* top_logprobs;
    int64 stride, cols, slice;
    int64 first;   // 1 to break ties at a threshold by the smaller token
    int64 raw;     // 1 for log-probabilities of all tokens at the temperature 1
    int64 top;     // number of the largest log-probabilities
};

extern "C" __global__ void __launch_bounds__(THREADS) sample_kernel(const __grid_constant__ Sampling p) {
    extern __shared__ Chunk<X, VECTOR> memory[];
    __shared__ Board board;
    __shared__ Largest largest;
    const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER;
    const int64 row = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    const int count = int(min(p.slice, p.cols - begin));
    const X* const x = p.x + row * p.stride + begin;
    X* const held = memory[0].at;
    open_cluster(&board);

    // The slice, the largest logit, whether one is NaN, and how many are above -inf.
    float largest_own = -INF;
    uint64 of_row[3] = {0, 0, 0};
    const auto look = [&](float z) {
        largest_own = fmax(largest_own, z);
        of_row[1] |= z != z, of_row[2] += z > -INF;
    };
    for (int i = thread * VECTOR; i < count; i += THREADS * VECTOR) {
        Chunk<X, VECTOR> chunk;
        if (ALIGNED && i + VECTOR <= count) {
            load<VECTOR, CachePolicy::NORMAL>(chunk, x + i, 1);
            memory[i / VECTOR] = chunk;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) look(wide(chunk, j));
        } else {
            for (int j = i; j < min(i + VECTOR, count); ++j) held[j] = x[j], look(wide(held[j]));
        }
    }
    of_row[0] = place_of(largest_own, 0) >> 32;
    Slice slice{held, &board, begin, count, rank, 0};
    slice.reduce(of_row, [](uint64 (&to)[3], const uint64* other) {
        to[0] = max(to[0], other[0]), to[1] |= other[1], to[2] += other[2];
    });
    const float m = score_at(of_row[0] << 32), temperature = p.temperature[row];
    const bool greedy = temperature == 0, valid = !of_row[1] && m > -INF && temperature >= 0 && temperature < INF;
    const double divisor = greedy ? 1 : double(temperature);
    const float rate = fmin(float(LOG2_E / divisor), LARGEST_FLOAT32);
    // Beyond this distance from the largest, masses are 0.
    const float range = float(45 * 0.6931471805599453 * fmin(divisor, 1e30));

    // What a token needs to be kept.
    uint64 place = 0, mass = 0;
    if (FILTERS && valid && !greedy) {
        if (p.top_k && p.top_k[row] > 0) {
            const auto weight = [&](float z, unsigned) { return uint64(below(z, m) > -INF); };
            const uint64 k = uint64(p.top_k[row]), finite = m == INF ? slice.add(weight) : of_row[2];
            if (k < finite) place = slice.place_at(k, m, range, p.first, weight);
        }
        const float top_p = p.top_p ? p.top_p[row] : 1;
        if (top_p < 1) {
            const auto weight = [&](float z, unsigned token) {
                return below(z, m) > -INF && place_of(z, token) >= place ? mass_of(below(z, m), rate) : 0;
            };
            const uint64 total = slice.add(weight);
            const double wanted = ceil(double(top_p) * double(int64(total)));
            const uint64 goal = wanted < 1 ? 1 : min(uint64(wanted), total);
            place = max(place, slice.place_at(goal, m, range, p.first, weight));
        }
        if (p.min_p) {
            const double least = p.min_p[row] <= 1 ? double(p.min_p[row]) : 1;
            mass = least > 0 ? uint64(ceil(least * double(int64(1) << MASS_BITS))) : 0;
        }
    }
    const auto is_kept = [&](float z, unsigned token) {
        return below(z, m) > -INF && (!FILTERS || place_of(z, token) >= place && mass_of(below(z, m), rate) >= mass);
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
                const float x = wide(held[i + j]), z = below(x, m);
                if (p.raw) sums[1] += mass_of(z, raw_rate);
                if (!is_kept(x, unsigned(begin + i + j))) continue;
                kept |= 1u << j, sums[0] += mass_of(z, rate), ++sums[2], peak = fmax(peak, z);
            }
            const float missing = greedy ? 0 : missing_noise(bound, peak, float(divisor));
            bool better = false;
            if (kept && missing < MOST_NOISE) {
                // A token wins only with noise above `missing`, so only if 1 - u, which is below -log(u), is small.
                const float limit = exp(-missing) * 4.3e9f;
                const Words words = greedy ? Words{} : philox(unsigned((begin + i) / 4), offset, seed);
                for (int j = 0; j < 4; ++j) {
                    if (!(kept >> j & 1) || (!greedy && float(~words.of[j]) > limit)) continue;
                    const float x = wide(held[i + j]);
                    const double z = x == m ? 0 : double(x) - double(m);
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
    if (p.top && valid) slice.collect(largest, p.top, m, range);
    if (rank) return;

    const double log_sum = p.raw || !greedy ? log(double(int64(sums[p.raw ? 1 : 0]))) - MASS_BITS * LOG_2 : 0;
    const double by = p.raw ? 1 : divisor;
    const uint64 token = sums[4];
    const auto logprob = [&](float z, uint64 its) {
        if (!valid) return NOT_A_NUMBER;
        const bool kept = p.raw || (greedy ? its == token : is_kept(z, unsigned(its)));
        return kept ? float((z == m ? 0 : double(z) - double(m)) / by - log_sum) : -INF;
    };
    if (thread == 0) {
        p.token[row] = valid ? token : 0;
        p.logprob[row] = logprob(valid ? wide(p.x[row * p.stride + token]) : 0, token);
        p.lse[row] = valid ? float(m / by + log_sum) : NOT_A_NUMBER;
        p.kept[row] = !valid ? 0 : greedy ? 1 : sums[2];
        p.valid[row] = valid;
    }
    for (int i = thread; i < p.top; i += THREADS) {
        const uint64 place = valid ? largest.all[i] : 0;
        int64 at = 0;
        for (int j = 0; valid && j < p.top; ++j) at += largest.all[j] > place;
        const unsigned its = ~unsigned(place);
        p.top_tokens[row * p.top + (valid ? at : i)] = valid ? its : 0;
        p.top_logprobs[row * p.top + (valid ? at : i)] = logprob(score_at(place), its);
    }
}
