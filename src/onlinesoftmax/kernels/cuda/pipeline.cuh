// Strategy `grid`, pipelined: a team of blocks, resident together, holds three rows: one is written, the states
// of the next one are on their way, and the one after that is reduced.
//
// One block:  owns a slice of each row, in GROUPS tiles that come through a ring of STAGES tiles in shared memory
//             (ring.cuh).  A row is reduced in the ring, and moves into registers when it is the next to be written.  Two
//             further warps hold no part of a row: one loads tiles, and the other sends and receives states.
// Chosen:     for rows that are too long for a cluster, where each team has three or more of them in turn.
// Bytes:      one read, one write.  States travel through L2.
// Limits:     compute capability 9.0; operations that reduce rows and write elements; rows whose columns are adjacent in
//             memory, and whose slices fit registers and ring.  All blocks must be resident at once, so the launch is
//             cooperative.

// States in shared memory, between the warps that hold rows and the warp that exchanges states.  Rows use the two slots in
// turn.
struct Exchange {
    State of_warps[2][WARPS], of_row[2];
    uint64 reduced[2], merged[2];   // barriers: all warps have reduced a row; the state of a row has arrived
};

// The warp that exchanges states.  It sends the state of a row as soon as the block has reduced the row, even while it
// waits for messages about the row before: through a busy L2, a message takes several microseconds.
__device__ inline void exchange_states(const Params& p, const Team& team, Exchange& exchange) {
    const int lane = threadIdx.x % 32;
    const unsigned rows = blockIdx.x < p.rows ? unsigned((p.rows - 1 - blockIdx.x) / gridDim.x) + 1 : 0;
    for (unsigned sent = 0, received = 0; received < rows;) {
        uint64* const reduced = &exchange.reduced[sent % 2];
        if (received == sent) wait_for_phase(reduced, sent / 2 % 2);
        if (sent < rows && __all_sync(~0u, has_ended(reduced, sent / 2 % 2))) {
            const State state = merge_lanes<32>(lane < WARPS ? exchange.of_warps[sent % 2][lane] : identity());
            team.send<32>(state, sent++, lane);
        }
        State state;
        if (!__all_sync(~0u, team.receive<32, 5>(state, received, lane))) continue;
        state = merge_lanes<32>(state);
        if (lane == 0) {
            exchange.of_row[received % 2] = state;
            arrive(&exchange.merged[received % 2]);
        }
        ++received;
    }
    team.clear<32>(rows, lane);
}

// The position of a thread's part of a row.
struct RowPart {
    Row r;
    Cursor at;    // the position of the thread in tile 0
    int64 left;   // chunks from there to the end of the slice

    __device__ inline RowPart(const Params& p, int64 row, int rank)
        : r(row_at(p, row)), at(r.chunk(p, rank * p.slice + threadIdx.x)),
          left(slice_length(p, r.body, rank) - threadIdx.x) {}
    __device__ inline Cursor tile(const Params& p, int g) const { return skip(p, at, int64(g) * TILE * VECTOR); }
};

// The operands of a row that are loaded when it is reduced, and used when it is written.
struct HeldRow {
    RowOperands given;
    Slice<0, LANES, EDGES, false> edges;
};

// Reduces a row in the ring, and hands the state of each warp to the warp that exchanges states.  The loop is not
// unrolled, because unrolled code for reducing and for writing would not fit the instruction cache.
__device__ inline HeldRow reduce_row(
    const Params& p, const Team& team, Ring& ring, Numbers n, int64 row, int slot, Exchange& exchange, ACC* m_own) {
    const RowPart part(p, row, team.rank);
    const int edge_lane = team.rank ? NO_EDGE : threadIdx.x;
    HeldRow held;
    held.given = row_operands(p, row);
    held.edges.load_edges(p, part.r, edge_lane);
    State state = identity();
#pragma unroll 1
    for (int g = 0; g < GROUPS; ++g) {
        Slice<DEPTH, LANES, false, TERMS> tile;
        const Cursor at = part.tile(p, g);
        const int64 left = part.left - g * TILE;
        ring.read(p, tile, at, left);
        tile.make_scores(at, n, left);
        tile.weigh(p, at, left);
        state = extend(state, tile);
        if constexpr (TERMS) {
            ring.store_terms(tile);
            m_own[g * LANES + threadIdx.x] = tile.m_own;
        }
        ring.advance();
    }
    held.given.load_target(p, part.r);
    held.edges.make_edge_scores(part.r, n, edge_lane);
    held.edges.weigh_edges(p, part.r, edge_lane);
    // The output may overwrite x, so every thread must have read the target column before the state is sent.
    if constexpr (HAS_TARGET) __threadfence();
    state = merge_lanes<32>(extend(state, held.edges));
    if (threadIdx.x % 32 == 0) {
        exchange.of_warps[slot][threadIdx.x / 32] = state;
        arrive(&exchange.reduced[slot]);
    }
    return held;
}

// The warps that hold rows.  In one turn they write a row, take the next one out of the ring, and reduce the one after.
__device__ inline void hold_rows(const Params& p, const Team& team, Ring ring, Exchange& exchange, ACC* m_own) {
    const Numbers n = numbers(p);
    Slice<DEPTH, LANES, false, TERMS> tiles[GROUPS];   // of the row that is written
    HeldRow written_row, waiting_row;
    for (int64 turn = 0;; ++turn) {
        const int64 reduced = blockIdx.x + turn * gridDim.x, taken = reduced - gridDim.x, written = taken - gridDim.x;
        if (written >= p.rows) break;
        const bool takes = turn > 0 && taken < p.rows, writes = turn > 1;
        const RowPart now(p, writes ? written : reduced, team.rank), next(p, takes ? taken : reduced, team.rank);
        ops::RowConstants constants{};
        State state = identity();
        if (writes) {
            wait_for_phase(&exchange.merged[turn % 2], (turn - 2) / 2 % 2);
            state = exchange.of_row[turn % 2];
            if constexpr (WRITES_ROWS) {
                if (team.rank == 0 && threadIdx.x == 0) ops::write_rows(p, now.r, written, written_row.given, n, state);
            }
            constants = ops::row_constants(p, now.r, written_row.given, n, state);
            written_row.edges.write_edges(p, now.r, n, constants, team.rank ? NO_EDGE : threadIdx.x);
        }
        // The next row takes the registers tile by tile, so that the ring has room for loads early.
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            const int past = g * TILE;
            if (writes)
                tiles[g].write(p, now.tile(p, g), n, tiles[g].own_constants(constants, state.m), now.left - past);
            if (takes) {
                ring.take(p, tiles[g], next.tile(p, g), next.left - past);
                if constexpr (TERMS) tiles[g].m_own = m_own[g * LANES + threadIdx.x];
                else tiles[g].make_scores(next.tile(p, g), n, next.left - past);
            }
        }
        written_row = waiting_row;
        if (reduced < p.rows) waiting_row = reduce_row(p, team, ring, n, reduced, turn % 2, exchange, m_own);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) pipeline_kernel(const __grid_constant__ Params p) {
    __shared__ Exchange exchange;
    __shared__ uint64 barriers[2 * STAGES];
    __shared__ ACC m_own[TERMS ? GROUPS * LANES : 1];   // the maxima that the terms in the ring are relative to
    extern __shared__ Chunk<X, VECTOR> memory[];
    const Team team(p);
    const Stages stages(memory, barriers);
    if (threadIdx.x == 0) {
        stages.prepare();
        for (int i = 0; i < 2; ++i) prepare_barrier(&exchange.reduced[i], WARPS), prepare_barrier(&exchange.merged[i], 1);
    }
    total::count_in_teams(p);
    __syncthreads();
    if (threadIdx.x < LANES) hold_rows(p, team, Ring(stages), exchange, m_own);
    else if (threadIdx.x < LANES + 32) exchange_states(p, team, exchange);
    else if (threadIdx.x == LANES + 32) load_rows(p, stages, team.rank);
    if (team.rank == 0) total::add_losses_of_team(p);
}
