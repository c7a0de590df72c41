// The gradient of the logits, of those of weights, sums of probabilities and logsumexp.
//
// One block:  its warps take turns with those of the other blocks of a sequence: AT_ONCE tokens at a time.
// Chosen:     for the gradient of route.
// Bytes:      the gradient written once; the logits read once if the gradient of all experts needs them (ROW).
//             The logits of the chosen experts are read again.
// Limits:     those of route.cuh.
//
// eager.py has the formulas.  What chosen experts get more than others is spread over a row of shared memory, which
// is 0 otherwise.

struct RouteGradient {
    const X* x; const float* bias; const int* indices; const float* lse;
    const float* dweights; const float* dprob_sums; const float* dlse;   // null without HAS_...
    // dprob_sums are multiplied by dbalance, and dlse gets lse * z_slope * dz_loss; null for 1 and 0.
    const float* dbalance; const float* z_slope; const float* dz_loss;
    X* dx;
    int64 stride, tokens, experts, parts, scale_bits;
};

// WEIGHTS_OF_ALL: weights are the softmax of all logits.  SOFTMAX, ROW: the gradient of all experts needs the softmax, or the
// row at all.
constexpr bool WEIGHTS_OF_ALL = HAS_DWEIGHTS && SCORE == Score::SOFTMAX && !OF_CHOSEN;
constexpr bool SOFTMAX = HAS_DLSE || WEIGHTS_OF_ALL || (HAS_DPROB_SUMS && SCORE == Score::SOFTMAX);
constexpr bool ROW = SOFTMAX || HAS_DPROB_SUMS;

// The derivative of the score of a logit; not of softmax.
__device__ inline float slope(float x) {
    if (SCORE == Score::IDENTITY) return 1;
    const float t = exp(-fabs(x)), inverse = reciprocal(1 + t);
    if (SCORE == Score::SIGMOID) return t * inverse * inverse;
    return x < -15 ? 0.5f * score(x) : (x < 0 ? t : 1) * inverse / (2 * score(x));
}

// Adds what the chosen experts get to the row of shared memory.  Returns the sum over the chosen experts of
// score / divisor * scale * dweight.
template <class Load> __device__ inline float spread_chosen(
    const RouteGradient& p, const ChosenExperts<Load>& chosen, float lse, float* spread, Board& board
) {
    const float scale = __uint_as_float(unsigned(p.scale_bits));
    Shift shift(0);
    float sum = 0, total = 0;
    if (OF_CHOSEN) {
        float peak = -INF;
        chosen.each([&](const Chosen& one, int) { peak = one.excluded ? peak : fmax(peak, one.x); });
        shift = Shift(fold_team<Maximum>(peak, board));
    }
    if (RENORMALIZE) {
        chosen.each([&](const Chosen& one, int) { sum += score_of(one, shift); });
        sum = fold_team<Sum>(sum, board);
    }
    const float divisor = RENORMALIZE && sum != 0 ? sum : 1;
    // Without OF_CHOSEN, softmax is exp(x - lse) with the rounded lse: relative errors are |lse| * 2^-24.
    const auto quotient_of = [&](const Chosen& one) {
        if (WEIGHTS_OF_ALL) return one.excluded ? 0 : exp(one.x - lse);
        return score_of(one, shift) / divisor;
    };
    const auto gradient_of = [&](const Chosen& one) { return one.excluded ? 0 : one.dweight * scale; };
    chosen.each([&](const Chosen& one, int) { total += quotient_of(one) * gradient_of(one); });
    total = fold_team<Sum>(total, board);
    const auto part_of = [&](const Chosen& one) {
        if (one.excluded) return 0.0f;
        const float dq = gradient_of(one);
        if (SCORE == Score::SOFTMAX) return quotient_of(one) * (RENORMALIZE ? dq - total : dq);
        return RENORMALIZE && sum == 0 ? 0 : slope(one.x) / divisor * (RENORMALIZE ? dq - total : dq);
    };
    // Given experts may be equal: then another number than its own lies at the place of an expert.
    chosen.each([&](const Chosen& one, int j) {
        if (one.expert >= 0) spread[one.expert] = __int_as_float(j + 1);
    });
    sync_team();
    bool equal = false;
    chosen.each([&](const Chosen& one, int j) {
        equal = equal || (one.expert >= 0 && __float_as_int(spread[one.expert]) != j + 1);
    });
    sync_team();
    if (any_lane(equal)) {
        chosen.each([&](const Chosen& one, int) {
            if (one.expert >= 0) spread[one.expert] = 0;
        });
        sync_team();
        if (threadIdx.x % TEAM == 0)
#pragma unroll 1
            for (int j = 0; j < K; ++j) {
                const Chosen one = chosen.load(j);
                if (one.expert >= 0) spread[one.expert] += part_of(one);
            }
    } else {
        chosen.each([&](const Chosen& one, int) {
            if (one.expert >= 0) spread[one.expert] = part_of(one);
        });
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
route_gradient_kernel(const __grid_constant__ RouteGradient p) {
    extern __shared__ uint4 memory[];
    __shared__ unsigned of_warps[2][WARPS];
    Board board{of_warps, 0};
    const int team = threadIdx.x / TEAM, experts = int(p.experts);
    const int64 sequence = blockIdx.x / unsigned(p.parts);
    const int part = blockIdx.x % unsigned(p.parts);
    float* const spread = reinterpret_cast<float*>(memory) + team * (TEAM * ITEMS);
    const bool whole = has_whole_chunks(experts);
#pragma unroll
    for (int i = 0; i < (HAS_DWEIGHTS ? ITEMS : 0); ++i) spread[expert_of(i)] = 0;
    wait_for_kernel_before();
    const float of_sums = HAS_DPROB_SUMS && p.dbalance ? *p.dbalance : 1;
    const float of_lse = HAS_DLSE && p.dz_loss ? *p.dz_loss * *p.z_slope : 0;
    const int tokens = int(p.tokens), step = token_step(int(p.parts));
    int64 distance = step * p.stride; asm volatile("" : "+l"(distance));   // else it is computed for each token
    // From the last token on: where the gradient follows soon, the L2 cache still has what route has read last.  A team before
    // the beginning reads its last row again, or the first one of all, and writes nothing.
    int place = tokens - 1 - first_token(part, int(p.parts)) - token_of_team();
    unsigned token = unsigned(sequence) * tokens + max(place, 0);
    int64 at = token * p.stride;
    // The vote tells the compiler that the warp's lanes leave together; __any_sync took more instructions.
    for (bool inside = place >= 0; !__all_sync(~0u, !inside);) {
        const X* const row = p.x + at;
        const int* const indices = p.indices + uint64(token) * K;
        const auto load = [&](int j) {
            const int expert = indices[j];
            const float dweight = HAS_DWEIGHTS ? p.dweights[uint64(token) * K + j] : 0;
            return chosen_of(expert < 0 || !HAS_DWEIGHTS ? 0 : wide(row[expert]), expert, p.bias, dweight);
        };
        const float lse = p.lse[token];
        float z[ITEMS], factor = 0, dlse = HAS_DLSE && p.dlse ? p.dlse[token] : 0;
        if (HAS_DLSE && p.dz_loss) dlse = fma(lse, of_lse, dlse);
        if (ROW) load_row(z, row, experts, -INF);
        const ChosenExperts<decltype(load)> chosen(load);
        float any = 0;
        chosen.each([&](const Chosen& one, int) { any = one.expert >= 0 ? 1 : any; });
        const bool valid = fold_team<Maximum>(any, board) > 0;
        sync_team();   // before the row of shared memory is written
        if (HAS_DWEIGHTS) factor = -spread_chosen(p, chosen, lse, spread, board);
        if (!WEIGHTS_OF_ALL) factor = 0;
        factor += dlse;
        sync_team();
        // The gradient takes the place of the logits.
        const float m = lse == -INF ? 0 : lse;
        float dp[ITEMS], total = 0;
        if (HAS_DPROB_SUMS) load_row(dp, p.dprob_sums + sequence * experts, experts, 0.0f);
        if (SCORE == Score::SOFTMAX || !HAS_DPROB_SUMS) {
            if (!SOFTMAX) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) z[i] = 0;
            } else if (m == m) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) z[i] = term_of(z[i], m);
            } else {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) z[i] = z[i] == -INF ? 0 : m;
            }
            if (HAS_DPROB_SUMS) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) total = fma(z[i], dp[i], total);
                factor = fma(-of_sums, fold_team<Sum>(total, board), factor);
            }
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) z[i] *= HAS_DPROB_SUMS ? fma(of_sums, dp[i], factor) : factor;
        } else {
            // Products with tiny scores would be subnormal, and the reciprocal of their sum infinite.
            const float up = SCORE != Score::IDENTITY && lse < -32 ? 0x1p100f : 1;
            float sum = 0;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) dp[i] *= up;
            if (SCORE != Score::IDENTITY) {
#pragma unroll
                for (int i = 0; i < ITEMS; ++i) {
                    const float s = z[i] == -INF ? 0 : score(z[i]);
                    sum += s, total = fma(s, dp[i], total);
                }
                sum = fold_team<Sum>(sum, board), total = fold_team<Sum>(total, board);
            }
            const float inverse = SCORE == Score::IDENTITY ? 1 : sum == 0 ? 0 : 1 / (sum * up);
            total = SCORE == Score::IDENTITY ? 0 : of_sums * total * inverse * up;
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) {
                const float own = z[i] == -INF || !SOFTMAX ? 0 : term_of(z[i], m) * factor;
                z[i] = z[i] == -INF ? 0 : own + slope(z[i]) * fma(of_sums, dp[i], -total) * inverse;
            }
        }
        if (!valid) {
#pragma unroll
            for (int i = 0; i < ITEMS; ++i) z[i] = 0;
        }
        X* const own = p.dx + uint64(token) * experts + first_expert();
        const float* const of_chosen = spread + first_expert();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const auto& more = reinterpret_cast<const Chunk<float, WIDTH>&>(of_chosen[distance_of(c * WIDTH)]);
            float out[WIDTH];
#pragma unroll
            for (int i = 0; i < WIDTH; ++i) out[i] = z[c * WIDTH + i] + (HAS_DWEIGHTS ? more.at[i] : 0);
            if (inside && (c < CHUNKS - 1 || whole))
                store<WIDTH, CachePolicy::NORMAL>(own + distance_of(c * WIDTH), narrow<X, WIDTH>(out), 1);
        }
        if (HAS_DWEIGHTS) {
            sync_team();
            chosen.each([&](const Chosen& one, int) {
                if (one.expert >= 0) spread[one.expert] = 0;
            });
        }
        place -= step, inside = place >= 0;
        if (inside) token -= step, at -= distance;
    }
}
