// The formulas of the operations: what is summed over a row, and what is written.  The only file that compares OP.
//
// A strategy merges `peak` and `summands` of its elements to one state per row.  Then it computes `row_constants` once
// for the row and `output` for each element, or `write_rows` for the outputs per row, or both.  A new operation is a
// branch here and a declaration in ops/; strategies do not change.
//
// Two gradients reduce a dot product, which is the first sum of their state.  Their m is not the maximum of scores:
//     softmax           dx = y * (dy - dot)          dot = sum(dy * y)    m is unused
//     log_softmax       dx = dy - exp(y) * dot       dot = sum(dy)        m = max(-y) with ZERO, else unused
// The others reduce nothing, because lse or the state (m, l) is given.  p is exp(z - lse), or exp(z - m) / l; [c == t]
// is 1 in the target column and 0 in the others.
//     logsumexp         dx = dy * p
//     cross_entropy     dx = dy * (factor * p - own * [c == t] - spread * weight)
//         own = (1 - smoothing) * weight[t]    spread = smoothing / cols
//         factor = own + spread * weight_sum + 2 * z_loss * lse
//     token_logprobs    dx = dy * [c == t] - p * (dy - dlse + dentropy * (log(p) + entropy))
// The thread that owns the target column writes that element a second time, from the operands of the row, so no
// element pays for a comparison with the target.

namespace ops {

// The number whose maximum over the row is m.
__device__ inline ACC peak(ACC a) { return READS_SAVED_OUTPUT ? (ZERO ? -a : 0) : a; }

// The type in which summands are added within a chunk.  A gradient's dot product is subtracted from its summands, so it
// uses the wide type: with EXACT, float64.  A memory-bound kernel has time for that even where float64 is slow.
template <bool WIDE> struct SummandOf { using type = ACC; };
template <> struct SummandOf<true> { using type = SUM; };
using Summand = SummandOf<READS_SAVED_OUTPUT>::type;
// The type in which a lane adds the sums of its chunks.
using LaneSum = SummandOf<READS_SAVED_OUTPUT || EXACT>::type;

// The term exp(a - m) of element a; 0 where a is a saved output, which needs no term.
__device__ inline ACC term(ACC a, Shift s) { return READS_SAVED_OUTPUT ? 0 : ::term(a, s); }

// The summands of element (a, b), whose term is e, for every sum of the state.
//
// An element at -inf has the term 0 and the exponent -inf, whose product is NaN.  CLAMP limits the exponent to -1000, below
// which every term is 0.  Without CLAMP, a caller whose sum zl is NaN adds up again.
template <bool CLAMP> __device__ inline Sums<Summand> summands(ACC a, ACC b, ACC e, Shift s) {
    Sums<Summand> terms{};
    if constexpr (OP == Op::SOFTMAX_BACKWARD) terms.of[0] = Summand(SUM(a) * b);
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) terms.of[0] = Summand(SUM(b));
    else terms.of[0] = e;
    if constexpr (SUM_ZL > 0) terms.of[SUM_ZL] = Summand((CLAMP ? fmax(exponent(a, s), ACC(-1000)) : exponent(a, s)) * e);
    return terms;
}

// True where each element reads the weight of its class.
constexpr bool READS_WEIGHTS = HAS_WEIGHT && HAS_SMOOTHING;

// The summand of wz for an element with score a and weight b.  The scores of a row may all be large.  `target_output`
// subtracts the large part, and it needs the digits that are left, so the products are made and added in the wide type.
using WeightedScore = PlainOf<SUM>::type;
__device__ inline WeightedScore weighted_score(ACC a, ACC b) {
    return READS_WEIGHTS ? (b == 0 ? 0 : WeightedScore(a) * b) : a;
}

// The per-row constants of `output`; with `zero` the row gives zeros.
//     softmax                  shift by m      t = 1 / l           low = rounding error of t
//     log_softmax              shift by m      t = log(l)
//     softmax_backward                         t = dot             low = rounding error of t
//     log_softmax_backward                     t = dot
//     logsumexp_backward       shift.m = lse   t = dy
//     cross_entropy, and its gradient:
//                              shift by m      t = dy * factor / l   low = rounding error of t
//                              spread = dy times that of the formula
//     token_logprobs_backward  shift by m      t = (dlse - dy + dentropy * (log(l) - entropy)) / l
//                                              low = -dentropy / l
// `target_gradient` is the gradient in the target column.
struct RowConstants { Shift shift; ACC t, low; bool zero; ACC spread, target_gradient; };

__device__ inline float reciprocal(float l) { float t; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(l)); return t; }
__device__ inline double reciprocal(double l) { return 1 / l; }

// a / b for a normal or infinite b, within a unit in the last place; CUDA's own division has a branch for other numbers.
__device__ inline double quotient(double a, double b) { return a / b; }
__device__ inline float quotient(float a, float b) {
    const float r = reciprocal(b), q = a * r;
    return fma(fma(-q, b, a), r, q);
}

// The row constants from the state alone, for operations without operands per row.  A row of only -inf, or with a +inf, has
// no softmax: PyTorch writes NaN to all its elements.  With ZERO, a row of only -inf gives zeros, and so does its gradient.
__device__ inline RowConstants softmax_constants(State state, int64 cols) {
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
    }
    return r;
}

// True for cross-entropy and for its gradient.  The first reduces the state, the second is given it.
constexpr bool OF_LOSS = OP == Op::CROSS_ENTROPY || OP == Op::CROSS_ENTROPY_BACKWARD;

// The output for an element whose term exp(a - m) is e, and whose second operand is b.
__device__ inline ACC output_of_term(ACC e, ACC b, RowConstants r) {
    ACC y = EXACT ? fma(e, r.t, e * r.low) : e * r.t;
    if constexpr (HAS_TARGET && HAS_SMOOTHING) y -= READS_WEIGHTS ? r.spread * b : r.spread;
    return ZERO && !HAS_TARGET && r.zero ? 0 : y;
}

// The output for the element (a, b), without the extra term of the target column.
__device__ inline ACC output(ACC a, ACC b, RowConstants r) {
    ACC y;
    if constexpr (OP == Op::SOFTMAX || OF_LOSS) return output_of_term(::term(a, r.shift), b, r);
    else if constexpr (OP == Op::LOG_SOFTMAX) y = (a - r.shift.m) - r.t;
    else if constexpr (OP == Op::SOFTMAX_BACKWARD) y = a * ((b - r.t) - r.low);
    else if constexpr (OP == Op::LOG_SOFTMAX_BACKWARD) y = fma(-exp_of(a), r.t, b);
    else {
        const ACC below = a - r.shift.m, e = exp_of(below);
        y = r.t * e;
        // p * log(p) is 0 where p is 0; the product 0 * -inf would be NaN.
        if constexpr (GIVEN_DENTROPY) y = e * fma(e == 0 ? 0 : below, r.low, r.t);
    }
    return ZERO && !HAS_TARGET && r.zero ? 0 : y;
}

// The row constants for terms that are relative to m_own instead of m.
__device__ inline RowConstants relative(RowConstants r, ACC m_own, ACC m) {
    const ACC f = factor(m_own, m), t = r.t * f;
    if constexpr (EXACT) r.low = fma(r.t, f, -t) + r.low * f;
    r.t = t;
    return r;
}

// log(l).  FOLDED: a sum of terms is at least 1, but its rounded logarithm may be below 0.
__device__ inline ACC log_sum(State state, Shift s) {
    const ACC l = ACC(state.first());
    if constexpr (!FOLDED) return log(l);
    const ACC y = log(l) + folding_error(s);
    return y < 0 && l > 0 ? 0 : y;
}

// An output per row, from the state of the row.  log(0) = -inf and log(inf) = inf need no case of their own.  In a row
// whose l is 0, or whose maximum is +inf, the entropy is NaN.
template <RowOutput NAME> __device__ inline auto row_output(State state) {
    const Shift s = ::shift(state.m);
    const ACC l = ACC(state.first());
    if constexpr (NAME == RowOutput::LARGEST) return state.more().finish();
    else if constexpr (NAME == RowOutput::M) return s.m;
    else if constexpr (NAME == RowOutput::L) return FOLDED ? l * exp_of(folding_error(s)) : l;
    else if constexpr (NAME == RowOutput::ENTROPY && SUM_ZL > 0) {
        // A FOLDED l and its exponents are off by the same factor and amount, which cancel here.
        return log(l) - quotient(ACC(state.sums.of[SUM_ZL]), l) * (FOLDED && s.factor != 1 ? ACC(LN2) : 1);
    } else {
        // "lse", and the result of logsumexp.
        return s.m + log_sum(state, s);
    }
}

// True where the row is not to count, whatever it holds.
__device__ inline bool ignored(const Params& p, const Row& row) {
    if constexpr (HAS_IGNORE_INDEX) return row.begin.target_left == int64(p.ignore_index);
    else return false;
}

// The numbers own, spread and factor of the formula at the top, for one row.
struct LossFactors { ACC own, spread, factor; };
__device__ inline LossFactors loss_factors(
    const Params& p, const Row& row, const RowOperands& operands, CallConstants call, ACC lse) {
    LossFactors f{operands.target_weight, 0, 0};
    if constexpr (HAS_SMOOTHING) f.own *= ACC(1 - p.smoothing), f.spread = ACC(p.smoothing) / ACC(columns_of_row(p));
    f.factor = HAS_SMOOTHING ? fma(f.spread, call.weight_sum, f.own) : f.own;
    if constexpr (HAS_Z_LOSS) f.factor = fma(2 * ACC(p.z_loss), lse, f.factor);
    return f;
}

// The row constants of the gradient of a loss: those of softmax, in r, times its factors.
__device__ inline RowConstants loss_constants(
    const Params& p, const Row& row, const RowOperands& operands, CallConstants call, RowConstants r, ACC lse) {
    const LossFactors f = loss_factors(p, row, operands, call, lse);
    const ACC dy = SCALE != Scale::NONE ? operands.dy * call.scale : operands.dy, t = dy * f.factor * r.t;
    if constexpr (EXACT) r.low = fma(dy * f.factor, r.t, -t) + dy * f.factor * r.low;
    r.t = t;
    r.spread = dy * f.spread;
    r.zero = !row.has_target(p) || ignored(p, row);
    // An excluded column has no gradient.
    if (operands.target_logit.is_included(row.begin, row.target(), 0))
        r.target_gradient = output(operands.score(row, call), operands.target_weight, r) - dy * f.own;
    return r;
}

// The row constants of an operation that has operands with one value per row.
__device__ inline RowConstants row_constants(
    const Params& p, const Row& row, const RowOperands& operands, CallConstants call, State state) {
    RowConstants r{};
    if constexpr (OF_LOSS || OP == Op::TOKEN_LOGPROBS_BACKWARD) {
        if constexpr (!REDUCES) state = {operands.m, {SUM(operands.l)}};
        const SUM sum = state.first();
        const ACC l = ACC(sum);
        r.shift = ::shift(state.m);
        if constexpr (OF_LOSS) {
            r.t = has_softmax(l) ? reciprocal(l) : NOT_A_NUMBER;
            if constexpr (EXACT) r.low = r.t * (fma(-r.t, l, ACC(1)) - r.t * ACC(sum - l));
            r = loss_constants(p, row, operands, call, r, r.shift.m + log_sum(state, r.shift));
        } else {
            const ACC scale = SCALE != Scale::NONE ? call.scale : 1, dy = row.has_target(p) ? scale * operands.dy : 0;
            r.t = (GIVEN_DLSE ? scale * operands.dlse : 0) - dy;
            if constexpr (GIVEN_DENTROPY) {
                r.low = -(scale * operands.dentropy);
                r.t = fma(r.low, operands.entropy - log(l), r.t);
                r.low /= l;
            }
            r.t = has_softmax(l) ? r.t / l : NOT_A_NUMBER;
            // A row without an incoming gradient has none, even if it holds NaN.
            r.zero = operands.dy == 0 && (!GIVEN_DLSE || operands.dlse == 0)
                && (!GIVEN_DENTROPY || operands.dentropy == 0);
            // An excluded column has no gradient.
            if (operands.target_logit.is_included(row.begin, row.target(), 0))
                r.target_gradient = output(operands.score(row, call), 1, r) + dy;
        }
    } else if constexpr (!REDUCES) {
        // lse is given, not reduced, so the shift is lse itself, infinite or not.
        r.shift = ::shift(operands.lse);
        r.shift.m = operands.lse;
        r.zero = ZERO && operands.lse == -INF;
        r.t = operands.dy;
    } else {
        return softmax_constants(state, columns_of_row(p));
    }
    if constexpr (HAS_TARGET && SOFTCAP) r.target_gradient *= operands.slope(row, call);
    return r;
}

// The loss of a row, or the logarithm of the probability of its target.
__device__ inline ACC target_output(
    const Params& p, const Row& row, const RowOperands& operands, CallConstants call, State state) {
    if (ignored(p, row)) return 0;
    if (!row.has_target(p)) return NOT_A_NUMBER;
    const Shift s = ::shift(state.m);
    const ACC log_l = log_sum(state, s), below = s.m - operands.score(row, call);
    if (!has_softmax(ACC(state.first()))) return ZERO && ACC(state.first()) == 0 ? 0 : NOT_A_NUMBER;
    if constexpr (OP == Op::TOKEN_LOGPROBS) return -below - log_l;
    const LossFactors f = loss_factors(p, row, operands, call, 0);
    ACC y = f.own * (below + log_l);
    if constexpr (HAS_SMOOTHING) {
        // weight_sum * lse - wz, with m taken out of both before they are rounded.
        const SUM above = state.sums.of[SUM_WZ > 0 ? SUM_WZ : 0] + SUM(call.weight_sum) * -s.m;
        y += f.spread * (call.weight_sum * log_l - ACC(above));
    }
    if constexpr (HAS_Z_LOSS) y += ACC(p.z_loss) * ((s.m + log_l) * (s.m + log_l));
    return y;
}

// True for the outputs that `target_output` computes.
template <RowOutput NAME> constexpr bool OF_TARGET =
    NAME == RowOutput::LOSS || (NAME == RowOutput::Y && OP == Op::TOKEN_LOGPROBS);

template <RowOutput NAME> __device__ inline auto row_output(
    const Params& p, const Row& row, const RowOperands& operands, CallConstants call, State state) {
    if constexpr (OF_TARGET<NAME>) return target_output(p, row, operands, call, state);
    else return row_output<NAME>(state);
}

// Writes the outputs per row that the request asks for, and sends a loss that is reduced to a scalar.  One thread calls
// this, for a row that exists.
__device__ inline void write_rows(
    const Params& p, const Row& r, int64 row, const RowOperands& operands, CallConstants call, State state) {
    if constexpr (SCALAR_LOSS) LossMail(p).send(row, target_output(p, r, operands, call, state));
#define WRITE(NAME, name) \
    if constexpr (ROW_##NAME) \
        narrow(p.name[row_offset(p, p.name##_place, row)], row_output<RowOutput::NAME>(p, r, operands, call, state));
    ROW_OUTPUTS(WRITE)
#undef WRITE
}

}  // namespace ops
