"""The start of a world over MPI, if MPI fails meanwhile."""

import pytest
from mpi4py import MPI

from bagua_comm import CommError, RankFailed
from bagua_comm.transports.mpi import MPITransport, tuning


class Failing:
    """A communicator that cannot be duplicated."""

    def __init__(self, code):
        self._comm, self._code, self.revoked = MPI.COMM_SELF.Dup(), code, False

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def Idup(self):
        raise MPI.Exception(self._code)

    def Revoke(self):
        self.revoked = True


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (MPI.ERR_PROC_FAILED, RankFailed, "rank 0 of 1: another rank noticed that a rank died"),
        (MPI.ERR_OTHER, CommError, "rank 0: MPI failed"),
    ],
)
def test_an_error_of_mpi_is_one_of_this_library_and_a_death_wakes_the_other_ranks(
    monkeypatch, code, error, message
):
    monkeypatch.setattr(tuning, "FAILED_RANKS_S", 0.0)
    comm = Failing(code)
    with pytest.raises(CommError, match=message) as caught:
        MPITransport(comm)
    assert type(caught.value) is error
    assert comm.revoked == (error is RankFailed)
