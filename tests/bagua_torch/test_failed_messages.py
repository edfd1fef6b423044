"""What a failure over gloo means for the other messages and calls of a rank, and which rank errors name."""

import math
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch.distributed as dist
from support.gloo import run_threads
from support.waiting import until

from bagua_comm import CommAborted, CommMismatch, CommTimeout, Communicator, RankFailed
from bagua_comm.transports.labels import Receive, label
from bagua_torch.backend.start import wait_for_ranks
from bagua_torch.process_group.transport import ProcessGroupTransport, RendezvousInfo
from bagua_torch.process_group.verdicts import Verdict

TIMEOUT_S = 60.0


def complete(ended, limit_s=TIMEOUT_S):
    deadline_s = time.monotonic() + limit_s
    until(lambda: ended(deadline_s))


def send(transport, x, dest):
    complete(transport.begin_labelled([(dest, x, label(0, x.dtype, x.size))], []))


def receive(transport, x, source, limit_s=TIMEOUT_S):
    complete(transport.begin_labelled([], [Receive((source,), x, label(0, x.dtype, x.size))]), limit_s)


@pytest.mark.parametrize("count", [3, 400_000])
def test_messages_between_others_go_on_after_a_rank_has_died(count):
    def body(transport):
        x = np.full(count, transport.rank)
        Communicator([transport]).barrier()
        if transport.rank == 2:
            transport.abort()
            return None
        if transport.rank == 1:
            send(transport, x, 0)
            receive(transport, x, 0)
            return x[-1]
        with pytest.raises(RankFailed) as caught:
            receive(transport, x, 2)
        assert caught.value.ranks == (2,)
        receive(transport, x, 1)
        send(transport, x + 1, 1)
        return None

    assert run_threads(3, body, timeout_s=TIMEOUT_S)[1] == 2


def test_ctrl_c_ends_a_call_without_a_limit_and_the_peer_learns_of_it(monkeypatch):
    """Gloo's own waits go on for their time limit, whatever signal comes."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store, ready = dist.HashStore(), threading.Event()

    def rank(number):
        info = RendezvousInfo(store, "test", number, 2)
        return Communicator([ProcessGroupTransport(timeout_s=math.inf, rendezvous=info)])

    def interrupt():
        comm = rank(1)
        assert ready.wait(30)
        until(lambda: not waiting[0].guard.is_free)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        with pytest.raises(RankFailed, match="rank 1 lost rank 0"):
            comm.recv(np.ones(1), source=0)

    with ThreadPoolExecutor(1) as pool:
        peer = pool.submit(interrupt)
        waiting = [rank(0)]
        ready.set()
        with pytest.raises(KeyboardInterrupt):
            waiting[0].recv(np.ones(1), source=1)
        peer.result(timeout=30)


@pytest.mark.parametrize("count", [3, 400_000])
def test_a_message_of_another_size_fails_alone(count):
    def body(transport):
        comm = Communicator([transport])
        if comm.rank == 1:
            send(transport, np.ones(count), 0)
            send(transport, np.full(count, 2), 0)
        elif comm.rank == 0:
            with pytest.raises(
                CommMismatch, match=rf"expected float64\[1\] from rank 1, which sent float64\[{count}\]"
            ):
                receive(transport, np.ones(1), 1)
            x = np.empty(count, np.int64)
            receive(transport, x, 1)
            assert x[-1] == 2
        return comm.allreduce(np.ones(1))[0]

    assert run_threads(3, body, timeout_s=TIMEOUT_S) == [3, 3, 3]


def test_a_long_message_does_not_end_with_the_limit_of_another_call_in_progress():
    begun = threading.Event()

    def body(transport):
        x = np.full(400_000, 2.0 - transport.rank)
        Communicator([transport]).barrier()
        if transport.rank == 0:
            transport.begin_call("recv", collective=False)
            transport.limit_call(0.1)
            ended = transport.begin_labelled([(1, x, label(0, x.dtype, x.size))], [])
            begun.set()
            complete(ended)
        else:
            assert begun.wait(30)
            time.sleep(1.0)  # sleeps: the limit of the other call passes
            receive(transport, x, 0)
        return x[-1]

    assert run_threads(2, body, timeout_s=TIMEOUT_S) == [2, 2]


def test_a_call_whose_connections_a_message_has_closed_says_why():
    """Gloo closes all connections of a rank when one of its messages is late."""

    def body(transport):
        Communicator([transport]).barrier()
        if transport.rank == 0:
            with pytest.raises(CommTimeout, match=r"rank 0 waited .* for 8 bytes from rank 1"):
                receive(transport, np.ones(1), 1, limit_s=0.2)
        with pytest.raises((CommAborted, CommTimeout)) as caught:
            transport.exchange([], [(1 - transport.rank, np.ones(1))])
        return str(caught.value)

    texts = run_threads(2, body, timeout_s=TIMEOUT_S)
    assert texts[0].endswith("this communicator cannot be used: a call failed earlier (CommTimeout)")
    assert texts[1].startswith("rank 1 lost rank 0, which gave up: rank 0 waited")


def test_the_rank_that_took_the_store_with_it_is_named(monkeypatch):
    def ask(*_):
        raise ConnectionError

    monkeypatch.setattr(Verdict, "_ask", ask)
    closed, done = threading.Event(), threading.Barrier(3)

    def body(transport):
        comm, error = Communicator([transport]), None
        comm.barrier()
        if comm.rank == 0:
            transport.abort()
            closed.set()
        else:
            closed.wait(30)
            with pytest.raises(RankFailed) as caught:
                comm.recv(np.ones(1), source=comm.rank - 1)
            error = caught.value
        done.wait(30)  # until then, no rank closes its transport
        return error

    errors = run_threads(3, body, timeout_s=TIMEOUT_S, server=0)[1:]
    assert [error.ranks for error in errors] == [(0,), (0,)]
    assert "lost rank 1, which gave up: rank 0, whose process serves the store, died or left" in str(errors[1])


def test_some_ranks_know_which_of_them_serves_the_store():
    everyone = RendezvousInfo(None, "world", 2, 4, server=0)
    assert everyone.among([3, 2, 0], "a") == RendezvousInfo(None, "world/a", 1, 3, server=2)
    assert everyone.among([2, 3], "b") == RendezvousInfo(None, "world/b", 0, 2, server=None)


@pytest.mark.parametrize("within", ["the world", "a lane", "a subgroup"])
def test_an_exception_in_a_with_block_ends_the_calls_of_the_others_at_once(within):
    done = threading.Barrier(3)

    def body(transport):
        comm = Communicator([transport])
        lane, everyone = comm.lane(), comm.subgroup([0, 1, 2], "everyone")
        calls = {
            "the world": comm.barrier,
            "a lane": lambda: lane.submit(lane.comm.barrier).result(),
            "a subgroup": everyone.barrier,
        }
        comm.barrier()
        if comm.rank == 1:
            with pytest.raises(ValueError, match="bad sample"), comm:
                raise ValueError("bad sample")
            error = None
        else:
            with pytest.raises(CommAborted) as caught:
                calls[within]()
            error = str(caught.value)
        done.wait(30)  # until then, no rank closes its transport
        return error

    errors = run_threads(3, body, timeout_s=TIMEOUT_S)
    assert "rank 0 lost rank 1, which gave up: rank 1 left: ValueError: bad sample" in errors[0]
    assert "rank 1 left: ValueError: bad sample" in errors[2]


@pytest.mark.parametrize("of_a_group", [False, True])
def test_a_rank_that_dies_while_a_group_connects_is_not_waited_for(of_a_group):
    first = int(of_a_group)  # of the ranks in the group
    done = threading.Barrier(3 + first)

    def body(transport):
        Communicator([transport]).barrier()
        error = None
        if of_a_group:
            transport = transport.split(int(transport.rank > 0), transport.rank)
        if transport.size == 1:
            pass
        elif transport.rank == 2:
            transport._members(0, 2)  # the first part of `split`
            transport.abort()
        else:
            with pytest.raises(RankFailed, match=r"lost rank 2 while ranks \[0, 1, 2\] connected") as caught:
                transport.split(0, transport.rank)
            error = caught.value
        done.wait(30)  # until then, no rank closes its transport
        return error

    errors = run_threads(3 + first, body, timeout_s=TIMEOUT_S)[first : first + 2]
    assert [error.ranks for error in errors] == [(2,), (2,)]


def test_a_new_group_does_not_wait_for_a_dead_rank():
    store = dist.HashStore()

    def body(transport):
        comm = Communicator([transport])
        comm.barrier()
        if comm.rank == 1:
            transport.abort()
            return
        with pytest.raises(RankFailed, match=r"ranks \[1\] to make the group of ranks \[0, 1\]") as caught:
            wait_for_ranks(store, "pair", 0, [0, 1], TIMEOUT_S, comm)
        assert caught.value.ranks == (1,)

    run_threads(2, body, timeout_s=TIMEOUT_S)
