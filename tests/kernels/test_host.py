"""The arithmetic under codecs and reductions, against NumPy taken one step at a time."""

import json
from fractions import Fraction
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from bagua_comm import MinMaxUInt8, kernels
from bagua_comm.arrays import ARITHMETIC_OPS, BITWISE_OPS, FLOATS, INTEGERS, dtype_named
from bagua_comm.kernels import host
from bagua_comm.kernels.host import casts, elementwise, minmax, numbers, sums
from bagua_comm.kernels.host.minmax import SPAN
from bagua_comm.kernels.host.numbers import PIECE

GOLDEN = Path(__file__).parent.parent / "golden"
CODED = ("float32", "float16", "bfloat16")
TINY = [(1, 1), (1, 100), (7, 64), (64, 100), (100, 7)]  # PIECE, SPAN
REDUCTIONS = [(name, op) for name in sorted(FLOATS) for op in ARITHMETIC_OPS] + [
    (name, op) for name in sorted(INTEGERS) for op in ARITHMETIC_OPS + BITWISE_OPS
]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 65504.0, 65519.0, 65520.0, -7e4, 1e-8, 3.4e38, -3.4e38]
SPECIAL += [np.inf, -np.inf, np.nan]


def set_piece(monkeypatch, size):
    for module in (casts, elementwise, minmax, numbers, sums):
        monkeypatch.setattr(module, "PIECE", size)


def values(shape, dtype, seed=0):
    random = np.random.default_rng(seed)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return random.integers(info.min, info.max, shape, dtype, endpoint=True)
    return (random.standard_normal(shape) * 100).astype(dtype_named(dtype))


def same_bytes(expected, actual):
    return (expected.dtype, expected.shape, expected.tobytes()) == (actual.dtype, actual.shape, actual.tobytes())


# Reductions


def reduced(rows, op):
    """((row 0 + row 1) + row 2) + ...: 16-bit floats in float32 and rounded once, integer means in 64 bits."""
    function = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }[op]
    wide = rows.dtype
    if rows.dtype.name in ("float16", "bfloat16"):
        wide = np.dtype(np.float32)
    elif op == "avg" and rows.dtype.kind in "iu":
        wide = np.dtype(np.int64 if rows.dtype.kind == "i" else np.uint64)
    with np.errstate(over="ignore"):
        total = reduce(function, rows.astype(wide))
        if op == "avg" and rows.dtype.kind in "iu":
            total = np.array([int(Fraction(int(t), len(rows))) for t in total], rows.dtype)
        elif op == "avg":
            total = total / total.dtype.type(len(rows))
        return total.astype(rows.dtype)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reduce_rows_adds_in_row_order_and_rounds_once(dtype, op):
    for p in (1, 2, 3, 5):
        rows = values((p, 50), dtype, seed=p)
        out = np.empty(50, rows.dtype)
        host.reduce_rows(rows.copy(), out, op)
        assert same_bytes(reduced(rows, op), out)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_reduce_rows_may_write_to_any_one_of_its_rows(dtype, op, monkeypatch):
    set_piece(monkeypatch, 7)
    rows = values((4, 20), dtype)
    expected = reduced(rows, op)
    for target in range(4):
        work = rows.copy()
        host.reduce_rows(work, work[target], op)
        assert same_bytes(expected, work[target])
        others = [r for r in range(4) if r != target]
        assert same_bytes(rows[others], work[others])


@pytest.mark.parametrize("piece", [1, 7, 64])
@pytest.mark.parametrize(("dtype", "op"), [("bfloat16", "avg"), ("float32", "sum"), ("int8", "avg")])
def test_reduce_rows_does_not_depend_on_the_size_of_its_pieces(dtype, op, piece, monkeypatch):
    set_piece(monkeypatch, piece)
    rows = values((3, 130), dtype)
    out = np.empty(130, rows.dtype)
    host.reduce_rows(rows, out, op)
    assert same_bytes(reduced(rows, op), out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats_are_added_in_float32(dtype):
    rows = np.array([[1.0]] + [[2.0**-12]] * 64, dtype_named(dtype))  # 1 + 2**-12 rounds to 1 in both
    out = np.empty(1, rows.dtype)
    host.reduce_rows(rows, out, "sum")
    assert out.astype(float).tolist() == [1 + 2.0**-6]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_added_from_the_first_to_the_last(dtype):
    # float32 cannot hold 2**15 + 2**-10, so what the small number adds is lost unless it comes last.
    first = np.array([[2.0**15], [2.0**-10], [-(2.0**15)]], dtype_named(dtype))
    out = np.empty(1, first.dtype)
    host.reduce_rows(first, out, "sum")
    assert out.astype(float).tolist() == [0.0]
    host.reduce_rows(first[[0, 2, 1]], out, "sum")
    assert out.astype(float).tolist() == [2.0**-10]


def test_the_sum_is_divided_and_not_multiplied_by_a_reciprocal():
    rows = np.zeros((15, 1), np.float16)
    rows[0], rows[1] = 1097 / 64, 11 / 2048  # 15 times a number half-way between two of float16
    out = np.empty(1, np.float16)
    host.reduce_rows(rows, out, "avg")
    assert out.tolist() == [1170 / 1024]  # to even; times float32(1 / 15) gives 1171 / 1024


def test_average_of_integers_is_truncated_towards_zero():
    rows = np.array([[-7, 7, -1, 1, -128], [0, 0, 0, 0, 0]], np.int8)
    out = np.empty(5, np.int8)
    host.reduce_rows(rows, out, "avg")
    assert out.tolist() == [-3, 3, 0, 0, -64]


def test_reductions_of_floats_spread_nan():
    for name in sorted(FLOATS):
        rows = np.array([[1.0, np.nan], [np.nan, 2.0]], dtype_named(name))
        for op in ARITHMETIC_OPS:
            out = np.empty(2, rows.dtype)
            host.reduce_rows(rows, out, op)
            assert np.isnan(out.astype(float)).all()


def test_reduce_rows_of_no_elements():
    for name in ("float32", "float16", "int64"):
        out = np.empty(0, name)
        host.reduce_rows(np.empty((3, 0), name), out, "avg")
        assert out.size == 0


@pytest.mark.parametrize("dtype", sorted(INTEGERS))
def test_divide_truncates_integers_towards_zero(dtype):
    x = values(100, dtype)
    for divisor in (1, 2, 3, 100):
        expected = [int(Fraction(int(value), divisor)) for value in x]
        quotient = x.copy()
        host.divide(quotient, divisor)
        assert expected == quotient.tolist()


@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_a_factor_is_not_rounded_to_16_bits_and_may_be_a_scalar_of_numpy(dtype):
    x, wide = values(1000, dtype), np.float64 if dtype == "float64" else np.float32
    expected = (x.astype(wide) * wide(0.95)).astype(x.dtype)
    for factor in (0.95, np.float64(0.95)):
        scaled, moved = x.copy(), np.zeros_like(x)
        host.scale(scaled, factor)
        host.add_scaled(moved, x, factor)
        once = (x.astype(np.float64) * 0.95).astype(np.float32) if dtype == "float32" else expected
        assert same_bytes(once, scaled)
        assert same_bytes(expected, moved)


# Casts


def test_widen_reads_every_bfloat16_as_the_upper_half_of_a_float32():
    bits = np.arange(2**16, dtype=np.uint32)
    wide = np.empty(2**16, np.float32)
    host.widen(bits.astype(np.uint16).view(dtype_named("bfloat16")), wide)
    assert same_bytes(bits << 16, wide.view(np.uint32))


def test_widen_reads_every_finite_float16_by_its_formula():
    bits = np.arange(2**16)
    sign, exponent, fraction = 1 - 2 * (bits >> 15), (bits >> 10) & 31, bits & 1023
    normal = exponent > 0
    expected = sign * np.ldexp(fraction + 1024.0 * normal, np.maximum(exponent, 1) - 25)
    wide = np.empty(2**16, np.float32)
    host.widen(bits.astype(np.uint16).view(np.float16), wide)
    finite = exponent < 31
    assert same_bytes(expected[finite].astype(np.float32), wide[finite])
    assert not np.isfinite(wide[~finite]).any()


def test_widen_copies_float32():
    x = np.array(SPECIAL, np.float32)
    wide = np.empty_like(x)
    host.widen(x, wide)
    assert same_bytes(x, wide)


def saturated(x, dtype):
    """Finite values brought within what `dtype` can hold, then rounded to it."""
    limit = np.float32(host.largest_finite(dtype))
    wide = x.astype(np.float32)
    return np.where(np.isfinite(wide), np.clip(wide, -limit, limit), wide).astype(dtype)


@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
@pytest.mark.parametrize("target", CODED)
@pytest.mark.parametrize("source", CODED)
def test_cast_saturating_keeps_finite_values_finite(source, target, piece, monkeypatch):
    set_piece(monkeypatch, piece)
    wide = np.array(SPECIAL + values(41, "float32").tolist(), np.float32)
    x = saturated(wide, dtype_named(source))
    expected = saturated(x, dtype_named(target))
    out = np.empty(x.shape, dtype_named(target))

    host.cast_saturating(x, out)

    assert same_bytes(expected, out)
    assert np.isfinite(x.astype(float)).tolist() == np.isfinite(out.astype(float)).tolist()


def test_cast_saturating_takes_any_shape():
    x = values((3, 4, 5), "float32")
    out = np.empty(x.shape, np.float16)
    host.cast_saturating(x, out)
    assert same_bytes(x.astype(np.float16), out)
    host.cast_saturating(np.empty((2, 0), np.float32), np.empty((2, 0), np.float16))


@pytest.mark.parametrize(
    ("name", "largest"), [("float16", 65504.0), ("bfloat16", 255 * 2.0**120), ("float32", 2.0**128 - 2.0**104)]
)
def test_largest_finite_is_followed_by_infinity(name, largest):
    dtype = dtype_named(name)
    bits = {2: np.uint16, 4: np.uint32}[dtype.itemsize]
    above = np.array(largest, dtype).view(bits) + bits(1)
    assert largest == host.largest_finite(dtype)
    assert np.inf == float(above.view(dtype))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("element", CODED)
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_cast_combine_adds_in_float32_and_rounds_to_the_element_dtype_first(wire, element, op, monkeypatch):
    set_piece(monkeypatch, 7)
    rows = values((3, 40), wire)
    total = (rows[0].astype(np.float32) + rows[1].astype(np.float32)) + rows[2].astype(np.float32)
    mean = total / np.float32(3) if op == "avg" else total
    expected = saturated(mean.astype(dtype_named(element)), dtype_named(wire))
    out = np.empty((1, 96), np.uint8)

    host.cast_combine(sent(rows, 96), out, 40, dtype_named(element), rows.dtype, op)

    assert same_bytes(sent(expected[None], 96), out)


def test_cast_combine_saturates_a_float32_sum_but_not_a_float16_one():
    half = np.dtype(np.float16)
    rows, out = np.full((2, 1), 65504, half).view(np.uint8), np.empty((1, 2), np.uint8)
    host.cast_combine(rows, out, 1, np.dtype("float32"), half, "sum")
    assert out.view(half).tolist() == [[65504.0]]
    host.cast_combine(rows, out, 1, half, half, "sum")  # the sum itself is infinite
    assert [[np.inf]] == out.view(half).tolist()


def sent(rows, w):
    """Rows of wire, (n, w) uint8: the elements, then zeros."""
    wire = np.zeros((len(rows), w), np.uint8)
    wire[:, : rows.shape[1] * rows.itemsize] = rows.view(np.uint8)
    return wire


@pytest.mark.parametrize("target", ["float16", "bfloat16"])
def test_every_nan_is_sent_as_the_canonical_one(target):
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)[None]
    wire, dtype = np.empty((1, 32), np.uint8), dtype_named(target)
    host.cast_encode(nans, wire, dtype)
    expected = {"float16": 0x7E00, "bfloat16": 0x7FC0}[target]
    assert [expected] * 4 + [0] * 12 == wire.view(np.uint16)[0].tolist()


# MinMaxUInt8


def encoded(x, block, eps):
    """Header, (n, nb, 2), and codes, (n, m); what lies behind them is zero."""
    n, m = x.shape
    start, wire = wire_of(x.dtype, n, m, block)
    host.minmax_encode(x, wire, start, block, eps)
    return parts_of(wire, x.dtype, m, block)


def decoded(header, codes, block, eps):
    out = np.empty(codes.shape, header.dtype)
    start, wire = wire_of(header.dtype, *codes.shape, block, header, codes)
    host.minmax_decode(wire, out, start, block, eps)
    return out


def combined(header, codes, block, eps, op):
    (n, m), dtype = codes.shape, header.dtype
    start, wire = wire_of(dtype, n, m, block, header, codes)
    _, out = wire_of(dtype, 1, m, block)
    host.minmax_combine(wire, out, m, dtype, start, block, eps, op)
    return parts_of(out, dtype, m, block)


def wire_of(dtype, n, m, block, header=None, codes=None):
    """Where codes start, and n rows of wire with 8 bytes of padding in either part."""
    used = -(-m // block) * 2 * dtype.itemsize
    wire = np.full((n, used + 8 + m + 8), 0xEE, np.uint8)
    if header is not None:
        wire[:, :used].view(dtype)[...] = header.reshape(n, -1)
        wire[:, used + 8 : used + 8 + m] = codes
    return used + 8, wire


def parts_of(wire, dtype, m, block):
    n, used = len(wire), -(-m // block) * 2 * dtype.itemsize
    assert not wire[:, used : used + 8].any()
    assert not wire[:, used + 8 + m :].any()
    return wire[:, :used].view(dtype).reshape(n, -1, 2), wire[:, used + 8 : used + 8 + m]


def block_by_block(x, block, eps, op):
    """Encode, decode and combine with each block as a chunk; return whole arrays."""
    parts = [np.ascontiguousarray(x[:, start : start + block]) for start in range(0, x.shape[1], block)]
    ends = [encoded(part, part.shape[1], eps) for part in parts]
    sums = [combined(header, codes, codes.shape[1], eps, op) for header, codes in ends]
    back = [decoded(header, codes, codes.shape[1], eps) for header, codes in ends]
    return [
        np.concatenate(arrays, axis=1) for arrays in (*zip(*ends, strict=True), back, *zip(*sums, strict=True))
    ]


def all_at_once(x, block, eps, op):
    header, codes = encoded(x, block, eps)
    return [header, codes, decoded(header, codes, block, eps), *combined(header, codes, block, eps, op)]


@pytest.mark.parametrize(("dtype", "op"), [("float32", "sum"), ("float16", "avg"), ("bfloat16", "sum")])
def test_a_block_does_not_depend_on_the_others_of_its_span(dtype, op):
    block = 10_000  # does not divide SPAN
    x = values((3, SPAN + 3 * block + 17), dtype)  # two spans, and a short last block
    x[1, SPAN + 5] = np.nan
    x[2, : 2 * block] = 1.5
    for expected, actual in zip(block_by_block(x, block, 0.0, op), all_at_once(x, block, 0.0, op), strict=True):
        assert same_bytes(expected, actual)


@pytest.mark.parametrize("dtype", CODED)
def test_a_block_longer_than_a_span_does_not_depend_on_the_other_rows(dtype):
    block = SPAN + PIECE + 3
    x = values((2, block + 5), dtype)
    for expected, actual in zip(
        block_by_block(x, block, 1e-7, "sum"), all_at_once(x, block, 1e-7, "sum"), strict=True
    ):
        assert same_bytes(expected, actual)


@pytest.mark.parametrize(("piece", "span"), TINY)
@pytest.mark.parametrize("shape", [(1, 1, 512), (3, 70, 8), (2, 250, 100), (5, 33, 33), (4, 40, 40), (2, 0, 8)])
def test_minmax_does_not_depend_on_pieces_and_spans(shape, piece, span, monkeypatch):
    n, m, block = shape
    xs = [values((n, m), dtype) for dtype in CODED]
    if m > 60:
        xs[0][1, 60] = np.nan
    expected = [all_at_once(x, block, 0.0, "avg") for x in xs]

    set_piece(monkeypatch, piece)
    monkeypatch.setattr(minmax, "SPAN", span)
    actual = [all_at_once(x, block, 0.0, "avg") for x in xs]

    for before, after in zip(expected, actual, strict=True):
        assert [a.tobytes() for a in before] == [a.tobytes() for a in after]


def test_codes_far_below_the_minimum_decode_to_something_finite():
    # With eps = 1e5 code 0 stands for about -1e5, beyond float16, though the ends of the block are small.
    header, codes = np.array([[[0, 1]]], np.float16), np.array([[0, 255]], np.uint8)
    assert decoded(header, codes, 2, 1e5).tolist() == [[-65504.0, 0.0]]


@pytest.mark.parametrize(("piece", "span"), TINY[1:3])
def test_golden_bytes_do_not_depend_on_pieces_and_spans(piece, span, monkeypatch):
    set_piece(monkeypatch, piece)
    monkeypatch.setattr(minmax, "SPAN", span)
    monkeypatch.setattr(kernels, "on_host", lambda: host)
    cases = json.loads((GOLDEN / "minmax.json").read_text())

    wrong = [case["name"] for case in cases if not golden_case_holds(case)]

    assert wrong == []


def golden_case_holds(case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec = MinMaxUInt8(case["block"], case["eps"])
    data = {part: (GOLDEN / name).read_bytes() for part, name in case["files"].items()}
    if case["kind"] not in ("codec", "combine"):
        return True  # made of these two
    wire = np.frombuffer(data["wire"], np.uint8).reshape(n, -1)
    if case["kind"] == "combine":
        return data["combined"] == codec.combine(wire, op=case["op"], count=m, dtype=dtype).tobytes()
    x = np.frombuffer(data["input"], dtype).reshape(n, m)
    back = codec.decode(wire, np.empty_like(x))
    return data["wire"] == codec.encode(x).tobytes() and data["decoded"] == back.tobytes()
