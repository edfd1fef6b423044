// Int4: four-bit codes of rotated blocks, with a scale each. kernels/host is the specification.
//
//   t = H (D x / R)    s = bfloat16(max |t| / 7)    q = rint(t / s)    x' = (D H q) s    sum: t = sum of q_r s_r
//
// A row of the wire holds the scales of all blocks in bfloat16, padded to 32 bytes, then the codes, two in a byte, padded to
// 32 bytes. All arithmetic is float32, but for H q, a sum of integers, which is exact in any order.
//
// Blocks of 32 elements, all rotated together, have kernels of their own. A thread has a whole block in registers, so that
// threads exchange nothing while they compute. Its codes are one 16-byte word, beside that of the next thread. Its elements
// pass through shared memory: between it and the device's memory, neighbouring threads of a warp copy neighbouring 16-byte
// words of their 32 blocks. These are `whole` if the row has all of them, at addresses that 16-byte words fit.
//
// `encode_any`, `combine_any` and `decode_any` take all other sizes. A CTA has 4096 elements, which are whole blocks of any
// size; a thread has 8 of them, whose codes are one word, and shared memory joins threads.

#include "numbers.cuh"

constexpr int group = 32;             // elements of a block that a thread has
constexpr int warps = 4;              // of a CTA: _WARPS of int4.py
constexpr int largest_cta = 512;      // of the other kernels
constexpr int held = 8;               // elements of a thread in these
constexpr float32 most_code = 7;
constexpr uint32 negatives = 0x7888;  // bit i % 16: whether D negates element i of a row
constexpr float32 magic = 12582912;  // 1.5 * 2^23: what is added to it is rounded, and is then in its lowest bits
constexpr uint32 smallest_normal = 0x0080, largest_scale = 0x7e12;  // in bfloat16: 2^-126, and 146 * 2^118

struct Layout {                        // as in int4.py
    int64 rows, count, block, blocks;  // blocks of `block` elements, `count` elements in a row
    int64 rotate;                      // elements that are rotated together
    int64 start, stride;               // bytes of a row of the wire before its codes, and in all
    int64 mask;                        // 15: a constant would be loaded again for each code
};
static_assert(sizeof(Layout) == 64);


// ---- Rounding ----

struct Nearest {
    __device__ uint32 scale(uint32 bits) const { return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }

    __device__ float32 level(float32 x, uint32) const { return x + magic; }
};

// Random numbers of a key and the position of an element: see kernels/host/random_bits.py.
struct Stochastic {
    uint32 low, high, counter;

    // Up, so that no element is clipped.
    __device__ uint32 scale(uint32 bits) const { return min((bits + 0xffff) >> 16, largest_scale); }

    __device__ float32 level(float32 x, uint32 position) const {
        uint32 bits = (counter + position) ^ low;
        bits = (bits ^ bits >> 16) * 0x7feb352d;
        bits = (bits ^ bits >> 15) + high;
        bits *= 0x846ca68b;
        bits ^= bits >> 16;
        float32 sum = fmaf(float32(bits >> 8), 5.9604644775390625e-08f, x);  // the product is exact
        return __fadd_rd(fminf(fmaxf(sum, -most_code), most_code), magic);
    }
};


// ---- Blocks ----

// The larger of two numbers that are not negative; NaN if either is NaN.
__device__ float32 larger_of(float32 a, float32 b) {
#if __CUDA_ARCH__ >= 800
    float32 larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
#else
    return a > b || is_nan(a) ? a : b;
#endif
}

template <int count>
__device__ float32 largest_of(const float32 (&t)[count]) {
    constexpr int chains = 4;  // the next comparison need not wait for the last
    float32 most[chains];
#pragma unroll
    for (int i = 0; i < count; ++i) most[i % chains] = i < chains ? fabsf(t[i]) : larger_of(most[i % chains], fabsf(t[i]));
    return larger_of(larger_of(most[0], most[1]), larger_of(most[2], most[3]));
}

__device__ constexpr bool is_negated(int64 i) { return negatives >> (i & 15) & 1; }

// The butterflies of strides below `size` and `count`.
template <int count>
__device__ void rotate(float32 (&t)[count], int size) {
#pragma unroll
    for (int stride = 1; stride < count; stride *= 2) {
        if (stride >= size) break;
#pragma unroll
        for (int i = 0; i < count; ++i) {
            if (i & stride) continue;
            float32 a = t[i], b = t[i + stride];
            t[i] = a + b, t[i + stride] = a - b;
        }
    }
}

// x / 7, correctly rounded by one correction (Markstein, "Computation of elementary functions on the IBM RISC System/6000",
// 1990); a test compares all quotients.
__device__ float32 seventh(float32 x) {
    constexpr float32 inverse = 1 / most_code;
    float32 quotient = x * inverse;
    return fmaf(fmaf(-most_code, quotient, x), inverse, quotient);
}

struct Scale {
    uint32 bits;      // in bfloat16
    float32 inverse;  // 0 if all codes are 0

    // From the largest magnitude of a block.
    template <class Rounding>
    __device__ Scale(float32 most, const Rounding& rounding) {
        bits = rounding.scale(__float_as_uint(seventh(most)));
        bool broken = !is_finite(most), zero = bits < smallest_normal;
        float32 scale = __uint_as_float(bits << 16), first = rough_reciprocal(scale);
        // One of Newton's steps. It is off by 2^-44 before it is rounded, and no number of 8 bits has a reciprocal as near
        // to the middle of two floats.
        inverse = broken || zero ? 0 : fmaf(fmaf(-scale, first, 1), first, first);
        bits = broken ? canonical_nan >> 16 : zero ? 0 : bits;
    }
};

// The codes of 8 elements, 4 bits each, the first one lowest.
template <class Rounding>
__device__ uint32 packed(const float32* t, const Scale& scale, const Rounding& rounding, uint32 position) {
    // The bits of a level are those of `magic` plus the code. Added in place, without `magic` and with 8 more for each code,
    // none of which is then negative, the codes take 4 bits each. Inverting the highest of these takes off the 8.
    uint32 sum = 0, excess = 0;
#pragma unroll
    for (int i = 0; i < held; ++i) {
        sum += __float_as_uint(rounding.level(t[i] * scale.inverse, position + i)) << 4 * i;
        excess += 0x4b400000u << 4 * i;
    }
    uint32 codes = (sum - excess + 0x88888888) ^ 0x88888888;
    return scale.inverse > 0 ? codes : 0;
}

// Code `i` of 8, counted modulo 8, times 16^(i % 4); `mask` is 15.
__device__ float32 code_in_place(uint32 codes, int i, uint32 mask) {
    int at = 4 * (i % 4);
    uint32 part = i % held < 4 ? codes : codes >> 16;
    return __uint_as_float((part & mask << at) ^ (0x4b000000 | 8u << at)) - (8388608 + float32(8 << at));
}

__device__ float32 unit_in_place(int i) { return 1.0f / (1 << 4 * (i % 4)); }

// The bits of the scale of a block, in bfloat16.
__device__ uint32 read_scale(const uint8* row, int64 block) { return reinterpret_cast<const uint16*>(row)[block]; }

__device__ void write_scale(uint8* row, int64 block, const Scale& scale) {
    reinterpret_cast<uint16*>(row)[block] = uint16(scale.bits);
}

__device__ void clear_padding(const Layout& layout, uint8* wire) {
    clear_padding(layout, wire, 2 * layout.blocks, layout.blocks * (layout.block / 2));
}


// ---- Sums ----

struct Weights {
    int64 summands;
    bool mean;
    float32 share;
    uint32 exact;  // number of scales, from `lowest_exact` on, whose products are exact

    static constexpr uint32 lowest_exact = 0x0d80, highest_exact = 0x7180;  // 2^-100 and 2^100 in bfloat16

    __device__ Weights(int64 summands, bool mean) : summands(summands), mean(mean) {
        bool halving = !mean || ((summands & (summands - 1)) == 0 && summands <= 65536);
        share = mean ? 1.0f / summands : 1;
        exact = halving ? highest_exact - lowest_exact : 0;
    }

    // total[i] += the decoded element i. `bits` are those of the scale.
    template <int count>
    __device__ void add(uint32 bits, const uint32 (&codes)[count / held], float32 (&total)[count], uint32 mask) const {
        float32 scale = __uint_as_float(bits << 16);
        // The product of a code and a scale of 8 bits is exact, and so is that with 1 / summands, and the sum rounded once.
        if (bits - lowest_exact < exact) {
            float32 weight = scale * share;
#pragma unroll
            for (int i = 0; i < count; ++i)
                total[i] = fmaf(code_in_place(codes[i / held], i, mask), weight * unit_in_place(i), total[i]);
        } else {
            float32 weight = !is_finite(scale) ? __uint_as_float(canonical_nan) : mean ? scale / summands : scale;
#pragma unroll
            for (int i = 0; i < count; ++i)
                total[i] = total[i] + code_in_place(codes[i / held], i, mask) * unit_in_place(i) * weight;
        }
    }
};

// Infinite sums count as the largest finite number.
template <int count>
__device__ float32 limited(float32 (&t)[count], float32 most) {
    float32 limit = largest_finite<float32>();
    if (!(most > limit)) return most;
#pragma unroll
    for (int i = 0; i < count; ++i) t[i] = fminf(fmaxf(t[i], -limit), limit);
    return limit;
}


// ---- Blocks of a thread each ----

constexpr uint32 width = access_bytes / sizeof(element), units = group / width;  // words of 16 bytes of a block

// Room for the blocks of this thread's warp.
__device__ uint4* shared_words() {
    __shared__ uint4 shared[warps][warp * (units + 1)];
    return shared[threadIdx.y];
}

// The elements of a warp's blocks in shared memory.
struct Tile {
    uint4* words = shared_words();

    // One word between blocks, so that neighbouring threads get different banks when each accesses its own block.
    static __device__ uint32 place(uint32 block, uint32 unit) { return block * (units + 1) + unit; }

    // The place of word `i` of this thread, one of every 32 from `threadIdx.x` on, in the order of the elements.
    static __device__ uint32 place(uint32 i) {
        return place(i * (warp / units) + threadIdx.x / units, threadIdx.x % units);
    }

    // Copy the elements of a row from `from` on; zeros beyond the end.
    template <bool whole>
    __device__ void load_from(const element* from, int64 valid) const {
        uint4 read[units];
        from += threadIdx.x * width, valid -= threadIdx.x * width;
#pragma unroll
        for (uint32 i = 0; i < units; ++i) {
            if (whole) {
                read[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i * warp);
            } else {
                element raw[width];
                load(from + i * warp * width, valid - i * warp * width, raw);
                memcpy(&read[i], raw, access_bytes);
            }
        }
        __syncwarp();  // others may still read their last blocks
#pragma unroll
        for (uint32 i = 0; i < units; ++i) words[place(i)] = read[i];
        __syncwarp();
    }

    template <bool whole>
    __device__ void store_to(element* to, int64 valid) const {
        to += threadIdx.x * width, valid -= threadIdx.x * width;
        __syncwarp();
#pragma unroll
        for (uint32 i = 0; i < units; ++i) {
            uint4 word = words[place(i)];
            if (whole) {
                __stcg(reinterpret_cast<uint4*>(to) + i * warp, word);
            } else {
                element raw[width];
                memcpy(raw, &word, access_bytes);
                store(to + i * warp * width, valid - i * warp * width, raw);
            }
        }
        __syncwarp();  // before others write their next blocks
    }

    // This thread's block.
    __device__ void read(float32 (&x)[group]) const {
#pragma unroll
        for (uint32 j = 0; j < units; ++j) {
            element raw[width];
            memcpy(raw, &words[place(threadIdx.x, j)], access_bytes);
#pragma unroll
            for (uint32 i = 0; i < width; ++i) x[j * width + i] = widen(raw[i]);
        }
    }

    // With numbers that are all `finite`, also after they are rounded, or with any.
    template <bool finite>
    __device__ void write(const float32 (&x)[group]) const {
#pragma unroll
        for (uint32 j = 0; j < units; ++j) {
            element raw[width];
            if (finite) {
                narrow_finite(x + j * width, raw);
            } else {
#pragma unroll
                for (uint32 i = 0; i < width; ++i) raw[i] = narrow<element>(x[j * width + i]);
            }
            memcpy(&words[place(threadIdx.x, j)], raw, access_bytes);
        }
    }
};

// Call `visit(row, block, whole)` for the block of this thread, and of all threads of its warp at the same time; blocks
// beyond the end of the row are among them unless they are whole.
template <class Visit>
__device__ void each_block(const Layout& layout, bool fit_words, Visit visit) {
    for (int64 row = blockIdx.y; row < layout.rows; row += gridDim.y)
        for (int64 first = (int64(blockIdx.x) * warps + threadIdx.y) * warp; first < layout.blocks;
             first += int64(gridDim.x) * warps * warp) {
            if (fit_words && (first + warp) * group <= layout.count)
                visit(row, first + threadIdx.x, Bool<true>());
            else
                visit(row, first + threadIdx.x, Bool<false>());
        }
}

// Where the codes of a block of 32 are.
__device__ int64 place_of_codes(const Layout& layout, int64 row, int64 block) {
    return row * layout.stride + layout.start + block * (group / 2);
}

template <bool whole, class Rounding>
__device__ void write_block(const float32 (&t)[group], float32 most, const Rounding& rounding, const Layout& layout,
                            int64 row, int64 block, uint8* wire) {
    if (!whole && block >= layout.blocks) return;
    Scale scale(most, rounding);
    uint32 codes[group / held], position = uint32(row * layout.count + block * group);
#pragma unroll
    for (int i = 0; i < group / held; ++i) codes[i] = packed(t + i * held, scale, rounding, position + i * held);
    write_scale(wire + row * layout.stride, block, scale);
    store<whole>(reinterpret_cast<uint32*>(wire + place_of_codes(layout, row, block)), group / held, codes);
}

__device__ bool fit_words(const element* x, const Layout& layout) {
    return aligned<access_bytes>(x) && layout.count % width == 0;
}

template <class Rounding>
__device__ void encode_with(const Rounding& rounding, const element* x, uint8* wire, const Layout& layout) {
    Tile tile;
    each_block(layout, fit_words(x, layout) && fit_words(wire, layout), [&](int64 row, int64 block, auto whole_) {
        constexpr bool whole = whole_.value;
        int64 begin = (block - threadIdx.x) * group;
        tile.template load_from<whole>(x + row * layout.count + begin, layout.count - begin);
        float32 t[group];
        tile.read(t);
#pragma unroll
        for (int i = 0; i < group; ++i) t[i] = t[i] * ((is_negated(i) ? -1.0f : 1.0f) / group);
        rotate(t, group);
        write_block<whole>(t, largest_of(t), rounding, layout, row, block, wire);
    });
    clear_padding(layout, wire);
}

// The codes and the scale of one block of a row.
struct Coded {
    uint32 codes[group / held], scale;

    template <bool whole>
    __device__ void load_from(const uint8* scale_at, const uint8* codes_at) {
        load<whole>(reinterpret_cast<const uint32*>(codes_at), group / held, codes);
        scale = read_scale(scale_at, 0);
    }
};

constexpr int ahead = 4;  // rows that are loaded before they are added

template <class Rounding>
__device__ void combine_with(const Rounding& rounding, const uint8* wires, const Weights& weights, uint8* wire,
                             const Layout& layout) {
    each_block(layout, fit_words(wires, layout) && fit_words(wire, layout), [&](int64, int64 block, auto whole_) {
        constexpr bool whole = whole_.value;
        if (!whole && block >= layout.blocks) return;
        const uint8 *scale_at = wires + 2 * block, *codes_at = wires + place_of_codes(layout, 0, block);
        float32 total[group] = {};
#pragma unroll 1
        for (int left = int(weights.summands); left > 0; left -= ahead) {
            Coded rows[ahead];
#pragma unroll
            for (int k = 0; k < ahead; ++k) {
                if (k < left) rows[k].template load_from<whole>(scale_at, codes_at);
                scale_at += layout.stride, codes_at += layout.stride;
            }
#pragma unroll
            for (int k = 0; k < ahead; ++k)
                if (k < left) weights.add(rows[k].scale, rows[k].codes, total, uint32(layout.mask));
        }
        float32 most = limited(total, largest_of(total));
        write_block<whole>(total, most, rounding, layout, 0, block, wire);
    });
    clear_padding(layout, wire);
}


// ---- H q of a block, on pairs of integers: two of 16 bits in a word, whose sums and differences are the word's ----

// Pairs of codes: word i + 4 j has codes 8 j + i and 8 j + i + 4. After `rotate`, they are those of H q, but for the
// last stride, 4, and each `excess` too large.
struct Pairs {
    static constexpr int count = group / 2;
    static constexpr uint32 excess = 256;  // keeps them from becoming negative; |H q| is at most 128 without the last stride
    uint32 words[count];

    __device__ Pairs(const uint32 (&codes)[group / held], uint32 mask) {
#pragma unroll
        for (int i = 0; i < count; ++i) words[i] = (codes[i / 4] >> 4 * (i % 4) & mask * 0x10001) ^ 0x80008;  // 8 too large
    }

    __device__ void rotate() {
        // The first row and column of H are ones: what is added to the first element is then in all sums, and what is in
        // all elements is added to the first sum.
        words[0] += excess * 0x10001;
#pragma unroll
        for (int stride = 1; stride < count; stride *= 2) {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if (i & stride) continue;
                uint32 a = words[i], b = words[i + stride];
                words[i] = a + b, words[i + stride] = a - b;
            }
        }
        words[0] -= 8 * count * 0x10001;
    }

    // Element `i` of D H q and the one 4 behind it. A zero is positive.
    __device__ void last_stride(int i, float32& sum, float32& difference) const {
        constexpr float32 excesses = 2 * (32768 + float32(excess));
        uint32 word = words[i / 8 * 4 + i % 4];
        float32 a = __uint_as_float(__byte_perm(word, 0x47000000, 0x7104));  // 32768 + the lower half
        float32 b = __uint_as_float(__byte_perm(word, 0x47000000, 0x7324));
        sum = is_negated(i) ? excesses - a - b : a + b - excesses;
        difference = is_negated(i + 4) ? b - a : a - b;
    }
};


// ---- Blocks of other sizes ----

// Room for the numbers of all threads of a CTA.
__device__ float32 (*shared_numbers())[largest_cta] {
    __shared__ float32 shared[held][largest_cta];
    return shared;
}

// The values of another thread of the CTA, whose number differs in the bits of `distance`, the same for all threads.
template <int count>
__device__ void exchange(const float32 (&mine)[count], float32 (&theirs)[count], int distance) {
    if (distance < warp) {
#pragma unroll
        for (int i = 0; i < count; ++i) theirs[i] = __shfl_xor_sync(all_lanes, mine[i], distance);
        return;
    }
    float32(*shared)[largest_cta] = shared_numbers();
    __syncthreads();  // `shared` may still be read
#pragma unroll
    for (int i = 0; i < count; ++i) shared[i][threadIdx.x] = mine[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < count; ++i) theirs[i] = shared[i][threadIdx.x ^ distance];
}

// The elements of a thread that begin at `at` in a row, which is a multiple of their number.
__device__ void read_elements(const element* row, int64 at, int64 count, float32 (&x)[held]) {
#pragma unroll
    for (int j = 0; j < held; j += int(width)) {
        element raw[width];
        load(row + at + j, count - at - j, raw);
#pragma unroll
        for (int i = 0; i < int(width); ++i) x[j + i] = widen(raw[i]);
    }
}

__device__ void write_elements(const float32 (&x)[held], element* row, int64 at, int64 count) {
#pragma unroll
    for (int j = 0; j < held; j += int(width)) {
        element raw[width];
#pragma unroll
        for (int i = 0; i < int(width); ++i) raw[i] = narrow<element>(x[j + i]);
        store(row + at + j, count - at - j, raw);
    }
}

// Whether D negates element `i` of 8 that begin at `at`, a multiple of 8, in a row.
__device__ bool is_negated_at(const Layout& layout, int64 at, int i) {
    return layout.rotate > 1 && negatives >> (uint32(at) & 8) >> i & 1;
}

__device__ void rotate_across(float32 (&t)[held], int size) {
    rotate(t, size);
#pragma unroll 1
    for (int distance = 1; distance * held < size; distance *= 2) {
        float32 other[held], sign = threadIdx.x & distance ? -1 : 1;
        exchange(t, other, distance);
#pragma unroll
        for (int i = 0; i < held; ++i) t[i] = other[i] + sign * t[i];
    }
}

__device__ float32 largest_across(float32 most, int block) {
#pragma unroll 1
    for (int distance = 1; distance * held < block; distance *= 2) {
        float32 mine[1] = {most}, other[1];
        exchange(mine, other, distance);
        most = larger_of(most, other[0]);
    }
    return most;
}

// Call `visit(row, at)` with the first element of this thread, for all threads of the CTA at the same time; some of them
// may be beyond the last block.
template <class Visit>
__device__ void each_part(const Layout& layout, Visit visit) {
    constexpr int tile = largest_cta * held;
    int64 end = layout.blocks * layout.block;
    for (int64 row = blockIdx.y; row < layout.rows; row += gridDim.y)
        for (int64 first = int64(blockIdx.x) * tile; first < end; first += int64(gridDim.x) * tile)
            visit(row, first + threadIdx.x * held);
}

template <class Rounding>
__device__ void write_part(const float32 (&t)[held], float32 most, const Rounding& rounding, const Layout& layout, int64 row,
                           int64 at, uint8* wire) {
    if (at >= layout.blocks * layout.block) return;
    Scale scale(most, rounding);
    uint8* to = wire + row * layout.stride;
    if (at % layout.block == 0) write_scale(to, at / layout.block, scale);
    uint32 codes = packed(t, scale, rounding, uint32(row * layout.count + at));
    *reinterpret_cast<uint32*>(to + layout.start + at / 2) = codes;
}

template <class Rounding>
__device__ void encode_any_with(const Rounding& rounding, const element* x, uint8* wire, const Layout& layout) {
    float32 share = 1.0f / float32(layout.rotate);
    each_part(layout, [&](int64 row, int64 at) {
        float32 t[held];
        read_elements(x + row * layout.count, at, layout.count, t);
#pragma unroll
        for (int i = 0; i < held; ++i) t[i] = t[i] * (is_negated_at(layout, at, i) ? -share : share);
        rotate_across(t, int(layout.rotate));
        write_part(t, largest_across(largest_of(t), int(layout.block)), rounding, layout, row, at, wire);
    });
    clear_padding(layout, wire);
}

template <class Rounding>
__device__ void combine_any_with(const Rounding& rounding, const uint8* wires, const Weights& weights, uint8* wire,
                                 const Layout& layout) {
    each_part(layout, [&](int64, int64 at) {
        float32 total[held] = {};
        if (at < layout.blocks * layout.block)
            for (int64 row = 0; row < weights.summands; ++row) {
                const uint8* from = wires + row * layout.stride;
                uint32 codes[1] = {*reinterpret_cast<const uint32*>(from + layout.start + at / 2)};
                weights.add(read_scale(from, at / layout.block), codes, total, uint32(layout.mask));
            }
        float32 most = largest_across(limited(total, largest_of(total)), int(layout.block));
        write_part(total, most, rounding, layout, 0, at, wire);
    });
    clear_padding(layout, wire);
}

// The decoded element, from that of H q: kept finite unless the scale is not.
__device__ float32 finite(float32 x, float32 scale) {
    float32 limit = largest_finite<element>();
    return !is_finite(scale) ? __uint_as_float(canonical_nan) : fminf(fmaxf(x * scale, -limit), limit);
}


// ---- Kernels ----

#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define KERNEL_OF_BLOCKS KERNEL(warps * warp)
#define KERNEL_OF_ANY KERNEL(largest_cta)

// `low` and `high` are the halves of a key of 64 bits, `counter` the position of the first element.

KERNEL_OF_BLOCKS encode(const element* x, uint8* wire, Layout layout) { encode_with(Nearest(), x, wire, layout); }

KERNEL_OF_BLOCKS encode_stochastic(const element* x, uint8* wire, Layout layout, int64 low, int64 high, int64 counter) {
    encode_with(Stochastic{uint32(low), uint32(high), uint32(counter)}, x, wire, layout);
}

KERNEL_OF_BLOCKS combine(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout) {
    combine_with(Nearest(), wires, Weights(summands, mean != 0), wire, layout);
}

KERNEL_OF_BLOCKS combine_stochastic(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout, int64 low,
                                    int64 high, int64 counter) {
    Stochastic rounding{uint32(low), uint32(high), uint32(counter)};
    combine_with(rounding, wires, Weights(summands, mean != 0), wire, layout);
}

KERNEL_OF_BLOCKS decode(const uint8* wire, element* out, Layout layout) {
    Tile tile;
    each_block(layout, fit_words(out, layout) && fit_words(wire, layout), [&](int64 row, int64 block, auto whole_) {
        constexpr bool whole = whole_.value;
        if (whole || block < layout.blocks) {
            Coded here;
            here.template load_from<whole>(wire + row * layout.stride + 2 * block, wire + place_of_codes(layout, row, block));
            float32 scale = __uint_as_float(here.scale << 16);
            Pairs pairs(here.codes, uint32(layout.mask));
            pairs.rotate();
            float32 x[group];
#pragma unroll
            for (int i = 0; i < group; ++i)
                if (i % 8 < 4) pairs.last_stride(i, x[i], x[i + 4]);
            // The largest magnitude of H q is 8 * 32.
            if (fabsf(scale) * (8 * group) <= largest_finite<element>()) {
#pragma unroll
                for (int i = 0; i < group; ++i) x[i] = x[i] * scale;
                tile.write<true>(x);
            } else {
#pragma unroll
                for (int i = 0; i < group; ++i) x[i] = finite(x[i], scale);
                tile.write<false>(x);
            }
        }
        int64 begin = (block - threadIdx.x) * group;
        tile.template store_to<whole>(out + row * layout.count + begin, layout.count - begin);
    });
}

KERNEL_OF_ANY encode_any(const element* x, uint8* wire, Layout layout) { encode_any_with(Nearest(), x, wire, layout); }

KERNEL_OF_ANY encode_any_stochastic(const element* x, uint8* wire, Layout layout, int64 low, int64 high, int64 counter) {
    encode_any_with(Stochastic{uint32(low), uint32(high), uint32(counter)}, x, wire, layout);
}

KERNEL_OF_ANY combine_any(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout) {
    combine_any_with(Nearest(), wires, Weights(summands, mean != 0), wire, layout);
}

KERNEL_OF_ANY combine_any_stochastic(const uint8* wires, int64 summands, int64 mean, uint8* wire, Layout layout, int64 low,
                                     int64 high, int64 counter) {
    Stochastic rounding{uint32(low), uint32(high), uint32(counter)};
    combine_any_with(rounding, wires, Weights(summands, mean != 0), wire, layout);
}

KERNEL_OF_ANY decode_any(const uint8* wire, element* out, Layout layout) {
    each_part(layout, [&](int64 row, int64 at) {
        const uint8* from = wire + row * layout.stride;
        bool exists = at < layout.blocks * layout.block;
        uint32 codes = exists ? *reinterpret_cast<const uint32*>(from + layout.start + at / 2) : 0;
        float32 scale = __uint_as_float(exists ? read_scale(from, at / layout.block) << 16 : 0);
        float32 q[held];
#pragma unroll
        for (int i = 0; i < held; ++i) q[i] = code_in_place(codes, i, uint32(layout.mask)) * unit_in_place(i);
        rotate_across(q, int(layout.rotate));
#pragma unroll
        for (int i = 0; i < held; ++i) q[i] = finite(is_negated_at(layout, at, i) ? 0 - q[i] : q[i], scale);  // not -0
        write_elements(q, out + row * layout.count, at, layout.count);
    });
}
