// Strategy `looped`: a block streams one row, once for its state and once more to write.
//
// One block:  one row, in tiles of CHUNKS × THREADS chunks.
// Chosen:     the row does not fit on chip, and there are rows enough to fill the device.
// Bytes:      two reads, one write; the second read hits L2 for what the resident rows still have there.
// Limits:     none on columns.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) looped_kernel(const __grid_constant__ Params p) {
    constexpr int64 TILE = int64(CHUNKS) * THREADS;
    __shared__ State room[THREADS / 32];
    const Row r = row_at(p, blockIdx.x);
    const Numbers n = numbers(p);
    const int lane = threadIdx.x;
    const int64 tiles = (r.body + TILE - 1) / TILE;
    // All edges are one small tile of their own, which stays.
    Slice<0, THREADS, EDGES, false> edges;
    edges.load_edges(p, r, lane);
    edges.settle_edges(r, n, lane);
    State state;
    if constexpr (REDUCES) {
        state = extend(identity(), edges);
        for (int64 i = 0; i < tiles; ++i) {
            Slice<CHUNKS, THREADS, false, false, Keep::LONG> tile;
            const Cursor at = r.chunk(p, i * TILE + lane);
            const int64 left = r.body - i * TILE - lane;
            tile.load(p, at, left);
            tile.settle(at, n, left);
            // Each lane keeps a state of its own, so that the loop has no barrier.
            state = extend(state, tile);
        }
        state = merge_warps<THREADS / 32>(merge_lanes<32>(state), room);
    } else {
        state = ops::given(p, blockIdx.x);
    }
    if constexpr (PER_ROW) {
        if (lane == 0) narrow(p.y[row_offset(p, p.y_place, blockIdx.x)], ops::result(state));
    } else {
        const ops::Term t = ops::term(state, p.cols);
        edges.finish_edges(p, r, n, t, lane);
        // Newest first: L2 still holds those.
        for (int64 i = tiles - 1; i >= 0; --i) {
            Slice<CHUNKS, THREADS, false, false, Keep::SHORT, Keep::SHORT> tile;
            const Cursor at = r.chunk(p, i * TILE + lane);
            const int64 left = r.body - i * TILE - lane;
            tile.load(p, at, left);
            tile.settle(at, n, left);
            tile.finish(p, at, n, t, left);
        }
    }
}
