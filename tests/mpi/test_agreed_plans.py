"""Plans of calls between hosts: no comparison before a call, and an error on all ranks if calls differ."""

import functools
import itertools
import time

import numpy as np
import pytest
from mpi4py import MPI
from support.planned_calls import CALLS, make

from bagua_comm import (
    CommError,
    CommMismatch,
    Communicator,
    MinMaxUInt8,
    TopK,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
)
from bagua_comm.transports.mpi import agreement, transport, tuning
from bagua_comm.transports.mpi.agreement import Agreement

AT_ONCE_S = 10.0

CODEC = MinMaxUInt8()
"""Exact for arrays of equal elements."""


@functools.cache
def whole(comm):
    """The mean of all elements, bound once: to bind it is a call."""
    return TopK(chunk=2, keep=2, bits=32).bind(comm)


CODED = {
    "quantized_allreduce": lambda comm, x: quantized_allreduce(comm, x, codec=CODEC)[comm.rank],
    "quantized_reduce_scatter": lambda comm, x: quantized_reduce_scatter(comm, x, codec=CODEC)[0],
    "quantized_allgather": lambda comm, x: quantized_allgather(comm, x[0], codec=CODEC).reshape(x.shape).sum(0),
    "TopK": lambda comm, x: whole(comm)(x)[0] * comm.size,
}
"""The same of float32, in fewer bytes."""

STEP = CALLS | CODED

OTHERS = {
    **STEP,
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


def start(between_hosts):
    """A communicator that has learned no plan."""
    comm = Communicator([between_hosts.dup()])
    whole(comm)
    return comm


def run(comm, names, numbers):
    for name, number in zip(names, numbers, strict=False):
        make(comm, OTHERS[name], number, np.float32 if name in CODED else np.float64)


@pytest.mark.parametrize(("uncompared", "count"), [(1000, 1), (3, 3)])
def test_calls_that_follow_the_plan_are_not_compared(between_hosts, monkeypatch, uncompared, count):
    comparisons, bounds = [], Agreement._bounds
    monkeypatch.setattr(Agreement, "_bounds", lambda *of: comparisons.append(1) or bounds(*of))
    monkeypatch.setattr(tuning, "CALLS_UNCOMPARED", uncompared)
    comm, counts = start(between_hosts), []
    for step in range(5):
        run(comm, STEP, itertools.count(10 * step))
        counts.append(len(comparisons))
    assert comm.host.plan.in_force
    # All but `small` in two steps, then what MPI gathers, and each call after three that were not compared.
    assert np.diff([0, *counts]).tolist() == [9, 9, count, count, count]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("other", OTHERS)
def test_a_rank_that_leaves_the_plan_is_an_error_on_all(between_hosts, other, seed):
    comm, names = start(between_hosts), list(STEP)
    random = np.random.default_rng([seed, list(OTHERS).index(other)])
    position = random.choice([n for n in range(len(names)) if names[n] != other])
    odd = random.choice(comm.size, random.integers(1, comm.size), replace=False)
    run(comm, names * 3, range(2 * len(names) + position))
    assert comm.host.plan.in_force
    start_s = time.monotonic()
    with pytest.raises(CommMismatch, match=r"rank \d called .*rank \d called"):
        run(comm, [other if comm.rank in odd else names[position]], [99])
    assert time.monotonic() - start_s < AT_ONCE_S


def test_no_error_if_all_ranks_leave_the_plan(between_hosts):
    comm = start(between_hosts)
    run(comm, [*STEP] * 3, range(22))
    for other in [*OTHERS][len(STEP) - 1 :]:  # the last of the plan's own, and all that are not in it
        OTHERS[other](comm, np.ones((comm.size, 40_000), np.float32 if other in CODED else np.float64))
        run(comm, [*STEP] * 3, range(24))
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
    comm = start(between_hosts)
    run(comm, [*STEP] * 3, range(30))
    assert comm.host.plan.in_force
    monkeypatch.setattr(agreement, "_LEFT_TAG", -5)  # refused, as any probe is after a rank has died
    with pytest.raises(CommError):
        run(comm, STEP, [99])
