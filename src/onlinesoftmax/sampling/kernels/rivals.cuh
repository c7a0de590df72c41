// The tokens of a row without top_k that may win: the first read lists them.

// Tokens whose score and noise together are far enough up that one of them wins, almost certainly.
//
// About e^4 tokens have a sum above the logarithm of all masses, minus 4; that there is none has a probability of 2 * 10^-24
// if the masses are known.  EXP_RIVALS is e^4 and 0.2 % for rounding.
constexpr float EXP_RIVALS = 54.71f;
struct Rivals {
    uint64* list;        // MOST_RIVALS sort keys
    // The uniform number u of a token has 1 - u < -log(u), so only one with 1 - u <= 2^(x * rate + shift) gets there.
    float rate, shift;
    float bound;         // no other token has a sum above it: a base-2 logarithm, relative to the score m

    // Expects that the masses have this sum, in units of the mass of the score m.
    __device__ inline void expect(float m, float its_rate, float masses) {
        rate = its_rate;
        const float least = log_of_two(masses * (1 / EXP_RIVALS));
        // The product has two roundings.
        bound = least + 0.001f, shift = 2.5e-7f * fabs(m * rate) - m * rate - least;
    }
    // Returns true if no token beside the list can beat the winner; `peak` is the base-2 logarithm of the mass of m over that
    // of the row's largest score.
    __device__ inline bool include(const Winner& winner, float peak) const {
        return winner.word && winner.sum() - Winner::ERROR >= bound + peak;
    }
    // True if a token with this score and random number may win.
    __device__ inline bool has(float x, unsigned bits) const {
        const float missing = __uint_as_float(0x3f800000u | ~bits >> 9);   // 2 - u, or a little less
        return missing <= 1 + power_of_two(fma(x, rate, shift));
    }
    // A bit for each token of a tile that may win; the tile begins with token `first` of the row, a multiple of 4.
    __device__ inline unsigned among(const Tiles& tiles, unsigned first, uint64 seed, uint64 offset) const {
        unsigned found = 0;
        Words of_groups[OWN_TOKENS / 4];   // at the same time, as one waits for its own steps
#pragma unroll
        for (int i = 0; i < OWN_TOKENS / 4; ++i) of_groups[i] = philox((first + Tiles::token(4 * i)) / 4, offset, seed);
#pragma unroll
        for (int group = 0; group < OWN_TOKENS; group += 4) {
            const Words& words = of_groups[group / 4];
            // Most groups have no such token, not even with the largest score and the largest number.
            if (has(tiles.largest_of_four(group), max(max(words.of[0], words.of[1]), max(words.of[2], words.of[3]))))
#pragma unroll
                for (int j = 0; j < 4; ++j) found |= unsigned(has(tiles.score(group + j), words.of[j])) << (group + j);
        }
        return found;
    }
};

// Lists the rivals among the kept tokens, whose masses have the sum `mass`; false where they do not fit the list.  Block 0
// gets those of all blocks, and `count` of them.
__device__ inline bool list_rivals(
    const Row& row, Slice& slice, Kept kept, uint64 mass, Rivals& rivals, Board* board, int& count
) {
    if (threadIdx.x == 0) board->counts[1] = 0;
    wait_for_cluster();   // block 0 has not waited for the others
    rivals.expect(row.m, row.rate, float(over_largest(mass, row.m, row.rate)));
    Tiles tiles;
    tiles.begin(slice);
#pragma unroll 1
    for (int tile = 0; tile < slice.count; tile += TILE) {
        __syncwarp();
        tiles.take(slice, tile);
        unsigned listed = rivals.among(tiles, unsigned(slice.begin + tile), row.seed, row.offset);
#pragma unroll 1
        for (; listed; listed &= listed - 1) {
            const int i = __ffs(listed) - 1;
            const uint64 key = key_of(tiles.pick(i), unsigned(slice.begin) + tile + Tiles::token(i));
            if (row.keeps(key, kept)) append(rivals.list, MOST_RIVALS, &board->counts[1], key);
        }
    }
    __syncthreads();
    const uint64 own[] = {board->counts[1]};
    uint64 total = 0, before = 0;
    const Slice::Words shared = slice.share(own);
#pragma unroll 1
    for (int block = 0; block < CLUSTER; ++block) {
        before = block == slice.rank ? total : before;
        total += shared[block][0];
    }
    count = int(total);
    if (total > MOST_RIVALS) return false;
    gather(slice, rivals.list, int(own[0]), before);
    wait_for_keys(slice, count - int(own[0]), 1);
    return true;
}

// Finds the winner among the kept tokens, whose masses have the sum `mass`, where it is not among the rivals of the first
// pass.  Returns the next `turn` of the slice, inverted where search_row has to take the row.
namespace rare {
__device__ __noinline__ int win_again(
    const Row& row, Slice slice, Kept kept, uint64 mass, Rivals rivals, Board* board, Result& result
) {
    int count = 0;
    if (!list_rivals(row, slice, kept, mass, rivals, board, count)) return ~slice.turn;
    uint64 words[] = {0};
    if (slice.rank == 0) {
        const Winner winner = sum_and_win(row, slice, nullptr, 0, rivals.list, count, kept).winner;
        if (threadIdx.x == 0) result.outcome.winner = winner.key;
        words[0] = !rivals.include(winner, 0);
    }
    slice.tell(words);
    return words[0] ? ~slice.turn : slice.turn;
}
}
