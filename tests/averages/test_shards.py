"""What every average makes of shards: `bind_shards` and `bind_gather`."""

from dataclasses import dataclass

import numpy as np
import pytest

from bagua_comm import (
    ArrayError,
    Average,
    CommMismatch,
    ErrorFeedback,
    Exact,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    TopK,
    quantized_allgather,
    quantized_reduce_scatter,
)
from bagua_comm.testing import run_ranks

CODED = Quantized(MinMaxUInt8(block=32), min_bytes=0)
M = 96


@dataclass(frozen=True)
class Own(Average):
    """An average that defines no more than `bind`."""

    def bind(self, comm, like=None):
        return lambda x: comm.allreduce(x, out=x, op="avg")


def whole(rank, p=3):
    return np.random.default_rng(rank).standard_normal(p * M).astype(np.float32)


AVERAGES = [
    Exact(), CODED, Quantized(), ErrorFeedback(), Hierarchical(CODED), Hierarchical(TopK(64, 64, 32)),
    TopK(64, 64, 32), Reproducible(), Own(),
]  # fmt: skip


@pytest.mark.parametrize("op", ["avg", "sum"])
@pytest.mark.parametrize("average", AVERAGES, ids=repr)
def test_every_average_reduces_shards_and_leaves_the_whole_array_unchanged(average, op):
    def body(comm):
        reduce, x, out = average.bind_shards(comm), whole(comm.rank), np.zeros(M, np.float32)
        for _ in range(2):
            assert reduce(x, out, op) is out
        assert x.tobytes() == whole(comm.rank).tobytes()
        return out

    mean = np.mean([whole(rank) for rank in range(3)], axis=0, dtype=float)
    for rank, found in enumerate(run_ranks(3, body, nodes="aab")):
        wanted = mean[rank * M :][:M] * (3 if op == "sum" else 1)
        np.testing.assert_allclose(found, wanted, atol=0.03 * (3 if op == "sum" else 1))


def test_a_bound_reduction_and_a_gather_have_the_bytes_of_the_calls_each_time_and_in_place():
    def body(comm):
        reduce, gather = CODED.bind_shards(comm), CODED.bind_gather(comm)
        counted = []
        for step in range(3):
            x, codec = whole(comm.rank + 10 * step), CODED.codec
            chunk = quantized_reduce_scatter(comm, x, op="avg", codec=codec)
            everything = quantized_allgather(comm, chunk, codec=codec).tobytes()
            own = slice(comm.rank * M, (comm.rank + 1) * M)
            before = [(each.calls, each.wire_bytes) for each in (comm.counters.total(),)]
            assert reduce(x, np.zeros(M, np.float32), "avg").tobytes() == chunk.tobytes()
            assert reduce(x, x[own], "avg").tobytes() == chunk.tobytes()
            assert gather(chunk, np.zeros(3 * M, np.float32)).tobytes() == everything
            out = np.zeros(3 * M, np.float32)
            out[own] = chunk
            assert gather(out[own], out).tobytes() == everything
            after = [(each.calls, each.wire_bytes) for each in (comm.counters.total(),)]
            counted.append([(a - c, b - d) for (a, b), (c, d) in zip(after, before, strict=True)])
        return counted

    for counted in run_ranks(3, body):
        assert counted[0][0][0] == 4
        assert counted == counted[:1] * 3


def test_the_second_gather_looks_up_what_the_first_has_prepared():
    def body(comm):
        gather, x, out = CODED.bind_gather(comm), np.ones(M, np.float32), np.zeros(3 * M, np.float32)
        gather(x, out)
        prepared = dict(comm.call_cache)
        gather(x, out)
        return len(prepared) > 0 and comm.call_cache == prepared  # calls are equal if they are the same object

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("average", [CODED, Exact(), Hierarchical(CODED)], ids=repr)
def test_later_calls_refuse_what_the_first_would_refuse(average):
    def body(comm):
        reduce, gather = average.bind_shards(comm), average.bind_gather(comm)
        x, out = np.ones(3 * M, np.float32), np.zeros(M, np.float32)
        reduce(x, out, "avg")
        gather(out, x)
        read_only = np.zeros(3 * M, np.float32)
        read_only.flags.writeable = False
        calls = comm.counters.total().calls
        wrong = [
            lambda: reduce(x, np.zeros(M + 1, np.float32), "avg"),
            lambda: reduce(x, np.zeros(M, np.float16), "avg"),
            lambda: gather(np.zeros(M, np.float16), x),
            lambda: gather(np.zeros(M - 1, np.float32), x),
        ]
        if not isinstance(average, Hierarchical):
            at = (comm.rank * M + 8) % (2 * M)
            wrong += [lambda: gather(x[at:][:M], x), lambda: gather(out, read_only)]
        for call in wrong:
            with pytest.raises(ArrayError):
                call()
        return comm.counters.total().calls - calls

    assert run_ranks(3, body) == [0] * 3


def test_each_bound_gather_draws_other_random_numbers():
    def body(comm):
        gather, x = Quantized(Int4(rounding="stochastic"), min_bytes=0).bind_gather(comm), whole(comm.rank, 1)
        return [gather(x, np.zeros(3 * M, np.float32)).tobytes() for _ in range(3)]

    for found in run_ranks(3, body):
        assert len(set(found)) == 3


def test_a_residual_of_shards_has_the_bytes_of_the_calls():
    def body(comm):
        reduce, residual = ErrorFeedback(CODED, decay=0.5).bind_shards(comm), np.zeros(3 * M, np.float32)
        for step in range(3):
            x, out = whole(comm.rank + step), np.zeros(M, np.float32)
            expected = quantized_reduce_scatter(
                comm, x, op="avg", codec=CODED.codec, residual=residual, decay=0.5
            )
            assert reduce(x, out, "avg").tobytes() == expected.tobytes()
            assert reduce.state.residual.tobytes() == residual.tobytes()

    run_ranks(3, body)


@pytest.mark.parametrize("average", [TopK(), Reproducible(), ErrorFeedback(), Own()], ids=repr)
def test_what_only_averages_refuses_to_gather(average):
    def body(comm):
        with pytest.raises(ArrayError, match=r"bind_gather: .* only averages; to gather, expected Exact\(\)"):
            average.bind_gather(comm)

    run_ranks(2, body)


def test_sparse_means_with_error_feedback_refuse_shards():
    def body(comm):
        with pytest.raises(ArrayError, match=r"expected a mean that sends each to its rank, as ErrorFeedback"):
            ErrorFeedback(TopK()).bind_shards(comm)

    run_ranks(2, body)


def test_ranks_that_bind_residuals_of_different_settings_learn_of_it():
    def body(comm):
        with pytest.raises(CommMismatch, match=r"ErrorFeedback\.bind_shards"):
            ErrorFeedback(CODED, decay=0.1 * comm.rank).bind_shards(comm)

    run_ranks(2, body)


def test_shards_of_a_mean_of_whole_arrays_must_fit():
    def body(comm):
        with pytest.raises(ArrayError, match="x has 7 elements of float32, expected 8 of float32, 2 times"):
            Own().bind_shards(comm)(np.ones(7, np.float32), np.ones(4, np.float32), "avg")

    run_ranks(2, body)
