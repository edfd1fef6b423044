"""The clusters that tests in this folder run on."""

import pytest
from support import ssh

from benchmarks.slurm import cluster as slurm_of_two_nodes


@pytest.fixture(scope="session")
def with_slurm():
    """Slurm's programs are installed, or the test is skipped with the reason why they cannot be."""
    try:
        slurm_of_two_nodes.install()
    except slurm_of_two_nodes.NoSlurmError as exc:
        pytest.skip(str(exc))


@pytest.fixture(scope="module")
def slurm(with_slurm, tmp_path_factory):
    """A Slurm of two nodes; see `benchmarks.slurm.cluster.Cluster`."""
    with slurm_of_two_nodes.start(shared=[tmp_path_factory.getbasetemp()]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def pods(tmp_path_factory):
    """Two hosts that ssh reaches, with two slots each; see `support.ssh.workers`."""
    try:
        with ssh.workers(tmp_path_factory.mktemp("pods"), count=2, slots=2) as pods:
            yield pods
    except ssh.NoHosts as exc:
        pytest.skip(str(exc))
