// Messages between the blocks of a team, which are resident together and hold a row; for strategy `grid`.
//
// A message is a state in packets of 16 bytes: three words of the state, and the tag of the row, which is its number
// in the team plus one.  A packet is stored and loaded by one 16-byte access, so its tag shows that its words have come,
// and a message needs no flag or fence of its own.  In each slot, every block has one message from each block of its team.
//
// Where the state does not fill the last packet, the tag stands in the words that are left, and the receiver compares all
// of them.  If it used only some words of a packet, the assembler would load these by several narrower accesses, and
// the state could be loaded before, and the tag after, the moment at which the packet comes.
//
// Rows use SLOTS slots in turn.  A block sends row i only after it has received row i - 2 from every block.  A block that
// has sent row i - 2 has received all messages of row i - 4.  So slot i % SLOTS may be overwritten.  Mailboxes are not
// emptied between rows, but once, at the end of a kernel.

static_assert(SLOTS >= 4, "a message could be overwritten before all blocks have read it");
constexpr int ACC_WORDS = sizeof(ACC) / 4, SUM_WORDS = sizeof(SUM) / 4;
constexpr int STATE_WORDS = ACC_WORDS + SUMS * SUM_WORDS;
static_assert(PACKETS == (STATE_WORDS + 2) / 3, "PACKETS differs from message_packets() in source.py");

struct Message { Packet packets[PACKETS]; };

// Word i of the state in a message.
__device__ inline unsigned& word_of(Message& message, int i) { return message.packets[i / 3].words[i % 3]; }

__device__ inline void put(Message& to, int i, float x) { word_of(to, i) = __float_as_uint(x); }
__device__ inline void put(Message& to, int i, double x) {
    const uint64 bits = __double_as_longlong(x);
    word_of(to, i) = unsigned(bits), word_of(to, i + 1) = unsigned(bits >> 32);
}
__device__ inline void put(Message& to, int i, DoubleDouble x) { put(to, i, x.high), put(to, i + 2, x.low); }
__device__ inline void get(Message& from, int i, float& x) { x = __uint_as_float(word_of(from, i)); }
__device__ inline void get(Message& from, int i, double& x) {
    x = __longlong_as_double(uint64(word_of(from, i + 1)) << 32 | word_of(from, i));
}
__device__ inline void get(Message& from, int i, DoubleDouble& x) { get(from, i, x.high), get(from, i + 2, x.low); }

__device__ inline Message message(const State& state, unsigned tag) {
    Message to;
    put(to, 0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) put(to, ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
#pragma unroll
    for (int i = STATE_WORDS; i < 3 * PACKETS; ++i) word_of(to, i) = tag;
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) to.packets[i].words[3] = tag;
    return to;
}
__device__ inline State read(Message from) {
    State state;
    get(from, 0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) get(from, ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
    return state;
}
__device__ inline bool has_come(Message message, unsigned tag) {
    bool come = true;
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) come &= message.packets[i].words[3] == tag;
#pragma unroll
    for (int i = STATE_WORDS; i < 3 * PACKETS; ++i) come &= word_of(message, i) == tag;
    return come;
}

// Team blockIdx.x, of gridDim.x teams, owns every gridDim.x-th row from its own number on; `count` is the number of a row
// among these.
struct Team {
    const Params& p;
    int size, rank;

    __device__ inline Team(const Params& p) : p(p), size(gridDim.y), rank(blockIdx.y) {
        // L2 may have evicted the mailboxes since the last launch.  This loads those of the first two rows.
        for (int slot = 0; REDUCES && size > 1 && slot < 2; ++slot)
            for (int from = threadIdx.x; from < size; from += THREADS)
                asm volatile("prefetch.global.L2 [%0];" :: "l"(box(slot, rank, from)));
    }

    __device__ inline Message* box(unsigned count, int to, int from) const {
        Message* const boxes = reinterpret_cast<Message*>(p.mail) + int64(blockIdx.x) * (SLOTS * size * size);
        return boxes + (int(count % SLOTS) * size + to) * size + from;
    }

    // The counter of a row, for stream.cuh.  Each team has two, which rows use in turn.  They lie behind all mailboxes, and
    // are EMPTY between rows.
    __device__ inline unsigned* counter(unsigned count) const {
        const int64 packets = int64(gridDim.x) * (SLOTS * size * size) * PACKETS;
        return reinterpret_cast<Packet*>(p.mail)[packets + blockIdx.x].words + count % 2;
    }

    // Sends this block's state to every block of the team; called by N threads with the numbers `lane`.
    template <int N> __device__ inline void send(const State& a, unsigned count, int lane) const {
        const Message mine = message(a, count + 1);
        for (int to = lane; to < size; to += N)
#pragma unroll
            for (int i = 0; i < PACKETS; ++i) put_packet(box(count, to, rank)->packets + i, mine.packets[i]);
    }

    // Looks once at the messages lane, lane + N, ..., of which BATCH are loaded at a time.  Returns true if all of them have
    // come; `a` is then their merged state, and otherwise undefined.
    template <int N, int BATCH> __device__ inline bool receive(State& a, unsigned count, int lane) const {
        bool come = true;
        a = identity();
        for (int first = lane; first < size; first += N * BATCH) {
            Message found[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
#pragma unroll
                for (int j = 0; j < PACKETS; ++j)
                    if (first + i * N < size)
                        found[i].packets[j] = look_packet(box(count, rank, first + i * N)->packets + j);
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                if (first + i * N >= size) continue;
                come = come && has_come(found[i], count + 1);
                if (come) a = ::merge(a, read(found[i]));
            }
        }
        return come;
    }

    // Sends this block's state, and merges the states of all blocks.
    __device__ inline State merge(State a, unsigned count, State* exchange) const {
        send<THREADS>(a, count, threadIdx.x);
        while (!receive<THREADS, 1>(a, count, threadIdx.x)) {}
        return merge_warps<THREADS / 32>(merge_lanes<32>(a), exchange);
    }

    // Empties this block's mailboxes after its last row; called by N threads with the numbers `lane`.
    template <int N> __device__ inline void clear(unsigned rows, int lane) const {
        for (unsigned slot = 0; slot < min(rows, unsigned(SLOTS)); ++slot)
            for (int from = lane; from < size; from += N)
#pragma unroll
                for (int i = 0; i < PACKETS; ++i)
                    put_packet(box(slot, rank, from)->packets + i, Packet{{~0u, ~0u, ~0u, ~0u}});
    }
};
