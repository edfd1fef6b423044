// The threads of a grid of `cuda_on_cpu.h`, as fibers of one thread: compiled once, and linked to all kernels.

#include "cuda_on_cpu.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;
static std::string failure;

void fail(const char* what) {
    if (!failure.empty()) return;
    auto text = [](const uint3& at) {
        return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
    };
    failure = std::string(what) + ", in thread " + text(threadIdx) + " of CTA " + text(blockIdx);
}

void fail_at_address(size_t size) {
    const auto what = "a word of " + std::to_string(size) + " bytes is at an address that does not fit";
    fail(what.c_str());
}

struct Fiber {
    void* parked[5];  // where it waits, or has ended
    bool started;
    uint3 index;
    enum { ready, at_barrier, at_shuffle, done } state;
    unsigned mask;  // of a shuffle
    int from;       // the lane whose value it gets; `every` for the values of all lanes, joined by "and"
    unsigned long long value;
};

constexpr size_t stack_bytes = 1 << 16, most_threads = 1024;
constexpr unsigned long long poison = 0xffc0dead'ffc0deadull;

static std::vector<Fiber> fibers;
static std::unique_ptr<char[]> stacks;
static void* scheduler[5];
static Fiber* running;
static void (*body)(void**);
static void** arguments;

// To switch by swapcontext would be two calls of the operating system, for the mask of signals.
static __attribute__((noipa)) void jump(void** to) { __builtin_longjmp(to, 1); }

static __attribute__((noipa)) void wait() {
    if (!__builtin_setjmp(running->parked)) jump(scheduler);
}

int __syncthreads_count(int predicate) {
    Fiber* self = running;
    self->value = predicate != 0, self->state = Fiber::at_barrier;
    wait();
    return self->value;
}

unsigned long long shuffled_bits(unsigned mask, unsigned long long value, int from) {
    Fiber* self = running;
    self->value = value, self->mask = mask, self->from = from, self->state = Fiber::at_shuffle;
    wait();
    return self->value;
}

int lane_of_running() { return (running - fibers.data()) % warp_size; }

// One thread of each CTA in turn.
static void run_fiber() {
    for (;;) {
        body(arguments);
        running->state = Fiber::done;
        wait();
    }
}

// Run a fiber until it waits or ends.
static __attribute__((noipa)) void resume(Fiber* fiber) {
    running = fiber, threadIdx = fiber->index;
    if (__builtin_setjmp(scheduler)) return;
    if (fiber->started) jump(fiber->parked);
    fiber->started = true;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = &stacks[(fiber - fibers.data()) * stack_bytes];
    context.uc_stack.ss_size = stack_bytes;
    makecontext(&context, run_fiber, 0);
    setcontext(&context);
}

// Let the lanes of a warp exchange their values, if all of them wait for it.
static bool shuffle(Fiber* lanes, int count) {
    unsigned mask = lanes[0].mask;
    for (int lane = 0; lane < warp_size; ++lane) {
        if (!(mask >> lane & 1)) continue;
        if (lane >= count || lanes[lane].state != Fiber::at_shuffle || lanes[lane].mask != mask) return false;
    }
    unsigned long long values[warp_size], all = ~0ull;
    for (int lane = 0; lane < count; ++lane)
        if (mask >> lane & 1) all &= lanes[lane].value;
    for (int lane = 0; lane < count; ++lane) {
        int from = lanes[lane].from;
        values[lane] = from == every ? all : from < count && mask >> from & 1 ? lanes[from].value : poison;
    }
    for (int lane = 0; lane < count; ++lane)
        if (mask >> lane & 1) lanes[lane].value = values[lane], lanes[lane].state = Fiber::ready;
    return true;
}

// Run one warp until all of its threads are done or wait at the barrier. Returns how many have ended.
static size_t run_warp(size_t first, bool backwards) {
    size_t ended = 0;
    int count = std::min<size_t>(warp_size, fibers.size() - first);
    do {
        for (int i = 0; i < count; ++i) {
            Fiber& fiber = fibers[first + (backwards ? count - 1 - i : i)];
            if (fiber.state != Fiber::ready) continue;
            resume(&fiber);
            ended += fiber.state == Fiber::done;
        }
    } while (failure.empty() && fibers[first].state == Fiber::at_shuffle && shuffle(&fibers[first], count));
    return ended;
}

extern char __start_shared_memory[] __attribute__((weak)), __stop_shared_memory[] __attribute__((weak));

static void run_cta(bool backwards) {
    if (__start_shared_memory) memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
    size_t count = fibers.size(), left = count;
    for (size_t i = 0; i < count; ++i) {
        Fiber& fiber = fibers[i];
        fiber.state = Fiber::ready;
        fiber.index = {unsigned(i % blockDim.x), unsigned(i / blockDim.x % blockDim.y),
                       unsigned(i / blockDim.x / blockDim.y)};
    }
    while (left && failure.empty()) {
        size_t warps = (count + warp_size - 1) / warp_size;
        for (size_t i = 0; i < warps; ++i) left -= run_warp((backwards ? warps - 1 - i : i) * warp_size, backwards);
        if (!left) return;
        unsigned long long sum = 0;
        for (Fiber& fiber : fibers) {
            if (fiber.state != Fiber::at_barrier) fail("not all threads reach a barrier or shuffle");
            sum += fiber.value;
        }
        for (Fiber& fiber : fibers) fiber.value = sum, fiber.state = Fiber::ready;
    }
}

// Run a grid. Returns nullptr, or what went wrong.
const char* run_grid(void (*kernel)(void**), const unsigned* grid, const unsigned* block, void** args, bool backwards) {
    body = kernel, arguments = args, failure.clear();
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    size_t count = size_t(block[0]) * block[1] * block[2];
    if (count == 0 || count > most_threads || grid[0] == 0 || grid[1] == 0 || grid[1] > 65535) return "no such grid";
    fibers.resize(count);
    if (!stacks) stacks.reset(new char[most_threads * stack_bytes]);  // the system gives memory when it is written to
    size_t ctas = size_t(grid[0]) * grid[1] * grid[2];
    for (size_t i = 0; i < ctas && failure.empty(); ++i) {
        size_t at = backwards ? ctas - 1 - i : i;
        blockIdx = {unsigned(at % grid[0]), unsigned(at / grid[0] % grid[1]), unsigned(at / grid[0] / grid[1])};
        run_cta(backwards);
    }
    if (failure.empty()) return nullptr;
    for (Fiber& fiber : fibers) fiber.started = false;  // some may wait for ever
    return failure.c_str();
}
