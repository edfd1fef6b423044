"""The clusters that tests in this folder run on."""

import pytest
from support import slurm as slurm_of_two_nodes


@pytest.fixture(scope="session")
def with_slurm():
    """Slurm's programs are installed, or the test is skipped with the reason why they cannot be."""
    try:
        slurm_of_two_nodes.install()
    except slurm_of_two_nodes.NoSlurm as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def slurm(with_slurm):
    """A Slurm of two nodes; see `support.slurm.Cluster`."""
    with slurm_of_two_nodes.start() as cluster:
        yield cluster
