"""Golden bytes of the MinMaxUInt8 codec, wire format version 1, worked out in plain Python.

    python tests/golden/make_minmax.py            write minmax.json and minmax/*.bin next to this
    python tests/golden/make_minmax.py --check    exit 1 unless the files on disk are the same bytes

This file shares nothing with the codec: it is a second reading of the specification, one scalar
at a time, with the standard library alone.

The wire. A chunk of m elements is cut into blocks of B (the last may be shorter; with `block` null
the chunk is one block). All numbers are little endian.

    chunk := header | codes
    header:  a pair (min, max) per block in the element dtype, zero-padded to a multiple of 32 bytes
    codes:   m uint8 codes, zero-padded to a multiple of 32 bytes

The formula. Per block, in float32, every operation rounded by itself, half to even; only the
quotient 255 / range is taken in float64 and then rounded:

    range = (max - min) + eps      scale = 255 / range       upper = rint(max * scale)
    lower = upper - 255            code  = clip(min(rint(x * scale), upper) - lower, 0, 255)
    x'    = (code + lower) / scale

The rules for what the formula leaves open:

* A zero in the header is +0.0, never -0.0, so that the bytes do not depend on the order of
  comparison.
* A block that holds a NaN or an infinity has the canonical quiet NaN (float32 0x7fc00000, float16
  0x7e00, bfloat16 0x7fc0) as min and as max, and codes 0. All of it decodes to that NaN.
* eps is rounded to float32 before it is added.
* If range is 0, or scale overflows, whatever eps is: codes 0, and the block decodes to its min.
* If max - min overflows, scale is 0 and the formula stands: every code is 255, and decodes to
  0 / 0, the canonical NaN.
* If upper is not finite (a huge constant and eps > 0): codes 0, and the block decodes to its min.
* x' is clamped to the largest finite values of the element dtype, then rounded once to that dtype:
  finite elements never decode to an infinity. A NaN stays a NaN.
* combine decodes p chunks to float32 (clamped, not yet rounded to the element dtype), adds them in
  row order starting from row 0, divides by p for "avg", rounds once to the element dtype, and
  encodes. No clamp here: a sum that overflows becomes an infinity, and so a block of NaN.
* An allreduce of N elements over p ranks pads each input with zeros to p chunks of ceil(N / p).
  Every rank encodes its p chunks, rank r combines chunk r of all ranks in rank order, and every
  rank decodes the p combined chunks and drops the padding.

The manifest. minmax.json is a list of cases. All have

    name, kind, dtype ("float32" | "float16" | "bfloat16"), block (int or null), eps, n, m,
    files (part -> path relative to the manifest; raw arrays in row order)

and the kinds have these parts, w being the bytes of one chunk on the wire:

    codec       input (n, m)     wire (n, w)         decoded (n, m)
    combine     wire (n, w)      combined (1, w)                        and op, "sum" | "avg"
    allreduce   input (n, m)     output (m), the same on each rank      and op, "sum" | "avg"

In an allreduce, n is the number of ranks and m the number of elements on each.
"""

import argparse
import json
import math
import random
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

HERE = Path(__file__).parent

Row = list[float]
Entry = dict[str, object]
Files = dict[str, bytes]


# --- Numbers -------------------------------------------------------------------------------------
#
# A float32 number is held in a Python float. An operation on two of them is done in float64 and
# rounded to float32 at once. Rounding twice is harmless here: for + - * / of 24-bit numbers, 53
# bits are enough (at least 2 * 24 + 2) that the second rounding always goes where a single one
# would. Subnormal results keep fewer bits than 24, which leaves only more room.


def pack_float32(x: float) -> bytes:
    """Round to float32, half to even, overflow to infinity."""
    try:
        return struct.pack("<f", x)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, x))


def unpack_float32(data: bytes) -> float:
    """Return the number that 4 bytes hold."""
    return float(struct.unpack("<f", data)[0])


def pack_float16(x: float) -> bytes:
    """Round to float16, half to even, overflow (from 65520 on) to infinity."""
    try:
        return struct.pack("<e", x)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, x))


def unpack_float16(data: bytes) -> float:
    """Return the number that 2 bytes hold."""
    return float(struct.unpack("<e", data)[0])


def pack_bfloat16(x: float) -> bytes:
    """Round the bits of a float32 to their upper half, half to even.

    The carry out of the largest finite number gives infinity, as it should. The only NaNs here are
    quiet and have no payload, so the rounding leaves them as they are.
    """
    bits = int.from_bytes(pack_float32(x), "little")
    upper_half_is_odd = bits >> 16 & 1
    return ((bits + 0x7FFF + upper_half_is_odd) >> 16).to_bytes(2, "little")


def unpack_bfloat16(data: bytes) -> float:
    """Return the number that the upper half of a float32 holds."""
    return unpack_float32(b"\0\0" + data)


class DType(NamedTuple):
    """An element type: its extreme finite numbers, and one number to and from bytes."""

    name: str
    nbytes: int
    largest: float
    smallest: float  # the least positive (subnormal) number
    pack_one: Callable[[float], bytes]
    unpack_one: Callable[[bytes], float]

    def pack(self, values: Row) -> bytes:
        """Round each number to this type; return the bytes of the array."""
        return b"".join(map(self.pack_one, values))

    def unpack(self, data: bytes) -> Row:
        """Return the numbers of an array."""
        starts = range(0, len(data), self.nbytes)
        return [self.unpack_one(data[i : i + self.nbytes]) for i in starts]

    def rounded(self, values: Row) -> Row:
        """Round each number to this type."""
        return self.unpack(self.pack(values))


FLOAT32 = DType("float32", 4, (2 - 2**-23) * 2.0**127, 2.0**-149, pack_float32, unpack_float32)
FLOAT16 = DType("float16", 2, 65504.0, 2.0**-24, pack_float16, unpack_float16)
BFLOAT16 = DType("bfloat16", 2, (2 - 2**-7) * 2.0**127, 2.0**-133, pack_bfloat16, unpack_bfloat16)


def f32(x: float) -> float:
    """Round to float32."""
    return unpack_float32(pack_float32(x))


def rint(x: float) -> float:
    """Round to an integer, half to even; infinities stay."""
    return float(round(x)) if math.isfinite(x) else x


def clip(x: float, low: float, high: float) -> float:
    """Return the number within [low, high] that is nearest to x."""
    return max(low, min(x, high))


# --- The codec -----------------------------------------------------------------------------------


class Codec(NamedTuple):
    """MinMaxUInt8 for one dtype. `block` is None for one block per chunk."""

    dtype: DType
    block: int | None
    eps: float

    def blocks(self, m: int) -> list[slice]:
        """Return where the blocks lie in a chunk of m elements."""
        size = self.block or m
        return [slice(start, min(start + size, m)) for start in range(0, m, size)]


def scale_of(low: float, high: float, eps: float) -> float:
    """Return codes per unit: infinite if the range is too small, 0 if it overflows."""
    width = f32(f32(high - low) + f32(eps))
    return f32(255.0 / width) if width > 0 else math.inf


def bounds_of(high: float, scale: float) -> tuple[float, float]:
    """Return the integers that codes 0 and 255 stand for, (lower, upper)."""
    upper = rint(f32(high * scale))
    return f32(upper - 255.0), upper


def encode_block(block: Row, eps: float) -> tuple[float, float, bytes]:
    """Return the min and the max for the header, and the codes."""
    blank = bytes(len(block))
    if not all(map(math.isfinite, block)):
        return math.nan, math.nan, blank
    low, high = min(block) + 0.0, max(block) + 0.0  # -0.0 + 0.0 is +0.0
    scale = scale_of(low, high, eps)
    if scale == math.inf:
        return low, high, blank
    lower, upper = bounds_of(high, scale)
    if math.isinf(upper):
        return low, high, blank
    levels = [min(rint(f32(x * scale)), upper) for x in block]
    return low, high, bytes(int(clip(f32(level - lower), 0.0, 255.0)) for level in levels)


def decode_block(low: float, high: float, codes: bytes, codec: Codec) -> Row:
    """Return float32 numbers, clamped but not yet rounded to the element dtype."""
    if math.isnan(low):
        return [math.nan] * len(codes)
    scale = scale_of(low, high, codec.eps)
    if scale == math.inf:
        return [low] * len(codes)
    if scale == 0.0:  # all codes are 255, and all quotients 0 / 0
        return [math.nan] * len(codes)
    lower, upper = bounds_of(high, scale)
    if math.isinf(upper):
        return [low] * len(codes)
    largest = codec.dtype.largest
    return [clip(f32(f32(code + lower) / scale), -largest, largest) for code in codes]


def padded_nbytes(nbytes: int) -> int:
    """Round up to a multiple of 32."""
    return math.ceil(nbytes / 32) * 32


def padded(data: bytes) -> bytes:
    """Add zeros up to a multiple of 32 bytes."""
    return data.ljust(padded_nbytes(len(data)), b"\0")


def encode(chunk: Row, codec: Codec, counter: int = 0) -> bytes:
    """Return the wire bytes of one chunk, wherever it begins."""
    del counter
    header, codes = [], b""
    for block in codec.blocks(len(chunk)):
        low, high, block_codes = encode_block(chunk[block], codec.eps)
        header += [low, high]
        codes += block_codes
    return padded(codec.dtype.pack(header)) + padded(codes)


def decode(wire: bytes, m: int, codec: Codec) -> Row:
    """Return m float32 numbers, clamped but not yet rounded to the element dtype."""
    blocks = codec.blocks(m)
    header_nbytes = 2 * len(blocks) * codec.dtype.nbytes
    header = codec.dtype.unpack(wire[:header_nbytes])
    codes = wire[padded_nbytes(header_nbytes) :]
    chunk = []
    for block, low, high in zip(blocks, header[::2], header[1::2], strict=True):
        chunk += decode_block(low, high, codes[block], codec)
    return chunk


def combine(wires: list[bytes], m: int, op: str, codec: Codec) -> bytes:
    """Add or average encoded chunks of m elements, and encode the result."""
    first, *others = [decode(wire, m, codec) for wire in wires]
    total = first
    for chunk in others:
        total = [f32(a + b) for a, b in zip(total, chunk, strict=True)]
    if op == "avg":
        total = [f32(a / len(wires)) for a in total]
    return encode(codec.dtype.rounded(total), codec)


def reduce_scatter(inputs: list[Row], counts: list[int], op: str, codec: Codec) -> bytes:
    """Return the elements that the ranks keep, one rank's after the other's; rank r keeps counts[r]."""
    output, start = [], 0
    for count in counts:
        wires = [encode(row[start : start + count], codec) for row in inputs]
        first, *others = [codec.dtype.rounded(decode(wire, count, codec)) for wire in wires]
        total = first
        for chunk in others:
            total = [f32(a + b) for a, b in zip(total, chunk, strict=True)]
        if op == "avg":
            total = [f32(a / len(inputs)) for a in total]
        output += total
        start += count
    return codec.dtype.pack(output)


def allgather(inputs: Row, counts: list[int], codec: Codec) -> bytes:
    """Return the elements that every rank ends with; rank r gives counts[r] of `inputs`."""
    output, start = [], 0
    for count in counts:
        output += decode(encode(inputs[start : start + count], codec), count, codec)
        start += count
    return codec.dtype.pack(output)


# --- Kinds of cases ------------------------------------------------------------------------------


class AnyCodec(Protocol):
    """A codec for one dtype, and its settings."""

    dtype: DType

    def _asdict(self) -> Entry: ...


class Case(NamedTuple):
    """An entry of the manifest, and the bytes of its files by part."""

    entry: Entry
    parts: Files


def describe(kind: str, name: str, codec: AnyCodec, rows: list[Row]) -> Entry:
    """Return the part of an entry that all kinds have."""
    shape = {"n": len(rows), "m": len(rows[0])}
    settings = {name: value for name, value in codec._asdict().items() if name != "dtype"}
    return {"name": f"{codec.dtype.name}-{name}", "kind": kind, "dtype": codec.dtype.name, **settings, **shape}


class Reading(NamedTuple):
    """The functions of a codec, and the cases that they make."""

    encode: Callable[..., bytes]
    decode: Callable[..., Row]
    combine: Callable[..., bytes]

    def codec_case(self, name: str, codec: AnyCodec, rows: list[Row]) -> Case:
        """Encode the rows as chunks and decode them."""
        rows = [codec.dtype.rounded(row) for row in rows]
        wires = [self.encode(row, codec, i * len(row)) for i, row in enumerate(rows)]
        decoded = [self.decode(wire, len(row), codec) for wire, row in zip(wires, rows, strict=True)]
        parts = {
            "input": b"".join(map(codec.dtype.pack, rows)),
            "wire": b"".join(wires),
            "decoded": b"".join(map(codec.dtype.pack, decoded)),
        }
        return Case(describe("codec", name, codec, rows), parts)

    def combine_case(self, name: str, codec: AnyCodec, op: str, rows: list[Row]) -> Case:
        """Encode the rows as chunks, then combine them to one."""
        wires = [self.encode(codec.dtype.rounded(row), codec, i * len(row)) for i, row in enumerate(rows)]
        combined = self.combine(wires, len(rows[0]), op, codec)
        entry = describe("combine", f"combine-{op}-{len(rows)}-{name}", codec, rows)
        return Case(entry | {"op": op}, {"wire": b"".join(wires), "combined": combined})

    def allreduce_case(self, name: str, codec: AnyCodec, op: str, rows: list[Row]) -> Case:
        """Take row r as the input of rank r; the output are the elements that every rank ends with."""
        rows = [codec.dtype.rounded(row) for row in rows]
        p, count = len(rows), len(rows[0])
        m = math.ceil(count / p)
        output: Row = []
        for start in range(0, p * m, m):
            chunks = [(row + [0.0] * (p * m - count))[start : start + m] for row in rows]
            wires = [self.encode(chunk, codec) for chunk in chunks]
            output += self.decode(self.combine(wires, m, op, codec), m, codec)
        entry = describe("allreduce", f"allreduce-{op}-{len(rows)}-{name}", codec, rows)
        parts = {"input": b"".join(map(codec.dtype.pack, rows)), "output": codec.dtype.pack(output[:count])}
        return Case(entry | {"op": op}, parts)


_READING = Reading(encode, decode, combine)
codec_case, combine_case, allreduce_case = _READING.codec_case, _READING.combine_case, _READING.allreduce_case


def shard_cases(name: str, codec: Codec, op: str, rows: list[Row], counts: list[int]) -> Iterator[Case]:
    """Reduce and scatter row r of rank r; gather the elements of the first row, counts[r] from rank r."""
    rows = [codec.dtype.rounded(row) for row in rows]
    inputs = b"".join(map(codec.dtype.pack, rows))
    entry = describe("reduce_scatter", f"reduce-scatter-{op}-{len(rows)}-{name}", codec, rows)
    parts = {"input": inputs, "output": reduce_scatter(rows, counts, op, codec)}
    yield Case(entry | {"op": op, "counts": counts}, parts)
    entry = describe("allgather", f"allgather-{len(rows)}-{name}", codec, rows[:1]) | {"counts": counts}
    yield Case(entry, {"input": codec.dtype.pack(rows[0]), "output": allgather(rows[0], counts, codec)})


# --- Values --------------------------------------------------------------------------------------


def normal(seed: str, n: int, m: int, mean: float = 0.0, sigma: float = 1.0) -> list[Row]:
    """Draw n rows of m gaussian numbers."""
    draw = random.Random(seed)
    return [[draw.gauss(mean, sigma) for _ in range(m)] for _ in range(n)]


def uniform(seed: str, m: int, low: float, high: float) -> Row:
    """Draw m numbers between low and high."""
    draw = random.Random(seed)
    return [draw.uniform(low, high) for _ in range(m)]


def overshooting(dtype: DType) -> list[Row]:
    """Return two blocks of 8 whose outermost level lies up to half a step beyond `dtype.largest`.

    The first block overshoots upwards, the second downwards, by enough to round to an infinity.
    """
    top = dtype.largest
    up, down = {
        "float32": ((top / 500, top), (-top, -top / 500)),
        "float16": ((-top, top), (-top, 65408.0)),
        "bfloat16": ((-top / 510, top), (-top, top / 510)),
    }[dtype.name]
    return [[*ends, *uniform("overshooting", 6, *ends)] for ends in (up, down)]


# --- The cases -----------------------------------------------------------------------------------


def ordinary_cases(dtype: DType) -> Iterator[Case]:
    """Vary the count around a block, the number of chunks, block and eps, and the distribution."""
    default, small = Codec(dtype, 512, 0.0), Codec(dtype, 8, 0.0)
    for m in (1, 511, 512, 1000):
        yield codec_case(f"normal-{m}", default, normal(f"normal-{m}", 1, m))
    yield codec_case("normal-3x513", default, normal("normal-3x513", 3, 513))
    yield codec_case("small-block", small, normal("small-block", 2, 21))
    small_eps = small._replace(eps=1e-7)
    yield codec_case("small-block-eps", small_eps, normal("small-block-eps", 2, 21, sigma=1e-6))
    yield codec_case("whole-chunk", small._replace(block=None), normal("whole-chunk", 2, 40))
    heavy_tailed = [x * x * x for x in normal("heavy-tailed", 1, 100)[0]]
    yield codec_case("heavy-tailed", small, [heavy_tailed])
    yield codec_case("positive", small, [uniform("positive", 40, 0.25, 3.0)])
    yield codec_case("large-mean", small, normal("large-mean", 1, 64, mean=1000.0, sigma=3.0))


def edge_cases(dtype: DType) -> Iterator[Case]:
    """Take blocks of 8 where something in the formula is extreme."""
    codec = Codec(dtype, 8, 0.0)
    yield codec_case("constants", codec, [[c] * 9 for c in (0.0, 1.0, -3.5, 1e-3)])
    zeros = [0.0, -0.0] * 4 + [-0.0, 0.0] * 4 + [-0.0] * 8
    yield codec_case("signed-zeros", codec, [zeros + [-0.0, 1.0, 2.0, 3.0] * 2 + [-1.0, -0.0]])
    # Range 255, so scale is 1 and every element a tie; the ends round apart, to 128 and -128.
    ties = [-127.5, -126.5, -2.5, -0.5, 0.5, 1.5, 126.5, 127.5]
    yield codec_case("ties", codec, [[*ties, *(x / 4 for x in ties)]])
    multiples = [-3, 0, 1, 100, 5, 5, 7, -90, *[12, 13, 12, 14] * 2, *[1] * 8]
    yield codec_case("subnormals", codec, [[k * dtype.smallest for k in multiples]])
    top = dtype.largest
    wide = [top, -top, 0.0, 1.0, -1.0, top / 2, -top / 2, top / 255]
    within, above = uniform("huge", 8, -0.4 * top, 0.4 * top), uniform("huge", 5, top / 2, top)
    yield codec_case("huge", codec, [[*within, *wide, *above]])
    yield codec_case("overshoot", codec, overshooting(dtype))
    row, other = normal("nan", 2, 20)
    row[11] = math.nan
    other[0] = -math.nan
    yield codec_case("nan", codec, [row, other])
    row, other = normal("infinity", 2, 20)
    row[3], row[17] = math.inf, -math.inf
    other[8], other[15] = -math.inf, math.inf
    yield codec_case("infinity", codec, [row, other])


def bagua_cases(dtype: DType) -> Iterator[Case]:
    """Take one block per chunk and eps 1e-7."""
    bagua = Codec(dtype, None, 1e-7)
    yield codec_case("bagua-normal", bagua, normal("bagua-normal", 1, 100))
    yield codec_case("bagua-4x50", bagua, normal("bagua-4x50", 4, 50))
    yield codec_case("bagua-constants", bagua, [[c] * 9 for c in (0.0, 1.0, -3.5, 1e-3)])
    tiny = max(1e-9, 4 * dtype.smallest)
    yield codec_case("bagua-tiny", bagua, normal("bagua-tiny", 2, 33, sigma=tiny))
    row, other = normal("bagua-nan", 2, 33)
    row[32] = math.nan
    yield codec_case("bagua-nan", bagua, [row, other])


def wide_exponent_cases(dtype: DType) -> Iterator[Case]:
    """Bring scale and upper to the largest float32 and beyond, which float16 cannot."""
    least_range = 255.0 / FLOAT32.largest
    parts = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)  # 0.01 makes a subnormal
    rows = [
        [factor * least_range * (part + offset) for offset in (0.0, -0.3, -2.0) for part in parts]
        for factor in (0.98, 1.02)
    ]
    yield codec_case("scale-limit", Codec(dtype, 8, 0.0), rows)
    bagua = Codec(dtype, None, 1e-7)
    yield codec_case("bagua-huge-constant", bagua, [[3e30] * 9, [-3e30] * 9])


def float32_cases() -> Iterator[Case]:
    """Take what needs the resolution of float32."""
    bagua = Codec(FLOAT32, None, 1e-7)
    # The ends round apart, which makes one level too many: the code of min is clipped from -1.
    row = [-5.12549, -3.1254902, *uniform("tie", 14, -5.12549, -3.1254902)]
    yield codec_case("tie-at-both-ends", bagua, [row])
    # Levels beyond 2**24, where float32 is coarser than 1.
    row = normal("far-mean", 1, 64, mean=1e6)[0]
    yield codec_case("far-mean", Codec(FLOAT32, 16, 0.0), [row])
    yield codec_case("bagua-far-mean", bagua, [row])


def combine_cases(dtype: DType) -> Iterator[Case]:
    """Add and average 2 to 4 rows."""
    small, bagua = Codec(dtype, 8, 0.0), Codec(dtype, None, 1e-7)
    for op in ("sum", "avg"):
        for p in (2, 3, 4):
            yield combine_case("normal", small, op, normal(f"combine-{op}-{p}", p, 21))
        # The first two blocks of the sum overflow; the average of float16 numbers does not.
        up, down = overshooting(dtype)
        rows = [up + down + [1.0, 2.0, -3.0], up + down + [0.5, 0.0, 4.0]]
        yield combine_case("overflow", small, op, rows)
    yield combine_case("513", Codec(dtype, 512, 0.0), "avg", normal("combine-513", 3, 513))
    yield combine_case("bagua", bagua, "avg", normal("combine-bagua", 4, 33))
    rows = normal("combine-nan", 3, 21)
    rows[1][9] = math.nan
    yield combine_case("nan", small, "sum", rows)
    # A quarter of the smallest number rounds to -0.0, which must not reach the header.
    rows = [[-dtype.smallest, 0.0] * 4, *[[0.0] * 8] * 3]
    yield combine_case("negative-zero", small, "avg", rows)


def allreduce_cases(dtype: DType) -> Iterator[Case]:
    """Take counts that the ranks do and do not divide, down to one element."""
    default, bagua = Codec(dtype, 512, 0.0), Codec(dtype, None, 1e-7)
    shapes = [("avg", 2, 1536), ("sum", 3, 1000), ("avg", 4, 7), ("sum", 3, 7), ("sum", 2, 1)]
    for op, p, count in [*shapes, ("avg", 4, 1)]:
        rows = normal(f"allreduce-{op}-{p}-{count}", p, count)
        yield allreduce_case(str(count), default, op, rows)
    yield allreduce_case("bagua", bagua, "avg", normal("allreduce-bagua", 4, 101))
    rows = normal("allreduce-nan", 2, 41)
    rows[1][12] = math.nan
    yield allreduce_case("nan", Codec(dtype, 8, 0.0), "avg", rows)


def sharded_cases(dtype: DType) -> Iterator[Case]:
    """Take equal and unequal chunks, one of them empty."""
    default, small, bagua = Codec(dtype, 512, 0.0), Codec(dtype, 8, 0.0), Codec(dtype, None, 1e-7)
    yield from shard_cases("equal", default, "avg", normal("shard-equal", 2, 1200), [600, 600])
    yield from shard_cases("uneven", small, "sum", normal("shard-uneven", 4, 60), [0, 37, 1, 22])
    yield from shard_cases("bagua", bagua, "avg", normal("shard-bagua", 3, 99), [33, 33, 33])
    rows = normal("shard-nan", 2, 40)
    rows[0][9], rows[1][30] = math.nan, math.inf
    yield from shard_cases("nan", small, "avg", rows, [20, 20])


def all_cases() -> Iterator[Case]:
    """Yield every case, in the order of the manifest."""
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        yield from ordinary_cases(dtype)
        yield from edge_cases(dtype)
        yield from bagua_cases(dtype)
        if dtype is not FLOAT16:
            yield from wide_exponent_cases(dtype)
        if dtype is FLOAT32:
            yield from float32_cases()
        yield from combine_cases(dtype)
        yield from allreduce_cases(dtype)
        yield from sharded_cases(dtype)


# --- Files ---------------------------------------------------------------------------------------


def make_files(family: str, cases: Iterable[Case]) -> Files:
    """Return the bytes of every golden file of a family by its path relative to this folder."""
    files: Files = {}
    lines = []
    for case in cases:
        paths = {part: f"{family}/{case.entry['name']}.{part}.bin" for part in case.parts}
        files.update((paths[part], data) for part, data in case.parts.items())
        lines.append(json.dumps(case.entry | {"files": paths}))
    files[f"{family}.json"] = ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    return files


def files_on_disk(family: str) -> Files:
    """Return the golden files that exist, as `make_files` does."""
    paths = [HERE / f"{family}.json", *HERE.glob(f"{family}/*.bin")]
    return {path.relative_to(HERE).as_posix(): path.read_bytes() for path in paths if path.exists()}


def write(family: str, files: Files) -> None:
    """Put the files on disk in place of those that were there."""
    for path in files_on_disk(family):
        (HERE / path).unlink()
    (HERE / family).mkdir(exist_ok=True)
    for path, data in files.items():
        (HERE / path).write_bytes(data)


def differences(files: Files, disk: Files) -> list[str]:
    """Return the paths that are missing on disk, or not wanted there, or hold other bytes."""
    return sorted(path for path in files | disk if files.get(path) != disk.get(path))


def main(family: str, cases: Iterable[Case]) -> int:
    """Write or check the golden files of a family, make_FAMILY.py; return the exit code."""
    parser = argparse.ArgumentParser(description=f"Make the golden files {family}.json and {family}/*.bin.")
    parser.add_argument("--check", action="store_true", help="compare with the files on disk only")
    files = make_files(family, cases)
    if not parser.parse_args().check:
        write(family, files)
        return 0
    wrong = differences(files, files_on_disk(family))
    for path in wrong:
        print(f"{path}: not what make_{family}.py makes")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main("minmax", all_cases()))
