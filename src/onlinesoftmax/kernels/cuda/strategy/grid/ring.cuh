// A ring of tiles in shared memory, for two kernels of strategy `grid`: pipeline.cuh and stream.cuh.  barrier.cuh has
// the barriers and the copies.
//
// A tile is adjacent chunks of 16 bytes of a row's body, which begins on a cache line (head_of in operands.cuh).  It has
// p.slice chunks in pipeline.cuh and TILE chunks in stream.cuh: at most TILE_CHUNKS for each of LANES threads.  Of a row's tiles
// a block owns every n-th one, where n is the number of blocks in the team, so at any time the team reads one stretch of
// memory.  If each block owned one long stretch instead, the team would read many distant places at once, which is slower.
//
// One thread of the block, the loader, issues the bulk copies of all tiles, so loads in flight take no registers.  A stage
// is the place of one tile in the ring.  It has two barriers: `full` counts the bytes of the tile that have arrived, `empty`
// the warps that no longer need their part of the tile.  When the loader has loaded a row it goes on with the next one, as
// long as a stage is free.  So in pipeline.cuh loads are in flight while the blocks exchange states and while they write.
// In stream.cuh every stage holds a tile of the row during the exchange, and loads go on when the first of them is written.
//
// Tiles begin on a cache line, of 128 bytes, in both memories.  If a bulk copy's address in shared memory and its address
// in global memory are not equal modulo 128, the copy is slower: softmax of one row of 2^28 columns in bfloat16 took 7 %
// more time on an H200.
//
// At most WINDOW tiles are in flight.  Many more would wait in the queues of the memory system, and the messages between
// blocks would wait behind them.

// Bytes in flight on a multiprocessor, divided among its blocks.  Bandwidth times latency is some 20 KB on an H200, but
// 32 KB were slower there than 64 KB; 128 KB were no faster.
constexpr int IN_FLIGHT = (64 << 10) / RESIDENT;
constexpr int LINE = 8 * LINE_WORDS;      // bytes of a cache line
constexpr int WARPS = LANES / 32;         // warps that hold rows
constexpr int TILE = LANES * TILE_CHUNKS;       // the largest number of chunks in a tile
constexpr int HELD_TILES = CHUNKS / TILE_CHUNKS;    // tiles of a row that registers hold
constexpr int TILE_BYTES = TILE * int(sizeof(Chunk<X, VECTOR>) + (HAS_DY ? sizeof(Chunk<DY, VECTOR>) : 0));
constexpr int WANTED = (IN_FLIGHT - 1) / TILE_BYTES + 1;
constexpr int WINDOW = WANTED < STAGES ? WANTED : STAGES;
static_assert(CHUNKS % TILE_CHUNKS == 0, "CHUNKS must be a multiple of TILE_CHUNKS: registers hold whole tiles");
static_assert(X_WIDTH == VECTOR && (!HAS_DY || DY_WIDTH == VECTOR), "a bulk copy needs columns adjacent in memory");
static_assert(!HAS_DY || sizeof(DY) == sizeof(X), "a chunk of dy has 16 bytes, as one of x has");

// The body of a row, the whole chunks between its head and its tail, as the loader needs it.
struct RowBody {
    const X* x;
    const DY* dy = nullptr;
    int64 chunks;

    __device__ inline RowBody(const Params& p, int64 row) : x(p.x + row_offset(p, p.x_place, row)) {
        const int head = head_of(x, p.cols);
        x += head;
        if constexpr (HAS_DY) dy = p.dy + row_offset(p, p.dy_place, row) + head;
        chunks = uint64(p.cols - head) / VECTOR;
    }
};

struct Stages {
    Chunk<X, VECTOR>* x;     // the tiles of all stages
    Chunk<DY, VECTOR>* dy;
    uint64 *full, *empty;

    __device__ inline Stages(Chunk<X, VECTOR>* memory, uint64* barriers)
        : x(memory), dy(reinterpret_cast<Chunk<DY, VECTOR>*>(memory + STAGES * TILE)), full(barriers),
          empty(barriers + STAGES) {}

    __device__ inline void prepare() const {
        for (int i = 0; i < STAGES; ++i) prepare_barrier(full + i, 1), prepare_barrier(empty + i, WARPS);
    }

    // Begins to load `left` chunks, at most a tile, into a stage.  If no chunk is left, the stage is full at once.
    template <CachePolicy POLICY>
    __device__ inline void load(int stage, const X* from, const DY* from_dy, int64 left) const {
        const unsigned present = left < TILE ? max(int(left), 0) : TILE;
        arrive_and_expect(full + stage, present * unsigned(sizeof(*x) + (HAS_DY ? sizeof(*dy) : 0)));
        if (!present) return;
        copy_bulk<POLICY>(x + stage * TILE, from, present * unsigned(sizeof(*x)), full + stage);
        if constexpr (HAS_DY)
            copy_bulk<POLICY>(dy + stage * TILE, from_dy, present * unsigned(sizeof(*dy)), full + stage);
    }
};

// The thread that fills the ring.  Before each tile it waits until the tile's stage has been released, and until the tile
// that it loaded WINDOW tiles earlier has arrived.
struct Loader {
    const Stages& stages;
    int stage = 0, oldest = 0;   // the stage of the next tile, and that of the oldest tile that may be in flight
    unsigned phase = 1, phase_of_oldest = 0, tiles = 0;

    __device__ inline explicit Loader(const Stages& stages) : stages(stages) {}

    __device__ inline void wait() {
        if (tiles >= STAGES) wait_for_phase(stages.empty + stage, phase);
        if (tiles >= WINDOW) {
            wait_for_phase(stages.full + oldest, phase_of_oldest);
            if (++oldest == STAGES) oldest = 0, phase_of_oldest ^= 1;
        }
    }
    // Begins to load the next tile; call `wait` first.
    template <CachePolicy POLICY> __device__ inline void load(const RowBody& row, int64 begin, int64 length) {
        stages.load<POLICY>(stage, row.x + begin * VECTOR, HAS_DY ? row.dy + begin * VECTOR : nullptr,
                            min(length, row.chunks - begin));
        ++tiles;
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// A thread's view of the ring.
struct Ring {
    Chunk<X, VECTOR>* x;     // this thread's first chunk in stage 0
    Chunk<DY, VECTOR>* dy;
    uint64 *full, *empty;
    int next, released;      // stages of the next tile to read, and of the next tile to release
    unsigned phase;          // of barrier full[next]

    __device__ inline explicit Ring(const Stages& stages)
        : x(stages.x + threadIdx.x), dy(stages.dy + threadIdx.x), full(stages.full), empty(stages.empty), next(0),
          released(0), phase(0) {}

    __device__ inline void wait() const { wait_for_phase(full + next, phase); }
    // Waits for the next tile and reads it; `advance` then goes on to the tile after it.  The tile stays in its stage until
    // `release`.
    template <class S> __device__ inline void read(const Params& p, S& slice, const Position& in) {
        wait();
        slice.load_from_shared(p, in.at, in.left, x + next * TILE, dy + next * TILE);
    }
    // Stores the terms of the tile that was read (TERMS in slice.cuh) in the place of its elements, before `advance`.
    template <class S> __device__ inline void store_terms(const S& slice) {
#pragma unroll
        for (int i = 0; i < TILE_CHUNKS; ++i)
            reinterpret_cast<Chunk<ACC, VECTOR>&>(x[next * TILE + i * LANES]) = slice.body[i].scores_in_memory();
    }
    __device__ inline void advance() {
        if (++next == STAGES) next = 0, phase ^= 1;
    }

    // Reads again the oldest tile that this thread has read and not released, and releases its stage.
    template <class S> __device__ inline void move_to_registers(const Params& p, S& slice, const Position& in) {
        if constexpr (TERMS) {
#pragma unroll
            for (int i = 0; i < TILE_CHUNKS; ++i)
                slice.body[i].set_scores(reinterpret_cast<const Chunk<ACC, VECTOR>&>(x[released * TILE + i * LANES]));
            fence_for_bulk_copies();
        } else {
            slice.load_from_shared(p, in.at, in.left, x + released * TILE, dy + released * TILE);
        }
        release();
    }
    // Says that this warp needs no more of the oldest tile that it has not released.  When every warp that holds rows has
    // said so, the loader fills the stage again.
    __device__ inline void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty + released);
        if (++released == STAGES) released = 0;
    }
};
