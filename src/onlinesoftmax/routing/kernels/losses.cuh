// The load-balancing loss or the z-loss of a router, from the results of route, and its derivative.
//
// One block:  reads all counts and sums of probabilities, a warp for each of several sequences at a time; or all counts
//             and a part of lse, where the blocks of a cluster send the first one their sums.
// Chosen:     for results on a GPU that are few enough for one cluster.
// Bytes:      what it reads from the L2 cache; the derivative written once.
// Limits:     the values begin on 16 bytes.
//
// losses.py has the formulas.  PyTorch's operations would be six launches, each as long as this one.

struct RouterLoss {
    const int* counts; const float* values;   // (sequences, experts); sums of probabilities, or lse (tokens)
    float* loss; float* slopes;               // the derivative, in the shape of the values
    int64 sequences, experts, tokens, factor_bits;
};

struct alignas(16) FourFloats { float of[4]; };

__device__ inline float slope_of(float factor, int64 n) { return n > 0 ? factor / float(n) / float(n) : 0; }

// The sum of counts * values of a sequence in the part of the lane, or thread, and of the counts in `number`.
__device__ inline float dot_of(const RouterLoss& p, int sequence, int first, int step, int64& number) {
    const int experts = int(p.experts);
    const int* const counts = p.counts + sequence * experts;
    const float* const values = p.values + sequence * experts;
    float dot = 0;
    number = 0;
#pragma unroll 4
    for (int e = first; e < experts; e += step) {
        const int count = counts[e];
        dot = fma(float(count), values[e], dot), number += count;
    }
    return dot;
}
__device__ inline void write_slopes(const RouterLoss& p, int sequence, int first, int step, float slope) {
    const int experts = int(p.experts);
    for (int e = first; e < experts; e += step)
        p.slopes[sequence * experts + e] = float(p.counts[sequence * experts + e]) * slope;
}

__device__ inline void balance(const RouterLoss& p, float factor, float* sums, int64* numbers) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sequences = int(p.sequences);
    int64 n;
    if (sequences == 1) {
        const float dot = add_block(dot_of(p, 0, threadIdx.x, THREADS, n), sums);
        const float slope = slope_of(factor, add_block(n, numbers));
        if (threadIdx.x == 0) p.loss[0] = dot * slope;
        write_slopes(p, 0, threadIdx.x, THREADS, slope);
        return;
    }
    float total = 0;
    int64 number = 0;   // of sequences with a token
    for (int s = warp; s < sequences; s += WARPS) {
        const float dot = dot_of(p, s, lane, 32, n);
        n = add_lanes(n);
        total = fma(dot, slope_of(factor, n), total);
        number += lane == 0 && n > 0;
    }
    total = add_block(total, sums), number = add_block(number, numbers);
    const float divisor = number > 0 ? float(number) : 1;
    if (threadIdx.x == 0) p.loss[0] = total / divisor;
    for (int s = warp; s < sequences; s += WARPS) {
        dot_of(p, s, lane, 32, n);
        write_slopes(p, s, lane, 32, slope_of(factor, add_lanes(n)) / divisor);
    }
}

__device__ inline void add_squares(const RouterLoss& p, float factor, float* sums, int64* numbers) {
    __shared__ float of_blocks[CLUSTER];
    __shared__ uint64 arrived;
    const int block = blockIdx.x, first = block * THREADS + threadIdx.x, step = CLUSTER * THREADS;
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x == 0) expect_bytes(&arrived, CLUSTER * sizeof(float));
        __syncthreads();
        announce_beginning();
    }
    const int fours = int(p.tokens) / 4, rest = 4 * fours + first;
    const FourFloats* const values = reinterpret_cast<const FourFloats*>(p.values);
    float total = 0;
    int64 number = 0;
    for (int i = threadIdx.x; i < int(p.sequences * p.experts); i += THREADS) number += p.counts[i];
#pragma unroll 4
    for (int i = first; i < fours; i += step) {
        const FourFloats four = values[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) total = fma(four.of[j], four.of[j], total);
    }
    if (rest < int(p.tokens)) total = fma(p.values[rest], p.values[rest], total);
    total = add_block(total, sums), number = add_block(number, numbers);
    const float divisor = number > 0 ? float(number) : 1;
    if constexpr (CLUSTER > 1) {
        wait_for_beginnings();
        if (threadIdx.x == 0) send(&of_blocks[block], total, &arrived, 0);
    }
    const float slope = 2 * factor / divisor;
#pragma unroll 4
    for (int i = first; i < fours; i += step) {
        FourFloats four = values[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) four.of[j] *= slope;
        reinterpret_cast<FourFloats*>(p.slopes)[i] = four;
    }
    if (rest < int(p.tokens)) p.slopes[rest] = p.values[rest] * slope;
    if (block > 0 || threadIdx.x > 0) return;
    if constexpr (CLUSTER > 1) {
        wait_for_messages(&arrived);
        total = 0;
        for (int i = 0; i < CLUSTER; ++i) total += of_blocks[i];
    }
    p.loss[0] = total * factor / divisor;
}

extern "C" __global__ void __launch_bounds__(THREADS) router_loss_kernel(const __grid_constant__ RouterLoss p) {
    __shared__ float sums[WARPS];
    __shared__ int64 numbers[WARPS];
    const float factor = __uint_as_float(unsigned(p.factor_bits));
    wait_for_kernel_before();
    let_next_kernel_begin();   // all kernels before this one have ended
    if (Z_LOSS) add_squares(p, factor, sums, numbers);
    else balance(p, factor, sums, numbers);
}
