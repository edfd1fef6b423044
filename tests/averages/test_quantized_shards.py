"""Quantized reduce-scatter and allgather, over ranks that are threads."""

import inspect
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bagua_comm
from bagua_comm import (
    BFloat16,
    CommMismatch,
    Float16,
    Int4,
    MinMaxUInt8,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.codecs import Codec
from bagua_comm.testing import run_ranks
from bagua_comm.transports.local import LocalTransport

CODECS = [MinMaxUInt8(), MinMaxUInt8(block=5), MinMaxUInt8.bagua(), Float16(), BFloat16(), Int4()]
CASES = [(1, CODECS[0]), (2, CODECS[0]), *((3, codec) for codec in CODECS)]
"""Numbers of ranks, and codecs."""
PIECES = [None, 100]
"""`coded_piece_bytes`: at once, and in pieces."""

examples = settings(deadline=None, derandomize=True, max_examples=25)
counts_of_ranks = st.lists(st.integers(0, 300), min_size=1, max_size=4)


@pytest.fixture(params=PIECES, ids=["at once", "in pieces"])
def pieces(request, monkeypatch):
    monkeypatch.setattr(LocalTransport, "coded_piece_bytes", lambda self, nbytes: request.param)
    return request.param


def normal(count, seed, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(count).astype(dtype_named(dtype))


def decoded(x, codec):
    """What every rank gets of a chunk, encoded on its own."""
    if x.size == 0:
        return x
    return codec.decode(codec.encode(x.reshape(1, -1)), np.empty((1, x.size), x.dtype)).reshape(-1)


def scattered(xs, counts, codec, op):
    """The chunk of each rank: contributions decoded, added in float32 in rank order, rounded once."""
    if len(xs) == 1:
        return [xs[0]]
    results, start = [], 0
    for count in counts:
        rows = [decoded(x[start : start + count], codec) for x in xs]
        total = rows[0].astype(np.float32)
        for row in rows[1:]:
            total = total + row.astype(np.float32)
        if op == "avg":
            total = total / np.float32(len(xs))
        results.append(total.astype(xs[0].dtype))
        start += count
    return results


def assert_same_bytes(expected, actual):
    assert (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
    assert expected.tobytes() == actual.tobytes()


# Values


@pytest.mark.parametrize(("p", "codec"), CASES, ids=str)
def test_reduce_scatter_is_its_steps_in_numpy(pieces, p, codec):
    cases = [(m, op) for m in (0, 1, 7, 600) for op in ("sum", "avg")]
    inputs = [[normal(p * m, seed=10 * m + r) for r in range(p)] for m, _ in cases]

    def body(comm):
        given = zip(inputs, cases, strict=True)
        return [quantized_reduce_scatter(comm, xs[comm.rank], op=op, codec=codec) for xs, (_, op) in given]

    for xs, (m, op), results in zip(inputs, cases, zip(*run_ranks(p, body), strict=True), strict=True):
        for wanted, actual in zip(scattered(xs, [m] * p, codec, op), results, strict=True):
            assert_same_bytes(wanted, actual)


@examples
@given(counts=counts_of_ranks, op=st.sampled_from(["sum", "avg"]), piece=st.sampled_from(PIECES))
def test_reduce_scatter_by_counts_is_its_steps_in_numpy(counts, op, piece):
    p, codec = len(counts), MinMaxUInt8(block=16)
    xs = [normal(sum(counts), seed=r) for r in range(p)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTransport, "coded_piece_bytes", lambda self, nbytes: piece)
        results = run_ranks(
            p, lambda c: quantized_reduce_scatter(c, xs[c.rank], op=op, codec=codec, counts=counts)
        )
    for wanted, actual in zip(scattered(xs, counts, codec, op), results, strict=True):
        assert_same_bytes(wanted, actual)


@pytest.mark.parametrize(("p", "codec"), CASES, ids=str)
def test_allgather_gives_every_rank_the_decoded_chunks_of_all_its_own_too(pieces, p, codec):
    inputs = [[normal(m, seed=10 * m + r) for r in range(p)] for m in (0, 1, 7, 600)]
    for results in run_ranks(p, lambda c: [quantized_allgather(c, xs[c.rank], codec=codec) for xs in inputs]):
        for xs, actual in zip(inputs, results, strict=True):
            assert_same_bytes(np.stack([decoded(x, codec) if p > 1 else x for x in xs]), actual)


@examples
@given(counts=counts_of_ranks, piece=st.sampled_from(PIECES))
def test_allgather_by_counts_is_its_steps_in_numpy(counts, piece):
    p, codec = len(counts), MinMaxUInt8(block=16)
    xs = [normal(count, seed=r) for r, count in enumerate(counts)]
    expected = np.concatenate([decoded(x, codec) if p > 1 else x for x in xs])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalTransport, "coded_piece_bytes", lambda self, nbytes: piece)
        for actual in run_ranks(p, lambda c: quantized_allgather(c, xs[c.rank], codec=codec, counts=counts)):
            assert_same_bytes(expected, actual)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_dtypes_are_added_in_float32(pieces, dtype):
    p, m, codec = 3, 600, MinMaxUInt8()
    xs = [normal(p * m, r, dtype) for r in range(p)]
    results = run_ranks(
        p, lambda c: (quantized_reduce_scatter(c, xs[c.rank], op="avg"), quantized_allgather(c, xs[c.rank]))
    )
    for wanted, (chunk, everything) in zip(scattered(xs, [m] * p, codec, "avg"), results, strict=True):
        assert_same_bytes(wanted, chunk)
        assert_same_bytes(np.stack([decoded(x, codec) for x in xs]), everything)


def test_both_by_hand():
    def body(comm):
        x = np.array([0, 1, 255, 510 * comm.rank], np.float32)
        chunk = quantized_reduce_scatter(comm, x, op="avg")
        return chunk.tolist(), quantized_allgather(comm, chunk).tolist()

    everything = [[0.0, 1.0], [255.0, 255.0]]
    assert run_ranks(2, body) == [([0.0, 1.0], everything), ([255.0, 255.0], everything)]


def test_an_allreduce_is_a_reduce_scatter_and_an_allgather(pieces):
    xs = [normal(4 * 900, r) for r in range(4)]

    def body(comm):
        parts = quantized_allgather(comm, quantized_reduce_scatter(comm, xs[comm.rank]))
        return parts.reshape(-1).tobytes() == quantized_allreduce(comm, xs[comm.rank]).tobytes()

    assert run_ranks(4, body) == [True] * 4


def test_nan_stays_in_its_block_on_all_ranks(pieces):
    def body(comm):
        x = np.ones(4 * 32, np.float32)
        x[40] = np.nan if comm.rank == 1 else 1
        chunk = quantized_reduce_scatter(comm, x, codec=MinMaxUInt8(block=8))
        return np.flatnonzero(np.isnan(quantized_allgather(comm, chunk, codec=MinMaxUInt8(block=8)))).tolist()

    assert run_ranks(4, body) == [list(range(40, 48))] * 4


# Errors of quantization that are carried over


@pytest.mark.parametrize("counts", [None, [0, 700, 20]])
def test_residual_is_the_error_of_the_contribution(pieces, counts):
    p, codec = 3, MinMaxUInt8()
    xs = [normal(720, r) for r in range(p)]
    lengths = counts or [240] * p

    def body(comm):
        residual = np.zeros(720, np.float32)
        first = quantized_reduce_scatter(comm, xs[comm.rank], residual=residual, counts=counts)
        kept = residual.copy()
        second = quantized_reduce_scatter(comm, xs[comm.rank], residual=residual, counts=counts)
        return first, kept, second

    starts = np.cumsum([0, *lengths])
    chunks = [slice(starts[i], starts[i + 1]) for i in range(p)]
    errors = [np.concatenate([x[c] - decoded(x[c], codec) for c in chunks]) for x in xs]
    results = run_ranks(p, body)
    firsts = scattered(xs, lengths, codec, "sum")
    seconds = scattered([x + e for x, e in zip(xs, errors, strict=True)], lengths, codec, "sum")
    for rank, (first, kept, second) in enumerate(results):
        assert_same_bytes(firsts[rank], first)
        assert_same_bytes(errors[rank], kept)
        assert_same_bytes(seconds[rank], second)


@pytest.mark.parametrize("counts", [None, [0, 700, 20]])
def test_differences_from_a_reference_are_sent(pieces, counts):
    p, codec = 3, MinMaxUInt8()
    lengths = counts or [240] * p
    xs = [normal(count, r) for r, count in enumerate(lengths)]
    whole, base = np.concatenate(xs), normal(720, 9)
    starts = np.cumsum([0, *lengths])

    def body(comm):
        shape = (720,) if counts else (p, 240)
        reference = base.copy().reshape(shape)
        apart = quantized_allgather(comm, xs[comm.rank], reference=reference, counts=counts)
        unchanged = reference.tobytes() == base.tobytes()
        quantized_allgather(comm, xs[comm.rank], reference, reference=reference, counts=counts)
        quantized_allgather(comm, xs[comm.rank], reference, reference=reference, counts=counts)
        return apart.reshape(-1), unchanged, reference.reshape(-1)

    def step(base):
        parts = [slice(starts[i], starts[i + 1]) for i in range(p)]
        return np.concatenate([base[s] + decoded(whole[s] - base[s], codec) for s in parts])

    for apart, unchanged, twice in run_ranks(p, body):
        assert_same_bytes(step(base), apart)
        assert unchanged
        assert_same_bytes(step(step(base)), twice)
        assert np.abs(twice - whole).max() < np.abs(apart - whole).max() / 50


# Outputs, counters, checks


def test_outputs_may_lie_in_the_inputs(pieces):
    xs = [normal(3 * 200, r) for r in range(3)]

    def body(comm):
        x, mine = xs[comm.rank].copy(), slice(200 * comm.rank, 200 * (comm.rank + 1))
        chunk = quantized_reduce_scatter(comm, xs[comm.rank])
        same = quantized_reduce_scatter(comm, x, x[mine]).tobytes() == chunk.tobytes() == x[mine].tobytes()
        everything = quantized_allgather(comm, chunk)
        out = np.zeros(600, np.float32)
        out[mine] = chunk
        same &= quantized_allgather(comm, out[mine], out) is out and out.tobytes() == everything.tobytes()
        strided = np.zeros((600, 2), np.float32)[:, 0]
        quantized_allgather(comm, chunk, strided)
        return same and strided.tobytes() == everything.tobytes()

    assert run_ranks(3, body) == [True] * 3


def test_bytes_are_counted_once_for_each_call():
    def body(comm):
        quantized_reduce_scatter(comm, np.ones(4096, np.float32))
        quantized_allgather(comm, np.ones(1024, np.float32))
        scatter, gather = comm.counters["quantized_reduce_scatter"], comm.counters["quantized_allgather"]
        return [(each.calls, each.payload_bytes, each.wire_bytes) for each in (scatter, gather)]

    wire = 3 * MinMaxUInt8().wire_nbytes(1024, np.dtype("f4"))
    assert run_ranks(4, body) == [[(1, 16384, wire), (1, 4096, wire)]] * 4


def test_lanes_run_them():
    xs = [normal(64, r) for r in range(2)]

    def body(comm):
        with comm.lane() as lane:
            found = lane.submit(quantized_reduce_scatter, lane.comm, xs[comm.rank]).result()
            return lane.submit(quantized_allgather, lane.comm, found).result().tobytes()

    def here(comm):
        return quantized_allgather(comm, quantized_reduce_scatter(comm, xs[comm.rank])).tobytes()

    assert run_ranks(2, body) == run_ranks(2, here)


def test_tensors_in_tensors_out():
    torch = pytest.importorskip("torch")

    def body(comm):
        chunk = quantized_reduce_scatter(comm, torch.arange(512.0), op="avg")
        return quantized_allgather(comm, chunk).flatten()

    for found in run_ranks(2, body):
        assert torch.allclose(found, torch.arange(512.0), atol=1)


@pytest.mark.parametrize("check", [False, True])
def test_ranks_with_different_counts_or_codecs_are_told_so(check):
    def by_counts(comm):
        counts = [1, 3] if comm.rank else [3, 1]
        quantized_reduce_scatter(comm, np.ones(4, np.float32), counts=counts)

    def by_codec(comm):
        quantized_allgather(comm, np.ones(4, np.float32), codec=[MinMaxUInt8(), Float16()][comm.rank])

    for body in (by_counts, by_codec) if check else (by_codec,):
        for error in refusals(CommMismatch, body, p=2, check=check):
            assert "quantized_" in error


@dataclass(frozen=True)
class _Once(Codec):
    """A codec without a granule, whose chunks cannot be cut."""

    def wire_nbytes(self, count, dtype):
        return count * 4 + 8

    def _encode(self, chunks, wire):
        wire[:, :8] = 0
        wire[:, 8:] = chunks.view(np.uint8)

    def _decode(self, wire, out):
        out[...] = np.ascontiguousarray(wire[:, 8:]).view(np.float32)


def test_a_codec_of_ones_own_without_a_granule(pieces):
    xs = [normal(6, r) for r in range(3)]
    results = run_ranks(
        3, lambda c: quantized_reduce_scatter(c, xs[c.rank], op="sum", codec=_Once(), counts=[1, 0, 5])
    )
    for wanted, actual in zip(scattered(xs, [1, 0, 5], _Once(), "sum"), results, strict=True):
        assert_same_bytes(wanted, actual)


# Bad input


def refusals(kind, body, p=2, **settings):
    """The message of the error of this class that every rank raises."""

    def caught(comm):
        with pytest.raises(kind) as info:
            body(comm)
        return str(info.value)

    return run_ranks(p, caught, **settings)


def test_every_reduction_adds_unless_it_is_asked_to_average():
    defaults = [
        (function.__qualname__, parameter.default)
        for owner in (bagua_comm, bagua_comm.Communicator)
        for name in dir(owner)
        if inspect.isfunction(function := getattr(owner, name))
        and (parameter := inspect.signature(function).parameters.get("op"))
        and not name.startswith("_")
    ]
    assert len(defaults) > 8
    assert {default for _, default in defaults} == {"sum"}, defaults

    def body(comm):
        x = np.tile(np.array([0, 255], np.float32), comm.size)
        return quantized_reduce_scatter(comm, x).tolist() == comm.reduce_scatter(x).tolist() == [0, 510]

    assert run_ranks(2, body) == [True] * 2
