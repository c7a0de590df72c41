// Strategy `grid`: a team of blocks, resident together, holds one row after another.
//
// One block:  a slice of a row, in tiles of THREADS chunks: CHUNKS tiles in registers, p.shared_tiles in shared
//             memory, and what is left streamed, DEPTH tiles at a time, and read again newest first.
// Chosen:     one or a few rows too long for a cluster.
// Bytes:      one read, one write; the streamed part is read twice.  States travel through L2.
// Limits:     all blocks must be resident at once, so the launch is cooperative.

// Shared memory for chunks of x and dy.  Each thread reads what it fetched itself, so no barrier is needed.
struct Room { Chunk<X, VECTOR>* x; Chunk<DY, VECTOR>* dy; };

// One thread's, of a block's dynamic shared memory for `chunks` chunks a thread.
__device__ inline Room own_room(Chunk<X, VECTOR>* memory, int64 chunks) {
    return {memory + threadIdx.x, reinterpret_cast<Chunk<DY, VECTOR>*>(memory + chunks * THREADS) + threadIdx.x};
}

// A chunk from global to shared memory, without a register where it is sixteen bytes in both.
template <int WIDTH, class T> __device__ inline void fetch(Chunk<T, VECTOR>* to, const T* from, int64 step) {
    if constexpr (WIDTH * sizeof(T) == 16 && sizeof(Chunk<T, VECTOR>) == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                     :: "r"(unsigned(__cvta_generic_to_shared(to))), "l"(from) : "memory");
    } else {
        Chunk<T, VECTOR> chunk;
        load<WIDTH, Keep::NORMAL>(chunk, from, step);
        *to = chunk;
    }
}

__device__ inline void fetch(const Params& p, const Room& room, int i, const Cursor& at, int64 offset) {
    const int64 x_step = step<X_WIDTH>(p.x_place);
    fetch<X_WIDTH>(room.x + i * THREADS, at.x + offset * x_step, x_step);
    if constexpr (HAS_DY) {
        const int64 dy_step = step<DY_WIDTH>(p.dy_place);
        fetch<DY_WIDTH>(room.dy + i * THREADS, at.dy + offset * dy_step, dy_step);
    }
}

// What is fetched is counted in groups: all from one `commit` to the next.
__device__ inline void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` groups are still under way, up to 7; the instruction takes a constant.
__device__ inline void wait_groups(int pending) {
    switch (pending) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 7;" ::: "memory");
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) grid_kernel(const __grid_constant__ Params p) {
    // Groups of tiles that are waited for one by one, so that the first are reduced while the last still travel.
    constexpr int GROUPS = 8;
    // Rows take these in turn, as one may begin before all threads are done with the last.
    __shared__ State room[2][2][THREADS / 32];
    extern __shared__ Chunk<X, VECTOR> memory[];
    const Room shared = own_room(memory, p.shared_tiles);
    const int lane = threadIdx.x;
    const Team team(p);
    const Numbers n = numbers(p);
    const int edge_lane = team.rank ? 2 * VECTOR : lane;
    int slot = 0;
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x, slot ^= 1) {
        // Slices begin on 128 bytes after the first.  Of a lane's chunks come CHUNKS, then p.shared_tiles, then the
        // streamed.
        const Row r = row_at(p, row);
        const Cursor at = r.chunk(p, team.rank * p.slice + lane);
        const int64 left = min(p.slice, r.body - team.rank * p.slice) - lane;
        const int64 left_shared = left - int64(CHUNKS) * THREADS;
        const int64 left_streamed = left_shared - p.shared_tiles * THREADS;
        const int64 streams = left_streamed > 0 ? (left_streamed - 1) / (int64(DEPTH) * THREADS) + 1 : 0;
        const int tiles = int(min(p.shared_tiles, left_shared > 0 ? (left_shared - 1) / THREADS + 1 : 0));
        const int group = (int(p.shared_tiles) + GROUPS * DEPTH - 1) / (GROUPS * DEPTH) * DEPTH;

        Slice<CHUNKS, THREADS, EDGES, TERMS> held;
        held.load(p, at, left);
        held.load_edges(p, r, edge_lane);
        const Cursor at_shared = skip(p, at, int64(CHUNKS) * THREADS * VECTOR);
        for (int g = 0, i = 0; SHARED && g < GROUPS; ++g) {
            for (; i < (g + 1) * group && i < tiles; ++i) fetch(p, shared, i, at_shared, int64(i) * THREADS * VECTOR);
            commit();
        }
        held.settle(at, n, left);
        held.settle_edges(r, n, edge_lane);

        State state = identity();
        if constexpr (REDUCES) {
            state = extend(state, held);
            for (int g = 0, i = 0; SHARED && g < GROUPS && i < tiles; ++g) {
                wait_groups(GROUPS - 1 - g);
                for (; i < (g + 1) * group && i < tiles; i += DEPTH) {
                    Slice<DEPTH, THREADS, false, false> tile;
                    const Cursor from = skip(p, at_shared, int64(i) * THREADS * VECTOR);
                    const int64 there = min(left_shared, int64(tiles) * THREADS) - int64(i) * THREADS;
                    tile.recall(p, from, shared.x + i * THREADS, shared.dy + i * THREADS, there);
                    tile.settle(from, n, there);
                    state = extend(state, tile);
                }
            }
            const Cursor at_streamed = skip(p, at_shared, p.shared_tiles * THREADS * VECTOR);
            for (int64 i = 0; STREAMED && i < streams; ++i) {
                const int64 past = i * DEPTH * THREADS;
                const Cursor from = skip(p, at_streamed, past * VECTOR);
                Slice<DEPTH, THREADS, false, false, Keep::LONG> tile;
                tile.load(p, from, left_streamed - past);
                tile.settle(from, n, left_streamed - past);
                state = extend(state, tile);
            }
            state = merge_warps<THREADS / 32>(merge_lanes<32>(state), room[slot][0]);
            if (team.size > 1) {
                state = team.merge(state, slot, room[slot][1]);
                if (row + gridDim.x < p.rows) team.finish_row();
            }
        } else {
            state = ops::given(p, row);
            if constexpr (SHARED) wait_groups(0);
        }

        if constexpr (PER_ROW) {
            if (team.rank == 0 && lane == 0) narrow(p.y[row_offset(p, p.y_place, row)], ops::result(state));
        } else {
            const ops::Term t = ops::term(state, p.cols);
            const Cursor at_streamed = skip(p, at_shared, p.shared_tiles * THREADS * VECTOR);
            // Newest first: L2 still holds those.
            for (int64 i = streams - 1; STREAMED && i >= 0; --i) {
                const int64 past = i * DEPTH * THREADS;
                const Cursor from = skip(p, at_streamed, past * VECTOR);
                Slice<DEPTH, THREADS, false, false, Keep::SHORT, Keep::SHORT> tile;
                tile.load(p, from, left_streamed - past);
                tile.settle(from, n, left_streamed - past);
                tile.finish(p, from, n, t, left_streamed - past);
            }
            const ops::Term t_held = held.own(t, state.m);
            held.finish(p, at, n, t_held, left);
            held.finish_edges(p, r, n, t_held, edge_lane);
            for (int i = 0; SHARED && i < tiles; i += DEPTH) {
                Slice<DEPTH, THREADS, false, false> tile;
                const Cursor from = skip(p, at_shared, int64(i) * THREADS * VECTOR);
                const int64 there = min(left_shared, int64(tiles) * THREADS) - int64(i) * THREADS;
                tile.recall(p, from, shared.x + i * THREADS, shared.dy + i * THREADS, there);
                tile.settle(from, n, there);
                tile.finish(p, from, n, t, there);
            }
        }
    }
}
