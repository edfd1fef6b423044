// MinMaxUInt8: eight-bit codes between the minimum and the maximum of each block. host.py is the specification.
//
//   range = max - min + eps    scale = 255 / range    upper = rint(max * scale)    lower = upper - 255
//   code  = clip(rint(x * scale) - lower, 0, 255)     x' = (code + lower) / scale
//
// A row of the wire: nb pairs (min, max) in the element dtype, padded to 32 bytes; the codes, padded to 32 bytes.
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
// combine is encode of another source: the sum of the decoded rows, in float32 and row order, rounded to the element
// dtype once. All arithmetic is float32. The specification divides 255 by the range in float64 and rounds to float32,
// which is the float32 quotient (Figueroa, "When is double rounding innocuous?", 1995: 53 >= 2 * 24 + 2).

#include "numbers.cuh"

constexpr int held = 16;
constexpr float32 levels = 255;
constexpr int warp = 32;
constexpr int largest_cta = 512;  // as in device.py
constexpr uint32 all_lanes = 0xffffffff;

struct Layout {
    int64 rows, count, block, blocks;  // blocks of `block` elements, `count` elements in a row
    int64 segments;                    // of a block
    int64 start, stride;               // bytes of a row of the wire before its codes, and in all
    float32 eps;
};

struct Range {
    float32 low, high;
};

// What one team works on: `length` elements from `begin` of a row, all in `block`.
struct Segment {
    int64 row, block, number, begin;
    int length;
    bool first, last;  // of the row
};

// Where slot `slot` of this thread begins in its segment.
__device__ int place(int slot, int width) { return (slot * int(blockDim.x) + int(threadIdx.x)) * width; }


// ---- Blocks: what their range says about codes ----

struct Levels {
    float32 scale, lower;

    __device__ Levels(Range range, float32 eps) {
        scale = levels / (range.high - range.low + eps);
        lower = rintf(range.high * scale) - levels;
    }
};

__device__ Range read_range(const uint8* row, int64 block) {
    element ends[2];
    load(reinterpret_cast<const element*>(row) + 2 * block, 2, ends);
    return {float32(widen(ends[0])), float32(widen(ends[1]))};
}

// level / scale, kept finite. Not inlined: it is rare, and would be there 16 times.
__device__ __noinline__ float32 bounded(float32 level, float32 scale) {
    float32 limit = largest_finite<element>();
    return fminf(fmaxf(level / scale, -limit), limit);
}

// How to decode one block.
struct Decoder {
    float32 scale, lower, inverse, fill;
    int plain, constant;

    Decoder() = default;

    __device__ Decoder(Range range, float32 eps) {
        Levels found(range, eps);
        scale = found.scale, lower = found.lower;
        // NaN or an overflown range gives NaN; a zero range or an overflown `upper` gives min.
        constant = !(is_finite(lower) && is_finite(scale) && scale > 0);
        fill = scale > 0 ? range.low : __uint_as_float(canonical_nan);
        // Neither quotients near overflow or underflow, nor codes that float32 cannot add to `lower` exactly.
        plain = !constant && fabsf(lower) <= 4194304 && scale > 1e-30f && scale < 1e30f &&
                fmaxf(-range.low, range.high) + eps <= largest_finite<element>() / 2;
        inverse = 1 / scale;
    }

    // That of another lane among `lanes` neighbours.
    __device__ Decoder of(int lane, int lanes) const {
        Decoder other;
        other.scale = __shfl_sync(all_lanes, scale, lane, lanes);
        other.lower = __shfl_sync(all_lanes, lower, lane, lanes);
        other.inverse = __shfl_sync(all_lanes, inverse, lane, lanes);
        other.fill = __shfl_sync(all_lanes, fill, lane, lanes);
        other.plain = __shfl_sync(all_lanes, plain, lane, lanes);
        other.constant = __shfl_sync(all_lanes, constant, lane, lanes);
        return other;
    }

    template <int count>
    __device__ void decode(const uint8 (&codes)[count], float32 (&values)[count]) const {
        if (!plain) {
#pragma unroll
            for (int i = 0; i < count; ++i) values[i] = constant ? fill : bounded(codes[i] + lower, scale);
            return;
        }
        // The bits of 2^23 + code are those of 2^23 with the code below; 2^23 itself goes with `lower`, exactly.
        float32 shifted = lower - 8388608;
#pragma unroll
        for (int i = 0; i < count; ++i) values[i] = divide(__uint_as_float(0x4b000000 | codes[i]) + shifted);
    }

    // level / scale, correctly rounded: the second correction of a quotient that the first has brought to within an
    // ulp (Markstein, "Computation of elementary functions on the IBM RISC System/6000", 1990).
    __device__ float32 divide(float32 level) const {
        float32 quotient = level * inverse;
        quotient = fmaf(fmaf(-scale, quotient, level), inverse, quotient);
        return fmaf(fmaf(-scale, quotient, level), inverse, quotient);
    }
};


// ---- Sources of the elements that are encoded ----

struct Elements {
    static constexpr int width = access_bytes / sizeof(element);
    const element* x;
    int64 count;

    __device__ void read(const Segment& segment, int at, float32 (&values)[width]) const {
        element raw[width];
        load(x + segment.row * count + segment.begin + at, segment.length - at, raw);
#pragma unroll
        for (int i = 0; i < width; ++i) values[i] = widen(raw[i]);
    }
};

struct Sum {
    static constexpr int width = access_bytes;
    const uint8* wire;
    Layout layout;
    int64 summands;
    bool mean;

    __device__ void read(const Segment& segment, int at, float32 (&values)[width]) const {
#pragma unroll
        for (int i = 0; i < width; ++i) values[i] = -0.0f;  // to which any number is added exactly
        int lanes = min(int(blockDim.x), warp), lane = threadIdx.x % lanes;
        for (int64 first = 0; first < summands; first += lanes) {
            // What there is to know of a row's block is worked out by one lane.
            bool mine = first + lane < summands && segment.length > 0;
            Range range = mine ? read_range(wire + (first + lane) * layout.stride, segment.block) : Range{0, 0};
            Decoder own(range, layout.eps);
            int rows = int(min(summands - first, int64(lanes)));
            const uint8* from = wire + first * layout.stride + layout.start + segment.begin + at;
            uint8 codes[width], next[width];
            load(from, segment.length - at, codes);
#pragma unroll 1
            for (int r = 0; r < rows; ++r) {
                from += layout.stride;
                if (r + 1 < rows) load(from, segment.length - at, next);  // on its way while this row is decoded
                float32 terms[width];
                own.of(r, lanes).decode(codes, terms);
#pragma unroll
                for (int i = 0; i < width; ++i) values[i] += terms[i];
                memcpy(codes, next, width);
            }
        }
        bool halving = (summands & (summands - 1)) == 0;  // then the product with 1 / summands is the quotient
        float32 share = 1.0f / summands;
#pragma unroll
        for (int i = 0; i < width; ++i) {
            float32 total = !mean ? values[i] : halving ? values[i] * share : values[i] / summands;
            values[i] = widen(narrow<element>(total));
        }
    }
};


// ---- Ranges of teams ----

// The smaller; NaN if either is. One of the two ends is enough to show it.
__device__ float32 lower_of(float32 a, float32 b) { return a < b || is_nan(a) ? a : b; }

__device__ Range joined(Range a, Range b) { return {lower_of(a.low, b.low), fmaxf(a.high, b.high)}; }

__device__ Range nothing() { return {__uint_as_float(0x7f800000), __uint_as_float(0xff800000)}; }

// The range of `lanes` neighbouring threads of a warp, on all of them.
__device__ Range over_lanes(Range mine, int lanes) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        mine = joined(mine, {__shfl_xor_sync(all_lanes, mine.low, distance),
                             __shfl_xor_sync(all_lanes, mine.high, distance)});
    return mine;
}

// The range of the whole team, on all its threads; `shared` has room for one of each warp.
__device__ Range over_team(Range mine, Range* shared) {
    int team = blockDim.x;
    if (team <= warp) return over_lanes(mine, team);
    mine = over_lanes(mine, warp);
    int lane = threadIdx.x % warp;
    __syncthreads();  // `shared` may still be read from the time before
    if (lane == 0) shared[threadIdx.x / warp] = mine;
    __syncthreads();
    return over_lanes(lane < team / warp ? shared[lane] : nothing(), warp);
}

// Zeros in a header are +0, and a block that holds NaN or an infinity has NaN there.
__device__ Range as_sent(Range range) {
    float32 nan = __uint_as_float(canonical_nan);
    bool broken = !is_finite(range.low) || !is_finite(range.high);
    return broken ? Range{nan, nan} : Range{range.low + 0.0f, range.high + 0.0f};
}


// ---- The parts of encoding ----

template <class Source>
struct Encoder {
    static constexpr int width = Source::width, slots = held / width;
    const Source& source;
    const Layout& layout;
    float32 values[slots][width];

    __device__ void read(const Segment& segment) {
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            source.read(segment, place(j, width), values[j]);  // zeros beyond the end
        }
    }

    __device__ Range range(const Segment& segment) const {
        Range mine = nothing();
        float32 spoiled = 0;  // NaN after NaN or an infinity
#pragma unroll
        for (int j = 0; j < slots; ++j)
#pragma unroll
            for (int i = 0; i < width; ++i)
                if (place(j, width) + i < segment.length) {
                    mine = {fminf(mine.low, values[j][i]), fmaxf(mine.high, values[j][i])};
                    spoiled = fmaf(values[j][i], 0, spoiled);
                }
        return is_nan(spoiled) ? Range{spoiled, spoiled} : mine;
    }

    __device__ void write(const Segment& segment, Range range, uint8* wire) const {
        uint8* row = wire + segment.row * layout.stride;
        if (segment.number == 0 && threadIdx.x == 0) {
            element ends[2] = {narrow<element>(range.low), narrow<element>(range.high)};
            store(reinterpret_cast<element*>(row) + 2 * segment.block, 2, ends);
        }
        Levels found(range, layout.eps);
        bool flat = !is_finite(range.low) || !is_finite(found.scale) || !is_finite(found.lower);
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            uint8 codes[width];
#pragma unroll
            for (int i = 0; i < width; ++i) {
                float32 code = rintf(values[j][i] * found.scale) - found.lower;
                codes[i] = flat ? 0 : uint8(uint32(fminf(fmaxf(code, 0), levels)));
            }
            if (at < segment.length)
                store(row + layout.start + segment.begin + at, segment.length - at, codes);
        }
        if (segment.first) clear(row, layout.blocks * 2 * sizeof(element), layout.start);
        if (segment.last) clear(row, layout.start + layout.count, layout.stride);
    }
};

// Call `visit(segment)` for all segments of this CTA's teams. All threads make the same number of calls, since a team may
// need the others of its warp; those without a segment get an empty one, numbered -1. Where blocks have segments, a team
// is a CTA, and has one.
template <class Visit>
__device__ void each_segment(const Layout& layout, Visit visit) {
    int64 all = layout.blocks * layout.segments, capacity = int64(blockDim.x) * held;
    for (int64 row = blockIdx.y; row < layout.rows; row += gridDim.y)
        for (int64 first = int64(blockIdx.x) * blockDim.y; first < all; first += int64(gridDim.x) * blockDim.y) {
            int64 index = first + threadIdx.y;
            Segment segment;
            segment.row = row;
            segment.block = layout.segments == 1 ? index : index / layout.segments;
            segment.number = index < all ? index - segment.block * layout.segments : -1;
            segment.begin = segment.block * layout.block + segment.number * capacity;
            int64 end = min(min(segment.begin + capacity, (segment.block + 1) * layout.block), layout.count);
            segment.length = segment.number < 0 ? 0 : int(max(end - segment.begin, int64(0)));
            segment.first = index == 0;
            segment.last = index == all - 1;
            visit(segment);
        }
}

template <class Source>
__device__ void encode_from(const Source& source, const Layout& layout, uint8* wire) {
    __shared__ Range shared[warp];
    each_segment(layout, [&](const Segment& segment) {
        Encoder<Source> encoder{source, layout};
        encoder.read(segment);
        Range range = over_team(encoder.range(segment), shared);
        encoder.write(segment, as_sent(range), wire);
    });
}

template <class Source>
__device__ void ranges_from(const Source& source, const Layout& layout, Range* ranges) {
    __shared__ Range shared[warp];
    each_segment(layout, [&](const Segment& segment) {
        Encoder<Source> encoder{source, layout};
        encoder.read(segment);
        Range range = over_team(encoder.range(segment), shared);
        int64 block = segment.row * layout.blocks + segment.block;
        if (threadIdx.x == 0) ranges[block * layout.segments + segment.number] = range;
    });
}

template <class Source>
__device__ void segments_from(const Source& source, const Layout& layout, const Range* ranges, uint8* wire) {
    __shared__ Range shared[warp];
    each_segment(layout, [&](const Segment& segment) {
        Encoder<Source> encoder{source, layout};
        encoder.read(segment);
        Range range = nothing();
        const Range* found = ranges + (segment.row * layout.blocks + segment.block) * layout.segments;
        for (int64 i = threadIdx.x; i < layout.segments; i += blockDim.x) range = joined(range, found[i]);
        encoder.write(segment, as_sent(over_team(range, shared)), wire);
    });
}


// ---- Kernels ----

#define LAYOUT int64 rows, int64 count, int64 block, int64 blocks, int64 segments, int64 start, int64 stride, float64 eps
#define LAYOUT_VALUES {rows, count, block, blocks, segments, start, stride, float32(eps)}

extern "C" __global__ void __launch_bounds__(largest_cta) encode(const element* x, uint8* wire, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    encode_from(Elements{x, count}, layout, wire);
}

extern "C" __global__ void __launch_bounds__(largest_cta) encode_ranges(const element* x, Range* ranges, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    ranges_from(Elements{x, count}, layout, ranges);
}

extern "C" __global__ void __launch_bounds__(largest_cta) encode_segments(const element* x, const Range* ranges, uint8* wire, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    segments_from(Elements{x, count}, layout, ranges, wire);
}

extern "C" __global__ void __launch_bounds__(largest_cta) combine(const uint8* wires, int64 summands, int64 mean, uint8* wire, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    encode_from(Sum{wires, layout, summands, mean != 0}, layout, wire);
}

extern "C" __global__ void __launch_bounds__(largest_cta) combine_ranges(const uint8* wires, int64 summands, int64 mean, Range* ranges, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    ranges_from(Sum{wires, layout, summands, mean != 0}, layout, ranges);
}

extern "C" __global__ void __launch_bounds__(largest_cta) combine_segments(const uint8* wires, int64 summands, int64 mean, const Range* ranges,
                                            uint8* wire, LAYOUT) {
    Layout layout = LAYOUT_VALUES;
    segments_from(Sum{wires, layout, summands, mean != 0}, layout, ranges, wire);
}

extern "C" __global__ void __launch_bounds__(largest_cta) decode(const uint8* wire, element* out, LAYOUT) {
    constexpr int width = Elements::width, slots = held / width;
    Layout layout = LAYOUT_VALUES;
    each_segment(layout, [&](const Segment& segment) {
        if (segment.length == 0) return;
        const uint8* row = wire + segment.row * layout.stride;
        Decoder decoder(read_range(row, segment.block), layout.eps);
        uint8 codes[slots][width];
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            if (at < segment.length) load(row + layout.start + segment.begin + at, segment.length - at, codes[j]);
        }
#pragma unroll
        for (int j = 0; j < slots; ++j) {
            int at = place(j, width);
            if (at >= segment.length) continue;
            float32 values[width];
            element rounded[width];
            decoder.decode(codes[j], values);
#pragma unroll
            for (int i = 0; i < width; ++i) rounded[i] = narrow<element>(values[i]);
            store(out + segment.row * count + segment.begin + at, segment.length - at, rounded);
        }
    });
}
