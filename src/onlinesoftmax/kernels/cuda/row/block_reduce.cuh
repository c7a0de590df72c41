// Merges of states within a block: of the lanes of a warp, and of the warps that share a row.  cluster.cuh and team.cuh
// use them for the states of other blocks, which lanes have received.
//
// A merge first finds the largest m, so that each sum is rescaled once, and then adds the sums.

// The maximum of a whole warp's floats in one instruction.  As integers, non-negative floats have the same order and
// negative floats the opposite.  m is never NaN.
__device__ inline float warp_max(float m) {
    const auto flip = [](int i) { return i ^ ((i >> 31) & 0x7fffffff); };
    int i = flip(__float_as_int(m));
    asm volatile("redux.sync.max.s32 %0, %0, 0xffffffff;" : "+r"(i));
    return __int_as_float(flip(i));
}

template <int WIDTH, class T> __device__ inline T lane_max(T m) {
    if constexpr (!USES_MAXIMUM) return m;
    if constexpr (WIDTH == 32 && sizeof(T) == sizeof(float)) return warp_max(m);
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) m = fmax(m, across(m, step));
    return m;
}

template <int WIDTH> __device__ inline Sums<SUM> lane_sum(Sums<SUM> sums) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i)
#pragma unroll
        for (int step = WIDTH / 2; step; step /= 2) sums.of[i] += across(sums.of[i], step);
    return sums;
}

__device__ inline Argmax from_lane(Argmax a, int lane) { return {from_lane(a.index, lane), from_lane(a.key, lane)}; }
__device__ inline Argmax across(Argmax a, int step) { return {across(a.index, step), across(a.key, step)}; }
__device__ inline Nothing from_lane(Nothing a, int) { return a; }
__device__ inline Nothing across(Nothing a, int) { return a; }

template <int WIDTH> __device__ inline More lane_merge(More a) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) a = merge(a, across(a, step));
    return a;
}

// Merges the states of WIDTH adjacent lanes, WIDTH a power of two, and gives the result to each of them.
template <int WIDTH> __device__ inline State merge_lanes(State a) {
    const ACC m = lane_max<WIDTH>(a.m);
    return State{m, lane_sum<WIDTH>(rescale(a, m))}.with(lane_merge<WIDTH>(a.more()));
}

__device__ constexpr int power_of_two(int n) { int p = 1; while (p < n) p *= 2; return p; }

// Merges one state per warp across WARPS adjacent warps, and broadcasts the result.  `warp_states` is shared memory for
// one state per warp of the block; no thread may still be reading it.
template <int WARPS> __device__ inline State merge_warps(State a, State* warp_states) {
    if constexpr (WARPS > 1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) warp_states[warp] = a;
        __syncthreads();
        a = merge_lanes<power_of_two(WARPS)>(lane < WARPS ? warp_states[warp / WARPS * WARPS + lane] : identity());
        // Lanes past WARPS have merged nothing, so lane 0 broadcasts.
        a.m = from_lane(a.m, 0);
#pragma unroll
        for (int i = 0; i < SUMS; ++i) a.sums.of[i] = from_lane(a.sums.of[i], 0);
        a = a.with(from_lane(a.more(), 0));
    }
    return a;
}

// The online recurrence: a lane's state so far, merged with the next slice that the lane holds.
template <class S> __device__ inline State extend(State a, S& slice) {
    const ACC m = slice.peak(a.m);
    return State{m, rescale(a, m) + slice.sum(m)}.with(merge(a.more(), slice.more));
}

// The state of a slice that LANES adjacent threads hold, given to each of them.
template <int LANES, class S> __device__ inline State reduce(S& slice, State* warp_states) {
    constexpr int WIDTH = LANES < 32 ? LANES : 32;
    const ACC m = lane_max<WIDTH>(slice.peak());
    const State of_lanes{m, lane_sum<WIDTH>(slice.sum(m))};
    return merge_warps<(LANES + 31) / 32>(of_lanes.with(lane_merge<WIDTH>(slice.more)), warp_states);
}
