// Decides which drafted tokens of a row stay, and finds the token that follows them: speculative decoding.
//
// One block:  owns `slice` adjacent tokens of a row of drafts.  Each of the CLUSTER blocks of a row decides which of its
//             drafts stay; all come to the same result.
// Chosen:     by verify, after sample.cuh has read the logits of all positions.
// Bytes:      in each block, two logits of each model for a draft; where a draft is replaced, one read of the logits of both
//             models at its position.
// Limits:     those of sample.cuh.
//
// The rule is that of verification.py, in float64.  The token that replaces a draft has the largest sum of log(p - q) and
// noise.  float32 numbers with bounds of their errors leave out most tokens, which cannot reach the largest sum so far.

// Findings of sample.cuh on the positions of a model, one for each position.
struct Model {
    const X* x;
    const int64* largest; const uint64* key; const double* sum;   // token of the largest logit; kept_key, kept_sum of Sampling
    const unsigned char* valid;
};

struct Verification {
    Model target, draft;       // of n + 1 and n positions for each row; without DRAFT, the second has no tensors
    const int64* sampled;      // the token that sample.cuh has sampled at each position of the target
    const int64* drafts;       // n for each row; a row with fewer is filled up with numbers that are no token ids
    const float* temperature; const void* min_p;   // as in Sampling, for each row
    const int64* seed; const int64* offset;
    int64* accepted; int64* tokens; float* logprobs; unsigned char* valid;
    int64 target_stride, draft_stride, cols, slice, n, narrow, temperature_bits;
    double min_p_number;
    int64 seed_number, offset_number;
};

// The streams of the noise, as in philox.py.
constexpr unsigned CORRECT = 1, ACCEPT = 2;

__device__ __noinline__ double exp_of(double x) { return exp(x); }

// The parameters of a row.
struct RowParameters {
    double divisor, least;   // the temperature, 1 for a greedy row; the least difference to the largest score of min_p
    uint64 seed, offset;     // of the first position
};
__device__ inline RowParameters parameters_of(const Verification& p, int64 row) {
    const float temperature = p.temperature ? p.temperature[row] : __int_as_float(int(p.temperature_bits));
    const double min_p = !p.min_p ? p.min_p_number
        : p.narrow ? double(static_cast<const float*>(p.min_p)[row]) : static_cast<const double*>(p.min_p)[row];
    const bool greedy = temperature == 0;
    return {greedy ? 1 : double(temperature),
            greedy || min_p <= 0 ? -INF : double(temperature) * natural_log(fmin(min_p, 1.0)),
            uint64(p.seed ? p.seed[row] : p.seed_number), uint64(p.offset ? p.offset[row] : p.offset_number)};
}

// The distribution of a position.
struct Position {
    const X* x;
    uint64 key;        // the least sort key that top_k and top_p keep; in a greedy row, that of the only token
    float m;           // the largest logit
    double divisor, least, log_sum;
    bool valid;

    __device__ inline double probability(float logit, unsigned token) const {
        const double z = exactly_below(logit, m);
        const bool kept = key_of(logit, token) >= key && z > -INF && z >= least;
        return kept ? exp_of(z / divisor - log_sum) : 0;
    }
    __device__ inline double probability(unsigned token) const { return probability(wide(x[token]), token); }
};
__device__ inline Position position_of(const Model& of, int64 at, int64 stride, const RowParameters& row) {
    const X* const x = of.x + at * stride;
    // In float64, not by log_of: where one token is kept, the sum is 1, and its logarithm has to be 0.
    return {x, of.key[at], wide(x[of.largest[at]]), row.divisor, row.least, natural_log(of.sum[at]), bool(of.valid[at])};
}

// A row after its drafts have been decided, in shared memory.
struct Decision {
    RowParameters row;
    Position p, q;       // at the first position whose draft does not stay; q only with DRAFT
    int64 accepted;
    unsigned rejected;   // the draft at that position
    bool corrects;       // it is replaced by a token of max(p - q, 0)
    unsigned bound;      // the word of a lower bound of the block's largest sum of log2(p - q) and noise; 0 before there is one
};

// Decides which drafts stay, by the first warp; writes the tokens that stay, and -1 behind the next one.
__device__ inline void decide(const Verification& p, int64 at, bool writes, Decision& decision) {
    const int lane = threadIdx.x;
    const RowParameters row = parameters_of(p, at);
    const int64 first_target = at * (p.n + 1), first_draft = at * p.n;
    int64 accepted = 0, rejected = -1;
#pragma unroll 1
    for (int64 first = 0; first < p.n; first += 32) {
        const int64 i = first + lane, token = i < p.n ? p.drafts[first_draft + i] : -1;
        double of_p = 0;
        bool stays = false;
        if (token >= 0 && token < p.cols) {
            const Position target = position_of(p.target, first_target + i, p.target_stride, row);
            of_p = target.probability(unsigned(token));
            double of_q = 1;
            bool valid = target.valid;
            if (DRAFT) {
                const Position draft = position_of(p.draft, first_draft + i, p.draft_stride, row);
                of_q = draft.probability(unsigned(token)), valid = valid && draft.valid;
            }
            stays = valid && uniform(bits_of(0, row.offset + i, row.seed, ACCEPT)) * of_q < of_p;
        }
        const unsigned ends = __ballot_sync(~0u, !stays);
        const int count = ends ? __ffs(ends) - 1 : 32;
        if (writes && lane < count) {
            p.tokens[first_target + i] = token;
            p.logprobs[first_target + i] = float(natural_log(of_p));
        }
        accepted += count;
        if (count < 32) {
            rejected = from_lane(token, count);
            break;
        }
    }
    if (writes)
#pragma unroll 1
        for (int64 i = accepted + 1 + lane; i <= p.n; i += 32) p.tokens[first_target + i] = -1, p.logprobs[first_target + i] = 0;
    const bool exists = accepted < p.n && rejected >= 0 && rejected < p.cols;
    // Lane 1 makes q at the same time.
    const bool second = DRAFT && lane == 1 && exists;
    const Position own = position_of(
        second ? p.draft : p.target, second ? first_draft + accepted : first_target + accepted,
        second ? p.draft_stride : p.target_stride, row);
    const bool others = from_lane(int(own.valid), DRAFT && exists);
    if (lane == 0) {
        decision.row = row, decision.p = own, decision.accepted = accepted, decision.rejected = unsigned(rejected);
        decision.corrects = exists && own.valid && others, decision.bound = 0;
    }
    if (second) decision.q = own;
}

// Bounds of the probabilities of a position in float32.
struct Bounds {
    float m, rate, shift;   // a probability is nearly 2^((x - m) * rate - shift)
    float low, high;        // tokens with logits below `low` are not kept, and those above `high` are
    bool usable;

    // The relative error of a probability is below ERROR; under the normal numbers of float32, the absolute one below TINY.
    static constexpr float ERROR = 1e-4f, TINY = 1e-37f;

    __device__ inline Bounds(const Position& of) : m(of.m) {
        rate = fmin(float(LOG2_E / of.divisor), LARGEST_FLOAT32), shift = float(of.log_sum * LOG2_E);
        low = fmax(of.key ? score_of(of.key) : -INF, -LARGEST_FLOAT32);
        high = fmax(low, float(double(m) + of.least) + 1e-6f * fabs(m));
        // Not where a difference overflows float32, nor with a rate that has few bits or has been cut.
        usable = m < INF && m - -LARGEST_FLOAT32 < INF && rate > 1e-30f && rate < LARGEST_FLOAT32;
    }
    __device__ inline float near(float x) const { return power_of_two(fma(x - m, rate, -shift)); }
    __device__ inline float below(float x) const { return x > high ? near(x) * (1 - ERROR) : 0; }
    __device__ inline float above(float x) const { return near(x) * (1 + ERROR) + TINY; }
};

// The sum of log(p - q) and noise of a token; -INF where p is not larger.
__device__ __noinline__ double sum_of(const Decision& row, float of_p, float of_q, unsigned bits, unsigned token) {
    const double q = DRAFT ? row.q.probability(of_q, token) : double(token == row.rejected);
    const double weight = row.p.probability(of_p, token) - q;
    return weight > 0 ? natural_log(weight) + gumbel(bits) : -INF;
}

// Raises the bound of the block to a token's sum in base 2, less 0.01 for rounding errors.
__device__ inline void raise(unsigned* bound, float sum) {
    const unsigned word = word_of(sum - 0.01f);
    if (word > look_shared(bound)) atomicMax(bound, word);
}

// The key of the token with the largest sum of log(p - q) and noise, for all threads; 0 where p - q is 0 or less everywhere.
__device__ inline uint64 correction(const Verification& p, Decision& decision, Slice slice) {
    constexpr int EACH = ALIGNED && VECTOR < 8 ? 2 : 1, GROUPS = VECTOR / 4, TILE = EACH * VECTOR * THREADS;
    Slice other = slice;
    slice.x = decision.p.x + slice.begin, other.x = (DRAFT ? decision.q.x : decision.p.x) + slice.begin;
    const Bounds of_p(decision.p), of_q(DRAFT ? decision.q : decision.p);
    const uint64 seed = decision.row.seed, offset = decision.row.offset + decision.accepted;
    const unsigned rejected = decision.rejected;
    const bool usable = of_p.usable && of_q.usable;
    Best best{-INF, 0};
    Chunk<X, VECTOR> ours[EACH], theirs[EACH], next[EACH], their_next[EACH];
    const auto place = [](int tile, int i) { return tile + (i * THREADS + int(threadIdx.x)) * VECTOR; };
    const auto fetch = [&](int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            slice.fetch(next[i], place(tile, i));
            if (DRAFT) other.fetch(their_next[i], place(tile, i));
        }
    };
    fetch(0);
#pragma unroll 1
    for (int tile = 0; tile < slice.count; tile += TILE) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            ours[i] = next[i], theirs[i] = DRAFT ? their_next[i] : next[i];
            slice.complete(ours[i], place(tile, i));
            if (DRAFT) other.complete(theirs[i], place(tile, i));
        }
        fetch(tile + TILE);
        // The first tile is read twice: at first only to raise the bound, then to test its tokens against it.
#pragma unroll 1
        for (bool opens = tile == 0;; opens = false) {
            const unsigned bound = look_shared(&decision.bound);
            const float limit = bound ? 1.001f * power_of_two(-score_of_word(bound)) : INF;
#pragma unroll
            for (int group = 0; group < EACH * GROUPS; ++group) {
                const int i = group / GROUPS, j = group % GROUPS * 4;
                const unsigned token = unsigned(slice.begin) + place(tile, i) + j;
                const Words words = philox(token / 4, offset, seed, CORRECT);
                unsigned hits = 0;
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const float x = wide(ours[i], j + k), y = wide(theirs[i], j + k);
                    if (!DRAFT && token + k == rejected) continue;
                    if (opens) {
                        const float least = of_p.below(x) - (DRAFT ? of_q.above(y) : 0);
                        if (usable && least > 0) raise(&decision.bound, log_of_two(least * reciprocal(exponential(words.of[k]))));
                    }
                    // The noise, -log(-log(u)), is at most -log(1 - u).
                    const float most = of_p.above(x) - (DRAFT ? of_q.below(y) : 0);
                    const bool late = float(~words.of[k]) * 0x1p-32f > most * limit;
                    hits |= unsigned(x >= of_p.low && !(late && usable)) << k;
                }
#pragma unroll 1
                for (hits = opens ? 0 : hits; hits; hits &= hits - 1) {
                    const int k = __ffs(hits) - 1;
                    const unsigned low = k & 1 ? words.of[1] : words.of[0], high = k & 1 ? words.of[3] : words.of[2];
                    // The registers cannot be indexed.
                    const float x = wide(slice.x[token + k - slice.begin]), y = wide(other.x[token + k - slice.begin]);
                    const double sum = sum_of(decision, x, y, k & 2 ? high : low, token + k);
                    if (sum > -INF && best.take(sum, key_of(x, token + k))) raise(&decision.bound, float(sum * LOG2_E));
                }
            }
            if (!opens) break;
            __syncthreads();
        }
    }
    uint64 words[] = {ordered(best.sum), best.key};
    slice.reduce(words, merge_best);
    return words[1];
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) verify_kernel(const __grid_constant__ Verification p) {
    __shared__ Exchange exchange;
    __shared__ Decision decision;
    const int rank = blockIdx.x % CLUSTER;
    const int64 row = blockIdx.x / CLUSTER, begin = min(rank * p.slice, p.cols);
    if (threadIdx.x == 0) exchange.prepare();
    if (threadIdx.x < 32) decide(p, row, rank == 0, decision);
    open_cluster(&exchange);
    uint64 winner = 0;
    if (decision.corrects) {
        const Slice slice{nullptr, &exchange, begin, int(min(p.slice, p.cols - begin)), rank, 0, 0, nullptr};
        winner = correction(p, decision, slice);
    }
    if (rank || threadIdx.x) return;
    const int64 at = row * (p.n + 1) + decision.accepted;
    const bool valid = decision.p.valid;
    const unsigned token = winner ? token_of(winner) : unsigned(p.sampled[at]);
    p.accepted[row] = decision.accepted, p.valid[row] = valid;
    p.tokens[at] = valid ? int64(token) : -1;
    p.logprobs[at] = valid ? float(natural_log(decision.p.probability(token))) : 0;
}
