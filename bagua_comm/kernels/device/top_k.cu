// TopK: the largest elements of each chunk, with their indices. kernels/host is the specification.
//
// `choose` has a CTA for each chunk. A thread keeps the keys of 16 consecutive elements in registers: the bits of their
// magnitudes, which are in the order of the magnitudes. Elements pass through shared memory, so that neighbouring threads load
// neighbouring 16-byte words. The least key that is sent is found digit by digit (radix selection): the CTA counts the keys
// with each value of a digit, and each warp finds the value at which the number of larger keys passes the number that is sent.
// Most keys are not counted: threads form groups, one for each element that is sent or a few more, and none of the keys that
// are sent is below the least of the largest keys of the groups. Prefix sums give each element that is sent its position.
//
// With values of 2 bits, three more kernels make the code book, of sums in float64 whose order the specification fixes: the
// elements of each chunk, then the chunks. Chunks are added by a thread each (`squares`, `codes`), and their sums by one warp
// in their order, of which every CTA has one (`ordered_total`).

#include "numbers.cuh"

constexpr int held = 16;  // elements of a thread: _HELD of top_k.py
constexpr int largest_chunk = 4096, largest_cta = largest_chunk / held;
constexpr int warps = 4;  // of a CTA of the other kernels: _WARPS of top_k.py
constexpr uint32 magnitude = 0x7fffffff, infinity = 0x7f800000, nan_key = infinity + 1;

struct Layout {  // as in top_k.py
    int64 count, chunk, keep, bits;
    int64 chunks, entries;          // an entry is an element that is sent
    int64 values, indices, nbytes;  // offsets in the wire, and its size
};
static_assert(sizeof(Layout) == 72);

// Of chunk `c`: its first element, the number of its elements, the first entry, and the number of its entries.
struct Chunk {
    int64 first, begin;
    int length, kept;

    __device__ Chunk(const Layout& layout, int64 c)
        : first(c * layout.chunk),
          begin(c * layout.keep),
          length(int(min(layout.chunk, layout.count - first))),
          kept(int(min(layout.keep, int64(length)))) {}
};

// Memory between the kernels of one call, for values of 2 bits.
struct Sums {
    float64* mean;                      // of all values
    float64 *values, *squares, *parts;  // of each chunk: sums of values, of squares, and of the values of each code
    uint64* counts;                     // of each chunk: numbers of values of the four codes, 16 bits each

    __device__ Sums(float64* memory, int64 chunks)
        : mean(memory),
          values(memory + 1),
          squares(values + chunks),
          parts(squares + chunks),
          counts(reinterpret_cast<uint64*>(parts + 4 * chunks)) {}
};


// ---- The choice ----

__device__ uint32 key_of(float32 x) { return min(__float_as_uint(x) & magnitude, nan_key); }

// What is sent of an element.
__device__ float32 sent(float32 x) { return is_finite(x) ? x : __uint_as_float(canonical_nan); }

constexpr int width = access_bytes / sizeof(element), units = held / width;  // words of 16 bytes of a thread's elements

// Where unit `unit` of thread `thread` is in shared memory: eight threads that access their own words of one unit, or
// neighbouring words, get different banks.
__device__ int place(int thread, int unit) { return (thread * units + (unit ^ thread * units / 8 % units)) * width; }

constexpr int key_bits = 31, digit_bits = 8, digits = 4, values_of_digit = 1 << digit_bits;

struct alignas(access_bytes) Shared {
    element elements[largest_chunk];
    union {
        uint32 numbers[digits * values_of_digit];  // of keys with each value of each digit
        uint16 chosen[largest_chunk];              // indices of elements that are sent
    };
    uint32 of_warps[largest_cta / warp];  // one number of each

    __device__ uint4& word(int thread, int unit) { return *reinterpret_cast<uint4*>(elements + place(thread, unit)); }

    __device__ element& at(int i) { return elements[place(i / held, i % held / width) + i % width]; }
};

// Of a digit: the value in which the number of larger keys passes `left`, and how many of its keys are needed.
struct Digit {
    uint32 value;
    int left;
    bool whole;  // all of its keys are needed

    // With the numbers of keys of each value; by all threads of a warp.
    __device__ Digit(const uint32* numbers, int wanted) {
        constexpr int each = values_of_digit / warp;
        int lane = threadIdx.x % warp;
        const uint4* words = reinterpret_cast<const uint4*>(numbers + lane * each);
        uint4 low = words[0], high = words[1];
        uint32 mine[each] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        int own = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) own += mine[i];
        int larger = own;  // and those of higher lanes
#pragma unroll
        for (int distance = 1; distance < warp; distance *= 2) {
            int other = __shfl_down_sync(all_lanes, larger, distance);
            larger += lane + distance < warp ? other : 0;
        }
        int rest = wanted - (larger - own);
        uint32 found = 0;  // not 0 in one lane
#pragma unroll
        for (int i = each - 1; i >= 0; --i) {
            int number = mine[i];
            if (rest > 0 && rest <= number) found = lane * each + i | uint32(rest) << digit_bits | uint32(rest == number) << 31;
            rest -= number;
        }
        found = __shfl_sync(all_lanes, found, __ffs(__ballot_sync(all_lanes, found != 0)) - 1);
        value = found & (values_of_digit - 1), left = int(found << 1 >> (digit_bits + 1)), whole = found >> 31;
    }
};

// With 64 registers a thread, a multiprocessor holds four of the largest CTAs. On sm_75 and sm_80 registers would be spilled.
// (Without a second bound the compiler spills some as well, to hold more CTAs.)
#if __CUDA_ARCH__ > 800
#define KERNEL_OF_CHUNKS extern "C" __global__ void __launch_bounds__(largest_cta, 4)
#else
#define KERNEL_OF_CHUNKS extern "C" __global__ void __launch_bounds__(largest_cta, 2)
#endif

KERNEL_OF_CHUNKS choose(const element* x, uint8* wire, float32* values, float64* memory, Layout layout) {
    __shared__ Shared shared;
    for (int64 c = blockIdx.x; c < layout.chunks; c += gridDim.x) {
        Chunk chunk(layout, c);
        if (c != blockIdx.x) __syncthreads();  // others may still write their last chunk

        const element* from = x + chunk.first;
        if (chunk.length == int(blockDim.x) * held && aligned<access_bytes>(from)) {
            uint4 read[units];
#pragma unroll
            for (int i = 0; i < units; ++i)
                read[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i * int(blockDim.x) + threadIdx.x);
#pragma unroll
            for (int i = 0; i < units; ++i) {
                int word = i * int(blockDim.x) + threadIdx.x;
                shared.word(word / units, word % units) = read[i];
            }
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < int(blockDim.x) * held; i += blockDim.x)
                shared.at(i) = i < chunk.length ? from[i] : element{};  // zeros, which come after all others
        }
#pragma unroll 1
        for (int i = threadIdx.x; i < digits * values_of_digit; i += blockDim.x) shared.numbers[i] = 0;
        __syncthreads();  // words and numbers
        uint32 keys[held], bound = 0;
#pragma unroll
        for (int j = 0; j < units; ++j) {
            uint4 word = shared.word(threadIdx.x, j);
            element raw[width];
            memcpy(raw, &word, access_bytes);
#pragma unroll
            for (int i = 0; i < width; ++i) {
                keys[j * width + i] = key_of(widen(raw[i]));
                bound = max(bound, keys[j * width + i]);
            }
        }
        // Join groups of threads while there are enough; then take the least of their largest keys.
        for (int distance = 1; distance < warp; distance *= 2) {
            uint32 other = __shfl_xor_sync(all_lanes, bound, distance);
            bound = 2 * distance * chunk.kept <= blockDim.x ? max(bound, other) : min(bound, other);
        }
        if (threadIdx.x % warp == 0) shared.of_warps[threadIdx.x / warp] = bound;
        __syncthreads();  // bounds
#pragma unroll 1
        for (int i = 0; i < blockDim.x / warp; ++i) bound = min(bound, shared.of_warps[i]);
        if (chunk.kept > blockDim.x) bound = 0;

        uint32 least = 0;  // the digits of the least key that is sent
        int ties = chunk.kept;  // how many keys like this one are sent
        int shift = key_bits;
#pragma unroll 1
        for (int digit = 0; digit < digits; ++digit) {
            int above = shift;
            shift = max(0, shift - digit_bits);
            uint32 mask = (1u << (above - shift)) - 1;
            uint32* numbers = shared.numbers + digit * values_of_digit;
#pragma unroll
            for (int i = 0; i < held; ++i)
                if (keys[i] >= bound && keys[i] >> above == least) atomicAdd(&numbers[keys[i] >> shift & mask], 1u);
            __syncthreads();  // numbers
            Digit found(numbers, ties);
            least = least << (above - shift) | found.value, ties = found.left;
            if (found.whole) {  // so that larger keys with these digits are sent as well
                ties = largest_chunk;
                break;
            }
        }
        least = max(least << shift, bound);

        uint32 mine = 0;  // numbers of larger keys and, times 2^16, of equal ones
#pragma unroll
        for (int i = 0; i < held; ++i) mine += uint32(keys[i] > least) + (uint32(keys[i] == least) << 16);
        uint32 before = mine;
#pragma unroll
        for (int distance = 1; distance < warp; distance *= 2) {
            uint32 other = __shfl_up_sync(all_lanes, before, distance);
            before += threadIdx.x % warp >= distance ? other : 0;
        }
        if (threadIdx.x % warp == warp - 1) shared.of_warps[threadIdx.x / warp] = before;
        before -= mine;
        __syncthreads();  // totals; and no warp reads numbers any more
#pragma unroll 1
        for (int i = 0; i < threadIdx.x / warp; ++i) before += shared.of_warps[i];
        int larger = before & 0xffff, equal = before >> 16;
#pragma unroll
        for (int i = 0; i < held; ++i) {
            int at = larger + min(equal, ties);
            bool is_larger = keys[i] > least, is_equal = keys[i] == least;
            if (is_larger || (is_equal && equal < ties)) shared.chosen[at] = uint16(threadIdx.x * held + i);
            larger += is_larger, equal += is_equal;
        }
        __syncthreads();  // chosen

#pragma unroll 1
        for (int k = threadIdx.x; k < chunk.kept; k += blockDim.x) {
            float32 value = sent(widen(shared.at(shared.chosen[k])));
            int64 at = chunk.begin + k;
            if (layout.bits == 2) {
                values[at] = value;
            } else if (layout.bits == 32) {
                reinterpret_cast<float32*>(wire)[at] = value;
            } else {
                uint32 most = __float_as_uint(largest_finite<bfloat16>()), sign = __float_as_uint(value) & ~magnitude;
                uint32 bits = __float_as_uint(value) & magnitude;
                bits = is_nan(value) ? canonical_nan : min(bits + 0x7fff + (bits >> 16 & 1), most);
                reinterpret_cast<uint16*>(wire)[at] = uint16((bits | sign) >> 16);
            }
        }
        uint8* indices = wire + layout.indices + chunk.begin / 2 * 3;
#pragma unroll 1
        for (int k = 2 * threadIdx.x; k < chunk.kept; k += 2 * blockDim.x) {
            uint32 pair = shared.chosen[k] | (k + 1 < chunk.kept ? shared.chosen[k + 1] : 0) << 12;
            uint8* three = indices + k / 2 * 3;
            three[0] = uint8(pair), three[1] = uint8(pair >> 8), three[2] = uint8(pair >> 16);
        }
        if (c == layout.chunks - 1) clear(wire, layout.indices + (layout.entries + 1) / 2 * 3, layout.nbytes);
        if (layout.bits == 2 && threadIdx.x == blockDim.x - 1) {  // beside warps that write
            float64 sum = 0;
#pragma unroll 4
            for (int k = 0; k < chunk.kept; ++k) sum += float64(sent(widen(shared.at(shared.chosen[k]))));
            Sums(memory, layout.chunks).values[c] = sum;
        }
    }
}


// ---- The code book ----

// The sum of the terms in their order, by all threads of a warp.
__device__ float64 ordered_total(const float64* terms, int64 count) {
    float64 total = 0, next = threadIdx.x < count ? terms[threadIdx.x] : 0;
    for (int64 first = 0; first < count; first += warp) {
        float64 these = next;
        int64 at = first + warp + threadIdx.x;
        next = at < count ? terms[at] : 0;
#pragma unroll
        for (int i = 0; i < warp; ++i) total += __shfl_sync(all_lanes, these, i);
    }
    return total;
}

// The same for all threads of the CTA.
__device__ float64 ordered_total_of_cta(const float64* terms, int64 count) {
    __shared__ float64 shared;
    if (threadIdx.y == 0) {
        float64 total = ordered_total(terms, count);
        if (threadIdx.x == 0) shared = total;
    }
    __syncthreads();
    return shared;
}

// Call `visit(c)` for each chunk of this thread.
template <class Visit>
__device__ void each_chunk(const Layout& layout, Visit visit) {
    int64 step = int64(gridDim.x) * warps * warp;
    for (int64 c = (int64(blockIdx.x) * warps + threadIdx.y) * warp + threadIdx.x; c < layout.chunks; c += step) visit(c);
}

extern "C" __global__ void __launch_bounds__(warps* warp)
    squares(const float32* values, float64* memory, Layout layout) {
    Sums sums(memory, layout.chunks);
    float64 mean = ordered_total_of_cta(sums.values, layout.chunks) / float64(layout.entries);
    if (blockIdx.x == 0 && threadIdx.y == 0 && threadIdx.x == 0) *sums.mean = mean;
    each_chunk(layout, [&](int64 c) {
        Chunk chunk(layout, c);
        float64 sum = 0;
#pragma unroll 4
        for (int k = 0; k < chunk.kept; ++k) {
            float64 centered = float64(values[chunk.begin + k]) - mean;
            sum += centered * centered;
        }
        sums.squares[c] = sum;
    });
}

extern "C" __global__ void __launch_bounds__(warps* warp)
    codes(const float32* values, uint8* wire, float64* memory, Layout layout) {
    Sums sums(memory, layout.chunks);
    float64 mean = *sums.mean, variance = ordered_total_of_cta(sums.squares, layout.chunks);
    float64 step = 1.5 * sqrt(variance / float64(max(int64(1), layout.entries - 1)));
    each_chunk(layout, [&](int64 c) {
        Chunk chunk(layout, c);
        int64 end = chunk.begin + chunk.kept;
        float64 parts[4] = {0, 0, 0, 0};
        uint64 counts = 0;
        uint32 byte = 0;
        // A byte belongs to the chunk of its first value, and may end with values of the next chunks.
        for (int64 k = chunk.begin; k < end || (k % 4 && k < layout.entries); ++k) {
            float64 value = values[k];
            int code = is_nan(mean) ? 0 : 2;
            if (step > 0) code = int(fmin(fmax(rint((value - mean) / step + 2), 0.0), 3.0));
            if (k < end) {
#pragma unroll
                for (int i = 0; i < 4; ++i) parts[i] += code == i ? value : 0;
                counts += uint64(1) << 16 * code;
            }
            byte |= uint32(code) << 2 * (k % 4);
            if (k % 4 == 3 || k == layout.entries - 1) {
                if (k - k % 4 >= chunk.begin) wire[layout.values + k / 4] = uint8(byte);
                byte = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.parts[i * layout.chunks + c] = parts[i];
        sums.counts[c] = counts;
    });
}

// One CTA, of a warp for each code.
extern "C" __global__ void __launch_bounds__(4 * warp) book(uint8* wire, float64* memory, Layout layout) {
    Sums sums(memory, layout.chunks);
    int code = threadIdx.y;
    float64 total = ordered_total(sums.parts + code * layout.chunks, layout.chunks);
    int64 count = 0;
    for (int64 c = threadIdx.x; c < layout.chunks; c += warp) count += sums.counts[c] >> 16 * code & 0xffff;
    for (int distance = warp / 2; distance > 0; distance /= 2) count += __shfl_xor_sync(all_lanes, count, distance);
    float32 value = count ? float32(total / float64(count)) : 0;
    if (is_nan(*sums.mean)) value = __uint_as_float(canonical_nan);
    if (threadIdx.x == 0) reinterpret_cast<float32*>(wire)[code] = value;
}


// ---- Decoding ----

struct Entry {
    int index;  // in the chunk
    float32 value;

    __device__ Entry() {}

    __device__ Entry(const uint8* wire, const Layout& layout, int64 k) {
        const uint8* three = wire + layout.indices + k / 2 * 3;
        index = k % 2 ? three[1] >> 4 | three[2] << 4 : three[0] | (three[1] & 15) << 8;
        if (layout.bits == 2)
            value = reinterpret_cast<const float32*>(wire)[wire[layout.values + k / 4] >> 2 * (k % 4) & 3];
        else if (layout.bits == 32)
            value = reinterpret_cast<const float32*>(wire)[k];
        else
            value = __uint_as_float(uint32(reinterpret_cast<const uint16*>(wire)[k]) << 16);
    }
};

struct alignas(access_bytes) Totals {
    float32 of_chunk[largest_chunk];
    uint16 senders[largest_chunk];  // the number of ranks that have sent each element, other than as 0
};

constexpr int64 by_ranks = 1, by_senders = 2;  // divisors: TOP_K_DIVISORS of the host's kernels

// A CTA for each chunk. All threads add the entries of one rank before those of the next.
extern "C" __global__ void __launch_bounds__(largest_cta, 4)
    sum(const uint8* wires, int64 ranks, int64 divisor, element* out, Layout layout) {
    __shared__ Totals shared;
    float32* total = shared.of_chunk;
    for (int64 c = blockIdx.x; c < layout.chunks; c += gridDim.x) {
        Chunk chunk(layout, c);
        if (c != blockIdx.x) __syncthreads();  // others may still read the last sums
        Entry next;  // loaded one rank ahead
        if (threadIdx.x < chunk.kept) next = Entry(wires, layout, chunk.begin + threadIdx.x);
        for (int i = threadIdx.x; i < chunk.length; i += blockDim.x) total[i] = 0, shared.senders[i] = 0;
        __syncthreads();  // zeros
        for (int64 rank = 0; rank < ranks; ++rank) {
            const uint8* wire = wires + rank * layout.nbytes;
            auto add = [&](const Entry& entry) {
                if (entry.index < chunk.length)
                    total[entry.index] += entry.value, shared.senders[entry.index] += entry.value != 0;
            };
            if (threadIdx.x < chunk.kept) {
                Entry now = next;
                if (rank + 1 < ranks) next = Entry(wire + layout.nbytes, layout, chunk.begin + threadIdx.x);
                add(now);
            }
            for (int k = threadIdx.x + blockDim.x; k < chunk.kept; k += blockDim.x) add(Entry(wire, layout, chunk.begin + k));
            __syncthreads();  // the sums of this rank
        }
        for (int at = threadIdx.x * width; at < chunk.length; at += blockDim.x * width) {
            float32 sums[width];
            element raw[width];
            memcpy(sums, total + at, sizeof sums);
#pragma unroll
            for (int i = 0; i < width; ++i) {
                int64 addends = divisor == by_ranks ? ranks : divisor == by_senders ? max(1, int(shared.senders[at + i])) : 1;
                float32 value = sums[i] / float32(addends);
                raw[i] = narrow<element>(is_nan(value) ? __uint_as_float(canonical_nan) : value);
            }
            store(out + chunk.first + at, chunk.length - at, raw);
        }
    }
}

// A warp for each chunk.
extern "C" __global__ void __launch_bounds__(warps* warp, 8) subtract(element* x, const uint8* wire, Layout layout) {
    int64 step = int64(gridDim.x) * warps;
    for (int64 c = int64(blockIdx.x) * warps + threadIdx.y; c < layout.chunks; c += step) {
        Chunk chunk(layout, c);
        element* from = x + chunk.first;
        auto store_finite = [&](int i, float32 value) {
            element rounded = narrow<element>(value);
            from[i] = is_finite(widen(rounded)) ? rounded : element{};
        };
        bool broken = false;
        for (int k = threadIdx.x; k < chunk.kept; k += warp) {
            Entry entry(wire, layout, chunk.begin + k);
            if (entry.index >= chunk.length) continue;
            broken |= is_nan(entry.value);
            store_finite(entry.index, widen(from[entry.index]) - entry.value);
        }
        // Only then may there be more that is not finite, since the largest are sent.
        if (__all_sync(all_lanes, !broken)) continue;
        __syncwarp();  // lanes read what others have stored: a vote does not order memory
        for (int i = threadIdx.x; i < chunk.length; i += warp)
            if (!is_finite(widen(from[i]))) from[i] = element{};
    }
}
