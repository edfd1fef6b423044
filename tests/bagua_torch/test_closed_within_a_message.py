"""A rank that closes its connections while a message is under way, which gloo does not report to its peers."""

import threading
import time

import numpy as np
import pytest
from support.gloo import run_threads

from bagua_comm import CommError, Communicator, RankFailed
from bagua_torch.process_group import waiter

TIMEOUT_S = 60.0
AT_ONCE_S = 15.0
NBYTES = 20 << 20
CLOSE_AFTER_S = 0.1


CALLS = {
    "the sender": lambda comm, x: comm.send(x, dest=0) if comm.rank == 1 else comm.recv(x, source=1),
    "the receiver": lambda comm, x: comm.recv(x, source=0) if comm.rank == 1 else comm.send(x, dest=1),
    "both send": lambda comm, x: comm.alltoall(x, np.empty_like(x)),
    "gloo's own allreduce": lambda comm, x: comm.allreduce(x),
}


def call_until_it_fails(call, *arguments):
    """So that a message is under way when the connections are closed."""
    while True:
        call(*arguments)


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_closes_within_a_long_message_is_reported_at_once(name):
    def body(transport):
        comm, x = Communicator([transport]), np.zeros(NBYTES // 4, np.float32)
        comm.barrier()
        if comm.rank == 1:
            threading.Timer(CLOSE_AFTER_S, transport.abort).start()
        start = time.monotonic()
        with pytest.raises(CommError) as caught:
            call_until_it_fails(CALLS[name], comm, x)
        assert time.monotonic() - start < AT_ONCE_S
        return caught.value

    error = run_threads(2, body, timeout_s=TIMEOUT_S)[0]
    assert isinstance(error, RankFailed)
    assert error.ranks == (1,)
    assert "rank 0 lost rank 1" in str(error)


def test_ranks_that_wait_for_another_rank_than_the_one_that_closed_learn_of_it_and_which_it_was():
    done = threading.Barrier(4)

    def body(transport):
        comm, start = Communicator([transport]), time.monotonic()
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.5)  # sleeps: until ranks 2 and 3 wait for rank 0
            transport.abort()
            error = None
        else:
            if comm.rank == 0:
                time.sleep(1.0)  # sleeps: until the connections to rank 1 are closed
            with pytest.raises(RankFailed) as caught:
                comm.allreduce(np.ones(3))
            error = caught.value
        assert time.monotonic() - start < AT_ONCE_S
        done.wait(TIMEOUT_S)  # until then, no rank closes its transport
        return error

    errors = run_threads(4, body, timeout_s=TIMEOUT_S)
    assert [error.ranks for error in errors if error is not None] == [(1,)] * 3
    assert "rank 2 lost rank" in str(errors[2])
    assert "lost rank 1: it died, left" in str(errors[2])  # found by itself, or by rank 0


class Work:
    """An operation that ends after some time, or never."""

    def __init__(self, seconds, error=None):
        self.seconds, self.error = seconds, error

    def wait(self, timeout):
        time.sleep(min(self.seconds, timeout.total_seconds()))  # sleeps: as an operation takes time
        if self.seconds > timeout.total_seconds():
            raise RuntimeError("timed out")
        if self.error is not None:
            raise self.error


def closed(peer):
    raise RuntimeError(f"the connection to {peer} is closed")


def test_all_operations_are_waited_for():
    start = time.monotonic()
    assert waiter.wait_watched([(1, Work(0.05)), (2, Work(0.1))], start + 10, closed) is None
    assert time.monotonic() - start >= 0.1


def test_the_first_operation_that_fails_is_returned():
    error = RuntimeError("broken")
    works = [(1, Work(0.0)), (2, Work(0.0, error)), (3, Work(5.0))]
    assert waiter.wait_watched(works, time.monotonic() + 10, closed) == (2, error)


def test_an_operation_that_ends_as_its_connection_closes_is_complete():
    works = [(1, Work(waiter.CHECK_S + 0.02))]
    assert waiter.wait_watched(works, time.monotonic() + 10, closed) is None


def test_an_operation_that_never_ends_is_left_when_its_connection_closes():
    peer, error = waiter.wait_watched([(4, Work(3.0))], time.monotonic() + 10, closed)
    assert (peer, str(error)) == (4, "the connection to 4 is closed")


def test_a_closed_connection_is_that_of_the_operation_even_if_it_ends_just_then(monkeypatch):
    def ends_just_then(call, check):
        try:
            check()
        except RuntimeError:
            call()
            raise

    monkeypatch.setattr(waiter, "run_watched", ends_just_then)
    peer, error = waiter.wait_watched([(4, Work(0.0)), (5, Work(0.0))], time.monotonic() + 10, closed)
    assert (peer, str(error)) == (4, "the connection to 4 is closed")
