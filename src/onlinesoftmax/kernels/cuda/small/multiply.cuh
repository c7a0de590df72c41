// Multiplies a gradient by one number on the device, in place or into another dtype.
//
// One block:  owns BATCH x THREADS chunks of at most 16 bytes, then advances by the size of the grid (a grid-stride loop).
// Chosen:     in the backward pass of a loss whose gradient the forward pass has written.
// Bytes:      in place only the number if it is 1, as in `loss.backward()`; else one read and one write of the gradient.
// Limits:     x and y are contiguous, and their first elements lie on 16 bytes.

struct Product { const T* x; OUT* y; const FACTOR* factor; int64 count; };

extern "C" __global__ void __launch_bounds__(THREADS) multiply_kernel(const __grid_constant__ Product p) {
    // This kernel may begin before the kernel before it ends, and that kernel may write the factor.  So it waits.
    wait_for_kernel_before();
    let_next_kernel_begin();   // all kernels before this one have ended
    const ACC f = wide(*p.factor);
    if (f == 1 && static_cast<const void*>(p.y) == p.x) return;
    const T* const x = p.x;
    OUT* const y = p.y;
    const int64 count = p.count;
    const int64 chunks = count / VECTOR, tile = BATCH * THREADS;
    for (int64 first = blockIdx.x * tile + threadIdx.x; first < chunks; first += gridDim.x * tile) {
        // A batch is loaded before any of it is used, so that few threads keep the memory busy.
        Chunk<T, VECTOR> batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * THREADS < chunks)
                load<VECTOR, CachePolicy::NORMAL>(batch[i], x + (first + i * THREADS) * VECTOR, 1);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            ACC product[VECTOR];
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) product[j] = f * wide(batch[i], j);
            if (first + i * THREADS < chunks)
                store<VECTOR, CachePolicy::NORMAL>(y + (first + i * THREADS) * VECTOR, narrow<OUT>(product), 1);
        }
    }
    const int64 last = chunks * VECTOR + int64(blockIdx.x) * THREADS + threadIdx.x;
    if (last < count) narrow(y[last], f * wide(x[last]));
}
