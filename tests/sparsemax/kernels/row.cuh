// Sparsemax: a warp holds a whole row in its registers, and finds its tau by bisection.
//
// One block:  owns THREADS / LANES rows.
// Chosen:     where a row fits the registers of a warp.
// Bytes:      one read, one write.
// Limits:     CHUNKS x LANES chunks of 16 bytes a row; no gradient.

using Held = Slice<CHUNKS, LANES, EDGES, false>;

// The sum and the count of the numbers w = z - m above a limit.  A column that does not exist has the score -inf.
struct Above {
    double sum;
    int count;
    __device__ inline void add(ACC w, ACC limit) {
        if (w > limit) sum += w, ++count;
    }
};

__device__ inline Above above(const Held& slice, ACC m, ACC limit) {
    Above found{0, 0};
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) found.add(slice.body[i].template a<false>(j) - m, limit);
#pragma unroll
    for (int i = 0; i < Held::EDGE; ++i) found.add(slice.edge[i].template a<false>(0) - m, limit);
    return {add_lanes(found.sum), add_lanes(found.count)};
}

__device__ inline bool is_nan(ACC z) { return z != z; }

__device__ inline bool holds_nan(const Held& slice) {
    bool found = false;
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) found |= is_nan(slice.body[i].template a<false>(j));
#pragma unroll
    for (int i = 0; i < Held::EDGE; ++i) found |= is_nan(slice.edge[i].template a<false>(0));
    return found;
}

template <int N> __device__ inline void write(
    const Params& p, const Cursor& at, int64 offset, const RegisterChunk<N>& chunk, ACC m, ACC tau) {
    ACC y[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
        const ACC w = chunk.template a<false>(j) - m;
        // A tau of NaN makes the whole row NaN.
        y[j] = w <= tau ? 0 : w - tau;
    }
    store_columns<Y_WIDTH, CachePolicy::NORMAL>(at.y, narrow<Y>(y), offset, p.y_place);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) row_kernel(const __grid_constant__ Params p) {
    const int lane = threadIdx.x % LANES;
    const int64 index = int64(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES;
    const Row row = row_at(p, index);
    const CallConstants call = row_operands(p, index).with_scale(call_constants(p));
    const Cursor at = row.chunk(p, lane);
    const int64 left = row.body - lane;
    Held slice;
    slice.load(p, row, at, left, lane);
    slice.make_scores(row, at, left, call, lane);

    ACC m = slice.peak();
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) m = fmax(m, across(m, step));
    ACC low = -1, high = 0;
    for (int i = 0; i < (sizeof(ACC) == 8 ? 55 : 30); ++i) {
        const ACC tau = (low + high) / 2;
        const Above found = above(slice, m, tau);
        const bool sums_to_more = found.sum - found.count * double(tau) > 1;
        low = sums_to_more ? tau : low;
        high = sums_to_more ? high : tau;
    }
    const Above support = above(slice, m, low);
    ACC tau = ACC((support.sum - 1) / support.count);
    // A maximum passes over NaN.
    if (add_lanes(int(holds_nan(slice))) || m == INF || (m == -INF && !ZERO)) tau = INF - INF;
    else if (m == -INF) m = 0, tau = 0;

#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
        if (i * LANES < Held::within(left)) write(p, at, i * LANES * VECTOR, slice.body[i], m, tau);
#pragma unroll
    for (int i = 0; i < Held::EDGE; ++i)
        if (row.has_edge(lane + i * LANES))
            write(p, row.begin, row.edge(lane + i * LANES), slice.edge[i], m, tau);
}
