// Gathers the tokens that rows could be sampled from: row after row, by rising id.
//
// One block:  owns a row.
// Chosen:     for return_support, after sample.cuh has listed the largest tokens of each row.
// Bytes:      the listed tokens and the support; each block reads how many tokens all rows keep, from the L2 cache.
// Limits:     `most` up to ROOM; MOST_ROWS rows (support.py), because each block reads `kept` of every row.

struct Gathering {
    const int64* listed; const int64* kept;   // `width` tokens of each row, by falling score; how many are kept
    int64* token_ids; int64* offsets;         // as in Support
    int64 rows, width, most;                  // a row that keeps more than `most` tokens has no support
};

extern "C" __global__ void __launch_bounds__(THREADS) support_kernel(const __grid_constant__ Gathering p) {
    __shared__ uint64 list[ROOM];
    __shared__ uint64 sums[2];   // tokens of the rows before this one, and of all rows
    const int thread = threadIdx.x;
    const int64 row = blockIdx.x, first = row * p.most;
    const auto count_of = [&](int64 i) { return p.kept[i] <= p.most ? p.kept[i] : 0; };
    if (thread < 2) sums[thread] = 0;
    __syncthreads();
    uint64 before = 0, all = 0;
#pragma unroll 4
    for (int64 i = thread; i < p.rows; i += THREADS) {
        const uint64 count = count_of(i);
        all += count, before += i < row ? count : 0;
    }
    before = add_lanes(before), all = add_lanes(all);
    if (thread % 32 == 0) atomicAdd(&sums[0], before), atomicAdd(&sums[1], all);
    const int count = int(count_of(row));
    // The sort puts the largest number first, and zeros last.
#pragma unroll 1
    for (int i = thread; i < count; i += THREADS) list[i] = ~uint64(p.listed[row * p.width + i]);
    int room = 2;
    while (room < count) room *= 2;
    sort_list<THREADS>(list, count, room, thread, [] { __syncthreads(); });
    before = sums[0], all = sums[1];
#pragma unroll 1
    for (int i = thread; i < count; i += THREADS) p.token_ids[before + i] = ~list[i];
    // The places that are left over.
#pragma unroll 1
    for (int64 i = first + thread; i < first + p.most; i += THREADS)
        if (i >= int64(all)) p.token_ids[i] = -1;
    if (thread == 0) p.offsets[row] = before;
    if (thread == 0 && row == p.rows - 1) p.offsets[p.rows] = all;
}
