// Strategy `grid`: a team of blocks, resident together, holds one row after another.
//
// One block:  a slice of a row, in tiles of THREADS chunks: CHUNKS tiles in registers, p.shared_tiles in shared
//             memory, and what is left streamed, DEPTH tiles at a time, and read again newest first.
// Chosen:     rows too long for a cluster, and a few rows that must fill the device.
// Bytes:      one read, one write; the streamed part is read twice.  States travel through L2.
// Limits:     all blocks must be resident at once, so the launch is cooperative.
//
// Every block has a mailbox with a word for every block of its team, EMPTY until that has written its state
// there.  A state is its own message: no flag, no counter and no fence stands between write and read.  Who reads
// a word empties it, so that all are empty when the kernel ends.  Rows take two slots in turn: a block writes to a
// slot again when it has heard of the row between from everyone, and so all have read the row before.

constexpr uint64 EMPTY = ~uint64(0);
// A float and its sum are one word; anything wider takes one for m, and one for each float64 of l.
constexpr int WORDS = (sizeof(ACC) + sizeof(SUM)) / 8 + (sizeof(ACC) + sizeof(SUM)) % 8 / 4;

__device__ inline void send(uint64* to, uint64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ inline uint64 receive(uint64* from) {
    uint64 word;
    do asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory"); while (word == EMPTY);
    send(from, EMPTY);
    return word;
}

// Bits of a number, none of which are EMPTY: that is a NaN of no arithmetic's, but a caller's may be it.
__device__ inline uint64 bits(float x) { return __float_as_uint(x != x ? NOT_A_NUMBER : x); }
__device__ inline uint64 bits(double x) { return __double_as_longlong(x != x ? NOT_A_NUMBER : x); }

__device__ inline void send(uint64* to, float m, float l) { send(to, bits(m) | bits(l) << 32); }
__device__ inline void send(uint64* to, float m, double l) { send(to, bits(m)), send(to + 1, bits(l)); }
__device__ inline void send(uint64* to, double m, Twofold l) {
    send(to, bits(m)), send(to + 1, bits(l.high)), send(to + 2, bits(l.low));
}
__device__ inline void receive(uint64* from, float& m, float& l) {
    const uint64 word = receive(from);
    m = __uint_as_float(unsigned(word)), l = __uint_as_float(unsigned(word >> 32));
}
__device__ inline void receive(uint64* from, float& m, double& l) {
    m = __uint_as_float(unsigned(receive(from))), l = __longlong_as_double(receive(from + 1));
}
__device__ inline void receive(uint64* from, double& m, Twofold& l) {
    m = __longlong_as_double(receive(from));
    l = {__longlong_as_double(receive(from + 1)), __longlong_as_double(receive(from + 2))};
}

// The state of the states of a team, `slot` being its mailboxes for this row.
__device__ inline State merge_team(State a, uint64* slot, int rank, int team, State* room) {
    if (team == 1) return a;
    for (int to = threadIdx.x; to < team; to += THREADS) send(slot + (to * team + rank) * WORDS, a.m, a.l);
    a = identity();
    for (int from = threadIdx.x; from < team; from += THREADS) {
        State b;
        receive(slot + (rank * team + from) * WORDS, b.m, b.l);
        a = merge(a, b);
    }
    return merge_warps<THREADS / 32>(merge_lanes<32>(a), room);
}

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
    const int team = int(p.team), teams = gridDim.x / team, rank = blockIdx.x / teams;
    const int mail_size = team * team * WORDS;
    uint64* const mail = p.mail + int64(blockIdx.x % teams) * (2 * mail_size);
    const Numbers n = numbers(p);
    const int edge_lane = rank ? 2 * VECTOR : lane;
    int slot = 0;
    for (int64 row = blockIdx.x % teams; row < p.rows; row += teams, slot ^= 1) {
        const Row r = row_at(p, row);
        // Slices have one length and begin on 128 bytes after the first.  Of a lane's chunks come CHUNKS, then
        // p.shared_tiles, then the streamed.
        const int64 length = (r.body + team * 8 - 1) / (team * 8) * 8;
        const int64 left = min(length, r.body - rank * length) - lane, left_shared = left - int64(CHUNKS) * THREADS;
        const int64 left_streamed = left_shared - p.shared_tiles * THREADS;
        const int64 streams = left_streamed > 0 ? (left_streamed - 1) / (int64(DEPTH) * THREADS) + 1 : 0;
        const Cursor at = r.chunk(p, rank * length + lane);
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
            state = merge_team(state, mail + slot * mail_size, rank, team, room[slot][1]);
        } else {
            state = ops::given(p, row);
            if constexpr (SHARED) wait_groups(0);
        }

        if constexpr (PER_ROW) {
            if (rank == 0 && lane == 0) narrow(p.y[row_offset(p, p.y_place, row)], ops::result(state));
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
        // What was emptied is empty before anyone hears of the next row.
        if (row + teams < p.rows) __threadfence();
    }
}
