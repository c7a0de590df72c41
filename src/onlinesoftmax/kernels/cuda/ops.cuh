// What an operation does with the elements of a row: before they are reduced, as they are, and after.
//
// A strategy makes a state of each slice (`peak`, `part`), merges states until a row has one, then calls `term`
// once for the row and `finish` for each element, or `result` where the operation gives one number for a row.
// A new operation is a branch here and a line in onlinesoftmax/operation.py; no strategy changes.
//
// A gradient needs one sum over its row, and keeps it as the l of a state whose m says something else:
//     softmax           dx = y · (dy - l)       l = Σ dy · y        m unused
//     log_softmax       dx = dy - exp(y) · l    l = Σ dy            m = max(-y), 0 only if all y are
//     logsumexp         dx = l · exp(x - m)     l = dy              m = lse; given, not reduced

namespace ops {

// What the row's m is the largest of.
__device__ inline ACC peak(ACC a) { return GRADIENT ? (ZERO ? -a : 0) : a; }

// What the row's l is the sum of.  What is subtracted in a gradient may cancel all but its last places, so EXACT
// multiplies and sums in float64; a memory-bound kernel has time for that even where it is slow.
__device__ inline auto part(ACC a, ACC b, Shift s) {
    if constexpr (OP == Op::SOFTMAX_BACKWARD) return SUM(a) * b;
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) return SUM(b);
    else return term(a, s);
}

// What of `finish` is the same along a row; `low` is what t has rounded away.
struct Term { Shift shift; ACC t, low; bool zero; };

__device__ inline float reciprocal(float l) { float t; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(l)); return t; }
__device__ inline double reciprocal(double l) { return 1 / l; }

// A row of nothing but -inf, or with a +inf in it, has no softmax: PyTorch writes NaN to all of it.  ZERO writes 0
// to the first kind, where all is masked, and so has its gradient.
__device__ inline Term term(State state, int64 cols) {
    const ACC l = ACC(state.l);
    Term r{::shift(state.m), l, ACC(state.l - l), false};
    if constexpr (OP == Op::SOFTMAX || OP == Op::LOG_SOFTMAX) {
        r.zero = ZERO && l == 0;
        if constexpr (OP == Op::SOFTMAX) {
            r.t = reciprocal(l);
            r.low = r.t * (fma(-r.t, l, ACC(1)) - r.t * r.low);
        } else {
            r.t = log(l);
        }
        if (ZERO ? state.m == INF : fabs(state.m) == INF) r.t = NOT_A_NUMBER;
    } else if constexpr (OP == Op::SOFTMAX_BACKWARD) {
        if (fabs(r.t) == INF) r.low = 0;
    } else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) {
        // No two of a row's probabilities are 1: where all logs are 0, they were written, not computed.
        r.zero = ZERO && cols > 1 && state.m == 0;
    } else {
        // Not of what was reduced, so relative to the number itself.
        r.shift.m = state.m;
        r.zero = ZERO && state.m == -INF;
    }
    return r;
}

// The output of softmax for an element whose exp(a - m) is e.
__device__ inline ACC finish_term(ACC e, Term r) {
    const ACC y = EXACT ? fma(e, r.t, e * r.low) : e * r.t;
    return ZERO && r.zero ? 0 : y;
}

// The output for the element (a, b).
__device__ inline ACC finish(ACC a, ACC b, Term r) {
    ACC y;
    if constexpr (OP == Op::SOFTMAX) return finish_term(::term(a, r.shift), r);
    else if constexpr (OP == Op::LOG_SOFTMAX) y = (a - r.shift.m) - r.t;
    else if constexpr (OP == Op::SOFTMAX_BACKWARD) y = a * ((b - r.t) - r.low);
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) y = fma(-exp_of(a), r.t, b);
    else y = r.t * exp_of(a - r.shift.m);
    return ZERO && r.zero ? 0 : y;
}

// What finishes terms that are relative to m_own.
__device__ inline Term relative(Term r, ACC m_own, ACC m) {
    const ACC f = factor(m_own, m), t = r.t * f;
    if constexpr (EXACT) r.low = fma(r.t, f, -t) + r.low * f;
    r.t = t;
    return r;
}

// logsumexp: log(0) = -inf and log(inf) = inf need no case.
__device__ inline ACC result(State state) {
    return finite(state.m) + log(ACC(state.l));
}

// What the gradient of logsumexp is given for a row in place of a state: its lse and its dy.
__device__ inline State given(const Params& p, int64 row) {
    if constexpr (REDUCES) return identity();
    else if (row >= p.rows) return identity();
    else return {wide(p.lse[row_offset(p, p.lse_place, row)]), SUM(wide(p.dy[row_offset(p, p.dy_place, row)]))};
}

}  // namespace ops
