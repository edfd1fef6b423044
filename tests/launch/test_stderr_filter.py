"""What `run` leaves out of Open MPI's output, and that it leaves out nothing else."""

import os
import subprocess
import sys
import threading
import time

import pytest

from bagua_comm.bootstrap.mpi_start import new_name
from bagua_comm.commands import run
from bagua_comm.flight import FlightRecorder
from bagua_comm.launch import stderr_filter
from bagua_comm.launch.stderr_filter import Death, Filter

RULE = "-" * 74

ABORT = f"""{RULE}
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[53880,1],1]
  Errorcode: 1

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
You may or may not see output from other processes, depending on
exactly when Open MPI kills them.
{RULE}
"""

EXITED = f"""{RULE}
prterun has exited due to process rank 1 with PID 0 on node vm calling
"abort". This may have caused other processes in the application to be
terminated by signals sent by prterun (as reported here).
{RULE}
"""

OTHER = f"""{RULE}
There are not enough slots available in the system to satisfy the 9
slots that were requested by the application.
{RULE}
"""


DIED = f"""{RULE}
prterun noticed that process rank 1 with PID 7 on node n2 exited on
signal 9 (Killed).
{RULE}
"""

ENDED = f"""{RULE}
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-20666@1,12]
   Exit code:    3
{RULE}
"""


def filtered(text, piece=None, **options):
    """What passes the filter of a text that comes in pieces of so many bytes."""
    data, texts = text.encode(), Filter(**options)
    piece = piece or len(data)
    return b"".join(
        [*(texts.feed(data[i : i + piece]) for i in range(0, len(data), piece)), texts.end()]
    ).decode()


@pytest.mark.parametrize("piece", [1, 2, 7, 74, 75, 76, 200, None])
def test_the_paragraphs_on_mpi_abort_are_left_out_and_all_else_stays(piece):
    text = f"rank 1: ValueError\n{ABORT}more\n{OTHER}{EXITED}\0end of rank 0"
    assert filtered(text, piece) == f"rank 1: ValueError\nmore\n{OTHER}end of rank 0"


@pytest.mark.parametrize("piece", [1, 7, 75, None])
def test_after_the_first_death_comes_a_note_unless_a_rank_has_printed_it(piece):
    assert filtered(f"x\n{DIED}{DIED}last", piece, at_end=repr) == f"x\n{DIED}{DIED}last\n{Death('1', 'n2')}"
    assert filtered(f"x\n{ENDED}{DIED}", piece, at_end=repr) == f"x\n{ENDED}{DIED}{Death('12', exit_code='3')}"
    assert filtered(f"x\n{DIED}", piece) == f"x\n{DIED}"
    assert filtered("x\n", piece, at_end=repr) == "x\nNone"
    for report in (
        "rank 1 of 2 on n2 (process 7) has died: it crashed\n",
        "for what all ranks did: python -m bagua_comm diagnose /tmp/x\n",
    ):
        assert filtered(report + DIED, piece, at_end=repr) == report + DIED


def test_the_note_names_no_records_of_another_run_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_FLIGHT_FOLDER", str(tmp_path))
    monkeypatch.setenv("BAGUA_RUN", "abc")
    note = run._note_on_records(explain_deaths=True)
    (tmp_path / "of another-rundef").mkdir()
    assert note(Death("1", "n2")) == ""
    (tmp_path / "unknown").mkdir()
    assert note(Death("1", "n2")).endswith(f"diagnose {tmp_path}/unknown\n")
    name = new_name()
    assert name.endswith("-runabc")
    (tmp_path / name).mkdir()
    assert note(Death("1", "n2")).endswith(f" 1 on n2 did: {run.program_name()} diagnose {tmp_path}/{name}\n")


def test_the_note_names_only_records_that_came_with_the_job(tmp_path, monkeypatch):
    monkeypatch.setenv("BAGUA_FLIGHT_FOLDER", str(tmp_path))
    (tmp_path / "earlier").mkdir()
    note, among_survivors = (run._note_on_records(explain_deaths=deaths) for deaths in (True, False))
    assert note(Death("1", "n2")) == note(None) == ""
    (tmp_path / "this one").mkdir()
    explained = f"diagnose '{tmp_path}/this one'\n"
    assert note(Death("1", "n2")).startswith("for what ranks other than 1 on n2 did: ")
    assert note(Death("1", "n2")).endswith(explained)
    said = "rank 1 has ended with exit code 3, and all ranks with it; for what the others did: "
    assert note(Death("1", exit_code="3")).startswith(said)
    assert note(Death("1", exit_code="3")).endswith(explained)
    assert among_survivors(Death("1", "n2")) == note(None) == ""  # no rank was in a call


@pytest.mark.parametrize(
    ("lasted_s", "left", "noted"), [(17, None, True), (1, None, False), (17, "KeyError", False)]
)
def test_a_job_that_was_ended_while_a_rank_had_long_been_in_a_call_gets_a_note(
    tmp_path, monkeypatch, lasted_s, left, noted
):
    monkeypatch.setenv("BAGUA_FLIGHT_FOLDER", str(tmp_path))
    note = run._note_on_records(explain_deaths=False)
    flight = FlightRecorder(0, 2, folder=tmp_path / "job")
    start = time.perf_counter_ns() - int(lasted_s * 1e9)
    flight.ring.append([("world", True, "allreduce", None, (), {}, False), 2, None, start, None, None])
    flight.write(left)
    said = f"the job was ended while rank 0 had waited in allreduce #2 for {lasted_s} s; for what all ranks did: "
    assert note(None).startswith(said) if noted else note(None) == ""


@pytest.mark.parametrize(
    "text",
    [
        f"{RULE}\nMPI_ABORT was invoked on rank 1 in communicator X, said the user\n{RULE}\n",
        f"{RULE}-\nMPI_ABORT was invoked on rank ",
        f"> {ABORT[:-75]}",
        "--- a/train.py\n-x\n",
        RULE,
        f"a\0b\n{OTHER}",
    ],
)
@pytest.mark.parametrize("piece", [1, None])
def test_what_only_begins_like_them_stays(text, piece):
    assert filtered(text, piece) == text


@pytest.mark.parametrize("text", ["50 %|####    |\r", "Epoch 1: ", "a - b", "- [x] done", f"{RULE}\nepoch 1\n"])
def test_what_is_no_paragraph_passes_at_once(text):
    texts = Filter()
    assert texts.feed(text.encode()) == text.encode()
    assert not texts.holds


def test_a_paragraph_that_is_not_completed_passes_after_a_while(monkeypatch):
    monkeypatch.setattr(stderr_filter, "HOLD_S", 0.01)
    begun = ABORT.encode()[:-20]
    (source, writer), (reader, sink) = os.pipe(), os.pipe()
    copying = threading.Thread(target=stderr_filter.copy, args=(source, sink, Filter()))
    copying.start()
    os.write(writer, begun)
    with os.fdopen(reader, "rb") as passed:
        assert passed.read(len(begun)) == begun  # though more may come
        os.close(writer)
        copying.join()
    os.close(source)
    os.close(sink)


def test_a_program_that_replaces_the_process_writes_through_the_filter():
    script = f"printf '%s' '{ABORT}reason' >&2; exit 3"
    program = (
        "import os, sys; from bagua_comm.launch.stderr_filter import filter_stderr; filter_stderr();"
        "os.execv('/bin/sh', ['sh', '-c', sys.argv[1]])"
    )
    result = subprocess.run([sys.executable, "-c", program, script], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (3, "", "reason")


def test_without_a_process_for_the_filter_stderr_stays_as_it_is():
    program = (
        "import os; from bagua_comm.launch import stderr_filter; found = [os.fork]\n"
        "os.fork = lambda: found.pop()()  # the second fork raises IndexError\n"
        "stderr_filter.filter_stderr()\n"
        "os.write(2, b'words')"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "words")


def test_a_reader_that_has_gone_ends_the_copy():
    source, sink = os.pipe()
    reader, closed = os.pipe()
    os.close(reader)
    os.write(sink, b"text")
    os.close(sink)
    with pytest.raises(BrokenPipeError):
        stderr_filter.copy(source, closed, Filter())
    os.close(source)
    os.close(closed)
