// A loss that is reduced to a scalar, the mean or the sum of the losses of all rows, in the kernel that computes them.
//
// One block:  of the first p.counters, counts a part of the targets before it takes its rows, and the last of them adds
//             the parts to the divisor of the mean.  The block of the last row of a tile adds the losses of that tile of
//             rows.  The block of the last row of all adds the tiles, and writes the scalar.
// Bytes:      a word for each row, which is written to L2 and read from there; the targets are read a second time.
// Limits:     blocks must begin in the order of their numbers, as GPUs begin them.  A block waits for blocks of lower
//             numbers, and for the first p.counters, which are resident together.
//
// A block has read the divisor before it sends the loss of its row, so once all losses have arrived, nobody reads the
// divisor any more.  Whoever reads a word last empties it, so all words are empty when the kernel ends.

namespace total {
#define COUNT_INLINE __noinline__

constexpr int BATCH = 8;   // words that a thread loads at once
constexpr int64 TILE = BATCH * THREADS;
static_assert(TILE == TOTAL_TILE, "tile_of_total in source.py");

// The sums of all rows are as wide as the losses allow: float64, and twice that for float64 losses.
template <class T> struct WideOf { using type = double; };
template <> struct WideOf<double> { using type = DoubleDouble; };
using Wide = WideOf<ACC>::type;

// The sum over all threads of a block, for each of them in the first warp.  No thread may still read `exchange`.
__device__ inline Wide add_lanes(Wide a) {
#pragma unroll
    for (int step = 16; step; step /= 2) a += across(a, step);
    return a;
}
__device__ inline Wide add_block(Wide a, Wide* exchange) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    if (lane == 0) exchange[warp] = a;
    __syncthreads();
    return warp ? a : add_lanes(lane < THREADS / 32 ? exchange[lane] : Wide{});
}

// The part of this thread of the sum of `words`, from the first to the one before `end`, each a number T.  It waits for
// them, and empties them.
template <class T, class Word> __device__ inline Wide take(Word* words, int64 first, int64 end) {
    Wide sum{};
    for (int64 i = first + threadIdx.x; i < end; i += TILE) {
        // All words of a batch are asked for before the first is waited for.
        Word batch[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; ++j) batch[j] = i + j * THREADS < end ? look_word(words + i + j * THREADS) : 0;
#pragma unroll
        for (int j = 0; j < BATCH; ++j) {
            if (i + j * THREADS >= end) break;
            T x;
            from_bits(batch[j] == Word(EMPTY) ? wait_for_word(words + i + j * THREADS) : batch[j], x);
            put_word(words + i + j * THREADS, Word(EMPTY));
            sum += x;
        }
    }
    return sum;
}

__device__ inline void send(uint64* to, double x) { put_word(to, bits(x)); }
__device__ inline void send(uint64* to, DoubleDouble x) { put_word(to, bits(x.high)), put_word(to + 1, bits(x.low)); }

// The number that a row adds to the divisor.
__device__ inline ACC share_of(const Params& p, int64 target) {
    if constexpr (HAS_IGNORE_INDEX) if (target == int64(p.ignore_index)) return 0;
    if constexpr (!HAS_WEIGHT) return 1;
    // A target out of range has no weight, so it adds 0.  The mean is NaN in any case, because the loss of its row is.
    else return target >= 0 && target < p.cols ? ACC(wide(load_one(p.weight + target * p.weight_place.col))) : 0;
}

// Counts the part of the targets that a block owns, one of `counters`.
__device__ COUNT_INLINE void count(const Params& p, int64 block, int64 counters) {
    {
        __shared__ Wide exchange[THREADS / 32];
        const LossMail mail(p);
        Wide sum{};
        for (int64 row = block * TILE + threadIdx.x; row < p.rows; row += counters * TILE) {
            ACC shares[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; ++j) {
                const int64 at = row + j * THREADS;
                shares[j] = at < p.rows ? share_of(p, load_one(p.target + row_offset(p, p.target_place, at))) : 0;
            }
#pragma unroll
            for (int j = 0; j < BATCH; ++j) sum += shares[j];
        }
        sum = add_block(sum, exchange);
        if (threadIdx.x >= 32) return;
        if (block < counters - 1) {
            if (threadIdx.x == 0) send(mail.counts + block * LossMail::WIDE_WORDS, sum);
            return;
        }
        sum += add_lanes(take<double>(mail.counts, 0, block * LossMail::WIDE_WORDS));
        static_assert(DIVISORS == 32, "one for each lane");
        put_word(mail.divisor + threadIdx.x * LossMail::DIVISOR_WORDS, uint64(bits(ACC(double(sum)))));
    }
}

__device__ inline void count_targets(const Params& p) {
    if constexpr (CALL_MEAN_LOSS) {
        const int64 block = blockIdx.x + int64(gridDim.x) * blockIdx.y, blocks = int64(gridDim.x) * gridDim.y;
        const int64 counters = min(min(p.counters, blocks), (p.rows + TILE - 1) / TILE);
        if (block < counters) count(p, block, counters);
    }
}

// Writes the scalar, from the sum of the last tile and from the messages about the others.
__device__ inline void write(const Params& p, const LossMail& mail, Wide last, Wide* exchange) {
    const int64 others = (p.rows - 1) / TILE;
    const Wide sum = add_block(take<double>(mail.totals, 0, others * LossMail::WIDE_WORDS), exchange) + last;
    if (threadIdx.x >= 32) return;
    if constexpr (CALL_MEAN_LOSS) {
        uint64* const divisor = mail.divisor + threadIdx.x * LossMail::DIVISOR_WORDS;
        ACC x;
        from_bits(wait_for_word(divisor), x);
        put_word(divisor, EMPTY);
        if (threadIdx.x == 0) narrow(*p.mean_loss, ACC(double(sum) / double(x)));
    } else if (threadIdx.x == 0) {
        narrow(*p.total_loss, ACC(double(sum)));
    }
}

// Adds the losses of the tiles of rows whose last row this block owns; it owns the rows from the first to the one before
// `end`, and has sent their losses.
__device__ inline void add_losses(const Params& p, int64 first, int64 end) {
    if constexpr (SCALAR_LOSS) {
        __shared__ Wide exchange[THREADS / 32];
        const LossMail mail(p);
        for (int64 tile = first / TILE;; ++tile) {
            const int64 after = min((tile + 1) * TILE, p.rows);
            if (after > end) return;
            const Wide sum = add_block(take<ACC>(mail.losses, tile * TILE, after), exchange);
            __syncthreads();
            if (after == p.rows) return write(p, mail, sum, exchange);
            if (threadIdx.x == 0) send(mail.totals + tile * LossMail::WIDE_WORDS, sum);
        }
    }
}

}  // namespace total
