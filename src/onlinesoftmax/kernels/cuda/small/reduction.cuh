// Reduces the losses of all rows to the total, their targets to the divisor of the mean, or both at once.
//
// One block:  owns the tiles blockIdx.x, blockIdx.x + gridDim.x, ... of BATCH * THREADS rows.  The last block adds the sums
//             of all blocks, which send them through channels.
// Chosen:     for the divisor before a loss kernel that also writes the gradient, and for the total after every loss
//             kernel whose losses are reduced to a scalar.
// Bytes:      one read of the losses, of the targets, or of both, and of one weight for each target.
// Limits:     contiguous losses, targets and weights; at most THREADS blocks; one kernel at a time uses `mail`.  The last
//             block waits for the others, which relies on blocks starting in the order of their numbers (scalar_loss.cuh).

struct Reduction {
    const ACC* losses; const TARGET* target; const WEIGHT* weight;
    const ACC* count;   // (1 / divisor, divisor) from an earlier launch; read where it DIVIDES
    ACC* divisor;       // the same of this launch; written where it KEEPS
    RESULT* out;
    uint64* mail;       // the sums of each block; every word is EMPTY before and after a launch
    int64 rows, classes, ignore_index;
};

struct RowSums { SUM total, divisor; };

// The sums of the 32 lanes of a warp, as in warp_shuffle.cuh; the shuffles of one sum are under way during those of the other.
__device__ inline RowSums add_lanes(RowSums a) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        if constexpr (ADDS_LOSSES) a.total += across(a.total, step);
        if constexpr (COUNTS) a.divisor += across(a.divisor, step);
    }
    return a;
}

// The sums of all threads of a block.  Before the call, all threads must have finished reading `warp_sums`.
__device__ inline RowSums add_block(RowSums a, RowSums* warp_sums) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    if (lane == 0) warp_sums[warp] = a;
    __syncthreads();
    return add_lanes(lane < THREADS / 32 ? warp_sums[lane] : RowSums{});
}

// The number that a row adds to the divisor.
__device__ inline ACC share_of(const Reduction& p, int64 target) {
    if (target == p.ignore_index) return 0;
    if constexpr (!WEIGHTED) return 1;
    // A target out of range has no weight, so it adds 0.  The mean is NaN in any case, because the loss of its row is.
    else return target >= 0 && target < p.classes ? ACC(wide(p.weight[target])) : 0;
}

// The sum of number(row) over this thread's rows.
template <class Number> __device__ inline SUM add_rows(const Reduction& p, Number number) {
    SUM sum{};
    constexpr int TILE = BATCH * THREADS;
    for (int64 tile = blockIdx.x; tile * TILE < p.rows; tile += gridDim.x) {
        const int64 first = tile * TILE + threadIdx.x;
        // A batch is loaded before any of it is added, so that all its loads are under way together.
        ACC numbers[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) numbers[i] = first + i * THREADS < p.rows ? number(first + i * THREADS) : 0;
#pragma unroll
        for (int i = 0; i < BATCH; ++i) sum += numbers[i];
    }
    return sum;
}

// The mailbox of a block.
__device__ inline Mailbox<RowSums> mailbox(const Reduction& p, int block) {
    return Mailbox<RowSums>(p.mail + Mailbox<RowSums>::DOUBLES * block);
}

__device__ inline void write(const Reduction& p, RowSums sums) {
    // The divisor is rounded to ACC, because a launch of its own stores it in ACC.  So the mean is the same in both cases.
    const ACC divisor = ACC(double(sums.divisor));
    if constexpr (ADDS_LOSSES) {
        double total = double(sums.total);
        if constexpr (COUNTS) total /= double(divisor);
        if constexpr (KEEPS) p.divisor[0] = 1 / divisor, p.divisor[1] = divisor;
        if constexpr (DIVIDES) total /= double(p.count[1]);
        narrow(*p.out, ACC(total));
    } else {
        narrow(p.out[0], 1 / divisor), narrow(p.out[1], divisor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) reduction_kernel(const __grid_constant__ Reduction p) {
    __shared__ RowSums warp_sums[THREADS / 32];
    // The loss kernel reads the divisor after it has loaded its first rows.
    if constexpr (!ADDS_LOSSES) let_next_kernel_begin();
    // This kernel may begin before the loss kernel ends.  The targets may be read at once, because the loss kernel does
    // not write them.
    RowSums sums{};
    if constexpr (COUNTS) sums.divisor = add_rows(p, [&](int64 row) { return share_of(p, p.target[row]); });
    if constexpr (ADDS_LOSSES) {
        wait_for_kernel_before();
        sums.total = add_rows(p, [&](int64 row) { return p.losses[row]; });
    }
    sums = add_block(sums, warp_sums);
    const int last = int(gridDim.x) - 1, lane = threadIdx.x;
    if (int(blockIdx.x) < last) {
        if (lane == 0) mailbox(p, blockIdx.x).put(sums);
        return;
    }
    if (last > 0) {
        __syncthreads();
        if (lane != last) sums = lane < last ? mailbox(p, lane).wait_and_take() : RowSums{};
        sums = add_block(sums, warp_sums);
    }
    if (lane == 0) write(p, sums);
}
