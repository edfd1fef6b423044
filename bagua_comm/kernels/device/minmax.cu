// MinMaxUInt8: eight-bit codes between the minimum and the maximum of each block. kernels/host is the specification.
//
//   range = max - min + eps    scale = 255 / range    upper = rint(max * scale)    lower = upper - 255
//   code  = clip(rint(x * scale) - lower, 0, 255)     x' = (code + lower) / scale
//
// A row of the wire holds nb pairs (min, max) in the element dtype, padded to 32 bytes, then the codes, padded to 32 bytes.
//
// Threads. A team works on a block: 1, 2, 4 ... 32 threads of a warp, or a whole CTA of up to 512. threadIdx.x is the
// lane in the team, threadIdx.y the team in the CTA, blockIdx.y a row. A thread keeps 16 elements in registers, so that
// memory is read once; it reads them in 16-byte words, neighbours next to each other:
//
//   slot j of a thread:  elements (j * team + lane) * width ... + width - 1 of the block,  width = 16 bytes' worth
//
// A block too long for a CTA is cut into segments of 16 elements a thread: `encode_ranges` leaves the range of each
// segment, then `encode_segments` reads the elements again.
//
// A segment is `whole` if every thread of its warps has 16 elements, at addresses that 16-byte words fit. Nearly all are, in
// blocks of 16 * 2^n elements and in very long ones. For whole segments everything is compiled once more, without checks of
// ends and addresses.
//
// combine is encode with another source: the sum of the decoded rows, in float32 and row order, rounded once to the
// element dtype. All arithmetic is float32. The specification divides 255 by the range in float64 and rounds to float32,
// which is the float32 quotient (Figueroa, "When is double rounding innocuous?", 1995: 53 >= 2 * 24 + 2).

#include "numbers.cuh"

constexpr int held = 16;
constexpr float32 levels = 255;
constexpr int usual_cta = 256, largest_cta = 512;  // THREADS and LARGEST_CTA of launches.py

struct Layout {                        // as in minmax.py
    int64 rows, count, block, blocks;  // blocks of `block` elements, `count` elements in a row
    int64 segments, all_segments;      // of a block; of a row
    int64 start, stride;               // bytes of a row of the wire before its codes, and in all
    float32 eps;
};
static_assert(sizeof(Layout) == 72);

struct Range {
    float32 low, high;
};

// The work of one team: `length` elements from `begin` of a row, all in `block`.
struct Segment {
    int64 row, block, number, begin;
    int length;
};

// Where slot `slot` of this thread begins in its segment.
__device__ int place(int slot, int width) { return (slot * int(blockDim.x) + int(threadIdx.x)) * width; }


// ---- Codes in registers, four in a word: else the compiler would give each code a register ----

template <int count>
struct Codes {
    uint32 words[count / 4];

    template <bool whole>
    __device__ void load_from(const uint8* from, int valid) {
        uint8 codes[count];
        load<whole>(from, valid, codes);
        memcpy(words, codes, count);
    }

    // Drop the first code; the others move up.
    __device__ void advance() {
#pragma unroll
        for (int i = 0; i < count / 4; ++i) words[i] = words[i] >> 8 | (i + 1 < count / 4 ? words[i + 1] << 24 : 0);
    }

    // Code `i` as the last byte of `above`.
    __device__ uint32 below(uint32 above, int i) const { return __byte_perm(words[i / 4], above, 0x7650 | i % 4); }
};


// ---- Blocks: from their range to their levels ----

struct Levels {
    float32 scale, lower;

    __device__ Levels(Range range, float32 eps) {
        scale = levels / (range.high - range.low + eps);
        lower = rintf(range.high * scale) - levels;
    }
};

template <bool whole>
__device__ Range read_range(const uint8* row, int64 block) {
    element ends[2];
    load<whole>(reinterpret_cast<const element*>(row) + 2 * block, 2, ends);
    return {float32(widen(ends[0])), float32(widen(ends[1]))};
}

// How to decode one block, in the 16 bytes of one access:
//   plain:      (base with the code as its last byte + shift) / scale   base = 2^23, shift = lower - base, both exact
//   not plain:  (code + shift) / scale, or base if scale is 0           shift = lower, inverse = 0
struct alignas(16) Decoder {
    float32 scale, inverse, shift, base;

    Decoder() = default;

    __device__ Decoder(Range range, float32 eps) {
        Levels found(range, eps);
        // NaN or an overflown range gives NaN; a zero range or an overflown `upper` gives min.
        bool constant = !(is_finite(found.lower) && is_finite(found.scale) && found.scale > 0);
        float32 fill = found.scale > 0 ? range.low : __uint_as_float(canonical_nan);
        // Plain blocks have no quotient near overflow or underflow, and float32 adds each code to `lower` exactly.
        bool plain = !constant && fabsf(found.lower) <= 4194304 && found.scale > 1e-30f && found.scale < 1e30f &&
                     fmaxf(-range.low, range.high) + eps <= largest_finite<element>() / 2;
        scale = constant ? 0 : found.scale;
        inverse = plain ? 1 / found.scale : 0;
        shift = plain ? found.lower - 8388608 : found.lower;
        base = plain ? 8388608 : fill;
    }

    __device__ bool plain() const { return inverse > 0; }

    // values[i] = join(values[i], the decoded codes[i])
    template <bool surely_plain, int count, class Join>
    __device__ void decode(Codes<count> codes, float32 (&values)[count], Join join) const {
        if (surely_plain || plain()) {
#pragma unroll
            for (int i = 0; i < count; ++i)
                values[i] = join(values[i], divide(__uint_as_float(codes.below(__float_as_uint(base), i)) + shift));
            return;
        }
        // One after the other, since divisions take many registers. Registers have no index, so their contents move up.
#pragma unroll 1
        for (int n = 0; n < count; ++n) {
            float32 joined = join(values[0], careful_value(codes.below(0, 0)));
#pragma unroll
            for (int i = 1; i < count; ++i) values[i - 1] = values[i];
            values[count - 1] = joined;
            codes.advance();
        }
    }

    // The decoded `code` of a block that isn't plain.
    __device__ float32 careful_value(uint32 code) const {
        float32 limit = largest_finite<element>();
        return scale > 0 ? fminf(fmaxf((code + shift) / scale, -limit), limit) : base;
    }

    // level / scale, correctly rounded by one correction of level * inverse (Markstein, "Computation of elementary
    // functions on the IBM RISC System/6000", 1990). He asks for a first quotient within one ulp; this one is less than
    // 3/2 off. Before it is rounded, the second is less than 2^-22 ulp off, which only matters where the true quotient is
    // that near to the middle of two floats. There the first one, a float, is off by half an ulp, and the second by no
    // more than m * 2^-26 ulp, where m is the scale's significand, from 1 to 2; but no level of up to 23 bits has a
    // quotient nearer to the middle than 2^-24 / m ulp.
    __device__ float32 divide(float32 level) const {
        float32 quotient = level * inverse;
        return fmaf(fmaf(-scale, quotient, level), inverse, quotient);
    }
};


// ---- Sources of the elements that are encoded ----

struct Elements {
    static constexpr int width = access_bytes / sizeof(element), slots = held / width;
    const element* x;
    const Layout& layout;

    __device__ bool fit_words() const { return aligned<access_bytes>(x) && layout.count % width == 0; }

    template <bool whole>
    __device__ void read(const Segment& segment, float32 (&values)[slots][width]) const {
        const element* from = x + segment.row * layout.count + segment.begin;
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            element raw[width];
            load<whole>(from + at, segment.length - at, raw);  // zeros beyond the end
#pragma unroll
            for (int i = 0; i < width; ++i) values[j][i] = widen(raw[i]);
        }
    }
};

template <int ahead>
struct Sum {
    static constexpr int width = access_bytes, slots = 1;
    static_assert(width == held);
    const uint8* wire;
    int64 summands;
    bool mean;
    const Layout& layout;

    __device__ bool fit_words() const { return ::fit_words(wire, layout); }

    // One for each thread of the CTA.
    static __device__ Decoder* shared_decoders() {
        __shared__ Decoder decoders[largest_cta];
        return decoders;
    }

    template <bool whole>
    __device__ void read(const Segment& segment, float32 (&values)[slots][width]) const {
        int lanes = min(int(blockDim.x), warp), lane = threadIdx.x & (lanes - 1), at = place(0, width);
        Decoder* decoders = shared_decoders() + (threadIdx.y * blockDim.x + threadIdx.x - lane);
        float32(&total)[width] = values[0];
#pragma unroll
        for (int i = 0; i < width; ++i) total[i] = -0.0f;  // the identity: -0.0 + x == x
        for (int64 first = 0; first < summands; first += lanes) {
            const uint8* row = wire + first * layout.stride;
            int rows = int(min(summands - first, int64(lanes)));
            // One lane computes the constants of each row's block.
            bool mine = lane < rows && segment.length > 0, plain = true;
            __syncwarp();  // the decoders may still be in use by the last round
            if (mine) {
                Decoder own(read_range<whole>(row + lane * layout.stride, segment.block), layout.eps);
                decoders[lane] = own;
                plain = own.plain();
            }
            __syncwarp();
            plain = __all_sync(all_lanes, plain);
            const uint8* codes = row + layout.start + segment.begin + at;
            if (whole && plain)
                add<true>(codes, rows, width, decoders, total);
            else if (segment.length > 0)  // else nobody has computed this team's decoders
                add<false>(codes, rows, segment.length - at, decoders, total);
        }
        divide_and_round(total);
    }

    // Add `rows` rows. If all are whole and plain, `ahead` loads are in flight at a time.
    template <bool whole_and_plain>
    __device__ void add(const uint8* from, int rows, int valid, const Decoder* decoders, float32 (&total)[width]) const {
        constexpr int loads = whole_and_plain ? ahead : 1;
        Codes<width> codes[loads];
#pragma unroll
        for (int k = 0; k < loads; ++k)
            if (k < rows) codes[k].template load_from<whole_and_plain>(from + k * layout.stride, valid);
        from += loads * layout.stride;
#pragma unroll 1
        for (int r = 0; r < rows; r += loads, decoders += loads) {
#pragma unroll
            for (int k = 0; k < loads; ++k) {
                if (r + k >= rows) break;
                decoders[k].template decode<whole_and_plain>(codes[k], total, [](float32 a, float32 b) { return a + b; });
                if (r + k + loads < rows) codes[k].template load_from<whole_and_plain>(from, valid);
                from += layout.stride;
            }
        }
    }

    __device__ void divide_and_round(float32 (&total)[width]) const {
        bool halving = (summands & (summands - 1)) == 0;  // then x * (1 / summands) is exactly the quotient
        if (mean && !halving) {
#pragma unroll
            for (int i = 0; i < width; ++i) total[i] = total[i] / summands;
        } else {
            float32 share = mean ? 1.0f / summands : 1;
#pragma unroll
            for (int i = 0; i < width; ++i) total[i] = total[i] * share;
        }
#pragma unroll
        for (int i = 0; i < width; ++i) total[i] = widen(narrow<element>(total[i]));
    }
};


// ---- Ranges of teams ----

// The smaller; NaN if either is NaN. It is enough if one of the two ends shows it.
__device__ float32 lower_of(float32 a, float32 b) {
#if __CUDA_ARCH__ >= 800
    float32 lower;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(lower) : "f"(a), "f"(b));
    return lower;
#else
    return a < b || is_nan(a) ? a : b;
#endif
}

__device__ Range joined(Range a, Range b) { return {lower_of(a.low, b.low), fmaxf(a.high, b.high)}; }

__device__ Range nothing() { return {__uint_as_float(0x7f800000), __uint_as_float(0xff800000)}; }

// The range of `lanes` neighbouring threads of a warp, on all of them.
__device__ Range over_lanes(Range mine, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        mine = joined(mine, {__shfl_xor_sync(all_lanes, mine.low, distance),
                             __shfl_xor_sync(all_lanes, mine.high, distance)});
    return mine;
}

// The range of the whole team, on all its threads; `shared` has room for one range of each warp.
__device__ Range over_team(Range mine, Range* shared) {
    int team = blockDim.x;
    if (team < warp) return over_lanes(mine, team);
    mine = over_lanes(mine, warp);
    if (team == warp) return mine;
    int lane = threadIdx.x % warp;
    __syncthreads();  // `shared` may still be in use by the last call
    if (lane == 0) shared[threadIdx.x / warp] = mine;
    __syncthreads();
    return over_lanes(lane < team / warp ? shared[lane] : nothing(), warp);
}

// Zeros in a header are +0. A block that holds NaN or an infinity has NaN in its header.
__device__ Range as_sent(Range range) {
    float32 nan = __uint_as_float(canonical_nan);
    bool broken = !is_finite(range.low) || !is_finite(range.high);
    return broken ? Range{nan, nan} : Range{range.low + 0.0f, range.high + 0.0f};
}


// ---- The parts of encoding ----

template <class Source, bool whole>
struct Encoder {
    static constexpr int width = Source::width, slots = Source::slots;
    const Layout& layout;
    const Segment& segment;
    float32 values[slots][width];

    __device__ Encoder(const Source& source, const Segment& segment) : layout(source.layout), segment(segment) {
        source.template read<whole>(segment, values);
    }

    __device__ Range range() const {
        Range mine = nothing();
#pragma unroll
        for (int j = 0; j < slots; ++j)
#pragma unroll
            for (int i = 0; i < width; ++i)
                if (whole || place(j, width) + i < segment.length)
                    mine = joined(mine, {values[j][i], values[j][i]});
        return mine;
    }

    __device__ void write(Range range, uint8* wire) const {
        uint8* row = wire + segment.row * layout.stride;
        if (segment.number == 0 && threadIdx.x == 0) {
            element ends[2] = {narrow<element>(range.low), narrow<element>(range.high)};
            store<whole>(reinterpret_cast<element*>(row) + 2 * segment.block, 2, ends);
        }
        Levels found(range, layout.eps);
        uint8* to = row + layout.start + segment.begin;
        if (fabsf(found.lower) < 4194048) {  // false for NaN
            // Adding 1.5 * 2^23 rounds as rint does, and then the bits of the sum count up as the integer does. No code
            // is above 255, since x <= max.
            float32 shift = 12582912;
            int32 lower = __float_as_uint(shift + found.lower);
            write_codes(to, [&](float32 x) { return max(int32(__float_as_uint(x * found.scale + shift)) - lower, 0); });
        } else {
            bool flat = !is_finite(range.low) || !is_finite(found.scale) || !is_finite(found.lower);
            write_codes(to, [&](float32 x) {
                float32 code = rintf(x * found.scale) - found.lower;
                return flat ? 0 : int32(fminf(fmaxf(code, 0), levels));
            });
        }
    }

    template <class Code>
    __device__ void write_codes(uint8* to, Code code) const {
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            uint8 codes[width];
#pragma unroll
            for (int i = 0; i < width; ++i) codes[i] = uint8(code(values[j][i]));
            if (whole || at < segment.length) store<whole>(to + at, segment.length - at, codes);
        }
    }
};

// Call `visit(segment, whole)` for all segments of this CTA's teams. All threads make the same number of calls, since a
// team may need the others of its warp; a team without a segment gets an empty one, numbered -1. If a block has several
// segments, a team is a whole CTA, and has one segment.
template <class Visit>
__device__ void each_segment(const Layout& layout, bool fit_words, Visit visit) {
    int capacity = blockDim.x * held;
    // The number of threads that may need each other, and how far their last element is from the CTA's first.
    int together = max(int(blockDim.x), warp);
    int reach = ((threadIdx.y * blockDim.x + threadIdx.x | together - 1) + 1) * held;
    for (int64 row = blockIdx.y; row < layout.rows; row += gridDim.y)
        for (int64 first = int64(blockIdx.x) * blockDim.y; first < layout.all_segments;
             first += int64(gridDim.x) * blockDim.y) {
            int64 index = first + threadIdx.y;
            Segment segment{row, index, 0, index * layout.block, capacity};
            int64 end = segment.begin + layout.block;
            bool whole;
            if (layout.segments == 1) {
                whole = layout.block == capacity && first * capacity + reach <= layout.count;
            } else {
                segment.block = index / layout.segments;
                segment.number = index - segment.block * layout.segments;
                segment.begin = segment.block * layout.block + segment.number * capacity;
                end = min(segment.begin + capacity, (segment.block + 1) * layout.block);
                whole = segment.begin % held == 0 && segment.begin + capacity <= min(end, layout.count);
            }
            if (whole && fit_words) {
                visit(segment, Bool<true>());
            } else {
                segment.length = int(max(min(end, layout.count) - segment.begin, int64(0)));
                if (index >= layout.all_segments) segment.number = -1, segment.length = 0;
                visit(segment, Bool<false>());
            }
        }
}

__device__ void clear_padding(const Layout& layout, uint8* wire) {
    clear_padding(layout, wire, layout.blocks * 2 * sizeof(element), layout.count);
}

template <class Source>
__device__ void encode_from(const Source& source, uint8* wire) {
    __shared__ Range shared[warp];
    const Layout& layout = source.layout;
    each_segment(layout, source.fit_words() && fit_words(wire, layout), [&](const Segment& segment, auto whole) {
        Encoder<Source, whole.value> encoder(source, segment);
        encoder.write(as_sent(over_team(encoder.range(), shared)), wire);
    });
    clear_padding(layout, wire);
}

template <class Source>
__device__ void ranges_from(const Source& source, Range* ranges) {
    __shared__ Range shared[warp];
    const Layout& layout = source.layout;
    each_segment(layout, source.fit_words(), [&](const Segment& segment, auto whole) {
        Encoder<Source, whole.value> encoder(source, segment);
        Range range = over_team(encoder.range(), shared);
        int64 block = segment.row * layout.blocks + segment.block;
        if (threadIdx.x == 0) ranges[block * layout.segments + segment.number] = range;
    });
}

template <class Source>
__device__ void segments_from(const Source& source, const Range* ranges, uint8* wire) {
    __shared__ Range shared[warp];
    const Layout& layout = source.layout;
    each_segment(layout, source.fit_words() && fit_words(wire, layout), [&](const Segment& segment, auto whole) {
        Encoder<Source, whole.value> encoder(source, segment);
        Range range = nothing();
        const Range* found = ranges + (segment.row * layout.blocks + segment.block) * layout.segments;
        for (int64 i = threadIdx.x; i < layout.segments; i += blockDim.x) range = joined(range, found[i]);
        encoder.write(as_sent(over_team(range, shared)), wire);
    });
    clear_padding(layout, wire);
}


// ---- Kernels ----

#define KERNEL extern "C" __global__ void __launch_bounds__(largest_cta)

// With the registers that CTAs of up to 512 threads leave, a multiprocessor holds two CTAs of 256 threads at a time. With fewer
// registers it holds three: on an H100, 8 rows were combined 1.10 times as fast, and 2 rows 1.27 times. There are two loads
// ahead, since with four, registers would be spilled, as they are on other architectures.
#if __CUDA_ARCH__ == 900
#define KERNEL_OF_SMALL_CTAS extern "C" __global__ void __launch_bounds__(usual_cta, 3)
constexpr int usual_ahead = 2;
#else
#define KERNEL_OF_SMALL_CTAS KERNEL
constexpr int usual_ahead = 4;
#endif

KERNEL encode(const element* x, uint8* wire, Layout layout) { encode_from(Elements{x, layout}, wire); }

KERNEL encode_ranges(const element* x, Range* ranges, Layout layout) { ranges_from(Elements{x, layout}, ranges); }

KERNEL encode_segments(const element* x, const Range* ranges, uint8* wire, Layout layout) {
    segments_from(Elements{x, layout}, ranges, wire);
}

KERNEL_OF_SMALL_CTAS combine(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout) {
    encode_from(Sum<usual_ahead>{wires, summands, mean != 0, layout}, wire);
}

KERNEL combine_wide(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout) {
    encode_from(Sum<4>{wires, summands, mean != 0, layout}, wire);
}

KERNEL combine_ranges(const uint8* wires, int64 summands, int64 mean, Range* ranges, Layout layout) {
    ranges_from(Sum<4>{wires, summands, mean != 0, layout}, ranges);
}

KERNEL combine_segments(const uint8* wires, int64 summands, int64 mean, const Range* ranges, uint8* wire, Layout layout) {
    segments_from(Sum<4>{wires, summands, mean != 0, layout}, ranges, wire);
}

KERNEL decode(const uint8* wire, element* out, Layout layout) {
    constexpr int width = Elements::width, slots = Elements::slots;
    bool regular = fit_words(wire, layout) && Elements{out, layout}.fit_words();
    each_segment(layout, regular, [&](const Segment& segment, auto whole_) {
        constexpr bool whole = whole_.value;
        if (segment.length == 0) return;
        const uint8* row = wire + segment.row * layout.stride;
        const uint8* from = row + layout.start + segment.begin;
        element* to = out + segment.row * layout.count + segment.begin;
        Decoder decoder(read_range<whole>(row, segment.block), layout.eps);
        Codes<width> codes[slots];
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            if (whole || at < segment.length) codes[j].template load_from<whole>(from + at, segment.length - at);
        }
        auto write_decoded = [&](auto plain) {
#pragma unroll
            for (int j = 0; j < slots; ++j) {
                int at = place(j, width);
                float32 values[width] = {};
                element rounded[width];
                decoder.template decode<plain.value>(codes[j], values, [](float32, float32 value) { return value; });
#pragma unroll
                for (int i = 0; i < width; ++i) rounded[i] = narrow<element>(values[i]);
                if (whole || at < segment.length) store<whole>(to + at, segment.length - at, rounded);
            }
        };
        decoder.plain() ? write_decoded(Bool<true>()) : write_decoded(Bool<false>());
    });
}
