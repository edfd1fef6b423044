"""`bagua top`, on files of ranks, in a terminal, and on jobs that run."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios

import pytest
from support.commands import output_of
from support.launch import with_packages
from support.live_jobs import add, ended_process, root  # noqa: F401 - a fixture
from support.waiting import until

from bagua_comm import __main__ as cli
from bagua_comm.commands import top
from bagua_comm.live.status import Status
from bagua_comm.system.processes import kill, start_of

SLOW = "rank 1 has been slow since step 12, 5.0 times as long as the other ranks"


@pytest.fixture
def job(root):  # noqa: F811
    """The folder of a job of two ranks, of which rank 1 is slow."""
    add(root / "20260102-101500", 0, step=40, step_s=0.05, own_s=0.01, waiting_s=0.04)
    add(root / "20260102-101500", 1, step=40, step_s=0.05, own_s=0.05, waiting_s=0.0, slow=SLOW)
    return root / "20260102-101500"


def test_the_job_that_runs_is_shown_with_the_slow_rank(job, capsys):
    text = output_of(capsys, "top", "--once")
    assert text.startswith("20260102-101500: 2 ranks on 1 host, step 40, 20 steps/s")
    assert f"* {SLOW}" in text
    assert output_of(capsys, "top", job.name, "--once") == text
    assert output_of(capsys, "top", str(job), "--once") == text


def test_json_has_the_ranks_and_the_problems(job, capsys):
    found = json.loads(output_of(capsys, "top", "--once", "--json"))
    assert (found["job"], found["running"]) == (job.name, True)
    assert [(each["rank"], each["state"], each["own_s"]) for each in found["ranks"]] == [
        (0, "training", 0.01),
        (1, "training", 0.05),
    ]
    assert found["problems"] == [SLOW]


def test_a_job_that_has_ended_is_shown_with_its_end(root, capsys):  # noqa: F811
    add(root / "job", 0, ended_process(), state="failed", reason="ValueError: no more data")
    add(root / "job", 1, ended_process(), step=7)
    assert cli.main(["top"]) == 1  # there is no terminal here
    text = capsys.readouterr().out
    assert "failed: ValueError: no more data" in text
    assert "* rank 1 died" in text
    assert text.endswith("* this job has ended\n")


def test_a_host_without_jobs_is_an_error_that_says_what_is_shown(root, capsys):  # noqa: F811
    assert "no job of yours has run on this host" in output_of(capsys, "top", "--once", code=2)
    root.rmdir()
    assert "no job of yours has run on this host" in output_of(capsys, "top", code=2)


def test_a_folder_that_is_no_jobs_and_an_unknown_name_are_errors(job, tmp_path, capsys):
    text = output_of(capsys, "top", str(tmp_path), code=2)
    assert "is not the folder of a job" in text
    text = output_of(capsys, "top", "nojob", code=2)
    assert text.endswith(f"nojob: there is no such job, nor folder; the jobs of this host: {job.name}\n")


def test_a_named_job_is_not_read_where_another_user_could_have_written_it(job, root, capsys):  # noqa: F811
    root.chmod(0o777)
    text = output_of(capsys, "top", job.name, "--once", code=2)
    assert f"{job.name}: there is no such job, nor folder; the jobs of this host: none" in text
    assert output_of(capsys, "top", str(job), "--once").startswith(job.name)  # whoever gives the path trusts it


def test_a_host_that_ssh_would_take_for_an_option_is_refused(root, tmp_path, monkeypatch, capsys):  # noqa: F811
    agent(tmp_path, monkeypatch, f"touch {tmp_path}/asked")
    add(root / "job", 0, hosts="localhost,-Fconfig")
    assert "'-Fconfig' is not a host" in output_of(capsys, "top", "job", "--once", code=2)
    assert not (tmp_path / "asked").exists()


def test_of_two_jobs_that_run_one_must_be_named(job, root, capsys):  # noqa: F811
    add(root / "other", 0)
    text = output_of(capsys, "top", "--once", code=2)
    assert "2 jobs run here; name one of them: " in text
    assert f"{job.name} (2 ranks)" in text
    assert "other (2 ranks)" in text
    assert output_of(capsys, "top", "other", "--once").startswith("other: ")


def test_a_job_of_another_version_does_not_hide_the_one_that_runs(job, root, capsys):  # noqa: F811
    add(root / "newer", 0)
    (path,) = (root / "newer").iterdir()
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))
    assert output_of(capsys, "top", "--once").startswith(job.name)
    assert "it is not the status of a process, in version 1" in output_of(capsys, "top", "newer", code=2)


def test_a_text_that_would_control_the_terminal_is_printed_without_that(root, capsys):  # noqa: F811
    add(root / "job", 0, warning="\x1b]0;title\x07")
    text = output_of(capsys, "top", "--once", "--host", "localhost")
    assert "rank 0 warns:  ]0;title" in text
    assert {character for character in text if not character.isprintable()} == {"\n"}


def agent(folder, monkeypatch, script):
    """Let `script` of sh stand in for ssh: $1 is the host, $2 the command."""
    path = folder / "agent"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PRTE_MCA_plm_ssh_agent", str(path))


def test_ranks_on_other_hosts_are_shown_as_these_hosts_see_them(root, tmp_path, monkeypatch, capsys):  # noqa: F811
    facts = {"host": "node2", "hosts": "node1,node2", "state": "in a call", "call": "barrier #3", "call_s": 9.0}
    facts["members"] = (0, 1)
    there = Status("job", 1, 2, pid=12, process="12 3 node2", **facts)
    (tmp_path / "there").write_text(json.dumps({"ranks": [there.as_dict()]}) + "\n")
    agent(tmp_path, monkeypatch, f'echo "$1: $2" >> {tmp_path}/asked; [ $1 = node2 ] && cat {tmp_path}/there')
    add(root / "job", 0, step=2, hosts="localhost,node2")
    text = output_of(capsys, "top", "--once")
    assert "job: 2 ranks on 2 hosts, step 2" in text
    assert "* rank 1 waits in barrier #3 for 9 s; rank 0 has not come: in no call" in text
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith(f"node2: {sys.executable} -m bagua_comm top job --json --host localhost --once")


def test_a_host_that_does_not_answer_is_named_with_the_ranks_that_are_missing(
    root,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    agent(tmp_path, monkeypatch, "exit 255")
    add(root / "job", 0, hosts="localhost,node2")
    text = output_of(capsys, "top", "--once")
    wrapped = "".join(text.split())
    assert f"* node2 does not answer; does `{tmp_path}/agent node2 true`?".replace(" ", "") in wrapped
    assert "* nothing is known of rank 1; the hosts are localhost,node2" in text
    assert "node2 does not answer" not in output_of(capsys, "top", "--once", "--host", "localhost")


def test_without_rich_the_live_view_says_what_to_install(job, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    with pytest.raises(top.CommandError, match=r"pip install 'bagua-comm\[top\]'; --once needs none"):
        top.run(cli.make_parser().parse_args(["top"]))


IN_A_TERMINAL = """
import sys
from pathlib import Path
from bagua_comm import __main__ as cli
from bagua_comm.live import status
status.shared_memory = lambda: Path(sys.argv[1])
sys.exit(cli.main(["top"]))
"""


@pytest.mark.slow
@pytest.mark.needs("rich")
@pytest.mark.parametrize("last", ["q", "\x03", signal.SIGTERM])
def test_the_terminal_is_as_before_whatever_ends_the_view(job, tmp_path, last):
    ours, its = pty.openpty()
    before = termios.tcgetattr(its)
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path)],
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        env={**with_packages(), "COLUMNS": "40", "LINES": "20", "TERM": "xterm"},
        preexec_fn=lambda: os.close(os.open(os.ttyname(its), os.O_RDWR)),  # it becomes the controlling terminal
    )
    seen = b""
    try:
        while b"q end" not in seen:
            seen += os.read(ours, 65536)
        assert termios.tcgetattr(its)[3] != before[3]  # keys come one by one
        if isinstance(last, str):
            os.write(ours, b"s" + last.encode())
        else:
            process.send_signal(last)
        code = process.wait(30)
        while b"\x1b[?1049l" not in seen:  # leaves the screen
            seen += os.read(ours, 65536)
    finally:
        process.kill()
        process.wait(30)
        after = termios.tcgetattr(its)
        os.close(ours)
        os.close(its)
    assert after == before
    assert code == (128 + last if last is signal.SIGTERM else 0)
    assert "Traceback" not in seen.decode()


PROGRAM = """
import os, sys, time
import numpy as np
import bagua_comm

with bagua_comm.connect(timeout_s=100) as comm:
    comm.barrier()
    if comm.rank == 0:
        print(comm.flight.job, flush=True)
    if comm.rank == 1:
        time.sleep(1000)  # hangs
    comm.allreduce(np.ones(4))
"""


@pytest.mark.slow
def test_a_rank_that_hangs_and_one_that_is_killed_are_named_while_the_job_runs(tmp_path):
    (tmp_path / "hang.py").write_text(PROGRAM)
    run = [sys.executable, "-m", "bagua_comm", "run", "-n", "3", str(tmp_path / "hang.py")]
    process = subprocess.Popen(
        run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=with_packages()
    )

    def look(code):
        command = [sys.executable, "-m", "bagua_comm", "top", name, "--once", "--json"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=with_packages())
        assert result.returncode == code, result.stderr
        return json.loads(result.stdout)

    try:
        name = process.stdout.readline().strip()
        text = "ranks 0, 2 wait in allreduce #"
        found = until(lambda: (f := look(0)) and any(text in each for each in f["problems"]) and f, 60)
        (problem,) = [each for each in found["problems"] if text in each]
        assert "rank 1 has not come: in no call, the last was barrier #1" in problem
        assert "hang.py:11, in <module>: time.sleep(1000)" in problem
        pid = found["ranks"][1]["pid"]
        assert kill(pid, start_of(pid))
        process.communicate(timeout=300)
        found = look(1)
    finally:
        process.terminate()  # mpirun then ends the ranks
        process.communicate(timeout=300)
    assert process.returncode
    assert [each["state"] for each in found["ranks"]] == ["failed", "died", "failed"]
    assert found["problems"][0].startswith(f"rank 1 died: process {pid} on ")
    assert found["problems"][1].startswith("ranks 0, 2 were ended by SIGTERM")
