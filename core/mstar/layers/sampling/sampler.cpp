// One token id per row of logits, by that row's parameters, and the record of it: `plain.py` without a sort.
//
// A row's id is a function of its logits and its row of the state alone: sums run in one order on whichever thread.
// Scores and their exponentials are float32 as there, sums float64. Thresholds become two numbers, `floor` and
// `lowest`, and blocks that lie below them are not looked at again.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "vectors.h"

struct SamplerState {
    const float* temperature;
    const int64_t* top_k;
    const float *tail, *min_p, *repetition, *presence, *frequency;
    const int64_t* key;
    int64_t* step;
    const int64_t* bias_index;
    const float* bias_value;
    int32_t* counts;             // or null
    const uint8_t* prompt_mask;  // or null
    int64_t rows, vocab_size, max_bias;
};

constexpr int32_t OK = 0, NOT_FINITE = 1, NO_SUCH_ROW = 2;
constexpr int64_t BLOCK = 64, FEW_BLOCKS = 32;
constexpr float INFINITE = __builtin_inff(), LEAST_EXPONENT = -87.0f;  // `exponential` gives 0 below

typedef float Half __attribute__((vector_size(LANES * 2)));
typedef double Doubles __attribute__((vector_size(LANES * 4)));
typedef int32_t Truths __attribute__((vector_size(LANES * 4)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct Sum {
    Doubles low = {}, high = {};
    void add(Floats x) {
        Half halves[2];
        memcpy(halves, &x, sizeof x);
        low += __builtin_convertvector(halves[0], Doubles);
        high += __builtin_convertvector(halves[1], Doubles);
    }
    double value() const {
        const Doubles both = low + high;
        double total = 0;
        for (int i = 0; i < LANES / 2; i++) total += both[i];
        return total;
    }
};

struct Row {
    int64_t width, blocks;
    std::vector<float> scores, maxima;  // scores are filled up to whole blocks with -inf
    std::vector<double> masses;         // of blocks, by `weigh`
    std::vector<float> values, weights;
    std::vector<uint32_t> keys;
    bool has_nan;
    float best, floor, lowest;  // kept are scores >= floor with score - best >= lowest
    double total;

    void fit(int64_t vocab_size) {
        width = vocab_size, blocks = (width + BLOCK - 1) / BLOCK;
        if (blocks == (int64_t)maxima.size()) return;
        for (auto* one : {&scores, &values, &weights}) one->resize(blocks * BLOCK);
        maxima.resize(blocks), masses.resize(blocks), keys.resize(blocks * BLOCK);
    }
    Floats weigh(Floats score) const {
        const Floats distance = score - splat(best);
        return (score >= splat(floor)) & (distance >= splat(lowest)) ? exponential(distance) : Floats{};
    }
};

static inline float widen(float x) { return x; }
static inline float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
template <typename T>
static void copy(const T* source, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i++) out[i] = widen(source[i]);
}
static float highest(Floats x) {
    float result = x[0];
    for (int i = 1; i < LANES; i++) result = x[i] > result ? x[i] : result;
    return result;
}

// ---- scores ------------------------------------------------------------------------------------------------

struct Penalties {
    const int32_t* counts;
    const uint8_t* prompt_mask;
    float repetition, presence, frequency;
    bool repeats, adds;

    Penalties(const SamplerState& state, int64_t row)
        : counts(state.counts ? state.counts + row * state.vocab_size : nullptr),
          prompt_mask(state.prompt_mask ? state.prompt_mask + row * state.vocab_size : nullptr),
          repetition(state.repetition[row]), presence(state.presence[row]), frequency(state.frequency[row]),
          repeats(counts && prompt_mask && repetition != 1), adds(counts && (presence != 0 || frequency != 0)) {}

    // One block, of which `count` scores are there. Spelt out in vectors: the compiler does not make them of it.
    void apply(float* scores, int64_t begin, int64_t count) const {
        int32_t drawn[BLOCK] = {};
        uint8_t prompt[BLOCK] = {};
        memcpy(drawn, counts + begin, count * sizeof *drawn);
        if (repeats) memcpy(prompt, prompt_mask + begin, count);
        for (int i = 0; i < BLOCK; i += LANES) {
            Floats x = floats(scores + i);
            Truths times;
            Bytes given;
            memcpy(&times, drawn + i, sizeof times);
            memcpy(&given, prompt + i, sizeof given);
            if (repeats) {
                const Truths seen = (times > 0) | (__builtin_convertvector(given, Truths) != 0);
                const Floats penalised = x < Floats{} ? x * splat(repetition) : x / splat(repetition);
                x = seen ? penalised : x;
            }
            if (adds) {
                x -= __builtin_convertvector(times, Floats) * splat(frequency);
                x -= times > 0 ? splat(presence) : Floats{};
            }
            memcpy(scores + i, &x, sizeof x);
        }
    }
};

template <typename T>
static void score(const T* logits, const Penalties& penalties, float temperature, Row& row) {
    Truths nan = {};
    for (int64_t b = 0; b < row.blocks; b++) {
        const int64_t begin = b * BLOCK, count = std::min(BLOCK, row.width - begin);
        float* scores = row.scores.data() + begin;
        if (count == BLOCK) copy(logits + begin, scores, BLOCK);
        else copy(logits + begin, scores, count), std::fill(scores + count, scores + BLOCK, -INFINITE);
        if (penalties.repeats || penalties.adds) penalties.apply(scores, begin, count);
        Floats most = splat(-INFINITE);
        for (int i = 0; i < BLOCK; i += LANES) {
            const Floats x = floats(scores + i) / splat(temperature);
            memcpy(scores + i, &x, sizeof x);
            most = x > most ? x : most;
            nan |= x != x;
        }
        row.maxima[b] = highest(most);
    }
    row.best = *std::max_element(row.maxima.begin(), row.maxima.end());
    row.has_nan = false;
    for (int i = 0; i < LANES; i++) row.has_nan |= nan[i] != 0;
}
static void score(const void* logits, bool is_bfloat16, const SamplerState& state, int64_t at, Row& row) {
    const Penalties penalties(state, at);
    const float temperature = state.temperature[at] > 0 ? state.temperature[at] : 1.0f;
    const int64_t* index = state.bias_index + at * state.max_bias;
    const float *value = state.bias_value + at * state.max_bias, *wide = (const float*)logits;
    if (state.max_bias && index[0] >= 0) {
        float* scores = row.scores.data();
        is_bfloat16 ? copy((const uint16_t*)logits, scores, row.width) : copy(wide, scores, row.width);
        for (int64_t i = 0; i < state.max_bias && index[i] >= 0; i++) scores[index[i]] += value[i];
        is_bfloat16 = false, wide = scores;
    }
    if (is_bfloat16) score((const uint16_t*)logits, penalties, temperature, row);
    else score(wide, penalties, temperature, row);
}

// ---- what is kept, and draws -------------------------------------------------------------------------------

// The likeliest; NaN is above all, as torch has it.
static int64_t first_of_best(const Row& row) {
    const float* scores = row.scores.data();
    if (row.has_nan) return std::find_if(scores, scores + row.width, [](float x) { return x != x; }) - scores;
    const auto block = std::find(row.maxima.begin(), row.maxima.end(), row.best) - row.maxima.begin();
    return std::find(scores + block * BLOCK, scores + row.width, row.best) - scores;
}

static void weigh(Row& row) {
    row.total = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        Sum sum;
        if (row.maxima[b] >= row.floor && row.maxima[b] - row.best >= row.lowest)
            for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES)
                sum.add(row.weigh(floats(&row.scores[i])));
        row.total += row.masses[b] = sum.value();
    }
}

static float nth_largest(float* values, int64_t count, int64_t n) {
    std::nth_element(values, values + n - 1, values + count, std::greater<float>());
    return values[n - 1];
}
static float nth_maximum(Row& row, int64_t n) {
    if (n > row.blocks) return -INFINITE;
    std::copy(row.maxima.begin(), row.maxima.end(), row.values.begin());
    return nth_largest(row.values.data(), row.blocks, n);
}

// k scores are at least the k-th largest maximum of a block: the k-th of all is among those.
static float kth_score(Row& row, int64_t k) {
    const float from = nth_maximum(row, k);
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks; b++)
        if (row.maxima[b] >= from)
            for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) {
                row.values[count] = row.scores[i];
                count += row.scores[i] >= from;
            }
    return nth_largest(row.values.data(), count, k);
}

static double mass_below(const Row& row, float limit) {
    double mass = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        if (row.maxima[b] < limit) {
            mass += row.masses[b];
            continue;
        }
        Sum sum;
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += LANES) {
            const Floats scores = floats(&row.scores[i]), weights = row.weigh(scores);
            sum.add(scores < splat(limit) ? weights : Floats{});
        }
        mass += sum.value();
    }
    return mass;
}

// Unsigned integers in the order of scores; both zeros are one.
static inline uint32_t key_of(float score) {
    uint32_t bits;
    score += 0.0f;
    memcpy(&bits, &score, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
static inline float score_of(uint32_t key) {
    const uint32_t bits = key >> 31 ? key & 0x7fffffffu : ~key;
    float score;
    memcpy(&score, &bits, 4);
    return score;
}

// What counts of the scores from `from` on: keys and weights.
static int64_t gather(Row& row, float from) {
    int64_t count = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        if (row.maxima[b] < from || row.masses[b] == 0) continue;
        const float* scores = &row.scores[b * BLOCK];
        float weights[BLOCK];
        for (int i = 0; i < BLOCK; i += LANES) {
            const Floats w = row.weigh(floats(scores + i));
            memcpy(weights + i, &w, sizeof w);
        }
        for (int i = 0; i < BLOCK; i++) {
            row.keys[count] = key_of(scores[i]);
            row.weights[count] = weights[i];
            count += (weights[i] > 0) & (scores[i] >= from);
        }
    }
    return count;
}

// Raises the floor to the lowest score that top-p keeps, and strikes out those equal to it that must go. Digit by digit
// of their keys: the first digit of which not all fit into the tail is the border's.
static void cut_tail(Row& row, float tail) {
    const auto fits = [&](double mass) { return float(mass / row.total) <= tail; };
    float from;
    double below;
    int64_t rank = FEW_BLOCKS;
    do {
        from = std::max(row.floor, nth_maximum(row, rank));
        below = mass_below(row, from);
        rank *= 3;
    } while (!fits(below));
    int64_t count = gather(row, from);
    uint32_t border = 0;
    for (int shift : {21, 10, 0}) {
        constexpr int DIGITS = 1 << 11;
        const uint32_t mask = shift ? DIGITS - 1 : (1 << 10) - 1;
        double masses[DIGITS] = {}, next = below;
        for (int64_t i = 0; i < count; i++) masses[row.keys[i] >> shift & mask] += row.weights[i];
        uint32_t digit = 0;
        for (uint32_t d = 0; d <= mask; d++) {
            if (!(masses[d] > 0)) continue;
            digit = d, below = next, next += masses[d];
            if (!fits(next)) break;
        }
        int64_t left = 0;
        for (int64_t i = 0; i < count; i++) {
            row.keys[left] = row.keys[i], row.weights[left] = row.weights[i];
            left += (row.keys[i] >> shift & mask) == digit;
        }
        count = left, border |= digit << shift;
    }
    int64_t goes = 0;  // of `count` equal scores; the largest number that fits, but one stays
    for (int64_t most = count - 1; goes < most;) {
        const int64_t middle = (goes + most + 1) / 2;
        if (fits(below + double(middle) * row.weights[0])) goes = middle;
        else most = middle - 1;
    }
    row.floor = score_of(border);
    for (int64_t b = 0; b < row.blocks && goes; b++)
        for (int64_t i = b * BLOCK; row.maxima[b] >= row.floor && i < (b + 1) * BLOCK && goes; i++)
            if (row.scores[i] == row.floor) row.scores[i] = -INFINITE, goes--;
}

// The smallest float32 from which on a score - best is at least log(min_p).
static float least_distance(float min_p) {
    const double exact = std::log(double(min_p));
    const float rounded = float(exact);
    return rounded < exact ? std::nextafter(rounded, INFINITE) : rounded;
}

// The first id up to which the mass exceeds a share of the total, else the last that has any.
static int64_t pick(const Row& row, double share) {
    const double target = share * row.total;
    double reached = 0;
    int64_t block = 0, id = 0;
    for (int64_t b = 0; b < row.blocks; b++) {
        if (row.masses[b] == 0) continue;
        block = b;
        if (reached + row.masses[b] > target) break;
        reached += row.masses[b];
    }
    for (int64_t i = block * BLOCK; i < (block + 1) * BLOCK; i += LANES) {
        const Floats weights = row.weigh(floats(&row.scores[i]));
        for (int lane = 0; lane < LANES; lane++) {
            if (!(weights[lane] > 0)) continue;
            id = i + lane;
            reached += weights[lane];
            if (reached > target) return id;
        }
    }
    return id;
}

static double uniform(int64_t key, int64_t step) {  // `uniform64` of noise.py
    uint64_t z = uint64_t(key) + (uint64_t(step) + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return double((z ^ z >> 31) >> 11) * 0x1p-53;
}

static int32_t draw(const void* logits, bool is_bfloat16, const SamplerState& state, int64_t at, int64_t* id) {
    static thread_local const std::unique_ptr<Row> memory(new Row);  // not a Row: its address would be calls, in loops
    Row& row = *memory;
    row.fit(state.vocab_size);
    score(logits, is_bfloat16, state, at, row);
    if (!(state.temperature[at] > 0)) {
        *id = first_of_best(row);
        return OK;
    }
    if (row.has_nan || !std::isfinite(row.best)) return NOT_FINITE;
    const int64_t k = state.top_k[at];
    row.floor = 0 < k && k < row.width ? kth_score(row, k) : -INFINITE;
    row.lowest = LEAST_EXPONENT;
    weigh(row);
    if (state.tail[at] >= 0) cut_tail(row, state.tail[at]);
    if (state.min_p[at] > 0) row.lowest = std::max(least_distance(state.min_p[at]), LEAST_EXPONENT);
    if (state.tail[at] >= 0 || state.min_p[at] > 0) weigh(row);
    *id = pick(row, uniform(state.key[at], state.step[at]));
    return OK;
}

// row_stride is in elements; ids gets (num_rows,). Records only what it returns OK for. Where there are flags,
// (num_rows,) zeros, rows that cannot be drawn are marked there and get id 0, and the others go on.
extern "C" int32_t sampler_draw(const SamplerState* state, const void* logits, int32_t is_bfloat16, int64_t row_stride,
                                int64_t num_rows, const int64_t* rows, int64_t* ids, uint8_t* flags, int32_t threads) {
    for (int64_t b = 0; b < num_rows; b++)
        if (rows[b] < 0 || rows[b] >= state->rows) return NO_SUCH_ROW;
    const int64_t row_bytes = row_stride * (is_bfloat16 ? 2 : 4);
    int32_t status = OK;
#pragma omp parallel for num_threads(threads > 1 ? threads : 1) schedule(dynamic) reduction(| : status)
    for (int64_t b = 0; b < num_rows; b++) {
        const auto failed = draw((const char*)logits + b * row_bytes, is_bfloat16, *state, rows[b], ids + b);
        if (failed && flags) flags[b] = 1, ids[b] = 0;
        else status |= failed;
    }
    if (status) return status;
    for (int64_t b = 0; b < num_rows; b++) {
        state->step[rows[b]]++;
        if (state->counts) state->counts[rows[b] * state->vocab_size + ids[b]]++;
    }
    return OK;
}
