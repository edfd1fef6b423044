"""Starts the tests of tests/mpi under mpirun, so that one plain pytest run passes everything."""

from pathlib import Path

import pytest
from launch import run_python

MPI_TESTS = Path(__file__).parent / "mpi"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_mpi_suite(ranks):
    files = sorted(MPI_TESTS.glob("test_*.py"))
    if ranks not in (2, 4):
        # Importing PyTorch eight times takes longer than everything else together.
        files = [file for file in files if "import torch\n" not in file.read_text()]

    result = run_python(
        ranks, "-m", "pytest", "--with-mpi", "-q", "-x", "-p", "no:cacheprovider", *files, timeout_s=280
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" passed") == ranks
    assert " skipped" not in result.stdout
