"""The guard of calls: one thread at a time, in the process of the communicator."""

import os
import threading
import time

import numpy as np
import pytest
from support.children import forked

from bagua_comm import CommError, Communicator, quantized_allreduce
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def test_a_second_thread_on_one_communicator_is_refused():
    tried = threading.Event()

    def body(comm):
        if comm.rank == 1:
            assert tried.wait(20)
            comm.send(np.ones(3), dest=0)
            comm.barrier()
            return
        x = np.ones(3, np.float32)
        thread = threading.Thread(target=comm.recv, args=(np.zeros(3),), kwargs={"source": 1})
        thread.start()
        while comm.guard.is_free:
            time.sleep(0.001)  # sleeps: until the thread is in its call
        for call in (
            comm.barrier,
            lambda: comm.allreduce(x),
            lambda: comm.send(x, dest=1),
            lambda: quantized_allreduce(comm, x),
            comm.dup,
        ):
            with pytest.raises(CommError, match="another thread is in a call of this communicator; give each"):
                call()
        tried.set()
        thread.join()
        comm.barrier()  # the first thread's call has ended, and the communicator is free

    run_ranks(2, body)


def test_a_forked_child_cannot_use_its_parents_communicator():
    comm = Communicator([LocalTransport()])
    parent = os.getpid()

    def child():
        with pytest.raises(CommError, match=f"was forked off process {parent}, rank 0; a child cannot use"):
            comm.allreduce(np.ones(3))
        comm.close()  # leaves the parent's alone

    assert forked(child) == 0
    assert comm.allreduce(np.ones(3)).sum() == 3
