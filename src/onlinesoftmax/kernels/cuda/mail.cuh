// Messages from one block to another, through global memory.
//
// A word is EMPTY until the sender has written it.  The word itself is the message, so no flag, counter or fence is
// needed.

// The word that stands for "nothing has been written", in 64 and, as unsigned(EMPTY), in 32 bits.
constexpr uint64 EMPTY = ~uint64(0);

// The bits of x; every NaN becomes the standard NaN, because a caller's NaN could have the bits of EMPTY.
__device__ inline unsigned bits(float x) { return __float_as_uint(x != x ? NOT_A_NUMBER : x); }
__device__ inline uint64 bits(double x) { return __double_as_longlong(x != x ? NOT_A_NUMBER : x); }

__device__ inline void from_bits(uint64 word, float& x) { x = __uint_as_float(unsigned(word)); }
__device__ inline void from_bits(uint64 word, double& x) { x = __longlong_as_double(word); }

// The unsigned integer of SIZE bytes, 4 or 8.
template <int SIZE> struct WordOf { using type = uint64; };
template <> struct WordOf<4> { using type = unsigned; };

// `put_word` writes a word so that other blocks of this GPU can see it.  `look_word` reads a word that another block may
// have written, without waiting for it.
__device__ inline void put_word(uint64* to, uint64 word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ inline void put_word(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}
__device__ inline uint64 look_word(const uint64* from) {
    uint64 word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline unsigned look_word(const unsigned* from) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

// Waits until a word has been written, and returns it.
template <class Word> __device__ inline Word wait_for_word(const Word* from) {
    Word word;
    do word = look_word(from); while (word == Word(EMPTY));
    return word;
}
