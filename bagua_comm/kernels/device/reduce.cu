// Reduce the rows of a matrix, in row order. kernels/host is the specification.
//
// float16 and bfloat16 accumulate in float32 and are rounded once. The average of integers accumulates in 64 bits and is
// truncated. A thread works on 16 bytes' worth of neighbouring columns. INTEGER is defined where ELEMENT is an integer.

#include "numbers.cuh"

constexpr int width = access_bytes / sizeof(element);

// The type in which "avg" accumulates.
template <class T>
struct Long {
    using type = T;
};
template <> struct Long<int8> { using type = int64; };
template <> struct Long<int16> { using type = int64; };
template <> struct Long<int32> { using type = int64; };
template <> struct Long<uint8> { using type = uint64; };
template <> struct Long<uint16> { using type = uint64; };
template <> struct Long<uint32> { using type = uint64; };

// `rows` is (summands, count); `out` may be one of them.
template <class Total, class Join, class Finish>
__device__ void reduce(const element* rows, element* out, int64 summands, int64 count, Join join, Finish finish) {
    int64 step = int64(gridDim.x) * blockDim.x * width;
    for (int64 at = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * width; at < count; at += step) {
        int64 number = min(count - at, int64(width));
        Total total[width];
        for (int64 r = 0; r < summands; ++r) {
            element term[width];
            load(rows + r * count + at, number, term);
#pragma unroll
            for (int i = 0; i < width; ++i) {
                Total value = Total(widen(term[i]));
                total[i] = r == 0 ? value : join(total[i], value);
            }
        }
        element result[width];
#pragma unroll
        for (int i = 0; i < width; ++i) result[i] = narrow<element>(with_canonical_nan(wide(finish(total[i]))));
        store(out + at, number, result);
    }
}

#define REDUCTION(name, Total, joined, finished)                                                          \
    extern "C" __global__ void name(const element* rows, element* out, int64 summands, int64 count) {     \
        using total = Total;                                                                              \
        reduce<total>(                                                                                    \
            rows, out, summands, count, [](total a, total b) { return total(joined); },                   \
            [=](total a) { return total(finished); });                                                    \
    }

REDUCTION(reduce_sum, wide, a + b, a)
REDUCTION(reduce_avg, Long<wide>::type, a + b, a / total(summands))
REDUCTION(reduce_prod, wide, a * b, a)
REDUCTION(reduce_min, wide, is_nan(a) || a < b ? a : b, a)  // NaN spreads
REDUCTION(reduce_max, wide, is_nan(a) || a > b ? a : b, a)

#ifdef INTEGER
REDUCTION(reduce_band, wide, a & b, a)
REDUCTION(reduce_bor, wide, a | b, a)
REDUCTION(reduce_bxor, wide, a ^ b, a)
#endif
