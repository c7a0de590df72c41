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

    template <class T, class Narrow>
    __device__ inline T of_row(const void* filter, int64 at, int64 flag, T number) const {
        if (!filter) return number;
        return narrow & flag ? T(static_cast<const Narrow*>(filter)[at]) : static_cast<const T*>(filter)[at];
    }
};

// The parameters of a row, as they are given: loaded by the threads that prepare the row.
struct Given {
    float temperature;
    int64 k;
    double top_p, min_p;
    uint64 seed, offset;

    __device__ inline void load(const Sampling& p, int64 row) {
        const int64 at = p.each == 1 ? row : unsigned(row) / unsigned(p.each);
        temperature = p.temperature ? p.temperature[at] : __int_as_float(int(p.temperature_bits));
        k = p.of_row<int64, int>(p.top_k, at, 1, p.top_k_number);
        top_p = p.of_row<double, float>(p.top_p, at, 2, p.top_p_number);
        min_p = p.of_row<double, float>(p.min_p, at, 4, p.min_p_number);
        seed = p.seed ? p.seed[at] : p.seed_number;
        // Only the offset depends on the row's place among those with the same parameters.
        offset = (p.offset ? p.offset[at] : p.offset_number) + row - at * p.each;
    }
};

// Checks the parameters of a row, and derives what the row needs.
__device__ inline void prepare(const Sampling& p, const Given& given, Row& row) {
    const float temperature = given.temperature;
    row.seed = given.seed, row.offset = given.offset, row.first = p.first;
    row.valid = temperature >= 0 && temperature < INF && given.top_p == given.top_p && given.min_p == given.min_p;
    row.greedy = temperature == 0;
    row.k = given.k > 0 && given.k < p.cols ? given.k : 0, row.top_p = row.greedy ? 1 : given.top_p;
    row.divisor = row.greedy || !row.valid ? 1 : double(temperature);
    row.by_mass = BY_MASS && !row.greedy && !row.k;
    const int64 wanted = max(p.top, row.greedy ? int64(1) : row.k);
    row.fits = wanted <= MOST_CANDIDATES, row.wanted = row.fits ? int(wanted) : 0;
}

// These two compute what depends on a division or a logarithm, and so takes long, in two warps beside that of `prepare`.
__device__ inline void prepare_rate(const Given& given, Row& row) {
    const double divisor = given.temperature > 0 && given.temperature < INF ? given.temperature : 1;
    row.rate = fmin(float(LOG2_E / divisor), LARGEST_FLOAT32), row.inverse = 1 / divisor;
    // Behind this distance from the largest score, 2^32 tokens have less than 1 - top_p, or 1e-9, of its mass together.
    row.span = float(divisor * LOG_2) * (32 - log_of_two(fmax(float(1 - given.top_p), 1e-9f)));
}
// The least score, minus the largest, that min_p keeps of a row.
__device__ inline void prepare_least(const Given& given, Row& row) {
    const double divisor = given.temperature;
    row.least = divisor == 0 || given.min_p <= 0 ? -INF : divisor * natural_log(fmin(given.min_p, 1.0));
}
