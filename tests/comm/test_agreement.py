"""What ranks compare: calls, sizes, and the arguments of `split`."""

import numpy as np
import pytest

from bagua_comm import CommError, CommMismatch
from bagua_comm.testing import run_ranks


def test_keys_of_64_bits_order_ranks():
    keys = [2**63 - 1, -(2**63), np.int64(2**40), 2**40]

    def body(comm):
        group = comm.split(0, keys[comm.rank])
        return group.allgather_object(comm.rank)

    assert run_ranks(4, body) == [[1, 2, 3, 0]] * 4


def test_arrays_of_different_sizes_raise_on_all_ranks():
    def body(comm):
        with pytest.raises(CommError):
            comm.allreduce(np.zeros(1000 + comm.rank))

    run_ranks(2, body, timeout_s=0.5)


def test_call_check_names_both_calls():
    def body(comm):
        with pytest.raises(CommMismatch, match=r"rank 0 called allreduce\(float64\[2\], op=sum\), but rank 1"):
            comm.allreduce(np.zeros(2), op="sum" if comm.rank == 0 else "max")
        with pytest.raises(CommMismatch, match=r"rank 0 called barrier\(\), but rank 1 called allgather"):
            comm.barrier() if comm.rank == 0 else comm.allgather(np.zeros(2))
        comm.barrier()

    run_ranks(2, body, check=True)
