"""The command line on a real Slurm of two nodes: what `run --write` writes, and `doctor`."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import os, socket, sys
import bagua_comm

with bagua_comm.connect(timeout_s=60) as comm:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "MINE")
    mine = [socket.gethostname(), *map(os.environ.get, names), *sys.argv[1:]]
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 40000
    everyone = comm.allgather_object(mine)
    if comm.rank == 0:
        print(*everyone, sep="\\n")
"""


def write(tmp_path, *arguments):
    """The file that `run --write` writes for `PROGRAM` with these arguments."""
    program, job = tmp_path / "program.py", tmp_path / "job.sh"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "bagua_comm", "run", "--write", "slurm", str(job)]
    command += ["--host", "a:2,b:2", "--env", "MINE=its value", str(program), *arguments]
    subprocess.run(command, check=True, timeout=300)
    return job


def test_a_written_script_starts_the_same_job_on_two_nodes(slurm, tmp_path):
    result = slurm.batch(write(tmp_path, "x y", "$z"))
    assert result.returncode == 0, result.stderr + result.stdout + slurm.logs()
    shown = [
        [host, str(rank), "4", "n1", "1", "its value", "x y", "$z"]
        for rank, host in enumerate(["n1", "n1", "n2", "n2"])
    ]
    assert result.stdout == "".join(f"{each}\n" for each in shown)


def test_the_doctor_examines_ranks_that_srun_starts(slurm):
    result = slurm.run("srun", "--mpi=pmix", "-N2", "-n4", sys.executable, "-m", "bagua_comm", "doctor", "--json")
    record = json.loads(result.stdout)
    assert record["hosts"] == {"n1": [0, 1], "n2": [2, 3]}
    problems = [finding["what"] for finding in record["findings"] if finding["level"] == "problem"]
    assert (result.returncode, problems) == (0, []), result.stderr + slurm.logs()


def test_the_doctor_says_why_ranks_do_not_find_each_other(slurm):
    result = slurm.run("srun", "--mpi=none", "-N1", "-n2", sys.executable, "-m", "bagua_comm", "doctor")
    assert result.returncode == 1, result.stderr + slurm.logs()
    assert "doctor: connect: " in result.stderr
    assert "--mpi=pmix" in result.stderr
