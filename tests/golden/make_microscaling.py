"""Golden bytes of the codecs MXFP8, MXFP4 and NVFP4, wire format version 1, worked out in plain Python.

    python tests/golden/make_microscaling.py            write microscaling.json next to this
    python tests/golden/make_microscaling.py --check    exit 1 unless the file on disk has the same bytes

This file shares nothing with the codecs: it is a second reading of the specification, one scalar at a time, with
the standard library alone. A format of codes is the list of all its values, from the fields sign, exponent and
mantissa of each code; a number is rounded to the nearest of them, and to the one with an even code at a tie.

The wire. A chunk of m elements is cut into blocks of B (the last may be shorter). All numbers are little endian.

    chunk := header | codes
    header:  the factor, a float32, in NVFP4 only; one byte per block, its scale; zero-padded to a multiple of 32
    codes:   m codes of one byte, or of half a byte, the even element in the low half; zero-padded likewise

The formulas, in float32, every operation rounded by itself; max is the largest absolute value of a block,
top that of all blocks of the chunk without a NaN or an infinity:

    MX (B = 32)       scale = 2 ** clip(floor(log2(max)) - e, -127, 127), its byte is the exponent + 127
                      code = round(clip(x / scale, -largest, largest))        x' = code * scale
    NVFP4 (B = 16)    factor = max(top / 2688, 2 ** -126)
                      scale = E4M3(min(max / 6 / factor, 448))                step = scale * factor
                      code = round(clip(x / step, -6, 6))                     x' = code * step

* e is 8 for E4M3, 15 for E5M2 and 2 for E2M1; `largest` is 448, 57344 and 6.
* A block of zeros has the exponent -127.
* A block with a NaN or an infinity: the scale is NaN (255, in E4M3 127), codes 0; it decodes to NaN.
* If step is 0: codes 0.
* x' is clamped to the largest finite values of the element dtype, then rounded once to that dtype.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from make_minmax import BFLOAT16, FLOAT16, FLOAT32, DType, Entry, Row, clip, f32, normal, padded, uniform

FILE = Path(__file__).with_name("microscaling.json")

# --- Formats of codes --------------------------------------------------------------------------------


class Format(NamedTuple):
    """Codes with a sign, exponent bits and mantissa bits; `values` are the finite ones, without a sign."""

    bits: int
    exponent: int
    values: list[float]

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << self.bits - 1

    def code(self, x: float) -> int:
        """Return the code of the nearest value, the even one of two, and the largest if x is larger."""
        nearest = min(range(len(self.values)), key=lambda code: (abs(self.values[code] - abs(x)), code % 2))
        return nearest | (self.sign if math.copysign(1.0, x) < 0 else 0)

    def value(self, code: int) -> float:
        """Return the value of a code."""
        return -self.values[code - self.sign] if code & self.sign else self.values[code]


def format_of(exponent_bits: int, mantissa_bits: int, unused: int) -> Format:
    """Return the format whose largest `unused` codes are not finite numbers."""
    bias, one = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits) - unused):
        exponent, mantissa = divmod(code, one)
        significand = mantissa / one + (exponent > 0)  # without the leading 1 for a subnormal
        values.append(significand * 2.0 ** (max(exponent, 1) - bias))
    return Format(1 + exponent_bits + mantissa_bits, math.frexp(values[-1])[1] - 1, values)


E4M3, E5M2, E2M1 = format_of(4, 3, 1), format_of(5, 2, 4), format_of(2, 1, 0)

# --- The codecs --------------------------------------------------------------------------------------


class Codec(NamedTuple):
    """One of the codecs: its repr, its codes, and the length of its blocks."""

    name: str
    codes: Format
    block: int


MX = [
    Codec("MXFP8(format='e4m3')", E4M3, 32),
    Codec("MXFP8(format='e5m2')", E5M2, 32),
    Codec("MXFP4()", E2M1, 32),
]
NVFP4 = Codec("NVFP4()", E2M1, 16)


def largest_of(block: Row) -> float:
    """Return the largest absolute value, NaN if one is not finite."""
    return max(map(abs, block)) if all(map(math.isfinite, block)) else math.nan


def mx_scale(high: float, codes: Format) -> tuple[int, float]:
    """Return the byte and the value of the scale."""
    if math.isnan(high):
        return 255, math.nan
    exponent = math.frexp(high)[1] - 1 - codes.exponent if high else -127
    exponent = int(clip(exponent, -127, 127))
    return exponent + 127, 2.0**exponent


def nvfp4_scale(high: float, factor: float) -> tuple[int, float]:
    """Return the byte of the scale, and the step, which is the scale times the factor."""
    if math.isnan(high):
        return 127, math.nan
    byte = E4M3.code(min(f32(f32(high / 6) / factor), 448.0))
    return byte, f32(E4M3.value(byte) * factor)


def code_block(block: Row, step: float, codes: Format) -> list[int]:
    """Return the codes of a block."""
    if math.isnan(step) or step == 0:
        return [0] * len(block)
    return [codes.code(clip(f32(x / step), -codes.values[-1], codes.values[-1])) for x in block]


def decoded_block(block: list[int], step: float, codes: Format, dtype: DType) -> Row:
    """Return the values of a block, clamped but not yet rounded to the element dtype."""
    if math.isnan(step):
        return [math.nan] * len(block)
    return [clip(f32(codes.value(code) * step), -dtype.largest, dtype.largest) for code in block]


def coded(chunk: Row, codec: Codec, dtype: DType) -> tuple[bytes, Row]:
    """Return the wire bytes of a chunk, and what they decode to."""
    blocks = [chunk[start : start + codec.block] for start in range(0, len(chunk), codec.block)]
    highs = [largest_of(block) for block in blocks]
    if codec is NVFP4:
        top = max([high for high in highs if not math.isnan(high)], default=0.0)
        factor = max(f32(top / 2688), 2.0**-126)
        header, scales = FLOAT32.pack([factor]), [nvfp4_scale(high, factor) for high in highs]
    else:
        header, scales = b"", [mx_scale(high, codec.codes) for high in highs]
    codes: list[int] = []
    decoded: Row = []
    for block, (_, step) in zip(blocks, scales, strict=True):
        found = code_block(block, step, codec.codes)
        codes += found
        decoded += decoded_block(found, step, codec.codes, dtype)
    if codec.codes.bits == 4:
        codes += [0] * (len(codes) % 2)
        codes = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return padded(header + bytes(byte for byte, _ in scales)) + padded(bytes(codes)), decoded


# --- The cases ---------------------------------------------------------------------------------------


def cases(dtype: DType) -> Iterator[tuple[str, list[Row]]]:
    """Yield names and rows of elements."""
    top, tiny = dtype.largest, dtype.smallest
    for m in (1, 16, 33):
        yield f"normal-{m}", normal(f"microscaling-{m}", 1, m)
    yield "normal-2x100", normal("microscaling-2x100", 2, 100)
    yield "zeros", [[0.0, -0.0] * 10 + [-0.0] * 14 + [0.0, -0.0, 1.0, -0.0, 0.0], [-0.0] * 39]
    halves = [k / 4 for k in range(-28, 29)]  # ties of E2M1, with a maximum of 7
    yield "ties-of-4-bits", [[*halves[:8], 6.0, *halves[8:31], 6.0, *halves[31:], -6.0]]
    # Codes of numbers between 1 and 2 are multiples of 1/8 in E4M3, and of 1/4 in E5M2.
    sixteenths = [(16 + k) / 16 for k in range(16)]
    yield "ties-of-8-bits", [[*sixteenths, *(-x / 64 for x in sixteenths)]]
    yield "subnormals", [[k * tiny for k in (-3, 0, 1, 100, 5, 5, 7, -90, *[12, 13, 12, 14] * 2, *[1] * 8)]]
    yield "smallest", [[tiny] * 17, [0.0, -tiny] * 8 + [0.0]]
    yield "huge", [[top, -top, 0.0, 1.0, -1.0, top / 2, -top / 2, top / 255, *uniform("huge", 30, -top, top)]]
    # The second and the third block are small beside the first, and vanish in NVFP4 or lose digits.
    small = [x * 2.0**-9 for x in uniform("small", 16, -1, 1)], [x * 2.0**-13 for x in uniform("tiny", 16, -1, 1)]
    yield "spread", [[*uniform("large", 16, -1, 1), *small[0], *small[1]]]
    rows = normal("microscaling-nan", 3, 70)
    rows[0][3], rows[0][40], rows[1][69], rows[2][20] = math.nan, -math.inf, math.inf, -math.nan
    yield "not-finite", rows


def all_cases() -> Iterator[Entry]:
    """Yield the entries of the file: arrays of bytes are in hexadecimal digits, in row order."""
    for dtype in (FLOAT32, FLOAT16, BFLOAT16):
        for name, given in cases(dtype):
            rows = [dtype.rounded(row) for row in given]
            for codec in (*MX, NVFP4):
                results = [coded(row, codec, dtype) for row in rows]
                yield {
                    "name": f"{codec.name}-{dtype.name}-{name}",
                    "codec": codec.name,
                    "dtype": dtype.name,
                    "n": len(rows),
                    "m": len(rows[0]),
                    "input": b"".join(map(dtype.pack, rows)).hex(),
                    "wire": b"".join(wire for wire, _ in results).hex(),
                    "decoded": b"".join(dtype.pack(decoded) for _, decoded in results).hex(),
                }


def main(file: Path, cases: Iterable[Entry]) -> int:
    """Write or check a golden file; return the exit code."""
    parser = argparse.ArgumentParser(description=f"Make the golden file {file.name}.")
    parser.add_argument("--check", action="store_true", help="compare with the file on disk only")
    text = "[\n" + ",\n".join(map(json.dumps, cases)) + "\n]\n"
    if not parser.parse_args().check:
        file.write_text(text)
    elif text != file.read_text():
        print(f"{file.name}: not what make_{file.stem}.py makes")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(FILE, all_cases()))
