// x (M, K) @ weight (N, K)^T + bias, float32, made for tens to hundreds of rows.
//
// Lanes are rows of x, which is transposed for it; a weight is read where it lies, once for all lanes of a panel.
// (Libraries pack the weight, in every call anew, which takes many rows to pay.) Each output is one sum in the order of
// K, whatever M is; but not in the order of `linear.cpp`, so a row has other bits than there.
#include <algorithm>
#include <vector>

#include "vectors.h"

constexpr int64_t PANEL = 3, BLOCK = 12;  // vectors of rows
constexpr int64_t COLUMNS = 96, DEPTH = 256;  // of a piece of the weight; a panel's part of x stays cached beside it
constexpr int64_t LINE = 16;  // floats of a cache line

// Up to eight rows, `stride` apart, by up to eight columns; what there is not is zeros.
static inline void read(const float* x, int64_t stride, int64_t rows, int64_t columns, Eight (&square)[SUMS]) {
    if (rows >= SUMS && columns >= SUMS) {
        for (int i = 0; i < SUMS; i++) square[i] = eight(x + i * stride);
        return;
    }
    memset((void*)square, 0, sizeof square);
    for (int64_t i = 0; i < std::min<int64_t>(rows, SUMS); i++)
        memcpy(&square[i], x + i * stride, std::min<int64_t>(columns, SUMS) * sizeof(float));
}
static inline void write(const Eight (&square)[SUMS], float* out, int64_t stride, int64_t rows, int64_t columns) {
    if (rows >= SUMS && columns >= SUMS)
        for (int i = 0; i < SUMS; i++) memcpy(out + i * stride, &square[i], sizeof square[i]);
    else
        for (int64_t i = 0; i < std::min<int64_t>(rows, SUMS); i++)
            memcpy(out + i * stride, &square[i], std::min<int64_t>(columns, SUMS) * sizeof(float));
}

// A panel of `height` rows, of which `rows` exist, to (K, height).
static void turn(const float* x, int64_t rows, int64_t height, int64_t K, float* out) {
    Eight square[SUMS];
    for (int64_t r = 0; r < height; r += SUMS)
        for (int64_t k = 0; k < K; k += SUMS) {
            read(x + r * K + k, K, rows - r, K - k, square);
            transpose(square);
            write(square, out + k * height + r, height, K - k, SUMS);
        }
}
// Sums (columns, pitch), row by row, to a part of (M, N).
static void finish(const float* kept, int64_t pitch, const float* bias, float* out, int64_t rows, int64_t columns,
                   int64_t N) {
    Eight square[SUMS];
    for (int64_t c = 0; c < columns; c += SUMS) {
        Eight shift = {};
        if (bias) memcpy(&shift, bias + c, std::min<int64_t>(columns - c, SUMS) * sizeof(float));
        for (int64_t r = 0; r < rows; r += SUMS) {
            read(kept + c * pitch + r, pitch, columns - c, SUMS, square);
            transpose(square);
            for (Eight& row : square) row += shift;
            write(square, out + r * N + c, N, rows - r, columns - c);
        }
    }
}

// WIDTH vectors of rows by HEIGHT columns.
template <int WIDTH, int HEIGHT>
static inline void tile(const float* x, const float* weight, int64_t stride, int64_t depth, float* kept,
                        int64_t pitch) {
    Floats sums[HEIGHT][WIDTH];
    for (int c = 0; c < HEIGHT; c++)
        for (int v = 0; v < WIDTH; v++) sums[c][v] = floats(kept + c * pitch + v * LANES);
    const float* const next = weight + HEIGHT * stride;
    for (int64_t k = 0; k < depth; k++) {
        if (k % LINE == 0)
            for (int c = 0; c < HEIGHT; c++) __builtin_prefetch(next + c * stride + k);
        Floats value[WIDTH];
        for (int v = 0; v < WIDTH; v++) value[v] = floats(x + (k * WIDTH + v) * LANES), hold(value[v]);
        for (int c = 0; c < HEIGHT; c++) {
            const Floats w = splat(weight[c * stride + k]);
            for (int v = 0; v < WIDTH; v++) sums[c][v] = multiply_add(value[v], w, sums[c][v]);
        }
    }
    for (int c = 0; c < HEIGHT; c++)
        for (int v = 0; v < WIDTH; v++) memcpy(kept + c * pitch + v * LANES, &sums[c][v], sizeof(Floats));
}
template <int WIDTH>
static void panel(const float* x, const float* weight, int64_t stride, int64_t depth, int64_t columns, float* kept,
                  int64_t pitch) {
    constexpr int HEIGHT = 12 / WIDTH;  // so many sums keep the adders busy and fit in registers
    int64_t c = 0;
    for (; c + HEIGHT <= columns; c += HEIGHT)
        tile<WIDTH, HEIGHT>(x, weight + c * stride, stride, depth, kept + c * pitch, pitch);
    for (; c < columns; c++) tile<WIDTH, 1>(x, weight + c * stride, stride, depth, kept + c * pitch, pitch);
}

static float* room(std::vector<float>& memory, size_t size) {
    if (memory.size() < size) memory.resize(size);
    return memory.data();
}

extern "C" void product_float32(const float* x, const float* weight, const float* bias, float* out, int64_t M,
                                int64_t N, int64_t K, int threads) {
    static thread_local std::vector<float> of_block, of_piece;
    const int64_t blocks = (M + BLOCK * LANES - 1) / (BLOCK * LANES);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = M * b / blocks, rows = M * (b + 1) / blocks - first;
        const int64_t vectors = (rows + LANES - 1) / LANES, pitch = vectors * LANES;
        const int64_t panels = (vectors + PANEL - 1) / PANEL;
        const auto begin = [&](int64_t p) { return vectors * p / panels * LANES; };
        float* const turned = room(of_block, pitch * K);
#pragma omp parallel num_threads(threads)
        {
            float* const kept = room(of_piece, COLUMNS * pitch);
#pragma omp for schedule(static)
            for (int64_t p = 0; p < panels; p++)
                turn(x + (first + begin(p)) * K, rows - begin(p), begin(p + 1) - begin(p), K, turned + begin(p) * K);
#pragma omp for schedule(dynamic)
            for (int64_t n = 0; n < N; n += COLUMNS) {
                const int64_t columns = std::min(N - n, COLUMNS);
                std::fill_n(kept, columns * pitch, 0.0f);
                for (int64_t k = 0; k < K; k += DEPTH)
                    for (int64_t p = 0; p < panels; p++) {
                        const int64_t r = begin(p), height = begin(p + 1) - r;
                        auto* const one = height == 3 * LANES ? panel<3> : height == 2 * LANES ? panel<2> : panel<1>;
                        const float *rows_of_k = turned + r * K + k * height, *w = weight + n * K + k;
                        one(rows_of_k, w, K, std::min(K - k, DEPTH), columns, kept + r, pitch);
                    }
                finish(kept, pitch, bias ? bias + n : nullptr, out + first * N + n, rows, columns, N);
            }
        }
    }
}
