"""Tests in tests/mpi run under mpirun only; tests/test_mpirun.py starts them. `device` stands in for a GPU."""

from pathlib import Path

import numpy as np
import pytest
from cuda_on_cpu import machine
from cuda_on_cpu.install import installed

from bagua_comm import Float16, MinMaxUInt8

MPI_TESTS = Path(__file__).parent / "mpi"


def pytest_sessionstart():
    """Have the kernels compiled where Numba is: that is once, and longer than a test waits on a busy machine."""
    x = np.zeros((1, 1), np.float32)
    for codec in (MinMaxUInt8(), Float16()):
        codec.decode(codec.combine(codec.encode(x), op="sum", count=1, dtype=x.dtype), x)


def pytest_ignore_collect(collection_path, config):
    if collection_path == MPI_TESTS and not config.getoption("--with-mpi"):
        return True
    return None


@pytest.fixture(params=machine.POLICIES)
def device(request):
    """A `Machine` behind `import cupy`, of one device (set `count` for more). Tests run under every policy."""
    with installed(request.param) as stand_in:
        yield stand_in
