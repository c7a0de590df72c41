// The row pass, for the slice of a row that a group of lanes holds: load, score, reduce, write, each for the body and the
// edges together.  A strategy says who owns which share, and in which order states are exchanged between the steps.

// A lane's place in a slice: the position of its first chunk, and the number of chunks of the slice from there on.
struct Position { Cursor at; int64 left; };

// opaque(x): x, which the compiler cannot know.  It forces a recomputation; kept in registers, the terms would spill.
__device__ inline ACC opaque(ACC x) { return x * ACC(gridDim.z); }

// Each lane owns CHUNKS chunks, every STEP-th from its first one on, so that one instruction of a warp moves 512 adjacent
// bytes.  With EDGES the lanes also own the edges of the row: one element a lane, or a few where lanes are few.
//
// With TERMS, a slice of softmax keeps the terms of its sum and writes multiples of them.  That takes one exp an
// element instead of two, and twice the registers where elements have 16 bits.
template <
    int CHUNKS, int STEP, bool EDGES, bool TERMS,
    CachePolicy READ = CachePolicy::NORMAL, CachePolicy WRITE = CachePolicy::NORMAL>
struct Slice {
    static constexpr int EDGE = EDGES ? (HEAD + VECTOR + STEP - 1) / STEP : 0;
    RegisterChunk<VECTOR> body[CHUNKS ? CHUNKS : 1];
    RegisterChunk<1> edge[EDGE ? EDGE : 1];
    ACC m_own;   // the maximum that kept terms are relative to
    SUM wz{};    // the plain sum of the weighted scores
    More more{};

    // A lane's chunk i exists if i * STEP is less than this bound.
    static __device__ inline int within(int64 left) { return left < CHUNKS * STEP ? int(left) : CHUNKS * STEP; }

    // `at` and `left` are the lane's Position; `edge_lane` is the number of its first edge.  They come one by one, because the
    // compiler keeps a structure of them in more registers.
    __device__ inline void load(const Params& p, const Row& r, const Cursor& at, int64 left, int edge_lane = NO_EDGE) {
        load_body(p, at, left);
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            edge[i].template load<READ>(p, r.begin, r.edge(edge_lane + i * STEP), r.has_edge(edge_lane + i * STEP));
    }
    __device__ inline void make_scores(
        const Row& r, const Cursor& at, int64 left, CallConstants call, int edge_lane = NO_EDGE) {
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) body[i].make_scores(at, call, i * STEP * VECTOR, i * STEP < end);
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            edge[i].make_scores(r.begin, call, r.edge(edge_lane + i * STEP), r.has_edge(edge_lane + i * STEP));
    }
    // Makes the scores of a slice that is to be reduced.  Adds the columns that exist to wz and to `more`; the scores of
    // other columns are -inf.
    __device__ inline void score(
        const Params& p, const Row& r, const Cursor& at, int64 left, CallConstants call, int edge_lane = NO_EDGE) {
        make_scores(r, at, left, call, edge_lane);
        const int end = within(left);
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * STEP < end) add(p, at, call, i * STEP * VECTOR, body[i]);
#pragma unroll
        for (int i = 0; i < EDGE; ++i)
            if (r.has_edge(edge_lane + i * STEP)) add(p, r.begin, call, r.edge(edge_lane + i * STEP), edge[i]);
    }
    // Adds a chunk that exists to wz and to `more`.
    template <int N> __device__ inline void add(
        const Params& p, const Cursor& at, CallConstants call, int64 offset, const RegisterChunk<N>& chunk) {
        if (SUM_WZ > 0) wz += SUM(sum_of_weighted(p, at, offset, chunk));
#pragma unroll
        for (int j = 0; KEEPS_ARGMAX && j < N; ++j)
            more = merge(more, More::of_element(chunk.in_order(at, call, offset, j), at.column + offset + j));
    }
    __device__ inline void load_body(const Params& p, const Cursor& at, int64 left) {
        const int end = within(left);
        if (!WRITES_ELEMENTS && end == CHUNKS * STEP) {
            // A kernel that only reads has no time for a test and an initial value of each chunk.
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i) body[i].template load<READ>(p, at, i * STEP * VECTOR, true);
            return;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) body[i].template load<READ>(p, at, i * STEP * VECTOR, i * STEP < end);
    }
    // Loads x and dy from shared memory, where the lane's chunks also lie STEP apart; bias and mask from global memory.
    __device__ inline void load_from_shared(
        const Params& p, const Cursor& at, int64 left, const Chunk<X, VECTOR>* x, const Chunk<DY, VECTOR>* dy) {
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

    template <int N>
    static __device__ inline ops::WeightedScore sum_of_weighted(
        const Params& p, const Cursor& at, int64 offset, const RegisterChunk<N>& chunk) {
        const Chunk<WEIGHT, N> weights = load_weights<N>(p, at, offset);
        ops::WeightedScore parts[N];
#pragma unroll
        for (int j = 0; j < N; ++j)
            parts[j] = ops::weighted_score(chunk.template a<false>(j), ops::READS_WEIGHTS ? wide(weights, j) : 1);
#pragma unroll
        for (int n = N / 2; n; n /= 2)
#pragma unroll
            for (int j = 0; j < n; ++j) parts[j] += parts[j + n];
        return parts[0];
    }
    // The weights of N classes.  They are read again where they are used: L2 has them, because all rows have the same.
    template <int N>
    static __device__ inline Chunk<WEIGHT, N> load_weights(const Params& p, const Cursor& at, int64 offset) {
        Chunk<WEIGHT, N> weights;
        if constexpr (ops::READS_WEIGHTS)
            load_columns<WEIGHT_WIDTH, CachePolicy::NORMAL>(weights, at.weight, offset, p.weight_place);
        return weights;
    }

    // The largest of m and the elements that the lane holds.
    __device__ inline ACC peak(ACC m = -INF) const {
        if constexpr (!USES_MAXIMUM) return m;
        if constexpr (sizeof(X) == 2 && VECTOR > 1 && !FUSED && !READS_SAVED_OUTPUT && CHUNKS) {
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

    // The sums of the lane's elements, relative to m.
    __device__ inline Sums<SUM> sum(ACC m) {
        Shift s = shift(m);
        m_own = m;
        Sums<ops::LaneSum> parts = sum_of_elements<false>(s);
        if constexpr (SUM_ZL > 0 && !CLAMPS) {
            const auto zl = PlainOf<ops::LaneSum>::type(parts.of[SUM_ZL]);
            if (zl != zl) {
                s.m = opaque(s.m), s.amount = opaque(s.amount);
                parts = sum_of_elements<true>(s);
            }
        }
        Sums<SUM> sums{};
        sums += parts;
        if constexpr (SUM_WZ > 0) sums.of[SUM_WZ] += wz;
        return sums;
    }
    // CLAMPS: the exponent of every element in the sum zl has a lower limit, which `ops::summands` applies.  A kernel
    // that only reads omits the limit, because logits of -inf are rare, and the limit takes a tenth of the time in which
    // memory delivers 16-bit elements.  If zl is then NaN, the lane computes its sums AGAIN, with the limit.
    static constexpr bool CLAMPS = FUSED || WRITES_ELEMENTS;

    // Adds the sums of the lane's chunks, one after the other.
    template <bool AGAIN> __device__ inline Sums<ops::LaneSum> sum_of_elements(Shift s) {
        Sums<ops::LaneSum> parts{};
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i) parts += sum_of_chunk<AGAIN>(body[i], s);
#pragma unroll
        for (int i = 0; i < EDGE; ++i) parts += sum_of_chunk<AGAIN>(edge[i], s);
        return parts;
    }
    // Adds the elements of a chunk in a tree.
    template <bool AGAIN, int N>
    static __device__ inline Sums<ops::Summand> sum_of_chunk(RegisterChunk<N>& chunk, Shift s) {
        Sums<ops::Summand> parts[N];
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const ACC a = chunk.template a<AGAIN>(j), e = ops::term(a, s);
            parts[j] = ops::summands<AGAIN || CLAMPS>(a, chunk.template b<AGAIN>(j), e, s);
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

    __device__ inline void write(
        const Params& p, const Row& r, const Cursor& at, int64 left, CallConstants call, ops::RowConstants constants,
        int edge_lane = NO_EDGE) {
        if constexpr (CHUNKS > 0) write_body(p, at, left, call, constants);
        write_edges(p, r, call, constants, edge_lane);
    }
    __device__ inline void write_body(
        const Params& p, const Cursor& at, int64 left, CallConstants call, ops::RowConstants r) {
        const int end = within(left);
        if (HAS_TARGET && r.zero) {
            // One branch for the row costs less than a selection for each element.
#pragma unroll
            for (int i = 0; i < CHUNKS; ++i)
                if (i * STEP < end) write_zeros<VECTOR>(p, at, i * STEP * VECTOR);
            return;
        }
#pragma unroll
        for (int i = 0; i < CHUNKS; ++i)
            if (i * STEP < end) write(p, at, call, r, body[i], i * STEP * VECTOR);
        // The first column of chunk i of this lane is i * STEP * VECTOR columns after the cursor.
        const int64 target = HAS_TARGET ? columns_to_target(at, p.first) : -1;
        if (target >= 0 && target < int64(end) * VECTOR && int(target) % (STEP * VECTOR) < VECTOR)
            write_target(p, at, r, target);
    }
    __device__ inline void write_edges(
        const Params& p, const Row& row, CallConstants call, ops::RowConstants r, int lane) const {
#pragma unroll
        for (int i = 0; i < EDGE; ++i) {
            if (!row.has_edge(lane + i * STEP)) continue;
            if (HAS_TARGET && r.zero) {
                write_zeros<1>(p, row.begin, row.edge(lane + i * STEP));
            } else {
                write(p, row.begin, call, r, edge[i], row.edge(lane + i * STEP));
                if (HAS_TARGET && row.edge(lane + i * STEP) == row.target())
                    write_target(p, row.begin, r, row.target());
            }
        }
    }
    template <int N> static __device__ inline void write_zeros(const Params& p, const Cursor& at, int64 offset) {
        const ACC y[N] = {};
        store_columns<Y_WIDTH, WRITE>(from_which(at, at.y, offset), narrow<Y>(y), offset, p.y_place);
    }

    // Writes the target column after the chunk that has it: a thread's stores to one address keep their order.
    static __device__ inline void write_target(const Params& p, const Cursor& at, ops::RowConstants r, int64 offset) {
        const ACC y[1] = {r.target_gradient};
        store_columns<Y_WIDTH, WRITE>(from_which(at, at.y, offset), narrow<Y>(y), offset, p.y_place);
    }

    template <int N> static __device__ inline void write(
        const Params& p, const Cursor& at, CallConstants call, ops::RowConstants r, const RegisterChunk<N>& chunk,
        int64 offset) {
        ACC y[N];
        const Chunk<WEIGHT, N> weights = load_weights<N>(p, at, offset);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const ACC b = ops::READS_WEIGHTS ? ACC(wide(weights, i)) : chunk.template b<true>(i);
            y[i] = TERMS ? ops::output_of_term(chunk.scores[i], b, r) : ops::output(chunk.template a<true>(i), b, r);
        }
        if constexpr (WRITES_GRADIENT && (HAS_MASK || CAUSAL)) {
            // An excluded element has no gradient, not even in a row that holds NaN or has no softmax.
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] = chunk.is_included(at, offset, i) ? y[i] : 0;
        }
        if constexpr (WRITES_GRADIENT && (SCALE != Scale::NONE || SOFTCAP)) slope(p, at, call, y, chunk, offset);
        store_columns<Y_WIDTH, WRITE>(from_which(at, at.y, offset), narrow<Y>(y), offset, p.y_place);
    }

    // Multiplies gradients by the derivatives of the scores with respect to the logits.
    template <int N> static __device__ inline void slope(
        const Params& p, const Cursor& at, CallConstants call, ACC (&y)[N], const RegisterChunk<N>& chunk,
        int64 offset) {
        if constexpr (!READS_SAVED_OUTPUT) {
            // With a target, the row constants contain the scale.
            const ACC scale = SCALE != Scale::NONE && !HAS_TARGET ? call.scale : 1;
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= SOFTCAP ? scale * chunk.slope_of_score(i, call) : scale;
        } else {
            Chunk<LOGITS, N> x;
            if constexpr (HAS_LOGITS)
                load_columns<LOGITS_WIDTH, CachePolicy::NORMAL>(x, at.logits, offset, p.logits_place);
#pragma unroll
            for (int i = 0; i < N; ++i) y[i] *= score_slope(HAS_LOGITS ? ACC(wide(x, i)) : 0, call);
        }
    }
};
