"""What a reader makes of the files of a job."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.live_jobs import add, ended_process, root  # noqa: F401 - a fixture
from support.waiting import until

from bagua_comm.live.reading import SILENT_S, read_job
from bagua_comm.live.status import LiveError
from bagua_comm.system.processes import ProcessId, pid_namespace, start_of


def state(folder):
    (found,) = read_job(folder)
    return found.state


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, "starting"),
        ({"step": 3}, "training"),
        ({"last": "barrier #1"}, "training"),
        ({"call": "barrier #1", "call_s": 7.0}, "in a call"),
        ({"call": "barrier #1", "state": "committing"}, "committing"),
        ({"state": "rendezvous"}, "rendezvous"),
        ({"state": "closed"}, "closed"),
        ({"state": "failed", "reason": "ValueError: no"}, "failed"),
    ],
)
def test_a_process_that_runs_does_what_it_says(tmp_path, facts, expected):
    add(tmp_path, 0, **facts)
    assert state(tmp_path) == expected


@pytest.mark.parametrize(
    ("said", "expected"), [("training", "died"), ("committing", "died"), ("closed", "ended"), ("ended", "ended")]
)
def test_a_process_that_is_gone_has_died_unless_it_said_that_it_ends(tmp_path, said, expected):
    add(tmp_path, 0, ended_process(), state=said, step_s=0.1, own_s=0.05, sent_per_s=8.0)
    (found,) = read_job(tmp_path)
    assert (found.state, found.step_s, found.own_s, found.sent_per_s) == (expected, None, None, 0.0)


def test_a_process_that_is_stopped_is_not_taken_for_one_that_trains(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        child.send_signal(signal.SIGSTOP)
        process = ProcessId(pid_namespace(), child.pid, start_of(child.pid))
        add(tmp_path, 0, process, step=1, step_s=0.1, own_s=0.1)
        until(lambda: state(tmp_path) == "stopped")
        (found,) = read_job(tmp_path)
        assert (found.call_s, found.step_s, found.own_s) == (0.0, None, None)
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL


def test_the_age_of_a_file_counts_by_the_clock_of_this_host_and_not_by_that_of_the_writer(tmp_path):
    add(tmp_path, 0, call="barrier #2", call_s=3.0)
    (path,) = tmp_path.iterdir()
    old_s = time.time() - SILENT_S - 10
    os.utime(path, (old_s, old_s))
    (found,) = read_job(tmp_path)
    assert found.state == "silent"
    assert found.call_s == pytest.approx(3 + SILENT_S + 10, abs=5)
    os.utime(path, (time.time() + 3600,) * 2)  # the clock was set back
    assert state(tmp_path) == "in a call"


def test_processes_of_earlier_attempts_are_left_out(tmp_path):
    add(tmp_path, 0, ended_process())
    add(tmp_path, 0, attempt=1, step=5)
    assert state(tmp_path) == "training"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 2}', "\ud800"])
def test_a_file_that_is_none_of_a_process_is_named(tmp_path, text):
    (tmp_path / "1-a.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(LiveError, match=r"1-a\.json: "):
        read_job(tmp_path)
