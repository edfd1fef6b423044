"""Collective calls: what the conformance kit does not cover."""

import numpy as np

from bagua_comm.testing import run_ranks


def test_average_of_small_integers_over_more_ranks_than_they_can_count():
    results = run_ranks(130, lambda comm: comm.allreduce(np.full(1, -128, np.int8), op="avg"))
    assert results[0].tolist() == [-128]


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
