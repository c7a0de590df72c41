// The bitonic sort of a list of keys in shared memory.

// Sorts `count` keys, the largest first.  The list has room for `room` keys, a power of two, and ends with zeros, which no
// key is below.  `lane` is the number of a thread among the LANES that share the list, and sync() is their barrier, which
// comes last.
template <int LANES, class Sync>
__device__ inline void sort_list(uint64* list, int count, int room, int lane, const Sync& sync) {
#pragma unroll 1
    for (int i = count + lane; i < room; i += LANES) list[i] = 0;
    sync();
#pragma unroll 1
    for (int run = 2; run <= room; run *= 2)
#pragma unroll 1
        for (int step = run / 2; step; step /= 2) {
#pragma unroll 1
            for (int i = lane; i < room / 2; i += LANES) {
                const int a = 2 * i - (i & (step - 1)), b = a + step;
                const uint64 first = list[a], second = list[b];
                if ((first < second) == !(a & run)) list[a] = second, list[b] = first;
            }
            sync();
        }
}
