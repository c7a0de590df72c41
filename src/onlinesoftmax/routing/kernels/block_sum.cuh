// The sum of the threads of a block.

constexpr int WARPS = THREADS / 32;

// The sum, for each of the threads; the warps are added in their order.
template <class T> __device__ inline T add_block(T a, T* of_warps) {
    a = add_lanes(a);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = a;
    __syncthreads();
    T total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += of_warps[i];
    return total;
}
