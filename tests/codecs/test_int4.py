"""Int4 against Hadamard matrices in float64: errors, extreme numbers, sums, stochastic rounding, settings."""

import numpy as np
import pytest

from bagua_comm import Int4
from bagua_comm.arrays import dtype_named
from bagua_comm.kernels.host import Draws, largest_finite
from bagua_comm.testing import check_codec

DTYPES = ("float32", "float16", "bfloat16")
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
BF16_ROUNDING = 2.0**-8


def hadamard(size):
    """Sylvester's matrix, by its recursion."""
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


def in_blocks(codec, x):
    """Rows as blocks of rotated groups, (n, nb, B / R, R), padded with zeros, in float64."""
    n, m = x.shape
    nb = -(-m // codec.block)
    padded = np.zeros((n, nb * codec.block))
    padded[:, :m] = x
    return (padded * signs(codec, nb * codec.block)).reshape(n, nb, -1, codec.rotate)


def signs(codec, count):
    """The signs of elements: a bent function of the lowest four bits of their numbers."""
    i = np.arange(count)
    return 1 - 2 * ((i & i >> 1 & 1) ^ (i >> 2 & i >> 3 & 1)) if codec.rotate > 1 else np.ones(count, int)


def on_the_wire(codec, wire, m):
    """Scales, (n, nb), and codes, (n, nb, B), of encoded rows."""
    nb = -(-m // codec.block)
    start = -(-2 * nb // 32) * 32
    scales = (np.ascontiguousarray(wire[:, : 2 * nb]).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    packed = wire[:, start : start + nb * codec.block // 2]
    halves = np.stack([packed & 15, packed >> 4], -1).astype(int)
    codes = np.where(halves > 7, halves - 16, halves)
    return scales.astype(float), codes.reshape(len(wire), nb, codec.block)


def round_trip(codec, x, **draws):
    return codec.decode(codec.encode(x, **draws), np.empty_like(x))


def relative_error(codec, x):
    return np.linalg.norm(round_trip(codec, x).astype(float) - x) / np.linalg.norm(x.astype(float))


@pytest.mark.parametrize("codec", [Int4(), Int4(8, 1), Int4(256, 16), Int4(rounding="stochastic")], ids=repr)
def test_conformance(codec):
    check_codec(codec, error=1 / 8, exact_sums=False)


SETTINGS = [Int4(), Int4(8, 1), Int4(8, 8), Int4(64, 4), Int4(512, 512)]


@pytest.mark.parametrize("codec", SETTINGS, ids=repr)
@each_dtype
def test_codes_are_the_rotated_elements_in_steps(codec, dtype):
    x = np.random.default_rng(1).standard_normal((3, 5000)).astype(dtype_named(dtype))
    wire = codec.encode(x)
    rotated = (in_blocks(codec, x.astype(float)) @ hadamard(codec.rotate) / codec.rotate).reshape(
        3, -1, codec.block
    )
    scales, codes = on_the_wire(codec, wire, 5000)

    np.testing.assert_allclose(scales, np.abs(rotated).max(-1) / 7, rtol=1.01 * BF16_ROUNDING)
    assert np.abs(rotated / scales[..., None] - codes).max() < 0.5 + 1 / 32
    assert np.abs(codes).max() == 7


@pytest.mark.parametrize("codec", SETTINGS, ids=repr)
@each_dtype
def test_decoding_is_the_rotation_of_the_codes(codec, dtype):
    kind = dtype_named(dtype)
    wire = codec.encode(np.random.default_rng(2).standard_normal((2, 700)).astype(kind))
    scales, codes = on_the_wire(codec, wire, 700)
    groups = codes.reshape(2, scales.shape[1], -1, codec.rotate) @ hadamard(codec.rotate).astype(int)
    signed = groups.reshape(2, -1) * signs(codec, groups.size // 2)
    factors = np.repeat(scales, codec.block, axis=1)
    expected = (signed * factors).astype(np.float32)[:, :700].astype(kind)

    assert codec.decode(wire, np.empty((2, 700), kind)).tobytes() == expected.tobytes()


def distributions():
    rng, count = np.random.default_rng(0), 1 << 20
    normal = rng.standard_normal(count)
    return {
        "normal": normal,
        "Student's t(3)": rng.standard_t(3, count),
        "lognormal scales": normal * np.exp(2 * rng.standard_normal(count)),
    }


def test_errors_of_gradients_are_about_a_tenth_at_any_magnitude():
    limits = {"normal": 0.098, "Student's t(3)": 0.090, "lognormal scales": 0.060}
    for name, values in distributions().items():
        x = values.astype(np.float32)[None]
        error = relative_error(Int4(), x)
        assert 0.03 < error < limits[name], name
        part = x[:, : 1 << 14]
        error = relative_error(Int4(), part)
        for scale in (1e-3, 1e-8, 1e-30, 1e30):  # other mantissas of scales are rounded in other ways
            other = relative_error(Int4(), part * np.float32(scale))
            assert other == pytest.approx(error, rel=0.05), (name, scale)


def test_a_common_mean_costs_no_precision():
    x = np.random.default_rng(5).standard_normal((1, 1 << 16)).astype(np.float32)
    assert relative_error(Int4(), x + 2) < 1.05 * relative_error(Int4(), x)


def test_rotation_keeps_large_elements_from_taking_the_precision_of_others():
    x = np.random.default_rng(0).standard_t(3, 1 << 16).astype(np.float32)[None]
    assert relative_error(Int4(), x) < 0.65 * relative_error(Int4(rotate=1), x)


@each_dtype
def test_a_block_with_a_nan_or_an_infinity_is_nan_and_others_are_not(dtype):
    x = np.random.default_rng(0).standard_normal((1, 150)).astype(dtype_named(dtype))
    good = round_trip(Int4(), x)
    for value in (np.nan, np.inf, -np.inf):
        bad = x.copy()
        bad[0, 40] = value
        decoded = round_trip(Int4(), bad).astype(float)
        assert np.isnan(decoded[0, 32:64]).all()
        assert decoded[0, :32].tolist() == good[0, :32].tolist()
        assert decoded[0, 64:].tolist() == good[0, 64:].tolist()


@each_dtype
@pytest.mark.parametrize("codec", [Int4(), Int4(32, 1), Int4(rounding="stochastic")], ids=repr)
def test_the_largest_numbers_stay_finite_in_sums_too(codec, dtype):
    kind = dtype_named(dtype)
    largest = largest_finite(kind)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (3, 96))
    signs[:, :32], signs[:, 32:64] = 1, np.tile([1, -1], 16)
    x = (signs * largest).astype(kind)
    wire = codec.encode(x)
    assert np.isfinite(codec.decode(wire, np.empty_like(x)).astype(float)).all()
    total = codec.decode(codec.combine(wire, op="sum", count=96, dtype=kind), np.empty_like(x[:1])).astype(float)
    assert np.isfinite(total).all()
    assert (total[0, :64] * signs[0, :64] > 0.97 * largest).all()  # three times the largest, limited
    mean = codec.decode(codec.combine(wire, op="avg", count=96, dtype=kind), np.empty_like(x[:1])).astype(float)
    np.testing.assert_allclose(mean[0, :64], signs[0, :64] * largest, rtol=0.08)


def test_zeros_and_what_is_too_small_decode_to_zeros():
    x = np.zeros((1, 64), np.float32)
    x[0, 32:] = 2.0**-130
    wire = Int4(32, 1).encode(x)
    assert not wire.any()
    assert round_trip(Int4(32, 1), x).tobytes() == np.zeros_like(x).tobytes()
    x[0, 40] = 7 * 2.0**-126  # the smallest scale
    assert round_trip(Int4(32, 1), x)[0, 40] == x[0, 40]


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_sums_are_those_of_the_rotated_codes(n, op):
    codec = Int4(32, 8)
    x = np.random.default_rng(n).standard_normal((n, 500)).astype(np.float32)
    wire = codec.encode(x)
    scales, codes = on_the_wire(codec, wire, 500)
    exact = (codes * scales[..., None]).sum(0) / (n if op == "avg" else 1)
    scale, code = on_the_wire(codec, codec.combine(wire, op=op, count=500, dtype=np.float32), 500)

    np.testing.assert_allclose(scale[0], np.abs(exact).max(-1) / 7, rtol=1.01 * BF16_ROUNDING)
    assert np.abs(exact / scale[0, :, None] - code[0]).max() < 0.5 + 1 / 32
    if n == 1:
        # The largest code is 7 again, so nothing changes.
        assert wire.tobytes() == codec.combine(wire, op=op, count=500, dtype=np.float32).tobytes()


def test_the_padding_of_a_last_block_is_sent_and_the_rest_is_zero():
    codec = Int4()
    x = np.ones((1, 33), np.float32)
    assert codec.wire_nbytes(33, x.dtype) == 64
    wire = codec.encode(x, out=np.full((1, 64), 255, np.uint8))
    assert wire[0, 4:32].tolist() == [0] * 28
    mean, one = on_the_wire(codec, wire, 33)[1][0].tolist()
    assert mean == [7, 7, 7, -7, 7, 7, 7, -7, 7, 7, 7, -7, -7, -7, -7, 7, *[0] * 16]  # spread over half the group
    assert one == [7] * 32  # one element, in all of its group


def test_bits_an_element():
    assert Int4().wire_nbytes(1 << 20, np.dtype("f4")) * 8 / (1 << 20) == 4.5
    assert Int4(4096, 32).wire_nbytes(1 << 20, np.dtype("f2")) * 8 / (1 << 20) == pytest.approx(4, rel=2e-3)


# Stochastic rounding


def test_stochastic_rounding_has_no_bias():
    codec, count = Int4(rounding="stochastic"), 300
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    decoded = np.array([round_trip(codec, x, draws=Draws.of(key))[0] for key in range(count)], float)
    spread = decoded.std(0) / np.sqrt(count)
    assert (np.abs(decoded.mean(0) - x[0]) < 5 * spread).all()
    assert np.linalg.norm(decoded.mean(0) - x[0]) < 0.1 * np.linalg.norm(round_trip(Int4(), x)[0] - x[0])


def test_stochastic_rounding_depends_on_the_key_and_the_position_alone():
    codec = Int4(rounding="stochastic")
    x = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    wire = codec.encode(x, draws=Draws(7, 100))
    assert codec.encode(x, draws=Draws(7, 100)).tobytes() == wire.tobytes()
    assert codec.encode(x[2:], draws=Draws(7, 100 + 256)).tobytes() == wire[2:].tobytes()
    for draws in (Draws(8, 100), Draws(7 + 2**32, 100), Draws(7, 101)):
        assert (
            on_the_wire(codec, codec.encode(x, draws=draws), 128)[1] != on_the_wire(codec, wire, 128)[1]
        ).any()
    assert codec.encode(x).tobytes() == codec.encode(x, draws=Draws.of(codec.seed)).tobytes()
    assert codec.encode(x).tobytes() != Int4(rounding="stochastic", seed=1).encode(x).tobytes()


def test_nearest_rounding_takes_no_random_numbers():
    x = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
    assert Int4().random_seed is None
    assert Int4().encode(x, draws=Draws(3)).tobytes() == Int4(seed=5).encode(x).tobytes()


# Settings
