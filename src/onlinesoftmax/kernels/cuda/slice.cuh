// A slice of a row, divided among the lanes that hold it: load, reduce, write.

// Each lane owns CHUNKS chunks, every STEP-th from the cursor on, so that one instruction of a warp moves 512 adjacent
// bytes.  With EDGES the lanes also own the edges of the row: one element a lane, or a few where lanes are few.
//
// With TERMS, a slice of softmax keeps the terms of its sum and writes multiples of them.  That takes one exp an
// element instead of two, and twice the registers where elements have 16 bits.
template <
    int CHUNKS, int STEP, bool EDGES, bool TERMS,
    CachePolicy READ = CachePolicy::NORMAL, CachePolicy WRITE = CachePolicy::NORMAL>
struct Slice {
    static constexpr int EDGE = EDGES ? (2 * VECTOR + STEP - 1) / STEP : 0;
    RegisterChunk<VECTOR> body[CHUNKS ? CHUNKS : 1];
    RegisterChunk<1> edge[EDGE ? EDGE : 1];
    ACC m_own;   // the maximum that kept terms are relative to

    // `left` counts the chunks of the slice from the lane's first one on.  A lane's chunk i exists if i * STEP is less
    // than this bound.
    static __device__ inline int within(int64 left) { return left < CHUNKS * STEP ? int(left) : CHUNKS * STEP; }

    // `at` is the position of the lane's first chunk.
    __device__ inline void load(const Params& p, const Cursor& at, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) body[i].template load<READ>(p, at, i * STEP * VECTOR, i * STEP < end);
    }
    __device__ inline void load_edges(const Params& p, const Row& r, int lane) {
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            edge[i].template load<READ>(p, r.begin, r.edge(lane + i * STEP), r.has_edge(lane + i * STEP));
    }
    // Loads x and dy from shared memory, where the lane's chunks also lie STEP apart; bias and mask from global memory.
    __device__ inline void load_from_shared(
        const Params& p, const Cursor& at, const Chunk<X, VECTOR>* x, const Chunk<DY, VECTOR>* dy, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            body[i].clear();
            if (i * STEP < end) {
                body[i].x = x[i * STEP];
                if constexpr (HAS_DY) body[i].dy = dy[i * STEP];
            }
            body[i].load_options(p, at, i * STEP * VECTOR, i * STEP < end);
        }
    }

    __device__ inline void make_scores(const Cursor& at, Numbers n, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) body[i].make_scores(at, n, i * STEP * VECTOR, i * STEP < end);
    }
    __device__ inline void make_edge_scores(const Row& r, Numbers n, int lane) {
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            edge[i].make_scores(r.begin, n, r.edge(lane + i * STEP), r.has_edge(lane + i * STEP));
    }

    // The largest of m and the elements that the lane holds.
    __device__ inline ACC peak(ACC m = -INF) const {
        if constexpr (!USES_MAXIMUM) return m;
        if constexpr (sizeof(X) == 2 && !FUSED && !READS_SAVED_OUTPUT && CHUNKS) {
            // One instruction compares two pairs of 16-bit numbers.
            unsigned pairs = reinterpret_cast<const unsigned&>(body[0].x.at[0]);
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
                for (int j = 0; j < VECTOR; j += 2)
                    pairs = max_pair<X>(pairs, reinterpret_cast<const unsigned&>(body[i].x.at[j]));
            m = fmax(m, ACC(max_half<X>(pairs)));
        } else {
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
                for (int j = 0; j < VECTOR; ++j) m = fmax(m, ops::peak(body[i].template a<false>(j)));
        }
#pragma unroll
        for (int i = 0; i < EDGE; ++i) m = fmax(m, ops::peak(edge[i].template a<false>(0)));
        return m;
    }

    // The sums of the lane's elements, relative to m: within a chunk as a tree, over chunks in the type of a sum.
    __device__ inline Sums<SUM> sum(ACC m) {
        const Shift s = shift(m);
        m_own = m;
        Sums<SUM> sums{};
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) sums += sum(body[i], s);
#pragma unroll
        for (int i = 0; i < EDGE; ++i) sums += sum(edge[i], s);
        return sums;
    }
    template <int N> static __device__ inline Sums<ops::Summand> sum(RegisterChunk<N>& chunk, Shift s) {
        Sums<ops::Summand> parts[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const ACC a = chunk.template a<false>(j), e = ops::term(a, s);
            parts[j] = ops::summands(a, chunk.template b<false>(j), e);
            if constexpr (TERMS) chunk.scores[j] = e;
        }
#pragma unroll
        for (int n = N / 2; n; n /= 2)
#pragma unroll
            for (int j = 0; j < n; ++j) parts[j] += parts[j + n];
        return parts[0];
    }

    // The row constants for this slice, whose kept terms are relative to its own maximum.
    __device__ inline ops::RowConstants own_constants(ops::RowConstants r, ACC m) const {
        if constexpr (TERMS) return ops::relative(r, m_own, m);
        else return r;
    }

    __device__ inline void write(const Params& p, const Cursor& at, Numbers n, ops::RowConstants r, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * STEP < end) write(p, at, n, r, body[i], i * STEP * VECTOR);
    }
    __device__ inline void write_edges(const Params& p, const Row& row, Numbers n, ops::RowConstants r, int lane) const {
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            if (row.has_edge(lane + i * STEP)) write(p, row.begin, n, r, edge[i], row.edge(lane + i * STEP));
    }

    template <int N> static __device__ inline void write(
        const Params& p, const Cursor& at, Numbers n, ops::RowConstants r, const RegisterChunk<N>& chunk,
        int64 offset) {
        ACC y[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            y[i] = TERMS ? ops::output_of_term(chunk.scores[i], r)
                         : ops::output(chunk.template a<true>(i), chunk.template b<true>(i), r);
        if constexpr (READS_SAVED_OUTPUT && (HAS_MASK || CAUSAL)) {
            // A saved output shows no mask, so excluded elements get their zero gradient here.
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = chunk.counts(at, offset, i) ? y[i] : 0;
        }
        if constexpr (BACKWARD && (SCALE != Scale::NONE || SOFTCAP)) {
            Chunk<LOGITS, N> x;
            if constexpr (HAS_LOGITS)
                load_columns<LOGITS_WIDTH, CachePolicy::NORMAL>(x, at.logits, offset, p.logits_place);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= score_slope(HAS_LOGITS ? ACC(wide(x, i)) : 0, n);
        }
        store_columns<Y_WIDTH, WRITE>(at.y, narrow<Y>(y), offset, p.y_place);
    }
};
