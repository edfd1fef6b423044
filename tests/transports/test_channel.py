"""Channels: communicators that differ in their tags. tests/elastic uses them."""

import pytest
from mpi4py import MPI

from bagua_comm import CommError
from bagua_comm.elastic.mpi.channel import FIRST_TAG, KINDS, Channel, ChannelTransport, check_channel
from bagua_comm.elastic.mpi.processes import JobProcesses
from bagua_comm.transports.mpi import tuning

LAST = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - FIRST_TAG + 1) // KINDS - 1
"""The number of the last channel for which MPI has tags."""


def test_a_channel_for_which_mpi_has_no_tags_is_refused():
    check_channel(LAST)
    Channel(MPI.COMM_SELF, [0], LAST)
    with pytest.raises(CommError, match=rf"channel {LAST + 1} needs tags up to"):
        Channel(MPI.COMM_SELF, [0], LAST + 1)


def test_an_error_of_mpi_that_is_no_death_is_raised_as_such(monkeypatch):
    monkeypatch.setattr(tuning, "FAILED_RANKS_S", 0.0)
    monkeypatch.setattr(JobProcesses, "failed", lambda self: set())
    transport = ChannelTransport(JobProcesses(MPI.COMM_SELF), [0], 0, timeout_s=1.0)

    def fail():
        raise MPI.Exception(MPI.ERR_OTHER)

    with pytest.raises(CommError, match="rank 0: MPI failed"):
        transport._endpoint.complete(fail, None)
    transport.close()


def test_where_one_group_has_no_tags_all_ranks_refuse_to_split():
    class First(ChannelTransport):
        """The first of two ranks of different colors; the other one is offered a channel too many."""

        rank, size, members = 0, 2, [0, 1]

        def __init__(self):
            self._processes = self

        def new_channel(self):
            return 7

        def allgather(self, x, out):
            out[0], out[1] = x, [1, 0, LAST + 1]

    with pytest.raises(CommError, match="no more communicators can be made"):
        First().split(0, 0)
