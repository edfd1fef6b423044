"""Tests in tests/mpi run under mpirun only; tests/test_mpirun.py starts them. `device` stands in for a GPU."""

import sys
from pathlib import Path

import pytest
from cuda_on_cpu import fake_cuda, fake_cupy, fake_nccl, machine

MPI_TESTS = Path(__file__).parent / "mpi"
OVER_CUPY = [f"bagua_comm.{name}" for name in ("kernels.device", "transports.nccl", "transports.staged")]
"""Modules that hold on to the CuPy that they were imported with."""


def pytest_ignore_collect(collection_path, config):
    if collection_path == MPI_TESTS and not config.getoption("--with-mpi"):
        return True
    return None


@pytest.fixture(params=machine.POLICIES)
def device(request, monkeypatch):
    """A `Machine` behind `import cupy`, of one device (set `count` for more). Tests run under every policy."""
    modules = {
        "cupy": fake_cupy,
        "cupy.cuda": fake_cuda,
        "cupy.cuda.nccl": fake_nccl,
        "cupy.cuda.runtime": fake_cuda.runtime,
        "cupyx": fake_cupy.cupyx,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    _forget(OVER_CUPY)
    machine.use(machine.Machine(request.param))
    yield machine.running()
    _forget(OVER_CUPY)


def _forget(names):
    """Have modules imported anew when they are next imported."""
    for name in names:
        sys.modules.pop(name, None)
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            vars(sys.modules[parent]).pop(child, None)
