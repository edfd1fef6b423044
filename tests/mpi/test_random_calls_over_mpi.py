"""Random calls over processes: through memory that they share, without it, and with all thresholds tiny."""

import pytest
from mpi4py import MPI
from random_calls import SMALL_SIZES, RandomCalls, shrink_thresholds

import bagua_comm
from bagua_comm.transports.mpi import shared_window as shared_memory

pytestmark = pytest.mark.mpi


def test_random_calls_give_the_results_of_numpy(comm):
    with RandomCalls(comm, seed=comm.size) as calls:
        calls.run(range(50))


@pytest.mark.parametrize("window", [True, False])
def test_random_calls_with_tiny_thresholds(comm, monkeypatch, window):
    if comm.size == 1:
        return  # nothing has a threshold
    shrink_thresholds(monkeypatch.setattr)
    if not window:
        monkeypatch.setattr(shared_memory, "_map", lambda *place: None)
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30) as small:
        assert (small.transports[0]._endpoint.window is not None) == window
        with RandomCalls(small, seed=100 + comm.size, sizes=SMALL_SIZES) as calls:
            calls.run(range(50 * window, 50 * window + 50))
