// The element-wise steps of algorithms and optimizers, each in one pass. kernels/host is the specification.
//
// float16 and bfloat16 are computed in float32 and rounded once; float64 in float64. A thread works on 16 bytes' worth of
// neighbouring elements of every array, and then moves on by the size of the grid. An output may be an input.

#include "numbers.cuh"

constexpr int width = access_bytes / sizeof(element);

// One array of a formula: where it is, and this thread's part of it. It is read first, written last, or both.
template <bool reads, class Pointer>
struct Operand {
    Pointer x;
    wide values[width];

    __device__ void read(int64 at, int64 number) {
        if constexpr (reads) {
            element raw[width];
            load(x + at, number, raw);
#pragma unroll
            for (int i = 0; i < width; ++i) values[i] = widen(raw[i]);
        }
    }
    __device__ void write(int64 at, int64 number) const {
        if constexpr (is_same<Pointer, element*>) {
            element raw[width];
#pragma unroll
            for (int i = 0; i < width; ++i) raw[i] = narrow<element>(values[i]);
            store(x + at, number, raw);
        }
    }
};

using In = Operand<true, const element*>;
using Out = Operand<false, element*>;
using InOut = Operand<true, element*>;

template <class Formula, class... Arrays>
__device__ void each(int64 count, Formula formula, Arrays... arrays) {
    int64 step = int64(gridDim.x) * blockDim.x * width;
    for (int64 at = (int64(blockIdx.x) * blockDim.x + threadIdx.x) * width; at < count; at += step) {
        int64 number = min(count - at, int64(width));
        (arrays.read(at, number), ...);
#pragma unroll
        for (int i = 0; i < width; ++i) formula(arrays.values[i]...);
        (arrays.write(at, number), ...);
    }
}

extern "C" __global__ void add(const element* x, const element* y, element* out, int64 count) {
    each(count, [](wide x, wide y, wide& out) { out = x + y; }, In{x}, In{y}, Out{out});
}

extern "C" __global__ void subtract(const element* x, const element* y, element* out, int64 count) {
    each(count, [](wide x, wide y, wide& out) { out = x - y; }, In{x}, In{y}, Out{out});
}

extern "C" __global__ void scale(element* x, float64 factor, int64 count) {
    float64 by = sizeof(element) < 4 ? float64(wide(factor)) : factor;  // products of float32 are rounded once
    each(count, [=](wide& x) { x = wide(float64(x) * by); }, InOut{x});
}

extern "C" __global__ void loss(const element* x, const element* decoded, element* out, float64 factor, int64 count) {
    wide by = wide(factor);
    each(
        count,
        [=](wide x, wide decoded, wide& out) {
            wide lost = (x - decoded) * by;
            out = is_finite(lost) ? lost : 0;
        },
        In{x}, In{decoded}, Out{out});
}

extern "C" __global__ void decayed_loss(const element* x, const element* decoded, element* out, float64 decay,
                                        int64 count) {
    wide kept = wide(decay);
    each(
        count,
        [=](wide x, wide decoded, wide& out) {
            wide lost = out * kept + (x - decoded);
            out = is_finite(lost) ? lost : 0;
        },
        In{x}, In{decoded}, InOut{out});
}

extern "C" __global__ void midpoint(const element* x, const element* y, element* out, int64 count) {
    each(count, [](wide x, wide y, wide& out) { out = (x + y) / 2; }, In{x}, In{y}, Out{out});
}

extern "C" __global__ void blend(const element* x, const element* y, element* out, float64 weight, int64 count) {
    wide mine = wide(weight), other = wide(1 - weight);
    each(count, [=](wide x, wide y, wide& out) { out = x * mine + y * other; }, In{x}, In{y}, Out{out});
}

extern "C" __global__ void ring_difference(const element* x, const element* left, const element* right,
                                           const element* weight, element* out, int64 count) {
    constexpr wide share = wide(5.0 / 3);
    each(
        count,
        [=](wide x, wide left, wide right, wide weight, wide& out) { out = x + left / 3 + right / 3 - weight * share; },
        In{x}, In{left}, In{right}, In{weight}, Out{out});
}

extern "C" __global__ void move_half(const element* x, const element* received, const element* sent, element* out,
                                     int64 count) {
    each(
        count, [](wide x, wide received, wide sent, wide& out) { out = x + (received - sent) / 2; },
        In{x}, In{received}, In{sent}, Out{out});
}

extern "C" __global__ void advance(element* x, const element* mean, const element* snapshot, int64 count) {
    each(
        count, [](wide& x, wide mean, wide snapshot) { x = x + (mean - snapshot); },
        InOut{x}, In{mean}, In{snapshot});
}

extern "C" __global__ void add_scaled(const element* x, const element* y, element* out, float64 factor, int64 count) {
    wide by = wide(factor);
    each(count, [=](wide x, wide y, wide& out) { out = x + y * by; }, In{x}, In{y}, Out{out});
}

extern "C" __global__ void sgd_step(element* x, const element* g, element* buffer, float64 lr, float64 momentum,
                                    float64 weight_decay, int64 nesterov, int64 count) {
    wide rate = wide(lr), mu = wide(momentum), decay = wide(weight_decay);
    each(
        count,
        [=](wide& x, wide g, wide& b) {
            if (decay != 0) g = g + x * decay;
            b = b * mu + g;
            x = x - (nesterov ? g + b * mu : b) * rate;
        },
        InOut{x}, In{g}, InOut{buffer});
}

extern "C" __global__ void adam_moments(const element* x, const element* g, element* m, element* v, float64 beta1,
                                        float64 beta2, float64 weight_decay, int64 count) {
    wide b1 = wide(beta1), rest1 = wide(1 - beta1), b2 = wide(beta2), rest2 = wide(1 - beta2);
    wide decay = wide(weight_decay);
    each(
        count,
        [=](wide x, wide g, wide& m, wide& v) {
            if (decay != 0) g = g + x * decay;
            m = m * b1 + g * rest1;
            v = v * b2 + g * g * rest2;
        },
        In{x}, In{g}, InOut{m}, InOut{v});
}

// `rate` is lr / (1 - beta1^t), `root` is sqrt(1 - beta2^t).
extern "C" __global__ void adam_step(element* x, const element* m, const element* v, float64 rate, float64 root,
                                     float64 eps, int64 count) {
    wide by = wide(rate), divisor = wide(root), least = wide(eps);
    each(
        count,
        [=](wide& x, wide m, wide v) {
            wide direction = m / (sqrt(v) / divisor + least);
            x = x - (v == 0 ? 0 : direction) * by;
        },
        InOut{x}, In{m}, In{v});
}
