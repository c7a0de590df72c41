// Strategy `cluster`: the blocks of a thread-block cluster hold one row, and send each other their states.
//
// One block:  owns CHUNKS x THREADS adjacent chunks of a row, in registers; CLUSTER blocks own a row.
// Chosen:     for rows that need most registers of a multiprocessor or more, and for few rows, on Hopper and later.
// Bytes:      one read, one write; states travel through distributed shared memory.
// Limits:     at most 16 blocks in a cluster; 8 on devices without larger clusters.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) cluster_kernel(const __grid_constant__ Params p) {
    __shared__ State warp_states[THREADS / 32];
    __shared__ State states[CLUSTER];
    __shared__ uint64 arrived;
    if (scalar_loss::only_counts(p)) return;
    const Launch launch = this_launch(p, threadIdx.x);
    const int rank = blockIdx.x % CLUSTER, lane = threadIdx.x;
    if (REDUCES && lane == 0) expect_states(&arrived);
    if constexpr (REDUCES) announce_beginning();
    const int64 row = scalar_loss::block_of_rows(p) / CLUSTER;
    const Row r = row_at(p, row);
    RowOperands operands = row_operands(p, row);
    const CallConstants call = operands.with_scale(call_constants(p));
    // All slices have one length, so that no block waits for a longer one; the first block owns the edges.
    const int64 left = min(p.slice, r.body - rank * p.slice) - lane;
    const Cursor at = r.chunk(p, rank * p.slice + lane);
    const int edge_lane = rank ? NO_EDGE : lane;
    Slice<CHUNKS, THREADS, EDGES, TERMS> slice;
    slice.load(p, r, at, left, edge_lane);
    operands.load_target(p, r);
    prefetch_mailboxes(p, launch, row, lane);
    slice.score(p, r, at, left, call, edge_lane);
    State state = identity();
    if constexpr (REDUCES) {
        state = reduce<32>(slice, warp_states);
        operands.finish_target_load();
        state = merge_warps<THREADS / 32>(state, warp_states);
        wait_for_beginnings();
        if (lane < CLUSTER) send(&states[rank], state, &arrived, lane);
        wait_for_messages(&arrived);
        state = merge_lanes<CLUSTER>(states[lane % CLUSTER]);
        state = complete_row<THREADS>(p, launch, r, operands, call, state, row, lane, rank == 0);
    }
    if (rank == 0 && lane == 0) ops::write_rows(p, r, row, operands, call, state);
    if constexpr (WRITES_ELEMENTS) {
        const ops::RowConstants whole = ops::row_constants(p, r, operands, call, state);
        slice.write(p, r, at, left, call, slice.own_constants(whole, state.m), edge_lane);
    }
    if (rank == 0) scalar_loss::add_losses<1>(p, row);
}
