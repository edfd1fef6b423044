"""A rank writes its record at the request of another process."""

import os
import signal
import subprocess
import sys

import pytest
from support.children import forked, started
from support.waiting import until

from bagua_comm import CommMismatch, CommTimeout
from bagua_comm.flight import FlightRecorder, read_folder, requests
from bagua_comm.flight.requests import ANSWERS, PAUSE_S, answer_requests, request_record
from bagua_comm.flight.stacks import users_line
from bagua_comm.system.processes import ProcessId

PROGRAM = """
import sys, time
from pathlib import Path
from bagua_comm.flight import FlightRecorder
from bagua_comm.flight.requests import answer_requests

flight = FlightRecorder(folder=Path(sys.argv[1]))
answer_requests(flight.write)

def load(batch):
    time.sleep(60)

print("ready", flush=True)
load(3)
"""


@pytest.mark.slow
def test_a_rank_that_sleeps_writes_the_line_where_it_sleeps(tmp_path):
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    with started([sys.executable, program, tmp_path], code=-signal.SIGKILL, stdout=subprocess.PIPE) as process:
        process.stdout.readline()

        def answered():
            request_record(process.pid)  # which it answers once a second
            if not (tmp_path / "rank_0.json").exists():
                return False
            (record,) = read_folder(tmp_path)
            return users_line(record.stacks) == f"{program}:11, in load: time.sleep(60)"

        until(answered)
        process.kill()


def test_a_program_that_handles_the_signal_itself_keeps_its_handler():
    def mine(*_):
        pass

    before = signal.signal(signal.SIGURG, mine)
    try:
        answer_requests(lambda: None)
        assert signal.getsignal(signal.SIGURG) is mine
    finally:
        signal.signal(signal.SIGURG, before)


def test_a_request_to_a_process_that_has_ended_or_does_not_answer_does_nothing():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        request_record(process.pid)
        process.communicate(b"\n")
    assert process.returncode == 0
    request_record(process.pid)


@pytest.fixture
def writes():
    """The number of writes of this process, which answers requests."""
    before, written = signal.getsignal(signal.SIGURG), []
    answer_requests(lambda: written.append(os.getpid()))
    yield written
    signal.signal(signal.SIGURG, before)


def test_a_timeout_asks_the_other_processes_of_the_same_host(writes):
    flight = FlightRecorder()
    flight.peers = [ProcessId.mine(), ProcessId("another host", os.getpid(), 0)]
    flight.failed(CommMismatch("other calls"))
    assert writes == []
    flight.failed(CommTimeout("late"))
    assert writes == [os.getpid()]


def test_not_every_signal_is_answered(writes, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(requests.time, "monotonic", lambda: clock[0])
    for _ in range(3 * ANSWERS):
        request_record(os.getpid())
        request_record(os.getpid())
        clock[0] += PAUSE_S
    assert len(writes) == ANSWERS


def test_a_forked_child_does_not_answer(writes):
    def child():
        request_record(os.getpid())
        assert writes == []

    assert forked(child) == 0
    request_record(os.getpid())
    assert writes == [os.getpid()]


def test_a_forked_child_answers_if_it_becomes_a_rank_itself(writes):
    def child():
        answered = []
        answer_requests(lambda: answered.append(os.getpid()))
        request_record(os.getpid())
        assert answered == [os.getpid()]

    assert forked(child) == 0
    assert writes == []
