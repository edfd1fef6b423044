"""The facts that a process finds about another one, except in another PID namespace."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from bagua_comm.bootstrap import rendezvous
from bagua_comm.bootstrap.rendezvous import JoinLog, Wait
from bagua_comm.system import processes
from bagua_comm.system.processes import (
    ProcessId,
    free_port,
    namespace_number,
    pid_namespace,
    sees_starter,
    start_of,
)

TELLS = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("processes", {processes.__file__!r})  # without NumPy
sys.modules["processes"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["processes"])
from processes import ProcessId
print(ProcessId.mine().text(), flush=True)
for line in sys.stdin:
    other = ProcessId.parse(line.rstrip())
    print(other.is_visible(), repr(other.state()), other.has_ended(), other.kill(), flush=True)
"""

CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Process ids as in a container. Needs root, which CI has."""


@pytest.fixture
def start():
    """Starts a Python process, maybe in a container; returns it, and what it says of itself."""
    started = []

    def begin(*container):
        command = [*container, sys.executable, "-S", "-c", TELLS]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process, ProcessId.parse(process.stdout.readline().rstrip())

    yield begin
    for process in started:
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL


def ask(process, other):
    """The facts of one process about another."""
    process.stdin.write(f"{other.text()}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_processes_of_two_containers_with_the_same_number_are_not_taken_for_each_other_or_for_dead(start):
    (one, first), (_, second) = start(*CONTAINER), start(*CONTAINER)
    assert first.pid == second.pid
    assert first.namespace != second.namespace
    assert ask(one, second) == "False '' False False"
    mine = ProcessId.mine()
    assert ask(one, mine) == "False '' False False"
    assert not first.has_ended()
    assert not first.kill()


def test_a_process_of_this_namespace_is_seen_killed_and_found_to_have_ended(start):
    process, child = start()
    assert (child.pid, child.namespace) == (process.pid, pid_namespace())
    assert child.state() == "running"
    assert not ProcessId(child.namespace, child.pid, child.start + 1).kill()
    assert ProcessId(child.namespace, child.pid, child.start + 1).has_ended()  # that number is another one's now
    assert child.kill()
    assert process.wait() == -signal.SIGKILL
    assert child.has_ended()
    assert not child.kill()


def test_a_foreign_proc_gives_no_information_about_processes(monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 1)  # as after unshare --pid, without a new /proc
    assert pid_namespace() == pid_namespace()
    alone, number = pid_namespace(), namespace_number()
    monkeypatch.undo()
    assert alone != pid_namespace()
    assert number != namespace_number()
    assert not ProcessId(alone, os.getpid(), start_of(os.getpid())).is_visible()


def test_whether_a_launcher_is_seen(monkeypatch):
    monkeypatch.setattr(processes, "starter", lambda name: 0)  # the parent is in another namespace
    assert not sees_starter("NAME")
    monkeypatch.setattr(processes, "starter", lambda name: os.getpid())
    assert sees_starter("SET_BY_NOBODY")
    assert not sees_starter("PATH")


@pytest.mark.parametrize("container", [False, True])
def test_a_rank_of_another_container_is_not_said_to_have_ended_before_connect(tmp_path, monkeypatch, container):
    tmp_path.chmod(0o700)
    variables = {
        "PMIX_SERVER_TMPDIR": str(tmp_path),
        "PMIX_NAMESPACE": "job",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    logs = [JoinLog(variables | {"OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(2)]
    if container:
        monkeypatch.setattr("bagua_comm.bootstrap.rendezvous.sees_starter", lambda name: False)
    logs[0].check_in()
    missing = logs[0].missing()
    assert missing.gone == ([] if container else ["rank 1 ended without calling connect"])
    assert missing.unseen == (["rank 1 cannot be seen from here: on another host, or ended"] if container else [])
    if container:  # its entry is now a number of another namespace, of a process that does not exist here
        entry = ProcessId("elsewhere 1", 4_194_303, 1)
        with open(tmp_path / "bagua-job-1", "w") as file:
            file.write(f"{entry.text()}\n")
        assert logs[0].missing() == ([], [], [])
        logs[0].check_in()
        assert logs[0].missing().unseen == ["rank 1 cannot be seen from here: on another host, or ended"]


def test_a_rank_that_ended_without_calling_connect_is_named_long_before_the_time_limit(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    job = {"PMIX_SERVER_TMPDIR": str(tmp_path), "PMIX_NAMESPACE": "job", "BAGUA_SPARES": "1"}
    sizes = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
    logs = [JoinLog({**job, **sizes, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in (0, 2)]
    for log in logs:
        log.check_in()
    now, children = 0.0, [1, 2, 3]
    monkeypatch.setattr(rendezvous.time, "monotonic", lambda: now)
    monkeypatch.setattr(rendezvous, "children_of", lambda process: children)
    wait = Wait(logs[0], 300)
    found = []
    for now in (2.0, 4.0, 8.0, 12.0):
        if now == 8.0:
            children = [1, 2]  # until now, rank 1 only hid its variables
        found.append(wait.complaint())
    assert found[:3] == [None] * 3
    told = (
        "waited 12 s for the other ranks: rank 1 ended without calling connect; a spare replaces only ranks that"
    )
    assert told in found[3]
    assert "timeout_s" not in found[3]
    assert wait.ended == [1]


@pytest.mark.parametrize(("first", "is_below"), [(30_000, True), (1024, False)])
def test_a_free_port_is_none_that_linux_gives_to_others(first, is_below, tmp_path, monkeypatch):
    (tmp_path / "range").write_text(f"{first}\t60999\n")
    monkeypatch.setattr(processes, "_PORT_RANGE", tmp_path / "range")
    port = free_port()
    assert (port in range(20_000, first)) == is_below
    with socket.socket() as server:
        server.bind(("", port))


def test_a_port_in_use_is_not_free(tmp_path, monkeypatch):
    (tmp_path / "range").write_text("20001\t60999\n")  # 20000 alone is below
    monkeypatch.setattr(processes, "_PORT_RANGE", tmp_path / "range")
    with socket.socket() as server:
        with suppress(OSError):  # another program's
            server.bind(("", 20_000))
        assert free_port() != 20_000
