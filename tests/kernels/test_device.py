"""The .cu files against kernels.host, byte for byte. They run here as they are, on the CPU (cuda_on_cpu)."""

import inspect
from importlib import import_module

import numpy as np
import pytest
from cuda_on_cpu.build import Kernels
from support.golden import FAMILIES, GOLDEN, cases_of, codec_of, draws_of

from bagua_comm import (
    ArrayError,
    BFloat16,
    Float16,
    MinMaxUInt8,
    kernels,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from bagua_comm.arrays import ARITHMETIC_OPS, BITWISE_OPS, INTEGERS, dtype_named
from bagua_comm.kernels import host
from bagua_comm.testing import run_ranks

CODED = ("float32", "float16", "bfloat16")
FLOATING = (*CODED, "float64")

pytestmark = pytest.mark.parametrize("device", ["lazy"], indirect=True)  # one stream: no order to get wrong


@pytest.fixture
def run(device):
    """kernels/device, on the fake device."""
    return kernels.of(up(np.empty(0)))


def up(x, shift=0):
    """`x` on the device, `shift` elements behind an address that words of 16 bytes fit."""
    cupy = import_module("cupy")
    room = cupy.empty(x.size + shift, x.dtype)
    array = room[shift:].reshape(x.shape)
    array.set(np.ascontiguousarray(x))
    return array


def normal(shape, dtype, seed=0, scale=1.0):
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * scale).astype(np.float32).astype(dtype_named(dtype))


def twice(codec, x, shift=0):
    """The results of encoding, decoding and combining on the host, and on the device."""
    wire = codec.encode(x)
    on_host = [wire, codec.decode(wire, np.empty_like(x))]
    on_host += [codec.combine(wire, op=op, count=x.shape[1], dtype=x.dtype) for op in ("sum", "avg")]

    cupy = import_module("cupy")
    wires = up(wire, 4 * shift)
    out = up(np.zeros_like(x), shift)
    combined = [up(np.full_like(wire[:1], 0xEE), 4 * shift) for _ in range(2)]
    on_device = [codec.encode(up(x, shift), up(np.full_like(wire, 0xEE), 4 * shift)), codec.decode(wires, out)]
    for target, op in zip(combined, ("sum", "avg"), strict=True):
        on_device.append(codec.combine(wires, target, op=op, count=x.shape[1], dtype=x.dtype))
    cupy.cuda.get_current_stream().synchronize()
    return [a.tobytes() for a in on_host], [a.get().tobytes() for a in on_device]


# MinMaxUInt8


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize(
    ("n", "m", "block"),
    [
        (1, 1, 512),
        (3, 1000, 512),  # a warp a block; the last is short
        (9, 512, 512),
        (2, 100, 1),  # a thread a block
        (2, 333, 20),  # blocks that words don't fit
        (3, 777, 64),
        (2, 5000, 700),  # a CTA of two warps
        (4, 1040, 16),  # a thread a block; those of two warps are whole
        (3, 1024, 64),
        (2, 4096, 2048),
        (2, 9000, None),  # one block a chunk: two segments, the second short
        (2, 16384, None),
    ],
)
def test_minmax(device, dtype, n, m, block, order):
    device.order = order
    codec = MinMaxUInt8(block, 1e-7 if block is None else 0.0)
    on_host, on_device = twice(codec, normal((n, m), dtype, seed=m))
    assert on_host == on_device


FINITE = {"float32": 3e38, "float16": 65504.0, "bfloat16": 3e38}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize(("m", "shift"), [(1024, 0), (1030, 0), (1030, 1), (1030, 3)])
def test_minmax_of_special_values_in_whole_blocks_and_at_odd_addresses(device, dtype, m, shift):
    on_host, on_device = twice(MinMaxUInt8(), special_values(m, dtype), shift)
    assert on_host == on_device


def special_values(m, dtype):
    """Rows of `m` elements, each another way to need care."""
    x = normal((11, m), dtype, scale=30)
    x[0, 700] = np.nan
    x[1, 3], x[1, 600] = np.inf, -np.inf
    x[2] = 1.5
    x[3] = 0
    x[3, ::2] *= -1  # -0.0
    x[4] = normal(m, dtype, scale=1e-42 if dtype != "float16" else 1e-7)  # denormal
    x[5] = FINITE[dtype]
    x[6] = np.linspace(-FINITE[dtype], FINITE[dtype], m)  # the range overflows float32
    x[7] = 1e4 + normal(m, "float32").astype(x.dtype)  # far from zero
    x[8] = normal(m, dtype) ** 5  # heavy tails
    x[9, 512:] = FINITE[dtype] / 2 * (1 - np.arange(m - 512) / 1e5)
    x[10] = 1e4 + np.arange(m) % 7 * (0.07 if dtype == "float32" else 8)  # farther
    return x


def doubles(m):
    """Rows of float64 of all their bits, of very different sizes."""
    random = np.random.default_rng(m)
    x = np.ldexp(random.standard_normal((11, m)), random.integers(-60, 0, (11, m)))
    x[:, 33:64] *= 2.0**-1050
    x[:, 128:400] *= 2.0**1020
    x[1, 3], x[4, 600] = np.inf, np.nan
    return x


def default_cases(family):
    """Of minmax, each fourth; of Int4, each fifth of the two dtypes that other tests by default compile, too."""
    cases = cases_of(family)
    if family == "minmax":
        return cases[::4]
    return [case for case in cases if case["dtype"] != "bfloat16"][::5]


GOLDEN_CASES = [
    pytest.param(case, id=f"{family}-{case['name']}", marks=() if case in chosen else pytest.mark.slow)
    for family in FAMILIES
    for chosen in [default_cases(family)]
    for case in cases_of(family)
]


@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_golden_bytes(device, case):
    n, m, dtype = case["n"], case["m"], dtype_named(case["dtype"])
    codec, draws = codec_of(case), draws_of(case)
    data = {part: np.fromfile(GOLDEN / name, np.uint8) for part, name in case["files"].items()}

    if case["kind"] == "codec":
        x, wire = data["input"].view(dtype).reshape(n, m), data["wire"].reshape(n, -1)
        assert data["wire"].tobytes() == codec.encode(up(x), draws=draws).get().tobytes()
        assert data["decoded"].tobytes() == codec.decode(up(wire), up(np.zeros_like(x))).get().tobytes()
    elif case["kind"] == "combine":
        wire = up(data["wire"].reshape(n, -1))
        combined = codec.combine(wire, op=case["op"], count=m, dtype=dtype, draws=draws)
        assert data["combined"].tobytes() == combined.get().tobytes()
    elif case["kind"] == "allreduce":
        x = data["input"].view(dtype).reshape(n, m)

        def body(comm):
            return quantized_allreduce(comm, up(x[comm.rank]), codec=codec, op=case["op"]).get().tobytes()

        assert [data["output"].tobytes()] * n == run_ranks(n, body)
    else:
        counts, x = case["counts"], data["input"].view(dtype).reshape(n, m)

        def reduce_scatter(comm):
            settings = {"codec": codec, "op": case["op"], "counts": counts}
            return quantized_reduce_scatter(comm, up(x[comm.rank]), **settings).get().tobytes()

        def allgather(comm):
            mine = np.split(x[0], np.cumsum(counts)[:-1])[comm.rank]
            return quantized_allgather(comm, up(mine), codec=codec, counts=counts).get().tobytes()

        if case["kind"] == "reduce_scatter":
            assert data["output"].tobytes() == b"".join(run_ranks(n, reduce_scatter))
        else:
            assert [data["output"].tobytes()] * len(counts) == run_ranks(len(counts), allgather)


def wire_of_any_blocks(count=300):
    """All codes of blocks whose ends are arbitrary, across the whole range of exponents."""
    random = np.random.default_rng(0)
    low = (random.standard_normal(count) * 2.0 ** random.integers(-100, 100, count)).astype(np.float32)
    width = np.abs(low) * (2.0 ** random.integers(-14, 14, count)).astype(np.float32)
    wire = np.zeros((count, 32 + 256), np.uint8)
    wire[:, :8].view(np.float32)[...] = np.stack([low, low + width], axis=1)
    wire[:, 32:] = np.arange(256)
    return wire


def decoded_twice(wire):
    out = np.empty((len(wire), 256), np.float32)
    on_device = MinMaxUInt8().decode(up(wire), up(out)).get()
    return MinMaxUInt8().decode(wire, out).tobytes(), on_device.tobytes()


def test_decode_divides_as_exactly_as_the_host(device):
    expected, actual = decoded_twice(wire_of_any_blocks())
    assert expected == actual


EACH_QUOTIENT = """
extern "C" __global__ void quotients(const float* levels, const float* scales, float* out, int64 count) {
    for (int64 i = 0; i < count; ++i) {
        Decoder decoder;
        decoder.scale = scales[i];
        decoder.inverse = 1 / scales[i];
        out[i] = decoder.divide(levels[i]);
    }
}
"""


def quotients_beside_the_middle_of_two_floats(scales):
    """Levels whose quotients by `scales`, 24-bit integers, are nearest to where rounding turns."""
    odd = scales // (scales & -scales)
    for distance in range(1, 9):
        level = distance % odd
        for _ in range(48):  # level * 2**k = distance, modulo `odd`
            level = np.where(level % 2, level + odd, level) // 2
            for sign in (1, -1):
                near = level if sign > 0 else odd - level
                few = (near > 0) & (near <= 2**22 + 255)
                yield near[few], scales[few]


@pytest.mark.slow
def test_one_correction_makes_every_quotient_exact(run):
    random = np.random.default_rng(0)
    scales = np.concatenate(
        [random.integers(2**23, 2**24, 3000), 2**23 + np.arange(500), 2**24 - 1 - np.arange(500)]
    )
    pairs = [*quotients_beside_the_middle_of_two_floats(scales)]
    levels, scales = (np.concatenate(each).astype(np.float32) for each in zip(*pairs, strict=True))
    out = np.empty_like(levels)
    kernels = Kernels(run.source("minmax.cu") + EACH_QUOTIENT, run.compile_options("float32"))
    kernels.launch("quotients", (1,), (1,), [*(x.ctypes.data for x in (levels, scales, out)), len(out)])

    assert len(levels) > 1_000_000
    assert (levels.astype(np.float64) / scales.astype(np.float64)).astype(np.float32).tobytes() == out.tobytes()
    assert (levels * (1 / scales) != out).any()  # without it they are not


def test_few_ctas_do_the_work_of_many(device, run, monkeypatch):
    monkeypatch.setattr(run.launches, "_MOST_CTAS", 2)
    monkeypatch.setattr(run.launches, "_MOST_ROWS", 2)
    x = normal((5, 5000), "float32")
    for codec in (MinMaxUInt8(), MinMaxUInt8(1000), BFloat16()):
        on_host, on_device = twice(codec, x)
        assert on_host == on_device


def test_a_wire_at_an_address_that_a_device_cannot_read_is_refused(device):
    wire = MinMaxUInt8().encode(normal((1, 100), "float32"))
    with pytest.raises(ArrayError, match="wire begins at an address that is not a multiple of 4"):
        MinMaxUInt8().decode(up(wire, 2), up(np.zeros((1, 100), np.float32)))


def test_combine_of_many_chunks(device):
    on_host, on_device = twice(MinMaxUInt8(), normal((33, 520), "bfloat16"))
    assert on_host == on_device


@pytest.mark.slow  # its kernel is compiled for it alone
def test_teams_without_a_segment_decode_nothing(device, run, monkeypatch):
    code = run.source("minmax.cu")
    first, check = "bool plain() const {", 'if (__float_as_uint(scale) == 0xffffffff) fail("nobody computed it");'
    assert first in code
    monkeypatch.setattr(run.launches, "source", lambda _: code.replace(first, f"{first} {check}"))
    on_host, on_device = twice(MinMaxUInt8(64), normal((3, 64 * 5), "float32"))
    assert on_host == on_device


def test_empty_arrays_launch_nothing(device):
    codec = MinMaxUInt8()
    codec.encode(up(np.empty((2, 0), np.float32)))
    Float16().encode(up(np.empty((2, 0), np.float32)))
    kernels.of(up(np.empty(0, np.float32))).add(*[up(np.empty(0, np.float32))] * 3)
    assert device.launches == []


# Casts


@pytest.mark.covering(1)
@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=repr)
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize(("n", "m", "shift"), [(1, 1, 0), (3, 999, 0), (3, 1000, 1), (2, 5000, 0)])
def test_cast(device, codec, dtype, n, m, shift):
    x = normal((n, m), dtype, scale=1e4)
    special = [np.nan, np.inf, -np.inf, -0.0, 65504.0, 65519.0, 65520.0, -7e4, 1e-8, 3.4e38, -3.4e38, 6e-8]
    with np.errstate(over="ignore"):
        x[0, : len(special)] = np.array(special[:m], np.float32).astype(x.dtype)
    on_host, on_device = twice(codec, x, shift)
    assert on_host == on_device


@pytest.mark.slow
def test_cast_of_every_float16_and_bfloat16(device):
    bits = np.arange(2**16, dtype=np.uint16).reshape(1, -1)
    for codec in (Float16(), BFloat16()):
        for dtype in ("float16", "bfloat16"):
            on_host, on_device = twice(codec, bits.view(dtype_named(dtype)))
            assert on_host == on_device


@pytest.mark.parametrize(("codec", "sent"), [(Float16(), "float16"), (BFloat16(), "bfloat16")], ids=repr)
def test_every_nan_on_the_wire_is_decoded_to_the_canonical_one(device, codec, sent):
    bits = np.arange(2**16, dtype=np.uint16)
    nans = bits[np.isnan(bits.view(dtype_named(sent)).astype(np.float32))]
    x = np.zeros((1, nans.size), np.float32)
    wire = codec.encode(x)
    wire[0, : nans.nbytes] = nans.view(np.uint8)
    on_device = codec.decode(up(wire), up(x)).get()
    assert {*on_device.view(np.uint32)[0].tolist()} == {0x7FC00000}
    assert codec.decode(wire, x).tobytes() == on_device.tobytes()


# Sums and element-wise steps


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(each, marks=() if each in ("float32", "bfloat16", "int8", "uint64") else pytest.mark.slow)
        for each in (*FLOATING, *sorted(INTEGERS))
    ],
)
def test_reduce_rows(device, run, dtype):
    for m, shift in ((1, 0), (1001, 0), (400, 1)):
        rows = normal((5, m), "float32", seed=m, scale=1e3).astype(dtype_named(dtype))
        if dtype in FLOATING:
            rows[:2, 0], rows[2, m // 2] = [np.inf, -np.inf], np.nan
        for op in ARITHMETIC_OPS + (BITWISE_OPS if dtype in INTEGERS else ()):
            expected, out = np.empty(m, rows.dtype), up(np.zeros(m, rows.dtype), shift)
            host.reduce_rows(rows, expected, op)
            on_device = up(rows, shift)
            run.reduce_rows(on_device, out, op)
            run.reduce_rows(on_device, on_device[1], op)
            assert same(expected, out.get()), (op, m)
            assert same(expected, on_device[1].get()), (op, m)
            nans = out.get()[expected != expected]
            assert nans.tobytes() == np.full(nans.size, np.nan).astype(nans.dtype).tobytes(), (op, m)


@pytest.mark.covering(1)
@pytest.mark.parametrize("order", ["forward", "backward"])
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", FLOATING)
def test_block_fixed_point(device, run, dtype, shift, order):
    device.order = order
    rows = special_values(1024, dtype) if dtype in CODED else doubles(1024)
    bounds, form = np.array([0, 1, 33, 64, 128, 400, 401, 1024]), host.fixed_format(rows.dtype)
    for bits in (form.bits(1), form.bits(3), form.bits(2**16)):
        found = []
        for module, place in ((host, lambda x: x.copy()), (run, lambda x: up(x, shift))):
            at, fields, total = place(bounds), place(np.zeros(7, form.field)), place(np.zeros(1024, form.total))
            for x in (rows[1], rows[4], rows[8]):
                module.fixed_exponents(place(x), at, fields)
            for x in (rows[1], rows[4], rows[8]):
                module.fixed_add(place(x), at, fields, bits, total, first=x is rows[1])
            means = [place(np.zeros_like(rows[0])) for _ in range(2)]
            for divisor, mean in zip((3, 4), means, strict=True):
                module.fixed_mean(total, at, fields, bits, divisor, mean)
            found.append([x.tobytes() if module is host else x.get().tobytes() for x in (fields, total, *means)])
        assert found[0] == found[1]


STEPS = {
    "scale": (1, {"factor": 0.3}),
    "add": (3, {}),
    "subtract": (3, {}),
    "loss": (2, {"factor": 3, "out": None}),
    "decayed_loss": (2, {"decay": 0.8, "out": None}),
    "midpoint": (3, {}),
    "blend": (2, {"weight": 0.9, "out": None}),
    "ring_difference": (5, {}),
    "move_half": (4, {}),
    "advance": (3, {}),
    "add_scaled": (2, {"factor": -0.7}),
    "sgd_step": (3, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "adam_moments": (4, {"betas": (0.9, 0.999), "weight_decay": 0.01}),
    "adam_step": (3, {"lr": 1e-3, "eps": 1e-8, "corrections": (0.1, 0.001)}),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", FLOATING)
@pytest.mark.parametrize("step", STEPS)
def test_element_wise_steps(device, run, step, dtype):
    arrays, settings = STEPS[step]
    for count, shift in ((1, 0), (1003, 0), (400, 1)):
        values = [np.abs(normal(count, dtype, seed)) for seed in range(arrays + ("out" in settings))]
        values[0][count // 2] = np.inf
        values[-1][:3] = 0
        on_device = [up(x, shift) for x in values]
        for module, operands in ((host, values), (run, on_device)):
            options = settings | ({"out": operands[-1]} if "out" in settings else {})
            getattr(module, step)(*operands[:arrays], **options)
        for expected, actual in zip(values, on_device, strict=True):
            assert same(expected, actual.get()), (count, shift)


def test_steps_without_weight_decay_or_nesterov(device, run):
    for step, options in (
        ("sgd_step", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}),
        ("adam_moments", {"betas": (0.9, 0.999), "weight_decay": 0.0}),
    ):
        values = [normal(100, "float32", seed) for seed in range(STEPS[step][0])]
        values[0][3] = np.inf  # times no weight decay this is no NaN
        on_device = [up(x) for x in values]
        getattr(host, step)(*values, **options)
        getattr(run, step)(*on_device, **options)
        assert all(same(x, y.get()) for x, y in zip(values, on_device, strict=True))


def test_an_output_may_be_an_input(device, run):
    x, y = normal(100, "float16", 1), normal(100, "float16", 2)
    on_device = up(x)
    run.midpoint(on_device, up(y), out=on_device)
    host.midpoint(x, y, out=x)
    assert x.tobytes() == on_device.get().tobytes()


def same(expected, actual):
    """Equal bytes, but for which of the NaNs: that of an operation differs between processors."""
    nan = np.isnan(expected.astype(np.float64)), np.isnan(actual.astype(np.float64))
    return (
        expected.dtype == actual.dtype
        and (nan[0] == nan[1]).all()
        and expected[~nan[0]].tobytes() == actual[~nan[1]].tobytes()
    )


def test_elements_at_odd_addresses_and_arrays_of_both_memories_are_refused_before_a_launch(device, run):
    codec, x = MinMaxUInt8(), np.zeros((1, 8), np.float32)
    wire = up(codec.encode(x))
    odd = up(np.zeros(64, np.uint8))[1:33].view(np.float32).reshape(1, 8)
    for call in (lambda: codec.encode(odd), lambda: codec.decode(wire, odd)):
        with pytest.raises(ArrayError, match="address that is not a multiple of 4"):
            call()
    for call in (lambda: codec.encode(x, wire), lambda: codec.decode(wire, x)):
        with pytest.raises(ArrayError, match="not both on the host, or both on the device"):
            call()


@pytest.mark.parametrize("name", ["minmax", "top_k"])
def test_graphs_captured_on_one_stream_may_run_beside_each_other(device, run, name):
    import cupy

    cuda, graphs, given, wires, expected = cupy.cuda, [], [], [], []
    stream, *launching = (cuda.Stream(non_blocking=True) for _ in range(3))
    codec, settings = MinMaxUInt8(None), (64, 6, 2)
    for seed in range(2):
        x = normal((1, 20_000), "float32", seed, scale=1 + seed)
        if name == "minmax":
            expected.append(codec.encode(x).tobytes())
        else:
            wire = np.empty(host.top_k_layout(x.size, *settings).nbytes, np.uint8)
            host.top_k_encode(x[0], wire, *settings)
            expected.append(wire.tobytes())
        given.append(up(x))
        wires.append(cupy.empty((1, len(expected[-1])), np.uint8))

        def encode(x=given[-1], wire=wires[-1]):
            codec.encode(x, wire) if name == "minmax" else run.top_k_encode(x[0], wire[0], *settings)

        encode()  # allocates and compiles
        cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture(cuda.runtime.streamCaptureModeGlobal)
            encode()
            graphs.append(stream.end_capture())
    ends = []
    for graph, each in zip(graphs, launching, strict=True):
        graph.launch(each)
        ends.append(each.record())
    cuda.runtime.eventQuery(ends[0].ptr)  # the first kernel of the first graph runs
    ends[1].synchronize()
    ends[0].synchronize()
    assert [wire.get().tobytes() for wire in wires] == expected


def test_a_kernel_that_others_could_have_written_is_compiled_again(device, run, tmp_path, monkeypatch):
    monkeypatch.setattr(run.launches.Path, "home", lambda: tmp_path)
    x = up(np.ones(1, np.float32))
    run.add(x, x, out=x)
    (kept,) = (tmp_path / ".cache" / "bagua_comm").iterdir()
    good = kept.read_bytes()
    kept.write_bytes(b"something else")
    kept.chmod(0o666)
    run.launches._module.cache_clear(), run.launches.loaded.cache_clear()
    run.add(x, x, out=x)
    assert x.get().tolist() == [4.0]
    assert kept.read_bytes() == good
    assert kept.stat().st_mode & 0o777 == 0o600


def test_devices_of_several_architectures_each_have_their_own_kernels(device, run):
    import cupy

    device.count, device.architectures = 2, {0: "80", 1: "90"}
    for index in (0, 1, 0):
        with cupy.cuda.Device(index):
            x = up(np.ones(3, np.float32))
            run.add(x, x, out=x)
            assert x.get().tolist() == [2] * 3


def test_compiled_kernels_are_found_on_disk_by_the_next_process(device, run, tmp_path, monkeypatch):
    import cupy

    monkeypatch.setattr(run.launches.Path, "home", lambda: tmp_path)
    run.add(*[up(np.ones(1, np.float32))] * 3)
    run.launches._module.cache_clear(), run.launches.loaded.cache_clear()
    monkeypatch.delattr(cupy.cuda.compiler, "compile_using_nvrtc")
    run.add(*[up(np.ones(1, np.float32))] * 3)

    (kept,) = (tmp_path / ".cache" / "bagua_comm").iterdir()
    assert kept.name.startswith("elementwise-sm_90-")


def test_without_a_home_kernels_are_compiled_all_the_same(device, run, tmp_path, monkeypatch):
    nowhere = tmp_path / "file"
    nowhere.write_text("")
    monkeypatch.setattr(run.launches.Path, "home", lambda: nowhere)
    x = up(np.ones(1, np.float32))
    run.add(x, x, out=x)
    assert x.get().tolist() == [2.0]


def test_the_device_has_every_kernel_of_the_host_with_the_same_arguments(run):
    used = {"reduce_rows", "scale", *STEPS} | {
        f"{codec}_{verb}" for codec in ("cast", "int4", "minmax") for verb in ("encode", "decode", "combine")
    }
    used |= {f"top_k_{verb}" for verb in ("encode", "sum", "subtract")}
    expected = {name: [*inspect.signature(getattr(host, name)).parameters] for name in used}
    actual = {name: [*inspect.signature(getattr(run, name)).parameters] for name in used}
    assert expected == actual


# Kernels that are broken on purpose


def check_warps(run):
    x = normal((7, 1102), "float32", scale=5)
    x[1, 40] = np.nan
    return twice(MinMaxUInt8(), x)


def check_many_rows(run):
    return twice(MinMaxUInt8(), normal((40, 512), "float32"))


def check_special_values(run):
    return twice(MinMaxUInt8(), special_values(1024, "float32"))


def check_odd_addresses(run):
    return twice(MinMaxUInt8(), normal((3, 1024), "float32"), shift=1)


def check_ctas(run):
    run.launches._MOST_CTAS = 2  # several blocks each
    return twice(MinMaxUInt8(1000), normal((2, 9000), "float32"))


def check_segments(run):
    return twice(MinMaxUInt8(None), normal((2, 20000), "float32"))


def check_bfloat16(run):
    return twice(MinMaxUInt8(20), normal((3, 333), "bfloat16"))


def check_quotients(run):
    return decoded_twice(wire_of_any_blocks(3000))


def check_rows(run):
    rows = np.random.default_rng(0).integers(0, 256, (5, 333)).astype(dtype_named("bfloat16"))  # sums half-way
    out = np.empty(333, rows.dtype)
    on_device = up(out)
    run.reduce_rows(up(rows), on_device, "sum")
    host.reduce_rows(rows, out, "sum")
    return out.tobytes(), on_device.get().tobytes()


MUTANTS = {
    "first barrier dropped": ("    __syncthreads();  // `shared`", "    // `shared`", check_ctas),
    "second barrier dropped": ("    __syncthreads();\n    return", "    return", check_ctas),
    "barrier that not all reach": ("    __syncthreads();\n", "    if (lane) __syncthreads();\n", check_ctas),
    "wrong stride": ("slot * int(blockDim.x) +", "slot * warp +", check_ctas),
    "half of the lanes": ("int distance = lanes / 2", "int distance = lanes / 4", check_warps),
    "words at any address": ("whole && fit_words", "whole", check_odd_addresses),
    "one element too many": ("if (i < valid) to[i]", "if (i <= valid) to[i]", check_warps),
    "truncated codes": ("(x * found.scale + shift)", "(truncf(x * found.scale) + shift)", check_warps),
    "truncated codes far from zero": ("rintf(x * found.scale)", "truncf(x * found.scale)", check_special_values),
    "codes of no block far from zero": ("fabsf(found.lower) < 4194048", "true", check_special_values),
    "blocks that are all plain": ("if (surely_plain || plain())", "if (true)", check_special_values),
    "segments that are all whole": ("+ reach <= layout.count", "+ reach <= layout.count + 500", check_warps),
    "padding not cleared": ("clear(at, layout.start + codes", "clear(at, layout.stride", check_warps),
    "another row's header": ("decoders[lane] = own", "decoders[rows - 1 - lane] = own", check_warps),
    "headers too early": ("__syncwarp();  // the decoders", "// the decoders", check_many_rows),
    "a row twice": ("if (r + k + loads < rows) codes", "if (r + k + loads < rows - 1) codes", check_warps),
    "quotients not corrected": (
        "return fmaf(fmaf(-scale",
        "return true ? quotient : fmaf(fmaf(-scale",
        check_quotients,
    ),
    "NaN not seen": ("a < b || is_nan(a) ? a : b", "a < b ? a : b", check_warps),
    "half-way cases up": ("0x7fff + (bits >> 16 & 1)", "0x8000", check_rows),
    "sums not rounded": ("widen(narrow<element>(total[i]))", "total[i]", check_bfloat16),
    "a segment forgotten": ("i < layout.segments;", "i < layout.segments - 1;", check_segments),
    "rows that overlap": ("rows + r * count + at", "rows + r * (count - 1) + at", check_rows),
}


def assert_noticed(device, run, monkeypatch, files, mutant):
    """Fail unless a check tells a broken kernel from the specification, in one order of threads at least."""
    before, after, check = mutant
    whole = run.source
    assert any(before in whole(file) for file in files)
    monkeypatch.setattr(run.launches, "source", lambda file: whole(file).replace(before, after))
    noticed = []
    for device.order in ("forward", "backward"):
        try:
            expected, actual = check(run)
            noticed.append(expected != actual)
        except (RuntimeError, AssertionError):  # launches that would hang, fault, or write out of bounds
            noticed.append(True)
    assert any(noticed)


def mutation_tests(mutants, *files):
    """The tests that each mutant of these files is noticed, and that a whole kernel passes its check."""

    @pytest.mark.slow
    @pytest.mark.parametrize("mutant", mutants)
    def test_a_broken_kernel_is_noticed(device, run, mutant, monkeypatch):
        assert_noticed(device, run, monkeypatch, files, mutants[mutant])

    @pytest.mark.slow
    @pytest.mark.parametrize("check", dict.fromkeys(check for _, _, check in mutants.values()))
    def test_a_whole_kernel_passes(device, run, check):
        for device.order in ("forward", "backward"):
            expected, actual = check(run)
            assert expected == actual

    return test_a_broken_kernel_is_noticed, test_a_whole_kernel_passes


test_a_broken_kernel_is_noticed, test_a_whole_kernel_passes = mutation_tests(MUTANTS, "minmax.cu", "reduce.cu")
