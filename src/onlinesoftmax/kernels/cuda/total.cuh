// The scalar of a loss of few rows, the mean or the sum, written by the kernel that computes the losses.
//
// Blocks:     block 0 counts the targets before it takes its rows, and publishes the divisor of the mean, which the
//             gradient and the mean need.  The block that owns the last row adds all losses, divides, and writes the scalar.
// Chosen:     up to MOST_ROWS_IN_ONE_LAUNCH rows (torch/targets.py), where messages between blocks (mail.cuh) take less
//             time than the launches of small kernels that otherwise do this work (reduction.cuh).
// Bytes:      one word for each row and 32 words for the divisor, written, read and emptied in L2; for a mean, block 0
//             reads all targets once more.
// Limits:     a block waits only for itself and for blocks of lower numbers.  This relies on blocks starting in the
//             order of their numbers, which GPUs do and CUDA does not promise.
//
// Every thread reads the divisor before its row is reduced, and the loss of the row is sent after that.  So when all
// losses have arrived, nobody will read the divisor again, and the last block sets all words back to EMPTY for the next
// kernel on this stream.

namespace total {

constexpr int BATCH = 8;   // numbers that a thread loads at once

// The sums over all rows are kept in a wider type than the losses.
template <class T> struct WideOf { using type = double; };
template <> struct WideOf<double> { using type = DoubleDouble; };
using Wide = WideOf<ACC>::type;

__device__ inline Wide add_lanes(Wide a) {
#pragma unroll
    for (int step = 16; step; step /= 2) a += across(a, step);
    return a;
}

// The sum over the threads of the block, all of which must call this.  The lanes of the first warp get the sum, the
// others 0.
__device__ inline Wide add_block(Wide a) {
    __shared__ Wide exchange[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    // One block may count and add; the first warp must have read the counts before another warp writes here again.
    __syncthreads();
    if (lane == 0) exchange[warp] = a;
    __syncthreads();
    return warp ? Wide{} : add_lanes(lane < THREADS / 32 ? exchange[lane] : Wide{});
}

// The sum of number(row, load(row)) over the rows threadIdx.x, threadIdx.x + THREADS, ...  A whole batch is loaded before
// any of it is used.
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

// The number that a row adds to the divisor: 0 if it is ignored, else its weight or 1.
__device__ inline ACC share_of(const Params& p, int64 target) {
    if constexpr (HAS_IGNORE_INDEX) if (target == int64(p.ignore_index)) return 0;
    if constexpr (!HAS_WEIGHT) return 1;
    // A target out of range has no weight, so it adds 0.  The mean is NaN in any case, because the loss of that row is NaN.
    else return target >= 0 && target < p.cols ? ACC(wide(load_one(p.weight + target * p.weight_place.col))) : 0;
}

// Counts all targets and publishes the divisor.  It is not inlined: with it in their path, the blocks that do not count
// took 78 instead of 70 us for 8192 x 8192 float32 on an H200.
__device__ __noinline__ void count_all_targets(const Params& p) {
    const Wide sum = add_block(add_rows(
        p, [&](int64 row) { return int64(load_one(p.target + row_offset(p, p.target_place, row))); },
        [&](int64, int64 target) { return share_of(p, target); }));
    static_assert(DIVISORS == 32, "one place for each lane of a warp");
    if (threadIdx.x < 32) put_word(LossMail(p).divisor(threadIdx.x), uint64(bits(ACC(double(sum)))));
}

// In block 0 of a mean, counts the targets.  All threads call this before they read the divisor.
__device__ inline void count_targets(const Params& p) {
    if constexpr (CALL_MEAN_LOSS)
        if (blockIdx.x == 0 && blockIdx.y == 0) count_all_targets(p);
}

// If this block owns the last row: waits for all losses, adds them, writes the scalar and empties the words.  The block
// owns the rows from `first` to the one before `end`, and has sent their losses.  Of several blocks that hold one row, one
// calls this, with all its threads.
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
