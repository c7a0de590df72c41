// A ring of tiles in shared memory, for two kernels of strategy `grid`: pipeline.cuh and stream.cuh.  barrier.cuh has
// the barriers and the copies.
//
// A tile is adjacent chunks of a row: p.slice in pipeline.cuh, TILE in stream.cuh, at most DEPTH for each of LANES threads.
// The blocks of a team have the tiles of a row in turn, so at any time they read one stretch of memory together.  If each
// block owned one long stretch instead, the team would read many distant places at once, which is slower.
//
// One thread of the block, the loader, issues a bulk copy for each tile, so loads in flight take no registers.  Every stage
// of the ring has two barriers: `full` counts the bytes of the tile, `empty` the warps that no longer need their part of it.
// Rows follow each other without a gap, so in pipeline.cuh loads are in flight while the blocks exchange states and while
// they write.  In stream.cuh the ring is full during the exchange, and loads go on when the writing begins.
//
// The tiles lie on cache lines in both memories.  Where the address of a bulk copy has another remainder of 128 bytes in
// shared memory than in global memory, the copies are slower: softmax of one row of 2^28 took 7 % more time on an H200.
//
// At most WINDOW tiles are in flight, which is enough for the bandwidth.  More would wait in the queues of the memory
// system, and the messages between blocks would wait behind them.

// Bytes in flight for a block.  Bandwidth times latency is some 20 KB for a multiprocessor of an H200.  Half of this limit
// is slower, and twice as much is no faster.
constexpr int IN_FLIGHT = (64 << 10) / RESIDENT;
constexpr int LINE = 8 * LINE_WORDS;      // bytes of a cache line; the first tile in shared memory begins on one
constexpr int WARPS = LANES / 32;         // warps that hold rows
constexpr int TILE = LANES * DEPTH;       // most chunks of a tile
constexpr int GROUPS = CHUNKS / DEPTH;    // tiles of a row that registers hold
constexpr int TILE_BYTES = TILE * int(sizeof(Chunk<X, VECTOR>) + (HAS_DY ? sizeof(Chunk<DY, VECTOR>) : 0));
constexpr int WANTED = (IN_FLIGHT - 1) / TILE_BYTES + 1;
constexpr int WINDOW = WANTED < STAGES ? WANTED : STAGES;
static_assert(CHUNKS % DEPTH == 0, "CHUNKS must be a multiple of DEPTH: registers hold whole tiles");
static_assert(X_WIDTH == VECTOR && (!HAS_DY || DY_WIDTH == VECTOR), "a bulk copy moves adjacent columns");
static_assert(!HAS_DY || sizeof(DY) == sizeof(X), "a bulk copy moves whole chunks of 16 bytes");

// The body of a row, as the loader needs it.
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

// The stages of the ring.
struct Stages {
    Chunk<X, VECTOR>* x;     // the tiles of all stages
    Chunk<DY, VECTOR>* dy;
    uint64 *full, *empty;    // barriers

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

// The thread that fills the ring.  It waits while all stages are full, and while WINDOW tiles are in flight.
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
    int reduced, released;   // stages of the next tile to read, and of the next tile to release
    unsigned phase;          // of barrier full[reduced]

    __device__ inline explicit Ring(const Stages& stages)
        : x(stages.x + threadIdx.x), dy(stages.dy + threadIdx.x), full(stages.full), empty(stages.empty), reduced(0),
          released(0), phase(0) {}

    // Waits for the next tile to read.
    __device__ inline void wait() const { wait_for_phase(full + reduced, phase); }
    // Waits for the next tile and reads it; the tile stays in its stage until it is released.  `at` and `left` are those
    // of this thread, as in Slice.
    template <class S> __device__ inline void read(const Params& p, S& slice, const Cursor& at, int64 left) {
        wait();
        slice.load_from_shared(p, at, x + reduced * TILE, dy + reduced * TILE, left);
    }
    // Stores the terms of the tile that was read, in the place of its elements.
    template <class S> __device__ inline void store_terms(const S& slice) {
#pragma unroll
        for (int i = 0; i < DEPTH; ++i)
            reinterpret_cast<Chunk<ACC, VECTOR>&>(x[reduced * TILE + i * LANES]) = slice.body[i].scores_in_memory();
    }
    __device__ inline void advance() {
        if (++reduced == STAGES) reduced = 0, phase ^= 1;
    }

    // Moves the oldest tile, which this thread has read before, to registers, and releases its stage.
    template <class S> __device__ inline void move_to_registers(
        const Params& p, S& slice, const Cursor& at, int64 left) {
        if constexpr (TERMS) {
#pragma unroll
            for (int i = 0; i < DEPTH; ++i)
                slice.body[i].set_scores(reinterpret_cast<const Chunk<ACC, VECTOR>&>(x[released * TILE + i * LANES]));
            fence_for_bulk_copies();
        } else {
            slice.load_from_shared(p, at, x + released * TILE, dy + released * TILE, left);
        }
        release();
    }
    // Gives the oldest stage that is not yet empty back to the loader.  All threads call it, when they need no more of it.
    __device__ inline void release() {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(empty + released);
        if (++released == STAGES) released = 0;
    }
};
