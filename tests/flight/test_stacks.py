"""The stacks of threads, which another process reads from a record."""

import gc
import sys
import threading
import weakref

from bagua_comm.flight import RankRecord, recorder, stacks
from bagua_comm.flight.stacks import current_stacks, is_installed, is_users_code, stacks_now, users_line
from bagua_comm.testing import run_ranks


def test_the_stacks_of_all_threads_have_lines_and_functions_the_innermost_first():
    started, go = threading.Event(), threading.Event()

    def waits():
        started.set()
        go.wait(20)

    thread = threading.Thread(target=waits, name="loader")
    thread.start()
    started.wait(20)
    found = {stack.name: stack for stack in stacks_now()}
    go.set()
    thread.join()
    frame = found["loader"].users_frame
    assert (frame.function, frame.text, frame.file) == ("waits", "go.wait(20)", __file__)
    assert found["loader"].frames[0].function == "wait"  # of threading, inside of it
    mine = found["MainThread"].frames[0]
    assert mine.function == "test_the_stacks_of_all_threads_have_lines_and_functions_the_innermost_first"
    assert mine.text == "found = {stack.name: stack for stack in stacks_now()}"


def test_no_garbage_is_collected_while_the_frames_of_threads_are_listed(monkeypatch):
    collects, frames = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or frames())
    settings = gc.isenabled(), sys.getswitchinterval()
    assert stacks_now()
    assert collects == [False]
    assert (gc.isenabled(), sys.getswitchinterval()) == settings


def test_stacks_keep_no_variable_of_a_call_that_ends():
    class Array:
        """Something whose memory is freed with it."""

    started, go, kept = threading.Event(), threading.Event(), []

    def calls(array):
        kept.append(weakref.ref(array))
        started.set()
        go.wait(20)

    thread = threading.Thread(target=lambda: calls(Array()))
    thread.start()
    started.wait(20)
    found = current_stacks()
    go.set()
    thread.join()
    assert "calls" in [call.code.co_name for call in found[thread.ident]]
    assert kept[0]() is None


def test_threads_of_the_user_come_before_those_of_libraries():
    library = threading.Event()
    thread = threading.Thread(target=library.wait, args=(20,))
    thread.start()
    found = stacks_now()
    library.set()
    thread.join()
    assert found[0].name == "MainThread"
    assert thread.name in [stack.name for stack in found[1:] if stack.users_frame is None]


def test_code_of_the_user_is_neither_of_this_library_nor_of_an_installed_package():
    assert is_users_code(__file__, "train")
    assert not is_users_code(stacks.__file__, "bagua_comm.flight.stacks")
    assert not is_users_code(threading.__file__, "threading")
    assert is_installed("<frozen runpy>")
    assert users_line([]) == ""


def test_a_record_has_the_line_that_wrote_it_and_keeps_it_in_a_file():
    (record,) = run_ranks(1, lambda comm: comm.flight.record())
    assert "lambda comm: comm.flight.record()" in users_line(record.stacks)
    assert RankRecord.from_json(record.to_json()).stacks == record.stacks


def test_a_record_that_is_written_once_more_while_an_error_ends_the_program_keeps_the_line(monkeypatch):
    (flight,) = run_ranks(1, lambda comm: comm.flight)
    line = users_line(flight.record().stacks)
    monkeypatch.setattr(recorder, "stacks_now", lambda: (stacks.ThreadStack("MainThread", ()),))
    assert users_line(flight.record().stacks) == line != ""
    assert users_line(flight.record(left="ValueError").stacks) == ""
