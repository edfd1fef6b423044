"""Tests in tests/mpi run under mpirun only; tests/test_mpirun.py starts them."""

from pathlib import Path

MPI_TESTS = Path(__file__).parent / "mpi"


def pytest_ignore_collect(collection_path, config):
    if collection_path == MPI_TESTS and not config.getoption("--with-mpi"):
        return True
    return None
