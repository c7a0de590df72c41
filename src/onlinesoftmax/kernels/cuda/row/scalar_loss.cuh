// The scalar of a loss, the mean or the sum, written by the kernel that computes the losses.
//
// Blocks:     for a mean, the first p.counters blocks each count a part of the targets, and publish the divisor.  The block
//             that owns the last row of a segment of SEGMENT rows adds the losses of the segment.  The block that owns the
//             last row of all also adds the sums of the other segments, divides, and writes the scalar.
// Chosen:     up to MOST_ROWS_IN_ONE_LAUNCH rows and, with a gradient, MOST_BYTES_IN_ONE_LAUNCH of logits (16384 rows,
//             128 MiB); for more, small kernels before and after the loss kernel do this work (reduction.cuh).
// Bytes:      one word for each row, written, read and emptied in L2; for a mean, all targets are read once more.
// Limits:     blocks start in the order of their numbers, which GPUs do and CUDA does not promise.
//
// Hazard: a block may wait only for blocks of lower numbers, or all blocks must be resident (docs/protocols.md, "The words
// of a loss").  Sums are added in an order that depends on the launch alone, so every run gives the same bits.

namespace scalar_loss {

// The sums over all rows are kept in a wider type than the losses.
template <class T> struct WideOf { using type = double; };
template <> struct WideOf<double> { using type = DoubleDouble; };
using Wide = WideOf<ACC>::type;
using SumMailbox = Mailbox<Wide>;
static_assert(sizeof(Wide) <= 8 * WIDE_WORDS, "a mailbox has too few words for a sum");

// The sum over the threads of the block, all of which must call this.  The lanes of the first warp get the sum, the
// others 0.
__device__ inline Wide add_block(Wide a) {
    __shared__ Wide warp_sums[THREADS / 32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    a = add_lanes(a);
    // One block may count and add; the first warp must have read the counts before another warp writes here again.
    __syncthreads();
    if (lane == 0) warp_sums[warp] = a;
    __syncthreads();
    return warp ? Wide{} : add_lanes(lane < THREADS / 32 ? warp_sums[lane] : Wide{});
}

// The sum of number(i, load(i)) over the i of this thread: `first` + threadIdx.x, and from there every THREADS-th before
// `end`.  A whole batch is loaded before any of it is used.
template <class Sum, int BATCH, class Load, class Number>
__device__ inline Sum add_numbers(unsigned first, unsigned end, Load load, Number number) {
    Sum sum{};
#pragma unroll 1
    for (unsigned begin = first + threadIdx.x; begin < end; begin += BATCH * THREADS) {
        decltype(load(begin)) loaded[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (begin + i * THREADS < end) loaded[i] = load(begin + i * THREADS);
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (begin + i * THREADS < end) sum += number(begin + i * THREADS, loaded[i]);
    }
    return sum;
}

// True if a row counts for the divisor.
__device__ inline bool row_counts(const Params& p, int64 target) {
    return !HAS_IGNORE_INDEX || target != int64(p.ignore_index);
}
// The weight that a row adds to the divisor.  A target out of range has none, so it adds 0.  The mean is NaN in any case,
// because the loss of that row is NaN.
__device__ inline ACC weight_of(const Params& p, int64 target) {
    const bool has_weight = row_counts(p, target) && target >= 0 && target < p.cols;
    return has_weight ? ACC(wide(load_one(p.weight + target * p.weight_place.col))) : 0;
}

// Counts part `part` of the targets, of p.counters.  All threads of a block call this.  Without a gradient nobody waits for
// the divisor before the end, so a thread loads fewer targets at once, and takes no more registers than the rows do.
__device__ inline void count_part(const Params& p, int part) {
    static_assert(DIVISORS == 32 && COUNTERS <= 32, "a lane of a warp for each");
    constexpr int AT_ONCE = WRITES_ELEMENTS ? BATCH : BATCH / 2;
    static_assert(AT_ONCE > 0, "a thread would count nothing, for ever");
    const unsigned rows = unsigned(p.rows), size = (rows - 1) / unsigned(p.counters) + 1, first = part * size;
    const unsigned end = min(first + size, rows);
    const auto load = [&](unsigned row) { return load_one(p.target + row_offset(p, p.target_place, row)); };
    const LossMail mail(p);
    if constexpr (!HAS_WEIGHT) {
        const unsigned sum = add_numbers<unsigned, AT_ONCE>(
            first, end, load, [&](unsigned, TARGET target) { return unsigned(row_counts(p, target)); });
        // Each lane adds to its own copy of the word.
        add_to_word(mail.divisor(threadIdx.x % 32), uint64(1) << 32 | add_lanes(sum));
    } else {
        // The sums of weights are added in a fixed order, by the last part, which waits for the others.
        Wide sum = add_block(add_numbers<Wide, AT_ONCE>(
            first, end, load, [&](unsigned, TARGET target) { return weight_of(p, target); }));
        const int lane = threadIdx.x, last = int(p.counters) - 1;
        if (lane >= 32) return;
        if (part < last) {
            if (lane == 0) SumMailbox(mail.part_counts + WIDE_WORDS * part).put(sum);
            return;
        }
        if (lane < last) sum = SumMailbox(mail.part_counts + WIDE_WORDS * lane).wait_and_take();
        else if (lane > last) sum = Wide{};
        put_word(mail.divisor(lane), uint64(bits(ACC(double(add_lanes(sum))))));
    }
}

// The number of blocks that own no rows: those that count, rounded up to a multiple of CLUSTER.
__device__ inline unsigned blocks_without_rows(const Params& p) {
    return CALL_MEAN_LOSS ? (unsigned(p.counters) + CLUSTER - 1) / CLUSTER * CLUSTER : 0;
}

// Counts, in a block that counts.  Returns true in all blocks that own no rows.  Strategies call this first, and then use
// `block_of_rows`.
__device__ inline bool only_counts(const Params& p) {
    if constexpr (!CALL_MEAN_LOSS) return false;
    if (blockIdx.x >= blocks_without_rows(p)) return false;
    if (blockIdx.x < unsigned(p.counters)) count_part(p, blockIdx.x);
    return true;
}

// The number of this block among those that own rows.
__device__ inline unsigned block_of_rows(const Params& p) { return blockIdx.x - blocks_without_rows(p); }

// In strategy `grid`, the first blocks count before they take their rows.  All threads call this.  The count is not inlined,
// so that its code and its registers are not in the path of the other blocks.
__device__ __noinline__ void count_apart(const Params& p, int part) { count_part(p, part); }
__device__ inline void count_in_teams(const Params& p) {
    if constexpr (CALL_MEAN_LOSS) {
        const unsigned block = blockIdx.x * gridDim.y + blockIdx.y;
        if (block < unsigned(p.counters)) count_apart(p, block);
    }
}

// The sum of the losses of the rows `first` + threadIdx.x, and from there every THREADS-th before `end`.  Waits for them, and
// empties their words.
__device__ inline Wide take_losses(LossMail mail, unsigned first, unsigned end) {
    Wide sum{};
#pragma unroll 1
    for (unsigned begin = first + threadIdx.x; begin < end; begin += LOSSES_AT_ONCE * THREADS) {
        LossMail::Word words[LOSSES_AT_ONCE];
        // A thread looks at a whole batch until all of it has come.  If it waited for one word after the other, each that
        // comes late would take a trip to L2 of its own.
        for (bool come = false; !come;) {
            come = true;
#pragma unroll
            for (int i = 0; i < LOSSES_AT_ONCE; ++i) {
                if (begin + i * THREADS >= end) break;
                words[i] = look_word(mail.losses + begin + i * THREADS);
                come &= words[i] != LossMail::Word(EMPTY);
            }
        }
#pragma unroll
        for (int i = 0; i < LOSSES_AT_ONCE; ++i) {
            if (begin + i * THREADS >= end) break;
            put_word(mail.losses + begin + i * THREADS, LossMail::Word(EMPTY));
            ACC loss;
            from_bits(words[i], loss);
            sum += loss;
        }
    }
    return sum;
}

// Adds the losses of a segment.  For the last segment of all, it also adds the sums of the others, and writes the scalar.
// It is not inlined, because few blocks call it; its arguments are numbers in registers, because a function that is not
// inlined would load each field of Params by a slow generic access.
template <class T>
__device__ __noinline__ void add_segment(LossMail mail, unsigned counters, unsigned rows, unsigned segment, T* out) {
    const unsigned first = segment * SEGMENT, end = min(first + SEGMENT, rows);
    const bool last = end == rows;
    // The divisor and the sums of the other segments come before the last losses.  So they are looked at first, and taken
    // after the losses.
    Divisor divisor;
    const auto sum_of = [&](unsigned i) { return SumMailbox(mail.sums + WIDE_WORDS * i); };
    SumMailbox::Sent other;
    if (CALL_MEAN_LOSS && last) divisor.look(mail, threadIdx.x);
    if (last && threadIdx.x < segment) other = sum_of(threadIdx.x).look();
    Wide sum = take_losses(mail, first, end);
#pragma unroll 1
    for (unsigned i = threadIdx.x; last && i < segment; i += THREADS) {
        sum += sum_of(i).take(other);
        if (i + THREADS < segment) other = sum_of(i + THREADS).look();
    }
    sum = add_block(sum);
    const int lane = threadIdx.x;
    if (lane >= 32) return;
    if (!last) {
        if (lane == 0) sum_of(segment).put(sum);
        return;
    }
    double total = double(sum);
    if constexpr (CALL_MEAN_LOSS) {
        total /= double(divisor.wait(mail, counters, lane));
        put_word(mail.divisor(lane), EMPTY);
    }
    if (lane == 0) narrow(*out, ACC(total));
}
__device__ inline void add_segment(const Params& p, unsigned segment) {
    const LossMail mail(p);
    if constexpr (CALL_MEAN_LOSS) add_segment(mail, unsigned(p.counters), unsigned(p.rows), segment, p.mean_loss);
    else add_segment(mail, 0, unsigned(p.rows), segment, p.total_loss);
}

// Adds a segment if its last row is among the OWNED rows of this block, from `first` on, of which the first exists.  The
// block has sent their losses.  Of several blocks that hold one row, one calls this, with all its threads.
template <int OWNED> __device__ inline void add_losses(const Params& p, int64 first) {
    static_assert(SEGMENT % OWNED == 0, "a block would own rows of two segments");
    if constexpr (SCALAR_LOSS)
        if ((first + OWNED) % SEGMENT == 0 || first + OWNED >= p.rows) add_segment(p, unsigned(first / SEGMENT));
}

// In strategy `grid`, adds the segments whose last row this team has owned.  One block of the team calls this after all its
// rows: if it added a segment earlier, its later rows would wait for losses of other teams.
__device__ inline void add_losses_of_team(const Params& p) {
    if constexpr (SCALAR_LOSS)
        for (unsigned first = 0; first < unsigned(p.rows); first += SEGMENT)
            if ((min(first + SEGMENT, unsigned(p.rows)) - 1) % gridDim.x == blockIdx.x) add_segment(p, first / SEGMENT);
}

}  // namespace scalar_loss
