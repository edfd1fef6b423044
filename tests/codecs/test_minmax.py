"""The contract of MinMaxUInt8, on worked examples and on those of hypothesis."""

import struct

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bagua_comm import MinMaxUInt8
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import check_codec

DTYPES = ("float32", "float16", "bfloat16")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # relative, of one value
BLOCKS = st.sampled_from([1, 2, 5, 16, 512, None])

examples = settings(deadline=None, derandomize=True, max_examples=15)


@st.composite
def chunks(draw, dtype, min_size=1, max_size=40):
    """(1, m) finite values: anything, or normally distributed about some mean."""
    m = draw(st.integers(min_size, max_size))
    largest = 30000.0 if dtype == "float16" else 2.0**120  # no range overflows
    if draw(st.booleans()):
        anything = st.floats(-largest, largest, width=32)
        return draw(arrays(np.float32, (1, m), elements=anything)).astype(dtype_named(dtype))
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    sigma, mean = draw(st.sampled_from([1e-3, 1.0, 100.0])), draw(st.sampled_from([0.0, 1.0, -300.0]))
    return (mean + sigma * random.standard_normal((1, m))).astype(dtype_named(dtype))


each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def round_trip(codec, x):
    return codec.decode(codec.encode(x), np.empty_like(x))


def blocks_of(codec, m):
    block = m if codec.block is None else codec.block
    return [slice(start, min(start + block, m)) for start in range(0, m, block)]


# Worked examples


def test_four_elements_by_hand():
    # range 2.55, scale 100, upper 155, lower -100
    x = np.array([[-1.0, 0.004, 0.006, 1.55]], np.float32)
    codec = MinMaxUInt8()

    wire = codec.encode(x)

    header, codes = wire[0, :32], wire[0, 32:]
    assert struct.pack("=ff24x", -1.0, 1.55) == header.tobytes()
    assert bytes([0, 100, 101, 255]) + bytes(28) == codes.tobytes()
    decoded = codec.decode(wire, np.empty_like(x))
    np.testing.assert_allclose(decoded, [[-1.0, 0.0, 0.01, 1.55]], rtol=1e-6)


def test_bagua_layout_by_hand():
    # Bagua's chunk: min and max in the element dtype, padded to 32 bytes, then a code per element.
    x = np.array([[0.0, 1.4, 2.5, 255.0]])  # scale 1, lower 0; 2.5 is half-way and goes to even
    codes = bytes([0, 1, 2, 255]) + bytes(28)
    codec = MinMaxUInt8.bagua()

    as_float32, as_float16 = codec.encode(x.astype(np.float32)), codec.encode(x.astype(np.float16))

    assert MinMaxUInt8(block=None, eps=1e-7) == codec
    assert struct.pack("=ff24x", 0.0, 255.0) + codes == as_float32.tobytes()
    assert struct.pack("=ee28x", 0.0, 255.0) + codes == as_float16.tobytes()


def test_two_blocks_and_two_chunks_by_hand():
    x = np.array([[0, 255, 7, 7, 10], [-255, 0, 0, 510, -1]], np.float32)
    headers = [(0, 255, 7, 7, 10, 10), (-255, 0, 0, 510, -1, -1)]
    codes = [(0, 255, 0, 0, 0), (0, 255, 0, 255, 0)]

    wire = MinMaxUInt8(block=2).encode(x)

    for row in range(2):
        expected = struct.pack("=6f8x", *headers[row]) + bytes(codes[row]) + bytes(27)
        assert expected == wire[row].tobytes()


def test_combine_by_hand():
    # Two chunks whose levels are the integers from 0 to 255.
    codec = MinMaxUInt8()
    wire = codec.encode(np.array([[0, 1, 2, 255], [0, 3, 5, 255]], np.float32))

    mean = codec.combine(wire, op="avg", count=4, dtype=np.float32)
    total = codec.combine(wire, op="sum", count=4, dtype=np.float32)

    assert struct.pack("=ff24x", 0.0, 255.0) + bytes([0, 2, 4, 255]) + bytes(28) == mean.tobytes()  # 2, 3.5
    assert struct.pack("=ff24x", 0.0, 510.0) + bytes([0, 2, 4, 255]) + bytes(28) == total.tobytes()  # 4, 7


@pytest.mark.parametrize(
    ("codec", "count", "dtype", "nbytes"),
    [
        (MinMaxUInt8(), 1, "float32", 32 + 32),
        (MinMaxUInt8(), 512, "float32", 32 + 512),
        (MinMaxUInt8(), 1000, "float32", 32 + 1024),  # 2 blocks, 16 bytes of header
        (MinMaxUInt8(), 2049, "float32", 64 + 2080),  # 5 blocks, 40 bytes of header
        (MinMaxUInt8(), 2049, "float16", 32 + 2080),
        (MinMaxUInt8(), 2049, "bfloat16", 32 + 2080),
        (MinMaxUInt8(block=8), 33, "float32", 64 + 64),
        (MinMaxUInt8(block=1), 8, "bfloat16", 32 + 32),
        (MinMaxUInt8.bagua(), 2**20 + 1, "float32", 32 + 2**20 + 32),
        (MinMaxUInt8(), 0, "float32", 0),
        (MinMaxUInt8.bagua(), 0, "float16", 0),
    ],
)
def test_wire_nbytes(codec, count, dtype, nbytes):
    assert nbytes == codec.wire_nbytes(count, dtype_named(dtype))


@pytest.mark.parametrize(
    "codec",
    [
        MinMaxUInt8(),
        MinMaxUInt8.bagua(),
        MinMaxUInt8(block=1),
        MinMaxUInt8(block=7, eps=1e-3),
        MinMaxUInt8(block=64),
        MinMaxUInt8(block=100_000),
        MinMaxUInt8(block=None),
    ],
    ids=repr,
)
def test_conformance(codec):
    check_codec(codec)


# The error


@each_dtype
@examples
@given(data=st.data(), block=BLOCKS)
def test_error_is_at_most_half_a_step_of_its_block(dtype, data, block):
    codec = MinMaxUInt8(block=block)
    x = data.draw(chunks(dtype))
    wide, decoded = x.astype(float), round_trip(codec, x).astype(float)
    for part in blocks_of(codec, x.shape[1]):
        values = wide[0, part]
        step, largest = np.ptp(values) / 255, np.abs(values).max()
        rounding = 4 * 2.0**-24 * largest + ROUNDING[dtype] * (largest + step)
        nothing = 2.0**-25 if dtype == "float16" else 1e-36  # a value that rounds to zero, or a range too small
        assert np.abs(decoded[0, part] - values).max() <= step / 2 + rounding + nothing


@each_dtype
@examples
@given(data=st.data(), block=BLOCKS, eps=st.sampled_from([0.0, 1e-7]))
def test_decoding_is_monotonic(dtype, data, block, eps):
    codec = MinMaxUInt8(block, eps)
    x = data.draw(chunks(dtype))
    wide, decoded = x.astype(float), round_trip(codec, x).astype(float)
    for part in blocks_of(codec, x.shape[1]):
        order = np.argsort(wide[0, part])
        assert (np.diff(decoded[0, part][order]) >= 0).all()


@each_dtype
@examples
@given(data=st.data(), block=BLOCKS, eps=st.sampled_from([0.0, 1e-7]))
def test_zeros_decode_to_positive_zeros(dtype, data, block, eps):
    codec = MinMaxUInt8(block, eps)
    x = data.draw(chunks(dtype))
    zeros = data.draw(arrays(bool, x.shape))
    x[zeros] = data.draw(st.sampled_from([0.0, -0.0]))
    for part in blocks_of(codec, x.shape[1]):
        assume(not 0 < np.ptp(x[0, part].astype(float)) < 1e-36)  # a scale of more than float32 holds
    decoded = round_trip(codec, x)
    assert bytes(decoded[zeros].nbytes) == decoded[zeros].tobytes()


@each_dtype
@examples
@given(data=st.data(), m=st.integers(1, 40), block=BLOCKS)
def test_constants_are_exact(dtype, data, m, block):
    element = data.draw(chunks(dtype, max_size=1))
    x = np.repeat(element, m, axis=1)
    codec = MinMaxUInt8(block=block)

    wire = codec.encode(x)
    decoded = codec.decode(wire, np.empty_like(x))

    assert (x + x.dtype.type(0)).tobytes() == decoded.tobytes()  # -0.0 + 0.0 is 0.0
    codes_and_padding = wire[0, -(-(-m // 32) * 32) :]
    assert not codes_and_padding.any()


@each_dtype
def test_a_block_of_one_element_is_exact(dtype):
    x = np.array([[0.1, -3.0, 1e-4, 777.0, 0.0]], dtype_named(dtype))
    assert x.tobytes() == round_trip(MinMaxUInt8(block=1), x).tobytes()


@each_dtype
@examples
@given(data=st.data())
def test_the_ends_of_a_block_have_the_first_and_the_last_code(dtype, data):
    x = data.draw(chunks(dtype, min_size=3))
    wide = x.astype(float)
    assume(np.ptp(wide) > max(1e-3 * np.abs(wide).max(), 1e-6))
    codes = MinMaxUInt8(block=None).encode(x)[0, 32 : 32 + x.size]
    assert codes[wide[0].argmin()] in (0, 1)  # 1 if the ends are ties that round towards each other
    assert codes[wide[0].argmax()] == 255


@pytest.mark.parametrize(("dtype", "reach"), [("float32", 100), ("float16", 1)])
@examples
@given(data=st.data())
def test_encoding_decoded_values_gives_the_same_codes(dtype, reach, data):
    # As long as levels are far apart beside the rounding of values, and both ends have a level.
    codec = MinMaxUInt8(block=None)
    x = data.draw(chunks(dtype, min_size=3))
    spread = np.ptp(x.astype(float))
    assume(spread > 0.1)
    assume(np.abs(x.astype(float)).max() <= reach * spread)
    wire = codec.encode(x)
    codes = wire[0, 32 : 32 + x.size]
    assume(codes.min() == 0)

    again = codec.encode(codec.decode(wire, np.empty_like(x)))

    assert codes.tolist() == again[0, 32 : 32 + x.size].tolist()


@each_dtype
def test_encoding_decoded_values_gives_the_same_bytes_if_levels_are_whole_numbers(dtype):
    random = np.random.default_rng(0)
    x = random.uniform(0, 255, (3, 100))
    x[:, 0], x[:, 1] = 0, 255
    x = x.astype(dtype_named(dtype))
    codec = MinMaxUInt8()
    once = codec.encode(x)
    assert once.tobytes() == codec.encode(codec.decode(once, np.empty_like(x))).tobytes()


# NaN, infinity, signed zeros


@each_dtype
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_its_block_nan(dtype, bad):
    codec = MinMaxUInt8(block=4)
    x = np.arange(24.0).reshape(2, 12).astype(dtype_named(dtype))
    expected = round_trip(codec, x).astype(float)
    expected[0, 4:8] = np.nan
    x[0, 5] = bad
    np.testing.assert_array_equal(round_trip(codec, x).astype(float), expected)


@each_dtype
def test_nan_travels_as_canonical_nan_with_codes_0(dtype):
    quiet = {"float32": "0000c07f", "float16": "007e", "bfloat16": "c07f"}[dtype]  # little endian
    wires = []
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        x = np.array([[1.0, bad, 3.0]], dtype_named(dtype))
        wires.append(MinMaxUInt8().encode(x).tobytes().hex())
    expected = (2 * quiet).ljust(64, "0") + 64 * "0"
    assert 4 * [expected] == wires


@each_dtype
def test_infinities_of_both_signs_do_not_cancel_in_combine(dtype):
    codec = MinMaxUInt8(block=2)
    x = np.array([[np.inf, 0, 1, 2], [-np.inf, 0, 3, 4]], dtype_named(dtype))
    wire = codec.combine(codec.encode(x), op="sum", count=4, dtype=x.dtype)
    decoded = codec.decode(wire, np.empty_like(x[:1])).astype(float)
    assert np.isnan(decoded).tolist() == [[True, True, False, False]]
    assert decoded[0, 2:].tolist() == [4.0, 6.0]


@each_dtype
def test_negative_zero_never_reaches_the_header(dtype):
    zero = dtype_named(dtype).type(0)
    for values in ([-0.0, -0.0], [-0.0, 0.0], [0.0, -0.0]):
        wire = MinMaxUInt8().encode(np.array([values], zero.dtype))
        assert bytes(64) == wire.tobytes()
    wire = MinMaxUInt8().encode(np.array([[-0.0, 255.0], [-255.0, -0.0]], zero.dtype))
    assert zero.tobytes() == wire[0, : zero.nbytes].tobytes()
    assert zero.tobytes() == wire[1, zero.nbytes : 2 * zero.nbytes].tobytes()


@each_dtype
def test_a_chunk_of_the_largest_values_stays_finite(dtype):
    largest = {"float32": 2.0**128 - 2.0**104, "float16": 65504.0, "bfloat16": 255 * 2.0**120}[dtype]
    codec = MinMaxUInt8(block=2)
    for low in (largest / 2, largest / 510, 0.0, largest):
        x = np.array([[low, largest], [-largest, -low]], dtype_named(dtype))
        assert np.isfinite(round_trip(codec, x).astype(float)).all()


# Chunks and bytes


@each_dtype
def test_padding_of_the_wire_is_zero(dtype):
    # 3 blocks of at most 2, 5 elements: the header ends at 6 values, the codes at 32 + 5.
    x = np.array([[-1.0, 1.0, 2.0, 5.0, 7.0]], dtype_named(dtype))
    codec = MinMaxUInt8(block=2)
    used = 6 * x.itemsize
    wire = codec.encode(x, out=np.full((1, 64), 255, np.uint8))
    combined = codec.combine(wire, np.full((1, 64), 255, np.uint8), op="sum", count=5, dtype=x.dtype)
    for result in (wire[0], combined[0]):
        assert result[:used].any()
        assert bytes(32 - used) == result[used:32].tobytes()
        assert result[32:37].any()
        assert bytes(27) == result[37:].tobytes()


def test_old_bytes_in_the_padding_are_not_read():
    codec = MinMaxUInt8(block=2)
    x = np.array([[-1.0, 1.0, 2.0, 5.0, 7.0]], np.float32)
    wire = codec.encode(x)
    decoded = codec.decode(wire, np.empty_like(x))
    wire[0, 24:32] = wire[0, 37:] = 255
    assert decoded.tobytes() == codec.decode(wire, np.empty_like(x)).tobytes()


def in_float32(codec, wire, count, dtype):
    """Decode without rounding to a 16-bit dtype: the same codes behind a float32 header."""
    nb = len(blocks_of(codec, count))
    wide = np.zeros((len(wire), codec.wire_nbytes(count, np.dtype("float32"))), np.uint8)
    wide[:, : 8 * nb] = wire[:, : 4 * nb].view(dtype).astype(np.float32).view(np.uint8)
    codes = -(-count // 32) * 32
    wide[:, -codes:] = wire[:, -codes:]
    return codec.decode(wide, np.empty((len(wire), count), np.float32))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_combine_adds_in_float32_and_rounds_once(n, dtype, op):
    codec, count = MinMaxUInt8(block=16), 100
    x = np.random.default_rng(n).standard_normal((n, count)).astype(dtype_named(dtype))
    wire = codec.encode(x)
    wide = in_float32(codec, wire, count, x.dtype)
    total = wide[0]
    for row in wide[1:]:
        total = total + row
    if op == "avg":
        total = total / np.float32(n)
    expected = codec.encode(total[None].astype(x.dtype))

    actual = codec.combine(wire, op=op, count=count, dtype=x.dtype)

    assert expected.tobytes() == actual.tobytes()


# Settings and refusals
