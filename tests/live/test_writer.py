"""The status that a process writes of itself."""

import os
import subprocess
import sys
import threading
import time
from collections import deque

import pytest
from support.children import forked
from support.live_jobs import root  # noqa: F401 - a fixture
from support.waiting import until

from bagua_comm import errors
from bagua_comm.flight import FlightRecorder
from bagua_comm.live import writer
from bagua_comm.live.reading import read_job
from bagua_comm.trace import Counters, ExchangeCounters

HEAD = ("world", True, "barrier", None, (), {}, False)


@pytest.fixture
def flight(root, monkeypatch):  # noqa: F811
    """The flight recorder of a process that is shown."""
    monkeypatch.setattr(writer, "_shown", [])
    monkeypatch.setattr(writer, "INTERVAL_S", 0.01)
    flight = FlightRecorder(1, 2)
    writer.show("job", flight, ["node1", "node1", "node2"])
    yield flight
    writer.end("ended")


def shown(root):  # noqa: F811
    (found,) = until(lambda: any((root / "job").glob("*.json")) and read_job(root / "job"))
    return found


def test_the_file_has_the_rank_its_step_and_the_call_that_it_is_in(root, flight):  # noqa: F811
    counters, exchanges = Counters(), ExchangeCounters()
    flight.counters["world"], flight.exchanges["world.1"] = counters, exchanges
    assert shown(root).state == "starting"
    now_ns = time.perf_counter_ns()
    flight.ring.append([HEAD, 4, None, now_ns - 9 * 10**9, now_ns - 8 * 10**9, None])
    flight.ring.append([HEAD, 5, None, now_ns - 7 * 10**9, None, None])
    flight.steps["world.1"] = 12
    found = until(lambda: (found := shown(root)).call and found)
    assert found.members == (0, 1)
    assert (found.rank, found.size, found.step, found.state) == (1, 2, 12, "in a call")
    assert (found.call, found.last, found.hosts) == ("barrier #5", "barrier #4", "node1,node2")
    assert 7 <= found.call_s < 60
    assert found.memory > 1 << 20
    assert "/tests/" in found.line  # where this test is, since the call lasts for long
    flight.ring.append([("world", False, "recv", None, (), {}, False), 7, None, now_ns, None, None])
    assert until(lambda: (found := shown(root)).call == "recv #7" and found).members == ()


def test_rates_are_those_of_the_latest_steps():
    def readings(*steps):
        return deque(writer._Reading(float(n), step, 0.25 * n, 100 * n) for n, step in enumerate(steps))

    assert writer._rates(readings(1)) == (None, None, 0.0)
    assert writer._rates(readings(1, 3, 5)) == (0.5, 0.125, 100.0)
    assert writer._rates(readings(7, 7, 7, 8, 8, 8, 9)) == (3.0, 0.75, 100.0)
    assert writer._rates(readings(1, 3, 5, *[5] * 9)) == (None, None, 100.0)  # it hangs
    assert writer._rates(readings(80, 90, 1, 3, 5)) == (0.5, 0.125, 100.0)  # another engine
    assert writer._rates(readings(0, 0, 1, 3, 5)) == (0.5, 0.125, 100.0)  # it was starting
    assert writer._rates(readings(0, 0, 0)) == (None, None, 100.0)


def test_the_end_is_written_and_the_first_one_counts(root, flight):  # noqa: F811
    writer.note("committing")
    until(lambda: shown(root).state == "committing")
    writer.leave(FlightRecorder())
    assert until(lambda: shown(root).state) == "committing"
    writer.leave(flight)
    until(lambda: shown(root).state == "closed")
    writer.end("failed", "ValueError: two\nlines")
    writer.end("ended")
    assert (shown(root).state, shown(root).reason) == ("failed", "ValueError: two lines")
    assert "live status" not in {thread.name for thread in threading.enumerate()}


def test_a_process_knows_in_which_job_it_is_shown(root, flight, monkeypatch):  # noqa: F811
    assert writer.shown() == ("job", 0)
    monkeypatch.setattr(writer, "_shown", [])
    assert writer.shown() is None


def test_another_world_of_the_same_job_is_shown_in_the_same_file(root, flight):  # noqa: F811
    writer.leave(flight)
    writer.show("job", FlightRecorder(0, 1), ["node1"])
    until(lambda: (shown(root).rank, shown(root).state) == (0, "starting"))


def test_the_last_warning_is_shown(root, flight, monkeypatch):  # noqa: F811
    with pytest.warns(UserWarning, match="nothing was sent"):
        errors.warn("nothing was sent")
    until(lambda: shown(root).warning == "nothing was sent")


def test_a_forked_child_writes_nothing(root, flight):  # noqa: F811
    def body():
        writer.note("committing")
        writer.end("failed", "of the child")
        return len(threading.enumerate()) - 1

    shown(root)
    assert forked(body) == 0
    assert (shown(root).state, shown(root).pid) == ("starting", os.getpid())


def test_a_folder_that_is_gone_is_no_error(root, flight):  # noqa: F811
    shown(root)
    for path in (root / "job").iterdir():
        path.unlink()
    (root / "job").rmdir()
    writer.end("ended")
    assert not (root / "job").exists()


def test_a_folder_that_others_can_write_to_is_not_used(root, monkeypatch, caplog):  # noqa: F811
    monkeypatch.setattr(writer, "_shown", [])
    root.chmod(0o777)
    writer.show("job", FlightRecorder(), [])
    assert "`bagua top` will not show this process" in caplog.text
    assert list(root.iterdir()) == []


def test_a_write_takes_less_than_a_thousandth_of_a_core(root, flight):  # noqa: F811
    """The processor time of this thread alone, the least of many."""
    now_ns = time.perf_counter_ns()
    flight.ring.extend([HEAD, number, None, now_ns - 1, now_ns, None] for number in range(1000))
    (mine,) = writer._shown
    times = []
    for _ in range(50):
        start = time.thread_time()
        mine._write()
        times.append(time.thread_time() - start)
    assert min(times) < 1e-3


PROGRAM = """
import sys
from pathlib import Path
from bagua_comm.flight import FlightRecorder
from bagua_comm.live import status, writer
status.shared_memory = lambda: Path(sys.argv[1])
exec(sys.argv[2])
writer.show("job", FlightRecorder(), [])
"""
FAILS = "raise ValueError('no more data')"
EARLIER = "sys.last_value = KeyError('of a session')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "last", "code", "expected"),
    [
        ("", "", 0, ("ended", "")),
        ("", FAILS, 1, ("failed", "ValueError: no more data")),
        (EARLIER, "", 0, ("ended", "")),
        (EARLIER, FAILS, 1, ("failed", "ValueError: no more data")),
        ("sys.ps1 = '>>> '", EARLIER, 0, ("ended", "")),  # an interactive session went on after an error
    ],
)
def test_a_program_that_ends_says_how(root, tmp_path, first, last, code, expected):  # noqa: F811
    command = [sys.executable, "-c", PROGRAM + last, str(tmp_path), first]
    assert subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300).returncode == code
    (found,) = read_job(root / "job")
    assert (found.state, found.reason) == expected
