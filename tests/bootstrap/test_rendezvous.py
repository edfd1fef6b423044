"""`connect` names the missing ranks."""

import re

import pytest
from support.launch import run_timed

SOON_S = 55
"""Less than the 60 s for which ranks would wait, or sleep."""


def reason(result):
    """The one line in which `connect` gave up."""
    (line,) = [line for line in result.stderr.splitlines() if "connect: rank" in line]
    return line


@pytest.mark.slow
def test_connect_names_the_ranks_that_are_stopped_or_have_ended(tmp_path):
    result, seconds = run_timed(
        tmp_path,
        4,
        """
        import os, signal, sys, time
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:
            sys.exit(0)
        time.sleep(0.5)  # mpirun sees that rank 2 ends, where others have begun to start MPI
        import bagua_comm
        bagua_comm.connect(timeout_s=2)
        """,
        timeout_s=80,
    )
    assert result.returncode == 1
    message = reason(result)
    assert re.search(r"connect: rank [03] of 4 on .* waited \d+ s for the other ranks: ", message)
    assert re.search(r"rank 1 \(process \d+\) is stopped", message)
    assert "rank 2 ended without calling connect" in message
    assert seconds < SOON_S


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow) for first in ("pass", "from mpi4py import MPI")],
    ids=["", "MPI already runs"],
)
def test_connect_names_a_rank_that_runs_but_does_not_connect(tmp_path, first):
    result, seconds = run_timed(
        tmp_path,
        2,
        f"""
        import bagua_comm, os, time
        {first}
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            time.sleep(60)
        bagua_comm.connect(timeout_s=1)
        """,
        timeout_s=80,
    )
    assert result.returncode == 1
    assert re.search(r"connect: rank 1 of 2 .*rank 0 \(process \d+\) runs, but has not called", reason(result))
    assert "Traceback" not in result.stderr
    assert seconds < SOON_S


@pytest.mark.slow
def test_connect_names_a_rank_that_died_while_mpi_started(tmp_path):
    """MPI starts on the others. (A rank that is killed inside of MPI_Init may end them by MPI's own abort.)"""
    result, seconds = run_timed(
        tmp_path,
        3,
        """
        import bagua_comm, os, signal, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        bagua_comm.connect(timeout_s=2)
        """,
        flags=["--ulfm"],  # without it mpirun ends the others at once
        timeout_s=80,
    )
    assert result.returncode == 1
    assert re.search(r"rank 1 (\(process \d+\) has ended|ended without)", reason(result))
    assert seconds < SOON_S
