// The tokens that a block reads together, for sample.cuh.
//
// If HELD, the block first copies its whole slice to shared memory.  Otherwise the next tile is under way to the registers,
// and the one after it to the L2 cache.

// Chunks and tokens that a thread reads together, and tokens of a tile of the block.  If HELD, one chunk: slices are short, and
// half the code takes less time to come from memory.
constexpr int EACH = !HELD && VECTOR < 8 ? 8 / VECTOR : 1, OWN_TOKENS = EACH * VECTOR, TILE = THREADS * OWN_TOKENS;
static_assert(ALIGNED || !HELD, "copies to shared memory have 16 bytes");

// How many tiles behind the one that is taken the prefetch to the L2 cache is; the registers have the next one.  With
// hundreds of rows, more lines push each other out: 512 rows take 7 % longer with AHEAD = 4, and 40 % with 8.
constexpr int AHEAD = 2, LINE = 128 / sizeof(X);
static_assert((AHEAD - 1) * TILE <= THREADS * LINE, "each thread moves one line");

static_assert(OWN_TOKENS % 4 == 0, "groups of four tokens");

// The tokens of this thread, tile by tile.  A thread copies what it reads, so no other one waits for it.
struct Tiles {
    Chunk<X, VECTOR> now[EACH], next[EACH];

    // The first token of chunk i of a thread, from the beginning of a tile on.
    __device__ static inline int chunk(int i) { return (i * THREADS + int(threadIdx.x)) * VECTOR; }
    // Chunk i of a tile in shared memory.
    __device__ static inline Chunk<X, VECTOR>* at(const Slice& slice, int tile, int i) {
        return slice.held + (tile + chunk(i)) / VECTOR;
    }
    __device__ inline void fetch(const Slice& slice, int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) slice.fetch(next[i], tile + chunk(i));
    }
    // Copies the slice, and -inf to the end of its last tile.  Of the thread's chunks, wait_groups(1) waits for
    // that of the first tile, wait_groups(0) for all.
    __device__ static inline void copy(const Slice& slice) {
        const int last = slice.count - VECTOR;
        int i = chunk(0);
        if (i <= last) copy_async(slice.held + i / VECTOR, slice.x + i), i += TILE;
        commit();
#pragma unroll 1
        for (; i <= last; i += TILE) copy_async(slice.held + i / VECTOR, slice.x + i);
        commit();
        if (i < (max(slice.count, 1) + TILE - 1) / TILE * TILE) slice.complete(slice.held[i / VECTOR], i);
    }
    // Begins to read the slice.
    __device__ inline void begin(const Slice& slice) {
        if (!HELD) fetch(slice, 0);
    }
    // The last tile; -TILE of an empty slice.
    __device__ static inline int last(const Slice& slice) { return (slice.count + TILE - 1) / TILE * TILE - TILE; }
    // Takes a tile; the next one sets out.
    __device__ inline void take(const Slice& slice, int tile) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) now[i] = HELD ? *at(slice, tile, i) : next[i];
        if (HELD) return;
        fetch(slice, tile + TILE);
        look_ahead(slice, tile + AHEAD * TILE), complete(slice, tile);
    }
    // Reads a tile, and waits for it: for loops that need their registers.  The tile before it is read next.
    __device__ inline void read_backward(const Slice& slice, int tile) {
        if (!HELD) look_ahead(slice, tile - AHEAD * TILE);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (HELD) now[i] = *at(slice, tile, i);
            else slice.fetch(now[i], tile + chunk(i));
        }
        if (!HELD) complete(slice, tile);
    }
    __device__ static inline void look_ahead(const Slice& slice, int tile) {
        const int line = tile + int(threadIdx.x) * LINE;
        if (threadIdx.x < TILE / LINE && line >= 0 && line < slice.count) prefetch(slice.x + line);
    }
    __device__ inline void complete(const Slice& slice, int tile) {
        if (tile + TILE > slice.count)
#pragma unroll
            for (int i = 0; i < EACH; ++i) slice.complete(now[i], tile + chunk(i));
    }
    // The score of a token whose number is known late: registers cannot be indexed, and memory is far away.
    __device__ inline float pick(int i) const {
        float of[OWN_TOKENS];
#pragma unroll
        for (int j = 0; j < OWN_TOKENS; ++j) of[j] = score(j);
#pragma unroll
        for (int half = OWN_TOKENS / 2; half; half /= 2)
#pragma unroll
            for (int j = 0; j < half; ++j) of[j] = i & half ? of[j + half] : of[j];
        return of[0];
    }
    // The largest score of four adjacent tokens; NaN where one is NaN.
    __device__ inline float largest_of_four(int i) const {
        return largest_or_nan(largest_or_nan(score(i), score(i + 1)), largest_or_nan(score(i + 2), score(i + 3)));
    }
    __device__ inline float largest() const {
        float x = largest_of_four(0);
#pragma unroll
        for (int i = 4; i < OWN_TOKENS; i += 4) x = largest_or_nan(x, largest_of_four(i));
        return x;
    }
    // Token i of the thread, and its number from the beginning of the tile on.
    __device__ inline float score(int i) const { return wide(now[i / VECTOR], i % VECTOR); }
    __device__ static inline int token(int i) { return chunk(i / VECTOR) + i % VECTOR; }
};
