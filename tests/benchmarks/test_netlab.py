"""Emulated hosts: built, used and removed, or refused with a reason."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from bagua_comm.processes import started_with
from benchmarks import netlab
from benchmarks.netlab import flows, latency, run

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


QUANTIZED = """
import json
import bagua_comm
from bagua_comm import ByteGrad, Plan, TensorSpec
from bagua_comm.bucket import make_buckets

with bagua_comm.connect() as comm:
    plan = Plan.pack([TensorSpec("x", (30_000,), "float32")])
    (bucket,) = make_buckets(plan, plan.allocate())
    bucket.flat[...] = comm.rank
    algorithm = ByteGrad()
    state = algorithm.init(bucket, comm)
    before = comm.transports[0].sent_bytes
    algorithm.exchange(bucket, comm, state)
    sent = comm.transports[0].sent_bytes - before
    with comm.dup() as other:
        sizes = comm.allgather_object([each.transports[0].quantize_bytes for each in (comm, other)])
    if comm.rank == 0:
        print(json.dumps([sent, sizes]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "share"), [("10mbit", 0.255), ("10gbit", 1.0)])
def test_small_models_send_a_quarter_over_slow_links(tmp_path, rate, share):
    if refusal():
        return
    script = tmp_path / "script.py"
    script.write_text(QUANTIZED)
    with netlab.build(2, rate) as lab:
        sent, sizes = json.loads(lab.output(lab.mpirun([str(script)])))
    assert sent == pytest.approx(share * 4 * 30_000, rel=0.02)
    assert sizes == [sizes[0]] * 2
    assert len(set(sizes[0])) == 1


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


def test_a_switch_that_has_ended_is_an_error(monkeypatch):
    monkeypatch.setattr(latency.sys, "executable", shutil.which("false"))
    with pytest.raises(netlab.LabError, match="TAP devices"), latency.delayed(0.02, ["none"]):
        pass


def test_the_hash_of_flows_spreads_the_ports_that_clients_get():
    """The kernel gives clients of one server every second port, one after another."""
    program = flows.hash_of_flow()
    classes = [run_filter(program, packet(40000 + 2 * client, 1024)) for client in range(100)]
    back = [run_filter(program, packet(1024, 40000 + 2 * client)) for client in range(100)]
    first = (flows.FLOW_MAJOR << 16) + flows.FIRST_FLOW_CLASS
    for found in (classes, back):
        assert all(first <= number < first + (1 << flows.FLOW_CLASS_BITS) for number in found)
        assert len(set(found)) > 85  # of 100 in 1,024 classes, about five meet
    assert run_filter(program, packet(1, 2, protocol=17)) == run_filter(program, bytes(64)) == 0


def packet(source, target, *, protocol=6):
    """A packet from Ethernet's header on to TCP's ports."""
    ip = bytes([0x45, *bytes(8), protocol, *bytes(2), 10, 99, 0, 1, 10, 99, 0, 2])
    return bytes(12) + b"\x08\x00" + ip + source.to_bytes(2, "big") + target.to_bytes(2, "big")


def run_filter(program, data):
    """What the kernel's packet filter makes of these bytes, for the instructions that netlab uses."""
    a = x = at = 0
    while True:
        code, true, false, k = program[at]
        at += 1
        if code in (0x20, 0x28, 0x30):
            a = int.from_bytes(data[k : k + {0x20: 4, 0x28: 2, 0x30: 1}[code]], "big")
        elif code == 0x15:
            at += true if a == k else false
        elif code == 0x07:
            x = a
        elif code in (0x16, 0x06):
            return a if code == 0x16 else k
        else:
            a = {0x24: a * k, 0x0C: a + x, 0x74: a >> k, 0x04: a + k}[code] & 0xFFFFFFFF


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


def test_a_user_who_is_not_root_gets_an_error_that_says_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run.main(["rate"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("netlab: ")
    assert "root" in message or "install" in message


def test_without_the_tools_the_message_names_them(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(netlab.LabError, match="no ip; install iproute2"):
        netlab.check_machine()
