// Messages between the blocks of a team, which are resident together and hold a row; for strategy `grid`.
//
// Every block has a mailbox with a message for each block of its team, EMPTY until that block has written its state
// there (mail.cuh).  The reader empties a message, so all are empty when the kernel ends.  Rows use two slots in turn.  A block writes to a slot again only
// after it has heard from every block about the row between, so by then every block has read the row before.

// m and the sums are packed two a word where all are float32; else each float64, and m, takes a word.
constexpr bool PACKED = sizeof(ACC) == 4 && sizeof(SUM) == 4;
static_assert(WORDS == (PACKED ? (1 + SUMS + 1) / 2 : 1 + SUMS * int(sizeof(SUM) / 8)), "message_words in source.py");
struct Message { uint64 words[WORDS]; };

__device__ inline void put_sum(Message& to, int i, float x) { to.words[(1 + i) / 2] |= uint64(bits(x)) << ((1 + i) % 2 * 32); }
__device__ inline void put_sum(Message& to, int i, double x) { to.words[1 + i] = bits(x); }
__device__ inline void put_sum(Message& to, int i, DoubleDouble x) {
    to.words[1 + 2 * i] = bits(x.high), to.words[2 + 2 * i] = bits(x.low);
}
__device__ inline void get_sum(const Message& from, int i, float& x) {
    from_bits(from.words[(1 + i) / 2] >> ((1 + i) % 2 * 32), x);
}
__device__ inline void get_sum(const Message& from, int i, double& x) { from_bits(from.words[1 + i], x); }
__device__ inline void get_sum(const Message& from, int i, DoubleDouble& x) {
    from_bits(from.words[1 + 2 * i], x.high), from_bits(from.words[2 + 2 * i], x.low);
}

__device__ inline Message message(const State& state) {
    Message to{{bits(state.m)}};
#pragma unroll
    for (int i = 0; i < SUMS; ++i) put_sum(to, i, state.sums.of[i]);
    return to;
}
__device__ inline State read(const Message& from) {
    State state;
    from_bits(from.words[0], state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) get_sum(from, i, state.sums.of[i]);
    return state;
}
__device__ inline Message empty_message() {
    Message message;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) message.words[i] = EMPTY;
    return message;
}

__device__ inline void put(uint64* box, Message message) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) put_word(box + i, message.words[i]);
}
__device__ inline Message look(const uint64* box) {
    Message message;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) message.words[i] = look_word(box + i);
    return message;
}
__device__ inline bool has_come(Message message) {
    bool come = true;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) come = come && message.words[i] != EMPTY;
    return come;
}

// Team blockIdx.x, of gridDim.x teams, owns every gridDim.x-th row from its own number on.
struct Team {
    int size, rank;
    uint64* boxes;   // of two slots, of all its blocks

    __device__ inline Team(const Params& p) : size(gridDim.y), rank(blockIdx.y) {
        boxes = p.mail + int64(blockIdx.x) * (2 * size * size * WORDS);
        // Between two launches the mailboxes may leave L2.
        for (int slot = 0; REDUCES && size > 1 && slot < 2; ++slot)
            for (int from = threadIdx.x; from < size; from += THREADS)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(box(slot, rank, from)));
    }

    __device__ inline uint64* box(int slot, int to, int from) const {
        return boxes + ((slot * size + to) * size + from) * WORDS;
    }

    // Sends this block's state to every block of the team, and merges the states of all of them.
    __device__ inline State merge(State a, int slot, State* exchange) const {
        // The output may overwrite x, and another block may own the target column: this block must have read it before.
        if (HAS_TARGET && WRITES_ELEMENTS) __threadfence();
        for (int to = threadIdx.x; to < size; to += THREADS) put(box(slot, to, rank), message(a));
        a = identity();
        for (int from = threadIdx.x; from < size; from += THREADS) {
            uint64* const mine = box(slot, rank, from);
            Message found;
            do found = look(mine); while (!has_come(found));
            put(mine, empty_message());
            a = ::merge(a, read(found));
        }
        return merge_warps<THREADS / 32>(merge_lanes<32>(a), exchange);
    }

    // Emptied messages must be visible as empty before another block hears of the next row.
    __device__ inline void finish_row() const {
        if (threadIdx.x < size) __threadfence();
    }
};
