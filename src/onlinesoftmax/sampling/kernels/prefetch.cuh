// The logits of a block of unfiltered.cuh, which each thread loads for itself, ahead of their use.

constexpr int GROUPS = 4, TOKENS = 4 * GROUPS;   // of a thread in a step: groups of four adjacent tokens
constexpr int LOADS = TOKENS / VECTOR;           // of 16 bytes
constexpr unsigned TILE = TOKENS * THREADS;

// The logits of a thread, step by step, in its own places of shared memory; -inf past the end of the slice.
struct Stream {
    const X* row;            // the slice
    const X* ahead;          // the thread's first chunk of the step that is loaded next
    Chunk<X, VECTOR>* own;   // the thread's first place
    unsigned count;          // tokens of the slice
    unsigned steps, whole;   // steps, and those without tokens past the end
    Chunk<X, TOKENS> next;   // unless ALIGNED

    // The first token of chunk i, and of a group of four tokens, from the beginning of the slice on.
    __device__ static inline unsigned chunk(unsigned step, int i) { return step * TILE + (i * THREADS + threadIdx.x) * VECTOR; }
    __device__ static inline unsigned token(unsigned step, int group) {
        return chunk(step, group * 4 / VECTOR) + group * 4 % VECTOR;
    }
    // The distance of a group from the first one of a step.
    __device__ static constexpr unsigned distance(int group) {
        return group * 4 / VECTOR * THREADS * VECTOR + group * 4 % VECTOR;
    }
    __device__ inline Chunk<X, VECTOR>* place(unsigned step, int i) const {
        return own + (step % STAGES * LOADS + i) * THREADS;
    }
    // Loads the chunks `begin` to `end` - 1 of a step, or what exists of them.
    template <bool WHOLE> __device__ inline void load(unsigned step, const X* from, int begin, int end) {
        constexpr int NEXT = THREADS * VECTOR;
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (i < begin || i >= end) continue;
            const unsigned first = WHOLE ? 0 : chunk(step, i);
            if constexpr (ALIGNED) {
                if (WHOLE || (first < count && count - first >= VECTOR)) copy_async(place(step, i), from + i * NEXT);
            } else {
#pragma unroll
                for (int j = 0; j < VECTOR; ++j)
                    if (WHOLE || first + j < count) next.at[i * VECTOR + j] = load_one(from + i * NEXT + j);
            }
        }
    }
    __device__ inline void load(unsigned step, const X* from, int begin, int end) {
        if (step < whole) load<true>(step, from, begin, end);
        else if (step < steps) load<false>(step, from, begin, end);
        if constexpr (ALIGNED) commit();
    }
    __device__ inline void load(unsigned step) {
        const X* const from = ahead;
        ahead += TILE;
        asm volatile("" : "+l"(ahead));
        load(step, from, 0, LOADS);
    }
    __device__ inline void begin() {
        if constexpr (ALIGNED) {
            // The first chunk comes by itself, because something is made of it while the others are under way.
            load(0, ahead, 0, 1), load(0, ahead, 1, LOADS);
            ahead += TILE;
            for (int i = 1; i < STAGES; ++i) load(i);
        } else {
            load(0);
        }
    }
    // Waits for the first chunk of the first step.
    __device__ inline void peek(float (&z)[VECTOR]) {
        if constexpr (ALIGNED) wait_groups(STAGES);
        else arrive(0);
        if (whole == 0) complete(0, 1);
        const Chunk<X, VECTOR> first = *place(0, 0);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) z[j] = wide(first, j);
    }
    // Waits for the logits of a step.  Unless ALIGNED, they travel through registers, and the next ones set out.
    __device__ inline void arrive(unsigned step) {
        if constexpr (ALIGNED) wait_groups(STAGES - 1);
        else {
#pragma unroll
            for (int i = 0; i < LOADS; ++i) *place(step, i) = reinterpret_cast<const Chunk<X, VECTOR>*>(&next)[i];
            load(step + 1);
        }
        if (step >= whole) complete(step, LOADS);
    }
    // Completes the first chunks of the last step.
    __device__ inline void complete(unsigned step, int chunks) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const unsigned first = chunk(step, i);
            if (i >= chunks || (first < count && count - first >= VECTOR)) continue;
            Chunk<X, VECTOR> to = *place(step, i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                if (first + j >= count) clear(to.at[j], false);
                else if (ALIGNED) to.at[j] = row[first + j];
            }
            *place(step, i) = to;
        }
    }
    __device__ inline void take(float (&z)[TOKENS], unsigned step) const {
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const Chunk<X, VECTOR> chunk = *place(step, i);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) z[i * VECTOR + j] = wide(chunk, j);
        }
    }
    __device__ inline void take_group(float (&z)[4], unsigned step, int group) const {
        const X* const from = place(step, group * 4 / VECTOR)->at + group * 4 % VECTOR;
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] = wide(from[j]);
    }
    // Loads what comes after all steps that are under way, in the places of a step that is done.
    __device__ inline void follow(unsigned step) {
        if constexpr (ALIGNED) load(step + STAGES);
    }
};
