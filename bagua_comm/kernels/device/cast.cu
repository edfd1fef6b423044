// Casts to 16 bits and back. kernels/host is the specification.
//
// Values are rounded half to even. Finite values stay finite, NaN becomes the canonical NaN, and inf stays inf. WIRE is the
// dtype on the wire. A row of the wire holds the elements, padded to 32 bytes. A thread works on 16 bytes' worth of
// elements of a row; blockIdx.y counts rows.

#include "numbers.cuh"

using sent = WIRE;

constexpr int width = access_bytes / sizeof(element);

template <class To>
__device__ To saturated(float32 x) {
    float32 limit = largest_finite<To>(), nan = __uint_as_float(canonical_nan);
    return narrow<To>(is_finite(x) ? fminf(fmaxf(x, -limit), limit) : is_nan(x) ? nan : x);
}

// Call `convert(row, at, number)` for all parts of rows of `count` elements that this thread works on.
template <class Convert>
__device__ void each_word(int64 rows, int64 count, Convert convert) {
    int64 step = int64(gridDim.x) * blockDim.x * width;
    for (int64 row = blockIdx.y; row < rows; row += gridDim.y)
        for (int64 at = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * width; at < count; at += step)
            convert(row, at, min(count - at, int64(width)));
}

__device__ void clear_padding(uint8* wire, int64 row, int64 count, int64 stride) {
    if (blockIdx.x == 0) clear(wire + row * stride, count * sizeof(sent), stride);
}

extern "C" __global__ void encode(const element* x, uint8* wire, int64 rows, int64 count, int64 stride) {
    each_word(rows, count, [&](int64 row, int64 at, int64 number) {
        element from[width];
        sent to[width];
        load(x + row * count + at, number, from);
#pragma unroll
        for (int i = 0; i < width; ++i) to[i] = saturated<sent>(widen(from[i]));
        store(reinterpret_cast<sent*>(wire + row * stride) + at, number, to);
    });
    for (int64 row = blockIdx.y; row < rows; row += gridDim.y) clear_padding(wire, row, count, stride);
}

extern "C" __global__ void decode(const uint8* wire, element* out, int64 rows, int64 count, int64 stride) {
    each_word(rows, count, [&](int64 row, int64 at, int64 number) {
        sent from[width];
        element to[width];
        load(reinterpret_cast<const sent*>(wire + row * stride) + at, number, from);
#pragma unroll
        for (int i = 0; i < width; ++i) to[i] = saturated<element>(widen(from[i]));
        store(out + row * count + at, number, to);
    });
}

// Add the rows of `wires` in float32 and row order, round to the element dtype, and cast.
extern "C" __global__ void combine(const uint8* wires, uint8* wire, int64 summands, int64 count, int64 stride, int64 mean) {
    each_word(1, count, [&](int64, int64 at, int64 number) {
        float32 total[width];
        for (int64 r = 0; r < summands; ++r) {
            sent from[width];
            load(reinterpret_cast<const sent*>(wires + r * stride) + at, number, from);
#pragma unroll
            for (int i = 0; i < width; ++i) total[i] = r == 0 ? widen(from[i]) : total[i] + widen(from[i]);
        }
        sent to[width];
#pragma unroll
        for (int i = 0; i < width; ++i)
            to[i] = saturated<sent>(widen(narrow<element>(mean ? total[i] / summands : total[i])));
        store(reinterpret_cast<sent*>(wire) + at, number, to);
    });
    clear_padding(wire, 0, count, stride);
}
