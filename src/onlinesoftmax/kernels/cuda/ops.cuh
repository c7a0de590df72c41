// The formulas of the operations: what is summed over a row, and what is written.  The only file that compares OP.
//
// A strategy merges `peak` and `summands` of its elements to one state per row.  Then it computes `row_constants` once
// for the row and `output` for each element, or `write_rows` for the outputs per row, or both.  A new operation is a
// branch here and a declaration in core/operations.py; strategies do not change.
//
// A gradient keeps one number for its row as the first sum of a state, whose m has another meaning:
//     softmax           dx = y * (dy - dot)          dot = sum(dy * y)    m is unused
//     log_softmax       dx = dy - exp(y) * dot       dot = sum(dy)        m = max(-y) with ZERO, else unused
//     logsumexp         dx = dy * exp(z - lse)       given: dy, lse       m = lse; no reduction

namespace ops {

// The number whose maximum over the row is m.
__device__ inline ACC peak(ACC a) { return READS_SAVED_OUTPUT ? (ZERO ? -a : 0) : a; }

// The type in which summands are added within a chunk.  A gradient's dot product is subtracted from its summands, and
// an entropy is the difference of two large numbers, so both use the wide type: with EXACT, float64.  A memory-bound
// kernel has time for that even where float64 is slow.
template <bool WIDE> struct SummandOf { using type = ACC; };
template <> struct SummandOf<true> { using type = SUM; };
using Summand = SummandOf<(READS_SAVED_OUTPUT || SUMS > 1)>::type;

// The term exp(a - m) of element a; 0 where a is a saved output, which needs no term.
__device__ inline ACC term(ACC a, Shift s) { return READS_SAVED_OUTPUT ? 0 : ::term(a, s); }

// The summands of element (a, b), whose term is e, for every sum of the state.
__device__ inline Sums<Summand> summands(ACC a, ACC b, ACC e) {
    Sums<Summand> terms;
    if constexpr (OP == Op::SOFTMAX_BACKWARD) terms.of[0] = Summand(SUM(a) * b);
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) terms.of[0] = Summand(SUM(b));
    else terms.of[0] = e;
    // An element at -inf has the term 0, and -inf * 0 would be NaN.
    if constexpr (SUM_ZL > 0) terms.of[SUM_ZL] = Summand(SUM(e == 0 ? 0 : a) * e);
    return terms;
}

// The per-row constants of `output`; with `zero` the row gives zeros.
//     softmax                shift by m      t = 1 / l      low = rounding error of t
//     log_softmax            shift by m      t = log(l)
//     softmax_backward                       t = dot        low = rounding error of t
//     log_softmax_backward                   t = dot
//     logsumexp_backward     shift.m = lse   t = dy
struct RowConstants { Shift shift; ACC t, low; bool zero; };

__device__ inline float reciprocal(float l) { float t; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(l)); return t; }
__device__ inline double reciprocal(double l) { return 1 / l; }

// A row of only -inf, or with a +inf, has no softmax: PyTorch writes NaN to all its elements.  With ZERO, a row of only
// -inf gives zeros, and so does its gradient.
__device__ inline RowConstants row_constants(State state, int64 cols) {
    const SUM sum = state.first();
    const ACC l = ACC(sum);
    RowConstants r{::shift(state.m), l, ACC(sum - l), false};
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
        // m = max(-y) is 0 only if all y are 0.  At most one probability of a row is 1, so in a row of several
        // columns these zeros were written because of ZERO.
        r.zero = ZERO && cols > 1 && state.m == 0;
    } else {
        // lse is given, not reduced, so the shift is lse itself, infinite or not.
        r.shift.m = state.m;
        r.zero = ZERO && state.m == -INF;
    }
    return r;
}

// The output of softmax for an element whose term exp(a - m) is e.
__device__ inline ACC output_of_term(ACC e, RowConstants r) {
    const ACC y = EXACT ? fma(e, r.t, e * r.low) : e * r.t;
    return ZERO && r.zero ? 0 : y;
}

// The output for the element (a, b).
__device__ inline ACC output(ACC a, ACC b, RowConstants r) {
    ACC y;
    if constexpr (OP == Op::SOFTMAX) return output_of_term(::term(a, r.shift), r);
    else if constexpr (OP == Op::LOG_SOFTMAX) y = (a - r.shift.m) - r.t;
    else if constexpr (OP == Op::SOFTMAX_BACKWARD) y = a * ((b - r.t) - r.low);
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) y = fma(-exp_of(a), r.t, b);
    else y = r.t * exp_of(a - r.shift.m);
    return ZERO && r.zero ? 0 : y;
}

// The row constants for terms that are relative to m_own instead of m.
__device__ inline RowConstants relative(RowConstants r, ACC m_own, ACC m) {
    const ACC f = factor(m_own, m), t = r.t * f;
    if constexpr (EXACT) r.low = fma(r.t, f, -t) + r.low * f;
    r.t = t;
    return r;
}

// An output per row, from the state of the row.  log(0) = -inf and log(inf) = inf need no case of their own.  In a row
// whose l is 0, or whose maximum is +inf, the entropy is NaN.
template <RowOutput NAME> __device__ inline ACC row_output(State state) {
    const Shift s = ::shift(state.m);
    const ACC l = ACC(state.first());
    if constexpr (NAME == RowOutput::M) return s.m;
    else if constexpr (NAME == RowOutput::L) return FOLDED ? l * exp_of(folding_error(s)) : l;
    else if constexpr (NAME == RowOutput::ENTROPY && SUM_ZL > 0) {
        // lse - zl / l, with m taken out of both before they are rounded.
        const SUM below = state.sums.of[SUM_ZL] + state.first() * -s.m;
        return (log(l) + folding_error(s)) - ACC(below) / l;
    } else {
        // "lse", and the result of logsumexp.
        return FOLDED ? s.m + (log(l) + folding_error(s)) : s.m + log(l);
    }
}

// Writes the outputs per row that the request asks for.  One thread calls this, for a row that exists.
__device__ inline void write_rows(const Params& p, int64 row, State state) {
#define WRITE(NAME, name) \
    if constexpr (ROW_##NAME) \
        narrow(p.name[row_offset(p, p.name##_place, row)], row_output<RowOutput::NAME>(state));
    ROW_OUTPUTS(WRITE)
#undef WRITE
}

// The numbers that an operation without a reduction is given for a row, in the place of a state: lse and dy of
// logsumexp.
__device__ inline State given_state(const Params& p, int64 row) {
    if constexpr (REDUCES) return identity();
    else if (row >= p.rows) return identity();
    else return {wide(p.lse[row_offset(p, p.lse_place, row)]), {SUM(wide(p.dy[row_offset(p, p.dy_place, row)]))}};
}

}  // namespace ops
