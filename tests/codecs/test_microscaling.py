"""The microscaling formats: golden bytes, ml_dtypes' casts in float64, what is not finite, and tails."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bagua_comm import (
    MXFP4,
    MXFP8,
    NVFP4,
    ArrayError,
    ErrorFeedback,
    GradientAllReduce,
    Quantized,
    UnsupportedError,
    quantized_allreduce,
)
from bagua_comm.algorithms import from_name
from bagua_comm.arrays import dtype_named
from bagua_comm.kernels.host.numbers import PIECE
from bagua_comm.testing import check_codec, run_ranks, sample
from bagua_comm.testing.values import evaluated

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = json.loads((GOLDEN / "microscaling.json").read_text())

CODES = {
    MXFP8(): (ml_dtypes.float8_e4m3fn, 448, 8),
    MXFP8("e5m2"): (ml_dtypes.float8_e5m2, 57344, 15),
    MXFP4(): (ml_dtypes.float4_e2m1fn, 6, 2),
    NVFP4(): (ml_dtypes.float4_e2m1fn, 6, None),
}
"""The dtype of the codes, the largest, and its exponent in MX."""
ERRORS = {MXFP8(): 1 / 8, MXFP8("e5m2"): 1 / 8, MXFP4(): 1 / 4, NVFP4(): 1 / 8}

each_codec = pytest.mark.parametrize("codec", CODES, ids=repr)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])


def round_trip(codec, x):
    return codec.decode(codec.encode(x), np.empty_like(x))


@each_codec
def test_conformance(codec):
    check_codec(codec, error=ERRORS[codec])


@pytest.mark.slow
def test_the_golden_file_equals_the_output_of_its_generator():
    script = GOLDEN / "make_microscaling.py"
    assert subprocess.run([sys.executable, script, "--check"], timeout=60).returncode == 0


@each_codec
@each_dtype
def test_golden_bytes(codec, dtype):
    found = [case for case in CASES if (case["codec"], case["dtype"]) == (repr(codec), dtype)]
    assert len(found) == 12
    for case in found:
        x = np.frombuffer(bytes.fromhex(case["input"]), dtype_named(dtype)).reshape(case["n"], case["m"]).copy()
        wire = codec.encode(x)
        assert wire.tobytes().hex() == case["wire"], case["name"]
        assert codec.decode(wire, np.empty_like(x)).tobytes().hex() == case["decoded"], case["name"]


def expected(codec, x):
    """The decoded values of one chunk of finite float32 numbers: scales and codes by ml_dtypes, in float64."""
    dtype, largest, exponent = CODES[codec]
    blocks = np.pad(x.astype(np.float64), (0, -x.size % codec.block)).reshape(-1, codec.block)
    high = np.abs(blocks).max(axis=1, keepdims=True)
    if exponent is None:
        factor = np.float64(np.float32(high.max() / (6 * 448)))
        scale = (high / 6 / factor).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * factor
    else:
        scale = 2.0 ** (np.floor(np.log2(high)) - exponent)
        as_stored = scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        assert (as_stored == scale).all()
    codes = np.clip(blocks / scale, -largest, largest).astype(dtype).astype(np.float64)
    return (codes * scale).reshape(-1)[: x.size]


@each_codec
@pytest.mark.parametrize(
    ("count", "exponents"), [*((count, 0) for count in (1, 15, 16, 17, 31, 32, 33, 5000)), (PIECE + 100, 2)]
)
def test_values_are_those_of_casts_in_float64(codec, count, exponents):
    rng = np.random.default_rng(count)
    x = (rng.standard_normal(count) * np.exp(exponents * rng.standard_normal(count))).astype(np.float32)
    x[x == 0] = 1
    # Only the product by a factor of NVFP4 is rounded, in float32.
    np.testing.assert_allclose(round_trip(codec, x[None])[0], expected(codec, x), rtol=2.0**-22)


@each_codec
def test_codes_lie_where_the_layout_says(codec):
    x = np.zeros((1, 35), np.float32)
    x[0, [0, 1, 34]] = 1, -2, 4
    wire, start = codec.encode(x)[0], 32
    dtype, *_ = CODES[codec]
    if codec.block == 32:
        first, last = (wire[i : i + 1].view(ml_dtypes.float8_e8m0fnu).astype(np.float32) for i in (0, 1))
        assert not wire[2:start].any()
    else:
        factor = wire[:4].view(np.float32)
        first, last = (wire[i : i + 1].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * factor for i in (4, 6))
        assert not wire[7:start].any()
    codes = wire[start:]
    if codec.code_bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(-1)
    values = codes.view(dtype).astype(np.float32)
    np.testing.assert_allclose([values[0] * first[0], values[1] * first[0], values[34] * last[0]], [1, -2, 4])
    assert not codes[2:34].any()
    assert not codes[35:].any()


@each_codec
@each_dtype
def test_bits_an_element(codec, dtype):
    header = {"MXFP8": 0.25, "MXFP4": 0.25, "NVFP4": 0.5}[type(codec).__name__]
    bits = 8 * codec.wire_nbytes(1 << 20, dtype_named(dtype)) / (1 << 20)
    assert bits == pytest.approx(codec.code_bits + header, abs=1e-3)
    assert codec.wire_nbytes(0, dtype_named(dtype)) == 0


@each_codec
@each_dtype
def test_a_nan_or_an_infinity_spoils_its_block_and_no_other(codec, dtype):
    x = sample(0, (1, 96), dtype)
    clean, broken = round_trip(codec, x), x.copy()
    broken[0, 40] = np.nan
    broken[0, 70] = -np.inf
    decoded = round_trip(codec, broken).astype(np.float64)
    spoiled = np.zeros(96, bool)
    for at in (40, 70):
        first = at // codec.block * codec.block
        spoiled[first : first + codec.block] = True
    assert np.isnan(decoded[0, spoiled]).all()
    assert np.isfinite(decoded[0, ~spoiled]).all()
    if codec.block == 32:
        assert decoded[0, ~spoiled].tolist() == clean.astype(np.float64)[0, ~spoiled].tolist()


@each_codec
@each_dtype
def test_finite_values_stay_finite_at_both_ends_of_the_range(codec, dtype):
    info = ml_dtypes.finfo(dtype_named(dtype))
    for end in (info.max, info.smallest_subnormal):
        x = np.array([[1, -1, 0.5, 0, -0.0] * 20], dtype_named(dtype)) * end
        decoded = round_trip(codec, x.astype(dtype_named(dtype))).astype(np.float64)
        assert np.isfinite(decoded).all()
        assert (decoded[0, 3::5] == 0).all()
        assert (decoded[0, 4::5] == 0).all()


@each_codec
def test_infinite_codes_and_scales_of_others_are_not_made_finite(codec):
    """An encoder of another library may write them."""
    wire = codec.encode(np.ones((1, 64), np.float32))
    if codec == NVFP4():
        wire[0, :4] = np.array([np.inf], np.float32).view(np.uint8)
        assert np.isinf(codec.decode(wire, np.empty((1, 64), np.float32))).all()
    elif codec == MXFP8("e5m2"):
        wire[0, 32:34] = 0x7C, 0xFC  # +-infinity in E5M2
        decoded = codec.decode(wire, np.empty((1, 64), np.float32))
        assert decoded[0, :3].tolist() == [np.inf, -np.inf, 1]
    else:
        wire[0, 0] = 254  # 2 ** 127, the largest scale
        decoded = codec.decode(wire, np.empty((1, 64), np.float32))
        assert decoded[0, 0] == np.finfo(np.float32).max
        assert decoded[0, 63] == 1


@each_codec
def test_ranks_average_to_the_same_bytes(codec):
    def body(comm):
        x = sample(comm.rank, (40_001,), "float32")
        mean = quantized_allreduce(comm, x, codec=codec, op="avg")
        comm.check_consistency(mean)
        return mean, comm.allreduce(x, op="avg")

    mean, exact = run_ranks(3, body)[0]
    assert np.linalg.norm(mean - exact) < 1.6 * ERRORS[codec] * np.linalg.norm(exact)


@each_codec
def test_an_array_on_a_device_is_refused_by_name(device, codec):
    import cupy

    x = cupy.zeros((1, 32), np.float32)
    wire = cupy.zeros((1, codec.wire_nbytes(32, x.dtype)), np.uint8)
    for call in (
        lambda: codec.encode(x),
        lambda: codec.decode(wire, x),
        lambda: codec.combine(wire, op="sum", count=32, dtype=x.dtype),
        lambda: codec.steps(32, x),
        lambda: codec.prepare(x),
    ):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert str(caught.value).startswith(f"{codec} codes arrays in host memory only")


@each_codec
def test_a_collective_of_device_arrays_is_refused_on_all_ranks_before_anything_is_sent(device, codec):
    import cupy

    def body(comm):
        with pytest.raises(UnsupportedError, match="host memory only") as caught:
            quantized_allreduce(comm, cupy.zeros(64, np.float32), codec=codec)
        with pytest.raises(UnsupportedError, match="host memory only"):
            Quantized(codec, min_bytes=0).bind(comm, cupy.zeros(64, np.float32))
        assert repr(codec) in str(caught.value)
        return comm.allreduce(np.ones(1))[0]

    assert run_ranks(2, body) == [2, 2]


def test_settings_are_values_with_names():
    assert MXFP8() == MXFP8(format="e4m3") != MXFP8("e5m2")
    assert len({MXFP8(), MXFP8("e5m2"), MXFP4(), NVFP4(), NVFP4()}) == 4
    for codec in CODES:
        assert evaluated(codec) == codec
    for name, codec in {"mxfp8": MXFP8(), "mxfp4": MXFP4(), "nvfp4": NVFP4()}.items():
        made = from_name("gradient-allreduce", average={"name": "quantized", "codec": name})
        assert made == GradientAllReduce(Quantized(codec))
    quantized = {"name": "quantized", "codec": {"name": "mxfp8", "format": "e5m2"}}
    made = from_name("gradient-allreduce", average={"name": "error-feedback", "inner": quantized})
    assert made == GradientAllReduce(ErrorFeedback(Quantized(MXFP8("e5m2"))))
    for wrong in ("E4M3", None, 8, ["e4m3"]):
        with pytest.raises(ArrayError, match=r'MXFP8: format is .*, expected "e4m3" or "e5m2"'):
            MXFP8(wrong)
