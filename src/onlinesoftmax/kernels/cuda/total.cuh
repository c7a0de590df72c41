// The scalar of a loss of few rows, the mean or the sum, written by the kernel that computes the losses.
//
// One block:  the first one counts the targets before it takes its rows, and tells the other blocks the divisor of the
//             mean.  The block of the last row adds the losses of all rows, divides, and writes the scalar.
// Chosen:     up to MOST_ROWS_IN_ONE_LAUNCH rows (torch/targets.py), where these messages take less time than the launches
//             of the small kernels that otherwise do this work (reduction.cuh).
// Bytes:      a word for each row, through L2; the targets are read a second time.
// Limits:     blocks must begin in the order of their numbers, as GPUs begin them: a block waits for blocks of lower numbers
//             alone, so they have begun.
//
// A block has read the divisor before it sends the loss of its row.  So once all losses have arrived, nobody reads the
// divisor any more, and the last block empties all words for the next kernel.

namespace total {

constexpr int BATCH = 8;   // numbers that a thread loads at once

// The sums over all rows are wider than the losses.
template <class T> struct WideOf { using type = double; };
template <> struct WideOf<double> { using type = DoubleDouble; };
using Wide = WideOf<ACC>::type;

__device__ inline Wide add_lanes(Wide a) {
#pragma unroll
    for (int step = 16; step; step /= 2) a += across(a, step);
    return a;
}

// The sum over the threads of the block; only the first warp gets it.
__device__ inline Wide add_block(Wide a) {
    __shared__ Wide exchange[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    if (lane == 0) exchange[warp] = a;
    __syncthreads();
    return warp ? Wide{} : add_lanes(lane < THREADS / 32 ? exchange[lane] : Wide{});
}

// The sum of number(row) over the rows of this thread.  All of a batch are loaded before the first is used.
template <class Load, class Number> __device__ inline Wide add_rows(const Params& p, Load load, Number number) {
    Wide sum{};
    for (int64 first = threadIdx.x; first < p.rows; first += BATCH * THREADS) {
        decltype(load(first)) loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * THREADS < p.rows) loaded[i] = load(first + i * THREADS);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * THREADS < p.rows) sum += number(first + i * THREADS, loaded[i]);
    }
    return sum;
}

// The number that a row adds to the divisor.
__device__ inline ACC share_of(const Params& p, int64 target) {
    if constexpr (HAS_IGNORE_INDEX) if (target == int64(p.ignore_index)) return 0;
    if constexpr (!HAS_WEIGHT) return 1;
    // A target out of range has no weight, so it adds 0.  The mean is NaN in any case, because the loss of its row is.
    else return target >= 0 && target < p.cols ? ACC(wide(load_one(p.weight + target * p.weight_place.col))) : 0;
}

// Writes the divisor.  It is not inlined, so that the other blocks need not jump over its code.
__device__ __noinline__ void count_all_targets(const Params& p) {
    const Wide sum = add_block(add_rows(
        p, [&](int64 row) { return int64(load_one(p.target + row_offset(p, p.target_place, row))); },
        [&](int64, int64 target) { return share_of(p, target); }));
    static_assert(DIVISORS == 32, "one for each lane");
    if (threadIdx.x < 32) put_word(LossMail(p).divisor(threadIdx.x), uint64(bits(ACC(double(sum)))));
}

__device__ inline void count_targets(const Params& p) {
    if constexpr (CALL_MEAN_LOSS)
        if (blockIdx.x == 0 && blockIdx.y == 0) count_all_targets(p);
}

// Adds the losses of all rows, if this block owns the last of them.  It owns the rows from `first` to the one before
// `end`, and has sent their losses.
__device__ inline void add_losses(const Params& p, int64 first, int64 end) {
    if constexpr (SCALAR_LOSS) {
        if (first >= p.rows || end < p.rows) return;
        const LossMail mail(p);
        const Wide sum = add_block(add_rows(
            p, [&](int64 row) { return look_word(mail.losses + row); },
            [&](int64 row, LossMail::Word word) {
                if (word == LossMail::Word(EMPTY)) word = wait_for_word(mail.losses + row);
                put_word(mail.losses + row, LossMail::Word(EMPTY));
                ACC loss;
                from_bits(word, loss);
                return loss;
            }));
        if (threadIdx.x >= 32) return;
        double divisor = 1;
        if constexpr (CALL_MEAN_LOSS) {
            divisor = double(mail.wait_for_divisor(threadIdx.x));
            put_word(mail.divisor(threadIdx.x), EMPTY);
        }
        if (threadIdx.x) return;
        if constexpr (CALL_MEAN_LOSS) narrow(*p.mean_loss, ACC(double(sum) / divisor));
        else narrow(*p.total_loss, ACC(double(sum)));
    }
}

}  // namespace total
