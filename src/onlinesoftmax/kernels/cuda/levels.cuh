// States merged level by level: the lanes of a warp, the warps that share a row, the blocks of a cluster, the
// blocks of a grid.  Each level does the same: the largest m first, so that every l is rescaled once, then the sum.

template <class T> __device__ inline T from_lane(T x, int lane) { return __shfl_sync(~0u, x, lane); }
template <class T> __device__ inline T across(T x, int step) { return __shfl_xor_sync(~0u, x, step); }
__device__ inline Twofold from_lane(Twofold x, int lane) { return {from_lane(x.high, lane), from_lane(x.low, lane)}; }
__device__ inline Twofold across(Twofold x, int step) { return {across(x.high, step), across(x.low, step)}; }

// Of a whole warp's floats, in one instruction: as integers they have the same order, but the negative ones the
// opposite.  No m is NaN.
__device__ inline float warp_max(float m) {
    const auto flip = [](int i) { return i ^ ((i >> 31) & 0x7fffffff); };
    int i = flip(__float_as_int(m));
    asm volatile("redux.sync.max.s32 %0, %0, 0xffffffff;" : "+r"(i));
    return __int_as_float(flip(i));
}

template <int WIDTH, class T> __device__ inline T lane_max(T m) {
    // Of a gradient's states nobody asks for m.
    if constexpr (GRADIENT && !ZERO) return m;
    if constexpr (WIDTH == 32 && sizeof(T) == sizeof(float)) return warp_max(m);
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) m = fmax(m, across(m, step));
    return m;
}

template <int WIDTH, class T> __device__ inline T lane_sum(T l) {
#pragma unroll
    for (int step = WIDTH / 2; step; step /= 2) l += across(l, step);
    return l;
}

// The state of the states of WIDTH neighbouring lanes, a power of two, given to all of them.
template <int WIDTH> __device__ inline State merge_lanes(State a) {
    const ACC m = lane_max<WIDTH>(a.m);
    return {m, lane_sum<WIDTH>(rescale(a, m))};
}

__device__ constexpr int power_of_two(int n) { int p = 1; while (p < n) p *= 2; return p; }

// The state of the states of WARPS neighbouring warps, each of which has one in all its lanes, given to all.
// `room` is shared memory for one state a warp of the block, and nobody may be reading it.
template <int WARPS> __device__ inline State merge_warps(State a, State* room) {
    if constexpr (WARPS > 1) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (lane == 0) room[warp] = a;
        __syncthreads();
        a = merge_lanes<power_of_two(WARPS)>(lane < WARPS ? room[warp / WARPS * WARPS + lane] : identity());
        // The lanes past WARPS have merged nothing.
        a = {from_lane(a.m, 0), from_lane(a.l, 0)};
    }
    return a;
}

// A lane's state, and what it holds of the row's next slice: the online recurrence.
template <class S> __device__ inline State extend(State a, S& slice) {
    const ACC m = slice.peak(a.m);
    return {m, rescale(a, m) + slice.sum(m)};
}

// The state of a slice that LANES neighbouring threads hold, given to all of them.
template <int LANES, class S> __device__ inline State reduce(S& slice, State* room) {
    constexpr int WIDTH = LANES < 32 ? LANES : 32;
    const ACC m = lane_max<WIDTH>(slice.peak());
    return merge_warps<(LANES + 31) / 32>({m, lane_sum<WIDTH>(slice.sum(m))}, room);
}
