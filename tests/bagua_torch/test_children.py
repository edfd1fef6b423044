"""Forked children of a rank, such as workers of a DataLoader, neither destroy nor use its objects of gloo."""

import gc

import numpy as np
import pytest
from support.children import forked
from support.gloo import run_threads

from bagua_comm import CommError, Communicator


def failed(call, *, closed):
    """The error of rank 0, whose peer is gone; its traceback holds the transport."""

    def body(transport):
        comm = Communicator([transport])
        comm.barrier()
        if comm.rank == 1:
            transport.abort()
            return None
        with pytest.raises(CommError) as caught:
            call(comm)
        if closed:
            comm.close()
        return caught.value

    return run_threads(2, body, timeout_s=20.0, close=False)[0]


def receive(nbytes):
    return lambda comm: comm.recv(np.empty(nbytes, np.uint8), source=1)


def sum_up(count):
    return lambda comm: comm.allreduce(np.ones(count))


@pytest.mark.parametrize(
    ("call", "closed"),
    [(receive(8), False), (sum_up(1 << 18), False), (sum_up(1 << 18), True)],
    ids=["receive, open", "sum, open", "sum, closed"],
)
def test_a_child_that_collects_what_a_failed_call_has_left_does_not_die(call, closed):
    errors = [failed(call, closed=closed)]

    def child():
        errors.clear()
        gc.collect()

    assert forked(child) == 0
