// Barriers in shared memory (mbarrier), which count arrivals of threads and bytes that are copied, and the bulk copies
// whose bytes they count.
//
// A barrier has phases.  A phase ends when the expected arrivals and bytes have come, and the next phase begins.

// The address of a variable in shared memory, as instructions for shared memory take it.
__device__ inline unsigned shared_address(const void* at) { return unsigned(__cvta_generic_to_shared(at)); }

// Prepares a barrier for a number of arrivals in each phase.
__device__ inline void prepare_barrier(uint64* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;"
                 :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ inline void arrive(uint64* barrier) {
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}
// Arrives, and lets the phase end only when `bytes` bytes have been copied.
__device__ inline void arrive_and_expect(uint64* barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                 :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// Waits until the phase of this parity has ended; a barrier's phases have the parities 0, 1, 0, 1, ...  A parity names only
// the current phase and the one before, so a caller may not fall further behind.
__device__ inline void wait_for_phase(uint64* barrier, unsigned phase) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" :: "r"(shared_address(barrier)), "r"(phase) : "memory");
}
// True where the phase of this parity has ended.
__device__ inline bool has_ended(uint64* barrier, unsigned phase) {
    unsigned ended;
    asm volatile("{\n\t.reg .pred done;\n"
                 "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(ended) : "r"(shared_address(barrier)), "r"(phase) : "memory");
    return ended;
}
// Begins an asynchronous copy from global to shared memory, whose bytes count for the barrier.  Both addresses and the
// number of bytes are multiples of 16.
template <CachePolicy POLICY>
__device__ inline void copy_bulk(void* to, const void* from, unsigned bytes, uint64* barrier) {
    if constexpr (POLICY == CachePolicy::NORMAL)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     :: "r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)),
                        "l"(policy_word<POLICY>()) : "memory");
}
// Makes this thread's accesses to shared memory visible to bulk copies, which other threads begin after a barrier.
__device__ inline void fence_for_bulk_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
