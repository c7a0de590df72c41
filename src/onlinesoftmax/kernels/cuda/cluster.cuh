// Strategy `cluster`: the blocks of a thread-block cluster hold one row, and tell each other their states.
//
// One block:  CHUNKS × THREADS neighbouring chunks of a row, in its registers; CLUSTER blocks a row.
// Chosen:     rows too long for one block, on Hopper and later.
// Bytes:      one read, one write; states travel through distributed shared memory.
// Limits:     CLUSTER is at most 16, and 8 on devices that promise no more.

// Where one's own shared variable is in another block of the cluster.
__device__ inline unsigned own(const void* variable) { return unsigned(__cvta_generic_to_shared(variable)); }
__device__ inline unsigned remote(const void* variable, int block) {
    unsigned there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own(variable)), "r"(block));
    return there;
}

// A store to another block that counts its bytes there when they have come; no fence stands before or after it.
__device__ inline void send(float* to, float x, uint64* arrived, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
                 :: "r"(remote(to, block)), "r"(__float_as_uint(x)), "r"(remote(arrived, block)) : "memory");
}
__device__ inline void send(double* to, double x, uint64* arrived, int block) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];"
                 :: "r"(remote(to, block)), "l"(__double_as_longlong(x)), "r"(remote(arrived, block)) : "memory");
}
__device__ inline void send(Twofold* to, Twofold x, uint64* arrived, int block) {
    send(&to->high, x.high, arrived, block);
    send(&to->low, x.low, arrived, block);
}

__device__ inline void wait(uint64* arrived) {
    asm volatile("{\n\t.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n\t"
                 "@!done bra again;\n\t}" :: "r"(own(arrived)) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) cluster_kernel(const __grid_constant__ Params p) {
    __shared__ State room[THREADS / 32];
    __shared__ State states[CLUSTER];
    __shared__ uint64 arrived;
    const int rank = blockIdx.x % CLUSTER, lane = threadIdx.x;
    if (REDUCES && lane == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(own(&arrived)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                     :: "r"(own(&arrived)), "r"(int(CLUSTER * (sizeof(ACC) + sizeof(SUM)))) : "memory");
    }
    // A block may be written to once it has begun; what they wait for is long past when they have their rows.
    if constexpr (REDUCES) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    const int64 row = blockIdx.x / CLUSTER;
    const Row r = row_at(p, row);
    const Numbers n = numbers(p);
    // Slices have one length, so that no block waits for a longer one; the first block has the edges.
    const int64 left = min(p.slice, r.body - rank * p.slice) - lane;
    const Cursor at = r.chunk(p, rank * p.slice + lane);
    const int edge_lane = rank ? 2 * VECTOR : lane;
    Slice<CHUNKS, THREADS, EDGES, TERMS> slice;
    slice.load(p, at, left);
    slice.load_edges(p, r, edge_lane);
    slice.settle(at, n, left);
    slice.settle_edges(r, n, edge_lane);
    State state = ops::given(p, row);
    if constexpr (REDUCES) {
        state = reduce<THREADS>(slice, room);
        asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        if (lane < CLUSTER) {
            send(&states[rank].m, state.m, &arrived, lane);
            send(&states[rank].l, state.l, &arrived, lane);
        }
        wait(&arrived);
        state = merge_lanes<CLUSTER>(states[lane % CLUSTER]);
    }
    if constexpr (PER_ROW) {
        if (rank == 0 && lane == 0) narrow(p.y[row_offset(p, p.y_place, row)], ops::result(state));
    } else {
        const ops::Term t = slice.own(ops::term(state, p.cols), state.m);
        slice.finish(p, at, n, t, left);
        slice.finish_edges(p, r, n, t, edge_lane);
    }
}
