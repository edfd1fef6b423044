// CUDA for one CPU thread: enough to run the project's kernels as they are. `grid.cpp` runs their threads.
//
// Every thread of a CTA is a fiber, which runs until it waits for others: at a barrier, or at a shuffle of its warp. A warp
// runs as far as it can before the next one. The caller chooses the order, forward or backward, so that code that works only
// by luck fails in one of the two.
// Shared memory is poisoned before every CTA. Barriers and shuffles that not all threads reach, shuffles from lanes that
// don't take part, and 16-byte words at odd addresses are errors.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

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

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};

void fail(const char* what);  // is the error of the launch, unless there is one
void fail_at_address(size_t size);

template <class T>
void check_address(const T* at) {
    if (reinterpret_cast<uintptr_t>(at) % sizeof(T)) fail_at_address(sizeof(T));
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

// ---- Threads that wait for each other ----

constexpr int warp_size = 32;
constexpr int every = -1;  // the lane to shuffle from, for the values of all lanes, joined by "and"

int lane_of_running();
int __syncthreads_count(int predicate);

inline void __syncthreads() { __syncthreads_count(0); }

unsigned long long shuffled_bits(unsigned mask, unsigned long long value, int from);

template <class T>
T shuffled(unsigned mask, T value, int from) {
    unsigned long long bits = 0;
    static_assert(sizeof(T) <= sizeof bits);
    memcpy(&bits, &value, sizeof value);
    bits = shuffled_bits(mask, bits, from);
    memcpy(&value, &bits, sizeof value);
    return value;
}

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

inline int __all_sync(unsigned mask, int predicate) { return shuffled(mask, predicate != 0, every); }

inline void __syncwarp(unsigned mask = 0xffffffff) { __all_sync(mask, 1); }

// ---- Launches ----

const char* run_grid(void (*kernel)(void**), const unsigned* grid, const unsigned* block, void** args, bool backwards);

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
