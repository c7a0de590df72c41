// The tokens that a block reads together, for sample.cuh.

// Chunks of a thread that are read together, and tokens of a block.
constexpr int EACH = VECTOR < 8 ? 8 / VECTOR : 1, TILE = THREADS * VECTOR * EACH;

// The tokens of this thread, tile by tile; those of the next tile are under way.
struct Tiles {
    Chunk<X, VECTOR> now[EACH], next[EACH];

    // The first token of chunk i of a thread, from the beginning of a tile on.
    __device__ static inline int place(int i) { return (i * THREADS + int(threadIdx.x)) * VECTOR; }
    __device__ inline void fetch(const Slice& slice, int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) slice.fetch(next[i], tile + place(i));
    }
    __device__ inline void take(const Slice& slice, int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) now[i] = next[i];
        if (tile + TILE > slice.count)
#pragma unroll
            for (int i = 0; i < EACH; ++i) slice.complete(now[i], tile + place(i));
    }
    // Token i of the thread, and its number from the beginning of the tile on.
    __device__ inline float score(int i) const { return wide(now[i / VECTOR], i % VECTOR); }
    __device__ static inline int token(int i) { return place(i / VECTOR) + i % VECTOR; }
};
constexpr int OWN_TOKENS = EACH * VECTOR;
