"""The two casts: rounding half to even, saturation, and what is not finite."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bagua_comm import BFloat16, Float16
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import check_codec

DTYPES = ("float32", "float16", "bfloat16")
LARGEST = {"float32": 2.0**128 - 2.0**104, "float16": 65504.0, "bfloat16": 255 * 2.0**120}

examples = settings(deadline=None, derandomize=True, max_examples=15)
each_codec = pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=repr)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def on_the_wire(codec, values):
    """The bits of the elements on the wire, as integers."""
    x = np.array([values], np.float32)
    return codec.encode(x)[0].view(np.uint16)[: x.size].tolist()


def round_trip(codec, x):
    return codec.decode(codec.encode(x), np.empty_like(x))


@each_codec
def test_conformance(codec):
    check_codec(codec)


@each_codec
@each_dtype
def test_wire_nbytes_is_two_bytes_an_element_in_multiples_of_32(codec, dtype):
    counts = [0, 1, 15, 16, 17, 1000]
    actual = [codec.wire_nbytes(count, dtype_named(dtype)) for count in counts]
    assert actual == [0, 32, 32, 32, 64, 2016]


def test_float16_by_hand():
    bits = [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3C00),
        (-2.0, 0xC000),
        (2049.0, 0x6800),  # between 2048 and 2050, goes to even
        (2051.0, 0x6802),  # between 2050 and 2052, goes to even
        (2.0**-24, 0x0001),  # the smallest subnormal
        (2.0**-25, 0x0000),  # between 0 and it, goes to even
        (65504.0, 0x7BFF),  # the largest
        (65519.0, 0x7BFF),
        (65520.0, 0x7BFF),  # infinity in IEEE's cast; saturates here
        (3.4e38, 0x7BFF),
        (-1e6, 0xFBFF),
        (np.inf, 0x7C00),
        (-np.inf, 0xFC00),
    ]
    assert [code for _, code in bits] == on_the_wire(Float16(), [x for x, _ in bits])


def test_bfloat16_by_hand():
    bits = [
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 1 / 256, 0x3F80),  # between 1 and 1 + 1/128, goes to even
        (1 + 3 / 256, 0x3F82),  # between 1 + 1/128 and 1 + 2/128, goes to even
        (255 * 2.0**120, 0x7F7F),  # the largest
        (LARGEST["float32"], 0x7F7F),  # infinity in IEEE's cast; saturates here
        (-LARGEST["float32"], 0xFF7F),
        (np.inf, 0x7F80),
        (-np.inf, 0xFF80),
    ]
    assert [code for _, code in bits] == on_the_wire(BFloat16(), [x for x, _ in bits])


@each_codec
@each_dtype
def test_nan_and_infinity_stay_and_touch_nothing_else(codec, dtype):
    x = np.array([[1.0, np.nan, 2.0, np.inf, -np.inf, -np.nan, 3.0]], dtype_named(dtype))
    decoded = round_trip(codec, x).astype(float)
    np.testing.assert_array_equal(decoded, [[1.0, np.nan, 2.0, np.inf, -np.inf, np.nan, 3.0]])


@pytest.mark.parametrize(("codec", "dtype"), [(Float16(), "float16"), (BFloat16(), "bfloat16")])
def test_every_value_of_the_wire_dtype_is_kept_bit_for_bit(codec, dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    x = bits.view(dtype_named(dtype))
    x = x[~np.isnan(x.astype(np.float32))].reshape(1, -1)
    assert x.tobytes() == codec.encode(x).tobytes()[: x.nbytes]
    assert x.tobytes() == round_trip(codec, x).tobytes()


@pytest.mark.parametrize(
    ("codec", "relative", "absolute", "largest"),
    [(Float16(), 2.0**-11, 2.0**-25, 65504.0), (BFloat16(), 2.0**-8, 2.0**-134, 255 * 2.0**120)],
)
@examples
@given(data=st.data())
def test_error_is_at_most_half_a_unit_in_the_last_place(codec, relative, absolute, largest, data):
    values = st.floats(-largest, largest, width=32)
    x = data.draw(arrays(np.float32, (1, 20), elements=values))
    error = np.abs(round_trip(codec, x).astype(float) - x.astype(float))
    assert (error <= np.maximum(relative * np.abs(x.astype(float)), absolute)).all()


@each_codec
@each_dtype
@examples
@given(data=st.data())
def test_decoded_values_are_encoded_without_loss(codec, dtype, data):
    values = st.floats(-60000, 60000, width=32)
    x = data.draw(arrays(np.float32, (2, 5), elements=values)).astype(dtype_named(dtype))
    once = round_trip(codec, x)
    assert once.tobytes() == round_trip(codec, once).tobytes()


@each_codec
@examples
@given(data=st.data())
def test_decoding_is_monotonic(codec, data):
    values = st.floats(width=32, allow_nan=False)
    x = np.sort(data.draw(arrays(np.float32, (1, 20), elements=values)))
    decoded = round_trip(codec, x)[0]
    assert (decoded[:-1] <= decoded[1:]).all()


@each_codec
def test_combine_by_hand(codec):
    wire = codec.encode(np.array([[1.0, 2.0, -8.0], [2.0, 0.5, 8.0], [3.0, 0.5, 1.5]], np.float32))
    total = codec.combine(wire, op="sum", count=3, dtype=np.float32)
    mean = codec.combine(wire, op="avg", count=3, dtype=np.float32)
    assert codec.encode(np.array([[6.0, 3.0, 1.5]], np.float32)).tobytes() == total.tobytes()
    assert codec.encode(np.array([[2.0, 1.0, 0.5]], np.float32)).tobytes() == mean.tobytes()


@each_codec
def test_combine_keeps_nan_visible(codec):
    x = np.array([[1.0, np.nan, np.inf], [1.0, 2.0, -np.inf]], np.float32)
    total = codec.combine(codec.encode(x), op="sum", count=3, dtype=np.float32)
    decoded = codec.decode(total, np.empty((1, 3), np.float32))
    np.testing.assert_array_equal(decoded, [[2.0, np.nan, np.nan]])


@each_codec
def test_padding_of_the_wire_is_zero(codec):
    x = np.full((2, 5), -1.0, np.float32)
    wire = codec.encode(x, out=np.full((2, 32), 255, np.uint8))
    total = codec.combine(wire, np.full((1, 32), 255, np.uint8), op="sum", count=5, dtype=np.float32)
    for row in (*wire, *total):
        assert row[:10].any()
        assert bytes(22) == row[10:].tobytes()
