"""Ranks that mpirun starts by ssh, on hosts as the MPI Operator makes them, by the command of the manifest."""

import json
import statistics
import sys

import pytest
from support.kubernetes import container, manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAM = """
import os, socket, sys
import numpy as np
import bagua_comm

with bagua_comm.connect(timeout_s=60) as comm:
    total = comm.allreduce(np.ones(300_000))
    assert (total == comm.size).all()
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME", "MINE")
    everyone = comm.allgather_object([socket.gethostname(), *map(os.environ.get, names), *sys.argv[1:]])
    if comm.rank == 0:
        print(*everyone, sep="\\n")
"""


def launcher_command(pods, *arguments):
    """The command of the page's manifest, with four ranks, and the Python, hostfile and program of this machine.

    Args:
        arguments: Options of `run`, the program, and its arguments.
    """
    words = container(manifest(), "Launcher")["command"]
    here = {"python": sys.executable, "8": "4", "/etc/mpi/hostfile": str(pods.hostfile)}
    assert words[-1] == "train.py"
    start = [here.get(word, word) for word in words[:-1]]
    return [*start, "--env", f"PYTHONPATH={pods.environment['PYTHONPATH']}", *arguments]


def test_the_launcher_starts_ranks_on_all_workers_with_their_variables(pods, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    given = ["--interface", "eth0", "--links", "2", "--env", "MINE=its, value; $x"]
    result = pods.launch(launcher_command(pods, *given, str(program), "x y"))
    assert result.returncode == 0, result.stderr
    meeting = ["job-worker-0.job.default.svc", "29500"]
    shown = [
        [f"job-worker-{rank // 2}", str(rank), str(rank % 2), *meeting, "eth0", "its, value; $x", "x y"]
        for rank in range(4)
    ]
    assert result.stdout == "".join(f"{each}\n" for each in shown)


def test_the_doctor_examines_both_workers(pods):
    result = pods.launch(launcher_command(pods, "--interface", "eth0", "-m", "bagua_comm", "doctor", "--json"))
    assert result.returncode == 0, result.stderr + result.stdout
    record = json.loads(result.stdout)
    assert record["hosts"] == {"job-worker-0": [0, 1], "job-worker-1": [2, 3]}
    assert [rank["interfaces"]["eth0"]["address"] for rank in record["ranks"][::2]] == ["10.99.0.2", "10.99.0.3"]
    across = [pair["bytes_per_s"] for pair in record["pairs"] if pair["a"] < 2 <= pair["b"]]
    assert len(across) == 4
    assert statistics.median(across) < 0.4e9  # the links carry 0.125 GB/s, and bursts beyond that
    texts = [finding["what"] for finding in record["findings"]]
    assert "ranks use the network that was chosen, eth0" in texts
    assert any(text.startswith("the clocks of all hosts agree") for text in texts)
