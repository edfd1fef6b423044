"""The clusters that tests in this folder run on."""

import pytest
from support import slurm as slurm_of_two_nodes


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A Slurm of two nodes; see `support.slurm.Cluster`."""
    try:
        slurm_of_two_nodes.install()
    except slurm_of_two_nodes.NoSlurm as exc:
        pytest.skip(str(exc))
    with slurm_of_two_nodes.start(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
