// States that the blocks of a cluster send each other, for strategy `cluster`: each block sends its own to every other.

__device__ inline void send_more(StateWith<Nothing>*, Nothing, uint64*, int) {}
__device__ inline void send_more(StateWith<Argmax>* to, Argmax more, uint64* arrived, int block) {
    send(reinterpret_cast<uint64*>(&to->further.index), uint64(more.index), arrived, block);
    send(&to->further.key, more.key, arrived, block);
}
__device__ inline void send(State* to, State state, uint64* arrived, int block) {
    send(&to->m, state.m, arrived, block);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) send(&to->sums.of[i], state.sums.of[i], arrived, block);
    send_more(to, state.more(), arrived, block);
}

// Prepares the barrier for one state from each block of the cluster; called by one thread.
__device__ inline void expect_states(uint64* arrived) {
    expect_bytes(arrived, CLUSTER * (sizeof(ACC) + sizeof(Sums<SUM>) + 4 * More::WORDS));
}
