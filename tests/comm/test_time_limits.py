"""Time limits of communicators and of single calls."""

import inspect
import math
import signal
import threading
import time

import numpy as np
import pytest
from support.waiting import until

from bagua_comm import ArrayError, CommAborted, CommTimeout, Communicator
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def test_the_limit_of_a_call_holds_for_that_call_only():
    def body(comm):
        start = time.monotonic()
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=r"waited 0\.1 s"):
                comm.recv(np.ones(1), source=1, timeout_s=0.1)
        return time.monotonic() - start, comm.transports[0].limit_s

    waited_s, limit_s = run_ranks(2, body, timeout_s=20)[0]
    assert 0.1 <= waited_s < 10
    assert limit_s == 20


def test_a_call_may_wait_longer_than_the_communicator():
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.4)  # sleeps: longer than the limit of the communicator
        with comm.lane() as lane:
            lane.submit(lane.comm.allreduce, np.ones(2), timeout_s=20)
            lane.wait()
        return comm.allreduce(np.ones(2), timeout_s=20).tolist()

    assert run_ranks(2, body, timeout_s=5) == [[2, 2]] * 2


CALLS_WITH_LIMITS = sorted(
    name
    for name, method in inspect.getmembers(Communicator, inspect.isfunction)
    if "timeout_s" in inspect.signature(method).parameters and not name.startswith("_")
)


def test_every_call_that_moves_data_takes_a_limit():
    assert {"allreduce", "barrier", "broadcast_object", "exchange", "recv", "scatter"} <= set(CALLS_WITH_LIMITS)
    assert len(CALLS_WITH_LIMITS) == 30


def test_a_new_limit_of_a_communicator_holds_for_its_calls_lanes_and_groups():
    def body(comm):
        nodes = comm.by_node()
        comm.timeout_s = 0.2
        assert nodes.intra.timeout_s == comm.dup().timeout_s == 0.2
        short, long = comm.lane(), comm.lane()
        long.comm.timeout_s = 20
        if comm.rank == 1:
            time.sleep(0.5)  # sleeps: longer than the limit of the communicator
        long.submit(long.comm.barrier).result()
        if comm.rank == 0:
            for call in (lambda: short.submit(short.comm.recv, np.ones(1), source=1).result(), short.wait):
                with pytest.raises(CommTimeout, match=r"waited 0\.2 s"):
                    call()
            with pytest.raises(CommTimeout, match=r"waited 0\.2 s"):
                comm.recv(np.ones(1), source=1)
        long.close()
        short.abort()

    run_ranks(2, body, timeout_s=30)


def test_a_call_without_a_limit_ends_when_another_rank_fails():
    """For every call of the communicator, or for one call."""

    def body(comm):
        mine = {} if comm.rank == 0 else {"timeout_s": math.inf}
        assert comm.allreduce(np.ones(2), **mine).tolist() == [3, 3]
        if comm.rank == 2:
            until(lambda: len(waiting) == 2)
            comm.abort()
            return
        waiting.append(comm.rank)
        with pytest.raises(CommAborted, match="rank 2 aborted"):
            comm.recv(np.ones(1), source=2, **mine)

    waiting = []
    run_ranks(3, body, timeout_s=math.inf)


def test_ctrl_c_ends_a_call_without_a_limit():
    comm = Communicator([LocalTransport()])

    def interrupt():
        until(lambda: not comm.guard.is_free)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    sender = threading.Thread(target=interrupt)
    sender.start()
    with pytest.raises(KeyboardInterrupt):
        comm.recv(np.ones(1), source=0, timeout_s=math.inf)
    sender.join()
    comm.send(np.zeros(1), dest=0)
    assert comm.recv(np.ones(1), source=0) == 0  # the call that was interrupted has not taken it


def test_no_limit_is_kept_as_thirty_years():
    comm = Communicator([LocalTransport(timeout_s=math.inf)])
    assert comm.timeout_s == 1e9
    comm.timeout_s = 3
    comm.timeout_s = math.inf
    with comm.lane() as lane:
        assert lane.submit(lane.comm.allreduce, np.ones(1), timeout_s=math.inf).result()[0] == 1
        assert lane.comm.timeout_s == comm.timeout_s == 1e9


@pytest.mark.parametrize("timeout_s", [0, "soon", None])
def test_a_communicator_refuses_a_wrong_limit(timeout_s):
    comm = Communicator([LocalTransport(timeout_s=7)])
    with pytest.raises(ArrayError, match=r"Communicator: timeout_s is .*, expected seconds, .* or math\.inf"):
        comm.timeout_s = timeout_s
    assert comm.timeout_s == 7
