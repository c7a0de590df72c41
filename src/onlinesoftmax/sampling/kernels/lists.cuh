// Lists of sort keys in the shared memory of a block: sorted, and gathered from the blocks of a cluster.

// Raises a word of shared memory to the largest of the numbers of all threads, for readers behind the next barrier.
__device__ inline void raise(unsigned* to, unsigned own) {
    own = __reduce_max_sync(~0u, own);
    if (threadIdx.x % 32 == 0) atomicMax(to, own);
}

// Adds 1 to a word of shared memory, and returns its value before.  Of atomicAdd, the compiler makes one addition for the
// active lanes together, in fifteen instructions more; the threads that append seldom have company.
__device__ inline unsigned count_up(unsigned* word) {
    unsigned before;
    asm volatile("atom.shared.add.u32 %0, [%1], 1;"
                 : "=r"(before) : "r"(unsigned(__cvta_generic_to_shared(word))) : "memory");
    return before;
}

// Appends a key to a list if there is room; the count goes on, so that a list that is too long shows.  Returns its place.
__device__ inline unsigned append(uint64* list, unsigned room, unsigned* count, uint64 key) {
    const unsigned at = count_up(count);
    if (at < room) list[at] = key;
    return at;
}

// A number, of `bits` leading bits, that the numbers of at least n threads reach, and hardly more if possible.
__device__ inline unsigned bits_reached(unsigned own, int n, int bits) {
    unsigned found = 0;
#pragma unroll 1
    for (unsigned bit = 1u << 31; bits; bit /= 2, --bits) {
        const int count = __syncthreads_count(own >= (found | bit));
        if (count >= n) found |= bit;
        if (count >= n && count <= n + n / 8) break;
    }
    return found;
}

// Sorts a list from its largest key on.  Behind it there must be room for as many zeros as it has keys, and for 160 at least.
__device__ inline void sort(uint64* list, int count) {
    const int thread = threadIdx.x;
    const int bits = max(32 - __clz(max(count - 1, 0)), 5), size = 1 << bits;
    if (size <= THREADS / 2) {
        // Adjacent threads count the keys above one key, and wait for some of them at the same time.
        constexpr int AT_ONCE = 8;
        const int bits_of_parts = min(31 - __clz(THREADS) - bits, 5), parts = 1 << bits_of_parts, i = thread >> bits_of_parts;
        // No key is below 0, so the places behind the list count for none.
        if (count + thread < size + AT_ONCE * parts) list[count + thread] = 0;
        __syncthreads();
        const uint64 own = list[i];
        int rank = 0;
#pragma unroll 1
        for (int j = thread & (parts - 1); j < count; j += AT_ONCE * parts) {
            uint64 keys[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) keys[k] = list[j + k * parts];
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) rank += keys[k] > own;
        }
#pragma unroll 1
        for (int step = 1; step < parts; step *= 2) rank += across(rank, step);
        __syncthreads();
        if (i < count && (thread & (parts - 1)) == 0) list[rank] = own;
        __syncthreads();
        return;
    }
    sort_list<THREADS>(list, count, size, thread, [] { __syncthreads(); });
}

// Appends the keys of this block to the list of block 0, behind the `offset` keys of the blocks before this one.
__device__ inline void gather(const Slice& slice, uint64* list, int count, uint64 offset) {
    if (slice.rank == 0) return;
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS)
        send_word(&list[offset + i], list[i], &slice.exchange->gathered, 0);
}
// Waits in block 0 until `count` keys have come from the others, of one list or of several; `times` it has waited before.
__device__ inline void wait_for_keys(const Slice& slice, int count, int times) {
    if (CLUSTER > 1 && slice.rank == 0) {
        if (threadIdx.x == 0) expect_words(&slice.exchange->gathered, count);
        wait_for_words(&slice.exchange->gathered, times & 1);
    }
    __syncthreads();
}

// A list of few keys sets out before the blocks know how long the lists are: block 0 has an inbox, with a part for each block.
template <int ROOM> struct Inbox {
    uint64* keys;   // ROOM of them, in the same place in all blocks
    static constexpr unsigned PART = ROOM / CLUSTER;

    // How many keys of a list of this length go to the inbox.
    __device__ static inline unsigned early(unsigned count) { return count <= PART ? count : 0; }
    // Sends the list of this block.
    __device__ inline void send(const Slice& slice, const uint64* list, unsigned count) const {
        if (slice.rank == 0) return;
#pragma unroll 1
        for (unsigned i = threadIdx.x; i < early(count); i += THREADS)
            send_word(&keys[slice.rank * PART + i], list[i], &slice.exchange->early, 0);
    }
    // Waits in block 0 for such lists, and moves them to its own if they fit: each has its place behind those of the blocks
    // before.  A lane has the length of the list of the block of its number.  A kernel does this once.
    __device__ inline void take(const Slice& slice, uint64* list, unsigned count, bool fits) const {
        if (CLUSTER == 1 || slice.rank) return;
        const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane >= CLUSTER) count = 0;
        const unsigned coming = __reduce_add_sync(~0u, lane ? early(count) : 0);
        if (threadIdx.x == 0) expect_words(&slice.exchange->early, coming);
        wait_for_words(&slice.exchange->early, 0);
#pragma unroll 1
        for (unsigned block = 1 + warp; fits && block < CLUSTER; block += WARPS) {
            const unsigned before = __reduce_add_sync(~0u, lane < block ? count : 0), its = early(from_lane(count, int(block)));
#pragma unroll 1
            for (unsigned i = lane; i < its; i += 32) list[before + i] = keys[block * PART + i];
        }
        __syncthreads();
    }
};
