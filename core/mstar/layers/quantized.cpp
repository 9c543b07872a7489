// x (M, K) @ weight (N, K)^T + bias, the weight in four bits a number (see quantized.py); float32 inside.
//
// A weight is minimum + scale * number. 16 words hold 128 numbers of a row of the weight: number 16 i + j is in word j
// at bit 4 i. A few places share one shift; within them a number stays where it is, and its inputs are divided by its
// power of two beforehand, which is exact: then a vector of numbers takes a mask, a conversion and its multiplications.
//
// Every output is one dot product summed in one order, whatever M is and whichever thread computes it: the bits of a
// row depend on that row alone.
#include <vector>

#include "vectors.h"

constexpr int WORDS = 16, PLACES = 8, BLOCK = WORDS * PLACES, HALVES = WORDS / LANES;
constexpr int64_t BLOCK_ROWS = 32;  // rows whose float32 copies stay in the second-level cache
constexpr int64_t BLOCK_COLUMNS = 12;
template <int GROUP>
constexpr int UNIT = GROUP < 64 ? GROUP : 64;  // weights between two shifts
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, uint16_t* out) { *out = uint16_t(rounded(splat(x))[0] >> 16); }

// What a call multiplies with; pointers are to the first of the rows and columns at hand.
struct Operands {
    const float *x, *sums;          // inputs (rows, K), divided; sums of undivided ones (rows, K / GROUP, LANES)
    const uint32_t *words, *pairs;  // (columns, K / PLACES); (columns, K / GROUP): below a scale, above a minimum
    int64_t K;
};

template <int GROUP, typename T>
static void prepare(const T* x, int64_t depth, float* out, float* sums, int64_t K) {
    memset(sums, 0, K / GROUP * LANES * sizeof(float));
    for (int64_t k = 0; k < K; k += WORDS) {
        const int64_t count = depth - k < WORDS ? depth - k : WORDS;  // negative past the end
        const float factor = 1.0f / float(1 << k % UNIT<GROUP> / WORDS * 4);
        float values[WORDS] = {};
        for (int64_t i = 0; i < count; i++) values[i] = widen(x[k + i]);
        for (int i = 0; i < WORDS; i++) sums[k / GROUP * LANES + i % LANES] += values[i];
        for (int i = 0; i < WORDS; i++) out[k + i] = values[i] * factor;
    }
}

template <int GROUP, typename T, int ROWS, int COLUMNS>
static void tile(const Operands& given, const T* bias, T* out, int64_t N) {
    const int64_t K = given.K, groups = K / GROUP;
    Floats totals[ROWS][COLUMNS] = {};
    for (int64_t group = 0; group < groups; group++) {
        Floats sums[ROWS][COLUMNS] = {};
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += UNIT<GROUP>) {
            const uint32_t* words = given.words + k / BLOCK * WORDS;
            const int shift = k % BLOCK / WORDS * 4;
            for (int c = 0; c < COLUMNS; c++) __builtin_prefetch(words + (c + COLUMNS) * (K / PLACES));
#pragma GCC unroll 8
            for (int v = 0; v < UNIT<GROUP> / LANES; v++) {
                Floats numbers[COLUMNS];
                for (int c = 0; c < COLUMNS; c++) {
                    Words w;
                    memcpy(&w, words + c * (K / PLACES) + v % HALVES * LANES, sizeof w);
                    numbers[c] = __builtin_convertvector((Ints)(w >> shift & 15u << 4 * (v / HALVES)), Floats);
                }
                for (int r = 0; r < ROWS; r++) {
                    const Floats value = floats(given.x + r * K + k + v * LANES);
                    for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(value, numbers[c], sums[r][c]);
                }
            }
        }
        for (int c = 0; c < COLUMNS; c++) {
            const Words pair = given.pairs[c * groups + group] - Words{};
            const Floats scale = (Floats)(pair << 16), minimum = (Floats)(pair & 0xffff0000u);
            for (int r = 0; r < ROWS; r++) {
                const Floats inputs = floats(given.sums + (r * groups + group) * LANES);
                totals[r][c] = multiply_add(inputs, minimum, multiply_add(sums[r][c], scale, totals[r][c]));
            }
        }
    }
    for (int c = 0; c < COLUMNS; c++) {
        const float shift = bias ? widen(bias[c]) : 0.0f;
        for (int r = 0; r < ROWS; r++) narrow(sum_of(totals[r][c]) + shift, out + r * N + c);
    }
}

// ROWS rows by all of a block's columns, COLUMNS at a time; few rows need many columns to keep the adders busy.
template <int GROUP, typename T, int ROWS, int COLUMNS>
static void strip(Operands given, const T* bias, T* out, int64_t columns, int64_t N) {
    for (int64_t c = 0; c < columns;) {
        const bool is_whole = c + COLUMNS <= columns;
        const auto run = is_whole ? tile<GROUP, T, ROWS, COLUMNS> : tile<GROUP, T, ROWS, 1>;
        run(given, bias ? bias + c : nullptr, out + c, N);
        const int64_t done = is_whole ? COLUMNS : 1;
        given.words += done * (given.K / PLACES), given.pairs += done * (given.K / GROUP), c += done;
    }
}

template <int GROUP, typename T>
static void linear(const T* x, const uint32_t* words, const uint32_t* pairs, const T* bias, T* out, int64_t M,
                   int64_t N, int64_t depth, int threads) {
    const int64_t K = (depth + BLOCK - 1) / BLOCK * BLOCK, groups = K / GROUP;
    static thread_local std::vector<float> memory;
    const size_t needed = BLOCK_ROWS * (K + groups * LANES) + 16;
    if (memory.size() < needed) memory.resize(needed);
    float* const inputs = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);  // loads that straddle lines cost twice
    float* const sums = inputs + BLOCK_ROWS * K;
    for (int64_t begin = 0; begin < M; begin += BLOCK_ROWS) {
        const int64_t rows = M - begin < BLOCK_ROWS ? M - begin : BLOCK_ROWS;
        for (int64_t r = 0; r < rows; r++)
            prepare<GROUP>(x + (begin + r) * depth, depth, inputs + r * K, sums + r * groups * LANES, K);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t n = 0; n < N; n += BLOCK_COLUMNS) {
            const int64_t columns = N - n < BLOCK_COLUMNS ? N - n : BLOCK_COLUMNS;
            Operands given{inputs, sums, words + n * (K / PLACES), pairs + n * groups, K};
            for (int64_t r = 0, done; r < rows; r += done) {
                done = rows - r >= 4 ? 4 : rows - r >= 2 ? 2 : 1;
                const auto few = done == 2 ? strip<GROUP, T, 2, 3> : strip<GROUP, T, 1, 4>;
                const auto run = done == 4 ? strip<GROUP, T, 4, 2> : few;
                run(given, bias ? bias + n : nullptr, out + (begin + r) * N + n, columns, N);
                given.x += done * K, given.sums += done * groups * LANES;
            }
        }
    }
}

template <typename T>
static void linear(const T* x, const void* words, const void* scales, const T* bias, T* out, int64_t M, int64_t N,
                   int64_t K, int64_t group, int threads) {
    const auto* w = (const uint32_t*)words, *pairs = (const uint32_t*)scales;
    if (group == 32) linear<32>(x, w, pairs, bias, out, M, N, K, threads);
    if (group == 64) linear<64>(x, w, pairs, bias, out, M, N, K, threads);
    if (group == 128) linear<128>(x, w, pairs, bias, out, M, N, K, threads);
}

extern "C" void quantized_bfloat16(const void* x, const void* words, const void* scales, const void* bias, void* out,
                                   int64_t M, int64_t N, int64_t K, int64_t group, int threads) {
    linear((const uint16_t*)x, words, scales, (const uint16_t*)bias, (uint16_t*)out, M, N, K, group, threads);
}
extern "C" void quantized_float32(const void* x, const void* words, const void* scales, const void* bias, void* out,
                                  int64_t M, int64_t N, int64_t K, int64_t group, int threads) {
    linear((const float*)x, words, scales, (const float*)bias, (float*)out, M, N, K, group, threads);
}
