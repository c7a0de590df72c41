// Values that the lanes of a warp give each other, and their sum.

// The value of one lane, and the value of the lane whose number differs by `step`, a power of two.
template <class T> __device__ inline T from_lane(T x, int lane) { return __shfl_sync(~0u, x, lane); }
template <class T> __device__ inline T across(T x, int step) { return __shfl_xor_sync(~0u, x, step); }
__device__ inline DoubleDouble from_lane(DoubleDouble x, int lane) {
    return {from_lane(x.high, lane), from_lane(x.low, lane)};
}
__device__ inline DoubleDouble across(DoubleDouble x, int step) { return {across(x.high, step), across(x.low, step)}; }

// The sum of the 32 lanes, for each of them.  The lanes are added in the same order on every run.
template <class T> __device__ inline T add_lanes(T a) {
#pragma unroll
    for (int step = 16; step; step /= 2) a += across(a, step);
    return a;
}
