// Messages between the blocks of a cluster: a block stores words in the shared memory of another, which waits on one barrier
// of its own until all bytes have come.  The barrier that counts the bytes also makes them visible, so words need no fence.

// The address of a shared variable of another block of the cluster.
__device__ inline unsigned remote_address(const void* variable, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(variable)), "r"(block));
    return there;
}

// An asynchronous store to another block; the barrier `arrived` there counts its bytes.
__device__ inline void send(float* to, float x, uint64* arrived, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(remote_address(to, block)), "r"(__float_as_uint(x)), "r"(remote_address(arrived, block))
                 : "memory");
}
__device__ inline void send(double* to, double x, uint64* arrived, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 :: "r"(remote_address(to, block)), "l"(__double_as_longlong(x)), "r"(remote_address(arrived, block))
                 : "memory");
}
__device__ inline void send(DoubleDouble* to, DoubleDouble x, uint64* arrived, int block) {
    send(&to->high, x.high, arrived, block);
    send(&to->low, x.low, arrived, block);
}
// The integers are stored as the numbers that have their bits.
__device__ inline void send(unsigned* to, unsigned x, uint64* arrived, int block) {
    send(reinterpret_cast<float*>(to), __uint_as_float(x), arrived, block);
}
__device__ inline void send(uint64* to, uint64 x, uint64* arrived, int block) {
    send(reinterpret_cast<double*>(to), __longlong_as_double(x), arrived, block);
}

// Prepares the barrier for the bytes of all messages; called by one thread.
__device__ inline void expect_bytes(uint64* arrived, unsigned bytes) {
    prepare_barrier(arrived, 1);
    arrive_and_expect(arrived, bytes);
}
// Waits until they have come.  Unlike wait_for_phase, it makes stores of other blocks of the cluster visible.
__device__ inline void wait_for_messages(uint64* arrived, unsigned phase = 0) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t"
                 "@!done bra again;\n\t}" :: "r"(shared_address(arrived)), "r"(phase) : "memory");
}

// A block may be written to once it has begun.  Every block announces its beginning, and checks the others' only after
// its own reduction, when the announcements have long come.
__device__ inline void announce_beginning() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ inline void wait_for_beginnings() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
