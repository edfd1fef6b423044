"""Connections to a store, which the transports of a process share."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch.distributed as dist
from support.gloo import run_threads

from bagua_comm import Communicator
from bagua_torch.process_group.store import connections_to


class Counting(dist.PrefixStore):
    """A store that counts its connections."""

    def __init__(self):
        self.memory = dist.HashStore()
        super().__init__("test", self.memory)
        self.connections = 0

    def clone(self):
        self.connections += 1
        return dist.PrefixStore("test", self.memory)


def test_threads_that_wait_have_a_connection_each_which_the_next_ones_use_again():
    store, both = Counting(), threading.Barrier(2)
    found, again = [], []

    def use():
        with connections_to(store).one(store) as connection:
            found.append(connection)
            both.wait(30)

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for _ in range(3):
        with connections_to(store).one(store) as connection:
            again.append(connection)
    assert found[0] is not found[1]
    assert all(connection in found for connection in again)
    assert store.connections == 3  # with the one for requests that do not wait


def test_a_connection_is_used_no_more_after_an_error():
    store, found = Counting(), []

    def fail():
        with connections_to(store).one(store) as connection:
            found.append(connection)
            raise RuntimeError("a rank did not come")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            fail()
    assert found[0] is not found[1]


@pytest.mark.parametrize("make", [Counting, dist.HashStore])
def test_connections_end_with_their_store(make):
    store = make()
    with connections_to(store).one(store):
        pass
    ended = weakref.ref(store)
    del store
    gc.collect()
    assert ended() is None


def test_further_communicators_need_no_further_connection():
    store, counts = Counting(), []

    def body(transport):
        comm = Communicator([transport])
        for _ in range(3):
            comm.barrier()
            if comm.rank == 0:
                counts.append(store.connections)
            comm.barrier()
            part = comm.split(0)
            assert part.allreduce(np.ones(2))[0] == 2
            part.close()

    run_threads(2, body, store=store)
    assert counts[0] <= counts[-1] <= 3  # one of each rank, and the one for requests that do not wait
