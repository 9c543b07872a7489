// Our operators as AOTInductor's code calls them: by torch's C interface for compiled code, without the dispatcher and
// without Python, so that other threads go on meanwhile. What they need comes in `Given`, once: the kernels, and torch's C
// functions.
#include <cstdint>
#include <cstring>
#include <initializer_list>

struct Tensor;  // torch's AtenTensorOpaque
struct Given {
    void (*linear[2])(const void*, const void*, const void*, void*, int64_t, int64_t, int64_t, int);
    void (*attention[2])(const void*, const void*, const void*, const void*, void*, void*, void*, int64_t, int64_t,
                         int64_t, int64_t, int64_t, int64_t, int64_t, float, int);
    void (*linear_int4[2])(const void*, const void*, const void*, const void*, void*, int64_t, int64_t, int64_t,
                           int64_t, int);
    int32_t (*draw)(const void* state, const void* logits, int32_t is_bfloat16, int64_t row_stride, int64_t num_rows,
                    const int64_t* rows, int64_t* ids, uint8_t* flags, int32_t threads);
    void (*grouped[2])(const void*, const void*, const int64_t*, void*, int64_t, int64_t, int64_t, int64_t, int);
    int32_t (*get_data_ptr)(Tensor*, void**);
    int32_t (*get_dtype)(Tensor*, int32_t*);
    int32_t (*get_dim)(Tensor*, int64_t*);
    int32_t (*get_sizes)(Tensor*, int64_t**);
    int32_t (*get_strides)(Tensor*, int64_t**);
    int32_t (*empty_strided)(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, Tensor**);
};
static Given given;
extern "C" void set_given(const Given* values) { given = *values; }
extern "C" int omp_get_max_threads();

constexpr int32_t OK = 0, FAILED = 1, INT32 = 3, INT64 = 4, FLOAT32 = 6, BFLOAT16 = 15, CPU = 0;
constexpr int64_t SERIAL = 1 << 18, MOST_DIMS = 8;  // as in linear.py

struct View {
    char* data;
    int32_t dtype;
    int64_t dims, *sizes, *strides;
    bool is_read;
    explicit View(Tensor* tensor) {
        is_read = !given.get_data_ptr(tensor, (void**)&data) && !given.get_dtype(tensor, &dtype) &&
                  !given.get_dim(tensor, &dims) && !given.get_sizes(tensor, &sizes) &&
                  !given.get_strides(tensor, &strides) && dims <= MOST_DIMS;
    }
    int64_t size(int64_t from, int64_t to) const {
        int64_t product = 1;
        for (int64_t i = from; i < to; i++) product *= sizes[i];
        return product;
    }
    bool is_contiguous(int64_t from = 0) const {
        int64_t expected = 1;
        for (int64_t i = dims - 1; i >= from; expected *= sizes[i--])
            if (sizes[i] != 1 && strides[i] != expected) return false;
        return true;
    }
};
static int32_t empty(const View& like, int64_t last, Tensor** out) {
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS], stride = 1;
    for (int64_t i = like.dims - 1; i >= 0; i--) {
        sizes[i] = i == like.dims - 1 ? last : like.sizes[i];
        strides[i] = stride;
        stride *= sizes[i];
    }
    return given.empty_strided(like.dims, sizes, strides, like.dtype, CPU, 0, out);
}
static bool is_ours(int32_t dtype) { return dtype == FLOAT32 || dtype == BFLOAT16; }

extern "C" int32_t aoti_torch_cpu_linear(Tensor* x, Tensor* weight, Tensor** bias, int32_t, Tensor** out) {
    const View a(x), w(weight);
    if (!a.is_read || !w.is_read || !is_ours(a.dtype) || a.dtype != w.dtype || w.dims != 2) return FAILED;
    if (!a.is_contiguous() || !w.is_contiguous() || a.sizes[a.dims - 1] != w.sizes[1]) return FAILED;
    void* b = nullptr;
    if (bias && *bias && given.get_data_ptr(*bias, &b)) return FAILED;
    if (empty(a, w.sizes[0], out)) return FAILED;
    const View y(*out);
    const int64_t rows = a.size(0, a.dims - 1), width = w.sizes[0], depth = w.sizes[1];
    const int threads = rows * width * depth > SERIAL ? omp_get_max_threads() : 1;
    given.linear[a.dtype == BFLOAT16](a.data, w.data, b, y.data, rows, width, depth, threads);
    return OK;
}

extern "C" int32_t aoti_torch_cpu_grouped_linear(Tensor* x, Tensor* weight, Tensor* group, Tensor** out) {
    const View a(x), w(weight), g(group);
    if (!a.is_read || !w.is_read || !g.is_read || a.dims != 2 || w.dims != 3 || g.dims != 1) return FAILED;
    if (!is_ours(a.dtype) || a.dtype != w.dtype || g.dtype != INT64 || g.sizes[0] != a.sizes[0]) return FAILED;
    if (!a.is_contiguous() || !w.is_contiguous() || !g.is_contiguous() || a.sizes[1] != w.sizes[2]) return FAILED;
    if (empty(a, w.sizes[1], out)) return FAILED;
    const int threads = a.sizes[0] * w.sizes[1] * w.sizes[2] > SERIAL ? omp_get_max_threads() : 1;
    given.grouped[a.dtype == BFLOAT16](a.data, w.data, (const int64_t*)g.data, View(*out).data, a.sizes[0], w.sizes[0],
                                       w.sizes[1], w.sizes[2], threads);
    return OK;
}

extern "C" int32_t aoti_torch_cpu_linear_int4(Tensor* x, Tensor* words, Tensor* scales, Tensor** bias, Tensor** out) {
    constexpr int64_t BLOCK = 128, WORDS = 16;  // as in quantized.py
    const View a(x), w(words), s(scales);
    if (!a.is_read || !w.is_read || !s.is_read || w.dims != 2 || s.dims != 3 || !is_ours(a.dtype)) return FAILED;
    if (w.dtype != INT32 || s.dtype != BFLOAT16 || s.sizes[0] != w.sizes[0] || s.sizes[2] != 2) return FAILED;
    if (!a.is_contiguous() || !w.is_contiguous() || !s.is_contiguous()) return FAILED;
    const int64_t rows = a.size(0, a.dims - 1), width = w.sizes[0], depth = a.sizes[a.dims - 1];
    if ((depth + BLOCK - 1) / BLOCK * WORDS != w.sizes[1]) return FAILED;
    void* b = nullptr;
    if (bias && *bias && given.get_data_ptr(*bias, &b)) return FAILED;
    if (empty(a, width, out)) return FAILED;
    const int64_t group_size = w.sizes[1] / WORDS * BLOCK / s.sizes[1];
    const int threads = rows * width * depth > SERIAL ? omp_get_max_threads() : 1;
    given.linear_int4[a.dtype == BFLOAT16](a.data, w.data, s.data, b, View(*out).data, rows, width, depth, group_size,
                                           threads);
    return OK;
}

// `step`: the address of the plan as the kernel reads it, then those of each layer's keys and values.
extern "C" int32_t aoti_torch_cpu_attend(Tensor* q, Tensor* k, Tensor* v, Tensor* step, int64_t layer, double scale,
                                         int64_t window, Tensor** out) {
    const View queries(q), keys(k), values(v), steps(step);
    for (const View* one : {&queries, &keys, &values})
        if (!one->is_read || one->dims != 3 || one->dtype != queries.dtype || !one->is_contiguous(1)) return FAILED;
    if (!is_ours(queries.dtype) || !steps.is_read || empty(queries, queries.sizes[2], out)) return FAILED;
    void* const* addresses = (void* const*)steps.data;
    given.attention[queries.dtype == BFLOAT16](
        addresses[0], queries.data, keys.data, values.data, addresses[1 + 2 * layer], addresses[2 + 2 * layer],
        View(*out).data, queries.strides[0], keys.strides[0], values.strides[0], queries.sizes[1], keys.sizes[1],
        queries.sizes[2], window, (float)scale, omp_get_max_threads());
    return OK;
}

// `draws`: addresses of rows and of flags, then for each draw those of the sampler's state and of a copy of the ids.
extern "C" int32_t aoti_torch_cpu_draw(Tensor* logits, Tensor* draws, int64_t index, Tensor** out) {
    const View scores(logits), table(draws);
    if (!scores.is_read || !table.is_read || scores.dims != 2 || !is_ours(scores.dtype) || !scores.is_contiguous(1))
        return FAILED;
    const int64_t one = 1, rows = scores.sizes[0];
    if (given.empty_strided(1, &rows, &one, INT64, CPU, 0, out)) return FAILED;
    void* const* addresses = (void* const*)table.data;
    int64_t* const ids = (int64_t*)View(*out).data;
    if (given.draw(addresses[2 + 2 * index], scores.data, scores.dtype == BFLOAT16, scores.strides[0], rows,
                   (const int64_t*)addresses[0], ids, (uint8_t*)addresses[1], omp_get_max_threads()))
        return FAILED;
    memcpy(addresses[3 + 2 * index], ids, rows * sizeof(int64_t));
    return OK;
}
