// Vectors of float32: how float32 and bfloat16 in memory become them, exponentials and sums. For the kernels here.
//
// STEP elements of memory make two vectors: for bfloat16 those at even and at odd places, which takes no shuffling.
// Whatever meets them lies in the same order, which `load` and `store` agree on.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int STEP = 2 * LANES;

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));

// Spelt out, and the build forbids the compiler to fuse elsewhere: whether it does differs from one tile to the next.
static inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
// In a register from here on: left alone, compilers read it again at each use, more often than the load ports can.
static inline void hold(Floats& x) {
#if defined(__AVX__)
    asm("" : "+v"(x));
#else
    (void)x;
#endif
}
static inline Floats splat(float x) { return x - Floats{}; }
static inline Floats floats(const float* p) {
    Floats v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <int HALF>
static inline Floats load(const float* p) {
    return floats(p + HALF * LANES);
}
template <int HALF>
static inline Floats load(const uint16_t* p) {
    Words words;
    memcpy(&words, p, sizeof words);
    return (Floats)(HALF ? words & 0xffff0000u : words << 16);
}
static inline void store(float* p, Floats first, Floats second) {
    memcpy(p, &first, sizeof first);
    memcpy(p + LANES, &second, sizeof second);
}
// To the nearest bfloat16, ties to even, in the upper halves.
static inline Words rounded(Floats x) {
    Words bits = (Words)x;
    return x == x ? (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u : (bits | 0x400000u) & 0xffff0000u;
}
static inline void store(uint16_t* p, Floats first, Floats second) {
    Words words = rounded(first) >> 16 | rounded(second);
    memcpy(p, &words, sizeof words);
}
// STEP elements, of which the last ones do not exist and are zeros.
template <typename T>
static inline void copy_tail(const T* p, int64_t count, T* tail) {
    memset(tail, 0, STEP * sizeof(T));
    memcpy(tail, p, count * sizeof(T));
}

static inline float lane(Floats x) { return x[0]; }
// For x <= 0; below the smallest normal result it is 0. NaN stays.
static inline Floats exponential(Floats x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: rounds to whole numbers and leaves them in the low bits
    Floats shifted = multiply_add(x, splat(1.44269504f), magic), n = shifted - magic;
    Floats r = multiply_add(n, splat(-0.693359375f), x);
    r = multiply_add(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 0.5f, 1.0f, 1.0f})
        p = multiply_add(p, r, splat(c));
    Words power = ((Words)shifted << 23) + 0x3f800000u;
    return x < -87.0f ? Floats{} : p * (Floats)power;
}
static inline float exponential(float x) { return lane(exponential(splat(x))); }

// Eight sums over lanes, each in the same order.
constexpr int SUMS = 8;
typedef float Eight __attribute__((vector_size(32)));
static inline Eight eight(const float* p) {
    Eight v;
    memcpy(&v, p, sizeof v);
    return v;
}
// Rows become columns.
static inline void transpose(Eight (&x)[8]) {
    Eight pairs[8], quads[8];
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i++) {
        const Eight a = pairs[i & ~2], b = pairs[i | 2];
        quads[i] = i & 2 ? __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
                         : __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = __builtin_shufflevector(quads[i], quads[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        x[i + 4] = __builtin_shufflevector(quads[i], quads[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
static inline Eight halved(Floats x) {
#if defined(__AVX512F__)
    Eight low, high;
    memcpy(&low, &x, sizeof low);
    memcpy(&high, (const char*)&x + sizeof low, sizeof high);
    return low + high;
#else
    return x;
#endif
}
static inline Eight pairs(Eight a, Eight b) {
    return __builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15);
}
static inline Eight sums_of(const Floats* x) {
    Eight a = pairs(pairs(halved(x[0]), halved(x[1])), pairs(halved(x[2]), halved(x[3])));
    Eight b = pairs(pairs(halved(x[4]), halved(x[5])), pairs(halved(x[6]), halved(x[7])));
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
static inline float sum_of(Floats x) {
    const Floats all[SUMS] = {x};
    return sums_of(all)[0];
}
