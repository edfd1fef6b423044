"""Collective calls: what the conformance kit does not cover."""

import numpy as np

from bagua_comm.testing import run_ranks


def test_allreduce_avg_is_exact_for_integers():
    results = run_ranks(4, lambda comm: comm.allreduce(np.array([4 * comm.rank, -4, 8]), op="avg"))
    assert [result.tolist() for result in results] == [[6, -4, 8]] * 4


def test_average_of_integers_is_truncated_towards_zero():
    results = run_ranks(2, lambda comm: comm.allreduce(np.array([3, -3]) * comm.rank, op="avg"))
    assert results[0].tolist() == [1, -1]


def test_average_of_small_integers_does_not_overflow():
    results = run_ranks(2, lambda comm: comm.allreduce(np.full(3, 100, np.int8), op="avg"))
    assert results[0].tolist() == [100, 100, 100]


def test_average_of_small_integers_over_more_ranks_than_they_can_count():
    results = run_ranks(130, lambda comm: comm.allreduce(np.full(1, -128, np.int8), op="avg"))
    assert results[0].tolist() == [-128]


def test_float16_is_added_in_float32():
    """In float16, 2048 + 1 + 1 is 2048: its spacing there is 2."""
    results = run_ranks(3, lambda comm: comm.allreduce(np.array([[2048, 1, 1][comm.rank]], np.float16)))
    assert results[0].tolist() == [2050]


def test_only_the_root_gets_the_result_of_gather_and_reduce():
    def body(comm):
        x = np.array([comm.rank])
        return comm.gather(x, root=1), comm.reduce(x, root=1)

    nothing, (gathered, total) = run_ranks(2, body)
    assert nothing == (None, None)
    assert (gathered.tolist(), total.tolist()) == ([[0], [1]], [1])


def test_wire_bytes_are_those_sent_to_other_ranks():
    def body(comm):
        x = np.zeros((4, 256), np.float32)  # 4 chunks of 1 KiB
        comm.allreduce(x)
        comm.allgather(x[0])
        comm.alltoall(x)
        comm.reduce_scatter(x)
        return {name: (c.payload_bytes, c.wire_bytes) for name, c in comm.counters.by_operation.items()}

    assert run_ranks(4, body)[0] == {
        "allreduce": (4096, 6144),
        "allgather": (1024, 3072),
        "alltoall": (4096, 3072),
        "reduce_scatter": (4096, 3072),
    }
