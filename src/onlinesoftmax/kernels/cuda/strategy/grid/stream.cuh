// Strategy `grid`, streaming: a team of blocks, resident together, keeps as much of a row on chip as fits, and reads the
// rest twice.
//
// One block:  owns every n-th tile of a row, where n is the number of blocks in the team.  Its last tiles stay on chip:
//             HELD_TILES in registers and STAGES in a ring in shared memory (ring.cuh).  The tiles before them are streamed
//             through the ring.  Two further warps hold no part of a row: one loads tiles, and the other sends and
//             receives states (exchange_states.cuh).
// Chosen:     for rows that do not fit on chip.
// Bytes:      one write, one read of the tiles that stay on chip, two reads of the streamed ones; L2 serves some of the
//             second reads, because they begin with the last of the streamed tiles.
// Limits:     those of pipeline.cuh, except that a row need not fit registers and ring.
//
// Blocks reduce the streamed tiles that they own, in a fixed order, so every run gives the same bits.  Any block may write
// them: it draws the next tile from a counter.  With fixed shares, the first blocks ended 20 % earlier (2^28 bf16, H200).
//
// Hazard: the output may overwrite x, and blocks write each other's tiles (docs/protocols.md, "The tile counter").

static_assert(!TERMS, "streamed tiles keep no terms");
// The loader could otherwise draw a tile of a row before the block reduces it (docs/protocols.md, "The tile counter").
static_assert(HELD_TILES > 0, "a row needs more tiles on chip than the ring has stages");

constexpr int ON_CHIP = HELD_TILES + STAGES;   // tiles of a row that a block keeps
// Bytes, of all teams, of the last streamed tiles: the second read begins with them, so L2 is asked to keep them.
constexpr int IN_L2 = 24 << 20;   // 36 MB were no faster, H200; L2 has 50 MB, and writes pass through it too
// Bytes of the tiles before those: L2 is asked to evict them early.  Older tiles have left L2, and get no request.
constexpr int BEFORE_L2 = 64 << 20;   // requests for older tiles took 1 % on 2^28 bf16, H200

// The division of a row into tiles: those from `streamed` on stay on chip.
struct Tiles {
    int64 streamed, own;   // streamed tiles of the team and of this block
    int size, rank;

    __device__ inline Tiles(const Team& team, int64 body) : size(team.size), rank(team.rank) {
        streamed = max((body + TILE - 1) / TILE - int64(ON_CHIP) * size, int64(0));
        own = streamed > rank ? (streamed - rank - 1) / size + 1 : 0;
    }
    // This block's tile i: first its streamed tiles, then those that it keeps.
    __device__ inline int64 operator[](int64 i) const { return i * size + rank; }
};

// This thread's position in a tile.  A streamed tile has TILE chunks, so all chunks of the thread exist; as this number is
// a constant, the compiler leaves out the tests of every chunk.
__device__ inline Position in_tile(const Params& p, const Row& r, int64 tile) {
    return {r.chunk(p, tile * TILE + threadIdx.x), r.body - tile * TILE - threadIdx.x};
}
__device__ inline Position in_streamed(const Params& p, const Row& r, int64 tile) {
    return {r.chunk(p, tile * TILE + threadIdx.x), TILE};
}

// Stands in `tile_in` when the block has no further streamed tile of a row to write.
constexpr int64 NO_TILE = -1;

// The loader of the block.  For each row it loads the block's own tiles, and then the streamed tiles that the block is to
// write.
__device__ inline void load_rows(const Params& p, const Board& board, const Stages& stages, int64* tile_in) {
    Loader loader(stages);
    unsigned count = 0;
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x, ++count) {
        const RowBody body(p, row);
        const Tiles tiles(board.team, body.chunks);
        const int64 first_in_l2 = tiles.streamed - IN_L2 / TILE_BYTES / gridDim.x;
        const int64 before_l2 = BEFORE_L2 / TILE_BYTES / gridDim.x;
        for (int64 i = 0; i < tiles.own + ON_CHIP; ++i) {
            loader.wait();
            if (tiles[i] < first_in_l2 - before_l2) loader.load<CachePolicy::NORMAL>(body, tiles[i] * TILE, TILE);
            else if (i < tiles.own && tiles[i] >= first_in_l2)
                loader.load<CachePolicy::LONG>(body, tiles[i] * TILE, TILE);
            else loader.load<CachePolicy::SHORT>(body, tiles[i] * TILE, TILE);
        }
        unsigned* const counter = board.tile_counter(count);
        for (unsigned before = atomicAdd(counter, 1u);;) {
            loader.wait();
            // The counter begins at EMPTY, -1.  First used here, so that the loader waits for it and for a stage at once.
            const unsigned number = before + 1;
            if (number >= tiles.streamed) {
                // Reset the counter: nobody draws for the next row that uses it before NO_TILE is stored below
                // (docs/protocols.md, "The tile counter").
                if (number == tiles.streamed + tiles.size - 1) {
                    put_word(counter, unsigned(EMPTY));
                    __threadfence();
                }
                tile_in[loader.stage] = NO_TILE;
                loader.load<CachePolicy::SHORT>(body, 0, 0);
                break;
            }
            const int64 tile = tiles.streamed - 1 - number;
            tile_in[loader.stage] = tile;
            loader.load<CachePolicy::NORMAL>(body, tile * TILE, TILE);
            before = atomicAdd(counter, 1u);
        }
    }
}

// The warps that hold rows reduce the block's tiles of a row, wait for the state of the whole row, and write: first the
// tiles that are in the ring, then the streamed tiles that the loader has taken, then the tiles in registers.
__device__ inline void hold_rows(const Params& p, const Team& team, Ring ring, SharedStates& states, const int64* tile_in) {
    using Tile = Slice<TILE_CHUNKS, LANES, false, false, CachePolicy::NORMAL, CachePolicy::SHORT>;
    const CallConstants of_call = call_constants(p);
    const int edge_lane = edge_lane_of(team);
    unsigned count = 0;
    for (int64 row = blockIdx.x; row < p.rows; row += gridDim.x, ++count) {
        Tile held[HELD_TILES];
        const Row r = row_at(p, row);
        const Tiles tiles(team, r.body);
        RowOperands operands = row_operands(p, row);
        const CallConstants call = operands.with_scale(of_call);
        Slice<0, LANES, EDGES, false> edges;
        edges.load(p, r, r.begin, 0, edge_lane);
        State state = identity();
        const auto reduce = [&](Tile& tile, const Position& in) {
            tile.score(p, r, in.at, in.left, call);
            state = extend(state, tile);
        };
#pragma unroll 1
        for (int64 i = 0; i < tiles.own; ++i) {
            Tile tile;
            const Position in = in_streamed(p, r, tiles[i]);
            ring.read(p, tile, in);
            ring.release();
            ring.advance();
            reduce(tile, in);
        }
#pragma unroll
        for (int g = 0; g < HELD_TILES; ++g) {
            const Position in = in_tile(p, r, tiles[tiles.own + g]);
            ring.read(p, held[g], in);
            ring.release();
            ring.advance();
            reduce(held[g], in);
        }
#pragma unroll 1
        for (int i = HELD_TILES; i < ON_CHIP; ++i) {
            Tile tile;
            const Position in = in_tile(p, r, tiles[tiles.own + i]);
            ring.read(p, tile, in);
            ring.advance();
            reduce(tile, in);
        }
        operands.load_target(p, r);
        edges.score(p, r, r.begin, 0, call, edge_lane);
        operands.finish_target_load();
        states.post(extend(state, edges), count, operands, r, call);
        state = states.wait_for_row(count, operands);

        if (team.rank == 0 && threadIdx.x == 0) ops::write_rows(p, r, row, operands, call, state);
        const ops::RowConstants constants = ops::row_constants(p, r, operands, call, state);
        edges.write(p, r, r.begin, 0, call, constants, edge_lane);
        const auto write = [&](Tile& tile, const Position& in) {
            tile.make_scores(r, in.at, in.left, call);
            tile.write(p, r, in.at, in.left, call, constants);
        };
        // The tiles in the ring come first, so that their stages take further loads.
#pragma unroll 1
        for (int i = HELD_TILES; i < ON_CHIP; ++i) {
            Tile tile;
            const Position in = in_tile(p, r, tiles[tiles.own + i]);
            ring.move_to_registers(p, tile, in);
            write(tile, in);
        }
#pragma unroll 1
        for (;;) {
            ring.wait();
            const int64 index = tile_in[ring.next];
            Tile tile;
            const Position in = in_streamed(p, r, index);
            if (index != NO_TILE) ring.read(p, tile, in);
            ring.release();
            ring.advance();
            if (index == NO_TILE) break;
            write(tile, in);
        }
#pragma unroll
        for (int g = 0; g < HELD_TILES; ++g) {
            const Position in = in_tile(p, r, tiles[tiles.own + g]);
            held[g].write(p, r, in.at, in.left, call, constants);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) stream_kernel(const __grid_constant__ Params p) {
    __shared__ SharedStates states;
    __shared__ uint64 barriers[2 * STAGES];
    __shared__ int64 tile_in[STAGES];   // for each stage with a tile to write, the tile's number in the row, or NO_TILE
    extern __shared__ __align__(LINE) Chunk<X, VECTOR> memory[];
    const Team team;
    const Board board(p, team);
    const Stages stages(memory, barriers);
    if (threadIdx.x == 0) stages.prepare(), states.prepare();
    scalar_loss::count_in_teams(p);
    __syncthreads();
    if (threadIdx.x < LANES) hold_rows(p, team, Ring(stages), states, tile_in);
    else if (threadIdx.x < LANES + 32) exchange_states(p, board, states);
    else if (threadIdx.x == LANES + 32) load_rows(p, board, stages, tile_in);
    __syncwarp();
    if (team.rank == 0) scalar_loss::add_losses_of_team(p);
}
