"""`connect`: which world a process joins, its arguments, and its default communicator."""

import math
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import bagua_comm
from bagua_comm import BootstrapError
from bagua_comm.bootstrap import connection
from bagua_comm.bootstrap.rank_exit import ExitHandler
from bagua_comm.transports import LocalTransport
from bagua_comm.transports.local import Hub


def test_without_mpirun_the_world_is_one_rank():
    with bagua_comm.connect() as comm:
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node) == (0, 1, 0, 1, 0)
        assert comm.transports[0].name == "local"
        assert comm.allreduce(np.arange(3.0)).tolist() == [0, 1, 2]


def test_one_rank_starts_no_mpi():
    code = "import sys, bagua_comm; bagua_comm.connect().close(); print('mpi4py.MPI' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "False\n", result.stderr
    assert result.returncode == 0, result.stderr


def test_default_is_the_last_communicator_of_connect_until_it_is_closed():
    with bagua_comm.connect() as comm:
        assert bagua_comm.default() is comm
    other = bagua_comm.default()
    assert other is not comm
    other.close()


NO_TIMEOUTS = [0, -1, math.nan, -math.inf, 1e10, True, "3", None, 2j]


@pytest.mark.parametrize("timeout_s", NO_TIMEOUTS, ids=str)
@pytest.mark.parametrize("make", [bagua_comm.connect, LocalTransport])
def test_a_timeout_that_is_no_positive_number_of_seconds_is_refused(make, timeout_s):
    with pytest.raises(BootstrapError, match=f"timeout_s is {re.escape(repr(timeout_s))}, expected seconds"):
        make(timeout_s=timeout_s)


@pytest.mark.parametrize(
    "wrong",
    [{"timeout_s": -1}, {"op_order": "none"}, {"alone": True, "comm": 1}, {"comm": 1}, {"record": 1}],
    ids=str,
)
def test_a_wrong_argument_under_mpi_is_one_short_message_of_one_rank(monkeypatch, capsys, wrong):
    handler = ExitHandler()
    monkeypatch.setattr(connection, "handler_of_this_process", lambda: handler)
    monkeypatch.setattr(connection, "under_mpi", lambda: True)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    ended = []
    monkeypatch.setattr(handler.abort, "end_all", lambda code, reason: ended.append(code))
    with pytest.raises(BootstrapError) as caught:
        bagua_comm.connect(**wrong)
    sys.excepthook(caught.type, caught.value, caught.tb)
    first, line, last = capsys.readouterr().err.splitlines()
    assert first.startswith("rank 0 on ")
    assert f": BootstrapError: connect: {next(iter(wrong))}" in first
    assert line.startswith(f"  {__file__}:")
    assert last == "  (BAGUA_TRACEBACK=1 shows the traceback)"
    assert ended == [1]


@pytest.mark.parametrize("timeout_s", [1, 0.5, np.float32(2.5), np.int64(3), 1e9])
def test_any_positive_number_is_a_timeout(timeout_s):
    with bagua_comm.connect(timeout_s=timeout_s) as comm:
        assert comm.timeout_s == timeout_s


def test_a_world_of_one_rank_under_torchrun_needs_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with bagua_comm.connect() as comm:
        assert comm.size == 1


def test_any_transport_can_be_the_world():
    def body(transport):
        with bagua_comm.connect(transport=transport, check=True) as comm:
            return comm.local_rank, comm.local_size, int(comm.allreduce(np.array(1)))

    hub = Hub(2)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(body, [LocalTransport(hub, rank) for rank in range(2)]))
    assert results == [(0, 2, 2), (1, 2, 2)]


@pytest.mark.parametrize(
    ("known", "expected"),
    [({}, ("torchrun-0", 3)), ({1: ("torchrun-9", 0)}, ("torchrun-9", 0))],
)
def test_all_ranks_are_shown_in_one_job_and_those_that_join_in_that_of_the_others(monkeypatch, known, expected):
    """Else a reader would take those that an agent has started again for a later attempt, and hide the others."""
    rank, shown = threading.local(), []
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    monkeypatch.setattr(connection, "torchrun_job", lambda: f"torchrun-{rank.number}")
    monkeypatch.setattr(connection.live, "shown", lambda: known.get(rank.number))
    monkeypatch.setattr(connection.live, "show", lambda job, flight, hosts, attempt: shown.append((job, attempt)))

    def body(transport):
        rank.number = transport.rank
        connection.open_world(transport, [0, 0]).close()

    hub = Hub(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(body, [LocalTransport(hub, rank) for rank in range(2)]))
    assert shown == [expected] * 2


def test_nodes_of_a_given_transport_can_be_labelled():
    with bagua_comm.connect(transport=LocalTransport(), node="here") as comm:
        assert (comm.node, comm.local_rank, comm.local_size) == (0, 0, 1)
        assert bagua_comm.default() is comm


def test_an_order_of_reductions_is_taken_by_every_transport():
    with bagua_comm.connect(transport=LocalTransport(), op_order="any") as comm:
        assert comm.op_order == "any"
        assert comm.dup().op_order == "any"
        assert comm.transports[0].adds_in_rank_order  # threads have no other


def test_ranks_that_give_different_orders_are_named():
    def body(transport):
        order = "any" if transport.rank == 1 else "rank"
        with pytest.raises(BootstrapError, match=r"ranks \[0, 2\] give 'rank'; ranks \[1\] give 'any'"):
            bagua_comm.connect(transport=transport, op_order=order)

    hub = Hub(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(body, [LocalTransport(hub, rank) for rank in range(3)]))


def test_an_order_must_be_one_of_two():
    with pytest.raises(BootstrapError, match="op_order is None, expected one of rank, any"):
        bagua_comm.connect(op_order=None)
