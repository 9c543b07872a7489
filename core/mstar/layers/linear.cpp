// x (M, K) @ weight (N, K)^T + bias for few rows, float32 and bfloat16 in and out, float32 inside.
//
// Every output is one dot product summed in one order, whatever M is and whichever thread computes it: the bits of a
// row depend on that row alone. Weights are read where they lie, once per block of rows.
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE_ROWS = 4, TILE_COLUMNS = 4;
#else
constexpr int LANES = 8, TILE_ROWS = 4, TILE_COLUMNS = 2;
#endif
constexpr int64_t BLOCK_ROWS = 32;  // rows whose float32 copies stay in the second-level cache

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

static inline Floats load(const float* p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline Floats load(const uint16_t* p) {
    Halves half;
    memcpy(&half, p, sizeof half);
    return (Floats)(__builtin_convertvector(half, Words) << 16);
}
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

template <typename T, int ROWS, int COLUMNS>
static void tile(const float* x, const T* weight, const T* bias, T* out, int64_t N, int64_t K, int64_t stride) {
    Floats sums[ROWS][COLUMNS] = {};
    int64_t k = 0;
    for (; k + LANES <= K; k += LANES) {
        Floats w[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) w[c] = load(weight + c * K + k);
        for (int r = 0; r < ROWS; r++) {
            Floats value = load(x + r * stride + k);
            for (int c = 0; c < COLUMNS; c++) sums[r][c] += value * w[c];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++) {
            float parts[LANES], rest = 0;
            memcpy(parts, &sums[r][c], sizeof parts);
            for (int width = LANES / 2; width; width /= 2)
                for (int i = 0; i < width; i++) parts[i] += parts[i + width];
            for (int64_t i = k; i < K; i++) rest += x[r * stride + i] * widen(weight[c * K + i]);
            narrow(parts[0] + rest + (bias ? widen(bias[c]) : 0.0f), out + r * N + c);
        }
}

template <typename T, int COLUMNS>
static void column(const float* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t N, int64_t K,
                   int64_t stride) {
    int64_t r = 0;
    for (; r + TILE_ROWS <= rows; r += TILE_ROWS)
        tile<T, TILE_ROWS, COLUMNS>(x + r * stride, weight, bias, out + r * N, N, K, stride);
    for (; r < rows; r++) tile<T, 1, COLUMNS>(x + r * stride, weight, bias, out + r * N, N, K, stride);
}

template <typename T>
static void linear(const T* x, const T* weight, const T* bias, T* out, int64_t M, int64_t N, int64_t K, float* scratch,
                   int threads) {
    for (int64_t begin = 0; begin < M; begin += BLOCK_ROWS) {
        int64_t rows = M - begin < BLOCK_ROWS ? M - begin : BLOCK_ROWS;
        const T* source = x + begin * K;
        T* target = out + begin * N;
        for (int64_t i = 0; i < rows * K; i++) scratch[i] = widen(source[i]);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t block = 0; block < (N + TILE_COLUMNS - 1) / TILE_COLUMNS; block++) {
            int64_t n = block * TILE_COLUMNS;
            if (n + TILE_COLUMNS <= N)
                column<T, TILE_COLUMNS>(scratch, weight + n * K, bias ? bias + n : nullptr, target + n, rows, N, K, K);
            else
                for (; n < N; n++)
                    column<T, 1>(scratch, weight + n * K, bias ? bias + n : nullptr, target + n, rows, N, K, K);
        }
    }
}

extern "C" void linear_bfloat16(const void* x, const void* weight, const void* bias, void* out, int64_t M, int64_t N,
                                int64_t K, float* scratch, int threads) {
    linear((const uint16_t*)x, (const uint16_t*)weight, (const uint16_t*)bias, (uint16_t*)out, M, N, K, scratch,
           threads);
}
extern "C" void linear_float32(const void* x, const void* weight, const void* bias, void* out, int64_t M, int64_t N,
                               int64_t K, float* scratch, int threads) {
    linear((const float*)x, (const float*)weight, (const float*)bias, (float*)out, M, N, K, scratch, threads);
}
