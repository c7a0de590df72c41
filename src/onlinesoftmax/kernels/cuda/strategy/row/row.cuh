// Strategy `row`: a group of LANES threads holds whole rows in its registers.
//
// One block:  owns GROUPS x ROWS_AT_ONCE rows; a group loads all ROWS_AT_ONCE of its rows before it reduces the first.
// Chosen:     for most rows that fit the registers of a block.
// Bytes:      one read, one write.
// Limits:     CHUNKS x LANES chunks of 16 bytes a row.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) row_kernel(const __grid_constant__ Params p) {
    constexpr int GROUPS = THREADS / LANES;
    __shared__ State warp_states[ROWS_AT_ONCE][(THREADS + 31) / 32];
    const int lane = threadIdx.x % LANES;
    if (scalar_loss::only_counts(p)) return;
    const int64 begin = int64(scalar_loss::block_of_rows(p)) * (GROUPS * ROWS_AT_ONCE);
    const int64 first = begin + threadIdx.x / LANES;
    const Launch launch = this_launch(p, threadIdx.x);
    const CallConstants of_call = call_constants(p);
    Row row[ROWS_AT_ONCE];
    Cursor at[ROWS_AT_ONCE];
    RowOperands operands[ROWS_AT_ONCE];
    Slice<CHUNKS, LANES, EDGES, TERMS> slice[ROWS_AT_ONCE];
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) {
        row[d] = row_at(p, first + d * GROUPS);
        operands[d] = row_operands(p, first + d * GROUPS);
        at[d] = row[d].chunk(p, lane);
        slice[d].load(p, row[d], at[d], row[d].body - lane, lane);
    }
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) {
        operands[d].load_target(p, row[d]);
        prefetch_mailboxes(p, launch, first + d * GROUPS, lane);
    }
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) {
        const CallConstants call = operands[d].with_scale(of_call);
        slice[d].score(p, row[d], at[d], row[d].body - lane, call, lane);
        const int64 index = first + d * GROUPS;
        const State reduced = REDUCES ? reduce<LANES>(slice[d], warp_states[d]) : identity();
        const State state = complete_row<LANES>(p, launch, row[d], operands[d], call, reduced, index, lane);
        if (lane == 0 && index < p.rows) ops::write_rows(p, row[d], index, operands[d], call, state);
        if constexpr (WRITES_ELEMENTS) {
            const ops::RowConstants whole = ops::row_constants(p, row[d], operands[d], call, state);
            const ops::RowConstants constants = slice[d].own_constants(whole, state.m);
            slice[d].write(p, row[d], at[d], row[d].body - lane, call, constants, lane);
        }
    }
    scalar_loss::add_losses<GROUPS * ROWS_AT_ONCE>(p, begin);
}
