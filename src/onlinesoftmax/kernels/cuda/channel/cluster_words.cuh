// Words that the blocks of a cluster store in each other's shared memory, and the barrier of all their threads.
//
// That barrier waits until all earlier stores of the threads can be seen on the whole device, about 1000 cycles.  A message
// waits for nothing: only its own word is known to have come.

// Stores a word in the variable of another block that has this address here.
__device__ inline void put_word(uint64* to, uint64 word, int block) {
    if constexpr (CLUSTER == 1) {
        *to = word;
        return;
    }
    unsigned there;
    const unsigned here = unsigned(__cvta_generic_to_shared(to));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("st.shared::cluster.b64 [%0], %1;" :: "r"(there), "l"(word) : "memory");
}

// The word of another block in its variable that has this address here.
__device__ inline uint64 get_word(const uint64* from, int block) {
    if constexpr (CLUSTER == 1) return *from;
    unsigned there;
    uint64 word;
    const unsigned here = unsigned(__cvta_generic_to_shared(from));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("ld.shared::cluster.b64 %0, [%1];" : "=l"(word) : "r"(there) : "memory");
    return word;
}

// Waits for all threads of the cluster, and makes their earlier stores visible.
__device__ inline void wait_for_cluster() {
    if constexpr (CLUSTER == 1) __syncthreads();
    else asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Makes the earlier stores of this thread, and of those that it has met, visible to the readers of its next messages.
__device__ inline void show_stores() {
    if constexpr (CLUSTER > 1) asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

// Waits until every block of the cluster has begun, so that it may be written to; threads of the block see each other's
// earlier stores.  Simulated blocks find the variables of others by their distance from this one.
__device__ inline void open_cluster(const void*) {
    __syncthreads();
    if constexpr (CLUSTER > 1) announce_beginning(), wait_for_beginnings();
}

// Messages of one word.  In each of its phases, of which the parities are 0, 1, 0 and so on, a barrier of the reader waits for
// the words that one thread expects; they may come before.
__device__ inline void prepare_words(uint64* arrived) { prepare_barrier(arrived, 1); }
__device__ inline void expect_words(uint64* arrived, unsigned count) { arrive_and_expect(arrived, 8 * count); }
__device__ inline void send_word(uint64* to, uint64 word, uint64* arrived, int block) {
    if constexpr (CLUSTER > 1) send(to, word, arrived, block);
}
__device__ inline void wait_for_words(uint64* arrived, unsigned phase) {
    if constexpr (CLUSTER > 1) wait_for_messages(arrived, phase);
}
