// CUDA for one CPU thread: enough to run the project's kernels as they are.
//
// Every thread of a CTA is a fiber, which runs until it waits for others: at a barrier, or at a shuffle of its warp. A warp
// runs as far as it can before the next one. The caller chooses the order, forward or backward, so that code that works only
// by luck fails in one of the two.
// Shared memory is poisoned before every CTA. Barriers and shuffles that not all threads reach, shuffles from lanes that
// don't take part, and 16-byte words at odd addresses are errors.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __noinline__
#define __launch_bounds__(...)
#define __shared__ static __attribute__((section("shared_memory")))

using std::sqrt;

template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static std::string failure;

static void fail(const std::string& what) {
    if (!failure.empty()) return;
    auto text = [](const uint3& at) {
        return "(" + std::to_string(at.x) + ", " + std::to_string(at.y) + ", " + std::to_string(at.z) + ")";
    };
    failure = what + ", in thread " + text(threadIdx) + " of CTA " + text(blockIdx);
}

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

template <class T>
void check_address(const T* at) {
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T))
        fail("a word of " + std::to_string(sizeof(T)) + " bytes is at an address that does not fit");
}

// Bytes are copied, so that the compiler does not assume any alignment.
template <class T>
T __ldcg(const T* from) {
    T all;
    check_address(from);
    memcpy(&all, from, sizeof all);
    return all;
}

template <class T>
void __stcg(T* to, T all) {
    check_address(to);
    memcpy(to, &all, sizeof all);
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= unsigned(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline double __longlong_as_double(long long bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

inline long long __double_as_longlong(double x) {
    long long bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

// A GPU widens a NaN to this one, whatever its bits are.
inline float half_to_float(unsigned short bits) {
    _Float16 x;
    memcpy(&x, &bits, sizeof x);
    return x != x ? __uint_as_float(0x7fffffff) : float(x);
}

inline unsigned short float_to_half(float x) {
    _Float16 half = x;
    unsigned short bits;
    memcpy(&bits, &half, sizeof bits);
    return bits;
}

// As rough as a GPU's may be: two units too large or too small.
inline float rough_reciprocal(float x) {
    float y = 1 / x;
    return __uint_as_float(__float_as_uint(y) + (__float_as_uint(y) & 1 ? 2 : -2));
}

// a + b, rounded down. The error of rounding to the nearest is exact (Knuth's TwoSum).
inline float __fadd_rd(float a, float b) {
    float sum = a + b, part = sum - a, error = (a - (sum - part)) + (b - part);
    return error < 0 ? std::nextafterf(sum, -INFINITY) : sum;
}


// ---- Fibers ----

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
constexpr int warp_size = 32;
constexpr int every = -1;
constexpr unsigned long long poison = 0xffc0dead'ffc0deadull;

static std::vector<Fiber> fibers;
static char* stacks;
static void* scheduler[5];
static Fiber* running;
static void (*body)(void**);
static void** arguments;

// To switch by swapcontext would be two calls of the operating system, for the mask of signals.
static __attribute__((noipa)) void jump(void** to) { __builtin_longjmp(to, 1); }

static __attribute__((noipa)) void wait() {
    if (!__builtin_setjmp(running->parked)) jump(scheduler);
}

inline int __syncthreads_count(int predicate) {
    Fiber* self = running;
    self->value = predicate != 0, self->state = Fiber::at_barrier;
    wait();
    return self->value;
}

inline void __syncthreads() { __syncthreads_count(0); }

template <class T>
T shuffled(unsigned mask, T value, int from) {
    static_assert(sizeof(T) <= sizeof running->value);
    Fiber* self = running;
    memcpy(&self->value, &value, sizeof value);
    self->mask = mask, self->from = from, self->state = Fiber::at_shuffle;
    wait();
    memcpy(&value, &self->value, sizeof value);
    return value;
}

inline int lane_of_running();

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance) {
    return shuffled(mask, value, lane_of_running() ^ distance);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
    return shuffled(mask, value, from % warp_size);
}

// A lane without a partner keeps its value.
template <class T>
T __shfl_up_sync(unsigned mask, T value, int distance) {
    int lane = lane_of_running();
    return shuffled(mask, value, lane < distance ? lane : lane - distance);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, int distance) {
    int lane = lane_of_running();
    return shuffled(mask, value, lane + distance < warp_size ? lane + distance : lane);
}

// Each lane clears its own bit, or none.
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return shuffled(mask, predicate ? ~0ull : ~(1ull << lane_of_running()), every) & mask;
}

inline int __ffs(int bits) { return __builtin_ffs(bits); }

inline int __clz(int bits) { return bits ? __builtin_clz(bits) : 32; }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

inline void __threadfence() {}

// Threads take turns, so that nothing comes between.
template <class T>
T atomicAdd(T* at, T value) {
    T before = *at;
    *at += value;
    return before;
}

inline int lane_of_running() { return (running - fibers.data()) % warp_size; }

inline int __all_sync(unsigned mask, int predicate) { return shuffled(mask, predicate != 0, every); }

inline void __syncwarp(unsigned mask = 0xffffffff) { __all_sync(mask, 1); }

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
static const char* run_grid(void (*kernel)(void**), const unsigned* grid, const unsigned* block, void** args,
                            bool backwards) {
    body = kernel, arguments = args, failure.clear();
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    size_t count = size_t(block[0]) * block[1] * block[2];
    if (count == 0 || count > most_threads || grid[0] == 0 || grid[1] == 0 || grid[1] > 65535) return "no such grid";
    fibers.resize(count);
    if (!stacks) stacks = new char[most_threads * stack_bytes];  // the system gives memory when it is written to
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

template <class... Args>
size_t size_of_argument(void (*)(Args...), size_t at) {
    const size_t sizes[] = {sizeof(Args)...};
    return sizes[at];
}

template <class... Args, size_t... at>
void call(void (*kernel)(Args...), void** args, std::index_sequence<at...>) {
    kernel(*static_cast<Args*>(args[at])...);
}

// Makes `NAME_grid`, which runs kernel NAME with pointers to its arguments, as cuLaunchKernel does.
#define LAUNCHER(name)                                                                                             \
    template <class... Args>                                                                                       \
    constexpr size_t name##_count(void (*)(Args...)) { return sizeof...(Args); }                                   \
    static void name##_body(void** args) { call(name, args, std::make_index_sequence<name##_count(&name)>()); }    \
    extern "C" size_t name##_arguments() { return name##_count(&name); }                                           \
    extern "C" size_t name##_size(size_t at) { return size_of_argument(&name, at); }                               \
    extern "C" const char* name##_grid(const unsigned* grid, const unsigned* block, void** args, bool backwards) { \
        return run_grid(name##_body, grid, block, args, backwards);                                                \
    }
