// Two small kernels of a call whose softmax dimension is sharded.  They run between the passes over the shard.
//
//     merge_kernel      merges the states of all processes, and writes the results of each row
//     incoming_kernel   turns the gradient of the results into the operands of the gradient kernel
//
// One thread: owns one row.
// Chosen:     merge_kernel after the all-gather of the states; incoming_kernel before the gradient of the shard.
// Bytes:      merge_kernel reads the states, and incoming_kernel the incoming gradients.  Both read the targets, and one
//             weight for each target, and write each result once.
// Limits:     contiguous tensors.  All processes merge in the order of their ranks, so they get the same bits.
//
// The states are merged in float64 by the recurrence of state.cuh.  kernels/sharded.py describes the tensors.

struct ShardedRows {
    const FIELD* states; const TARGET* target; const WEIGHT* weight;
    RESULT *y, *lse; FIELD *entropy, *m, *l;
    const RESULT *dy, *dlse; const FIELD* count;
    FIELD *to_y, *to_lse, *to_flat;
    int64 rows, processes, first, cols, classes, ignore_index;
    double smoothing, z_loss, scale;
};

// Positions of the numbers that a process sends for a row.
constexpr int M = 0, L = 1, LOGPROB = 2, ENTROPY = 3, WEIGHTED = 3 + HAS_ENTROPY, SENT = WEIGHTED + SMOOTHED;

struct Target {
    int64 column;
    bool is_class;   // a column of some process
    bool counts;     // not ignored
    double weight;   // (1 - smoothing) * weight[column]
};

__device__ inline Target target_of(const ShardedRows& p, int64 row) {
    Target t{int64(p.target[row])};
    t.is_class = t.column >= 0 && t.column < p.classes;
    t.counts = !LOSS || t.column != p.ignore_index;
    t.weight = SMOOTHED ? 1 - p.smoothing : 1;
    if constexpr (HAS_WEIGHT) t.weight *= t.is_class ? double(wide(p.weight[t.column])) : 0;
    return t;
}

__device__ inline double sent(const ShardedRows& p, int64 process, int number, int64 row) {
    return wide(p.states[(process * SENT + number) * p.rows + row]);
}

__device__ inline State state_of(const ShardedRows& p, int64 process, int64 row) {
    const double l = sent(p, process, L, row);
    State state{sent(p, process, M, row), {l}};
    // zl is the sum of (z - m) * exp(z - m), so the entropy is log(l) - zl / l.  If l is 0, the entropy that was sent is
    // NaN, and zl is 0.
    if constexpr (HAS_ENTROPY) state.sums.of[SUM_ZL] = l == 0 ? 0 : l * (log(l) - sent(p, process, ENTROPY, row));
    return state;
}

// The loss of a row from the log-probability of its target: 0 where it is ignored, NaN where the target is no class.
__device__ inline double loss_of(const ShardedRows& p, Target target, double logprob, double lse, double weighted) {
    if (!target.counts) return 0;
    double loss = -target.weight * logprob;
    if constexpr (SMOOTHED) loss += p.smoothing * (lse - weighted / double(p.classes));
    if constexpr (HAS_Z_LOSS) loss += p.z_loss * lse * lse;
    return target.is_class ? loss : NOT_A_NUMBER;
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_kernel(const __grid_constant__ ShardedRows p) {
    const int64 row = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= p.rows) return;
    const Target target = target_of(p, row);
    State whole = state_of(p, 0, row);
    // The process with the target; -1 if no process has sent a log-probability: the target is no class, or the columns of
    // its process are all at -inf, or hold +inf or NaN.
    int64 owner = -1;
    double weighted = 0;
    for (int64 process = 0; process < p.processes; ++process) {
        const double logprob = sent(p, process, LOGPROB, row);
        if (logprob == logprob) owner = process;
        if constexpr (SMOOTHED) weighted += sent(p, process, WEIGHTED, row);
        if (process) whole = merge(whole, state_of(p, process, row));
    }
    const double l = whole.first(), log_l = log(l), lse = whole.m + log_l;
    double logprob = NOT_A_NUMBER;
    if (target.is_class && has_softmax(l)) {
        logprob = -double(INF);
        // log p(target) = log p(target | columns of the owner) + log p(columns of the owner).
        if (owner >= 0)
            logprob = sent(p, owner, LOGPROB, row)
                + ((sent(p, owner, M, row) - whole.m) + (log(sent(p, owner, L, row)) - log_l));
    }
    if constexpr (HAS_Y) narrow(p.y[row], LOSS ? loss_of(p, target, logprob, lse, weighted) : logprob);
    if constexpr (HAS_LSE) narrow(p.lse[row], lse);
    if constexpr (HAS_ENTROPY) narrow(p.entropy[row], log_l - whole.sums.of[SUM_ZL] / l);
    if constexpr (HAS_M) narrow(p.m[row], whole.m), narrow(p.l[row], l);
}

extern "C" __global__ void __launch_bounds__(THREADS) incoming_kernel(const __grid_constant__ ShardedRows p) {
    // This kernel may begin before the kernel before it ends, and that kernel may write the incoming gradient.
    wait_for_kernel_before();
    const int64 row = int64(blockIdx.x) * THREADS + threadIdx.x;
    if (row >= p.rows) return;
    const Target target = target_of(p, row);
    double dlogprob = 0, dlse = 0, flat = 0;
    if constexpr (LOSS) {
        // A row that is ignored, or whose target is no class, has no gradient, whatever it holds.
        if (target.counts && target.is_class) {
            double dy = wide(p.dy[SCALAR ? 0 : row]);
            if constexpr (HAS_COUNT) dy /= wide(p.count[1]);
            dlogprob = -dy * target.weight;
            if constexpr (HAS_Z_LOSS) dlse = dy * 2 * p.z_loss * (wide(p.m[row]) + log(double(wide(p.l[row]))));
            if constexpr (SMOOTHED) dlse += dy * p.smoothing, flat = p.scale * (dy * p.smoothing / double(p.classes));
        }
    } else {
        if constexpr (HAS_DY) dlogprob = target.is_class ? wide(p.dy[row]) : 0;
        if constexpr (HAS_DLSE) dlse = wide(p.dlse[row]);
    }
    const bool here = target.column >= p.first && target.column < p.first + p.cols;
    narrow(p.to_y[row], dlogprob);
    narrow(p.to_lse[row], here ? dlse : dlse - dlogprob);
    if constexpr (HAS_TO_FLAT) narrow(p.to_flat[row], flat);
}
