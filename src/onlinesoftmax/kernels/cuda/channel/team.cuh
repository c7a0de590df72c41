// A team of blocks, which are resident together and hold a row, and the messages between them; for strategy `grid`.
//
// A message is a state in packets; its tag is the number of the row in the team plus one.
//
// There are two ways to exchange messages.  With mailboxes.cuh a message arrives soonest: it is for blocks that have nothing
// else to do.  team_board.cuh moves fewer bytes: it is for blocks that load and write other rows meanwhile.
//
// Rows use SLOTS places for messages, the slots, in turn.  Hazard: a block sends row i only after it has received row i - 2
// from every block; so no message is overwritten before it is read (docs/protocols.md, "Slots of a team").

static_assert(SLOTS >= 4, "a message could be overwritten before all blocks have read it");

using TeamChannel = Channel<Packet, STATE_WORDS>;
static_assert(PACKETS == TeamChannel::Sent::UNITS, "PACKETS differs from message_packets() in messages.py");

__device__ inline void put_state(TeamChannel to, const State& state, unsigned tag) {
    TeamChannel::Sent sent;
    set_state(sent, state);
    to.put(sent, tag);
}

// Looks once at the messages lane, lane + N, ... of `count`, of which BATCH are loaded at a time.  Returns true if
// all of them have come; `a` is then their merged state, and otherwise undefined.
template <int N, int BATCH>
__device__ inline bool receive(State& a, TeamChannel from, int count, unsigned tag, int lane) {
    bool come = true;
    a = identity();
    for (int first = lane; first < count; first += N * BATCH) {
        TeamChannel::Sent sent[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i)
            if (first + i * N < count) sent[i] = from[first + i * N].look();
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (first + i * N >= count) continue;
            come = come && TeamChannel::status(sent[i], tag) == Status::WRITTEN;
            if (come) a = ::merge(a, state_in(sent[i]));
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
