// A slice of a row, shared out among the lanes that hold it: load, reduce, write.

// CHUNKS chunks a lane, of every STEP-th from the cursor on, so that a warp's instruction moves 512 neighbouring
// bytes; and with EDGES, the elements of the row's edges, one a lane, or a few where lanes are few.
//
// With TERMS, the softmax of a slice keeps the terms of its sum, and writes their multiples: one exp an element
// instead of two, for twice the registers where elements have 16 bits.
template <int CHUNKS, int STEP, bool EDGES, bool TERMS, Keep READ = Keep::NORMAL, Keep WRITE = Keep::NORMAL>
struct Slice {
    static constexpr bool KEEPS_TERMS = TERMS && OP == Op::SOFTMAX;
    static constexpr int EDGE = EDGES ? (2 * VECTOR + STEP - 1) / STEP : 0;
    Held<VECTOR> body[CHUNKS ? CHUNKS : 1];
    Held<1> edge[EDGE ? EDGE : 1];
    ACC m_own;   // what terms are relative to

    // Of the `left` chunks from the lane's first one on, as many as can be among its own.
    static __device__ inline int within(int64 left) { return left < CHUNKS * STEP ? int(left) : CHUNKS * STEP; }

    // `at` is where the lane's first chunk is; of its CHUNKS those are there that lie in the `left` chunks from it on.
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
    // The same of chunks whose x and dy are on chip, as far apart as the lane's are; what lies beside them is read.
    __device__ inline void recall(
        const Params& p, const Cursor& at, const Chunk<X, VECTOR>* x, const Chunk<DY, VECTOR>* dy, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) {
            body[i].clear();
            if (i * STEP < end) {
                body[i].x = x[i * STEP];
                if constexpr (HAS_DY) body[i].dy = dy[i * STEP];
            }
            body[i].load_beside(p, at, i * STEP * VECTOR, i * STEP < end);
        }
    }

    __device__ inline void settle(const Cursor& at, Numbers n, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) body[i].settle(at, n, i * STEP * VECTOR, i * STEP < end);
    }
    __device__ inline void settle_edges(const Row& r, Numbers n, int lane) {
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            edge[i].settle(r.begin, n, r.edge(lane + i * STEP), r.has_edge(lane + i * STEP));
    }

    // The largest of what is held, and m.
    __device__ inline ACC peak(ACC m = -INF) const {
        if constexpr (GRADIENT && !ZERO) return m;
        if constexpr (sizeof(X) == 2 && !FUSED && !GRADIENT && CHUNKS) {
            // Two 16-bit numbers an instruction.
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

    // What the row's l is the sum of: of a chunk as a tree, and where EXACT, of chunks in float64.
    __device__ inline SUM sum(ACC m) {
        const Shift s = shift(m);
        m_own = m;
        SUM l = 0;
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) l += sum(body[i], s);
#pragma unroll
        for (int i = 0; i < EDGE; ++i) l += sum(edge[i], s);
        return l;
    }
    template <int N> static __device__ inline auto sum(Held<N>& held, Shift s) {
        decltype(ops::part(ACC(), ACC(), s)) parts[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            parts[j] = ops::part(held.template a<false>(j), held.template b<false>(j), s);
            if constexpr (KEEPS_TERMS) held.scores[j] = parts[j];
        }
#pragma unroll
        for (int n = N / 2; n; n /= 2)
#pragma unroll
            for (int j = 0; j < n; ++j) parts[j] += parts[j + n];
        return parts[0];
    }

    // What is the same along the row, for this slice.
    __device__ inline ops::Term own(ops::Term t, ACC m) const {
        if constexpr (KEEPS_TERMS) return ops::relative(t, m_own, m);
        else return t;
    }

    __device__ inline void finish(const Params& p, const Cursor& at, Numbers n, ops::Term t, int64 left) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * STEP < end) write(p, at, n, t, body[i], i * STEP * VECTOR);
    }
    __device__ inline void finish_edges(const Params& p, const Row& r, Numbers n, ops::Term t, int lane) const {
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            if (r.has_edge(lane + i * STEP)) write(p, r.begin, n, t, edge[i], r.edge(lane + i * STEP));
    }

    template <int N> static __device__ inline void write(
        const Params& p, const Cursor& at, Numbers n, ops::Term t, const Held<N>& held, int64 offset) {
        ACC y[N];
#pragma unroll
        for (int i = 0; i < N; ++i)
            y[i] = KEEPS_TERMS ? ops::finish_term(held.scores[i], t)
                               : ops::finish(held.template a<true>(i), held.template b<true>(i), t);
        if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD && (HAS_MASK || CAUSAL)) {
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = held.counts(at, offset, i) ? y[i] : 0;
        }
        if constexpr ((GRADIENT || !REDUCES) && (SCALE != Scale::NONE || SOFTCAP)) {
            Chunk<LOGITS, N> x;
            if constexpr (HAS_LOGITS) load_columns<LOGITS_WIDTH, Keep::NORMAL>(x, at.logits, offset, p.logits_place);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= slope(HAS_LOGITS ? ACC(wide(x, i)) : 0, n);
        }
        store_columns<Y_WIDTH, WRITE>(at.y, narrow<Y>(y), offset, p.y_place);
    }
};
