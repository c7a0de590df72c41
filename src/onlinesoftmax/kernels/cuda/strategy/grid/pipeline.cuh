// Strategy `grid`, pipelined: a team of blocks, resident together, works on three rows at a time: one is written, the
// states of the next one are on their way, and the one after that is reduced.
//
// One block:  owns HELD_TILES tiles of each row, which come through a ring of STAGES tiles in shared memory (ring.cuh).  A row
//             is reduced in the ring.  It then moves into registers, each tile in the place of a tile of the row before,
//             as soon as that is written.  Two further warps hold no part of a row: one loads tiles, and the other sends
//             and receives states (exchange_states.cuh).
// Chosen:     for rows that are too long for a cluster, where each team has three or more of them in turn.
// Bytes:      one read, one write.  States travel through L2.
// Limits:     compute capability 9.0; operations that reduce rows and write elements; rows whose columns are adjacent in
//             memory, and whose tiles fit registers and ring.  All blocks must be resident at once, so the launch is
//             cooperative.

static_assert(HELD_TILES < STAGES, "the ring needs a stage for the next row beside those of a row that waits for registers");
static_assert(!TERMS || sizeof(ACC) == sizeof(X), "terms take the places of elements");

// A thread's part of a row: a part of each tile of its block.  A row that fits on chip has fewer chunks than an int counts.
struct RowPart {
    Row r;
    Cursor at;         // the position of the thread in the block's first tile
    int left, stride;  // chunks from there to the end of the body, and to the block's next tile

    __device__ inline RowPart(const Params& p, int64 row, const Team& team)
        : r(row_at(p, row)), at(r.chunk(p, team.rank * int(p.slice) + threadIdx.x)),
          left(int(r.body) - team.rank * int(p.slice) - int(threadIdx.x)), stride(team.size * int(p.slice)) {}
    __device__ inline Position tile(const Params& p, int g) const {
        return {skip(p, at, int64(g * stride) * VECTOR), min(int(p.slice) - int(threadIdx.x), left - g * stride)};
    }
};

// Operands and edges of a row: a thread keeps them, besides its tiles, from the time when the row is reduced until it is
// written.
struct HeldRow {
    RowOperands operands;
    Slice<0, LANES, EDGES, false> edges;
};

// The loader of the block.  Teams have the rows in turn: blockIdx.x is the number of the team, gridDim.x that of all teams.
__device__ inline void load_rows(const Params& p, const Team& team, const Stages& stages) {
    Loader loader(stages);
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        const RowBody body(p, row);
        for (int g = 0; g < HELD_TILES; ++g) {
            loader.wait();
            loader.load<CachePolicy::NORMAL>(body, (int64(g) * team.size + team.rank) * p.slice, p.slice);
        }
    }
}

// Reduces a row in the ring, and hands its state, merged over each warp by `post`, to the warp that exchanges states.  The
// loop is not unrolled, because unrolled code for reducing and for writing would not fit the instruction cache.
__device__ inline HeldRow reduce_row(
    const Params& p, const Team& team, Ring& ring, CallConstants of_call, int64 row, unsigned count, SharedStates& states,
    ACC* m_own) {
    const RowPart part(p, row, team);
    const int edge_lane = edge_lane_of(team);
    HeldRow held;
    held.operands = row_operands(p, row);
    const CallConstants call = held.operands.with_scale(of_call);
    held.edges.load(p, part.r, part.r.begin, 0, edge_lane);
    State state = identity();
#pragma unroll 1
    for (int g = 0; g < HELD_TILES; ++g) {
        Slice<TILE_CHUNKS, LANES, false, TERMS> tile;
        const Position in = part.tile(p, g);
        ring.read(p, tile, in);
        tile.score(p, part.r, in.at, in.left, call);
        state = extend(state, tile);
        if constexpr (TERMS) {
            ring.store_terms(tile);
            m_own[g * LANES + threadIdx.x] = tile.m_own;
        }
        ring.advance();
    }
    held.operands.load_target(p, part.r);
    held.edges.score(p, part.r, part.r.begin, 0, call, edge_lane);
    held.operands.finish_target_load();
    states.post(extend(state, held.edges), count, held.operands, part.r, call);
    return held;
}

// The warps that hold rows.  In one turn they write a row, move the next one from the ring to
// registers, and reduce the one after.
__device__ inline void hold_rows(const Params& p, const Team& team, Ring ring, SharedStates& states, ACC* m_own) {
    const CallConstants of_call = call_constants(p);
    Slice<TILE_CHUNKS, LANES, false, TERMS> tiles[HELD_TILES];   // of the row that is written, and then of the next one
    HeldRow written_row, waiting_row;
    for (int64 turn = 0;; ++turn) {
        const int64 reduced = blockIdx.x + turn * gridDim.x, moved = reduced - gridDim.x, written = moved - gridDim.x;
        if (written >= p.rows) break;
        const bool moves = turn > 0 && moved < p.rows, writes = turn > 1;
        const RowPart now(p, writes ? written : reduced, team), next(p, moves ? moved : reduced, team);
        const CallConstants call = written_row.operands.with_scale(of_call);
        ops::RowConstants constants{};
        State state = identity();
        if (writes) {
            state = states.wait_for_row(unsigned(turn) - 2, written_row.operands);
            if (team.rank == 0 && threadIdx.x == 0)
                ops::write_rows(p, now.r, written, written_row.operands, call, state);
            constants = ops::row_constants(p, now.r, written_row.operands, call, state);
            written_row.edges.write(p, now.r, now.r.begin, 0, call, constants, edge_lane_of(team));
        }
        // The next row moves to the registers tile by tile, so that the ring has room for loads early.
#pragma unroll
        for (int g = 0; g < HELD_TILES; ++g) {
            if (writes) {
                const Position in = now.tile(p, g);
                tiles[g].write(p, now.r, in.at, in.left, call, tiles[g].own_constants(constants, state.m));
            }
            if (moves) {
                const Position in = next.tile(p, g);
                ring.move_to_registers(p, tiles[g], in);
                if constexpr (TERMS) tiles[g].m_own = m_own[g * LANES + threadIdx.x];
                else tiles[g].make_scores(next.r, in.at, in.left, waiting_row.operands.with_scale(of_call));
            }
        }
        written_row = waiting_row;
        if (reduced < p.rows) waiting_row = reduce_row(p, team, ring, of_call, reduced, unsigned(turn), states, m_own);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) pipeline_kernel(const __grid_constant__ Params p) {
    __shared__ SharedStates states;
    __shared__ uint64 barriers[2 * STAGES];
    // TERMS: for each tile and thread, the maximum that the thread's terms in the ring are relative to.
    __shared__ ACC m_own[TERMS ? HELD_TILES * LANES : 1];
    extern __shared__ __align__(LINE) Chunk<X, VECTOR> memory[];
    const Team team;
    const Board board(p, team);
    const Stages stages(memory, barriers);
    if (threadIdx.x == 0) stages.prepare(), states.prepare();
    scalar_loss::count_in_teams(p);
    __syncthreads();
    if (threadIdx.x < LANES) hold_rows(p, team, Ring(stages), states, m_own);
    else if (threadIdx.x < LANES + 32) exchange_states(p, board, states);
    else if (threadIdx.x == LANES + 32) load_rows(p, team, stages);
    __syncwarp();
    if (team.rank == 0) scalar_loss::add_losses_of_team(p);
}
