// The messages between blocks of a loss that is reduced to a scalar (scalar_loss.cuh): the mailboxes, and the divisor of a mean.

// The mailboxes, in p.loss_mail:
//     divisors      DIVISORS copies of the divisor of the mean, so that blocks read different addresses
//     part_counts   for each part of the targets, its part of the divisor; used where classes have weights
//     losses        the loss of each row
//     sums          for each segment of rows, the sum of its losses
// A part count or a sum has WIDE_WORDS words of 64 bits.  All words are EMPTY before and after a kernel.  Kernels that may
// run at the same time have mailboxes of their own.
struct LossMail {
    using Word = WordOf<sizeof(ACC)>::type;
    uint64 *divisors, *part_counts, *sums;
    Word* losses;

    __device__ inline explicit LossMail(const Params& p)
        : divisors(p.loss_mail), part_counts(divisors + LINE_WORDS * DIVISORS),
          sums(part_counts + WIDE_WORDS * COUNTERS + (p.rows * sizeof(Word) + 7) / 8),
          losses(reinterpret_cast<Word*>(part_counts + WIDE_WORDS * COUNTERS)) {}

    __device__ inline uint64* divisor(unsigned i) const { return divisors + i % DIVISORS * LINE_WORDS; }
    __device__ inline void send(int64 row, ACC loss) const { put_word(losses + row, bits(loss)); }
};

// The divisor of a mean, from the blocks that count.  Without weights, each counting warp adds 1 to the upper half of the
// word and its rows to the lower half; with weights, the word holds the bits of the divisor.
// Hazard: look before the row is loaded, wait after it, and then load the target's logit, or the row waits for the target.
struct Divisor {
    uint64 word;   // as loaded by `look`

    // Both read copy i % DIVISORS; `counters` is the number of blocks that count.
    __device__ inline void look(const LossMail& mail, unsigned i) { word = look_word(mail.divisor(i)); }
    __device__ inline ACC wait(const LossMail& mail, unsigned counters, unsigned i) const {
        uint64 now = word;
        while (!is_complete(counters, now)) now = look_word(mail.divisor(i));
        if constexpr (!HAS_WEIGHT) return ACC(unsigned(now - EMPTY));
        ACC x;
        from_bits(now, x);
        return x;
    }
    static __device__ inline bool is_complete(unsigned counters, uint64 word) {
        if constexpr (HAS_WEIGHT) return word != EMPTY;
        else return unsigned((word - EMPTY) >> 32) == counters * (THREADS / 32);
    }
};
