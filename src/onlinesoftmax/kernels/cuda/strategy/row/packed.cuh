// Strategy `row`, kernel `packed`: short rows that lie one after another, moved as one stretch of memory.
//
// One block:  owns ROWS rows, which it copies to shared memory 16 bytes at a time, wherever rows begin.
//             LANES threads take a row from there, lane i the columns i, i + LANES, ...; results go back the same way.
// Chosen:     for short rows whose bytes are no multiple of 16.
// Bytes:      one read, one write.
// Limits:     CHUNKS x LANES columns; in each tensor, rows without gaps, or one row that all rows share.

constexpr int WARPS = THREADS / 32, GROUPS_OF_WARP = 32 / LANES, ROWS = WARPS * GROUPS_OF_WARP * ROWS_AT_ONCE;

// The row that a group of a warp takes in its turn `turn`.  The rows that a warp takes together are LANES apart, if a block
// has so many.  If their length is odd, they then begin multiples of LANES elements apart, modulo the banks: no two share one.
__device__ inline int row_of_group(int group, int warp, int turn) {
    constexpr int APART = LANES < WARPS * ROWS_AT_ONCE ? LANES : WARPS * ROWS_AT_ONCE;
    const int number = turn * WARPS + warp;
    return number / APART * APART * GROUPS_OF_WARP + group * APART + number % APART;
}

// The results of a row take the place of its elements in shared memory if they have as many bytes.
constexpr bool OVERWRITES = sizeof(Y) == sizeof(X);

// A stretch of memory: whole units of 16 bytes, and fewer elements than a unit before and after them.  In shared memory its
// elements lie as far from a multiple of 16 bytes as in global memory.
template <class T> struct Stretch {
    static constexpr int UNIT = 16 / sizeof(T);
    // 16-byte words of shared memory for the rows of a block and the bytes before them.
    static constexpr int WORDS = (ROWS * CHUNKS * LANES * int(sizeof(T)) + 30) / 16;
    int head, units, edges;

    __device__ inline Stretch(const T* begin, int count) {
        const int to_boundary = (UNIT - past_boundary(begin)) % UNIT;
        head = to_boundary < count ? to_boundary : count;
        units = (count - head) / UNIT;
        edges = count - units * UNIT;
    }
    // Elements from the last multiple of 16 bytes to `at`.
    static __device__ inline int past_boundary(const T* at) { return int(reinterpret_cast<uint64>(at) % 16 / sizeof(T)); }
    // Position of edge j: the head, then what follows the units.
    __device__ inline int edge(int j) const { return j < head ? j : j + units * UNIT; }

    // Begins to copy a stretch to shared memory, and returns the place of its first element there.
    static __device__ inline T* load(uint4* memory, const T* from, int count) {
        const Stretch it(from, count);
        T* const to = reinterpret_cast<T*>(memory) + past_boundary(from);
#pragma unroll 4
        for (int i = threadIdx.x; i < it.units; i += THREADS)
            copy_async(to + it.head + i * UNIT, from + it.head + i * UNIT);
        if (threadIdx.x < it.edges) to[it.edge(threadIdx.x)] = load_one(from + it.edge(threadIdx.x));
        return to;
    }
    // Copies a stretch from shared memory.
    static __device__ inline void store(T* to, const T* from, int count) {
        const Stretch it(to, count);
        if (past_boundary(to) != past_boundary(from)) {
            // The output begins elsewhere than the input whose place it has taken.
#pragma unroll 2
            for (int i = threadIdx.x; i < count; i += THREADS) to[i] = from[i];
            return;
        }
#pragma unroll 4
        for (int i = threadIdx.x; i < it.units; i += THREADS)
            store_word<CachePolicy::NORMAL>(
                reinterpret_cast<uint4*>(to + it.head + i * UNIT),
                *reinterpret_cast<const uint4*>(from + it.head + i * UNIT));
        if (threadIdx.x < it.edges) to[it.edge(threadIdx.x)] = from[it.edge(threadIdx.x)];
    }
};

// The rows of a block in shared memory: the place of the first, and elements from a row to the next, which is 0 if all rows
// of the tensor are one.
template <class T> struct SharedRows {
    T* first;
    int step;
    __device__ inline T* row(int i) const { return first + i * step; }
};

// Begins to copy the rows of a tensor to shared memory.
template <class T> __device__ inline SharedRows<T> share_rows(
    uint4* memory, const T* begin, const Place& place, int64 offset, int rows, int cols) {
    const bool is_one_row = place.strides[0] == 0;
    return {Stretch<T>::load(memory, is_one_row ? begin : begin + offset, is_one_row ? cols : rows * cols),
            is_one_row ? 0 : cols};
}

// DO(NAME, name) for every tensor that is read element by element beside x, without the weights of classes: every block
// reads the same, so they come from L1.
#define READ_BESIDE_X(DO) DO(DY, dy) DO(BIAS, bias) DO(MASK, mask) DO(LOGITS, logits)

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) packed_kernel(const __grid_constant__ Params p) {
    static_assert(VECTOR == 1 && LANES <= 32 && !SHARDED && !HAS_REST, "whole rows, of which a lane has single columns");
    __shared__ uint4 x_memory[Stretch<X>::WORDS];
#define MEMORY(NAME, name) __shared__ uint4 name##_memory[HAS_##NAME ? Stretch<NAME>::WORDS : 1];
    READ_BESIDE_X(MEMORY)
#undef MEMORY
    __shared__ uint4 y_memory[HAS_Y && !OVERWRITES ? Stretch<Y>::WORDS : 1];
    if (scalar_loss::only_counts(p)) return;
    const int64 begin = int64(scalar_loss::block_of_rows(p)) * ROWS;
    const int rows = p.rows - begin < ROWS ? int(p.rows - begin) : ROWS;
    // With one lane, the columns are known to the compiler.
    const int cols = LANES > 1 ? int(p.cols) : CHUNKS;
    const int64 offset = begin * cols;
    X* const x = Stretch<X>::load(x_memory, p.x + offset, rows * cols);
#define SHARE(NAME, name) \
    SharedRows<NAME> name{}; \
    if constexpr (HAS_##NAME) name = share_rows(name##_memory, p.name, p.name##_place, offset, rows, cols);
    READ_BESIDE_X(SHARE)
#undef SHARE
    commit();
    Y* y = reinterpret_cast<Y*>(x);
    if constexpr (HAS_Y && !OVERWRITES) y = reinterpret_cast<Y*>(y_memory) + Stretch<Y>::past_boundary(p.y + offset);

    const int warp = threadIdx.x / 32, group = threadIdx.x % 32 / LANES, lane = threadIdx.x % LANES;
    // Every lane has all its columns but the last, so that the compiler needs no test of them.
    const int columns = lane + (CHUNKS - 1) * LANES < cols ? (CHUNKS - 1) * LANES + 1 : (CHUNKS - 1) * LANES;
    const int left = LANES > 1 ? columns : CHUNKS;
    const CallConstants of_call = call_constants(p);
    Row row[ROWS_AT_ONCE];
    RowOperands operands[ROWS_AT_ONCE];
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) {
        const int i = row_of_group(group, warp, d);
        row[d] = row_at(p, begin + i);
        operands[d] = row_operands(p, begin + i);
        row[d].begin.x = x + i * cols;
#define BEGIN(NAME, name) if constexpr (HAS_##NAME) row[d].begin.name = name.row(i);
        READ_BESIDE_X(BEGIN)
#undef BEGIN
        if constexpr (HAS_Y) row[d].begin.y = y + i * cols;
    }
    wait_groups(0);
    __syncthreads();
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) operands[d].load_target(p, row[d]);
#pragma unroll
    for (int d = 0; d < ROWS_AT_ONCE; ++d) {
        const int64 index = begin + row_of_group(group, warp, d);
        const CallConstants call = operands[d].with_scale(of_call);
        const Cursor at = skip(p, row[d].begin, lane);
        // A row past the last has whatever is in shared memory; nothing is written of it.
        Slice<CHUNKS, LANES, false, TERMS> slice;
        slice.load(p, row[d], at, left);
        slice.score(p, row[d], at, left, call);
        const State state = REDUCES ? reduce<LANES>(slice, nullptr) : identity();
        if (lane == 0 && index < p.rows) ops::write_rows(p, row[d], index, operands[d], call, state);
        if constexpr (WRITES_ELEMENTS) {
            const ops::RowConstants whole = ops::row_constants(p, row[d], operands[d], call, state);
            // All lanes of a row have loaded the target's logit, which one of them overwrites.
            if (LANES > 1 && HAS_TARGET) __syncwarp();
            if (index < p.rows) slice.write(p, row[d], at, left, call, slice.own_constants(whole, state.m));
        }
    }
    if constexpr (WRITES_ELEMENTS) {
        __syncthreads();
        Stretch<Y>::store(p.y + offset, y, rows * cols);
    }
    scalar_loss::add_losses<ROWS>(p, begin);
}
