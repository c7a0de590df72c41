// Strategy `looped`: a block streams one row, once to reduce it and once more to write elements.
//
// One block:  owns one row, in tiles of CHUNKS x THREADS chunks.
// Chosen:     mostly for operations that write one number per row, which read a row once.
// Bytes:      one read; with an output per element, a second read and one write.  L2 serves the part of the second read
//             that it still holds.
// Limits:     none on columns.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) looped_kernel(const __grid_constant__ Params p) {
    constexpr int64 TILE = int64(CHUNKS) * THREADS;
    // L2 is asked to keep what is read again.
    constexpr CachePolicy AGAIN = WRITES_ELEMENTS ? CachePolicy::LONG : CachePolicy::NORMAL;
    // The next tile is loaded before a tile is reduced, where nothing else keeps the memory busy and registers hold both.
    constexpr bool AHEAD = !WRITES_ELEMENTS && CHUNKS <= 4;
    __shared__ State warp_states[THREADS / 32];
    if (scalar_loss::only_counts(p)) return;
    const Launch launch = this_launch(p, threadIdx.x);
    const int64 row = scalar_loss::block_of_rows(p);
    const Row r = row_at(p, row);
    RowOperands operands = row_operands(p, row);
    const CallConstants call = operands.with_scale(call_constants(p));
    const int lane = threadIdx.x;
    const int64 tiles = (r.body + TILE - 1) / TILE;
    // The edges are one small slice, which stays in registers.
    Slice<0, THREADS, EDGES, false> edges;
    edges.load(p, r, r.begin, 0, lane);
    // The tile's loads go first, because the load of the target's logit waits for that of the target.
    if (!REDUCES || tiles == 0) operands.load_target(p, r);
    prefetch_mailboxes(p, launch, row, lane);
    edges.score(p, r, r.begin, 0, call, lane);
    State state = identity();
    if constexpr (REDUCES) {
        state = extend(state, edges);
        using Tile = Slice<CHUNKS, THREADS, false, false, AGAIN>;
        const auto load = [&](Tile& to, int64 i) {
            to.load(p, r, r.chunk(p, i * TILE + lane), r.body - i * TILE - lane);
        };
        Tile next;
        if (tiles > 0) {
            load(next, 0);
            operands.load_target(p, r);
        }
        for (int64 i = 0; i < tiles; ++i) {
            Tile tile = next;
            if (AHEAD && i + 1 < tiles) load(next, i + 1);
            const Cursor at = r.chunk(p, i * TILE + lane);
            tile.score(p, r, at, r.body - i * TILE - lane, call);
            // Each lane keeps a state of its own, so that the loop has no barrier.
            state = extend(state, tile);
            if (!AHEAD && i + 1 < tiles) load(next, i + 1);
        }
        state = merge_warps<THREADS / 32>(merge_lanes<32>(state), warp_states);
        state = complete_row<THREADS>(p, launch, r, operands, call, state, row, lane);
    }
    if (lane == 0) ops::write_rows(p, r, row, operands, call, state);
    if constexpr (WRITES_ELEMENTS) {
        const ops::RowConstants constants = ops::row_constants(p, r, operands, call, state);
        edges.write(p, r, r.begin, 0, call, constants, lane);
        // Newest first: L2 still holds those tiles.
        for (int64 i = tiles - 1; i >= 0; --i) {
            Slice<CHUNKS, THREADS, false, false, CachePolicy::SHORT, CachePolicy::SHORT> tile;
            const Cursor at = r.chunk(p, i * TILE + lane);
            const int64 left = r.body - i * TILE - lane;
            tile.load(p, r, at, left);
            tile.make_scores(r, at, left, call);
            tile.write(p, r, at, left, call, constants);
        }
    }
    scalar_loss::add_losses<1>(p, row);
}
