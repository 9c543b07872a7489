// Attention of a step's new tokens over a paged cache, float32 or bfloat16 in and out, float32 inside.
//
// The query heads that share a KV head, of all new tokens of a row, are the rows of tiles. A row's keys are taken in
// blocks of KEYS, counted from the row's first key: within a block one softmax, between blocks a merge by the logarithm
// of their sums, in order. So a query's bits depend on its own keys alone, not on its batch, tile, chunk or thread.
// Lanes are dimensions and keys where a tile has few rows, and rows where it has many: with the same sums in the same
// order, so the bits are the same.
// Weights are applied to just the keys a query sees: what is in other slots reaches it in no way.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "vectors.h"

constexpr int64_t KEYS = 256;
constexpr int64_t TILE = 32;  // rows of a tile
constexpr int GROUP = SUMS;  // products summed up at once, over 4, 2 or 1 rows
constexpr int64_t STRIDE = KEYS + GROUP;  // of a row's scores
constexpr int64_t NEAR = 64;  // keys whose values stay in the first-level cache
constexpr int64_t AHEAD = 16;  // keys asked for before they are needed
constexpr int64_t SERIAL = 1 << 18;  // multiplications that are not worth waking a thread for
constexpr int64_t ITEMS_PER_THREAD = 4;  // with fewer tiles, blocks of one tile are shared out

// A batch: what is the same in all layers. Arrays are as in `AttentionPlan`.
struct Step {
    const int32_t *starts, *contexts, *pages, *visible_end;
    const int64_t* slots;
    int64_t num_rows, table_width, page_size, write;
};
template <typename T>
struct Call {
    Step step;
    const T *q, *k, *v;
    T *keys, *values, *out;
    int64_t q_stride, k_stride, v_stride, heads, kv_heads, dim, window;
    float scale;
    int64_t tallest;  // rows of the largest tile, with many of them up to whole vectors
    int64_t width() const { return (dim + STEP - 1) / STEP * STEP; }
    int64_t part_size() const { return tallest * (width() + 2); }
    int64_t widened() const { return sizeof(T) < 4 || width() != dim ? KEYS : 0; }  // keys that cannot be used in place
};
struct Tile {
    int64_t batch_row, begin, rows;  // `rows` of them from `begin`; row / (heads of a KV head) is the new token
    int64_t pitch() const { return (rows + LANES - 1) / LANES * LANES; }
};
// What a thread needs while it computes a tile for one KV head. Not thread_local: addresses in loops would be calls.
template <typename T>
struct Scratch {
    std::vector<float> memory;
    float *queries, *scores, *part, *total, *turned, *mixed, *widened;
    int64_t first[TILE], end[TILE];  // keys each row sees
    const T *k[KEYS + GROUP], *v[KEYS + GROUP];
    const float* places[KEYS + GROUP];
    explicit Scratch(const Call<T>& call)
        : memory(call.tallest * (3 * call.width() + STRIDE) + 2 * call.part_size() + call.widened() * call.width()),
          queries(memory.data()),
          scores(queries + call.tallest * call.width()),
          part(scores + call.tallest * STRIDE),
          total(part + call.part_size()),
          turned(total + call.part_size()),
          mixed(turned + call.tallest * call.width()),
          widened(mixed + call.tallest * call.width()) {}
};

template <typename T>
static inline void prefetch(const T* p, int64_t count) {
    for (const char* line = (const char*)p; line < (const char*)(p + count); line += 64) __builtin_prefetch(line);
}
// f(first row, how many as a constant) for all rows, several at a time.
template <typename F>
static inline void by_rows(int64_t begin, int64_t end, F f) {
    for (; begin + 4 <= end; begin += 4) f(begin, std::integral_constant<int, 4>());
    if (begin + 2 <= end) f(begin, std::integral_constant<int, 2>()), begin += 2;
    if (begin < end) f(begin, std::integral_constant<int, 1>());
}

// ---- scores: ROWS queries by GROUP / ROWS keys --------------------------------------------------------------

template <int HALF, int ROWS, int COLUMNS, typename T>
static inline void multiply(Floats (&sums)[ROWS][COLUMNS], const float* q, int64_t width, const T* const* k,
                            int64_t d) {
    Floats key[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) key[c] = load<HALF>(k[c] + d);
    for (int r = 0; r < ROWS; r++) {
        const Floats query = load<HALF>(q + r * width + d);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = multiply_add(query, key[c], sums[r][c]);
    }
}
template <int ROWS, typename T>
static inline void score(const float* q, const T* const* k, const Call<T>& call, float* scores) {
    constexpr int COLUMNS = GROUP / ROWS;
    Floats sums[ROWS][COLUMNS] = {};
    const int64_t width = call.width();
    int64_t d = 0;
    for (; d + STEP <= call.dim; d += STEP) {
        multiply<0>(sums, q, width, k, d);
        multiply<1>(sums, q, width, k, d);
    }
    if (d < call.dim) {
        T tails[COLUMNS][STEP];
        const T* places[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) copy_tail(k[c] + d, call.dim - d, tails[c]), places[c] = tails[c] - d;
        multiply<0>(sums, q, width, places, d);
        multiply<1>(sums, q, width, places, d);
    }
    const Eight all = sums_of(sums[0]);
    for (int r = 0; r < ROWS; r++)
        memcpy(scores + r * STRIDE, (const float*)&all + r * COLUMNS, COLUMNS * sizeof(float));
}

// ---- softmax of one row of a block --------------------------------------------------------------------------

// Scores of the keys [begin, end) to weights. Lanes are counted from the block's start, in every batch alike.
static void weigh(float* scores, int64_t begin, int64_t end, float* most, float* sum) {
    const int64_t from = begin / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
    std::fill(scores + from, scores + begin, -INFINITY);
    std::fill(scores + end, scores + to, -INFINITY);
    Floats tops = splat(-INFINITY), total = {};
    for (int64_t j = from; j < to; j += LANES) {
        Floats x = floats(scores + j);
        tops = x > tops ? x : tops;
    }
    *most = tops[0];
    for (int i = 1; i < LANES; i++) *most = std::max(*most, tops[i]);
    for (int64_t j = from; j < to; j += LANES) {
        Floats weight = exponential(floats(scores + j) - splat(*most));
        memcpy(scores + j, &weight, sizeof weight);
        total += weight;
    }
    *sum = sum_of(total);
}

// ---- values: ROWS rows of weights by STEPS * STEP dimensions ------------------------------------------------

// A key's weights are `apart` from the next one's.
template <int ROWS, int STEPS, bool TAIL, typename T>
static inline void mix(const float* weights, int64_t apart, const T* const* v, int64_t begin, int64_t end, int64_t d,
                       float* out, int64_t width, int64_t dim) {
    Floats sums[ROWS][2 * STEPS];
    for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < 2 * STEPS; s++) sums[r][s] = floats(out + r * width + d + s * LANES);
    for (int64_t j = begin; j < end; j++) {
        T tail[STEP];
        if (TAIL) copy_tail(v[j] + d, dim - d, tail);
        const T* value = TAIL ? tail : v[j] + d;
        Floats weight[ROWS];
        for (int r = 0; r < ROWS; r++) weight[r] = splat(weights[r * STRIDE + j * apart]);
        for (int s = 0; s < STEPS; s++) {
            const Floats a = load<0>(value + s * STEP), b = load<1>(value + s * STEP);
            for (int r = 0; r < ROWS; r++) {
                sums[r][2 * s] = multiply_add(weight[r], a, sums[r][2 * s]);
                sums[r][2 * s + 1] = multiply_add(weight[r], b, sums[r][2 * s + 1]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int s = 0; s < 2 * STEPS; s++) memcpy(out + r * width + d + s * LANES, &sums[r][s], sizeof(Floats));
}
template <int ROWS, typename T>
static void mix_all(const float* weights, int64_t apart, const T* const* v, int64_t begin, int64_t end, float* out,
                    const Call<T>& call) {
    constexpr int STEPS = 4 / ROWS;
    const int64_t width = call.width(), dim = call.dim;
    int64_t d = 0;
    if (begin >= end) return;
    for (; d + STEPS * STEP <= dim; d += STEPS * STEP)
        mix<ROWS, STEPS, false>(weights, apart, v, begin, end, d, out, width, dim);
    for (; d + STEP <= dim; d += STEP) mix<ROWS, 1, false>(weights, apart, v, begin, end, d, out, width, dim);
    if (d < dim) mix<ROWS, 1, true>(weights, apart, v, begin, end, d, out, width, dim);
}

// ---- the same with rows in lanes: scores and weights (keys, pitch), values (width, pitch) --------------------

// Adds up eight vectors, or what lanes past eight make of sixteen, as `sums_of` adds up lanes.
template <int FROM = 0, int COUNT = SUMS, typename F>
static inline auto tree(F f) {
    if constexpr (COUNT > 1) return tree<FROM, COUNT / 2>(f) + tree<FROM + COUNT / 2, COUNT / 2>(f);
    else if constexpr (LANES > SUMS) return f(FROM) + f(FROM + SUMS);
    else return f(FROM);
}
template <int WIDTH>
struct Vectors {
    Floats each[WIDTH];
    Vectors operator+(const Vectors& other) const {
        Vectors sum;
        for (int i = 0; i < WIDTH; i++) sum.each[i] = each[i] + other.each[i];
        return sum;
    }
};
// f(first vector, how many as a constant).
template <typename F>
static inline void by_vectors(int64_t pitch, F f) {
    int64_t r = 0;
    for (; r + 4 * LANES <= pitch || r + 2 * LANES == pitch; r += 2 * LANES) f(r, std::integral_constant<int, 2>());
    if (r + 3 * LANES == pitch) f(r, std::integral_constant<int, 3>());
    if (r + LANES == pitch) f(r, std::integral_constant<int, 1>());
}
constexpr int keys_at_once(int vectors) { return 8 / vectors; }
template <int WIDTH>
static inline void score_turned(const float* q, int64_t pitch, const float* const* k, int64_t width, float* scores) {
    constexpr int HEIGHT = keys_at_once(WIDTH);
    const auto all = tree([&](int lane) {
        Vectors<WIDTH * HEIGHT> sums = {};
        for (int64_t d = lane; d < width; d += LANES) {
            Floats query[WIDTH];
            for (int i = 0; i < WIDTH; i++) query[i] = floats(q + d * pitch + i * LANES), hold(query[i]);
            for (int c = 0; c < HEIGHT; c++) {
                const Floats key = splat(k[c][d]);
                for (int i = 0; i < WIDTH; i++)
                    sums.each[c * WIDTH + i] = multiply_add(query[i], key, sums.each[c * WIDTH + i]);
            }
        }
        return sums;
    });
    for (int c = 0; c < HEIGHT; c++) memcpy(scores + c * pitch, &all.each[c * WIDTH], WIDTH * sizeof(Floats));
}
static void weigh_turned(float* scores, int64_t pitch, int64_t begin, int64_t end, const int64_t* ends, int64_t rows,
                         float* most, float* sum) {
    const int64_t from = begin / LANES * LANES, to = (end + LANES - 1) / LANES * LANES;
    std::fill(scores + from * pitch, scores + begin * pitch, -INFINITY);
    std::fill(scores + end * pitch, scores + to * pitch, -INFINITY);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = ends[r]; j < end; j++) scores[j * pitch + r] = -INFINITY;
    for (int64_t r = 0; r < pitch; r += LANES) {
        Floats tops = splat(-INFINITY), total[LANES] = {};
        for (int64_t j = from; j < to; j++) {
            const Floats x = floats(scores + j * pitch + r);
            tops = x > tops ? x : tops;
        }
        for (int64_t j = from; j < to; j += LANES)
            for (int i = 0; i < LANES; i++) {
                float* const place = scores + (j + i) * pitch + r;
                const Floats weight = exponential(floats(place) - tops);
                memcpy(place, &weight, sizeof weight);
                total[i] += weight;
            }
        const Floats all = tree([&](int lane) { return total[lane]; });
        const size_t count = std::min<int64_t>(rows - r, LANES) * sizeof(float);
        memcpy(most + r, &tops, count);
        memcpy(sum + r, &all, count);
    }
}
constexpr int dims_at_once(int vectors) { return vectors == 1 ? 8 : 4; }
template <int WIDTH>
static inline void mix_turned(const float* weights, int64_t pitch, const float* const* v, int64_t begin, int64_t end,
                              int64_t d, float* out) {
    constexpr int HEIGHT = dims_at_once(WIDTH);
    Floats sums[HEIGHT][WIDTH];
    for (int c = 0; c < HEIGHT; c++)
        for (int i = 0; i < WIDTH; i++) sums[c][i] = floats(out + c * pitch + i * LANES);
    for (int64_t j = begin; j < end; j++) {
        Floats weight[WIDTH];
        for (int i = 0; i < WIDTH; i++) weight[i] = floats(weights + j * pitch + i * LANES), hold(weight[i]);
        for (int c = 0; c < HEIGHT; c++) {
            const Floats value = splat(v[j][d + c]);
            for (int i = 0; i < WIDTH; i++) sums[c][i] = multiply_add(weight[i], value, sums[c][i]);
        }
    }
    for (int c = 0; c < HEIGHT; c++)
        for (int i = 0; i < WIDTH; i++) memcpy(out + c * pitch + i * LANES, &sums[c][i], sizeof(Floats));
}
// (rows, columns) to (columns, rows), in squares.
static void turn(const float* x, int64_t rows, int64_t stride, int64_t columns, float* out, int64_t pitch) {
    for (int64_t r = 0; r < rows; r += SUMS)
        for (int64_t c = 0; c < columns; c += SUMS) {
            Eight square[SUMS];
            for (int i = 0; i < SUMS; i++) square[i] = eight(x + (r + i) * stride + c);
            transpose(square);
            for (int i = 0; i < SUMS; i++) memcpy(out + (c + i) * pitch + r, &square[i], sizeof square[i]);
        }
}

// ---- a tile -------------------------------------------------------------------------------------------------

// Keys or values [begin, end) as floats: where they lie, or widened.
template <typename T>
static const float* const* as_floats(const Call<T>& call, const T* const* rows, int64_t begin, int64_t end,
                                     Scratch<T>& scratch) {
    if constexpr (std::is_same_v<T, float>)
        if (!call.widened()) return rows;
    for (int64_t j = begin; j < end; j++) {
        float* const place = scratch.widened + j * call.width();
        for (int64_t d = 0; d < call.dim; d += STEP) {
            T tail[STEP];
            if (d + STEP > call.dim) copy_tail(rows[j] + d, call.dim - d, tail);
            const T* some = d + STEP > call.dim ? tail : rows[j] + d;
            store(place + d, load<0>(some), load<1>(some));
        }
        scratch.places[j] = place;
    }
    std::fill(scratch.places + end, scratch.places + end + GROUP, scratch.places[end - 1]);
    return scratch.places;
}
template <typename T>
static void begin_tile(const Call<T>& call, const Tile& tile, int64_t kv_head, Scratch<T>& scratch) {
    const Step& step = call.step;
    const int64_t group = call.heads / call.kv_heads, width = call.width();
    for (int64_t r = 0; r < tile.rows; r++) {
        const int64_t place = (tile.begin + r) / group, head = kv_head * group + (tile.begin + r) % group;
        const int64_t token = step.starts[tile.batch_row] + place, position = step.contexts[tile.batch_row] + place;
        const T* q = call.q + token * call.q_stride + head * call.dim;
        for (int64_t d = 0; d < call.dim; d += STEP) {
            T tail[STEP];
            if (d + STEP > call.dim) copy_tail(q + d, call.dim - d, tail);
            const T* some = d + STEP > call.dim ? tail : q + d;
            store(scratch.queries + r * width + d, load<0>(some) * call.scale, load<1>(some) * call.scale);
        }
        scratch.first[r] = call.window ? std::max<int64_t>(position - call.window + 1, 0) : 0;
        scratch.end[r] = step.visible_end[token];
    }
    if (tile.rows >= LANES) turn(scratch.queries, tile.pitch(), width, width, scratch.turned, tile.pitch());
}
// Where the keys and values [begin, end) of a row lie: in its pages, then among the new tokens.
template <typename T>
static void find(const Call<T>& call, int64_t row, int64_t kv_head, int64_t begin, int64_t end, const T** k,
                 const T** v) {
    const Step& step = call.step;
    const int64_t size = step.page_size, start = step.starts[row], context = step.contexts[row];
    const int64_t cached = std::min(end, step.write ? context + step.starts[row + 1] - start : context);
    for (int64_t j = begin; j < cached;) {
        const int64_t page = step.pages[row * step.table_width + j / size];
        const int64_t stop = std::min((j / size + 1) * size, cached);
        int64_t place = ((page * call.kv_heads + kv_head) * size + j % size) * call.dim;
        for (; j < stop; j++, place += call.dim) k[j - begin] = call.keys + place, v[j - begin] = call.values + place;
    }
    for (int64_t j = std::max(begin, cached); j < end; j++) {
        k[j - begin] = call.k + (start + j - context) * call.k_stride + kv_head * call.dim;
        v[j - begin] = call.v + (start + j - context) * call.v_stride + kv_head * call.dim;
    }
}
// A part is, for each row, the mixed values, then the largest score, then the sum of the weights. For rows that begin
// alike and see keys of the block.
template <typename T>
static void compute_turned(const Call<T>& call, const Tile& tile, int64_t begin, const int64_t* ends, int64_t end,
                           Scratch<T>& scratch, float* part, float* most, float* sum) {
    const int64_t width = call.width(), pitch = tile.pitch(), common = *std::min_element(ends, ends + tile.rows);
    float *const scores = scratch.scores, *const mixed = scratch.mixed;
    const float* const* k = as_floats(call, scratch.k, begin, end, scratch);
    by_vectors(pitch, [&](int64_t r, auto vectors) {
        constexpr int at_once = keys_at_once(vectors);
        for (int64_t j = begin; j < end; j += at_once) {
            for (int64_t i = j; r == 0 && i < std::min(j + at_once, end); i++) {
                prefetch(scratch.k[std::min(i + AHEAD, end - 1)], call.dim);
                prefetch(scratch.v[i], call.dim);
            }
            score_turned<vectors>(scratch.turned + r, pitch, k + j, width, scores + j * pitch + r);
        }
    });
    weigh_turned(scores, pitch, begin, end, ends, tile.rows, most, sum);
    const float* const* v = as_floats(call, scratch.v, begin, end, scratch);
    std::fill_n(mixed, width * pitch, 0.0f);
    for (int64_t from = begin; from < common; from += NEAR)
        by_vectors(pitch, [&](int64_t r, auto vectors) {
            for (int64_t d = 0; d < width; d += dims_at_once(vectors))
                mix_turned<vectors>(scores + r, pitch, v, from, std::min(from + NEAR, common), d, mixed + d * pitch + r);
        });
    turn(mixed, width, pitch, pitch, part, width);
    for (int64_t r = 0; r < tile.rows; r++)
        mix_all<1>(scores + r, pitch, scratch.v, common, ends[r], part + r * width, call);
}
template <typename T>
static void compute_block(const Call<T>& call, const Tile& tile, int64_t kv_head, int64_t block, Scratch<T>& scratch,
                          float* part) {
    const int64_t width = call.width();
    float *most = part + call.tallest * width, *sum = most + call.tallest, *scores = scratch.scores;
    int64_t begins[TILE], ends[TILE], begin = KEYS, end = 0;
    for (int64_t r = 0; r < tile.rows; r++) {
        begins[r] = std::clamp<int64_t>(scratch.first[r] - block * KEYS, 0, KEYS);
        ends[r] = std::clamp<int64_t>(scratch.end[r] - block * KEYS, 0, KEYS);
        sum[r] = 0;
        if (begins[r] < ends[r]) begin = std::min(begin, begins[r]), end = std::max(end, ends[r]);
    }
    if (begin >= end) return;
    find(call, tile.batch_row, kv_head, block * KEYS + begin, block * KEYS + end, scratch.k + begin, scratch.v + begin);
    std::fill(scratch.k + end, scratch.k + end + GROUP, scratch.k[end - 1]);  // groups of keys may reach past the end
    const auto is_like_first = [&](int64_t r) { return begins[r] == begin && begin < ends[r]; };
    bool is_turned = tile.rows >= LANES;
    for (int64_t r = 0; r < tile.rows; r++) is_turned = is_turned && is_like_first(r);
    if (is_turned) return compute_turned(call, tile, begin, ends, end, scratch, part, most, sum);
    for (int64_t j = begin; j < end; j += GROUP) {
        for (int64_t i = j; i < std::min(j + GROUP, end); i++) {
            prefetch(scratch.k[std::min(i + AHEAD, end - 1)], call.dim);
            prefetch(scratch.v[i], call.dim);
        }
        by_rows(0, tile.rows, [&](int64_t r, auto rows) {
            constexpr int ROWS = rows;
            for (int64_t c = 0; c < GROUP; c += GROUP / ROWS)
                score<ROWS>(scratch.queries + r * width, scratch.k + j + c, call, scores + r * STRIDE + j + c);
        });
    }
    memset(part, 0, tile.rows * width * sizeof(float));
    for (int64_t r = 0; r < tile.rows; r++)
        if (begins[r] < ends[r]) weigh(scores + r * STRIDE, begins[r], ends[r], most + r, sum + r);
    by_rows(0, tile.rows, [&](int64_t r, auto rows) {
        constexpr int ROWS = rows;
        // Together over the keys that all of these rows see; the rest, in order, each on its own.
        int64_t from = *std::max_element(begins + r, begins + r + ROWS);
        int64_t to = *std::min_element(ends + r, ends + r + ROWS);
        if (from >= to) from = to = KEYS;
        const auto alone = [&](bool after) {
            for (int64_t i = r; i < r + ROWS; i++)
                mix_all<1>(scores + i * STRIDE, 1, scratch.v, after ? std::max(to, begins[i]) : begins[i],
                           after ? ends[i] : std::min(from, ends[i]), part + i * width, call);
        };
        alone(false);
        mix_all<ROWS>(scores + r * STRIDE, 1, scratch.v, from, to, part + r * width, call);
        alone(true);
    });
}
template <typename T>
static void merge(const Call<T>& call, const Tile& tile, const float* part, float* total) {
    const int64_t width = call.width();
    const float *most = part + call.tallest * width, *sum = most + call.tallest;
    float *total_most = total + call.tallest * width, *total_sum = total_most + call.tallest;
    for (int64_t r = 0; r < tile.rows; r++) {
        if (sum[r] == 0) continue;  // sees none of the block
        const float larger = std::max(total_most[r], most[r]);
        const float old = total_sum[r] == 0 ? 0.0f : exponential(total_most[r] - larger);
        const float fresh = exponential(most[r] - larger);
        for (int64_t d = r * width; d < (r + 1) * width; d += LANES) {
            const Floats mixed = multiply_add(floats(part + d), splat(fresh), floats(total + d) * old);
            memcpy(total + d, &mixed, sizeof mixed);
        }
        total_most[r] = larger;
        total_sum[r] = total_sum[r] * old + sum[r] * fresh;
    }
}
template <typename T>
static void end_tile(const Call<T>& call, const Tile& tile, int64_t kv_head, const float* total) {
    const int64_t group = call.heads / call.kv_heads, width = call.width();
    for (int64_t r = 0; r < tile.rows; r++) {
        const int64_t token = call.step.starts[tile.batch_row] + (tile.begin + r) / group;
        const int64_t head = kv_head * group + (tile.begin + r) % group;
        const float *mixed = total + r * width, sum = total[call.tallest * (width + 1) + r];
        const float divisor = sum == 0 ? 1.0f : sum;  // whoever sees nothing gets zeros
        T* out = call.out + (token * call.heads + head) * call.dim;
        for (int64_t d = 0; d < call.dim; d += STEP) {
            T some[STEP];
            store(some, floats(mixed + d) / divisor, floats(mixed + d + LANES) / divisor);
            memcpy(out + d, some, std::min<int64_t>(STEP, call.dim - d) * sizeof(T));
        }
    }
}

// ---- a step -------------------------------------------------------------------------------------------------

template <typename T>
static void write_token(const Call<T>& call, int64_t token) {
    const int64_t size = call.step.page_size, slot = call.step.slots[token], page = slot / size, offset = slot % size;
    for (int64_t h = 0; h < call.kv_heads; h++) {
        const int64_t place = ((page * call.kv_heads + h) * size + offset) * call.dim;
        memcpy(call.keys + place, call.k + token * call.k_stride + h * call.dim, call.dim * sizeof(T));
        memcpy(call.values + place, call.v + token * call.v_stride + h * call.dim, call.dim * sizeof(T));
    }
}
template <typename T>
static void attend(Call<T> call, int threads) {
    const Step& step = call.step;
    const int64_t group = call.heads / call.kv_heads, kv_heads = call.kv_heads;
    std::vector<Tile> tiles;
    int64_t work = 0, longest = 0;  // keys of a batch row
    for (int64_t row = 0; row < step.num_rows; row++) {
        const int64_t num = step.starts[row + 1] - step.starts[row], keys = step.contexts[row] + num;
        const int64_t total = num * group, count = (total + TILE - 1) / TILE;
        for (int64_t i = 0; i < count; i++) {
            const int64_t begin = total * i / count;
            tiles.push_back({row, begin, total * (i + 1) / count - begin});
            const bool is_turned = tiles.back().rows >= LANES;
            call.tallest = std::max(call.tallest, is_turned ? tiles.back().pitch() : tiles.back().rows);
        }
        work += 2 * num * keys * call.heads * call.dim;
        if (num) longest = std::max(longest, keys);
    }
    if (work < SERIAL) threads = 1;
    const int64_t num_tiles = tiles.size(), items = num_tiles * kv_heads, blocks = (longest + KEYS - 1) / KEYS, part_size = call.part_size();
    const bool shared = threads > 1 && blocks > 1 && items < threads * ITEMS_PER_THREAD;
    std::vector<float> parts(shared ? items * blocks * part_size : 0);
    const int64_t writes = step.write ? step.starts[step.num_rows] : 0, block_items = shared ? items * blocks : 0;
#pragma omp parallel num_threads(threads)
    {
        Scratch<T> scratch(call);
#pragma omp for schedule(static)
        for (int64_t token = 0; token < writes; token++) write_token(call, token);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < block_items; i++) {
            const Tile& tile = tiles[i / blocks % num_tiles];
            const int64_t kv_head = i / blocks / num_tiles;
            begin_tile(call, tile, kv_head, scratch);
            compute_block(call, tile, kv_head, i % blocks, scratch, parts.data() + i * part_size);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < items; i++) {
            const Tile& tile = tiles[i % num_tiles];  // those of a head after each other: they share its cache
            const int64_t kv_head = i / num_tiles;
            float* const total = scratch.total;
            std::fill(total, total + part_size, 0.0f);
            std::fill_n(total + call.tallest * call.width(), call.tallest, -INFINITY);
            begin_tile(call, tile, kv_head, scratch);
            const int64_t begin = *std::min_element(scratch.first, scratch.first + tile.rows) / KEYS;
            const int64_t end = *std::max_element(scratch.end, scratch.end + tile.rows);
            for (int64_t block = begin; block * KEYS < end; block++) {
                float* part = shared ? parts.data() + (i * blocks + block) * part_size : scratch.part;
                if (!shared) compute_block(call, tile, kv_head, block, scratch, part);
                merge(call, tile, part, total);
            }
            end_tile(call, tile, kv_head, total);
        }
    }
}

#define ATTENTION(NAME, TYPE)                                                                                       \
    extern "C" void NAME(const Step* step, const TYPE* q, const TYPE* k, const TYPE* v, TYPE* keys, TYPE* values,    \
                         TYPE* out, int64_t q_stride, int64_t k_stride, int64_t v_stride, int64_t heads,             \
                         int64_t kv_heads, int64_t dim, int64_t window, float scale, int threads) {                  \
        attend(Call<TYPE>{*step, q, k, v, keys, values, out, q_stride, k_stride, v_stride, heads, kv_heads, dim,     \
                          window, scale, 0},                                                                         \
               threads);                                                                                             \
    }
ATTENTION(attention_float32, float)
ATTENTION(attention_bfloat16, uint16_t)
