"""int4.cu against kernels.host, byte for byte, as test_device.py does."""

import numpy as np
import pytest
from cuda_on_cpu.build import Kernels
from kernels.test_device import mutation_tests, normal, special_values, twice, up

from bagua_comm import Int4, kernels
from bagua_comm.arrays import dtype_named
from bagua_comm.execution.recording import recorded

pytestmark = pytest.mark.parametrize("device", ["lazy"], indirect=True)

DTYPES = ["float32", "float16", pytest.param("bfloat16", marks=pytest.mark.slow)]  # each is compiled first
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def run(device):
    """kernels/device, on the fake device."""
    return kernels.of(up(np.empty(0)))


SIZES = [
    (Int4(), 1, 1),
    (Int4(), 3, 1000),  # the last warp has few blocks, and the last block few elements
    (Int4(), 2, 4096 + 2048),  # two CTAs, the second with two warps
    (Int4(), 5, 64),
    (Int4(rounding="stochastic"), 3, 1100),
    (Int4(32, 1), 2, 77),  # its sums are those of blocks that are rotated
    (Int4(8, 1), 2, 77),
    (Int4(8, 8), 3, 4200),  # two CTAs
    (Int4(16, 2), 2, 100),
    (Int4(64, 4, "stochastic"), 2, 300),
    (Int4(256, 256), 2, 1000),
    (Int4(4096, 64), 2, 5000),
    (Int4(4096, 4096, "stochastic"), 1, 8192),
]


@pytest.mark.covering(1)
@each_dtype
@pytest.mark.parametrize(("codec", "n", "m"), SIZES, ids=str)
def test_int4(device, codec, n, m, dtype):
    device.order = "backward" if dtype == "float16" else "forward"
    on_host, on_device = twice(codec, normal((n, m), dtype, seed=m))
    assert on_host == on_device


@pytest.mark.covering(1)
@each_dtype
@pytest.mark.parametrize("codec", [Int4(), Int4(8, 8), Int4(rounding="stochastic")], ids=repr)
@pytest.mark.parametrize(("m", "shift"), [(1024, 0), (1030, 0), (1030, 1), (1024, 3)])
def test_int4_of_special_values_in_whole_blocks_and_at_odd_addresses(device, codec, dtype, m, shift):
    on_host, on_device = twice(codec, special_values(m, dtype), shift)
    assert on_host == on_device


def any_wires(codec, rows, blocks):
    """Rows with all scales, also those that no block has, and any codes."""
    random = np.random.default_rng(0)
    wire = random.integers(0, 256, (rows, codec.wire_nbytes(blocks * codec.block, np.dtype("f4"))), np.uint8)
    scales = np.resize(np.arange(0, 2**16, 7, dtype=np.uint16), (rows, blocks))
    wire[:, : 2 * blocks] = scales.view(np.uint8)
    wire[:, 2 * blocks : 2 * blocks + 32] = 0 if blocks % 16 else wire[:, 2 * blocks : 2 * blocks + 32]
    return wire


@pytest.mark.parametrize("codec", [Int4(), pytest.param(Int4(8, 8), marks=pytest.mark.slow)], ids=repr)
@each_dtype
def test_any_bytes_are_decoded_and_combined_as_on_the_host(device, codec, dtype):
    wire, count = any_wires(codec, 4, 2400), 2400 * codec.block
    decoded = np.zeros((4, count), dtype_named(dtype))
    assert codec.decode(wire, decoded).tobytes() == codec.decode(up(wire), up(decoded)).get().tobytes()
    for rows, op in ((2, "avg"), (3, "avg"), (4, "sum")):
        settings = {"op": op, "count": count, "dtype": decoded.dtype}
        on_device = codec.combine(up(wire[:rows]), **settings).get()
        assert codec.combine(wire[:rows], **settings).tobytes() == on_device.tobytes()


def test_int4_of_many_rows(device):
    for codec in (Int4(), Int4(8, 8)):
        on_host, on_device = twice(codec, normal((11, 90), "float32"))
        assert on_host == on_device


def test_few_ctas_do_the_work_of_many_with_int4(device, run, monkeypatch):
    monkeypatch.setattr(run.launches, "_MOST_CTAS", 1)
    monkeypatch.setattr(run.launches, "_MOST_ROWS", 2)
    for codec in (Int4(), Int4(8, 8)):
        on_host, on_device = twice(codec, normal((3, 10000), "float32"))
        assert on_host == on_device


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_recordings_of_calls_that_draw_random_numbers_cannot_be_replayed(device, rounding):
    codec, x = Int4(rounding=rounding), up(normal((2, 64), "float32"))
    wire = codec.encode(x)
    settings = {"op": "sum", "count": 64, "dtype": x.dtype}
    for call in (lambda: codec.encode(x, wire), lambda: codec.combine(wire, up(wire.get()[:1]), **settings)):
        assert recorded(call).is_complete == (rounding == "nearest")
    assert recorded(lambda: codec.decode(wire, x)).is_complete


def test_empty_arrays_launch_nothing_with_int4(device):
    codec, empty = Int4(), np.empty((2, 0), np.float32)
    codec.decode(codec.encode(up(empty)), up(empty))
    assert device.launches == []


EACH_SCALE = """
extern "C" __global__ void scales(const float* x, float* sevenths, float* inverses, int64 count) {
    for (int64 i = 0; i < count; ++i) {
        sevenths[i] = seventh(x[i]);
        inverses[i] = Scale(x[i], Nearest()).inverse;
    }
}
"""


@pytest.mark.slow
def test_sevenths_and_inverses_of_scales_are_exact(run):
    """All significands of ordinary numbers, and many of those at the ends of the range of exponents."""
    compiled = Kernels(run.source("int4.cu") + EACH_SCALE, run.compile_options("float32"))
    for exponent, step in ((254, 5), (127, 1), (3, 50), (2, 50), (1, 50), (0, 50)):
        x = (np.arange(0, 2**23, step, dtype=np.uint32) + np.uint32(exponent << 23)).view(np.float32)
        sevenths, inverses = np.empty_like(x), np.empty_like(x)
        compiled.launch("scales", (1,), (1,), [*(a.ctypes.data for a in (x, sevenths, inverses)), len(x)])
        expected = x / np.float32(7)
        assert expected.tobytes() == sevenths.tobytes()
        bits = expected.view(np.uint32)
        scales = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1) / scales.view(np.float32)
        inverse[scales < 0x00800000] = 0
        assert inverse.tobytes() == inverses.tobytes()


# Kernels that are broken on purpose


def check_warps(run):
    run.launches._MOST_CTAS = 1  # several tiles each
    return twice(Int4(), normal((2, 9000), "float32"))


def check_not_rotated(run):
    return twice(Int4(32, 1), special_values(1030, "float32"))


def check_large_sums(run):
    signs = np.sign(normal((1, 3000), "float32"))
    return twice(Int4(rounding="stochastic"), np.repeat(signs * np.float32(3e38), 9, axis=0))


def check_any(run):
    return twice(Int4(1024, 1024), normal((3, 5000), "float32"))


MUTANTS = {
    "blocks of the next tile": ("__syncwarp();  // before others write", "// before others write", check_warps),
    "NaN not seen": ("a > b || is_nan(a) ? a : b", "a > b ? a : b", check_not_rotated),
    "clipped numbers": ("fminf(fmaxf(sum, -most_code), most_code)", "sum", check_large_sums),
    "barrier dropped": ("__syncthreads();  // `shared`", "// `shared`", check_any),
}


test_a_broken_kernel_is_noticed, test_a_whole_kernel_passes = mutation_tests(MUTANTS, "int4.cu")
