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

STAND_INS = {"peers": PEERS}
"""Files that are replaced as a whole."""
