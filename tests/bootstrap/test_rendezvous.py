"""`connect` names the missing ranks."""

import re

import pytest


def reason(result):
    """The one line in which `connect` gave up."""
    (line,) = [line for line in result.stderr.splitlines() if "connect: rank" in line]
    return line


@pytest.mark.slow
def test_connect_names_the_ranks_that_are_stopped_or_have_ended(ended):
    program = """
        import os, signal, sys, time
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:
            sys.exit(0)
        time.sleep(0.5)  # mpirun sees that rank 2 ends, where others have begun to start MPI
        import bagua_comm
        bagua_comm.connect(timeout_s=2)
        """
    result = ended(4, program, code=1, timeout_s=80)
    message = reason(result)
    assert re.search(r"connect: rank [03] of 4 on .* waited \d+ s for the other ranks: ", message)
    assert re.search(r"rank 1 \(process \d+\) is stopped", message)
    assert "rank 2 ended without calling connect" in message


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow) for first in ("pass", "from mpi4py import MPI")],
    ids=["", "MPI already runs"],
)
def test_connect_names_a_rank_that_runs_but_does_not_connect(ended, first):
    program = f"""
        import bagua_comm, os, time
        {first}
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            time.sleep(60)
        bagua_comm.connect(timeout_s=1)
        """
    result = ended(2, program, code=1, timeout_s=80)
    assert re.search(r"connect: rank 1 of 2 .*rank 0 \(process \d+\) runs, but has not called", reason(result))
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_connect_names_a_rank_that_died_while_mpi_started(ended):
    """MPI starts on the others. (A rank that is killed inside of MPI_Init may end them by MPI's own abort.)"""
    program = """
        import bagua_comm, os, signal, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        bagua_comm.connect(timeout_s=2)
        """
    result = ended(
        3, program, code=1, flags=["--ulfm"], timeout_s=80
    )  # without it mpirun ends the others at once
    assert re.search(r"rank 1 (\(process \d+\) has ended|ended without)", reason(result))
