// The parameter of the kernel in sample.cuh, and what it says of a row.

struct Sampling {
    const X* x;
    // One for each row; where the pointer is null, the number below counts for all rows.  Filters are int64 and double, or,
    // as `narrow` says, int and float.
    const float* temperature; const void* top_k; const void* top_p; const void* min_p;
    const int64* seed; const int64* offset;
    int64* token; float* logprob; float* lse; int64* kept; unsigned char* valid;
    int64* top_tokens; float* top_logprobs;
    // The least sort key that is kept, min_p apart, and the mass that is kept, over that of the largest token; or null.
    uint64* kept_key; double* kept_sum;
    int64 stride, cols, slice;   // in tokens: from row to row, of a row, of a block
    int64 first;   // 1 to keep the lowest ids of the tokens that are equal at a threshold
    int64 raw;     // 1 for log-probabilities of all tokens at the temperature 1
    int64 top;     // number of the largest log-probabilities
    int64 each;    // so many adjacent rows share their parameters; the offset grows by 1 from one of them to the next
    int64 narrow;  // 1 for top_k, 2 for top_p and 4 for min_p that have 32 bits
    // The same for all rows.  A filter that is not given has top_k 0, top_p 1 or min_p 0.
    int64 temperature_bits, top_k_number;
    double top_p_number, min_p_number;
    int64 seed_number, offset_number;

    // The place of a row's parameters; the others take it, not the row.
    __device__ inline int64 place(int64 row) const { return each == 1 ? row : unsigned(row) / unsigned(each); }

    __device__ inline float temperature_of(int64 at) const {
        return temperature ? temperature[at] : __int_as_float(int(temperature_bits));
    }
    __device__ inline int64 top_k_of(int64 at) const { return of_row<int64, int>(top_k, at, 1, top_k_number); }
    __device__ inline double top_p_of(int64 at) const { return of_row<double, float>(top_p, at, 2, top_p_number); }
    __device__ inline double min_p_of(int64 at) const { return of_row<double, float>(min_p, at, 4, min_p_number); }

    template <class T, class Narrow>
    __device__ inline T of_row(const void* filter, int64 at, int64 flag, T number) const {
        if (!filter) return number;
        return narrow & flag ? T(static_cast<const Narrow*>(filter)[at]) : static_cast<const T*>(filter)[at];
    }
};

// Reads the parameters of a row, checks them, and derives what the row needs.
__device__ inline void prepare(const Sampling& p, int64 number, Row& row) {
    const int64 at = p.place(number);
    const float temperature = p.temperature_of(at);
    const double top_p = p.top_p_of(at), min_p = p.min_p_of(at);
    const int64 k = p.top_k_of(at);
    row.seed = p.seed ? p.seed[at] : p.seed_number;
    row.offset = (p.offset ? p.offset[at] : p.offset_number) + number - at * p.each;
    row.first = p.first;
    row.valid = temperature >= 0 && temperature < INF && top_p == top_p && min_p == min_p;
    row.greedy = temperature == 0;
    row.k = k > 0 && k < p.cols ? k : 0, row.top_p = row.greedy ? 1 : top_p;
    row.divisor = row.greedy || !row.valid ? 1 : double(temperature);
    row.by_mass = !row.greedy && !row.k;
    const int64 wanted = max(p.top, row.greedy ? int64(1) : row.k);
    row.fits = wanted <= MOST_CANDIDATES, row.wanted = row.fits ? int(wanted) : 0;
}

// Computes the numbers that depend on a division or a logarithm, and so take long, in a warp beside that of `prepare`.
__device__ inline void prepare_rate(const Sampling& p, int64 number, Row& row) {
    const int64 at = p.place(number);
    const float temperature = p.temperature_of(at);
    const double divisor = temperature > 0 && temperature < INF ? temperature : 1, top_p = p.top_p_of(at);
    row.rate = fmin(float(LOG2_E / divisor), LARGEST_FLOAT32);
    // Behind this distance from the largest score, 2^32 tokens have less than 1 - top_p, or 1e-9, of its mass together.
    row.span = float(divisor * LOG_2) * (32 - log_of_two(fmax(float(1 - top_p), 1e-9f)));
}
// The least score, minus the largest, that min_p keeps of a row.
__device__ inline void prepare_least(const Sampling& p, int64 number, Row& row) {
    const int64 at = p.place(number);
    const double divisor = p.temperature_of(at), min_p = p.min_p_of(at);
    row.least = divisor == 0 || min_p <= 0 ? -INF : divisor * natural_log(fmin(min_p, 1.0));
}
