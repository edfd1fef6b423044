"""Small arrays among many ranks: the same bits as by direct exchange, in log2(p) rounds."""

import numpy as np
import pytest
from support.counting import count_ranks

from bagua_comm import CommMismatch, kernels
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport

SIZES = [2, 3, 5, 9, 12, 16]
"""Powers of two, and other numbers, above and below `few_ranks`."""


@pytest.fixture(autouse=True)
def always(monkeypatch):
    """Gather in rounds, among few ranks as well."""
    monkeypatch.setattr(LocalTransport, "few_ranks", 1)


def arrays_of(size, dtype):
    random = np.random.default_rng(size)
    return [(random.normal(size=5) * 10.0 ** random.integers(-3, 4, 5)).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("float16", "avg"), ("int16", "sum"), ("int16", "max")]
)
def test_reductions_have_the_bits_of_rank_order(size, dtype, op):
    xs = arrays_of(size, dtype)
    expected = np.empty_like(xs[0])
    kernels.on_host().reduce_rows(xs, expected, op)

    def body(comm):
        x = xs[comm.rank]
        assert comm.allreduce(x, op=op).tobytes() == expected.tobytes()
        for root in {0, size - 1}:
            total = comm.reduce(x, root=root, op=op)
            assert (total is None) == (comm.rank != root)
            assert total is None or total.tobytes() == expected.tobytes()
        y = x.copy()
        assert comm.allreduce(y, y, op=op).tobytes() == expected.tobytes()

    run_ranks(size, body)


def test_arrays_that_are_sent_at_once_have_the_bits_of_rank_order(monkeypatch):
    monkeypatch.setattr(LocalTransport, "few_ranks", 3)
    monkeypatch.setattr(LocalTransport, "at_once_bytes", 40)
    test_reductions_have_the_bits_of_rank_order(3, "float32", "sum")

    def sent(comm):
        for n in (5, 6):
            comm.allreduce(np.ones(n, np.float32))
            yield comm.counters["allreduce"].wire_bytes

    # 20 bytes to each other rank; then a third of 24 bytes to each, and a third of the sum back.
    assert run_ranks(3, lambda comm: list(sent(comm))) == [[40, 40 + 32]] * 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_scans_have_the_bits_of_rank_order(size, dtype):
    xs = arrays_of(size, dtype)

    def body(comm):
        for count, found in [(comm.rank + 1, comm.scan(xs[comm.rank])), (comm.rank, comm.exscan(xs[comm.rank]))]:
            expected = np.zeros_like(xs[0])
            if count:
                kernels.on_host().reduce_rows(xs[:count], expected, "sum")
                assert found.tobytes() == expected.tobytes()

    run_ranks(size, body)


@pytest.mark.parametrize("size", SIZES)
def test_gathers(size):
    xs = arrays_of(size, "float64")

    def body(comm):
        assert (comm.allgather(xs[comm.rank]) == np.stack(xs)).all()
        table = np.zeros((size, 5))
        table[comm.rank] = xs[comm.rank]
        assert (comm.allgather(table[comm.rank], out=table) == np.stack(xs)).all()
        found = comm.allgather_object("x" * comm.rank)
        assert found == ["x" * rank for rank in range(size)]

    run_ranks(size, body)


@pytest.mark.parametrize("size", [9, 16])
@pytest.mark.parametrize("op", ["min", "max", "band", "bor"])
def test_reductions_in_which_an_array_may_count_twice(size, op):
    xs = [np.random.default_rng(rank).integers(0, 2**40, 3) for rank in range(size)]
    ufunc = {"min": np.minimum, "max": np.maximum, "band": np.bitwise_and, "bor": np.bitwise_or}[op]
    for found in run_ranks(size, lambda comm: comm.allreduce(xs[comm.rank], op=op)):
        assert (found == ufunc.reduce(xs)).all()


@pytest.mark.parametrize("size", [9, 16, 17])
def test_each_round_sends_one_message(size):
    rounds = (size - 1).bit_length()
    x = np.ones(3, np.float32)
    for count in count_ranks(size, lambda comm: comm.allreduce(x)):
        assert count == (rounds, (size - 1) * x.nbytes, rounds)
    for count in count_ranks(size, lambda comm: comm.allreduce(x.astype(np.int32), op="max")):
        assert count == (rounds, rounds * x.nbytes, rounds)


def test_calls_that_differ_are_an_error_on_all_ranks():
    def body(comm):
        with pytest.raises(CommMismatch):
            comm.allreduce(np.ones(2), op="max" if comm.rank == 5 else "sum")

    run_ranks(9, body)
    with pytest.raises(CommMismatch):
        run_ranks(9, lambda comm: comm.allgather(np.ones(3 if comm.rank == 4 else 2)))
