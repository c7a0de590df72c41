// The load-balancing loss or the z-loss of a router, from the results of route, and its derivative.
//
// One block:  reads all counts, and all sums of probabilities (a warp for each sequence at a time), or all lse.
// Chosen:     for results on a GPU that are few enough for one block.
// Bytes:      what it reads once from the L2 cache, counts twice; the derivative written once.
// Limits:     the values begin on 16 bytes.
//
// losses.py has the formulas.  PyTorch's operations would be six launches, each as long as this one.

struct RouterLoss {
    const int* counts; const float* values;   // (sequences, experts); sums of probabilities, or lse (tokens)
    float* loss; float* slopes;               // of the sums (sequences, experts); or the one by which lse is multiplied
    int64 sequences, experts, tokens, factor_bits;
};

constexpr int WARPS = THREADS / 32;

struct alignas(16) FourFloats { float of[4]; };

// The sum of the threads of a block, for each of them; the warps are added in their order.
template <class T> __device__ inline T add_block(T a, T* of_warps) {
    a = add_lanes(a);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = a;
    __syncthreads();
    T total = 0;
    for (int i = 0; i < WARPS; ++i) total += of_warps[i];
    return total;
}

// Number of choices of a sequence, for each lane of a warp.
__device__ inline int64 chosen_of(const int* counts, int experts) {
    int64 n = 0;
    for (int e = threadIdx.x % 32; e < experts; e += 32) n += counts[e];
    return add_lanes(n);
}

__device__ inline float slope_of(float factor, int64 n) { return n > 0 ? factor / float(n) / float(n) : 0; }

extern "C" __global__ void __launch_bounds__(THREADS) router_loss_kernel(const __grid_constant__ RouterLoss p) {
    __shared__ float sums[WARPS];
    __shared__ int64 numbers[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, experts = int(p.experts), sequences = int(p.sequences);
    const float factor = __uint_as_float(unsigned(p.factor_bits));
    float total = 0;
    int64 number = 0;
    if (Z_LOSS) {
        for (int i = threadIdx.x; i < sequences * experts; i += THREADS) number += p.counts[i];
        const int fours = int(p.tokens) / 4;
        const FourFloats* const values = reinterpret_cast<const FourFloats*>(p.values);
#pragma unroll 4
        for (int i = threadIdx.x; i < fours; i += THREADS) {
            const FourFloats four = values[i];
#pragma unroll
            for (int j = 0; j < 4; ++j) total = fma(four.of[j], four.of[j], total);
        }
        const int rest = 4 * fours + threadIdx.x;
        if (rest < int(p.tokens)) total = fma(p.values[rest], p.values[rest], total);
    } else {
        for (int s = warp; s < sequences; s += WARPS) {
            const int* const counts = p.counts + s * experts;
            const float* const values = p.values + s * experts;
            float dot = 0;
            for (int e = lane; e < experts; e += 32) dot = fma(float(counts[e]), values[e], dot);
            const int64 n = chosen_of(counts, experts);
            // Each lane adds its part; the number of sequences is that of lane 0.
            total = fma(dot, slope_of(factor, n), total);
            number += lane == 0 && n > 0;
        }
    }
    total = add_block(total, sums), number = add_block(number, numbers);
    const float divisor = number > 0 ? float(number) : 1;
    if (threadIdx.x == 0) p.loss[0] = (Z_LOSS ? total * factor : total) / divisor;
    if (Z_LOSS) {
        if (threadIdx.x == 0) p.slopes[0] = 2 * factor / divisor;
        return;
    }
    for (int s = warp; s < sequences; s += WARPS) {
        const int* const counts = p.counts + s * experts;
        const float slope = slope_of(factor, chosen_of(counts, experts)) / divisor;
        for (int e = lane; e < experts; e += 32) p.slopes[s * experts + e] = float(counts[e]) * slope;
    }
}
