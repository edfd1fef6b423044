// Block fixed point: the elements of a block as multiples of one unit, a power of two. kernels/host is the specification.
//
//   unit = 2^(max(f, 1) - 126 - bits)    q = clip(rint(x / unit), 1 - 2^bits, 2^bits - 1)
//
// f is the exponent field of the largest |x| of the block. Block b is x[bounds[b]] up to x[bounds[b + 1]].
//
// A warp works on a block: threadIdx.x is the lane, threadIdx.y the warp in the CTA. Neighbouring lanes read neighbouring
// elements. Blocks begin where tensors do, so wider words would seldom fit.

#include "numbers.cuh"

constexpr int lanes = 32;
constexpr int64 not_finite = 255;
constexpr uint32 all_lanes = 0xffffffff;

// Call `work(block)` for each block of this warp.
template <class Work>
__device__ void each_block(int64 blocks, Work work) {
    int64 step = int64(gridDim.x) * blockDim.y;
    for (int64 block = int64(blockIdx.x) * blockDim.y + threadIdx.y; block < blocks; block += step) work(block);
}

__device__ int64 exponent(int64 field) { return max(field, int64(1)) - 126; }

// 2^power; it is a normal number.
__device__ float32 power_of_2(int64 power) { return __uint_as_float(uint32(power + 127) << 23); }

extern "C" __global__ void exponents(const element* x, const int64* bounds, uint8* fields, int64 blocks) {
    each_block(blocks, [=](int64 block) {
        uint32 most = 0;
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += lanes)
            most = max(most, __float_as_uint(widen(x[i])) & 0x7fffffff);
        for (int distance = lanes / 2; distance > 0; distance /= 2)
            most = max(most, __shfl_xor_sync(all_lanes, most, distance));
        if (threadIdx.x == 0) fields[block] = uint8(max(uint32(fields[block]), most >> 23));
    });
}

extern "C" __global__ void add(const element* x, const int64* bounds, const uint8* fields, int32* total, int64 bits,
                               int64 first, int64 blocks) {
    int32 limit = int32((int64(1) << bits) - 1);
    each_block(blocks, [=](int64 block) {
        int64 field = fields[block], power = bits - exponent(field);
        // By two factors, because one may overflow. Nothing is rounded but what is far below 1/2.
        int64 half = power >> 1;
        float32 left = power_of_2(half), right = power_of_2(power - half);
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += lanes) {
            float32 scaled = field == not_finite ? 0 : widen(x[i]) * left * right;
            int32 q = min(max(int32(rintf(scaled)), -limit), limit);
            total[i] = first ? q : total[i] + q;
        }
    });
}

extern "C" __global__ void mean(const int32* total, const int64* bounds, const uint8* fields, element* out, int64 bits,
                                int64 divisor, int64 blocks) {
    each_block(blocks, [=](int64 block) {
        int64 field = fields[block];
        // In float64, because its bits are easily made and the quotient must be exact enough.
        float64 unit = __longlong_as_double((exponent(field) - bits + 1023) << 52);
        for (int64 i = bounds[block] + threadIdx.x; i < bounds[block + 1]; i += lanes) {
            float32 value = float32(float64(total[i]) / float64(divisor) * unit);
            out[i] = narrow<element>(field == not_finite ? __uint_as_float(canonical_nan) : value);
        }
    });
}
