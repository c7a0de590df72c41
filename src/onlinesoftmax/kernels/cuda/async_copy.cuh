// Asynchronous copies from global to shared memory, for strategy `grid`.  A thread reads only chunks that it copied
// itself, so no barrier is needed.

// A thread's chunks of x and dy in shared memory, THREADS chunks apart.
struct SharedChunks { Chunk<X, VECTOR>* x; Chunk<DY, VECTOR>* dy; };

// This thread's part of a block's dynamic shared memory for `chunks` chunks a thread.
__device__ inline SharedChunks shared_chunks(Chunk<X, VECTOR>* memory, int64 chunks) {
    return {memory + threadIdx.x, reinterpret_cast<Chunk<DY, VECTOR>*>(memory + chunks * THREADS) + threadIdx.x};
}

__device__ inline void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
}

// Copies a chunk; without a register where it has 16 bytes and is aligned to them in both memories.
template <int WIDTH, class T> __device__ inline void fetch(Chunk<T, VECTOR>* to, const T* from, int64 step) {
    if constexpr (WIDTH * sizeof(T) == 16 && sizeof(Chunk<T, VECTOR>) == 16) {
        copy_async(to, from);
    } else {
        Chunk<T, VECTOR> chunk;
        load<WIDTH, CachePolicy::NORMAL>(chunk, from, step);
        *to = chunk;
    }
}

__device__ inline void fetch(const Params& p, const SharedChunks& shared, int i, const Cursor& at, int64 offset) {
    const int64 x_step = step<X_WIDTH>(p.x_place);
    fetch<X_WIDTH>(shared.x + i * THREADS, at.x + offset * x_step, x_step);
    if constexpr (HAS_DY) {
        const int64 dy_step = step<DY_WIDTH>(p.dy_place);
        fetch<DY_WIDTH>(shared.dy + i * THREADS, at.dy + offset * dy_step, dy_step);
    }
}

// Ends a group of copies.
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` groups, up to 7, are under way; the instruction takes a constant.
__device__ inline void wait_groups(int pending) {
    switch (pending) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 7;" ::: "memory");
    }
}
