"""The compiled kernels against kernels.host, byte for byte."""

import sys
import threading
import time
from itertools import cycle, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from bagua_comm import BFloat16, Float16, Int4, MinMaxUInt8, kernels
from bagua_comm.arrays import dtype_named
from bagua_comm.codecs import Draws
from bagua_comm.kernels import compiled, host

pytestmark = pytest.mark.needs("numba")

CODED = ("float32", "float16", "bfloat16")
PLAIN = [MinMaxUInt8(), Float16(), BFloat16(), Int4()]
OTHERS = [
    MinMaxUInt8(1),
    MinMaxUInt8(33),
    MinMaxUInt8(3000),  # longer than a strip
    MinMaxUInt8.bagua(),
    MinMaxUInt8(2**70),
    MinMaxUInt8(64, 1e4),
    MinMaxUInt8(64, 1e30),
    Int4(8, 1),  # blocks that are shorter than a unit of 32
    Int4(16, 4, "stochastic"),
    Int4(128, 64),  # rotations that are longer
    Int4(4096, 4096, "stochastic"),
]
CODECS = [*PLAIN, *OTHERS]


def hostile(dtype, m=5001):
    """(20, m): a row of each kind of numbers that have gone wrong somewhere."""
    random = np.random.default_rng(m)
    x = random.standard_normal((20, m), np.float32)
    x[1] *= 1e-42  # denormal
    x[2, m // 2], x[3, 0], x[4, -1] = np.nan, np.inf, -np.inf
    x[5], x[6], x[7], x[8] = 1.5, -0.0, 3.4e38, -3e38
    x[9] = 0
    x[9, ::2] = -0.0
    x[10] = np.linspace(-3.4e38, 3.4e38, m)  # the range overflows
    x[11], x[12] = np.abs(x[11]), -np.abs(x[12])
    x[13] += 1e4
    x[14] = 1 + x[14] * 1e-7
    x[15] = random.integers(-300, 300, m)
    x[16] = random.integers(0, 2**32, m, np.uint32).view(np.float32)
    x[17] *= 1e37
    x[18] = x[18] ** 9
    x[19] = 65504 + random.integers(0, 32, m)
    with np.errstate(all="ignore"):
        return x.astype(dtype_named(dtype))


def coded(module, codec, x, combined=4):
    """The results of encoding, decoding and combining `combined` rows at a time."""
    with kernels.use("host" if module is host else "compiled"):
        n, m = x.shape
        wire = np.full((n, codec.wire_nbytes(m, x.dtype)), 0xEE, np.uint8)
        results = [codec.encode(x, wire).copy(), codec.decode(wire, np.empty_like(x))]
        for row in range(0, n, combined):
            for op in ("sum", "avg"):
                out, rows = np.full_like(wire[:1], 0xEE), wire[row : row + combined]
                results.append(codec.combine(rows, out, op=op, count=m, dtype=x.dtype))
    return [result.tobytes() for result in results]


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("lengths", [(1, 5000), (7, 64, 30, 4900), (5001,)])
def test_block_fixed_point(dtype, lengths):
    rows, bounds = hostile(dtype), np.cumsum([0, *lengths])
    for first in range(0, 20, 3):
        some = rows[first : first + 3]
        for bits in (31, 24, 15):
            found = []
            for module in (host, compiled):
                fields, total = np.zeros(len(lengths), np.uint8), np.full(5001, -1, np.int32)
                for x in some:
                    module.fixed_exponents(x, bounds, fields)
                for i, x in enumerate(some):
                    module.fixed_add(x, bounds, fields, bits, total, first=i == 0)
                mean = np.zeros_like(x)
                module.fixed_mean(total, bounds, fields, bits, 3, mean)
                found.append([fields.tobytes(), total[: bounds[-1]].tobytes(), mean.tobytes()])
            assert found[0] == found[1], (first, bits)


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000])
@pytest.mark.parametrize("offset", [0, 4])
def test_weighed_blocks_and_their_copies(count, offset):
    random = np.random.default_rng(count)
    data, weights = random.bytes(8 * count + offset), random.integers(0, 1 << 64, (2, 64), np.uint64)
    words = np.frombuffer(data, np.uint64, offset=offset)
    for copied in (False, True):
        found = []
        for module in (host, compiled):
            sums, out = np.zeros(-(-count // 64), np.uint64), np.zeros(count, np.uint64)
            module.checksum_blocks(words, weights, sums, out if copied else None)
            found.append([sums.tolist(), out.tolist()])
        assert found[0] == found[1]
        assert found[0][1] == (words.tolist() if copied else [0] * count)
        (v, w), total = weights.tolist(), 0
        for i, x in enumerate(words.tolist()[:64]):
            total += v[i] * x + w[i] * (x >> 32)
        assert found[0][0][:1] == [total % (1 << 64)] * (count > 0)


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("count", [0, 1, 2048, 5001])
def test_errors_of_encoding(dtype, count):
    rows, before = hostile(dtype), hostile(dtype)[::-1].copy()
    with np.errstate(all="ignore"):
        before[~np.isfinite(before)] = 1
    for x, decoded, residual in zip(rows, np.roll(rows, 1, axis=0), before, strict=True):
        found = []
        for module in (host, compiled):
            out = residual[:count].copy()
            module.decayed_loss(x[:count], decoded[:count], 0.8, out)
            into = x[:count].copy()
            module.loss(into, decoded[:count], 3, out=into)
            apart = np.full(count, np.nan, rows.dtype)
            module.loss(x[:count], decoded[:count], 1, out=apart)
            found.append([out.tobytes(), into.tobytes(), apart.tobytes()])
        assert found[0] == found[1]


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [*product([(64, 16)], CODED), *zip([(4096, 64), (5, 2), (4096, 3000)], CODED, strict=True)],
    ids=str,
)
def test_the_largest_elements(settings, dtype):
    for m in (1, 100, 5001):
        assert sparse(host, settings, hostile(dtype, m)) == sparse(compiled, settings, hostile(dtype, m))


def sparse(module, settings, rows):
    """What encoding, subtracting and adding write, by all numbers of bits."""
    found = []
    for bits in (2, 16, 32):
        left, layout = rows.copy(), host.top_k_layout(rows.shape[1], *settings, bits)
        wires, mean = np.full((len(rows), layout.nbytes), 0xEE, np.uint8), np.empty_like(rows[0])
        for x, wire in zip(left, wires, strict=True):
            module.top_k_encode(x, wire, *settings, bits)
            module.top_k_subtract(x, wire, *settings, bits)
        found += [wires.tobytes(), left.tobytes()]
        for row in range(0, len(rows), 5):
            module.top_k_sum(wires[row : row + 3], mean, *settings, bits, ("sum", "avg", "senders")[row // 5 % 3])
            found.append(mean.tobytes())
    return found


@pytest.mark.parametrize("bits", [2, 16, 32])
@pytest.mark.parametrize("module", [host, compiled])
def test_the_largest_elements_of_wires_that_no_encoder_wrote(module, bits):
    """Nothing is written beyond a chunk, of which the second one has 8 elements, wherever indices point to."""
    settings, random = (64, 16, bits), np.random.default_rng(0)
    wires = random.integers(0, 256, (2, host.top_k_layout(72, *settings).nbytes), np.uint8)
    memory = np.full(72 + 4096, 7, np.float32)
    module.top_k_sum(wires, memory[:72], *settings, "sum")
    module.top_k_subtract(memory[:72], wires[0], *settings)
    assert (memory[72:] == 7).all()


def test_the_largest_elements_at_odd_addresses():
    settings, x = (64, 16, 2), hostile("float32", 200)[0]
    nbytes = host.top_k_layout(200, *settings).nbytes
    aligned, odd = np.empty(nbytes, np.uint8), np.empty(nbytes + 1, np.uint8)[1:]
    outs, left = np.empty((2, 200), np.float32), [x.copy(), x.copy()]
    for wire, out, rest in zip((aligned, odd), outs, left, strict=True):
        compiled.top_k_encode(x, wire, *settings)
        compiled.top_k_sum([wire], out, *settings, "sum")
        compiled.top_k_subtract(rest, wire, *settings)
    assert aligned.tobytes() == odd.tobytes()
    assert outs[0].any()
    assert outs[0].tobytes() == outs[1].tobytes()
    assert left[0].tobytes() == left[1].tobytes()


def test_errors_of_elements_apart_in_memory():
    x, decoded = (row[::2] for row in hostile("float32")[:2])
    outs = [np.zeros(2 * x.size, np.float32)[::2] for _ in range(2)]
    for module, out in zip((host, compiled), outs, strict=True):
        module.loss(x, decoded, 1, out=out)
    assert outs[0].any()
    assert outs[0].tobytes() == outs[1].tobytes()


def test_kernels_of_host_arrays_are_compiled_where_numba_is():
    assert kernels.of(np.empty(1)) is compiled
    assert compiled.add is host.add  # functions that are not compiled


def test_a_choice_of_kernels_holds_in_its_body_and_its_thread():
    x, elsewhere = np.empty(1), []
    with kernels.use("host"):
        thread = threading.Thread(target=lambda: elsewhere.append(kernels.of(x)))
        thread.start()
        thread.join()
        with kernels.use("compiled"):
            assert kernels.of(x) is compiled
        assert kernels.of(x) is host
    assert [kernels.of(x), *elsewhere] == [compiled, compiled]


@pytest.mark.parametrize(
    ("codec", "dtype"), [*product(PLAIN, CODED), *zip(OTHERS, cycle(CODED), strict=False)], ids=str
)
def test_hostile_numbers(codec, dtype):
    for m in (1, 100, 5001):
        x = hostile(dtype, m)
        assert coded(host, codec, x) == coded(compiled, codec, x)


@settings(deadline=None, derandomize=True, max_examples=50)
@given(arrays(np.float32, (2, 40), elements=st.floats(width=32)), st.sampled_from(CODECS), st.sampled_from(CODED))
def test_any_numbers(x, codec, dtype):
    with np.errstate(all="ignore"):
        x = x.astype(dtype_named(dtype))
    assert coded(host, codec, x) == coded(compiled, codec, x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("codec", [Float16(), BFloat16(), MinMaxUInt8(512)], ids=repr)
def test_every_16_bit_float(codec, dtype):
    x = np.arange(2**16, dtype=np.uint16).reshape(1, -1).view(dtype_named(dtype))
    assert coded(host, codec, x) == coded(compiled, codec, x)


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=repr)
def test_rounding_of_float32_half_way_and_beside_it(codec):
    every = np.arange(2**16, dtype=np.uint16).view(dtype_named(codec.wire_dtype))
    bits, places = every.astype(np.float32).view(np.uint32), {"float16": 13, "bfloat16": 16}[codec.wire_dtype]
    bits = np.concatenate([bits + np.uint32(2 ** (places - 1) + step) for step in (-1, 0, 1)])
    x = bits.view(np.float32).reshape(1, -1)
    assert coded(host, codec, x) == coded(compiled, codec, x)


@pytest.mark.parametrize("module", ["host", "compiled"])
@pytest.mark.parametrize("codec", [c for c in CODECS if isinstance(c, (Int4, MinMaxUInt8))], ids=repr)
def test_rows_that_are_apart_are_coded_as_those_that_are_not(codec, module):
    table = hostile("bfloat16", 3000)
    part = table[:, 7:2500]
    alone = part.copy()
    with kernels.use(module):
        steps = codec.steps(part.shape[1], part)
        assert steps.takes_rows_apart
        wire, back = codec.encode(alone), np.zeros_like(table)
        expected = codec.decode(wire, np.empty_like(alone))
        found = np.empty_like(wire)
        if codec.random_seed is None:
            steps.encode(part, found)
            assert found.tobytes() == wire.tobytes()
        else:  # each element draws by its place in the table
            draws = Draws.of(1)
            steps.encode(part, found, draws=draws)
            rows = [
                codec.encode(row[None], draws=draws.after(i * table.shape[1])).tobytes()
                for i, row in enumerate(alone)
            ]
            assert found.tobytes() == b"".join(rows)
        steps.decode(wire, back[:, 7:2500])
        assert back[:, 7:2500].tobytes() == expected.tobytes()
        assert not back[:, :7].any()
        assert not back[:, 2500:].any()


@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_reduce_rows_also_to_one_of_its_rows(dtype, op):
    with np.errstate(all="ignore"):
        rows = (np.random.default_rng(0).standard_normal((5, 5001)) * 1e4).astype(dtype_named(dtype))
    rows[1, :3] = np.inf, -np.inf, 0
    rows[2, :3] = 1, -np.inf, -0.0
    expected = np.empty(rows.shape[1], rows.dtype)
    host.reduce_rows(rows, expected, op)

    for table in (list(rows.copy()), rows):
        for out in (np.empty_like(expected), table[3]):
            compiled.reduce_rows(table, out, op)
            assert expected.tobytes() == out.tobytes()


def test_rows_apart_from_each_other_are_reduced_by_the_kernel_too(monkeypatch):
    monkeypatch.setattr(host, "reduce_rows", None)
    rows = np.arange(12, dtype=np.float16).reshape(3, 4)
    out = np.empty(4, np.float16)
    compiled.reduce_rows([rows[2], rows[0], rows[1]], out, "sum")
    assert out.tolist() == rows.sum(0).tolist()


@pytest.mark.parametrize("module", [host, compiled])
def test_the_nan_of_a_sum_is_the_canonical_one(module):
    for dtype, canonical in (("float16", 0x7E00), ("bfloat16", 0x7FC0)):
        rows = np.array([[np.inf, np.nan], [-np.inf, 1]], dtype_named(dtype))
        out = np.empty(2, rows.dtype)
        module.reduce_rows(rows, out, "sum")
        assert out.view(np.uint16).tolist() == [canonical] * 2


def test_kernels_run_without_the_gil():
    x = np.zeros((4, 2**22), np.float32)  # long calls: one that kept the GIL would be counted once
    codec = MinMaxUInt8()
    wire, done, counted = codec.encode(x), threading.Event(), 0

    def encode():
        for _ in range(20):
            codec.encode(x, wire)
        done.set()

    old = sys.getswitchinterval()
    sys.setswitchinterval(60)  # no thread has to release the GIL
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        while not done.is_set():
            time.sleep(0)  # sleeps: gives the lock away, and waits for it
            counted += 1
        thread.join()
    finally:
        sys.setswitchinterval(old)
    assert counted > 100
