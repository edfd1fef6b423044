// Shared by all kernels: element types, exact conversions, and access to memory in 16-byte words.
//
// A .cu file is compiled once for each dtype of its arrays, with ELEMENT defined as NumPy's name of that dtype.
// The compiler makes no fused multiply-adds (-fmad=false) but those written here: the bytes must be those of kernels/host.

#pragma once

using int8 = signed char;
using uint8 = unsigned char;
using int16 = short;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;
using float32 = float;
using float64 = double;

struct float16 {
    uint16 bits;
};

struct bfloat16 {
    uint16 bits;
};

using element = ELEMENT;

constexpr uint32 canonical_nan = 0x7fc00000;
constexpr int warp = 32;
constexpr uint32 all_lanes = 0xffffffff;

#ifdef __CUDACC__
__device__ inline float32 half_to_float(uint16 bits) {
    float32 x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

__device__ inline uint16 float_to_half(float32 x) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// 1 / x, off by no more than two units in the last place, of a normal number whose reciprocal is normal.
__device__ inline float32 rough_reciprocal(float32 x) {
    float32 y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif  // another compiler must be given these definitions


template <class T, class U>
constexpr bool is_same = false;
template <class T>
constexpr bool is_same<T, T> = true;

template <bool what>
struct Bool {
    static constexpr bool value = what;
};


// ---- Conversions. Types narrower than 32 bits are computed in float32 and rounded once, half to even. ----

template <class T>
struct Wide {
    using type = T;
};
template <>
struct Wide<float16> {
    using type = float32;
};
template <>
struct Wide<bfloat16> {
    using type = float32;
};

using wide = Wide<element>::type;

template <class T>
__device__ inline T widen(T x) {
    return x;
}

__device__ inline float32 widen(float16 x) { return half_to_float(x.bits); }

__device__ inline float32 widen(bfloat16 x) { return __uint_as_float(uint32(x.bits) << 16); }

template <class T>
__device__ inline bool is_nan(T x) {
    return x != x;
}

template <class T>
__device__ inline bool is_finite(T x) {
    return x - x == 0;
}

// The canonical NaN in place of any other: that of an operation on a GPU has other bits.
template <class T>
__device__ inline T with_canonical_nan(T x) {
    return x;
}

__device__ inline float32 with_canonical_nan(float32 x) { return is_nan(x) ? __uint_as_float(canonical_nan) : x; }

__device__ inline float64 with_canonical_nan(float64 x) {
    return is_nan(x) ? __longlong_as_double(0x7ff8000000000000) : x;
}

template <class T>
struct Narrow {
    static __device__ T of(T x) { return x; }
};
template <>
struct Narrow<float16> {
    static __device__ float16 of(float32 x) { return {is_nan(x) ? uint16(0x7e00) : float_to_half(x)}; }
};
template <>
struct Narrow<bfloat16> {
    static __device__ bfloat16 of(float32 x) {
        uint32 bits = is_nan(x) ? canonical_nan : __float_as_uint(x);
        return {uint16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
    }
};

template <class T>
__device__ inline T narrow(typename Wide<T>::type x) {
    return Narrow<T>::of(x);
}

// Numbers that are finite, also after they are rounded: two at a time where the GPU has an instruction for it.
template <int count>
__device__ inline void narrow_finite(const float32* x, float32 (&to)[count]) {
    memcpy(to, x, sizeof to);
}

template <class T, int count>
__device__ inline void narrow_finite(const float32* x, T (&to)[count]) {
#pragma unroll
    for (int i = 0; i < count; i += 2) {
#if __CUDA_ARCH__ >= 800
        uint32 pair;
        if (is_same<T, float16>)
            asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[i + 1]), "f"(x[i]));  // the first operand is above
        else
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(x[i + 1]), "f"(x[i]));
        memcpy(to + i, &pair, sizeof pair);
#else
        to[i] = narrow<T>(x[i]), to[i + 1] = narrow<T>(x[i + 1]);
#endif
    }
}

template <class T>
__device__ constexpr float32 largest_finite() {
    return 3.4028234663852886e38f;
}
template <>
__device__ constexpr float32 largest_finite<float16>() {
    return 65504;
}
template <>
__device__ constexpr float32 largest_finite<bfloat16>() {
    return 3.3895313892515355e38f;
}


// ---- Memory: `count` elements in one access if address and count allow it (`whole` says that they do), else one by one. An
// access by __ldcg or __stcg stays a single one; the compiler may split others, to share parts of them. ----

constexpr int access_bytes = 16;

template <int bytes>
struct Word;
template <>
struct Word<4> {
    using type = uint32;
};
template <>
struct Word<8> {
    using type = uint2;
};
template <>
struct Word<16> {
    using type = uint4;
};

template <int bytes>
__device__ inline bool aligned(const void* at) {
    return reinterpret_cast<uint64>(at) % bytes == 0;
}

template <bool whole = false, int count, class T>
__device__ inline void load(const T* from, int64 valid, T (&to)[count]) {
    using word = typename Word<count * sizeof(T)>::type;
    if (whole || (valid >= count && aligned<sizeof(word)>(from))) {
        word all = __ldcg(reinterpret_cast<const word*>(from));
        memcpy(to, &all, sizeof(word));
        return;
    }
#pragma unroll
    for (int i = 0; i < count; ++i) to[i] = i < valid ? from[i] : T{};
}

template <bool whole = false, int count, class T>
__device__ inline void store(T* to, int64 valid, const T (&from)[count]) {
    using word = typename Word<count * sizeof(T)>::type;
    if (whole || (valid >= count && aligned<sizeof(word)>(to))) {
        word all;
        memcpy(&all, from, sizeof(word));
        __stcg(reinterpret_cast<word*>(to), all);
        return;
    }
#pragma unroll
    for (int i = 0; i < count; ++i)
        if (i < valid) to[i] = from[i];
}

// Zero the bytes from `begin` to `end` of a row, with all threads of one threadIdx.y.
__device__ inline void clear(uint8* row, int64 begin, int64 end) {
#pragma unroll 1
    for (int64 i = begin + threadIdx.x; i < end; i += blockDim.x) row[i] = 0;
}

// Whether the codes of whole blocks lie at addresses that 16-byte words fit.
template <class Layout>
__device__ bool fit_words(const uint8* wire, const Layout& layout) {
    return aligned<access_bytes>(wire + layout.start) && layout.stride % access_bytes == 0;
}

// Zero the bytes of rows that hold neither header nor codes; both have so many bytes.
template <class Layout>
__device__ void clear_padding(const Layout& layout, uint8* wire, int64 header, int64 codes) {
    if (blockIdx.x == 0 && threadIdx.y == 0)
        for (int64 row = blockIdx.y; row < layout.rows; row += gridDim.y) {
            uint8* at = wire + row * layout.stride;
            clear(at, header, layout.start);
            clear(at, layout.start + codes, layout.stride);
        }
}
