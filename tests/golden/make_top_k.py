"""Golden bytes of TopK, of the record of one tensor in wire format version 3, worked out in plain Python.

    python tests/golden/make_top_k.py            write top_k.json next to this
    python tests/golden/make_top_k.py --check    exit 1 unless the file on disk has the same bytes

This file shares nothing with the average: it is a second reading of docs/how-it-works/wire-format.md, one scalar
at a time, with the standard library and the number formats of `make_minmax` alone.

The wire. An array of m elements is cut into chunks of C elements (the last may be shorter). Of each chunk the K
largest elements are sent, or all if it has fewer: n elements in all. All numbers are little endian.

    record := book | values | indices, zero-padded to a multiple of 16 bytes
    book:     with values of 2 bits only: 4 float32
    values:   of all chunks, one after the other: n codes of 2 bits, four a byte, the first in the lowest bits;
              or n bfloat16; or n float32
    indices:  n numbers of 12 bits, counted within the chunk, ascending; each two, i and j, are the three bytes of
              i + 4096 j; a last single one, those of i

The choice. Magnitudes are compared in float32, exactly: a NaN is larger than an infinity, and that than every
number; all NaNs are equal. Of equal ones, those of lower indices are sent.

The code book. In float64, every operation rounded by itself, half to even; v are the n elements. A sum adds
its terms by a tree: the first and the second, the third and the fourth, and so on; then these sums in the same
way, until one is left. A last one without a partner goes to the next level as it is. A sum of zeros is +0.

    mean = sum(v) / n        step = 1.5 * sqrt(sum((v - mean)^2) / max(1, n - 1))
    code = clip(rint((v - mean) / step + 2), 0, 3), or 2 if step is 0
    book[c] = float32(sum(v of code c) / number of these), or 0 if there are none

A NaN or an infinity among them: the book is four NaNs, 0x7fc00000, and all codes are 0.

Plain values. A NaN or an infinity is sent as the NaN 0x7fc00000, in bfloat16 0x7fc0. Numbers are rounded to
bfloat16 half to even; those that would become infinite become the largest finite number.

The mean of p arrays: in float32, element by element, 0 + what rank 0 sent of it + what rank 1 sent of it ...,
then divided by p and rounded to the element dtype. What is left on a rank: where it sent s of x, float32(x - s)
rounded to the element dtype, or 0 if that is not finite; elsewhere x itself, or 0 if that is not finite.

The file. top_k.json is a list of cases: row r of the input, (n, m), is the array of rank r. They have the record
and what is left of each rank, and the mean, (m,), as hexadecimal digits.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from golden_file import main
from make_minmax import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    DType,
    Entry,
    Row,
    clip,
    f32,
    normal,
    rint,
    uniform,
)

FILE = Path(__file__).with_name("top_k.json")

NAN = struct.pack("<I", 0x7FC00000)


class Settings(NamedTuple):
    """The settings of TopK, for one dtype."""

    dtype: DType
    chunk: int = 4096
    keep: int = 64
    bits: int = 2


class Sent(NamedTuple):
    """What is sent of one chunk."""

    indices: list[int]
    values: Row


def chosen(row: Row, settings: Settings) -> list[Sent]:
    """Choose the largest elements of each chunk."""

    def rank(part: Row, i: int) -> tuple[float, int]:
        return (-math.inf if math.isnan(part[i]) else -abs(part[i]), i)

    sent = []
    for first in range(0, len(row), settings.chunk):
        part = row[first : first + settings.chunk]
        numbers = [i for i, x in enumerate(part) if not math.isnan(x)]
        order = [i for i, x in enumerate(part) if math.isnan(x)]
        order += sorted(numbers, key=lambda i, part=part: rank(part, i))
        indices = sorted(order[: settings.keep])
        sent.append(Sent(indices, [part[i] for i in indices]))
    return sent


def total(terms: Row) -> float:
    """Add the halves, of which the first has as many terms as the largest power of two below their number."""
    if len(terms) == 1:
        return terms[0] + 0.0
    half = 1 << (len(terms) - 1).bit_length() - 1
    return total(terms[:half]) + total(terms[half:])


def code_book(values: Row) -> tuple[list[bytes], list[int]]:
    """Return the four entries of the code book, and the codes."""
    n = len(values)
    if not all(map(math.isfinite, values)):
        return [NAN] * 4, [0] * n
    mean = total(values) / n
    step = 1.5 * math.sqrt(total([(v - mean) * (v - mean) for v in values]) / max(1, n - 1))
    codes = [int(clip(rint((v - mean) / step + 2), 0, 3)) if step else 2 for v in values]
    book = []
    for code in range(4):
        mine, count = [v if c == code else 0.0 for v, c in zip(values, codes, strict=True)], codes.count(code)
        book.append(FLOAT32.pack_one(total(mine) / count if count else 0.0))
    return book, codes


def packed(numbers: list[int], bits: int, nbytes: int) -> bytes:
    """Put numbers into bytes, the first in the lowest bits."""
    return sum(number << bits * i for i, number in enumerate(numbers)).to_bytes(nbytes, "little")


def plain(x: float, bits: int) -> bytes:
    """Return the bytes of a value of 16 or 32 bits."""
    if not math.isfinite(x):
        return NAN[4 - bits // 8 :]
    if bits == 32:
        return FLOAT32.pack_one(x)
    rounded = BFLOAT16.unpack_one(BFLOAT16.pack_one(x))
    return BFLOAT16.pack_one(clip(rounded, -BFLOAT16.largest, BFLOAT16.largest))


def encode(row: Row, settings: Settings) -> bytes:
    """Return the record of an array."""
    sent, bits = chosen(row, settings), settings.bits
    n = sum(len(part.indices) for part in sent)
    if bits == 2:
        book, codes = code_book([x for part in sent for x in part.values])
        wire = b"".join(book) + packed(codes, 2, -(-n // 4))
    else:
        wire = b"".join(plain(x, bits) for part in sent for x in part.values)
    indices = [i for part in sent for i in part.indices]
    wire += b"".join(packed(indices[i : i + 2], 12, 3) for i in range(0, n, 2))
    return wire + bytes(-len(wire) % 16)


def decode(wire: bytes, m: int, settings: Settings) -> dict[int, float]:
    """Return the elements that were sent, by position."""
    counts = [min(settings.keep, m - first, settings.chunk) for first in range(0, m, settings.chunk)]
    n = sum(counts)
    if settings.bits == 2:
        book, codes, at = FLOAT32.unpack(wire[:16]), wire[16 : 16 + -(-n // 4)], 16 + -(-n // 4)
        values = [book[codes[k // 4] >> 2 * (k % 4) & 3] for k in range(n)]
    else:
        dtype = {16: BFLOAT16, 32: FLOAT32}[settings.bits]
        at = n * dtype.nbytes
        values = dtype.unpack(wire[:at])
    found, k = {}, 0
    for number, count in enumerate(counts):
        for _ in range(count):
            three = int.from_bytes(wire[at + k // 2 * 3 : at + k // 2 * 3 + 3], "little")
            found[number * settings.chunk + (three >> 12 * (k % 2) & 4095)] = values[k]
            k += 1
    return found


def left(row: Row, wire: bytes, settings: Settings) -> Row:
    """Return what is left of an array that was sent."""
    sent = decode(wire, len(row), settings)
    result = [f32(x - sent[i]) if i in sent else x for i, x in enumerate(row)]
    return [x if math.isfinite(x) else 0.0 for x in result]


def mean(rows: list[Row], settings: Settings) -> Row:
    """Return the mean of what the ranks send."""
    m = len(rows[0])
    result = [0.0] * m
    for row in rows:
        for i, value in decode(encode(row, settings), m, settings).items():
            result[i] = f32(result[i] + value)
    return [f32(x / len(rows)) for x in result]


# --- The cases -----------------------------------------------------------------------------------


def cases(dtype: DType, bits: int) -> Iterator[tuple[str, Settings, list[Row]]]:
    """Yield names, settings, and an array for each rank: vary the count around a chunk, and what is extreme."""
    small = Settings(dtype, 16, 4, bits)
    for m in (1, 3, 4, 15, 16, 17, 33, 100):
        yield f"normal-{m}", small, normal(f"normal-{m}", 2, m)
    yield "ranks", small, normal("ranks", 4, 50)
    yield "odd", Settings(dtype, 5, 2, bits), normal("odd", 1, 28)
    yield "all", Settings(dtype, 6, 6, bits), normal("all", 3, 15)
    if bits == 2:
        yield "default", Settings(dtype), normal("default", 1, 5000, sigma=1e-3)
    yield "ties", small, [[1.0, -2.0, 2.0, 0.0, 1.0, -1.0, 1.0, 1.0] * 5]
    yield "constants", small, [[c] * 20 for c in (0.0, -0.0, 1.5, -3.5)]
    yield "positive", small, [uniform("positive", 40, 0.25, 3.0)]
    yield "subnormals", small, [[k * dtype.smallest for k in (-3, 0, 1, 100, 5, 5, 7, -90) * 4]]
    top = dtype.largest
    yield "huge", small, [uniform("huge", 36, -top, top), [top, -top] * 18]
    (drawn,) = normal("scales", 1, 51)  # what is left of their sum depends on its order, with float32
    scaled = [x * top * 2.0 ** -(8 + 9 * (i * i % 11)) for i, x in enumerate(drawn)]
    yield "scales", Settings(dtype, 6, 6, bits), [[top, *scaled, -top, *(-x for x in scaled)]]
    yield "overflow", small, [[top, -top, 1.0], [top, -top, 2.0]]
    row, other, mixed = normal("nan", 3, 36)
    row[3], row[30] = math.nan, -math.nan
    other[7], other[20], other[21] = math.inf, -math.inf, math.inf
    mixed[:7] = [math.inf, 1.0, math.nan, -math.inf, -math.nan, math.nan, math.nan]
    yield "not-finite", small, [row, other, mixed]


def all_cases() -> Iterator[Entry]:
    """Yield the entries of the file: arrays of bytes are in hexadecimal digits, in row order."""
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        for bits in (2, 16, 32):
            for name, settings, given in cases(dtype, bits):
                rows = [dtype.rounded(row) for row in given]
                wires = [encode(row, settings) for row in rows]
                rest = [left(row, wire, settings) for row, wire in zip(rows, wires, strict=True)]
                yield {
                    "name": f"{dtype.name}-{bits}-{name}",
                    "dtype": dtype.name,
                    "chunk": settings.chunk,
                    "keep": settings.keep,
                    "bits": bits,
                    "n": len(rows),
                    "m": len(rows[0]),
                    "input": b"".join(map(dtype.pack, rows)).hex(),
                    "wire": b"".join(wires).hex(),
                    "left": b"".join(map(dtype.pack, rest)).hex(),
                    "mean": dtype.pack(mean(rows, settings)).hex(),
                }


if __name__ == "__main__":
    raise SystemExit(main(FILE, all_cases()))
