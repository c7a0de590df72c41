"""The files of kernels by which the blocks of a cluster reach each other's shared memory, for the host.

Blocks are threads of the host, and their shared variables are thread-local.
"""

from __future__ import annotations

SEEN = """
template <class T> T seen(const T& variable) { return __atomic_load_n(&variable, __ATOMIC_SEQ_CST); }
template <class T> void show(T& variable, T value) { __atomic_store_n(&variable, value, __ATOMIC_SEQ_CST); }
"""
"""Variables that other threads change."""

PEERS = """
static uint64* beginnings[16];
inline void expect_bytes(uint64* arrived, unsigned bytes) {
    show(*arrived, uint64(bytes));
    show(beginnings[blockIdx.x % CLUSTER], arrived);
}
inline void announce_beginning() {}
template <class T> void send(T* to, T word, uint64* arrived, int block) {
    // Thread-local variables of one function are equally far apart in every thread.
    uint64* there;
    while (!(there = seen(beginnings[block]))) yield();
    memcpy(reinterpret_cast<char*>(there) + (reinterpret_cast<char*>(to) - reinterpret_cast<char*>(arrived)), &word,
           sizeof(T));
    __atomic_fetch_sub(there, sizeof(T), __ATOMIC_SEQ_CST);
}
inline void wait_for_beginnings() {}
inline void wait_for_messages(uint64* arrived, unsigned phase = 0) { while (seen(*arrived)) yield(); }
"""
"""Messages between the blocks of a cluster: blocks are threads of the host, so a message is a variable for all."""

STATES = "inline void expect_states(uint64* arrived) { expect_bytes(arrived, CLUSTER * sizeof(State)); }"

CLUSTER_WORDS = """
static char* bases[16];
static unsigned arrived, phase;
inline void wait_for_cluster() {
    __syncthreads();
    if (threadIdx.x == 0) {
        const unsigned now = seen(phase);
        release(&phase);
        if (__atomic_add_fetch(&arrived, 1, __ATOMIC_SEQ_CST) == CLUSTER) show(arrived, 0u), show(phase, now + 1);
        while (seen(phase) == now) yield();
        acquire(&phase);
    }
    __syncthreads();
}
inline void show_stores() {}
inline void open_cluster(const void* base) {
    if (threadIdx.x == 0) show(bases[blockIdx.x % CLUSTER], (char*)base);
    wait_for_cluster();
}
// Thread-local variables of one function are equally far apart in every thread.
inline uint64* there(const uint64* at, int block) {
    return reinterpret_cast<uint64*>(seen(bases[block]) + ((char*)at - seen(bases[blockIdx.x % CLUSTER])));
}
inline void put_word(uint64* to, uint64 word, int block) { *there(to, block) = word; }
inline uint64 get_word(const uint64* from, int block) { return *there(from, block); }
// The phases that ended, and the words that are missing in this one, 2^20 more before they are expected.
inline void count_words(uint64* arrived, unsigned count) {
    release(arrived);
    if (!unsigned(__atomic_sub_fetch(arrived, count, __ATOMIC_SEQ_CST)))
        __atomic_fetch_add(arrived, (uint64(1) << 32) + (1 << 20), __ATOMIC_SEQ_CST);
}
inline void prepare_words(uint64* arrived) { show(*arrived, uint64(1) << 20); }
inline void expect_words(uint64* arrived, unsigned count) { count_words(arrived, (1 << 20) - count); }
inline void send_word(uint64* to, uint64 word, uint64* arrived, int block) {
    *there(to, block) = word;
    count_words(there(arrived, block), 1);
}
inline void wait_for_words(uint64* arrived, unsigned phase) {
    while ((seen(*arrived) >> 32 & 1) == phase) yield();
    acquire(arrived);
}
"""
"""Words of the blocks of a cluster, and their barrier."""

CLUSTERS = {
    "channel/cluster_messages": PEERS, "channel/cluster_states": STATES,
    "channel/cluster_words": CLUSTER_WORDS,
}  # fmt: skip
