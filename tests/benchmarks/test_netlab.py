"""Emulated hosts: built, used and removed, or refused with a reason."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from bagua_comm.system.processes import started_with
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


FLOWS = """
import time
import numpy as np
import bagua_comm

with bagua_comm.connect() as comm:
    x = np.ones(1 << 20, np.float32)
    times = []
    for _ in range(4):
        comm.barrier()
        start = time.perf_counter()
        comm.allreduce(x, out=x, op="avg")
        times.append(time.perf_counter() - start)
    print(min(times) if comm.rank == 0 else "")
"""


@pytest.mark.slow
def test_each_flow_is_held_to_its_rate_and_several_links_are_several_flows(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FLOWS)
    if refusal():
        return
    with netlab.build(2, "1gbit", "50mbit") as lab:
        rate = netlab.measure_rate(lab)
        one, five = (
            float(lab.output(lab.mpirun([str(script)], arguments=["--mca", "btl_tcp_links", links])))
            for links in ("1", "5")
        )
    assert rate < 1.1 * 50e6 / 8
    # Each rank sends 4 MiB; a flow needs 0.67 s for them, less what may pass at once.
    assert one > 0.5
    assert five < one / 2
    assert left_over() == []


@pytest.mark.slow
def test_packets_wait_and_the_rate_stays(capfd):
    if refusal(latency_s=0.02):
        return
    with netlab.build(2, "50mbit", latency_s=0.02) as lab:
        round_trip_s = netlab.measure_round_trip(lab)
        rate = netlab.measure_rate(lab, seconds=1.5)
    assert 0.04 <= round_trip_s < 0.08
    assert 0.5 * 50e6 / 8 < rate < 1.1 * 50e6 / 8
    packets = re.findall(r"netlab: ([\d,]+) packets waited 20 ms", capfd.readouterr().err)[-1]
    assert int(packets.replace(",", "")) > 100
    assert left_over() == []


@pytest.mark.slow
def test_halves_of_a_split_reach_themselves_alone_until_it_is_mended():
    if refusal():
        return
    listen = "import socket, time; s = socket.create_server(('', 7777)); print(1, flush=True); time.sleep(60)"
    reach = "import socket; socket.create_connection(('10.99.0.4', 7777), timeout=1)"
    with netlab.build(4, "1gbit") as lab:
        command = lab.inside(3, "env", "BAGUA_JOB=one", sys.executable, "-S", "-c", listen)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.read(1) == b"1"

            def reached():
                codes = [
                    subprocess.run(lab.inside(i, sys.executable, "-S", "-c", reach)).returncode for i in range(3)
                ]
                return [code == 0 for code in codes]

            assert reached() == [True] * 3
            lab.split([2, 3])
            assert reached() == [False, False, True]
            assert not started_with("BAGUA_JOB", "one")
            for host in (2, 3):
                lab.mend(host)
            assert reached() == [True] * 3
            assert list(started_with("BAGUA_JOB", "one"))
            process.kill()
    assert left_over() == []


def test_hosts_are_removed_after_an_error():
    try:
        with netlab.build(2, "1gbit"):
            raise ValueError("in the body")
    except (ValueError, netlab.LabError):
        pass
    assert shutil.which("ip") is None or left_over() == []
