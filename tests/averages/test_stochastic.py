"""Codecs that round stochastically: which random numbers a call draws."""

from dataclasses import dataclass

import numpy as np
import pytest

from bagua_comm import (
    CommMismatch,
    Engine,
    GradientAllReduce,
    Int4,
    Plan,
    Point,
    Quantized,
    TensorSpec,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from bagua_comm.codecs import Codec
from bagua_comm.testing import check_codec, run_ranks
from bagua_comm.transports.local import LocalTransport

CODEC = Int4(rounding="stochastic")
X = np.random.default_rng(0).standard_normal(3000).astype(np.float32)


def allreduced(comm, x=X, codec=CODEC):
    return quantized_allreduce(comm, x, codec=codec, op="avg")


def test_each_call_draws_other_numbers_and_a_rerun_the_same():
    def body(comm):
        return [allreduced(comm), allreduced(comm)]

    first, again = run_ranks(2, body), run_ranks(2, body)
    for mine, repeated in zip(first, again, strict=True):
        assert [x.tobytes() for x in mine] == [x.tobytes() for x in repeated]
        assert mine[0].tobytes() != mine[1].tobytes()
    assert first[0][0].tobytes() == first[1][0].tobytes(), "ranks have different results"


def test_ranks_draw_independent_numbers():
    ranks, calls = 4, 8

    def body(comm):
        return quantized_reduce_scatter(comm, X, codec=CODEC, op="avg") - np.split(X, ranks)[comm.rank]

    def gathered(comm):
        return [quantized_allgather(comm, X[:32], codec=CODEC) - X[:32] for _ in range(calls)]

    errors = np.concatenate([np.ravel(x) for x in run_ranks(ranks, gathered)[0]]).reshape(-1, 32)
    alike = np.corrcoef(errors)[np.triu_indices(ranks * calls, 1)]
    assert np.abs(alike).max() < 0.9, "two ranks or calls drew the same numbers"
    assert abs(alike.mean()) < 0.03
    # The error of a mean of four equal arrays is half as large as that of one of them.
    one = np.linalg.norm(CODEC.decode(CODEC.encode(X[None]), np.empty_like(X[None]))[0] - X)
    mean = np.linalg.norm(np.concatenate(run_ranks(ranks, body)))
    assert mean == pytest.approx(one / 2, rel=0.1)


def test_the_mean_of_many_calls_is_exact():
    def body(comm):
        return np.mean([allreduced(comm, X[:512]) for _ in range(100)], axis=0) - X[:512]

    error = np.linalg.norm(run_ranks(2, body)[0]) / np.linalg.norm(X[:512])
    assert error < 0.025  # 0.17 for a call: of the mean of two ranks 0.10, and of coding it 0.14


@pytest.mark.parametrize("counts", [None, [0, 1700, 1300]])
def test_pieces_draw_the_numbers_of_the_whole_array(monkeypatch, counts):
    def body(comm):
        mine = quantized_reduce_scatter(comm, X, codec=CODEC, counts=counts)
        return mine, quantized_allgather(comm, mine, codec=CODEC, counts=counts), allreduced(comm)

    whole = run_ranks(3, body)
    monkeypatch.setattr(LocalTransport, "coded_piece_bytes", lambda self, nbytes: 400)
    for mine, other in zip(whole, run_ranks(3, body), strict=True):
        assert [x.tobytes() for x in mine] == [x.tobytes() for x in other]


def test_buckets_and_steps_draw_different_numbers():
    def body(comm):
        specs = [TensorSpec(name, (512,), "float32") for name in "ab"]
        plan = Plan.pack(specs, bucket_bytes=2048)
        means = []
        with Engine(comm, GradientAllReduce(Quantized(CODEC, min_bytes=0)), plan, plan.allocate()) as engine:
            for _ in range(2):
                engine.at(Point.FORWARD)
                for bucket in engine.buckets:
                    bucket.flat[...] = X[:512]
                    engine.ready_bucket(bucket.index)
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)
                means += [bucket.flat.tobytes() for bucket in engine.buckets]
        return means

    assert len(set(run_ranks(2, body)[0])) == 4


def test_seeds_that_differ_between_ranks_are_an_error_on_all():
    def body(comm):
        with pytest.raises(CommMismatch, match="seed=1"):
            allreduced(comm, codec=Int4(rounding="stochastic", seed=comm.rank))

    run_ranks(2, body)


@dataclass(frozen=True)
class Signs(Codec):
    """A codec of one's own: a byte for each element, up or down at random, in units of 8."""

    random_seed: int = 0
    dtypes = frozenset({"float32"})

    def wire_nbytes(self, count, dtype):
        return count

    def _encode(self, chunks, wire, draws):
        with np.errstate(invalid="ignore"):
            up = np.random.default_rng([draws.key, draws.counter]).random(chunks.shape) < chunks / 16 + 0.5
        wire[...] = np.where(np.isfinite(chunks), up, 2)

    def _decode(self, wire, out):
        out[...] = np.array([-8, 8, np.nan])[wire]


def test_a_codec_of_ones_own_gets_random_numbers_too():
    def body(comm):
        return np.mean([allreduced(comm, np.full(400, 2, np.float32), Signs()) for _ in range(10)])

    assert run_ranks(2, body)[0] == pytest.approx(2, abs=0.5)
    check_codec(Int4(rounding="stochastic", seed=2**40), error=1 / 8, exact_sums=False)
