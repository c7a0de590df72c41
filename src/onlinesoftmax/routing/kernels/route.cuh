// Chooses the experts of each token: indices, weights and logsumexp; counts and sums of probabilities of the experts.
//
// One block:  its warps take turns with those of the other blocks of a sequence: AT_ONCE tokens at a time.
// Chosen:     for route.
// Bytes:      one read of the logits, chosen ones once more from a cache; 8 * k + 4 bytes written for a token.
// Limits:     rows of adjacent float32 or 16-bit logits; at most ITEMS * TEAM experts, and 8,192.

// Writes the results of a token that is `inside` its sequence, and counts its experts.  Returns true if it is valid.
//
// `sum` is the sum of the lane's terms, and becomes that of all.
__device__ inline bool write_token(
    const Route& p, unsigned token, bool inside, bool valid, const X* row, const TeamMemory& memory, const Shift& of_all,
    float& sum, float& lse, int* counts, Board& board
) {
    const float scale = __uint_as_float(unsigned(p.scale_bits));
    const auto load = [&](int j) {
        if (REPLAY) {
            const int given = p.given[uint64(token) * K + j], expert = given >= 0 && given < int(p.experts) ? given : -1;
            return chosen_of(expert < 0 ? 0 : wide(row[expert]), expert, p.bias);
        }
        const Choice one = SHORT ? memory.chosen[j] : choice_of_key(memory.list[j]);
        return chosen_of(HAS_BIAS ? wide(row[one.expert]) : one.key, one.expert, p.bias);
    };
    const ChosenExperts<decltype(load)> chosen(load);
    if (REPLAY) {
        // A token without a single expert is not valid.
        float any = 0;
        chosen.each([&](const Chosen& one, int) { any = one.expert >= 0 ? 1 : any; });
        valid = fold_team<Maximum>(any, board) > 0 && valid;
    }
    Shift shift = of_all;
    if (OF_CHOSEN && (REPLAY || HAS_BIAS || GROUPED)) {   // the largest logit may not be chosen
        float peak = -INF;
        chosen.each([&](const Chosen& one, int) { peak = one.excluded ? peak : fmax(peak, one.x); });
        shift = Shift(fold_team<Maximum>(peak, board));
    }
    // Scores that are divided by their sum need no lse, so that both sums travel between the lanes at the same time.
    float of_chosen = 0;
    if (RENORMALIZE) chosen.each([&](const Chosen& one, int) { of_chosen += score_of(one, shift); });
    sum = fold_team<Sum>(sum, board);
    if (RENORMALIZE) of_chosen = fold_team<Sum>(of_chosen, board);
    lse = of_all.log_of_sum(sum);
    // A sum of 0 gives weights of 0.
    const float divisor = !RENORMALIZE ? sum : of_chosen != 0 ? of_chosen : INF;
    // Softmax is not exp(x - lse), since lse is rounded.  Its terms and their sums are 2^-64 to 2^77 (Shift): the quotient
    // comes before the scale.
    const float inverse = SCORE == Score::SOFTMAX ? rough_reciprocal(divisor) : 1;
    if (!inside) return false;
    Chunk<float, TOGETHER> some_weights;
    Chunk<int, TOGETHER> some_indices;
    chosen.each([&](const Chosen& one, int j) {
        const int i = j % TOGETHER;
        const uint64 first = uint64(token) * K + (j - i);
        float score = score_of(one, shift);
        if (SCORE == Score::SOFTMAX) score *= inverse;
        else if (RENORMALIZE) score /= divisor;
        some_weights.at[i] = valid && !one.excluded ? score * scale : 0;
        some_indices.at[i] = valid ? one.expert : -1;
        if (COUNTS && valid && (!REPLAY || one.expert >= 0)) atomicAdd(&counts[one.expert], 1);
        if (i < TOGETHER - 1) return;
        store<TOGETHER, CachePolicy::NORMAL>(p.weights + first, some_weights, 1);
        store<TOGETHER, CachePolicy::NORMAL>(p.indices + first, some_indices, 1);
    });
    if (threadIdx.x % TEAM == 0) p.lse[token] = valid ? lse : 0;
    return valid;
}

// Adds the probabilities of a valid token to the lane's sums; z are its scores, of softmax the terms with this sum.
__device__ inline void add_probabilities(
    const float (&z)[ITEMS], float sum, unsigned items, float (&sums)[ITEMS], bool valid, const X* row, Board& board
) {
    if (SCORE != Score::SOFTMAX) {
        sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) sum += z[i];
        sum = fold_team<Sum>(sum, board);
    }
    if (!valid) return;
    const float up = SCORE == Score::SOFTMAX ? 1 : scale_up(sum), factor = 1 / (sum == 0 ? 1 : sum * up);
    if (factor > 0) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) sums[i] = fma(z[i] * up, factor, sums[i]);
        return;
    }
    // A token with NaN or +inf: an expert with -inf has the probability 0 even there.
#pragma unroll 1
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1 && wide(row[expert_of(i)]) == -INF) items &= ~(1u << i);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i)
        if (items >> i & 1) sums[i] += z[i] * factor;
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) route_kernel(const __grid_constant__ Route p) {
    extern __shared__ uint4 memory[];
    __shared__ unsigned of_warps[2][WARPS];
    Board board{of_warps, 0};
    const int team = threadIdx.x / TEAM, experts = int(p.experts);
    const int64 sequence = blockIdx.x / unsigned(p.parts);
    const int part = blockIdx.x % unsigned(p.parts);
    const unsigned items = own_items(experts);
    int* const counts = reinterpret_cast<int*>(memory);
    uint64* const of_teams = reinterpret_cast<uint64*>(memory + (experts + 3) / 4);
    // Hidden from the compiler, which else computes the addresses of the team's memory again for each token.
    int place_of_team = team * int(p.team_words); asm volatile("" : "+r"(place_of_team));
    TeamMemory own{of_teams + place_of_team, nullptr, nullptr, nullptr};
    own.chosen = reinterpret_cast<Choice*>(own.list + CAPACITY);
    own.values = reinterpret_cast<float*>(own.chosen + (SHORT ? K : 0)), own.scores = own.values + experts;
    float sums[ITEMS], square = 0;   // of the probabilities of the lane's experts, and of lse
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) sums[i] = 0;
    if (COUNTS)
        for (int expert = threadIdx.x; expert < experts; expert += THREADS) counts[expert] = 0;
    __syncthreads();
    wait_for_kernel_before();
    let_next_kernel_begin();   // all kernels before this one have ended
    const int tokens = int(p.tokens), step = token_step(int(p.parts)), begin = first_token(part, int(p.parts));
    int64 distance = step * p.stride; asm volatile("" : "+l"(distance));   // else it is computed for each token
    // The next row comes into L2 while the block works on the row before: on an H100, 65536 x 64 took 0.96 of the time.
    const int line = threadIdx.x % TEAM * (128 / sizeof(X));
    // A team behind the end reads its last row again, or the last one of all, and writes nothing.
    int place = begin + token_of_team();
    int64 at = (sequence * tokens + min(place, tokens - 1)) * p.stride;
    // The vote tells the compiler that the warp's lanes leave together; __any_sync took more instructions.
    for (bool inside = place < tokens; !__all_sync(~0u, !inside);) {
        const bool inside_next = place + step < tokens;
        const unsigned token = unsigned(sequence) * tokens + min(place, tokens - 1);
        const X* const row = p.x + at;
        float z[ITEMS], m = -INF, sum = 0, lse;
        load_row(z, row, experts, -INF);
        if (inside_next && line < experts) prefetch(row + distance + line);
        bool valid = inside && (!MASKED || p.mask[token]);
        if (!REPLAY) {
            const TokenSoftmax softmax = softmax_of_token(z, items, board);
            choose(p, row, z, items, softmax, own, board, m);
        }
        if (REPLAY || HAS_BIAS || GROUPED || !SHORT) {
            m = z[0];
#pragma unroll
            for (int i = 1; i < ITEMS; ++i) m = fmax(m, z[i]);
            m = fold_team<Maximum>(m, board);
        }
        const Shift shift(m);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const float term = shift.term(z[i]);
            sum += term;
            if (SCORE == Score::SOFTMAX) z[i] = term;
            else if (PROB_SUMS) z[i] = z[i] == -INF ? 0 : score(z[i]);
        }
        valid = write_token(p, token, inside, valid, row, own, shift, sum, lse, counts, board);
        if (LOSSES && valid) square = fma(lse, lse, square);
        if (PROB_SUMS) add_probabilities(z, sum, items, sums, valid, row, board);
        sync_team();   // before the list is overwritten
        place += step, inside = inside_next;
        if (inside) at += distance;
    }
    if (COUNTS || PROB_SUMS) write_sums(p, sequence, sums, square, counts, reinterpret_cast<float*>(of_teams));
}
