"""Starts the tests of tests/mpi under mpirun, so that one plain pytest run passes everything."""

import re
from pathlib import Path

import pytest
from support import needs
from support.launch import run_python

MPI_TESTS = Path(__file__).parent / "mpi"


def imports(file, modules):
    """Whether the file imports one of `modules`."""
    return any(re.search(rf"^(import|from) {module}\b", file.read_text(), re.MULTILINE) for module in modules)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "part"),
    [
        (2, "quick"),
        pytest.param(3, "failing", marks=pytest.mark.slow),
        pytest.param(1, "quick", marks=pytest.mark.slow),
        pytest.param(2, "slow", marks=pytest.mark.slow),
        pytest.param(2, "torch", marks=[pytest.mark.slow, pytest.mark.needs("torch")]),
        *(pytest.param(ranks, "working", marks=pytest.mark.slow) for ranks in (3, 4)),
    ],
)
def test_mpi_suite(ranks, part):
    """The part "torch" has the tests that import PyTorch; "failing", those of deaths and time limits."""
    # Importing PyTorch takes longer than everything else together; Transformers, longer than PyTorch.
    heavy, missing = ["transformers", "torch"], []
    if not needs.complete():
        missing += filter(needs.is_missing, needs.PACKAGES)
    files = [file for file in sorted(MPI_TESTS.glob("test_*.py")) if not imports(file, missing)]
    files = [file for file in files if imports(file, heavy) == (part == "torch")]
    failing = MPI_TESTS / "test_failures.py"  # most of the time there is spent waiting
    files = [failing] if part == "failing" else [file for file in files if file != failing]
    plugins = ["--disable-plugin-autoload", "-p", "pytest_mpi", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    which = ["-m", {"quick": "not gpu and not slow", "slow": "not gpu and slow"}.get(part, "not gpu")]

    result = run_python(ranks, "-m", "pytest", *plugins, "--with-mpi", "-q", "-x", *which, *files, timeout_s=280)

    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(" passed") == ranks
    assert " skipped" not in result.stdout
