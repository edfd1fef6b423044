"""Plans of calls between hosts: no comparison before a call, and an error on all ranks if calls differ."""

import itertools
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.planned_calls import CALLS, make

from bagua_comm import CommError, CommMismatch, Communicator
from bagua_comm.transports.mpi import agreement, transport, tuning
from bagua_comm.transports.mpi.agreement import Agreement

AT_ONCE_S = 10.0

OTHERS = {
    **CALLS,
    "another size": lambda comm, x: comm.allreduce(x[:, 1:]),
    "broadcast": lambda comm, x: comm.broadcast(x, root=0),
    "gather": lambda comm, x: comm.gather(x[0], root=0),
    "gather with counts": lambda comm, x: comm.gather(x[0], root=0, counts=[x[0].size] * comm.size),
    "object": lambda comm, x: comm.allgather_object("x" * 5000),
    "split": lambda comm, x: comm.split(0),
}


__test__ = MPI.COMM_WORLD.size > 1  # one rank has nobody to agree with


@pytest.fixture(scope="module")
def between_hosts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "open_window", lambda *_: None)
        yield transport.MPITransport(MPI.COMM_WORLD, timeout_s=60)


def run(comm, names, numbers):
    for name, number in zip(names, numbers, strict=False):
        make(comm, OTHERS[name], number)


@pytest.mark.parametrize(("uncompared", "count"), [(1000, 1), (3, 2)])
def test_calls_that_follow_the_plan_are_not_compared(between_hosts, monkeypatch, uncompared, count):
    comparisons, bounds = [], Agreement._bounds
    monkeypatch.setattr(Agreement, "_bounds", lambda *of: comparisons.append(1) or bounds(*of))
    monkeypatch.setattr(tuning, "CALLS_UNCOMPARED", uncompared)
    comm, counts = Communicator([between_hosts.dup()]), []
    for step in range(5):
        run(comm, CALLS, itertools.count(10 * step))
        counts.append(len(comparisons))
    assert comm.host.plan.in_force
    # All but `small` in two steps, then what MPI gathers, and one call after three that were not compared.
    assert np.diff([0, *counts]).tolist() == [5, 5, count, count, count]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("other", OTHERS)
def test_a_rank_that_leaves_the_plan_is_an_error_on_all(between_hosts, other, seed):
    comm, names = Communicator([between_hosts.dup()]), list(CALLS)
    random = np.random.default_rng([seed, list(OTHERS).index(other)])
    position = random.choice([n for n in range(len(names)) if names[n] != other])
    odd = random.choice(comm.size, random.integers(1, comm.size), replace=False)
    run(comm, names * 3, range(12 + position))
    assert comm.host.plan.in_force
    start_s = time.monotonic()
    with pytest.raises(CommMismatch, match=r"rank \d called .*rank \d called"):
        run(comm, [other if comm.rank in odd else names[position]], [99])
    assert time.monotonic() - start_s < AT_ONCE_S


def test_no_error_if_all_ranks_leave_the_plan(between_hosts):
    comm = Communicator([between_hosts.dup()])
    run(comm, [*CALLS] * 3, range(14))
    for other in [*OTHERS][len(CALLS) - 1 :]:  # the last of the plan's own, and all that are not in it
        x = np.full((comm.size, 40_000), 1.0)
        OTHERS[other](comm, x)
        run(comm, [*CALLS] * 3, range(16))
        assert comm.host.plan.in_force


def test_notices_do_not_accumulate_if_no_call_looks_for_them(between_hosts):
    """All ranks leave each plan before a call follows it, so that none goes uncompared."""
    transport = between_hosts.dup()
    comm = Communicator([transport])
    for count in range(20):
        for _ in range(2):
            comm.allreduce(np.ones(40_000 + count))
        assert transport.plan.in_force
    mpi, unread = transport._endpoint.comm, 0
    while mpi.Iprobe(tag=agreement._LEFT_TAG):
        mpi.Recv(np.zeros(1, np.int64), tag=agreement._LEFT_TAG)
        unread += 1
    assert unread <= 2 * (comm.size - 1)


def test_an_error_of_mpi_as_a_rank_looks_for_notices_is_one_of_this_library(between_hosts, monkeypatch):
    comm = Communicator([between_hosts.dup()])
    run(comm, [*CALLS] * 3, range(18))
    assert comm.host.plan.in_force
    monkeypatch.setattr(agreement, "_LEFT_TAG", -5)  # refused, as any probe is after a rank has died
    with pytest.raises(CommError):
        run(comm, CALLS, [99])
