"""Programs that a real Slurm starts, on two emulated nodes."""

import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WHERE = """
import socket
import numpy as np
import bagua_comm

with bagua_comm.connect(timeout_s=60) as comm:
    total = comm.allreduce(np.ones(300_000))
    assert (total == comm.size).all()
    places = comm.allgather_object((socket.gethostname(), comm.node, comm.local_rank, comm.by_node().intra.size))
    if comm.rank == 0:
        print(comm.size, *places)
"""


@pytest.fixture
def where(tmp_path):
    """The path of a program whose rank 0 prints where all ranks are."""
    path = tmp_path / "where.py"
    path.write_text(WHERE)
    return path


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ("-N2 -n2", "2 ('n1', 0, 0, 1) ('n2', 1, 0, 1)\n"),
        ("-N2 -n4", "4 ('n1', 0, 0, 2) ('n1', 0, 1, 2) ('n2', 1, 0, 2) ('n2', 1, 1, 2)\n"),
        ("-N1 -n2", "2 ('n1', 0, 0, 2) ('n1', 0, 1, 2)\n"),
    ],
)
def test_srun_with_pmix_makes_one_world_with_its_nodes(slurm, where, options, places):
    result = slurm.run("srun", "--mpi=pmix", *options.split(), sys.executable, where)
    assert result.returncode == 0, result.stderr + slurm.logs()
    assert result.stdout == places
