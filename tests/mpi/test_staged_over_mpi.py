"""Device arrays over MPI, by way of host memory. Run by tests/test_mpirun.py."""

import importlib

import numpy as np
import pytest
from mpi4py import MPI

import bagua_comm
from bagua_comm.testing import sample

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
def test_results_are_those_of_host_arrays(comm, device, monkeypatch):
    import cupy

    monkeypatch.setattr(importlib.import_module("bagua_comm.transports.staged"), "PIECE_BYTES", 1 << 14)
    x = sample(comm.rank, (comm.size, 7001), "int64")
    with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, gpu="staged") as on_device:
        assert [transport.name for transport in on_device.transports] == ["mpi", "staged"]
        for call in (
            lambda comm, x: comm.allreduce(x),
            lambda comm, x: comm.reduce(x, root=0, op="max"),
            lambda comm, x: comm.broadcast(x.copy(), root=comm.size - 1),
            lambda comm, x: comm.allgather(x),
            lambda comm, x: comm.alltoall(x),
            lambda comm, x: comm.gather(x, root=0),
            lambda comm, x: comm.sendrecv(
                x, x.copy(), dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size
            ),
        ):
            expected, actual = call(comm, x), call(on_device, cupy.asarray(x))
            if expected is None:
                assert actual is None
            else:
                np.testing.assert_array_equal(actual.get(), expected)
