// A state as words of 32 bits, for messages.  Every type of messages M defines word_of(message, i), which returns a
// reference to its word i.

constexpr int ACC_WORDS = sizeof(ACC) / 4, SUM_WORDS = sizeof(SUM) / 4;
constexpr int MORE_WORD = ACC_WORDS + SUMS * SUM_WORDS;   // the first of `more`
constexpr int STATE_WORDS = MORE_WORD + More::WORDS;

// `put` writes x to the words from i on; `get` reads x from them.
template <class M> __device__ inline void put(M& to, int i, float x) { word_of(to, i) = __float_as_uint(x); }
template <class M> __device__ inline void put(M& to, int i, double x) {
    const uint64 bits = __double_as_longlong(x);
    word_of(to, i) = unsigned(bits), word_of(to, i + 1) = unsigned(bits >> 32);
}
template <class M> __device__ inline void put(M& to, int i, DoubleDouble x) { put(to, i, x.high), put(to, i + 2, x.low); }
template <class M> __device__ inline void get(M& from, int i, float& x) { x = __uint_as_float(word_of(from, i)); }
template <class M> __device__ inline void get(M& from, int i, double& x) {
    x = __longlong_as_double(uint64(word_of(from, i + 1)) << 32 | word_of(from, i));
}
template <class M> __device__ inline void get(M& from, int i, DoubleDouble& x) {
    get(from, i, x.high), get(from, i + 2, x.low);
}
template <class M> __device__ inline void put(M& to, int i, unsigned x) { word_of(to, i) = x; }
template <class M> __device__ inline void put(M& to, int i, uint64 x) {
    word_of(to, i) = unsigned(x), word_of(to, i + 1) = unsigned(x >> 32);
}
template <class M> __device__ inline void get(M& from, int i, unsigned& x) { x = word_of(from, i); }
template <class M> __device__ inline void get(M& from, int i, uint64& x) {
    x = uint64(word_of(from, i + 1)) << 32 | word_of(from, i);
}
template <class M> __device__ inline void put(M& to, int i, Argmax x) {
    put(to, i, uint64(x.index)), put(to, i + 2, x.key);
}
template <class M> __device__ inline void get(M& from, int i, Argmax& x) {
    uint64 index;
    get(from, i, index), get(from, i + 2, x.key);
    x.index = index;
}
template <class M> __device__ inline void put(M&, int, Nothing) {}
template <class M> __device__ inline void get(M&, int, Nothing&) {}

// `put_state` writes a state to the first STATE_WORDS words; `read_state` reads it from them.
template <class M> __device__ inline void put_state(M& to, const State& state) {
    put(to, 0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) put(to, ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
    put(to, MORE_WORD, state.more());
}
template <class M> __device__ inline State read_state(M from) {
    State state;
    get(from, 0, state.m);
#pragma unroll
    for (int i = 0; i < SUMS; ++i) get(from, ACC_WORDS + i * SUM_WORDS, state.sums.of[i]);
    More more;
    get(from, MORE_WORD, more);
    return state.with(more);
}
