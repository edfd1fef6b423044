// TopK: the largest elements of each chunk, with their indices. kernels/host is the specification.
//
// `choose` has a CTA for each chunk. Elements pass through shared memory, so that neighbouring threads load neighbouring words
// of 16 bytes, and a thread then has 16 consecutive ones. Their keys are the bits of their magnitudes, which are in the order of
// the magnitudes. If as many threads as elements are sent have a key that reaches some bound, none below it is sent. The
// largest such bound, to some bits, leaves few candidates, which a prefix sum puts next to each other. Among these, one warp
// finds the least key that is sent digit by digit (radix selection): it counts the keys with each value of a digit, and finds
// the value at which the number of larger keys passes the number that is sent.
//
// With values of 2 bits, three more kernels make the code book, of sums in float64 over all values in their order (`average`,
// `spread`, `codes`). The specification adds them by a tree: neighbours, then neighbouring sums. So a thread, a warp and a CTA
// each add a subtree, whatever the grid is, and the last CTA to end adds the sums of all CTAs.

#include "numbers.cuh"

constexpr int held = 16;  // elements of a thread: _HELD of top_k.py
constexpr int largest_chunk = 4096, largest_cta = largest_chunk / held;
constexpr int warps = 4;  // of a CTA of `subtract`: _WARPS of top_k.py
constexpr uint32 magnitude = 0x7fffffff, infinity = 0x7f800000, nan_key = infinity + 1;

struct Layout {  // as in top_k.py
    int64 count, chunk, keep, bits;
    int64 chunks, entries;          // an entry is an element that is sent
    int64 values, indices, nbytes;  // offsets in the wire, and its size
    int64 blocks;                   // of entries, of which a CTA of the code book has one at a time
};
static_assert(sizeof(Layout) == 80);

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
    float64 *mean, *step;  // of all values, and between neighbouring codes
    uint64* ended;         // of each kernel of the code book, the number of its CTAs that have ended
    float64* of_blocks;    // of each block; of `codes`, those of the four codes next to each other
    uint64* counts;        // of each block: numbers of values of the four codes, 16 bits each

    __device__ Sums(float64* memory, int64 blocks)
        : mean(memory),
          step(memory + 1),
          ended(reinterpret_cast<uint64*>(memory + 2)),
          of_blocks(memory + 5),
          counts(reinterpret_cast<uint64*>(of_blocks + 4 * blocks)) {}
};


// ---- The choice ----

__device__ uint32 key_of(float32 x) { return min(__float_as_uint(x) & magnitude, nan_key); }

// What is sent of an element.
__device__ float32 sent(float32 x) { return is_finite(x) ? x : __uint_as_float(canonical_nan); }

constexpr int width = access_bytes / sizeof(element), units = held / width;  // words of 16 bytes of a thread's elements

// Where unit `unit` of thread `thread` is in shared memory: eight threads that access their own words of one unit, or
// neighbouring words, get different banks.
__device__ int place(int thread, int unit) { return (thread * units + (unit ^ thread * units / 8 % units)) * width; }

constexpr int key_bits = 31, bound_bits = 12;  // of a key, and how many of them a bound may have
constexpr int digit_bits = 8, values_of_digit = 1 << digit_bits;

struct alignas(access_bytes) Shared {
    element elements[largest_chunk];
    uint32 numbers[values_of_digit];      // of keys with each value of a digit
    uint16 chosen[largest_chunk];         // indices of candidates, then of elements that are sent
    uint32 of_warps[largest_cta / warp];  // one number of each

    __device__ uint4& word(int thread, int unit) { return *reinterpret_cast<uint4*>(elements + place(thread, unit)); }

    __device__ element& at(int i) { return elements[place(i / held, i % held / width) + i % width]; }

    __device__ float32 value(int k) { return widen(at(chosen[k])); }
};

// Of a number of each thread: the sum of those of threads before this one, and of all. For all threads of the CTA.
struct Prefix {
    int before, all;

    __device__ Prefix(uint32* of_warps, int mine) {
        int lane = threadIdx.x % warp, number = threadIdx.x / warp;
        before = mine;
#pragma unroll
        for (int distance = 1; distance < warp; distance *= 2) {
            int other = __shfl_up_sync(all_lanes, before, distance);
            before += lane >= distance ? other : 0;
        }
        if (lane == warp - 1) of_warps[number] = before;
        before -= mine;
        __syncthreads();  // sums of warps
        all = 0;
#pragma unroll
        for (int i = 0; i < largest_cta / warp; ++i) {
            if (i == number) before += all;
            if (i < int(blockDim.x) / warp) all += of_warps[i];
        }
    }
};

// Of a digit: the value in which the number of larger keys passes `wanted`, and how many of its keys are needed.
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

// Leave those that are sent of so many candidates, whose keys are not below the bound. By all threads of one warp.
__device__ void choose_of(Shared& shared, int candidates, int kept, uint32 bound) {
    int lane = threadIdx.x;
    uint32 most = 0;
#pragma unroll 1
    for (int k = lane; k < candidates; k += warp) most = max(most, key_of(shared.value(k)) - bound);
#pragma unroll
    for (int distance = 1; distance < warp; distance *= 2) most = max(most, __shfl_xor_sync(all_lanes, most, distance));

    uint32 least = 0;  // the digits of the least key that is sent, less the bound
    int ties = kept;   // how many keys like this one are sent
    int shift = 32 - __clz(most);
#pragma unroll 1
    while (shift) {
#pragma unroll
        for (int i = 0; i < values_of_digit / warp; ++i) shared.numbers[i * warp + lane] = 0;
        __syncwarp();
        int above = shift;
        shift = max(0, shift - digit_bits);
        uint32 mask = (1u << (above - shift)) - 1;
#pragma unroll 1
        for (int k = lane; k < candidates; k += warp) {
            uint32 key = key_of(shared.value(k)) - bound;
            if (key >> above == least) atomicAdd(&shared.numbers[key >> shift & mask], 1u);
        }
        __syncwarp();
        Digit found(shared.numbers, ties);
        __syncwarp();
        least = least << (above - shift) | found.value, ties = found.left;
        if (found.whole) {  // so that larger keys with these digits are sent as well
            ties = largest_chunk;
            break;
        }
    }
    least = (least << shift) + bound;

    int larger = 0, equal = 0;  // before these lanes
    uint32 lower = (1u << lane) - 1;
#pragma unroll 1
    for (int first = 0; first < candidates && larger + min(equal, ties) < kept; first += warp) {
        int k = first + lane, index = shared.chosen[min(k, candidates - 1)];
        uint32 key = k < candidates ? key_of(widen(shared.at(index))) : 0;
        bool is_larger = k < candidates && key > least, is_equal = k < candidates && key == least;
        uint32 all_larger = __ballot_sync(all_lanes, is_larger), all_equal = __ballot_sync(all_lanes, is_equal);
        int before = equal + __popc(all_equal & lower);
        __syncwarp();  // lanes overwrite what others have read: a vote does not order memory
        if (is_larger || (is_equal && before < ties))
            shared.chosen[larger + __popc(all_larger & lower) + min(before, ties)] = uint16(index);
        larger += __popc(all_larger), equal += __popc(all_equal);
    }
}

// As many CTAs as find room in the shared memory of a multiprocessor of sm_90 and sm_100, and of sm_80, where 32 registers a
// thread would not suffice. Elsewhere fewer find room.
constexpr int ctas_of_choice =
#if __CUDA_ARCH__ >= 900
    8;
#else
    6;
#endif

extern "C" __global__ void __launch_bounds__(largest_cta, ctas_of_choice)
    choose(const element* x, uint8* wire, float32* values, float64* memory, Layout layout) {
    __shared__ Shared shared;
#pragma unroll 1
    for (int64 c = blockIdx.x; c < layout.chunks; c += gridDim.x) {
        Chunk chunk(layout, c);
        if (c != blockIdx.x) __syncthreads();  // others may still write their last chunk

        const element* from = x + chunk.first;
        if (chunk.length == int(blockDim.x) * held && aligned<access_bytes>(from)) {
            uint4 read[units];
#pragma unroll
            for (int i = 0; i < units; ++i)
                read[i] = __ldcg(reinterpret_cast<const uint4*>(from) + i * int(blockDim.x) + threadIdx.x);
            uint4* to = &shared.word(threadIdx.x / units, threadIdx.x % units);  // `place` repeats itself after each warp
#pragma unroll
            for (int i = 0; i < units; ++i) to[i * int(blockDim.x)] = read[i];
        } else {
#pragma unroll 1
            for (int i = threadIdx.x; i < int(blockDim.x) * held; i += blockDim.x)
                shared.at(i) = i < chunk.length ? from[i] : element{};  // zeros, which come after all others
        }
        __syncthreads();  // words
        uint32 keys[held], largest = 0;
#pragma unroll
        for (int j = 0; j < units; ++j) {
            uint4 word = shared.word(threadIdx.x, j);
            element raw[width];
            memcpy(raw, &word, access_bytes);
#pragma unroll
            for (int i = 0; i < width; ++i) {
                uint32 key = __float_as_uint(widen(raw[i])) & magnitude;  // of NaNs other keys, which are not less
                keys[j * width + i] = key, largest = max(largest, key);
            }
        }
        largest = min(largest, nan_key);

        uint32 bound = 0;
#pragma unroll
        for (int bit = key_bits - 1; bit >= key_bits - bound_bits; --bit)
            if (__syncthreads_count(largest >= (bound | 1u << bit)) >= chunk.kept) bound |= 1u << bit;
        uint32 mask = 0;  // of candidates
#pragma unroll
        for (int i = 0; i < held; ++i) mask |= uint32(keys[i] >= bound) << i;
        Prefix candidates(shared.of_warps, __popc(mask));
#pragma unroll 1
        for (int at = candidates.before; mask; mask &= mask - 1)
            shared.chosen[at++] = uint16(threadIdx.x * held + __ffs(mask) - 1);
        __syncthreads();  // candidates
        if (threadIdx.x < warp) choose_of(shared, candidates.all, chunk.kept, bound);
        __syncthreads();  // chosen

#pragma unroll 1
        for (int k = threadIdx.x; k < chunk.kept; k += blockDim.x) {
            float32 value = sent(shared.value(k));
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
        if (c == 0 && layout.bits == 2 && threadIdx.x < 3) Sums(memory, layout.blocks).ended[threadIdx.x] = 0;
    }
}


// ---- The code book ----

constexpr int own = 4, book_warps = 8;          // values of a thread; warps of a CTA: _BOOK_WARPS of top_k.py
constexpr int block = own * warp * book_warps;  // values of a CTA, a subtree: _BLOCK of top_k.py

// Numbers of the four codes.
template <class T>
struct Four {
    T of[4];

    __device__ Four operator+(const Four& other) const {
        return {of[0] + other.of[0], of[1] + other.of[1], of[2] + other.of[2], of[3] + other.of[3]};
    }
};

// Of another thread of the warp, whose number differs in the bits of `distance`.
template <class T>
__device__ T across(const T& x, int distance) {
    return __shfl_xor_sync(all_lanes, x, distance);
}

template <class T>
__device__ Four<T> across(const Four<T>& x, int distance) {
    return {across(x.of[0], distance), across(x.of[1], distance), across(x.of[2], distance), across(x.of[3], distance)};
}

// What another CTA has written.
__device__ float64 written(const float64* at) { return __ldcg(at); }

__device__ Four<float64> written(const Four<float64>* at) {
    return {__ldcg(at->of), __ldcg(at->of + 1), __ldcg(at->of + 2), __ldcg(at->of + 3)};
}

// The sum of the terms of a block, for all of its threads.
template <class T>
__device__ T sum_of_block(const T (&terms)[own]) {
    __shared__ T of_warps[book_warps];
    T sum = (terms[0] + terms[1]) + (terms[2] + terms[3]);
#pragma unroll
    for (int distance = 1; distance < warp; distance *= 2) sum = sum + across(sum, distance);
    __syncthreads();  // others may still read the last sums
    if (threadIdx.x % warp == 0) of_warps[threadIdx.x / warp] = sum;
    __syncthreads();
    sum = of_warps[threadIdx.x % book_warps];
#pragma unroll
    for (int distance = 1; distance < book_warps; distance *= 2) sum = sum + across(sum, distance);
    return sum;
}

// The sum of any number of terms, which are overwritten with the sums of blocks, then of blocks of these, until one is left.
template <class T>
__device__ T sum_of(T* terms, int64 count) {
    for (;; count = (count + block - 1) / block)
        for (int64 b = 0; b * block < count; ++b) {
            T mine[own];
#pragma unroll
            for (int i = 0; i < own; ++i) {
                int64 at = b * block + threadIdx.x * own + i;
                mine[i] = at < count ? written(terms + at) : T{};
            }
            T sum = sum_of_block(mine);
            if (count <= block) return sum + T{};  // not -0.0
            if (threadIdx.x == 0) terms[b] = sum;
            __syncthreads();
        }
}

// For each block of this CTA, call `visit(b, mine, valid)`: with its number, the values of this thread, and how many there are.
template <class Visit>
__device__ void each_block(const float32* values, const Layout& layout, Visit visit) {
    for (int64 b = blockIdx.x; b < layout.blocks; b += gridDim.x) {
        int64 first = b * block + threadIdx.x * own, valid = layout.entries - first;
        float32 mine[own];
        load(values + first, valid, mine);
        visit(b, mine, int(max(int64(0), min(valid, int64(own)))));
    }
}

// Whether all other CTAs of the grid have ended: then this one sees what they have written. For all threads of a CTA, of which
// the first has written.
__device__ bool all_others_ended(uint64* ended) {
    __shared__ bool all;
    if (threadIdx.x == 0) {
        __threadfence();
        all = atomicAdd(ended, uint64(1)) == gridDim.x - 1;
        __threadfence();
    }
    __syncthreads();
    return all;
}

// The sum of a term of each value, in the last CTA to end; true in its first thread.
template <class Term>
__device__ bool sum_of_values(const float32* values, const Layout& layout, Sums& sums, uint64* ended, float64& sum, Term term) {
    each_block(values, layout, [&](int64 b, const float32* mine, int valid) {
        float64 terms[own];
#pragma unroll
        for (int i = 0; i < own; ++i) terms[i] = i < valid ? term(float64(mine[i])) : 0;
        float64 of_block = sum_of_block(terms);
        if (threadIdx.x == 0) sums.of_blocks[b] = of_block;
    });
    if (!all_others_ended(ended)) return false;
    sum = sum_of(sums.of_blocks, layout.blocks);
    return threadIdx.x == 0;
}

#define KERNEL_OF_BLOCKS extern "C" __global__ void __launch_bounds__(book_warps* warp)

KERNEL_OF_BLOCKS average(const float32* values, float64* memory, Layout layout) {
    Sums sums(memory, layout.blocks);
    float64 sum;
    if (sum_of_values(values, layout, sums, sums.ended, sum, [](float64 value) { return value; }))
        *sums.mean = sum / float64(layout.entries);
}

KERNEL_OF_BLOCKS spread(const float32* values, float64* memory, Layout layout) {
    Sums sums(memory, layout.blocks);
    float64 mean = *sums.mean, sum;
    auto square = [&](float64 value) { return (value - mean) * (value - mean); };
    if (sum_of_values(values, layout, sums, sums.ended + 1, sum, square))
        *sums.step = 1.5 * sqrt(sum / float64(max(int64(1), layout.entries - 1)));
}

KERNEL_OF_BLOCKS codes(const float32* values, uint8* wire, float64* memory, Layout layout) {
    Sums sums(memory, layout.blocks);
    Four<float64>* of_blocks = reinterpret_cast<Four<float64>*>(sums.of_blocks);
    float64 mean = *sums.mean, step = *sums.step;
    each_block(values, layout, [&](int64 b, const float32* mine, int valid) {
        Four<float64> parts[own];
        uint64 counts[own];
        uint32 byte = 0;
#pragma unroll
        for (int i = 0; i < own; ++i) {
            float64 value = mine[i];
            int code = is_nan(mean) ? 0 : 2;
            if (step > 0) code = int(fmin(fmax(rint((value - mean) / step + 2), 0.0), 3.0));
            if (i < valid) byte |= uint32(code) << 2 * i;
            counts[i] = i < valid ? uint64(1) << 16 * code : 0;
#pragma unroll
            for (int c = 0; c < 4; ++c) parts[i].of[c] = i < valid && code == c ? value : 0;
        }
        if (valid > 0) wire[layout.values + b * (block / 4) + threadIdx.x] = uint8(byte);
        uint64 count = sum_of_block(counts);
        Four<float64> sum = sum_of_block(parts);
        if (threadIdx.x == 0) sums.counts[b] = count, of_blocks[b] = sum;
    });
    if (!all_others_ended(sums.ended + 2)) return;
    Four<uint64> numbers[own] = {};
    for (int64 b = threadIdx.x; b < layout.blocks; b += blockDim.x) {
        uint64 count = __ldcg(sums.counts + b);
#pragma unroll
        for (int c = 0; c < 4; ++c) numbers[0].of[c] += count >> 16 * c & 0xffff;
    }
    Four<uint64> count = sum_of_block(numbers);
    Four<float64> sum = sum_of(of_blocks, layout.blocks);
    if (threadIdx.x) return;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
        float32 value = count.of[c] ? float32(sum.of[c] / float64(int64(count.of[c]))) : 0;
        reinterpret_cast<float32*>(wire)[c] = is_nan(mean) ? __uint_as_float(canonical_nan) : value;
    }
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
extern "C" __global__ void __launch_bounds__(largest_cta, 8)
    sum(const uint8* wires, int64 ranks, int64 divisor, element* out, Layout layout) {
    constexpr int each = access_bytes / sizeof(uint16);
    __shared__ Totals shared;
    float32* total = shared.of_chunk;
    for (int64 c = blockIdx.x; c < layout.chunks; c += gridDim.x) {
        Chunk chunk(layout, c);
        if (c != blockIdx.x) __syncthreads();  // others may still read the last sums
        Entry next;  // loaded one rank ahead
        if (threadIdx.x < chunk.kept) next = Entry(wires, layout, chunk.begin + threadIdx.x);
        for (int i = threadIdx.x * each; i < chunk.length; i += blockDim.x * each) {
            uint4* of_total = reinterpret_cast<uint4*>(total + i);
            of_total[0] = of_total[1] = *reinterpret_cast<uint4*>(shared.senders + i) = uint4{};
        }
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
                if (sums[i] != 0) sums[i] = sums[i] / float32(addends);  // of few elements; others would take the slow way
                raw[i] = narrow<element>(with_canonical_nan(sums[i]));
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
