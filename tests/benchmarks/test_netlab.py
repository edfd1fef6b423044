"""Emulated hosts: built, used and removed, or refused with a reason."""

import os
import shutil
import subprocess

import pytest

from benchmarks import netlab

SCRIPT = """
import socket
import numpy as np
import bagua_comm

with bagua_comm.connect() as comm:
    x = np.arange(300_000, dtype=np.float32) + comm.rank
    mean = comm.allreduce(x, op="avg")
    assert (mean == x - comm.rank + 1.5).all()
    assert comm.transports[0]._endpoint.window is None, "hosts share no memory"
    comm.check_consistency(bagua_comm.quantized_allreduce(comm, x, op="avg"))
    places = comm.allgather_object((socket.gethostname(), comm.local_rank))
    print(places if comm.rank == 0 else "")
"""


def left_over():
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line for line in spaces.splitlines() if line.startswith(f"{netlab.PREFIX}{os.getpid()}")]


def refusal(latency_s=0.0):
    """Why hosts cannot be emulated here (not root, or a kernel without something), if so."""
    try:
        with netlab.build(1, "1gbit", "50mbit", latency_s):
            return ""
    except netlab.LabError as exc:
        reason = str(exc)
    assert any(word in reason for word in ("root", "Linux", "install", "does not allow"))
    return reason


@pytest.mark.slow
def test_ranks_connect_across_hosts_and_nothing_is_left_behind(tmp_path):
    if refusal():
        return
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with netlab.build(2, "1gbit") as lab:
        printed = lab.output(lab.mpirun([str(script)], ranks_per_host=2))
        assert len(left_over()) == 2
        route = ["ip", "-n", f"{lab.prefix}-h0", "route"]
        assert "congctl cubic" in subprocess.run(route, capture_output=True, text=True, check=True).stdout
    assert "[('h0', 0), ('h0', 1), ('h1', 0), ('h1', 1)]" in printed
    assert left_over() == []


def test_hosts_are_removed_after_an_error():
    try:
        with netlab.build(2, "1gbit"):
            raise ValueError("in the body")
    except (ValueError, netlab.LabError):
        pass
    assert shutil.which("ip") is None or left_over() == []
