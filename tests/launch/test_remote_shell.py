"""How `run --restarts` reaches other hosts. A shell replaces ssh: it knows which hosts are dead or slow."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.waiting import until

from bagua_comm.launch import heartbeat, remote_shell
from bagua_comm.launch.heartbeat import Heartbeat
from bagua_comm.launch.remote_shell import RemoteShell, find_remote_shell

SHELL = RemoteShell(("sh", "-c", 'case $0 in dead) exit 255;; slow) sleep 60;; esac; eval "$1"'))


@pytest.fixture(autouse=True)
def nobody_says_how(monkeypatch):
    for name in ("SLURM_JOB_ID", "PRTE_MCA_plm"):
        monkeypatch.delenv(name, raising=False)
    for beginning in ("PRTE_MCA_", "OMPI_MCA_"):
        for name in ("plm_ssh_agent", "plm_rsh_agent", "plm_ssh_args", "plm_rsh_args"):
            monkeypatch.delenv(f"{beginning}{name}", raising=False)


def test_hosts_answer_or_count_as_lost_after_a_limit():
    start_s = time.monotonic()
    answers = SHELL.ask(["a", "dead", "slow"], "echo \"it's\" 'me'; exit_code=3", limit_s=0.5)
    assert answers == {"a": "it's me\n", "dead": None, "slow": None}
    assert time.monotonic() - start_s < 30  # and not 60
    assert RemoteShell(("no such agent",)).ask(["a"], "true") == {"a": None}
    assert SHELL.ask(["a"], "exit 3") == {"a": None}  # it did not finish


def test_without_a_limit_a_host_has_the_time_of_the_agent():
    start_s = time.monotonic()
    assert replace(SHELL, answer_s=0.2).ask(["slow"], "true") == {"slow": None}
    assert time.monotonic() - start_s < 4  # and not the 5 that is usual


def test_the_end_of_an_agent_lets_srun_end_its_step_first(tmp_path, monkeypatch):
    """After SIGKILL of srun its step ran on, on the node, until the end of the job: a loop for each restart."""
    monkeypatch.setattr(remote_shell, "END_S", 60.0)
    ended, loop = tmp_path / "ended", "echo; while :; do sleep 0.05; done"
    srun = RemoteShell(("sh", "-c", f"trap 'echo $0 >> {ended}; exit 0' TERM; {loop}"))
    agents = [srun.start(host, "true") for host in ("a", "b")]
    assert [agent.stdout.readline() for agent in agents] == ["\n", "\n"]
    remote_shell.end(agents)
    assert sorted(ended.read_text().split()) == ["a", "b"]
    assert [agent.returncode for agent in agents] == [0, 0]

    monkeypatch.setattr(remote_shell, "END_S", 0.1)
    deaf = RemoteShell(("sh", "-c", f"trap '' TERM; {loop}")).start("a", "true")
    assert deaf.stdout.readline() == "\n"
    remote_shell.end([deaf, None])
    assert deaf.returncode == -signal.SIGKILL


def test_a_host_without_a_heartbeat_is_lost_unless_it_answers(monkeypatch, tmp_path):
    monkeypatch.setattr(heartbeat, "SILENT_S", 0.2)
    file = tmp_path / "dead"
    shell = RemoteShell(("sh", "-c", f'[ $0 = b ] && [ -e {file} ] && exit 255; eval "$1"'), 10.0)
    beats = Heartbeat(shell, ["a", "b"])
    try:
        assert beats.lost() == []
        time.sleep(0.3)  # sleeps: longer than the silence that is asked about
        assert beats.lost() == []  # no line for 0.2 s, since there is one every second; but both answer
        file.touch()
        assert until(beats.lost) == ["b"]  # a line of b may have arrived a moment ago
    finally:
        beats.close()


def test_the_agent_is_the_one_that_mpirun_uses(monkeypatch):
    given = ["--prtemca", "plm_ssh_agent", "enter -q : ssh", "--mca", "plm_rsh_args", "-v"]
    monkeypatch.setattr(remote_shell.shutil, "which", lambda name: name)
    assert find_remote_shell(given).words == ("enter", "-q", "-v")
    monkeypatch.setenv("OMPI_MCA_plm_rsh_args", "-o ConnectionAttempts=10")
    words = find_remote_shell([]).words
    assert words[:3] == ("ssh", "-o", "ConnectionAttempts=10")
    assert "BatchMode=yes" in words  # no password is asked for
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", "rsh")
    assert find_remote_shell([]).words == ("rsh", "-o", "ConnectionAttempts=10")


def test_under_slurm_a_host_is_reached_by_a_step_of_the_job(monkeypatch, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nwhile [ "$1" != sh ]; do shift; done\nexec "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    shell = find_remote_shell([])
    assert shell.answer_s == 30  # each answer waits for the controller of Slurm to make a step
    assert shell.ask(["n1"], "echo 'a  b' $((1 + 1))") == {"n1": "a  b 2\n"}
    assert "--jobid=7 --overlap" in (log := Path(f"{srun}.log").read_text())
    assert "--nodelist=n1 sh -c" in log
    assert find_remote_shell(["--prtemca", "plm_ssh_agent", str(srun)]).words == (str(srun),)


@pytest.mark.parametrize(
    ("given", "variables", "agent"),
    [
        (["--prtemca", "plm", "ssh"], {}, "ssh"),
        (["--mca", "plm", "^slurm"], {}, "ssh"),
        ([], {"PRTE_MCA_plm": "ssh", "PRTE_MCA_plm_ssh_args": "-p 2222"}, "ssh"),
        ([], {"PRTE_MCA_plm": "ssh,slurm"}, "sh"),
        ([], {"PRTE_MCA_plm_ssh_args": "-p 2222"}, "sh"),  # mpirun still uses srun
        ([], {"OMPI_MCA_plm": "ssh"}, "sh"),  # a variable of Open MPI 4
    ],
)
def test_under_slurm_ssh_reaches_hosts_where_mpirun_is_told_to_use_it(monkeypatch, given, variables, agent):
    monkeypatch.setattr(remote_shell.shutil, "which", lambda name: name)
    for name, value in {"SLURM_JOB_ID": "7", **variables}.items():
        monkeypatch.setenv(name, value)
    words = find_remote_shell(given).words
    assert words[0] == agent
    assert ("2222" in words) == (agent == "ssh" and "PRTE_MCA_plm_ssh_args" in variables)
