// x (M, K) @ weight (N, K)^T + bias, float32 or bfloat16 in and out, float32 inside; made for few rows.
//
// Every output is one dot product summed in one order, whatever M is and whichever thread computes it: the bits of a
// row depend on that row alone. Weights are read where they lie, once per block of rows.
#include <vector>

#include "vectors.h"

constexpr int TILE_COLUMNS = LANES / 4, TILE_ROWS = 4;
constexpr int64_t BLOCK_ROWS = 32;  // rows whose float32 copies stay in the second-level cache
constexpr int64_t BLOCK_COLUMNS = 12;

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
static void unpack(const float* x, float* out, int64_t K) { memcpy(out, x, K * sizeof(float)); }
static void unpack(const uint16_t* x, float* out, int64_t K) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP)
        for (int i = 0; i < LANES; i++) {
            out[k + i] = widen(x[k + 2 * i]);
            out[k + LANES + i] = widen(x[k + 2 * i + 1]);
        }
    for (; k < K; k++) out[k] = widen(x[k]);
}

template <int HALF, typename T, int ROWS, int COLUMNS>
static inline void accumulate(Floats (&sums)[ROWS][COLUMNS], const float* x, const T* weight, int64_t K) {
    Floats w[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) w[c] = load<HALF>(weight + c * K);
    for (int r = 0; r < ROWS; r++) {
        const Floats value = load<HALF>(x + r * K);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(value, w[c], sums[r][c]);
    }
}

template <typename T, int ROWS, int COLUMNS>
static void tile(const float* x, const T* weight, const T* bias, T* out, int64_t N, int64_t K, bool is_first) {
    Floats sums[ROWS][COLUMNS] = {};
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
        // Weights are read by the first rows of a block: the processor does not guess in time where the next ones lie.
        for (int c = 0; c < COLUMNS && is_first; c++) __builtin_prefetch(weight + (c + 2 * COLUMNS) * K + k);
        accumulate<0>(sums, x + k, weight + k, K);
        accumulate<1>(sums, x + k, weight + k, K);
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float parts[LANES], rest = 0;
            memcpy(parts, &sums[r][c], sizeof parts);
            for (int width = LANES / 2; width; width /= 2)
                for (int i = 0; i < width; i++) parts[i] += parts[i + width];
            for (int64_t i = k; i < K; i++) rest += x[r * K + i] * widen(weight[c * K + i]);
            narrow(parts[0] + rest + (bias ? widen(bias[c]) : 0.0f), out + r * N + c);
        }
}

// ROWS rows by all of a block's columns, COLUMNS at a time; few rows need many columns to keep the adders busy.
template <typename T, int ROWS, int COLUMNS>
static void strip(const float* x, const T* weight, const T* bias, T* out, int64_t columns, int64_t N, int64_t K,
                  bool is_first) {
    int64_t c = 0;
    for (; c + COLUMNS <= columns; c += COLUMNS)
        tile<T, ROWS, COLUMNS>(x, weight + c * K, bias ? bias + c : nullptr, out + c, N, K, is_first);
    for (; c < columns; c++) tile<T, ROWS, 1>(x, weight + c * K, bias ? bias + c : nullptr, out + c, N, K, is_first);
}

template <typename T>
static void linear(const T* x, const T* weight, const T* bias, T* out, int64_t M, int64_t N, int64_t K, int threads) {
    static thread_local std::vector<float> memory;
    if (memory.size() < size_t(BLOCK_ROWS * K)) memory.resize(BLOCK_ROWS * K);
    float* const scratch = memory.data();
    for (int64_t begin = 0; begin < M; begin += BLOCK_ROWS) {
        int64_t rows = M - begin < BLOCK_ROWS ? M - begin : BLOCK_ROWS;
        for (int64_t r = 0; r < rows; r++) unpack(x + (begin + r) * K, scratch + r * K, K);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < N; n += BLOCK_COLUMNS) {
            int64_t columns = N - n < BLOCK_COLUMNS ? N - n : BLOCK_COLUMNS, r = 0;
            const T *w = weight + n * K, *b = bias ? bias + n : nullptr;
            T* target = out + begin * N + n;
            for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
                strip<T, TILE_ROWS, TILE_COLUMNS>(scratch + r * K, w, b, target + r * N, columns, N, K, r == 0);
            for (; r + 2 <= rows; r += 2) strip<T, 2, 4>(scratch + r * K, w, b, target + r * N, columns, N, K, r == 0);
            for (; r < rows; r++) strip<T, 1, 6>(scratch + r * K, w, b, target + r * N, columns, N, K, r == 0);
        }
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
