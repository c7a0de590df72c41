// The sums of the blocks of a sequence: counts and probabilities of the experts, and with LOSSES both losses.
//
// The blocks add whole numbers to words of memory: counts, and probabilities in units of a power of two.  So their order
// does not matter.  Of lse^2, each block writes its float32 sum to a word of its own, and the words are added in a fixed
// order.

// Item i has the word place_of_item(i).  Adjacent experts would share lines of L2, which adds one word after another; so
// four words share a line.
constexpr int LINES = TEAM > 32 ? 1 : 4;
__device__ inline int place_of_item(int item) { return item / 4 * (4 * LINES) + item % 4; }
__device__ inline int64 words_of_items(int items) { return (items + 3) / 4 * (4 * LINES); }

// Bits of a word: 0 to 43 the count or the sum, for which the host chooses the unit (numbers_of in source.py); 44 to 53 the
// number of blocks with a NaN; 54 to 63, without a ticket, the number of blocks that have added.  There are at most 1,023
// blocks.
constexpr uint64 BLOCK = uint64(1) << 54, NAN_BLOCK = uint64(1) << 44;
__device__ inline float sum_of_word(const Route& p, uint64 all) {
    const float unit = __uint_as_float(unsigned(p.unit_bits));
    return all % BLOCK >= NAN_BLOCK ? NOT_A_NUMBER : float(double(all % NAN_BLOCK) / double(unit));
}

// Several blocks may share a sequence.  With a ticket, the last block to take one writes all results; without, the last block
// to add to a word writes its result.  Words are 0 again afterwards, for the next launch.
constexpr bool TICKET = TEAM > 32 || LOSSES;

// Writes the results of a sequence, and with LOSSES its losses, whose formulas losses.py has.  word_of(item) is the word of
// an item, which may be asked for once, and squares() the thread's part of the sum of lse^2.  With LOSSES, `counts`, in
// shared memory, become those of all blocks.
template <class Words, class Squares> __device__ inline void write_results(
    const Route& p, int64 sequence, int* counts, const Words& word_of, const Squares& squares
) {
    const int experts = int(p.experts);
    float square = LOSSES ? squares() : 0, dot = 0;
    uint64 number = 0;
#pragma unroll 1
    for (int expert = threadIdx.x; expert < experts; expert += THREADS) {
        const int count = COUNTS ? int(unsigned(word_of(expert))) : 0;
        const float sum = PROB_SUMS ? sum_of_word(p, word_of(COUNTS * experts + expert)) : 0;
        if (COUNTS) p.counts[sequence * experts + expert] = count;
        if (PROB_SUMS) p.prob_sums[sequence * experts + expert] = sum;
        if (LOSSES) counts[expert] = count, number += count, dot = fma(float(count), sum, dot);
    }
    if (!LOSSES) return;
    __shared__ float dots[WARPS];
    __shared__ float of_squares[WARPS];
    __shared__ uint64 numbers[WARPS];
    number = add_block(number, numbers), dot = add_block(dot, dots), square = add_block(square, of_squares);
    const float n = number > 0 ? float(number) : 1, slope = number > 0 ? float(experts * K) / n / n : 0;
    if (threadIdx.x == 0) {
        p.balance[0] = dot * slope, p.z_loss[0] = square * float(K) / n;
        p.slopes[(experts + 3) / 4 * 4] = 2 * float(K) / n;
    }
#pragma unroll 1
    for (int expert = threadIdx.x; expert < experts; expert += THREADS) p.slopes[expert] = float(counts[expert]) * slope;
}

// Adds the sums of the block's teams, and those of the blocks of a sequence.  `square` is the sum of lse^2 of the team's
// tokens, in each of its lanes.
__device__ inline void write_sums(
    const Route& p, int64 sequence, float (&sums)[ITEMS], float square, int* counts, float* partial
) {
    constexpr int ROWS = TEAM > 32 ? 1 : WARPS;
    const int experts = int(p.experts), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float unit = __uint_as_float(unsigned(p.unit_bits));
    __syncthreads();   // the teams' memory is used no more, and all tokens are counted
    if (PROB_SUMS) {
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
            for (int step = TEAM; step < 32; step *= 2) sums[i] += across(sums[i], step);
            if ((TEAM > 32 || lane < TEAM) && expert_of(i) < experts)
                partial[(TEAM > 32 ? 0 : warp) * experts + expert_of(i)] = sums[i];
        }
        __syncthreads();
    }
    const auto own_word = [&](int item) {
        if (COUNTS && (!PROB_SUMS || item < experts)) return uint64(counts[item]);
        float sum = 0;
#pragma unroll 4
        for (int i = 0; i < ROWS; ++i) sum += partial[i * experts + item - COUNTS * experts];
        return sum - sum == 0 ? __float2ull_rn(sum * unit) : NAN_BLOCK;   // for an infinite sum too
    };
    const int items = (COUNTS + PROB_SUMS) * experts, parts = int(p.parts);
    uint64* const words = p.words + sequence * p.sequence_words;
    uint64* const ticket = words + words_of_items(items);
    if (threadIdx.x % TEAM) square = 0;
    if (TICKET && parts > 1) {
        // Words that get 0 are left out: a block has tokens of few of many experts.
#pragma unroll 1
        for (int item = threadIdx.x; item < items; item += THREADS) {
            const uint64 own = own_word(item);
            if (own) add_to_word(words + place_of_item(item), own);
        }
        __shared__ float of_warps[WARPS];
        __shared__ int is_last;
        if (LOSSES) square = add_block(square, of_warps);
        __syncthreads();
        if (threadIdx.x == 0) {
            if (LOSSES) put_word(ticket + 1 + blockIdx.x % unsigned(parts), uint64(__float_as_uint(square)));
            __threadfence();   // all that the block has added, which the barrier orders before
            is_last = add_and_look(ticket, 1) == uint64(parts - 1);
        }
        __syncthreads();
        if (!is_last) return;
        __threadfence();
        if (threadIdx.x == 0) put_word(ticket, 0);
    } else if (parts > 1) {
        constexpr int WORDS = 4;   // that a thread adds to before it waits for the first one
#pragma unroll 1
        for (int first = threadIdx.x; first < items; first += WORDS * THREADS) {
            uint64 all[WORDS];
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const int item = first + i * THREADS;
                if (item >= items) break;
                const uint64 own = own_word(item) + BLOCK;
                all[i] = add_and_look(words + place_of_item(item), own) + own;
            }
#pragma unroll
            for (int i = 0; i < WORDS; ++i) {
                const int item = first + i * THREADS;
                // The block that is the last one to add to a word.
                if (item >= items || all[i] / BLOCK != parts) continue;
                if (COUNTS && (!PROB_SUMS || item < experts)) p.counts[sequence * experts + item] = int(unsigned(all[i]));
                else p.prob_sums[sequence * experts + item - COUNTS * experts] = sum_of_word(p, all[i]);
                put_word(words + place_of_item(item), 0);
            }
        }
        return;
    }
    const auto take = [](uint64* word) {
        const uint64 all = look_word(word);
        put_word(word, 0);
        return all;
    };
    write_results(
        p, sequence, counts,
        [&](int item) { return TICKET && parts > 1 ? take(words + place_of_item(item)) : own_word(item); },
        [&] {
            if (parts == 1) return square;
            float sum = 0;
            // From the last thread on: the first ones have the experts.
#pragma unroll 1
            for (int i = THREADS - 1 - int(threadIdx.x); i < parts; i += THREADS)
                sum += __uint_as_float(unsigned(take(ticket + 1 + i)));
            return sum;
        }
    );
}
