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
    assert comm.transports[0]._window is None, "hosts share no memory"
    comm.check_consistency(bagua_comm.quantized_allreduce(comm, x, op="avg"))
    places = comm.allgather_object((socket.gethostname(), comm.local_rank))
    print(places if comm.rank == 0 else "")
"""


def left_over():
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in spaces.splitlines() if line.startswith(f"{netlab.PREFIX}{os.getpid()}")]


@pytest.mark.slow
def test_ranks_meet_across_hosts_and_nothing_is_left_behind(tmp_path):
    refusal = ""
    try:
        with netlab.build(1, "1gbit"):
            pass
    except netlab.LabError as exc:
        refusal = str(exc)
    if refusal:  # not root, or a kernel without these
        assert any(word in refusal for word in ("root", "Linux", "install", "does not allow"))
        return
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with netlab.build(2, "1gbit") as lab:
        printed = lab.output(lab.mpirun([str(script)], ranks_per_host=2))
        assert len(left_over()) == 2
    assert "[('h0', 0), ('h0', 1), ('h1', 0), ('h1', 1)]" in printed
    assert left_over() == []


def test_hosts_are_removed_after_an_error():
    try:
        with netlab.build(2, "1gbit"):
            raise ValueError("in the body")
    except (ValueError, netlab.LabError):
        pass
    assert shutil.which("ip") is None or left_over() == []


def test_whoever_is_not_root_reads_so(monkeypatch, capsys):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert netlab.main(["rate"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("netlab: ")
    assert "root" in message or "install" in message


def test_without_the_tools_the_message_names_them(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(netlab.LabError, match="no ip; install iproute2"):
        netlab.check_machine()
