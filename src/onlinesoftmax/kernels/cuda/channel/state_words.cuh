// States as the words of a message.

constexpr int ACC_WORDS = sizeof(ACC) / 4, SUM_WORDS = sizeof(SUM) / 4;
constexpr int MORE_WORD = ACC_WORDS + SUMS * SUM_WORDS;   // the first of `more`
constexpr int STATE_WORDS = MORE_WORD + More::WORDS;

template <class M> __device__ inline void set_more(M& message, Argmax more) {
    message.set(MORE_WORD, uint64(more.index)), message.set(MORE_WORD + 2, more.key);
}
template <class M> __device__ inline void get_more(M& message, Argmax& more) {
    message.get(MORE_WORD, reinterpret_cast<uint64&>(more.index)), message.get(MORE_WORD + 2, more.key);
}
template <class M> __device__ inline void set_more(M&, Nothing) {}
template <class M> __device__ inline void get_more(M&, Nothing&) {}

// Writes a state to the first STATE_WORDS words of a message, and reads it from them.
template <class M> __device__ inline void set_state(M& message, const State& state) {
    message.set(0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) message.set(ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
    set_more(message, state.more());
}
template <class M> __device__ inline State state_in(M message) {
    State state;
    message.get(0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) message.get(ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
    More more;
    get_more(message, more);
    return state.with(more);
}
