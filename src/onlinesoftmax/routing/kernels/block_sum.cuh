// The sum of the threads of a block.

constexpr int WARPS = THREADS / 32;
static_assert(THREADS % 32 == 0);

// Returns the sum over the threads of the block to each of them; the warps are added in their order.  All threads call it.
// `of_warps` is in shared memory, and a barrier must come before its next use.
template <class T> __device__ inline T add_block(T a, T* of_warps) {
    a = add_lanes(a);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = a;
    __syncthreads();
    T total = 0;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) total += of_warps[i];
    return total;
}
