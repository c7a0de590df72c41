// Strategy `grid`: a team of blocks, resident together, holds one row after another.
//
// One block:  owns a slice of a row, in tiles of THREADS chunks: CHUNKS tiles in registers, p.shared_tiles in shared
//             memory; further tiles are streamed, TILES_AT_ONCE at a time, and read again newest first.
// Chosen:     for one row or a few that are too long for a cluster.
// Bytes:      one read, one write; the streamed part is read twice.  States travel through L2.
// Limits:     all blocks must be resident at once, so the launch is cooperative.

// A thread's chunks of x and dy in shared memory, THREADS chunks apart.  A thread reads only chunks that it copied
// itself, so no barrier is needed.
struct SharedChunks { Chunk<X, VECTOR>* x; Chunk<DY, VECTOR>* dy; };

// This thread's part of a block's dynamic shared memory for `chunks` chunks a thread.
__device__ inline SharedChunks shared_chunks(Chunk<X, VECTOR>* memory, int64 chunks) {
    return {memory + threadIdx.x, reinterpret_cast<Chunk<DY, VECTOR>*>(memory + chunks * THREADS) + threadIdx.x};
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

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grid_kernel(const __grid_constant__ Params p) {
    // Groups of tiles that are waited for one by one: the first are reduced while the last still travel.
    constexpr int TILE_GROUPS = 8;
    // Rows use these in turn: one row may begin before all threads have read the states of the row before.
    __shared__ State warp_states[2][2][THREADS / 32];
    extern __shared__ Chunk<X, VECTOR> memory[];
    const SharedChunks shared = shared_chunks(memory, p.shared_tiles);
    const int lane = threadIdx.x;
    const Team team;
    const Mailboxes mailboxes(p, team);
    const CallConstants of_call = call_constants(p);
    const int edge_lane = team.rank ? NO_EDGE : lane;   // the first block of a team owns the edges
    scalar_loss::count_in_teams(p);
    const Launch launch = this_launch(p, threadIdx.x);
    unsigned count = 0;
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x, ++count) {
        const int slot = count % 2;
        // Each slice begins a multiple of 128 bytes of x after the beginning of the body.  A lane's chunks lie THREADS
        // apart: first CHUNKS in registers, then p.shared_tiles in shared memory, then the streamed ones.
        const Row r = row_at(p, row);
        RowOperands operands = row_operands(p, row);
        const CallConstants call = operands.with_scale(of_call);
        const Cursor at = r.chunk(p, team.rank * p.slice + lane);
        const int64 left = min(p.slice, r.body - team.rank * p.slice) - lane;
        const int64 left_shared = left - int64(CHUNKS) * THREADS;
        const int64 left_streamed = left_shared - p.shared_tiles * THREADS;
        const int64 streams = left_streamed > 0 ? (left_streamed - 1) / (int64(TILES_AT_ONCE) * THREADS) + 1 : 0;
        const int tiles = int(min(p.shared_tiles, left_shared > 0 ? (left_shared - 1) / THREADS + 1 : 0));
        constexpr int AT_ONCE = TILE_GROUPS * TILES_AT_ONCE;
        const int group = (int(p.shared_tiles) + AT_ONCE - 1) / AT_ONCE * TILES_AT_ONCE;

        Slice<CHUNKS, THREADS, EDGES, TERMS> held;
        held.load(p, r, at, left, edge_lane);
        const Cursor at_shared = skip(p, at, int64(CHUNKS) * THREADS * VECTOR);
        // This thread's position in the tiles from number i on: those in shared memory, and the streamed ones.
        const auto in_shared = [&](int i) {
            return Position{skip(p, at_shared, int64(i) * THREADS * VECTOR),
                            min(left_shared, int64(tiles) * THREADS) - int64(i) * THREADS};
        };
        const auto streamed = [&](int64 i) {
            const int64 past = i * TILES_AT_ONCE * THREADS;
            const Cursor begin = skip(p, at_shared, p.shared_tiles * THREADS * VECTOR);
            return Position{skip(p, begin, past * VECTOR), left_streamed - past};
        };
        for (int g = 0, i = 0; SHARED && g < TILE_GROUPS; ++g) {
            for (; i < (g + 1) * group && i < tiles; ++i) fetch(p, shared, i, at_shared, int64(i) * THREADS * VECTOR);
            commit();
        }
        operands.load_target(p, r);
        prefetch_mailboxes(p, launch, row, lane);
        held.score(p, r, at, left, call, edge_lane);

        State state = identity();
        if constexpr (REDUCES) {
            state = extend(state, held);
            for (int g = 0, i = 0; SHARED && g < TILE_GROUPS && i < tiles; ++g) {
                wait_groups(TILE_GROUPS - 1 - g);
                for (; i < (g + 1) * group && i < tiles; i += TILES_AT_ONCE) {
                    Slice<TILES_AT_ONCE, THREADS, false, false> tile;
                    const Position in = in_shared(i);
                    tile.load_from_shared(p, in.at, in.left, shared.x + i * THREADS, shared.dy + i * THREADS);
                    tile.score(p, r, in.at, in.left, call);
                    state = extend(state, tile);
                }
            }
            for (int64 i = 0; STREAMED && i < streams; ++i) {
                const Position in = streamed(i);
                Slice<TILES_AT_ONCE, THREADS, false, false, CachePolicy::LONG> tile;
                tile.load(p, r, in.at, in.left);
                tile.score(p, r, in.at, in.left, call);
                state = extend(state, tile);
            }
            state = merge_lanes<32>(state);
            operands.finish_target_load();
            state = merge_warps<THREADS / 32>(state, warp_states[slot][0]);
            if (team.size > 1) state = mailboxes.merge(state, count, warp_states[slot][1]);
            state = complete_row<THREADS>(p, launch, r, operands, call, state, row, lane, team.rank == 0);
        } else if constexpr (SHARED) {
            wait_groups(0);
        }

        if (team.rank == 0 && lane == 0) ops::write_rows(p, r, row, operands, call, state);
        if constexpr (WRITES_ELEMENTS) {
            const ops::RowConstants constants = ops::row_constants(p, r, operands, call, state);
            // Newest first: L2 still holds those tiles.
            for (int64 i = streams - 1; STREAMED && i >= 0; --i) {
                const Position in = streamed(i);
                Slice<TILES_AT_ONCE, THREADS, false, false, CachePolicy::SHORT, CachePolicy::SHORT> tile;
                tile.load(p, r, in.at, in.left);
                tile.make_scores(r, in.at, in.left, call);
                tile.write(p, r, in.at, in.left, call, constants);
            }
            held.write(p, r, at, left, call, held.own_constants(constants, state.m), edge_lane);
            for (int i = 0; SHARED && i < tiles; i += TILES_AT_ONCE) {
                Slice<TILES_AT_ONCE, THREADS, false, false> tile;
                const Position in = in_shared(i);
                tile.load_from_shared(p, in.at, in.left, shared.x + i * THREADS, shared.dy + i * THREADS);
                tile.make_scores(r, in.at, in.left, call);
                tile.write(p, r, in.at, in.left, call, constants);
            }
        }
    }
    if (team.rank == 0) scalar_loss::add_losses_of_team(p);
    if (REDUCES && team.size > 1) mailboxes.clear(count);
}
