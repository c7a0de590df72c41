// A team of blocks, which are resident together and hold a row, and the messages between them; for strategy `grid`.
//
// A message is a state in packets of 16 bytes: three words of the state, and the tag of the row, which is its number
// in the team plus one.  A packet is stored and loaded by one 16-byte access, so its tag shows that its words have come,
// and a message needs no flag or fence of its own.
//
// Where the state does not fill the last packet, the tag stands in the words that are left, and the receiver compares all
// of them.  If it used only some words of a packet, the assembler would load these by several narrower accesses, and
// the state could be loaded before, and the tag after, the moment at which the packet comes.
//
// There are two ways to exchange messages.  With mailboxes.cuh a message arrives soonest: it is for blocks that have nothing
// else to do.  team_board.cuh moves fewer bytes: it is for blocks that load and write other rows meanwhile.
//
// Rows use SLOTS places for messages, the slots, in turn.  Hazard: a block sends row i only after it has received row i - 2
// from every block; so no message is overwritten before it is read (docs/protocols.md, "Slots of a team").

static_assert(SLOTS >= 4, "a message could be overwritten before all blocks have read it");
static_assert(PACKETS == (STATE_WORDS + 2) / 3, "PACKETS differs from message_packets() in source.py");

struct Message { Packet packets[PACKETS]; };

// Word i of the state in a message.
__device__ inline unsigned& word_of(Message& message, int i) { return message.packets[i / 3].words[i % 3]; }

__device__ inline Message message(const State& state, unsigned tag) {
    Message to;
    put_state(to, state);
#pragma unroll
    for (int i = STATE_WORDS; i < 3 * PACKETS; ++i) word_of(to, i) = tag;
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) to.packets[i].words[3] = tag;
    return to;
}
__device__ inline bool has_come(Message message, unsigned tag) {
    bool come = true;
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) come &= message.packets[i].words[3] == tag;
#pragma unroll
    for (int i = STATE_WORDS; i < 3 * PACKETS; ++i) come &= word_of(message, i) == tag;
    return come;
}

__device__ inline void put_message(Message* to, const State& state, unsigned tag) {
    const Message from = message(state, tag);
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) put_packet(to->packets + i, from.packets[i]);
}
__device__ inline void remove_message(Message* from) {
#pragma unroll
    for (int i = 0; i < PACKETS; ++i) put_packet(from->packets + i, Packet{{~0u, ~0u, ~0u, ~0u}});
}

// Looks once at the messages lane, lane + N, ... of `count` messages, of which BATCH are loaded at a time.  Returns true if
// all of them have come; `a` is then their merged state, and otherwise undefined.
template <int N, int BATCH>
__device__ inline bool receive(State& a, const Message* messages, int count, unsigned tag, int lane) {
    bool come = true;
    a = identity();
    for (int first = lane; first < count; first += N * BATCH) {
        Message found[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
#pragma unroll
            for (int j = 0; j < PACKETS; ++j)
                if (first + i * N < count) found[i].packets[j] = look_packet(messages[first + i * N].packets + j);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i * N >= count) continue;
            come = come && has_come(found[i], tag);
            if (come) a = ::merge(a, read_state(found[i]));
        }
    }
    return come;
}

// Team blockIdx.x, of gridDim.x teams, owns every gridDim.x-th row from its own number on.
struct Team {
    int size, rank;
    __device__ inline Team() : size(gridDim.y), rank(blockIdx.y) {}
};

// The number of this thread's first edge: the first block of a team owns the edges.
__device__ inline int edge_lane_of(const Team& team) { return team.rank ? NO_EDGE : threadIdx.x; }
