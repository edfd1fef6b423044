"""The ring, and the files that ranks write of it."""

import json
import threading

import numpy as np
import pytest

from bagua_comm import CommAborted, CommTimeout, Communicator, RankFailed
from bagua_comm.flight import FlightError, FlightRecorder, RankRecord, read_folder, recorder
from bagua_comm.flight.recorder import CAPACITY, WRITES
from bagua_comm.system.files import keep_latest
from bagua_comm.testing import run_ranks
from bagua_comm.transports import LocalTransport


def alone(folder=None, **settings):
    comm = Communicator([LocalTransport()])
    comm.flight = FlightRecorder(folder=folder, **settings)
    return comm


def test_a_call_is_recorded_from_its_beginning_with_the_arguments_that_ranks_compare():
    comm, seen = alone(), []
    comm.on(before=lambda call: seen.extend(comm.flight.entries()))
    comm.allreduce(np.ones((2, 3), np.float32), op="max")
    (begun,), (ended,) = seen, comm.flight.entries()
    assert (begun.state, ended.state) == ("started", "ended")
    assert str(ended) == "allreduce(float32[2, 3], op=max) #1"
    assert (ended.group, ended.collective, ended.detail) == ("world", True, {"op": "max"})
    assert begun.start_ns == ended.start_ns <= ended.end_ns


def test_the_ring_keeps_the_last_calls_and_no_array():
    comm = alone(capacity=5)
    for _ in range(8):
        comm.barrier()
    assert [entry.number for entry in comm.flight.entries()] == [4, 5, 6, 7, 8]
    assert FlightRecorder().ring.maxlen == CAPACITY
    assert not any(isinstance(each, np.ndarray) for record in comm.flight.ring for each in record)


def test_messages_and_collective_calls_are_counted_apart():
    def body(comm):
        comm.barrier()
        comm.sendrecv(np.ones(1), np.ones(1), dest=1 - comm.rank, source=1 - comm.rank)
        comm.barrier()
        comm.split(0).barrier()
        return [(entry.name, entry.number, entry.group) for entry in comm.flight.entries()]

    assert run_ranks(2, body)[1] == [
        ("barrier", 1, "world"),
        ("sendrecv", 1, "world"),
        ("barrier", 2, "world"),
        ("split", 3, "world"),
        ("barrier", 1, "world.1:0"),
    ]


def test_members_of_groups_are_ranks_of_the_world():
    def body(comm):
        part = comm.split(comm.rank % 2)
        part.dup()
        return comm.flight.groups

    assert run_ranks(4, body)[3] == {"world": (0, 1, 2, 3), "world.1:1": (1, 3), "world.1:1.1": (1, 3)}


def test_tasks_that_wait_on_a_lane_are_in_the_record():
    comm, go = alone(), threading.Event()
    with comm.lane() as lane:
        lane.submit(go.wait, 20)
        lane.submit(lane.comm.barrier)
        (waiting,) = comm.flight.record().queued
        go.set()
        lane.wait()
    assert (waiting.name, waiting.state, waiting.group) == ("barrier", "queued", "world.1")


def test_every_rank_writes_when_a_call_fails_and_the_message_says_where(tmp_path):
    def body(comm):
        comm.flight.folder = tmp_path
        if comm.rank == 0:
            with pytest.raises(CommTimeout, match=f"python -m bagua_comm diagnose {tmp_path}"):
                comm.barrier(timeout_s=0.1)

    run_ranks(2, body)
    (record,) = read_folder(tmp_path)
    assert (record.rank, record.size) == (0, 2)
    (entry,) = record.entries
    assert entry.state == "failed"
    assert entry.error.startswith("CommTimeout: rank 0 waited 0.1 s")
    assert record.failures[0].kind == "CommTimeout"


def test_a_record_survives_being_written_and_read(tmp_path):
    comm = alone(tmp_path)
    comm.allgather(np.ones(3))
    comm.flight.failed(RankFailed("rank 1 died", [1]))
    comm.flight.write(left="no data")
    (record,) = read_folder(tmp_path)
    assert record == RankRecord.from_json(record.to_json())
    assert (record.left, record.failures[0].ranks) == ("no data", (1,))
    assert record.entries == tuple(comm.flight.entries())
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.json"]


def test_errors_that_follow_from_others_are_not_written_and_a_rank_does_not_write_for_ever(tmp_path):
    flight = FlightRecorder(folder=tmp_path)
    assert flight.failed(CommTimeout("slow")) == tmp_path
    assert flight.failed(CommAborted("broken")) is None
    written = [flight.failed(CommTimeout("again")) for _ in range(WRITES + 5)]
    assert written.count(tmp_path) == WRITES - 1


def test_a_record_that_is_put_off_is_written_once_and_only_after_an_error(tmp_path):
    flight = FlightRecorder(folder=tmp_path)
    flight.later = True
    flight.settle()
    assert flight.failed(RankFailed("rank 1 died", [1])) == tmp_path
    assert list(tmp_path.iterdir()) == []
    flight.settle()
    assert read_folder(tmp_path)[0].failures[0].ranks == (1,)
    (tmp_path / "rank_0.json").unlink()
    flight.settle()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_raises_no_second_error(tmp_path):
    (tmp_path / "file").write_text("")
    flight = FlightRecorder(folder=tmp_path / "file" / "folder")
    assert flight.failed(CommTimeout("slow")) is None


def test_an_argument_that_json_cannot_hold_is_written_as_text(tmp_path):
    flight = FlightRecorder(folder=tmp_path)
    flight.ring.append([("world", True, "f", None, (), {"codec": object()}, False), 1, None, 1, None, None])
    assert flight.write() == tmp_path
    assert "object object" in read_folder(tmp_path)[0].entries[0].detail["codec"]


def test_of_several_jobs_the_latest_is_read(tmp_path):
    for job in ("b", "a"):
        FlightRecorder(folder=tmp_path / job, job=job).write()
        path = tmp_path / job / "rank_0.json"
        assert path.exists()
        recorder.os.utime(path, (1, {"b": 1, "a": 2}[job]))
    assert read_folder(tmp_path)[0].job == "a"


@pytest.mark.parametrize("content", ["", "{}", '{"version": 99}', "[1]", '{"version": 1, "entries": 3}'])
def test_a_file_that_is_no_record_is_named(tmp_path, content):
    (tmp_path / "rank_0.json").write_text(content)
    with pytest.raises(FlightError, match=r"rank_0\.json: "):
        read_folder(tmp_path)


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_folder_without_records_is_an_error(tmp_path, name):
    with pytest.raises(FlightError, match=r"has no records of ranks|cannot be read"):
        read_folder(tmp_path / name)


def test_the_default_folder_keeps_the_latest_jobs(tmp_path, monkeypatch):
    monkeypatch.setattr(recorder.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = recorder.default_folder()
    for number in range(recorder.JOBS + 3):
        job = folder / str(number)
        FlightRecorder(folder=job).write()
        recorder.os.utime(job, (number, number))
    keep_latest(folder, recorder.JOBS)
    assert sorted(map(int, (path.name for path in folder.iterdir()))) == list(range(3, recorder.JOBS + 3))
    folder.chmod(0o777)
    assert recorder.default_folder() is None


def test_files_hold_json():
    text = alone().flight.record().to_json()
    assert json.loads(text)["version"] == 1
