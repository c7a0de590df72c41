// Channels: words through which blocks, and kernels of several GPUs, send each other values through global memory.
//
// A message travels in units.  One instruction reads or writes a whole unit, so each unit shows by itself whether it has
// been written, and no flag or fence is needed (docs/protocols.md, "A word that is its own message"):
//
//     PlainWord    64 bits            PENDING while it is EMPTY           for blocks of this GPU
//     Packet       96 bits and a tag  PENDING while it has another tag    for blocks of this GPU
//     TaggedWord   32 bits and a tag  PENDING while it has another tag    for other GPUs too
//
// Blocks may also add to a word.  It begins at EMPTY, which is -1, so a reader subtracts EMPTY from it.

enum class Status { PENDING, WRITTEN };
enum class Scope { GPU, SYSTEM };   // who sees a word: blocks of this GPU, or those of other GPUs too

// The word that stands for "nothing has been written", in 64 and, as unsigned(EMPTY), in 32 bits.
constexpr uint64 EMPTY = ~uint64(0);

// The bits of x; every NaN becomes the standard NaN, because a caller's NaN could have the bits of EMPTY.
__device__ inline unsigned bits(float x) { return __float_as_uint(x != x ? NOT_A_NUMBER : x); }
__device__ inline uint64 bits(double x) { return __double_as_longlong(x != x ? NOT_A_NUMBER : x); }

__device__ inline void from_bits(uint64 word, float& x) { x = __uint_as_float(unsigned(word)); }
__device__ inline void from_bits(uint64 word, double& x) { x = __longlong_as_double(word); }

// `put_word` writes a word; `look_word` reads a word that another block may have written, without waiting for it.
template <Scope SCOPE = Scope::GPU> __device__ inline void put_word(uint64* to, uint64 word) {
    if constexpr (SCOPE == Scope::GPU) asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
    else asm volatile("st.relaxed.sys.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ inline void put_word(unsigned* to, unsigned word) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to), "r"(word) : "memory");
}
template <Scope SCOPE = Scope::GPU> __device__ inline uint64 look_word(const uint64* from) {
    uint64 word;
    if constexpr (SCOPE == Scope::GPU)
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    else asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ inline unsigned look_word(const unsigned* from) {
    unsigned word;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(word) : "l"(from) : "memory");
    return word;
}

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

__device__ inline uint64 joined(unsigned low, unsigned high) { return uint64(high) << 32 | low; }

struct alignas(8) PlainWord {
    static constexpr int WORDS = 2;
    unsigned words[WORDS];

    __device__ inline void put(PlainWord* to) const { put_word(reinterpret_cast<uint64*>(to), joined(words[0], words[1])); }
    static __device__ inline PlainWord look(const PlainWord* from) {
        const uint64 word = look_word(reinterpret_cast<const uint64*>(from));
        return {{unsigned(word), unsigned(word >> 32)}};
    }
    __device__ inline void set_tag(unsigned) {}
    __device__ inline bool has(unsigned) const { return joined(words[0], words[1]) != EMPTY; }
};

struct alignas(8) TaggedWord {
    static constexpr int WORDS = 1;
    unsigned words[WORDS], tag;

    __device__ inline void put(TaggedWord* to) const {
        put_word<Scope::SYSTEM>(reinterpret_cast<uint64*>(to), joined(words[0], tag));
    }
    static __device__ inline TaggedWord look(const TaggedWord* from) {
        const uint64 word = look_word<Scope::SYSTEM>(reinterpret_cast<const uint64*>(from));
        return {{unsigned(word)}, unsigned(word >> 32)};
    }
    __device__ inline void set_tag(unsigned to) { tag = to; }
    __device__ inline bool has(unsigned expected) const { return tag == expected; }
};

// Sixteen bytes that one access moves.  They are marked to be evicted from L2 last: otherwise, rows that stream through L2
// would evict them, and a reader would fetch them from device memory.
__device__ inline void put_packet(void* to, uint64 low, uint64 high) {
    asm volatile("{\n\t.reg .b128 all;\n\t.reg .b64 keep;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n\tmov.b128 all, {%1, %2};\n\t"
                 "st.relaxed.gpu.global.L2::cache_hint.b128 [%0], all, keep;\n\t}"
                 :: "l"(to), "l"(low), "l"(high) : "memory");
}
__device__ inline void look_packet(const void* from, uint64& low, uint64& high) {
    asm volatile("{\n\t.reg .b128 all;\n\t.reg .b64 keep;\n\t"
                 "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;\n\t"
                 "ld.relaxed.gpu.global.L2::cache_hint.b128 all, [%2], keep;\n\tmov.b128 {%0, %1}, all;\n\t}"
                 : "=l"(low), "=l"(high) : "l"(from) : "memory");
}

struct alignas(16) Packet {
    static constexpr int WORDS = 3;
    unsigned words[WORDS], tag;

    __device__ inline void put(Packet* to) const { put_packet(to, joined(words[0], words[1]), joined(words[2], tag)); }
    static __device__ inline Packet look(const Packet* from) {
        uint64 low, high;
        look_packet(from, low, high);
        return {{unsigned(low), unsigned(low >> 32), unsigned(high)}, unsigned(high >> 32)};
    }
    __device__ inline void set_tag(unsigned to) { tag = to; }
    __device__ inline bool has(unsigned expected) const { return tag == expected; }
};

// A message of COUNT words of 32 bits, and its numbers by the position of their first word.
template <class Unit, int COUNT> struct Message {
    static constexpr int UNITS = (COUNT - 1) / Unit::WORDS + 1;
    Unit units[UNITS];

    __device__ inline unsigned& word(int i) { return units[i / Unit::WORDS].words[i % Unit::WORDS]; }
    __device__ inline void set(int i, unsigned x) { word(i) = x; }
    __device__ inline void set(int i, uint64 x) { word(i) = unsigned(x), word(i + 1) = unsigned(x >> 32); }
    __device__ inline void set(int i, float x) { word(i) = __float_as_uint(x); }
    __device__ inline void set(int i, double x) { set(i, uint64(__double_as_longlong(x))); }
    __device__ inline void set(int i, DoubleDouble x) { set(i, x.high), set(i + 2, x.low); }
    __device__ inline void get(int i, unsigned& x) { x = word(i); }
    __device__ inline void get(int i, uint64& x) { x = joined(word(i), word(i + 1)); }
    __device__ inline void get(int i, float& x) { x = __uint_as_float(word(i)); }
    __device__ inline void get(int i, double& x) { x = __longlong_as_double(joined(word(i), word(i + 1))); }
    __device__ inline void get(int i, DoubleDouble& x) { get(i, x.high), get(i + 2, x.low); }
};

// A place in memory for a message.  A reader looks until the message is WRITTEN.
template <class Unit, int COUNT> struct Channel {
    using Sent = Message<Unit, COUNT>;
    Sent* at;

    __device__ inline Channel operator[](int64 i) const { return {at + i}; }
    // Writes a message with a tag; a PlainWord has none.  The words that are left of the last unit get the tag too, and the reader
    // compares all of them: otherwise the assembler would load it by narrower accesses, the tag after the others.
    __device__ inline void put(Sent sent, unsigned tag = 0) const {
#pragma unroll
        for (int i = COUNT; i < Sent::UNITS * Unit::WORDS; ++i) sent.word(i) = tag;
#pragma unroll
        for (int i = 0; i < Sent::UNITS; ++i) sent.units[i].set_tag(tag);
#pragma unroll
        for (int i = 0; i < Sent::UNITS; ++i) sent.units[i].put(at->units + i);
    }
    __device__ inline Sent look() const {
        Sent sent;
#pragma unroll
        for (int i = 0; i < Sent::UNITS; ++i) sent.units[i] = Unit::look(at->units + i);
        return sent;
    }
    static __device__ inline Status status(Sent sent, unsigned tag = 0) {
        bool come = true;
#pragma unroll
        for (int i = 0; i < Sent::UNITS; ++i) come &= sent.units[i].has(tag);
#pragma unroll
        for (int i = COUNT; i < Sent::UNITS * Unit::WORDS; ++i) come &= sent.word(i) == tag;
        return come ? Status::WRITTEN : Status::PENDING;
    }
    // Makes every unit PENDING, whatever tag is waited for.
    __device__ inline void clear() const {
        Sent empty;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) empty.word(i) = unsigned(EMPTY);
        put(empty, unsigned(EMPTY));
    }
};

// A channel for one value made of doubles.  After `look`, `take` waits for what had not come, empties the channel, and
// returns the value; other work may be done between the two.
template <class T> struct Mailbox : Channel<PlainWord, sizeof(T) / 4> {
    using typename Channel<PlainWord, sizeof(T) / 4>::Sent;
    static constexpr int DOUBLES = sizeof(T) / sizeof(double);

    __device__ inline explicit Mailbox(uint64* at) : Channel<PlainWord, sizeof(T) / 4>{reinterpret_cast<Sent*>(at)} {}
    __device__ inline void put(const T& value) const {
        Sent sent;
#pragma unroll
        for (int i = 0; i < DOUBLES; ++i) sent.set(2 * i, bits(reinterpret_cast<const double*>(&value)[i]));
        Channel<PlainWord, sizeof(T) / 4>::put(sent);
    }
    __device__ inline T take(Sent sent) const {
        while (this->status(sent) == Status::PENDING) sent = this->look();
        this->clear();
        T value;
#pragma unroll
        for (int i = 0; i < DOUBLES; ++i) sent.get(2 * i, reinterpret_cast<double*>(&value)[i]);
        return value;
    }
    __device__ inline T wait_and_take() const { return take(this->look()); }
};
