// What the blocks of a team, which are resident together and hold a row, tell each other.
//
// Every block has a mailbox with a message for every block of its team, EMPTY until that has written its state
// there.  A state is its own message: no flag, no counter and no fence stands between write and read.  Who reads
// a message empties it, so that all are empty when the kernel ends.  Rows take two slots in turn: a block writes to a
// slot again when it has heard of the row between from everyone, and so all have read the row before.

constexpr uint64 EMPTY = ~uint64(0);
// A float and its sum are one word; anything wider takes one for m, and one for each float64 of l.
constexpr int WORDS = (sizeof(ACC) + sizeof(SUM)) / 8 + (sizeof(ACC) + sizeof(SUM)) % 8 / 4;
struct Message { uint64 words[3]; };   // of which WORDS are sent

// Bits of a number, none of which are EMPTY: that is a NaN of no arithmetic's, but a caller's may be it.
__device__ inline uint64 bits(float x) { return __float_as_uint(x != x ? NOT_A_NUMBER : x); }
__device__ inline uint64 bits(double x) { return __double_as_longlong(x != x ? NOT_A_NUMBER : x); }

__device__ inline Message message(float m, float l) { return {bits(m) | bits(l) << 32}; }
__device__ inline Message message(float m, double l) { return {bits(m), bits(l)}; }
__device__ inline Message message(double m, Twofold l) { return {bits(m), bits(l.high), bits(l.low)}; }

__device__ inline void read(Message from, float& m, float& l) {
    m = __uint_as_float(unsigned(from.words[0])), l = __uint_as_float(unsigned(from.words[0] >> 32));
}
__device__ inline void read(Message from, float& m, double& l) {
    m = __uint_as_float(unsigned(from.words[0])), l = __longlong_as_double(from.words[1]);
}
__device__ inline void read(Message from, double& m, Twofold& l) {
    m = __longlong_as_double(from.words[0]);
    l = {__longlong_as_double(from.words[1]), __longlong_as_double(from.words[2])};
}

__device__ inline void put(uint64* box, Message message) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(box + i), "l"(message.words[i]) : "memory");
}
__device__ inline Message look(const uint64* box) {
    Message message;
#pragma unroll
    for (int i = 0; i < WORDS; ++i)
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(message.words[i]) : "l"(box + i) : "memory");
    return message;
}
__device__ inline bool has_come(Message message) {
    bool come = true;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) come = come && message.words[i] != EMPTY;
    return come;
}

// The team blockIdx.x, of gridDim.x, takes every gridDim.x-th row from there on.
struct Team {
    int size, rank;
    uint64* boxes;   // of two slots, of all its blocks

    __device__ inline Team(const Params& p) : size(gridDim.y), rank(blockIdx.y) {
        boxes = p.mail + int64(blockIdx.x) * (2 * size * size * WORDS);
        // Between two launches they may leave L2.
        for (int slot = 0; REDUCES && size > 1 && slot < 2; ++slot)
            for (int from = threadIdx.x; from < size; from += THREADS)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(box(slot, rank, from)));
    }

    __device__ inline uint64* box(int slot, int to, int from) const {
        return boxes + ((slot * size + to) * size + from) * WORDS;
    }

    // The state of all blocks' states, from that of each.
    __device__ inline State merge(State a, int slot, State* room) const {
        for (int to = threadIdx.x; to < size; to += THREADS) put(box(slot, to, rank), message(a.m, a.l));
        a = identity();
        for (int from = threadIdx.x; from < size; from += THREADS) {
            uint64* const mine = box(slot, rank, from);
            Message found;
            do found = look(mine); while (!has_come(found));
            put(mine, {{EMPTY, EMPTY, EMPTY}});
            State b;
            read(found, b.m, b.l);
            a = ::merge(a, b);
        }
        return merge_warps<THREADS / 32>(merge_lanes<32>(a), room);
    }

    // Before anyone hears of the next row, what was emptied must be empty.
    __device__ inline void finish_row() const {
        if (threadIdx.x < size) __threadfence();
    }
};
