"""Errors of codecs, and the results of decoding bytes that no codec wrote."""

import ml_dtypes
import numpy as np
import pytest

from bagua_comm import ArrayError, BaguaError, BFloat16, Float16, Int4, MinMaxUInt8, UnsupportedError, kernels
from bagua_comm.kernels import host

CODECS = [
    MinMaxUInt8(),
    MinMaxUInt8(block=6),
    MinMaxUInt8(block=2**70),
    MinMaxUInt8.bagua(),
    Float16(),
    BFloat16(),
    Int4(8, 2, "stochastic"),
]
DTYPES = [np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(params=["compiled", "host"])
def on(request, monkeypatch):
    """Kernels of Numba, where it is, and of NumPy."""
    if request.param == "host":
        monkeypatch.setattr(kernels, "on_host", lambda: host)


def assert_raises(error, match, call):
    with pytest.raises(BaguaError) as caught:
        call()
    assert type(caught.value) is error
    assert match in str(caught.value)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_count_that_is_none_is_refused(on, codec):
    """A negative one gave a layout of negative lengths, and Numba's kernels wrote outside of the array."""
    for count in (-1, -(2**40), 2**64, 10**5000, 1.0, True, None, "4", np.int32(-1)):
        calls = [
            lambda wire=wire, count=count: codec.combine(wire, op="sum", count=count, dtype=DTYPES[0])
            for wire in (np.zeros((2, 0), np.uint8), np.zeros((2, 64), np.uint8))
        ]
        for call in (*calls, lambda count=count: codec.wire_nbytes(count, DTYPES[0])):
            assert_raises(ArrayError, "expected a number of elements", call)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_count_of_numpys_is_a_count(codec):
    wire = codec.encode(np.ones((2, 4), np.float32))
    combined = codec.combine(wire, op="sum", count=np.int64(4), dtype="float32")
    assert combined.tobytes() == codec.encode(np.full((1, 4), 2, np.float32)).tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_read_only_out_is_refused_and_stays_as_it_is(on, codec):
    x = np.linspace(0, 1, 26, dtype=np.float32).reshape(2, 13)
    wire = codec.encode(x)
    for call, shape, dtype in (
        (lambda out: codec.encode(x, out), wire.shape, "uint8"),
        (lambda out: codec.decode(wire, out), x.shape, "float32"),
        (lambda out: codec.combine(wire, out, op="avg", count=13, dtype="float32"), (1, wire.shape[1]), "uint8"),
    ):
        out = np.full(shape, 7, dtype)
        out.flags.writeable = False
        assert_raises(ArrayError, "out is read-only", lambda call=call, out=out: call(out))
        assert (out == 7).all()


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_an_out_that_overlaps_an_input_is_refused(codec):
    memory = np.zeros(4096, np.uint8)
    w = codec.wire_nbytes(8, DTYPES[0])
    x, wire = memory[:64].view("float32").reshape(2, 8), memory[: 2 * w].reshape(2, w)
    assert_raises(ArrayError, "out overlaps chunks", lambda: codec.encode(x, wire))
    assert_raises(ArrayError, "out overlaps wire", lambda: codec.decode(wire, x))
    assert_raises(
        ArrayError, "out overlaps wire", lambda: codec.combine(wire, wire[:1], op="sum", count=8, dtype="float32")
    )


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_an_object_that_is_no_array_is_refused(codec):
    x, wire = np.zeros((1, 4), np.float32), codec.encode(np.zeros((1, 4), np.float32))
    for junk in (None, 3, "x", [[1.0]], b"1234", object()):
        calls = [
            lambda junk=junk: codec.encode(junk),
            lambda junk=junk: codec.decode(junk, x),
            lambda junk=junk: codec.decode(wire, junk),
            lambda junk=junk: codec.combine(junk, op="sum", count=4, dtype="float32"),
        ]
        if junk is not None:
            calls += [
                lambda junk=junk: codec.encode(x, junk),
                lambda junk=junk: codec.combine(wire, junk, op="sum", count=4, dtype="float32"),
            ]
        for call in calls:
            assert_raises(UnsupportedError, "expected a NumPy or CuPy array", call)
    for dtype in ("nonsense", object(), None, "float64", ">f4"):
        with pytest.raises(UnsupportedError):
            codec.combine(wire, op="sum", count=4, dtype=dtype)


@pytest.mark.parametrize("codec", [MinMaxUInt8(), BFloat16()])
def test_refused_arguments_are_named(codec):
    x, wire = np.zeros((2, 4), np.float32), np.zeros((2, codec.wire_nbytes(4, DTYPES[0])), np.uint8)
    w = wire.shape[1]

    def combine(out=None, op="sum", count=4):
        return codec.combine(wire, out, op=op, count=count, dtype=np.float32)

    for call, words in (
        (lambda: codec.encode(x[0]), "encode: chunks has shape (4,), expected C-contiguous (chunks, elements)"),
        (lambda: codec.encode(x[:, ::2]), "encode: chunks has shape (2, 2), expected C-contiguous"),
        (lambda: codec.encode(x.T), "encode: chunks has shape (4, 2), expected C-contiguous"),
        (lambda: codec.encode(x, wire[:1]), f"encode: out is uint8(1, {w}), expected C-contiguous uint8(2, {w})"),
        (lambda: codec.encode(x, wire.view(np.int8)), f"encode: out is int8(2, {w}), expected C-contiguous"),
        (lambda: codec.decode(wire[:, 1:], x), f"decode: wire is uint8(2, {w - 1}), expected C-contiguous"),
        (
            lambda: codec.decode(wire, x[:1]),
            f"decode: wire is uint8(2, {w}), expected C-contiguous uint8(1, {w})",
        ),
        (lambda: codec.decode(wire, x[0]), "decode: out has shape (4,), expected C-contiguous"),
        (lambda: combine(op="max"), 'combine: op is \'max\', expected "sum" or "avg"'),
        (lambda: combine(count=400), f"combine: wire is uint8(2, {w}), expected C-contiguous uint8(2, "),
        (lambda: combine(wire), f"combine: out is uint8(2, {w}), expected C-contiguous uint8(1, {w})"),
    ):
        assert_raises(ArrayError, words, call)


@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex64", ">f4"])
@pytest.mark.parametrize("codec", [MinMaxUInt8(block=8), Float16(), BFloat16(), Int4()], ids=repr)
def test_other_dtypes_are_refused(codec, dtype):
    x, wire = np.zeros((2, 4), dtype), np.zeros((2, 64), np.uint8)
    for call, name in (
        (lambda: codec.encode(x), "encode"),
        (lambda: codec.decode(wire, x), "decode"),
        (lambda: codec.combine(wire, op="sum", count=4, dtype=dtype), "combine"),
    ):
        words = f"{name}: {codec!r} cannot code {dtype}, only bfloat16, float16, float32 in native byte order"
        assert_raises(UnsupportedError, words, call)


SETTINGS = [
    *((MinMaxUInt8, {"block": v}, "expected None or an int of at least 1") for v in (0, -1, 1.5, "8", True)),
    *(
        (MinMaxUInt8, {"eps": v}, "expected a finite float32 >= 0")
        for v in (-1e-7, float("inf"), float("nan"), 1e39, "x")
    ),
    *((Int4, {"block": v}, "expected a power of two from 8 to 4096") for v in (4, 48, 8192, 32.0, True)),
    *((Int4, {"rotate": v}, "a power of two from 1, for no rotation, to the block of 32") for v in (64, 0)),
    (Int4, {"rounding": "up"}, 'expected "nearest" or "stochastic"'),
    *((Int4, {"seed": v}, "expected an int from 0 to 2**63 - 1") for v in (-1, 1.0)),
]


@pytest.mark.parametrize(("kind", "settings", "words"), SETTINGS, ids=str)
def test_settings_out_of_range_are_refused(kind, settings, words):
    ((name, value),) = settings.items()
    with pytest.raises(ArrayError) as caught:
        kind(**settings)
    assert str(caught.value).startswith(f"{kind.__name__}: {name} is {value!r}, ")
    assert words in str(caught.value)


def test_draws_that_are_none_are_refused():
    assert_raises(
        ArrayError,
        "Int4: draws is 5, expected None or a Draws",
        lambda: Int4().encode(np.zeros((1, 8), "f4"), draws=5),
    )


def shifted(x, by=1, *, writable=True):
    """A copy of `x` that begins `by` bytes behind where it would."""
    memory = np.zeros(x.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 32 + by
    copy = np.frombuffer(memory, x.dtype, x.size, start).reshape(x.shape)
    copy[...] = x
    copy.flags.writeable = writable
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_arrays_that_begin_at_odd_addresses_give_the_same_bytes(on, codec, dtype):
    x = np.random.default_rng(1).normal(size=(3, 1001)).astype(dtype)
    wire = codec.encode(x)
    decoded = codec.decode(wire, np.empty_like(x))
    combined = codec.combine(wire, op="avg", count=1001, dtype=dtype)
    for a, b in [(0, 1), (1, 0), (2, 3)]:
        assert codec.encode(shifted(x, a, writable=False), shifted(wire * 0, b)).tobytes() == wire.tobytes()
        assert codec.decode(shifted(wire, a, writable=False), shifted(x * 0, b)).tobytes() == decoded.tobytes()
        out = shifted(combined * 0, b)
        assert (
            codec.combine(shifted(wire, a), out, op="avg", count=1001, dtype=dtype).tobytes()
            == combined.tobytes()
        )


def wires(codec, dtype):
    """Bytes from anywhere: random ones, damaged ones, and headers of extreme numbers."""
    rng = np.random.default_rng(0)
    extremes = np.array([0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-38, 3e38, -3e38, 1, 65504, 1e-7], "f4")
    for n, m in ((1, 1), (2, 5), (3, 64), (2, 513), (1, 2050), (2, 0)):
        w = codec.wire_nbytes(m, dtype)
        yield m, rng.integers(0, 256, (n, w), np.uint8)
        honest = codec.encode(rng.normal(size=(n, m)).astype(dtype))
        for _ in range(min(m, 3)):
            honest[rng.integers(n), rng.integers(w)] ^= 1 << rng.integers(8)
        yield m, honest
        with np.errstate(all="ignore"):
            numbers = rng.choice(extremes, (n, w // dtype.itemsize)).astype(dtype)
        yield m, numbers.view(np.uint8).reshape(n, -1)[:, :w].copy()


def guarded(shape, dtype):
    """An array with a kilobyte of 0xA5 on both sides, and the bytes of all of it."""
    nbytes = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(nbytes + 2048, 0xA5, np.uint8)
    return memory[1024 : 1024 + nbytes].view(dtype).reshape(shape), memory


FURTHER = [*(MinMaxUInt8(8, eps) for eps in (1e5, 3e38)), Int4(), Int4(8, 1), Int4(128, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [*CODECS, *FURTHER], ids=repr)
def test_bytes_from_anywhere_decode_to_the_same_with_numpy_and_numba_and_touch_nothing_else(
    monkeypatch, codec, dtype
):
    for m, wire in wires(codec, dtype):
        results = []
        for module in (kernels.on_host(), host):
            with monkeypatch.context() as patch:
                patch.setattr(kernels, "on_host", lambda module=module: module)
                before = wire.copy()
                decoded, around = guarded((len(wire), m), dtype)
                codec.decode(wire, decoded)
                parts = [decoded.tobytes()]
                for op in ("sum", "avg"):
                    combined, beside = guarded((1, wire.shape[1]), np.dtype("uint8"))
                    codec.combine(wire, combined, op=op, count=m, dtype=dtype)
                    parts.append(combined.tobytes())
                    assert (beside[:1024] == 0xA5).all() and (beside[-1024:] == 0xA5).all()  # noqa: PT018
                assert (around[:1024] == 0xA5).all() and (around[-1024:] == 0xA5).all()  # noqa: PT018
                assert wire.tobytes() == before.tobytes()
                results.append(parts)
        assert results[0] == results[1]
