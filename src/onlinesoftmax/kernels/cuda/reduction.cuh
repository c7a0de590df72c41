// Reduces the losses of all rows to the total, their targets to the divisor of the mean, or both at once.
//
// One block:  owns the tiles blockIdx.x, blockIdx.x + gridDim.x, ... of BATCH * THREADS rows.  The last block to finish
//             adds the sums of all blocks.
// Chosen:     for the divisor before a loss kernel that also writes the gradient, and for the total after every loss
//             kernel whose losses are reduced to a scalar.
// Bytes:      one read of the losses, of the targets, or of both, and of one weight for each target.
// Limits:     contiguous losses, targets and weights; at most THREADS blocks; one kernel at a time uses `scratch`, whose
//             first word must be 0 before the launch and is 0 again after it.

struct Reduction {
    const ACC* losses; const TARGET* target; const WEIGHT* weight;
    const ACC* count;   // (1 / divisor, divisor) from an earlier launch; read where it DIVIDES
    ACC* divisor;       // the same of this launch; written where it KEEPS
    RESULT* out;
    uint64* scratch;   // number of blocks that have finished, an empty word, then the sums of each block
    int64 rows, classes, ignore_index;
};

struct RowSums { SUM total, divisor; };

// The sums of the 32 lanes of a warp, as in lanes.cuh; the shuffles of one sum are under way during those of the other.
__device__ inline RowSums add_lanes(RowSums a) {
#pragma unroll
    for (int step = 16; step; step /= 2) {
        if constexpr (ADDS_LOSSES) a.total += across(a.total, step);
        if constexpr (COUNTS) a.divisor += across(a.divisor, step);
    }
    return a;
}

// The sums of all threads of a block.  Before the call, all threads must have finished reading `exchange`.
__device__ inline RowSums add_block(RowSums a, RowSums* exchange) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    if (lane == 0) exchange[warp] = a;
    __syncthreads();
    return add_lanes(lane < THREADS / 32 ? exchange[lane] : RowSums{});
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

// Writes the sums of this block.  Returns true in the last block that does so, which can read the sums of all blocks.
__device__ inline bool is_last_block(const Reduction& p, RowSums sums, RowSums* all) {
    __shared__ bool last;
    unsigned* const finished = reinterpret_cast<unsigned*>(p.scratch);
    if (threadIdx.x == 0) {
        all[blockIdx.x] = sums;
        __threadfence();
        last = atomicAdd(finished, 1u) == gridDim.x - 1;
        // The next kernel on this stream finds 0 again.
        if (last) *finished = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// volatile bypasses the L1 cache, which may hold values from before the stores of other multiprocessors.
__device__ inline RowSums load_sums(const RowSums* from) {
    RowSums sums;
    for (int i = 0; i < int(sizeof(RowSums) / sizeof(double)); ++i)
        reinterpret_cast<double*>(&sums)[i] = reinterpret_cast<const volatile double*>(from)[i];
    return sums;
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
    __shared__ RowSums exchange[THREADS / 32];
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
    sums = add_block(sums, exchange);
    if (gridDim.x > 1) {
        RowSums* const all = reinterpret_cast<RowSums*>(p.scratch + 2);
        if (!is_last_block(p, sums, all)) return;
        sums = add_block(threadIdx.x < gridDim.x ? load_sums(all + threadIdx.x) : RowSums{}, exchange);
    }
    if (threadIdx.x == 0) write(p, sums);
}
