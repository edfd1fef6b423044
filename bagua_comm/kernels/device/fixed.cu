// Block fixed point: the elements of a block as multiples of one unit, a power of two. kernels/host is the specification.
//
//   unit = 2^(max(f, 1) - 126 - bits)    q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)
//
// f is the exponent field of the largest |x| of the block; for float64, 126 becomes 1022. Block b is x[bounds[b]] up to
// x[bounds[b + 1]].
//
// A warp works on a block: threadIdx.x is the lane, threadIdx.y the warp in the CTA. Neighbouring lanes read neighbouring
// elements. Blocks begin where tensors do, so wider words would seldom fit.

#include "numbers.cuh"

// The types and the format of floats: kernels/host has what the names mean.
template <class T>
struct Format {
    using word = uint32;
    using field = uint8;
    using total = int32;
    static constexpr int digits = 24;
    static constexpr int64 offset = 126;
    static __device__ word bits(float32 x) { return __float_as_uint(x); }
    static __device__ float32 of_bits(word x) { return __uint_as_float(x); }
};
template <>
struct Format<float64> {
    using word = uint64;
    using field = uint16;
    using total = int64;
    static constexpr int digits = 53;
    static constexpr int64 offset = 1022;
    static __device__ word bits(float64 x) { return uint64(__double_as_longlong(x)); }
    static __device__ float64 of_bits(word x) { return __longlong_as_double(int64(x)); }
};

using form = Format<wide>;
using word = form::word;
using field_type = form::field;
using total_type = form::total;

constexpr int64 not_finite = 2 * form::offset + 3;

// Call `work(block)` for each block of this warp.
template <class Work>
__device__ void each_block(int64 blocks, Work work) {
    int64 step = int64(gridDim.x) * blockDim.y;
    for (int64 block = int64(blockIdx.x) * blockDim.y + threadIdx.y; block < blocks; block += step) work(block);
}

__device__ int64 exponent(int64 field) { return max(field, int64(1)) - form::offset; }

// 2^power; it is a normal number.
template <class T>
__device__ T power_of_2(int64 power) {
    return Format<T>::of_bits(typename Format<T>::word(power + Format<T>::offset + 1) << (Format<T>::digits - 1));
}

// total / divisor, rounded once: see the host's quotients.
__device__ float64 quotient(int32 total, int64 divisor) { return float64(total) / float64(divisor); }

__device__ float64 quotient(int64 total, int64 divisor) {
    int64 limit = int64(1) << 53;
    float64 whole = -limit < total && total < limit ? 0.0 : float64(total / divisor);
    int64 rest = int64(uint64(total) - uint64(int64(whole)) * uint64(divisor));
    return whole + float64(rest) / float64(divisor);
}

extern "C" __global__ void exponents(const element* x, const int64* bounds, field_type* fields, int64 blocks) {
    each_block(blocks, [=](int64 block) {
        word most = 0;
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += warp)
            most = max(most, word(form::bits(widen(x[i])) & (~word(0) >> 1)));
        for (int distance = warp / 2; distance > 0; distance /= 2)
            most = max(most, __shfl_xor_sync(all_lanes, most, distance));
        if (threadIdx.x == 0) fields[block] = field_type(max(word(fields[block]), most >> (form::digits - 1)));
    });
}

extern "C" __global__ void add(const element* x, const int64* bounds, const field_type* fields, total_type* total,
                               int64 bits, int64 first, int64 blocks) {
    total_type limit = total_type((word(1) << bits) - 1);
    each_block(blocks, [=](int64 block) {
        int64 field = fields[block], power = bits - exponent(field);
        // By two factors, because one may overflow. Nothing is rounded but what is far below 1/2.
        int64 half = power >> 1;
        wide left = power_of_2<wide>(half), right = power_of_2<wide>(power - half);
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += warp) {
            wide scaled = field == not_finite ? 0 : widen(x[i]) * left * right;
            total_type q = min(max(total_type(rint(scaled)), -limit), limit);
            total[i] = first ? q : total[i] + q;
        }
    });
}

extern "C" __global__ void mean(const total_type* total, const int64* bounds, const field_type* fields, element* out,
                                int64 bits, int64 divisor, int64 blocks) {
    each_block(blocks, [=](int64 block) {
        int64 field = fields[block], power = exponent(field) - bits;
        // In float64, because the quotient must be exact enough; 2^power may be no normal number.
        int64 half = power >> 1;
        float64 left = power_of_2<float64>(half), right = power_of_2<float64>(power - half);
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += warp) {
            wide value = wide(quotient(total[i], divisor) * left * right);
            out[i] = narrow<element>(field == not_finite ? wide(__uint_as_float(canonical_nan)) : value);
        }
    });
}
