// x (M, K) @ weight (N, K)^T + bias, float32 or bfloat16 in and out, float32 inside; made for few rows.
//
// Every output is one dot product summed in one order, whatever M is and whichever thread computes it: the bits of a
// row depend on that row alone. Weights are read where they lie, once per block of rows, a piece at a time: all rows
// use it while the next one is on its way to the caches. Few rows, which wait for memory, read several distant columns
// at once, from end to end: a core fetches ahead of each of so many streams. Sums over lanes come last.
#include <vector>

#include "vectors.h"

constexpr int TILE_ROWS = 4, LINE = 64, STREAMS = 4;
constexpr int64_t AHEAD = 512;  // bytes, in each stream
constexpr int64_t BLOCK_ROWS = 64, BLOCK_COLUMNS = 24;
constexpr int64_t DEPTH = 1024;  // of a piece, so that x of a strip stays in the first-level cache

static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, uint16_t* out) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    *out = is_nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// To float32, in the order of `load`, up to a whole STEP.
template <typename T>
static void unpack(const T* x, float* out, int64_t K) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) store(out + k, load<0>(x + k), load<1>(x + k));
    if (k == K) return;
    T tail[STEP];
    copy_tail(x + k, K - k, tail);
    store(out + k, load<0>(tail), load<1>(tail));
}

// `columns` rows of the weight, `stride` apart, by `depth`, which is whole STEPs; x has `pitch` from row to row.
template <typename T>
struct Piece {
    const T* weight;
    int64_t stride, depth, columns, pitch;
    const T* next;  // the piece to fetch meanwhile
};

// Unfinished sums of rows by columns, and how far apart they lie.
struct Kept {
    Floats* first;
    int64_t row, column;
    Floats& at(int64_t r, int64_t c) const { return first[r * row + c * column]; }
};

template <int HALF, typename T, int ROWS, int COLUMNS>
static inline void accumulate(Floats (&sums)[ROWS][COLUMNS], const float* x, int64_t pitch, const T* weight,
                              int64_t stride) {
    Floats w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) {
        w[c] = load<HALF>(weight + c * stride);
        if (ROWS > 1) hold(w[c]);
    }
    for (int r = 0; r < ROWS; r++) {
        Floats value = load<HALF>(x + r * pitch);
        hold(value);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(value, w[c], sums[r][c]);
    }
}

// Columns from c on. `ahead` is what to fetch for the first of them, `share` bytes a STEP.
template <typename T, int ROWS, int COLUMNS>
static void tile(const float* x, const Piece<T>& piece, int64_t c, Kept kept, const char* ahead, int64_t share) {
    const int64_t stride = piece.stride, pitch = piece.pitch, depth = piece.depth;
    const T* const weight = piece.weight + c * stride;
    ahead += c * stride * sizeof(T);
    Floats sums[ROWS][COLUMNS];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COLUMNS; i++) sums[r][i] = kept.at(r, c + i);
    for (int64_t k = 0; k < depth; k += STEP, ahead += share) {
        for (int i = 0; i < COLUMNS; i++)
            for (size_t line = 0; line < STEP * sizeof(T); line += LINE)
                __builtin_prefetch(ahead + i * stride * sizeof(T) + line);
        accumulate<0>(sums, x + k, pitch, weight + k, stride);
        accumulate<1>(sums, x + k, pitch, weight + k, stride);
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < COLUMNS; i++) kept.at(r, c + i) = sums[r][i];
}

// ROWS rows by all of a piece's columns: as many at a time as keep the adders busy and fit in registers.
template <typename T, int ROWS>
static void strip(const float* x, const Piece<T>& piece, Kept kept, const char* ahead, int64_t share) {
    constexpr int COLUMNS = ROWS == 1 ? 8 : ROWS == 3 ? 3 * LANES / 8 : LANES / ROWS;
    int64_t c = 0;
    for (; c + COLUMNS <= piece.columns; c += COLUMNS) tile<T, ROWS, COLUMNS>(x, piece, c, kept, ahead, share);
    for (; c < piece.columns; c++) tile<T, ROWS, 1>(x, piece, c, kept, ahead, share);
}

// Adds a piece's products to what is kept, in strips of rows as even as can be; each fetches its share of the next.
template <typename T>
static void add(const float* x, int64_t rows, const Piece<T>& piece, Floats* kept) {
    const int64_t strips = (rows + TILE_ROWS - 1) / TILE_ROWS;
    const int64_t share = (STEP * int64_t(sizeof(T)) + strips - 1) / strips;
    for (int64_t s = 0; s < strips; s++) {
        const int64_t r = rows * s / strips, height = rows * (s + 1) / strips - r;
        auto* const one = height == 1   ? strip<T, 1>
                          : height == 2 ? strip<T, 2>
                          : height == 3 ? strip<T, 3>
                                        : strip<T, 4>;
        const char* const ahead = (const char*)piece.next + s * share * (piece.depth / STEP);
        one(x + r * piece.pitch, piece, {kept + r * BLOCK_COLUMNS, BLOCK_COLUMNS, 1}, ahead, share);
    }
}

template <typename T>
static void finish(const Floats* kept, const T* bias, T* out, int64_t columns) {
    for (int64_t c = 0; c < columns; c += SUMS) {
        const int64_t count = columns - c < SUMS ? columns - c : SUMS;
        const Eight eight = sums_of(kept + c);
        float sums[SUMS];
        T results[SUMS];
        memcpy(sums, &eight, sizeof sums);
        for (int64_t i = 0; bias && i < count; i++) sums[i] += widen(bias[c + i]);
        for (int i = 0; i < SUMS; i++) narrow(sums[i], results + i);
        memcpy(out + c, results, count * sizeof(T));
    }
}

// ROWS rows by columns from begin on, as many as divide into streams; returns where they end. A tile takes the next
// column of each stream.
template <typename T, int ROWS>
static int64_t streams(const float* x, int64_t pitch, const T* weight, const T* bias, T* out, int64_t begin,
                       int64_t end, int64_t N, int64_t K) {
    constexpr int COUNT = ROWS == 3 ? 3 : LANES / ROWS < STREAMS ? LANES / ROWS : STREAMS;
    const int64_t length = (end - begin) / (COUNT * SUMS) * SUMS;
    const int64_t whole = K / STEP * STEP;
    Floats kept[ROWS][COUNT][SUMS];
    T tails[COUNT * STEP];
    for (int64_t n = begin; n < begin + length; n += SUMS) {
        memset((void*)kept, 0, sizeof kept);
        for (int c = 0; c < SUMS; c++) {
            const T* const w = weight + (n + c) * K;
            const Kept sums{kept[0][0] + c, COUNT * SUMS, SUMS};
            tile<T, ROWS, COUNT>(x, {w, length * K, whole, COUNT, pitch, w}, 0, sums, (const char*)w + AHEAD,
                                 STEP * sizeof(T));
            if (whole == K) continue;
            for (int i = 0; i < COUNT; i++) copy_tail(w + i * length * K + whole, K - whole, tails + i * STEP);
            tile<T, ROWS, COUNT>(x + whole, {tails, STEP, STEP, COUNT, pitch, tails}, 0, sums, (const char*)tails, 0);
        }
        for (int r = 0; r < ROWS; r++)
            for (int64_t i = 0, first = n; i < COUNT; i++, first += length)
                finish(kept[r][i], bias ? bias + first : nullptr, out + r * N + first, SUMS);
    }
    return begin + COUNT * length;
}

// Columns [begin, end) of one thread.
template <typename T>
static void part(const float* x, int64_t pitch, const T* weight, const T* bias, T* out, int64_t rows, int64_t begin,
                 int64_t end, int64_t N, int64_t K) {
    if (rows <= TILE_ROWS) {
        auto* const few = rows == 1   ? streams<T, 1>
                          : rows == 2 ? streams<T, 2>
                          : rows == 3 ? streams<T, 3>
                                      : streams<T, 4>;
        begin = few(x, pitch, weight, bias, out, begin, end, N, K);
    }
    Floats kept[BLOCK_ROWS * BLOCK_COLUMNS];
    T tails[BLOCK_COLUMNS * STEP];
    const int64_t whole = K / STEP * STEP;
    for (int64_t n = begin; n < end; n += BLOCK_COLUMNS) {
        const int64_t columns = end - n < BLOCK_COLUMNS ? end - n : BLOCK_COLUMNS;
        const T* const w = weight + n * K;
        memset((void*)kept, 0, rows * BLOCK_COLUMNS * sizeof(Floats));
        for (int64_t k = 0; k < whole; k += DEPTH) {
            const bool is_last = k + DEPTH >= whole;
            const T* const next = is_last ? w + BLOCK_COLUMNS * K : w + k + DEPTH;
            add<T>(x + k, rows, {w + k, K, is_last ? whole - k : DEPTH, columns, pitch, next}, kept);
        }
        if (whole < K) {
            for (int64_t c = 0; c < columns; c++) copy_tail(w + c * K + whole, K - whole, tails + c * STEP);
            add<T>(x + whole, rows, {tails, STEP, STEP, columns, pitch, tails}, kept);
        }
        for (int64_t r = 0; r < rows; r++)
            finish(kept + r * BLOCK_COLUMNS, bias ? bias + n : nullptr, out + r * N + n, columns);
    }
}

template <typename T>
static void linear(const T* x, const T* weight, const T* bias, T* out, int64_t M, int64_t N, int64_t K, int threads) {
    static thread_local std::vector<float> memory;
    const int64_t blocks = (M + BLOCK_ROWS - 1) / BLOCK_ROWS, pitch = (K + STEP - 1) / STEP * STEP;
    const int64_t width = ((N + threads - 1) / threads + SUMS - 1) / SUMS * SUMS;
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t begin = M * b / blocks, rows = M * (b + 1) / blocks - begin;
        if (memory.size() < size_t(rows * pitch)) memory.resize(rows * pitch);
        float* const scratch = memory.data();
        for (int64_t r = 0; r < rows; r++) unpack(x + (begin + r) * K, scratch + r * pitch, K);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < N; n += width)
            part(scratch, pitch, weight, bias, out + begin * N, rows, n, n + width < N ? n + width : N, N, K);
    }
}

extern "C" void linear_bfloat16(const void* x, const void* weight, const void* bias, void* out, int64_t M, int64_t N,
                                int64_t K, int threads) {
    linear((const uint16_t*)x, (const uint16_t*)weight, (const uint16_t*)bias, (uint16_t*)out, M, N, K, threads);
}
extern "C" void linear_float32(const void* x, const void* weight, const void* bias, void* out, int64_t M, int64_t N,
                               int64_t K, int threads) {
    linear((const float*)x, (const float*)weight, (const float*)bias, (float*)out, M, N, K, threads);
}

// Row m of x by weight group[m] of G, each (N, K). Rows of one group are multiplied together, in their order.
template <typename T>
static void grouped(const T* x, const T* weight, const int64_t* group, T* out, int64_t M, int64_t G, int64_t N,
                    int64_t K, int threads) {
    static thread_local std::vector<int64_t> ends, order;
    static thread_local std::vector<T> rows, products;
    ends.assign(G + 1, 0), order.resize(M);
    for (int64_t m = 0; m < M; m++) ends[group[m] + 1]++;
    for (int64_t g = 0; g < G; g++) ends[g + 1] += ends[g];
    for (int64_t m = 0; m < M; m++) order[ends[group[m]]++] = m;  // now ends[g] is where group g ends
    for (int64_t g = 0, begin = 0; g < G; begin = ends[g++]) {
        const int64_t count = ends[g] - begin, *const own = order.data() + begin;
        if (count == 0) continue;
        if (count == 1) {
            linear(x + *own * K, weight + g * N * K, (const T*)nullptr, out + *own * N, 1, N, K, threads);
            continue;
        }
        rows.resize(count * K), products.resize(count * N);
        for (int64_t i = 0; i < count; i++) memcpy(rows.data() + i * K, x + own[i] * K, K * sizeof(T));
        linear(rows.data(), weight + g * N * K, (const T*)nullptr, products.data(), count, N, K, threads);
        for (int64_t i = 0; i < count; i++) memcpy(out + own[i] * N, products.data() + i * N, N * sizeof(T));
    }
}

extern "C" void grouped_bfloat16(const void* x, const void* weight, const int64_t* group, void* out, int64_t M,
                                 int64_t G, int64_t N, int64_t K, int threads) {
    grouped((const uint16_t*)x, (const uint16_t*)weight, group, (uint16_t*)out, M, G, N, K, threads);
}
extern "C" void grouped_float32(const void* x, const void* weight, const int64_t* group, void* out, int64_t M,
                                int64_t G, int64_t N, int64_t K, int threads) {
    grouped((const float*)x, (const float*)weight, group, (float*)out, M, G, N, K, threads);
}
