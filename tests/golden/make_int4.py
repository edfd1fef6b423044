"""Golden bytes of the Int4 codec, wire format version 1, worked out in plain Python.

    python tests/golden/make_int4.py            write int4.json and int4/*.bin next to this
    python tests/golden/make_int4.py --check    exit 1 unless the files on disk are the same bytes

This file shares nothing with the codec: it is a second reading of the specification, one scalar at a time, with
the standard library and the number formats of `make_minmax` alone.

The wire. A chunk of m elements is cut into nb blocks of B elements; zeros fill the last one. All numbers are
little endian.

    chunk := header | codes
    header:  a scale per block in bfloat16, zero-padded to a multiple of 32 bytes
    codes:   nb B / 2 bytes, zero-padded to a multiple of 32 bytes; element 2 i of all blocks is the low half of
             byte i, element 2 i + 1 the high half, in two's complement

The formula. Every group of R elements of a block is rotated, and every block quantized; in float32, every
operation rounded by itself, half to even:

    t = H (D x / R)    s = bfloat16(max |t| / 7)      q = clip(rint(t * (1 / s)), -7, 7)      x' = (D H q) * s

D changes signs: entry i of a chunk is negated if (b0 and b1) differs from (b2 and b3), where b0 to b3 are the
lowest bits of i. Without rotation, R = 1, there is no D. Entry (i, j) of H is (-1)^(number of ones in i & j).
The sums in H (D x / R) are made in steps k = 1, 2, 4, ..., R / 2: in each, element i becomes t[i] + t[i + k] if
i & k is 0, and t[i - k] - t[i] otherwise.

The rules for what the formula leaves open:

* A block that holds a NaN or an infinity has the scale 0x7fc0, the canonical quiet NaN, and codes 0. A block
  whose scale is a NaN or an infinity decodes to the canonical NaN.
* If s would be below 2^-126, it is 0, and the codes are 0.
* x' is clamped to the largest finite values of the element dtype, then rounded once to that dtype.
* combine adds q * w of p chunks in row order in float32, where w is s, or s / p for "avg". The sums, not rotated
  again, are quantized as t above; where max |t| is infinite, it counts as the largest float32.
* Stochastic rounding has q = clip(floor(t * (1 / s) + u), -7, 7), where u is `uniform(key, counter + i)` of the
  element i of all chunks. s is rounded up, to at most 0x7e12.

The manifest. int4.json is a list of cases, as minmax.json, with `block`, `rotate` and, in cases of stochastic
rounding, `key` and `counter`, else null; kinds are codec, combine and allreduce.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from make_minmax import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Case,
    DType,
    Reading,
    Row,
    clip,
    f32,
    main,
    normal,
    padded,
    padded_nbytes,
    rint,
    uniform,
    unpack_bfloat16,
)


class Codec(NamedTuple):
    """Int4 for one dtype."""

    dtype: DType
    block: int = 32
    rotate: int = 32
    key: int | None = None
    counter: int = 0


def random_bits(key: int, counter: int) -> int:
    """Return 32 random bits."""
    x = (counter ^ key) & 0xFFFFFFFF
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x + (key >> 32) & 0xFFFFFFFF
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def random_number(key: int, counter: int) -> float:
    """Return a number in [0, 1)."""
    return (random_bits(key, counter) >> 8) / 2.0**24


def is_negated(i: int) -> bool:
    """Whether D negates element i of a chunk."""
    return (i & 3 == 3) != (i >> 2 & 3 == 3)


def rotated(group: Row, first: int) -> Row:
    """Return H (D x / R) of a group that begins at element `first`."""
    t = [f32(x / len(group)) for x in group]
    k = 1
    if len(t) > 1:
        t = [-x if is_negated(first + i) else x for i, x in enumerate(t)]
    while k < len(t):
        t = [f32(t[i - k] - t[i]) if i & k else f32(t[i] + t[i + k]) for i in range(len(t))]
        k *= 2
    return t


def rotated_back(codes: list[int], first: int) -> list[int]:
    """Return D H q of a group that begins at element `first`."""
    size = range(len(codes))
    sums = [sum(-codes[j] if (i & j).bit_count() % 2 else codes[j] for j in size) for i in size]
    return [-x if len(sums) > 1 and is_negated(first + i) else x for i, x in enumerate(sums)]


def bfloat16_bits(x: float, *, up: bool) -> int:
    """Round a positive float32 to bfloat16, half to even or up."""
    bits = int.from_bytes(FLOAT32.pack_one(x), "little")
    if up:
        return min(bits + 0xFFFF >> 16, 0x7E12)
    return bits + 0x7FFF + (bits >> 16 & 1) >> 16


def quantized(t: Row, codec: Codec, counter: int) -> tuple[int, list[int]]:
    """Return the bits of the scale of a block of rotated elements, and its codes."""
    if any(map(math.isnan, t)):
        return 0x7FC0, [0] * len(t)
    most = min(max(map(abs, t)), FLOAT32.largest)
    bits = bfloat16_bits(f32(most / 7), up=codec.key is not None)
    if bits < 0x0080:
        return 0, [0] * len(t)
    inverse = f32(1 / unpack_bfloat16(bits.to_bytes(2, "little")))
    codes = []
    for i, x in enumerate(t):
        level = f32(x * inverse)
        if codec.key is None:
            level = rint(level)
        else:
            level = f32(level + random_number(codec.key, counter + i))
            level = float(math.floor(level)) if math.isfinite(level) else level
        codes.append(int(clip(level, -7.0, 7.0)))
    return bits, codes


def packed(scales: list[int], codes: list[int]) -> bytes:
    """Return the bytes of a chunk."""
    nibbles = [code & 15 for code in codes]
    pairs = zip(nibbles[::2], nibbles[1::2], strict=True)
    header = b"".join(bits.to_bytes(2, "little") for bits in scales)
    return padded(header) + padded(bytes(low | high << 4 for low, high in pairs))


def unpacked(wire: bytes, m: int, codec: Codec) -> Iterator[tuple[float, list[int]]]:
    """Yield the scale and the codes of each block."""
    blocks = math.ceil(m / codec.block)
    start = padded_nbytes(2 * blocks)
    for b in range(blocks):
        scale = unpack_bfloat16(wire[2 * b : 2 * b + 2])
        where = start + b * codec.block // 2
        nibbles = [half for byte in wire[where : where + codec.block // 2] for half in (byte & 15, byte >> 4)]
        yield scale if math.isfinite(scale) else math.nan, [x - 16 if x > 7 else x for x in nibbles]


def encode(chunk: Row, codec: Codec, counter: int = 0) -> bytes:
    """Return the wire bytes of one chunk, whose first element has number `counter`."""
    scales, codes = [], []
    for start in range(0, len(chunk), codec.block):
        block = chunk[start : start + codec.block]
        block += [0.0] * (codec.block - len(block))
        t = []
        for at in range(0, codec.block, codec.rotate):
            t += rotated(block[at : at + codec.rotate], start + at)
        if not all(map(math.isfinite, block)):
            t = [math.nan] * codec.block
        scale, values = quantized(t, codec, codec.counter + counter + start)
        scales.append(scale)
        codes += values
    return packed(scales, codes)


def decode(wire: bytes, m: int, codec: Codec) -> Row:
    """Return m float32 numbers, clamped but not yet rounded to the element dtype."""
    chunk, largest = [], codec.dtype.largest
    for scale, codes in unpacked(wire, m, codec):
        if math.isnan(scale):
            chunk += [math.nan] * codec.block
            continue
        for at in range(0, codec.block, codec.rotate):
            sums = rotated_back(codes[at : at + codec.rotate], len(chunk))
            chunk += [clip(f32(x * scale), -largest, largest) for x in sums]
    return chunk[:m]


def combine(wires: list[bytes], m: int, op: str, codec: Codec, counter: int = 0) -> bytes:
    """Add or average encoded chunks of m elements, and encode the result."""
    scales, codes = [], []
    for b, rows in enumerate(zip(*(unpacked(wire, m, codec) for wire in wires), strict=True)):
        total = [0.0] * codec.block
        for scale, values in rows:
            weight = f32(scale / len(wires)) if op == "avg" else scale
            total = [f32(a + f32(q * weight)) for a, q in zip(total, values, strict=True)]
        scale, values = quantized(total, codec, codec.counter + counter + b * codec.block)
        scales.append(scale)
        codes += values
    return packed(scales, codes)


_READING = Reading(encode, decode, combine)
codec_case, combine_case, allreduce_case = _READING.codec_case, _READING.combine_case, _READING.allreduce_case


# --- The cases -----------------------------------------------------------------------------------


def ordinary_cases(dtype: DType) -> Iterator[Case]:
    """Vary the count around a block, the number of chunks, and the sizes of blocks and rotations."""
    codec = Codec(dtype)
    for m in (1, 31, 32, 33, 500):
        yield codec_case(f"normal-{m}", codec, normal(f"normal-{m}", 1, m))
    yield codec_case("normal-3x545", codec, normal("normal-3x545", 3, 545))
    for block, rotate in ((8, 1), (8, 2), (8, 8), (64, 4), (128, 128)):
        other = Codec(dtype, block, rotate)
        yield codec_case(f"block-{block}-rotate-{rotate}", other, normal(f"{block}-{rotate}", 2, 300))
    yield codec_case("block-4096", Codec(dtype, 4096, 16), normal("block-4096", 1, 100))
    heavy_tailed = [x * x * x for x in normal("heavy-tailed", 1, 100)[0]]
    yield codec_case("heavy-tailed", codec, [heavy_tailed])
    small = [x * 10.0 ** -(i // 32) for i, x in enumerate(normal("small", 1, 320)[0])]
    yield codec_case("small", codec, [small])


def edge_cases(dtype: DType) -> Iterator[Case]:
    """Take blocks where something in the formula is extreme."""
    plain, codec = Codec(dtype, 8, 1), Codec(dtype, 8, 8)
    # The largest is 7, so the scale is 1 and every other element a tie.
    ties = [7.0, -6.5, -2.5, -0.5, 0.5, 1.5, 2.5, 6.5]
    yield codec_case("ties", plain, [[*ties, *(x / 4 for x in ties)]])
    constants = [x for c in (0.0, 1.0, -3.5, 1e-3) for x in [c] * 8]
    top = dtype.largest
    huge = [[top, -top, 0.0, 1.0, -1.0, top / 2, -top / 2, top / 255], [top] * 8, [-top, top] * 4]
    wide = [*huge[0], *huge[1], *huge[2], *uniform("huge", 5, top / 2, top)]
    tiny = [k * dtype.smallest for k in (-3, 0, 1, 100, 5, 5, 7, -90, *[12, 13] * 4)]
    nan, infinity = normal("nan", 2, 28), normal("infinity", 2, 28)
    nan[0][11], nan[1][0] = math.nan, -math.nan
    infinity[0][3], infinity[0][17], infinity[1][27] = math.inf, -math.inf, math.inf
    infinity[1][8:16] = [-math.inf, math.inf] * 4
    for name, each in (("rotated", codec), ("plain", plain)):
        yield codec_case(f"constants-{name}", each, [constants])
        yield codec_case(f"signed-zeros-{name}", each, [[0.0, -0.0] * 4 + [-0.0] * 8 + [-0.0, 1.0] * 4])
        yield codec_case(f"huge-{name}", each, [wide])
        yield codec_case(f"subnormals-{name}", each, [tiny])
        yield codec_case(f"nan-{name}", each, nan)
        yield codec_case(f"infinity-{name}", each, infinity)
    if dtype is not FLOAT16:
        least = 7 * 2.0**-126  # below about this, a scale is subnormal
        factors = (0.99, 0.996, 0.998, 1.0, 1.01, 2.0, 30.0)
        rows = [[x * least * factor for factor in factors for x in (1.0, *[0.0] * 6, 0.3)]]
        yield codec_case("smallest-scale", plain, rows)
        yield codec_case("smallest-scale-rotated", codec, [[8 * x for x in rows[0]]])


def combine_cases(dtype: DType) -> Iterator[Case]:
    """Add and average 1 to 5 rows."""
    codec, small, top = Codec(dtype), Codec(dtype, 8, 8), dtype.largest
    for op in ("sum", "avg"):
        for p in (1, 2, 3, 5):
            yield combine_case("normal", codec, op, normal(f"combine-{op}-{p}", p, 101))
        rows = [[top] * 8 + [top, -top] * 4, [top] * 8 + [-top, top] * 4, [top] + [0.0] * 15]
        yield combine_case("overflow", small, op, rows)
    yield combine_case("not-rotated", Codec(dtype, 8, 1), "sum", normal("combine-not-rotated", 3, 21))
    rows = normal("combine-nan", 3, 28)
    rows[1][9] = math.nan
    rows[2][27] = math.inf
    yield combine_case("nan", small, "sum", rows)
    yield combine_case("cancelling", small, "sum", [rows[0], [-x for x in rows[0]]])
    yield combine_case("tiny", small, "avg", [[x * dtype.smallest for x in range(16)]] * 3)


def allreduce_cases(dtype: DType) -> Iterator[Case]:
    """Take counts that the ranks do and do not divide, down to one element."""
    for op, p, count in (("avg", 2, 1536), ("sum", 3, 1000), ("avg", 4, 7), ("sum", 2, 1)):
        yield allreduce_case(str(count), Codec(dtype), op, normal(f"allreduce-{op}-{p}-{count}", p, count))


def stochastic_cases(dtype: DType) -> Iterator[Case]:
    """Round stochastically, with small and large keys and counters, and extreme numbers."""
    draws = Codec(dtype, key=1), Codec(dtype, 8, 8, key=0xFEDCBA9876543210, counter=2**32 - 50)
    for name, codec in zip(("key-1", "large-key"), draws, strict=True):
        yield codec_case(f"stochastic-{name}", codec, normal(name, 2, 100))
        yield combine_case(f"stochastic-{name}", codec, "avg", normal(f"combine-{name}", 3, 100))
    top = dtype.largest
    yield codec_case("stochastic-huge", draws[1], [[top, -top, top / 2, 0.0] * 4 + [math.nan] * 8 + [top] * 8])
    yield combine_case("stochastic-overflow", draws[1], "sum", [[top, -top] * 4 + [top] * 8] * 3)


def all_cases() -> Iterator[Case]:
    """Yield every case, in the order of the manifest."""
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        yield from ordinary_cases(dtype)
        yield from edge_cases(dtype)
        yield from combine_cases(dtype)
        yield from allreduce_cases(dtype)
        yield from stochastic_cases(dtype)


if __name__ == "__main__":
    raise SystemExit(main("int4", all_cases()))
