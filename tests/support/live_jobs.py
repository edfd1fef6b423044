"""Files of jobs as `bagua top` reads them, of processes that run or have ended."""

import json
import subprocess
import sys

import pytest

from bagua_comm.live import status
from bagua_comm.live.status import Status
from bagua_comm.system.processes import ProcessId, pid_namespace, start_of


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder of jobs of this host, which is empty."""
    monkeypatch.setattr(status, "shared_memory", lambda: tmp_path)
    folder = status.live_folder()
    folder.mkdir(mode=0o700)
    return folder


def ended_process():
    """The id of a process that has ended."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = ProcessId(pid_namespace(), child.pid, start_of(child.pid))
    child.communicate(b"\n")
    assert child.returncode == 0
    return process


def add(folder, rank, process=None, **facts):
    """Write the file of a rank, by default of a job of two ranks and of this process; returns the status."""
    folder.mkdir(exist_ok=True)
    process = process or ProcessId.mine()
    facts = {"size": 2, "host": "node1", "hosts": "localhost", "job": folder.name} | facts
    found = Status(rank=rank, pid=process.pid, process=process.text(), **facts)
    (folder / f"{rank}-{process.start}.json").write_text(json.dumps(found.as_dict()))
    return found
