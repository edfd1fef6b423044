"""Several TCP connections between two ranks: all are opened, by one rank of each pair, and all are used."""

import resource
import socket

import pytest
from support.launch import run_python

from bagua_comm.bootstrap import tcp_links as links

RANKS, LINKS = 3, 5

SCRIPT = """
    import os, sys
    import numpy as np

    os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1"  # as if the others were on other hosts
    import bagua_comm

    def sent():
        "Bytes that arrived or left on each connection of this process with a rank, by the kernel's tables."
        inodes = set()
        for fd in os.listdir("/proc/self/fd"):
            try:
                target = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
        rows = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
        return sum(row[3] == "01" and row[9] in inodes for row in rows)

    with bagua_comm.connect(timeout_s=60) as comm:
        opened = sent()
        for size in (10, 100_000, 3_000_000):
            x = np.full(size, comm.rank + 1, np.float32)
            for _ in range(3):
                assert (comm.allreduce(x) == comm.size * (comm.size + 1) / 2).all()
        assert sent() == opened, "no connection is opened later"
        counts = comm.allgather_object(opened)
        if comm.rank == 0:
            print(counts)
"""


def run_with(count, tmp_path):
    arguments = f"--mca btl self,tcp --mca btl_tcp_if_include lo --mca btl_tcp_links {count}"
    return run_python(RANKS, script=(tmp_path / "script.py", SCRIPT), mpirun=arguments.split())


@pytest.mark.slow
def test_each_pair_has_all_links_before_anything_is_sent(tmp_path):
    one, many = (run_with(count, tmp_path) for count in (1, LINKS))
    assert one.returncode == many.returncode == 0, one.stderr + many.stderr
    # A rank has connections of mpirun, too; their number does not depend on the links.
    beside = min(eval(one.stdout)) - (RANKS - 1)
    assert beside >= 0
    assert eval(many.stdout) == [beside + LINKS * (RANKS - 1)] * RANKS


def test_links_are_equal_on_each_interface():
    made = links.equal_links(3, ["eth0", "ib0"])
    assert len(made) == 2 * 3 * 2
    assert {made[f"OMPI_MCA_btl_tcp_latency_{name}:{link}"] for name in ("eth0", "ib0") for link in range(3)} == {
        str(links.LATENCY)
    }
    assert made["OMPI_MCA_btl_tcp_bandwidth_ib0:2"] == made["OMPI_MCA_btl_tcp_bandwidth_ib0:0"]
    assert links.equal_links(1) == {}
    assert {f"OMPI_MCA_btl_tcp_latency_{name}:1" for _, name in socket.if_nameindex()} <= set(
        links.equal_links(2)
    )


def test_more_connections_than_a_process_may_have_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert links.complaint(3, 100) is None
    with_too_many = links.complaint(17, 100)
    assert "1700 connections to 100 ranks on other hosts" in with_too_many
    assert "ulimit -n 1764" in with_too_many
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert links.complaint(17, 100_000) is None


@pytest.mark.parametrize(("asked", "made"), [(1, 1), (2, 3), (3, 3), (16, 17)])
def test_links_are_odd(asked, made):
    assert links.odd(asked) == made
