// What a kernel reads: the tensors, where their rows lie, and the elements as an operation wants them.
//
// An operation is given two numbers for a column, (a, b): the score of a logit and nothing beside it, or for a
// gradient the saved output and dy.  Scale, softcap, bias and masks happen here, at load; so no strategy knows
// of them, and what is not asked for is not compiled.
//
// A row is cut in three: a body of whole chunks of VECTOR neighbours, which is moved in instructions as wide as
// the row's alignment allows, and its edges, at most VECTOR - 1 elements before and after, which the lanes take
// one by one.  With PEEL the body begins on 16 bytes wherever the row does; without, it begins with the row.

// Strides in elements, of the outer dimensions, the fastest first, and of a column.
struct Place { int64 strides[DIMS]; int64 col; };

// From a column to the next; where accesses are wider than one element, it is known.
template <int WIDTH> __device__ inline int64 step(const Place& place) { return WIDTH > 1 ? 1 : place.col; }

// The columns from `offset` past a place in a row on.
template <int WIDTH, Keep KEEP, class T, int N>
__device__ inline void load_columns(Chunk<T, N>& to, const T* at, int64 offset, const Place& place) {
    load<WIDTH, KEEP>(to, at + offset * step<WIDTH>(place), step<WIDTH>(place));
}
template <int WIDTH, Keep KEEP, class T, int N>
__device__ inline void store_columns(T* at, const Chunk<T, N>& from, int64 offset, const Place& place) {
    store<WIDTH, KEEP>(at + offset * step<WIDTH>(place), from, step<WIDTH>(place));
}

struct Params {
    // For a gradient x is the saved output, and logits is what that was made from.
    const X* x; Y* y; const DY* dy; const BIAS* bias; const unsigned char* mask; const LOGITS* logits;
    const LSE* lse; const SCALE_TENSOR* scale_tensor;
    uint64* mail;             // of teams
    double scale, softcap;
    int64 rows, cols;
    int64 diagonal;           // column q + diagonal - 1 is the last that query q attends to
    int64 slice;              // of teams: chunks of a row for each block
    int64 shared_tiles;       // chunks of a thread in shared memory
    int64 sizes[DIMS];
    Place x_place, y_place, dy_place, bias_place, mask_place, logits_place, lse_place, query_place;
};

// Offset of the first element of a row, counted through the outer dimensions: so no copy is made to bring a
// permuted, sliced or expanded tensor into rows.
__device__ inline int64 row_offset(const Params& p, const Place& place, int64 row) {
    int64 offset = 0;
#pragma unroll
    for (int i = 0; i < DIMS - 1; ++i) {
        // A division in 64 bits takes some hundred instructions.
        const int64 size = p.sizes[i];
        const int64 next = (row | size) >> 32 ? row / size : unsigned(row) / unsigned(size);
        offset += (row - next * size) * place.strides[i];
        row = next;
    }
    return offset + row * place.strides[DIMS - 1];
}

// Scale and softcap, for all rows.
struct Numbers { ACC scale, cap; };

__device__ inline Numbers numbers(const Params& p) {
    Numbers n{1, 1};
    if constexpr (SCALE == Scale::NUMBER) n.scale = ACC(p.scale);
    if constexpr (SCALE == Scale::TENSOR) n.scale = ACC(wide(*p.scale_tensor));
    if constexpr (SOFTCAP) n.cap = ACC(p.softcap);
    return n;
}

// Some place in a row: a pointer into each tensor, and the columns that causality keeps from there on.
struct Cursor {
    const X* x; Y* y; const DY* dy; const BIAS* bias; const unsigned char* mask; const LOGITS* logits;
    int64 kept;
};

// The same, `columns` on.
__device__ inline Cursor skip(const Params& p, Cursor at, int64 columns) {
    at.x += columns * step<X_WIDTH>(p.x_place);
    if constexpr (!PER_ROW) at.y += columns * step<Y_WIDTH>(p.y_place);
    if constexpr (HAS_DY) at.dy += columns * step<DY_WIDTH>(p.dy_place);
    if constexpr (HAS_BIAS) at.bias += columns * step<BIAS_WIDTH>(p.bias_place);
    if constexpr (HAS_MASK) at.mask += columns * step<MASK_WIDTH>(p.mask_place);
    if constexpr (HAS_LOGITS) at.logits += columns * step<LOGITS_WIDTH>(p.logits_place);
    if constexpr (CAUSAL) at.kept -= columns;
    return at;
}

// One row: where it begins, and how it is cut.
struct Row {
    Cursor begin;
    int64 cols;
    int64 body;   // chunks
    int head;     // columns before the body

    // Column j of the head, or from VECTOR on, column j - VECTOR of the tail.
    __device__ inline int64 edge(int j) const { return j < VECTOR ? j : head + body * VECTOR + j - VECTOR; }
    __device__ inline bool has_edge(int j) const { return j < VECTOR ? j < head : j < 2 * VECTOR && edge(j) < cols; }
    // Where a chunk of the body begins.
    __device__ inline Cursor chunk(const Params& p, int64 i) const {
        Cursor at = skip(p, begin, head + i * VECTOR);
        // Addresses in registers, which loads and stores add constants to; the compiler would make each anew.
        asm volatile("" : "+l"(at.x));
        if constexpr (!PER_ROW) asm volatile("" : "+l"(at.y));
        if constexpr (HAS_DY) asm volatile("" : "+l"(at.dy));
        return at;
    }
};

__device__ inline Row row_at(const Params& p, int64 row) {
    Row r;
    r.begin.x = p.x + row_offset(p, p.x_place, row);
    if constexpr (!PER_ROW) r.begin.y = p.y + row_offset(p, p.y_place, row);
    if constexpr (HAS_DY) r.begin.dy = p.dy + row_offset(p, p.dy_place, row);
    if constexpr (HAS_BIAS) r.begin.bias = p.bias + row_offset(p, p.bias_place, row);
    if constexpr (HAS_MASK) r.begin.mask = p.mask + row_offset(p, p.mask_place, row);
    if constexpr (HAS_LOGITS) r.begin.logits = p.logits + row_offset(p, p.logits_place, row);
    if constexpr (CAUSAL) r.begin.kept = row_offset(p, p.query_place, row) + p.diagonal;
    // A row past the last has no columns, and nothing is read of it.
    r.cols = row < p.rows ? p.cols : 0;
    r.head = 0;
    if constexpr (PEEL) {
        r.head = int(-(reinterpret_cast<uint64>(r.begin.x) / sizeof(X)) % VECTOR);
        r.head = r.head < r.cols ? r.head : int(r.cols);
    }
    r.body = uint64(r.cols - r.head) / VECTOR;
    return r;
}

// tanh to a few units in the last place is CUDA's own.
__device__ inline float tanh_of(float x) { return tanhf(x); }
__device__ inline double tanh_of(double x) { return tanh(x); }

// What softmax is taken of: softcap · tanh(x · scale / softcap), as far as those are given.
__device__ inline ACC score(ACC x, Numbers n) {
    if constexpr (SCALE != Scale::NONE) x *= n.scale;
    if constexpr (SOFTCAP) x = n.cap * tanh_of(x / n.cap);
    return x;
}

// The derivative of a score in its logit.
__device__ inline ACC slope(ACC x, Numbers n) {
    ACC d = 1;
    if constexpr (SOFTCAP) {
        const ACC y = tanh_of((SCALE != Scale::NONE ? x * n.scale : x) / n.cap);
        d = 1 - y * y;
    }
    return SCALE != Scale::NONE ? d * n.scale : d;
}

// N neighbours of a row, held from load to store: as they lie in memory, which takes the fewest registers, or
// as scores where making those again would take more.
template <int N> struct Held {
    static constexpr bool SCORES = FUSED && !GRADIENT;
    Chunk<X, N> x;
    Chunk<DY, N> dy;
    Chunk<unsigned char, N> mask;
    Chunk<BIAS, N> bias;
    ACC scores[N];

    // The columns from `offset` past the cursor on; where `there` is false they are absent, and count for nothing.
    template <Keep KEEP> __device__ inline void load(const Params& p, const Cursor& at, int64 offset, bool there) {
        // What causality forbids need not be read.
        if constexpr (SCORES && CAUSAL) there = there && offset < at.kept;
        if (there) {
            load_columns<X_WIDTH, KEEP>(x, at.x, offset, p.x_place);
            if constexpr (HAS_DY) load_columns<DY_WIDTH, KEEP>(dy, at.dy, offset, p.dy_place);
        } else {
            clear();
        }
        load_beside(p, at, offset, there);
    }

    __device__ inline void clear() {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            ::clear(x.at[i], GRADIENT);
            if constexpr (HAS_DY) ::clear(dy.at[i], true);
        }
    }

    // The part that is not x or dy.
    __device__ inline void load_beside(const Params& p, const Cursor& at, int64 offset, bool there) {
        if (there) {
            if constexpr (HAS_BIAS) load_columns<BIAS_WIDTH, Keep::NORMAL>(bias, at.bias, offset, p.bias_place);
            if constexpr (HAS_MASK) load_columns<MASK_WIDTH, Keep::NORMAL>(mask, at.mask, offset, p.mask_place);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if constexpr (HAS_BIAS) ::clear(bias.at[i], true);
                if constexpr (HAS_MASK) mask.at[i] = 0;
            }
        }
    }

    __device__ inline bool counts(const Cursor& at, int64 offset, int i) const {
        return (!CAUSAL || offset + i < at.kept) && (!HAS_MASK || mask.at[i]);
    }

    // After all loads are under way: scores are made once.
    __device__ inline void settle(const Cursor& at, Numbers n, int64 offset, bool there) {
        if constexpr (SCORES) {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                ACC z = score(wide(x, i), n);
                if constexpr (HAS_BIAS) z += wide(bias, i);
                // -inf does not survive a softcap or a negative scale.
                scores[i] = there && counts(at, offset, i) ? z : -ACC(INF);
            }
        }
    }

    // Element i, when it is reduced and when it is written.
    template <bool AGAIN> __device__ inline ACC a(int i) const {
        if constexpr (SCORES) return scores[i];
        else return AGAIN ? wide_again(x, i) : wide(x, i);
    }
    template <bool AGAIN> __device__ inline ACC b(int i) const {
        if constexpr (HAS_DY) return AGAIN ? wide_again(dy, i) : wide(dy, i);
        else return 0;
    }
};
