// Compiled code called call after call without Python: at once, or tape after tape in a thread of its own, which is to
// a CPU what a stream is to an accelerator. Tensors are handles of torch's C interface, kept in a tape's registers.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

struct Tensor;  // torch's AtenTensorOpaque
struct Given {
    int32_t (*new_tensor_handle)(Tensor*, Tensor**);
    int32_t (*delete_tensor_object)(Tensor*);
    void (*grad_mode_set_enabled)(bool);
};
static Given given;
extern "C" void set_given(const Given* values) { given = *values; }
extern "C" void omp_set_num_threads(int);

constexpr int64_t MOST_OPERANDS = 256, MOST_TEXT = 1024;

// `in` and `out` are numbers of registers; the call's time is added to nanoseconds[charge].
struct Call {
    int32_t (*run)(void*, Tensor**, size_t, Tensor**, size_t, void*, void*);
    int32_t (*last_error)(const char**);
    void* container;
    const int64_t *in, *out;
    int64_t num_in, num_out, charge;
};
struct Save {  // rows of a tensor, before the first call
    const char* from;
    char* to;
    const int64_t* rows;
    int64_t num_rows, row_bytes;
};
struct Tape;
struct Link {  // what an earlier tape has made
    const Tape* from;
    int64_t source, target;
};
struct Tape {
    const Call* calls;
    const Save* saves;
    const Link* links;
    Tensor** registers;
    int64_t* nanoseconds;
    int64_t num_calls, num_saves, num_links, num_registers, failed, is_done;  // failed: 1 + the call's number
    char error[MOST_TEXT];
};

static void fail(Tape& tape, int64_t call, const char* why) {
    tape.failed = 1 + call;
    strncpy(tape.error, why && *why ? why : "no reason was given", MOST_TEXT - 1);
}

extern "C" void tape_run(Tape* const pointer) {
    Tape& tape = *pointer;
    for (int64_t i = 0; i < tape.num_saves; i++) {  // first, as they are what a failed tape is undone with
        const Save& save = tape.saves[i];
        for (int64_t row = 0; row < save.num_rows; row++)
            memcpy(save.to + row * save.row_bytes, save.from + save.rows[row] * save.row_bytes, save.row_bytes);
    }
    for (int64_t i = 0; i < tape.num_links; i++) {
        const Link& link = tape.links[i];
        if (link.from->failed) return fail(tape, 0, "the step before it failed");
        if (given.new_tensor_handle(link.from->registers[link.source], &tape.registers[link.target]))
            return fail(tape, 0, "no handle of a tensor was given");
    }
    for (int64_t i = 0; i < tape.num_calls; i++) {
        const Call& call = tape.calls[i];
        Tensor *in[MOST_OPERANDS], *out[MOST_OPERANDS] = {};
        for (int64_t j = 0; j < call.num_in; j++)  // the code takes them
            if (given.new_tensor_handle(tape.registers[call.in[j]], &in[j]))
                return fail(tape, i, "no handle of a tensor was given");
        const auto started = std::chrono::steady_clock::now();
        const int32_t status = call.run(call.container, in, call.num_in, out, call.num_out, nullptr, nullptr);
        const auto taken = std::chrono::steady_clock::now() - started;
        tape.nanoseconds[call.charge] += std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
        if (status) {
            const char* why = nullptr;
            call.last_error(&why);
            return fail(tape, i, why);
        }
        for (int64_t j = 0; j < call.num_out; j++) {  // one tensor on two ports is one handle, given twice
            bool is_repeated = false;
            for (int64_t k = 0; k < j; k++) is_repeated |= out[k] == out[j];
            if (is_repeated && given.new_tensor_handle(out[j], &tape.registers[call.out[j]]))
                return fail(tape, i, "no handle of a tensor was given");
            if (!is_repeated) tape.registers[call.out[j]] = out[j];
        }
    }
}

extern "C" void tape_clear(Tape* tape) {
    for (int64_t i = 0; i < tape->num_registers; i++)
        if (tape->registers[i]) given.delete_tensor_object(tape->registers[i]);
}

struct Queue {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Tape*> tapes;  // the first one runs
    bool is_closed = false;
    int64_t busy_ns = 0;
    std::thread thread;

    void serve(int threads) {
        given.grad_mode_set_enabled(false);
        omp_set_num_threads(threads);
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            changed.wait(lock, [this] { return is_closed || !tapes.empty(); });
            if (tapes.empty()) return;
            Tape* const tape = tapes.front();
            lock.unlock();
            const auto started = std::chrono::steady_clock::now();
            tape_run(tape);
            const auto taken = std::chrono::steady_clock::now() - started;
            lock.lock();
            busy_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(taken).count();
            tape->is_done = 1;
            tapes.pop_front();
            changed.notify_all();
        }
    }
};

extern "C" Queue* queue_new(int threads) {
    Queue* queue = new Queue;
    queue->thread = std::thread([=] { queue->serve(threads); });
    return queue;
}
extern "C" void queue_put(Queue* queue, Tape* tape) {
    const std::lock_guard<std::mutex> lock(queue->mutex);
    queue->tapes.push_back(tape);
    queue->changed.notify_all();
}
extern "C" void queue_wait(Queue* queue, const Tape* tape) {  // null: all
    std::unique_lock<std::mutex> lock(queue->mutex);
    queue->changed.wait(lock, [=] { return tape ? tape->is_done : queue->tapes.empty(); });
}
extern "C" int64_t queue_busy_ns(Queue* queue) {
    const std::lock_guard<std::mutex> lock(queue->mutex);
    return queue->busy_ns;
}
extern "C" void queue_free(Queue* queue) {  // after what it holds has run
    {
        const std::lock_guard<std::mutex> lock(queue->mutex);
        queue->is_closed = true;
        queue->changed.notify_all();
    }
    queue->thread.join();
    delete queue;
}
