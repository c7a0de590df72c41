"""Files of a CUDA kernel that the simulator (tests/cuda_simulator.py) replaces as a whole: messages between blocks.

Blocks are threads of the host, so a message is a variable that all of them see.
"""

from __future__ import annotations

PEERS = """
template <class T> T seen(const T& variable) { return __atomic_load_n(&variable, __ATOMIC_SEQ_CST); }
template <class T> void show(T& variable, T value) { __atomic_store_n(&variable, value, __ATOMIC_SEQ_CST); }
static uint64* beginnings[16];
inline void expect_states(uint64* arrived) {
    show(*arrived, uint64(0));
    show(beginnings[blockIdx.x % CLUSTER], arrived);
}
inline void announce_beginning() {}
inline void wait_for_beginnings() {
    for (int i = 0; i < CLUSTER; ++i) while (!seen(beginnings[i])) yield();
}
inline void send(State* to, State state, uint64* arrived, int block) {
    // Thread-local variables of one function are equally far apart in every thread.
    uint64* const there = seen(beginnings[block]);
    memcpy(reinterpret_cast<char*>(there) + (reinterpret_cast<char*>(to) - reinterpret_cast<char*>(arrived)), &state,
           sizeof(State));
    __atomic_fetch_add(there, 1, __ATOMIC_SEQ_CST);
}
inline void wait_for_states(uint64* arrived) { while (seen(*arrived) < CLUSTER) yield(); }
"""

TEAM = """
// One message for each row of a team, block of a team, and team.
static State mail[256][16][16];
static int posted[256][16];
static unsigned counters[16][2];
struct Team {
    int size, rank;
    Team(const Params&) : size(gridDim.y), rank(blockIdx.y) {}
    template <int N> void send(const State& a, unsigned count, int lane) const {
        if (lane != 0) return;
        mail[count][blockIdx.x][rank] = a;
        __atomic_fetch_add(&posted[count][blockIdx.x], 1, __ATOMIC_SEQ_CST);
    }
    template <int N, int BATCH> bool receive(State& a, unsigned count, int lane) const {
        a = identity();
        if (__atomic_load_n(&posted[count][blockIdx.x], __ATOMIC_SEQ_CST) < size) return yield(), false;
        for (int i = 0; lane == 0 && i < size; ++i) a = ::merge(a, mail[count][blockIdx.x][i]);
        return true;
    }
    State merge(State a, unsigned count, State* exchange) const {
        send<THREADS>(a, count, threadIdx.x);
        while (!receive<THREADS, 1>(a, count, threadIdx.x)) {}
        return merge_warps<THREADS / 32>(merge_lanes<32>(a), exchange);
    }
    unsigned* counter(unsigned count) const { return &counters[blockIdx.x][count % 2]; }
    template <int N> void clear(unsigned, int) const {}
};
"""

STAND_INS = {"peers": PEERS, "team": TEAM}
"""Files that are replaced as a whole."""
