// Messages from one block to another, through global memory.
//
// A word is EMPTY until the sender has written it.  The word itself is the message, so no flag or fence is needed.  There
// are two other kinds of messages: a word that several blocks add to, and a packet of four words, one of which says that the
// others have come.

// The word that stands for "nothing has been written", in 64 and, as unsigned(EMPTY), in 32 bits.
constexpr uint64 EMPTY = ~uint64(0);

// The bits of x; every NaN becomes the standard NaN, because a caller's NaN could have the bits of EMPTY.
__device__ inline unsigned bits(float x) { return __float_as_uint(x != x ? NOT_A_NUMBER : x); }
__device__ inline uint64 bits(double x) { return __double_as_longlong(x != x ? NOT_A_NUMBER : x); }

__device__ inline void from_bits(uint64 word, float& x) { x = __uint_as_float(unsigned(word)); }
__device__ inline void from_bits(uint64 word, double& x) { x = __longlong_as_double(word); }

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

// Adds to a word to which several blocks add, in any order.  The word begins at EMPTY, which is -1, so a reader subtracts
// EMPTY from it.
__device__ inline void add_to_word(uint64* to, uint64 x) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" :: "l"(to), "l"(x) : "memory");
}

// The same, and returns the word before.
__device__ inline uint64 add_and_look(uint64* to, uint64 x) {
    uint64 word;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(word) : "l"(to), "l"(x) : "memory");
    return word;
}

// Brings what lies at an address into L2.
__device__ inline void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" :: "l"(at)); }

// A value made of doubles, each of which is sent as a word.  After `look`, `take` waits for the words that had not come,
// empties the mailbox, and returns the value.  Other work may be done between the two.
template <class T> struct Letter {
    static constexpr int WORDS = sizeof(T) / sizeof(double);
    uint64 words[WORDS];

    __device__ inline void look(const uint64* from) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = look_word(from + i);
    }
    __device__ inline bool has_come() const {
        bool come = true;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) come &= words[i] != EMPTY;
        return come;
    }
    __device__ inline T take(uint64* from) {
        while (!has_come()) look(from);
        T value;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            from_bits(words[i], reinterpret_cast<double*>(&value)[i]);
            put_word(from + i, EMPTY);
        }
        return value;
    }
    static __device__ inline void put(uint64* to, const T& value) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) put_word(to + i, bits(reinterpret_cast<const double*>(&value)[i]));
    }
    static __device__ inline T wait_and_take(uint64* from) {
        Letter letter;
        letter.look(from);
        return letter.take(from);
    }
};

// Four words that are written and read by one access.  They are marked to be evicted from L2 last: otherwise, rows that
// stream through L2 would evict packets, and a reader would fetch them from device memory.
struct alignas(16) Packet { unsigned words[4]; };
__device__ inline uint64 half(const Packet& packet, int i) {
    return uint64(packet.words[2 * i + 1]) << 32 | packet.words[2 * i];
}
__device__ inline void put_packet(Packet* to, const Packet& packet) {
    asm volatile("{\n\t.reg .b128 all;\n\t.reg .b64 keep;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n\tmov.b128 all, {%1, %2};\n\t"
                 "st.relaxed.gpu.global.L2::cache_hint.b128 [%0], all, keep;\n\t}"
                 :: "l"(to), "l"(half(packet, 0)), "l"(half(packet, 1)) : "memory");
}
__device__ inline Packet look_packet(const Packet* from) {
    uint64 low, high;
    asm volatile("{\n\t.reg .b128 all;\n\t.reg .b64 keep;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n\t"
                 "ld.relaxed.gpu.global.L2::cache_hint.b128 all, [%2], keep;\n\tmov.b128 {%0, %1}, all;\n\t}"
                 : "=l"(low), "=l"(high) : "l"(from) : "memory");
    return {{unsigned(low), unsigned(low >> 32), unsigned(high), unsigned(high >> 32)}};
}
