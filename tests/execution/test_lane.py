"""Lanes: work in order, beside the caller; failures and the end."""

import os
import re
import sys
import threading
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import SimpleNamespace

import numpy as np
import pytest
from support.children import forked
from support.fake_comm import PATIENCE_S, FakeComm
from support.waiting import until

from bagua_comm import ArrayError, CommAborted, CommError, CommMismatch, CommTimeout
from bagua_comm.bootstrap.rank_exit import ExitHandler
from bagua_comm.execution import lane as lane_module
from bagua_comm.execution.futures import TaskFuture
from bagua_comm.execution.lane import InlineLane, ThreadLane
from bagua_comm.testing import run_ranks

each_lane = pytest.mark.parametrize("make", [ThreadLane, InlineLane])


def fail(error):
    raise error


# Order and results


@each_lane
def test_tasks_run_in_the_order_they_were_submitted(make):
    done = []
    with make(FakeComm()) as lane:
        for i in range(100):
            lane.submit(done.append, i)
        lane.wait()
        assert list(range(100)) == done


@each_lane
def test_arguments_go_in_and_results_come_out(make):
    with make(FakeComm()) as lane:
        future = lane.submit(divmod, 17, 5)
        keyword = lane.submit(dict, [("a", 1)], b=2)
        lane.wait()
        assert future.done()
        assert future.result() == (3, 2)
        assert keyword.result() == {"a": 1, "b": 2}


@each_lane
def test_wait_without_tasks_returns_and_a_lane_continues_after_it(make):
    with make(FakeComm()) as lane:
        lane.wait()
        first = lane.submit(int, "1")
        lane.wait()
        second = lane.submit(int, "2")
        lane.wait()
        assert (first.result(), second.result()) == (1, 2)


def test_submit_returns_before_the_task_is_done():
    go = threading.Event()
    with ThreadLane(FakeComm()) as lane:
        future = lane.submit(go.wait, PATIENCE_S)
        assert not future.done()  # it waits for the next task
        go.set()
        lane.wait()
        assert future.result() is True


def test_all_tasks_of_a_lane_run_on_one_thread_of_its_own():
    go = threading.Event()

    def who():
        assert go.wait(PATIENCE_S)
        return threading.get_ident()

    with ThreadLane(FakeComm()) as a, ThreadLane(FakeComm()) as b:
        futures = [lane.submit(who) for lane in (a, a, a, b)]
        go.set()  # until now all were waiting
        *mine, other = [future.result(PATIENCE_S) for future in futures]
    assert len(set(mine)) == 1
    assert len({mine[0], other, threading.get_ident()}) == 3


def test_a_task_of_a_caller_that_waits_runs_on_its_thread_if_the_lane_is_idle():
    go, order, threads = threading.Event(), [], []

    def note(name):
        order.append(name)
        return threading.get_ident()

    with ThreadLane(FakeComm()) as lane:
        assert lane.run(note, "alone") == threading.get_ident()
        lane.submit(go.wait, PATIENCE_S)
        caller = threading.Thread(target=lambda: threads.append(lane.run(note, "behind")))
        caller.start()
        until(lambda: len(lane._pending) == 2)
        assert order == ["alone"]  # it waits for the task before it
        go.set()
        caller.join(PATIENCE_S)
        assert threads[0] not in (caller.ident, threading.get_ident())

        def meanwhile():
            submitted = lane.submit(note, "after")
            with pytest.raises(FutureTimeout):
                submitted.result(0.05)
            order.append("here")
            return submitted

        lane.run(meanwhile).result(PATIENCE_S)
    assert order == ["alone", "behind", "here", "after"]


@each_lane
@pytest.mark.parametrize("error", [ValueError("in the task"), KeyboardInterrupt()], ids=repr)
def test_an_error_of_a_task_that_its_caller_waits_for_is_raised_there_and_ends_the_lane(make, error):
    lane = make(FakeComm())
    with pytest.raises(type(error)):
        lane.run(fail, error)
    with pytest.raises(CommAborted, match=f"an earlier task .* failed: {type(error).__name__}: {error}"):
        lane.run(print)
    lane.close()  # the caller has had it


def test_the_end_of_a_lane_waits_for_a_task_that_another_thread_runs_itself():
    lane, runs, go_on, order = ThreadLane(FakeComm()), threading.Event(), threading.Event(), []

    def task():
        runs.set()
        assert go_on.wait(PATIENCE_S)
        order.append(lane.comm.closed)

    caller = threading.Thread(target=lane.run, args=(task,))
    caller.start()
    assert runs.wait(PATIENCE_S)
    closer = threading.Thread(target=lane.close)
    closer.start()
    until(lambda: waits_for_a_future(closer))
    assert lane.queued() == []  # the program waits for no other task
    go_on.set()
    closer.join(PATIENCE_S)
    caller.join(PATIENCE_S)
    assert (order, lane.comm.closed) == ([0], 1)


def test_an_aborted_lane_waits_for_a_task_that_another_thread_runs_itself():
    lane, runs, go_on = ThreadLane(FakeComm(timeout_s=0.01)), threading.Event(), threading.Event()

    def task():
        runs.set()
        assert go_on.wait(PATIENCE_S)

    caller = threading.Thread(target=lane.run, args=(task,))
    caller.start()
    try:
        assert runs.wait(PATIENCE_S)
        lane.abort()
        with pytest.raises(CommTimeout):
            lane.wait()
        assert not lane.comm.closed
    finally:
        go_on.set()
        caller.join(PATIENCE_S)
    lane.wait()
    until(lambda: lane.comm.closed)


def test_the_end_of_python_stops_and_names_a_task_that_another_thread_runs_itself(monkeypatch):
    monkeypatch.setattr(lane_module, "TASK_END_S", 0.01)
    lane, runs, stopped = ThreadLane(FakeComm()), threading.Event(), threading.Event()
    lane.comm.stop_calls = lambda reason: stopped.set()

    def task():
        runs.set()
        assert stopped.wait(PATIENCE_S)

    caller = threading.Thread(target=lane.run, args=(task,))
    caller.start()
    assert runs.wait(PATIENCE_S)
    lane._executor.shutdown()  # as Python does before its end
    try:
        assert lane.end_tasks("world") == [f"task on {lane.name}"]
    finally:
        stopped.set()
        caller.join(PATIENCE_S)


def test_the_inline_lane_works_on_the_callers_thread():
    with InlineLane(FakeComm()) as lane:
        future = lane.submit(threading.get_ident)
        assert future.done()
        assert threading.get_ident() == future.result()


# Failures


@each_lane
def test_an_error_surfaces_at_wait_and_not_at_submit(make):
    error = ValueError("in the task")
    lane = make(FakeComm())
    future = lane.submit(fail, error)
    with pytest.raises(ValueError, match="in the task") as caught:
        lane.wait()
    assert caught.value is error
    assert future.exception() is error
    lane.close()


@each_lane
def test_tasks_behind_a_failure_do_not_run(make):
    error, ran = ValueError("first"), []
    lane = make(FakeComm())
    before = lane.submit(ran.append, "before")
    lane.submit(fail, error)
    behind = lane.submit(ran.append, "behind")

    with pytest.raises(ValueError, match="first"):
        lane.wait()

    aborted = behind.exception(PATIENCE_S)
    assert before.exception() is None
    assert type(aborted) is CommAborted
    assert aborted.__cause__ is error
    assert ran == ["before"]


@each_lane
def test_a_failed_lane_stays_failed(make):
    lane = make(FakeComm())
    lane.submit(fail, ValueError("once"))
    with pytest.raises(ValueError, match="once"):
        lane.wait()
    lane.submit(print, "never")
    with pytest.raises(CommAborted, match="an earlier task on this lane failed"):
        lane.wait()


@each_lane
def test_a_timeout_error_of_a_task_is_its_own(make):
    error = TimeoutError("the task's")
    lane = make(FakeComm())
    lane.submit(fail, error)
    with pytest.raises(TimeoutError) as caught:
        lane.wait()
    assert caught.value is error


def test_two_threads_that_wait_forget_no_task_that_was_submitted_meanwhile():
    def fail(go):
        go.wait(PATIENCE_S)
        raise ValueError("submitted last")

    with ThreadLane(FakeComm()) as lane:
        go, later = threading.Event(), threading.Event()
        lane.submit(go.wait, PATIENCE_S)
        waiting = [threading.Thread(target=lane.wait) for _ in range(2)]
        for thread in waiting:
            thread.start()
        until(lambda: all(map(waits_for_a_future, waiting)))
        lane.submit(fail, later)
        go.set()
        for thread in waiting:
            thread.join(PATIENCE_S)
        later.set()
        with pytest.raises(ValueError, match="submitted last"):
            lane.wait()


def waits_for_a_future(thread):
    frame = sys._current_frames().get(thread.ident)
    while frame is not None and frame.f_code is not Future.exception.__code__:
        frame = frame.f_back
    return frame is not None


def test_a_stuck_task_makes_wait_raise_a_timeout():
    release, comm = threading.Event(), FakeComm(timeout_s=0.001)
    lane = ThreadLane(comm)
    try:
        lane.submit(release.wait, PATIENCE_S)
        with pytest.raises(CommTimeout) as caught:
            lane.wait()
    finally:
        release.set()
    assert str(caught.value) == "a task on this lane has run for more than 0.002 s without ending a call"


def test_a_task_of_many_calls_may_take_longer_than_one_call():
    comm = FakeComm()
    lane = ThreadLane(comm)

    class ManyCalls(Future):
        """As if the task were in another call each time the limit of a call has passed."""

        def exception(self, timeout=None):
            if comm.counters.total().calls < 10:
                comm.counters["allreduce"].add(0, 0)
                raise FutureTimeout

    assert lane._outcome(ManyCalls()) is None
    assert comm.counters.total().calls == 10


def test_the_result_of_one_task_does_not_wait_for_later_ones():
    with ThreadLane(FakeComm()) as lane:
        gate = threading.Event()
        first = lane.submit(int, "3")
        lane.submit(gate.wait, 10)
        assert lane.result(first) == 3
        gate.set()


def test_the_error_of_a_result_is_not_raised_again():
    with ThreadLane(FakeComm()) as lane:
        future = lane.submit(int, "three")
        with pytest.raises(ValueError, match="three"):
            lane.result(future)
        lane.wait()


# The end


@each_lane
def test_close_finishes_submitted_tasks_and_closes_the_communicator(make):
    comm, done = FakeComm(), []
    lane = make(comm)
    for i in range(10):
        lane.submit(done.append, i)
    lane.close()
    assert list(range(10)) == done
    assert comm.closed == 1


@each_lane
def test_leaving_a_with_statement_closes(make):
    comm = FakeComm()
    with make(comm) as lane:
        lane.submit(int)
    assert comm.closed == 1


@each_lane
def test_an_error_in_a_with_statement_is_not_held_up_by_closing(make):
    # Closing is collective: the other ranks may never close.
    comm = FakeComm()
    with pytest.raises(KeyError), make(comm):
        raise KeyError
    assert comm.closed == 0


def test_close_ends_the_thread():
    lane = ThreadLane(FakeComm())
    thread = lane.submit(threading.current_thread).result(PATIENCE_S)
    assert thread.is_alive()
    lane.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_close_ends_the_thread_after_a_failure():
    lane = ThreadLane(FakeComm())
    thread = lane.submit(threading.current_thread).result(PATIENCE_S)
    lane.submit(fail, ValueError("at the end"))
    with pytest.raises(ValueError, match="at the end"):
        lane.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


@each_lane
def test_a_forked_child_is_refused_instead_of_waiting_for_the_thread_of_its_parent(make):
    lane, go_on, future = make(FakeComm()), threading.Event(), TaskFuture()
    if make is ThreadLane:
        future = lane.submit(go_on.wait, PATIENCE_S)
    reader, writer = os.pipe()

    def child():
        uses = (
            lambda: lane.submit(list),
            lambda: lane.run(list),
            lambda: lane.result(Future()),
            future.result,
            future.exception,
        )
        for use in uses:
            try:
                use()
            except CommError as exc:
                os.write(writer, b"refused " if "was forked off process" in str(exc) else b"other ")
        lane.close()

    assert forked(child) == 0
    go_on.set()
    assert os.read(reader, 100) == b"refused " * 5
    assert lane.comm.closed == 0
    lane.close()


# Found by trying: what used to go wrong


def test_a_stuck_task_is_not_forgotten_and_its_communicator_not_closed():
    comm, go_on = FakeComm(timeout_s=0.01), threading.Event()
    lane = ThreadLane(comm)
    try:
        lane.submit(go_on.wait, 30)
        for _ in range(2):
            with pytest.raises(CommTimeout):
                lane.wait()
        with pytest.raises(CommTimeout):
            lane.close()
        assert not comm.closed
    finally:
        go_on.set()


@pytest.mark.parametrize("lane_type", [ThreadLane, InlineLane])
def test_nothing_is_submitted_to_a_closed_lane(lane_type):
    lane = lane_type(FakeComm())
    lane.close()
    lane.close()
    with pytest.raises(CommError, match="closed"):
        lane.submit(print)


@pytest.mark.parametrize("lane_type", [ThreadLane, InlineLane])
def test_results_without_a_waiter_are_not_kept(lane_type):
    with lane_type(FakeComm()) as lane:
        for i in range(100):
            assert lane.submit(lambda i=i: i).result(timeout=10) == i
        assert len(lane._pending) == 1


def test_a_cancelled_task_is_reported_once_and_the_lane_continues():
    go_on, ran = threading.Event(), []
    with ThreadLane(FakeComm()) as lane:
        lane.submit(go_on.wait, PATIENCE_S)
        assert lane.submit(ran.append, "cancelled").cancel()
        lane.submit(ran.append, "behind")
        go_on.set()
        with pytest.raises(CancelledError):
            lane.wait()
        lane.wait()
    assert ran == ["behind"]


def test_what_is_submitted_must_be_a_function():
    def body(comm):
        with comm.lane() as lane:
            with pytest.raises(
                ArrayError, match=r"submit: task is ndarray, expected a function and its arguments"
            ):
                lane.submit(np.ones(3))
            return lane.submit(lane.comm.allreduce, np.ones(3)).result().tolist()

    assert run_ranks(2, body) == [[2.0] * 3] * 2


def test_names_of_mpi4pys_requests_are_answered_by_those_of_futures():
    def body(comm):
        future = comm.lane().submit(int, "3")
        for name, here in {"Wait": "result()", "wait": "result()", "Test": "done()"}.items():
            with pytest.raises(AttributeError, match=re.escape(f"no attribute '{name}'; it is {here} here")):
                getattr(future, name)
        assert not hasattr(future, "nothing_of_the_sort")
        return future.result()

    assert run_ranks(1, body) == [3]


# Errors that nobody has asked for


def mismatched(comm, lane):
    """A task that fails on rank 1 alone."""
    if comm.rank == 0:
        return lane.submit(lane.comm.send, np.arange(4.0), dest=1)
    return lane.submit(lane.comm.recv, np.zeros(3), source=0)


@pytest.mark.parametrize("dropped", [False, True])
def test_the_end_of_a_communicator_raises_the_error_of_a_task_that_nobody_has_asked_for(dropped):
    def body(comm):
        lane = comm.lane()
        future = mismatched(comm, lane)
        if dropped:
            until(future.done)
            del lane, future
        if comm.rank == 0:
            comm.close()
            return
        with pytest.raises(CommMismatch, match=r"expected float64\[3\] from rank 0, which sent float64\[4\]"):
            comm.close()
        assert comm.guard.closed
        comm.close()

    run_ranks(2, body)


def test_the_end_of_a_communicator_raises_an_exit_in_a_task_that_nobody_has_asked_for():
    def body(comm):
        until(comm.lane().submit(fail, SystemExit(3)).done)

    with pytest.raises(SystemExit):
        run_ranks(1, body)


@pytest.mark.parametrize(
    "ask",
    [
        lambda lane, future: future.result(),
        lambda lane, future: (_ for _ in ()).throw(future.exception()),
        lambda lane, future: lane.result(future),
        lambda lane, future: lane.wait(),
        lambda lane, future: lane.close(),
    ],
)
def test_an_error_that_somebody_has_got_is_not_raised_again_by_the_end_of_the_communicator(ask):
    def body(comm):
        lane = comm.lane()
        future = mismatched(comm, lane)
        later = lane.submit(int, "3")  # fails on rank 1 because the one before has
        if comm.rank == 1:
            with pytest.raises(CommMismatch):
                ask(lane, future)
            until(later.done)
        comm.close()

    run_ranks(2, body)


@pytest.mark.parametrize("end", ["abort", "with"])
@pytest.mark.parametrize("is_late", [False, True])
def test_the_error_of_a_task_of_a_lane_that_has_failed_is_not_raised_by_the_end_of_the_communicator(end, is_late):
    go_on = threading.Event()

    def task():
        assert go_on.wait(PATIENCE_S)
        raise CommTimeout("as the caller's call")

    def body(comm):
        lane = comm.lane()
        future = lane.submit(task)
        if not is_late:
            go_on.set()
            until(future.done)
        if end == "abort":
            lane.abort()
        else:
            with pytest.raises(CommAborted), lane:
                raise CommAborted("in a call of the caller")
        go_on.set()
        until(future.done)
        comm.close()

    run_ranks(1, body)


def test_the_end_of_a_communicator_waits_for_tasks_that_make_progress():
    def body(comm):
        x, lane = np.ones(3), comm.lane()
        for _ in range(20):
            lane.submit(lane.comm.allreduce, x, out=x)
        comm.close()
        return x[0]

    assert run_ranks(2, body) == [2.0**20] * 2


def test_the_end_of_a_communicator_stops_and_names_tasks_that_do_not_end(monkeypatch):
    monkeypatch.setattr(lane_module, "TASK_END_S", 0.1)

    def body(comm):
        lane = comm.lane()
        future = lane.submit(lane.comm.recv, np.zeros(3), source=0) if comm.rank == 1 else None
        comm.barrier()
        if comm.rank == 0:
            comm.close()
            return
        with pytest.raises(CommError, match=r"world ends before recv on lane-\d+: no progress for .* close"):
            comm.close()
        assert isinstance(future.exception(timeout=PATIENCE_S), CommAborted)

    run_ranks(2, body)


def test_the_end_of_a_communicator_that_does_not_work_any_more_warns_of_the_error_of_a_task():
    def body(comm):
        mismatched(comm, comm.lane())
        comm.barrier()
        comm.stop_calls("a rank has died")
        if comm.rank == 0:
            return
        with pytest.warns(RuntimeWarning, match="recv on lane.* failed, and nobody has asked for its result"):
            comm.close()

    run_ranks(2, body)


def test_requests_that_fail_since_one_has_are_one_warning_at_the_end():
    def body(comm):
        requests = [comm.irecv(np.zeros(1), source=0, tag=tag, timeout_s=0.05) for tag in range(100)]
        with pytest.raises(CommTimeout):
            requests[0].result()
        with pytest.warns(RuntimeWarning) as told:
            comm.close()
        assert len(told) == 1
        assert re.search(
            r"CommAborted: irecv.*failed earlier.*; and 98 more tasks failed so", str(told[0].message)
        )

    run_ranks(1, body)


def test_the_end_of_a_program_prints_the_errors_that_nobody_has_asked_for(capfd):
    def body(comm):
        lane = comm.lane()
        mismatched(comm, lane)
        handler = ExitHandler()
        handler.abort.mpi = SimpleNamespace(Is_finalized=lambda: False)
        handler.abort.rank_name = lambda: f"rank {comm.rank} of 2"
        handler._worlds.append(comm)
        handler._before_threads_end()
        handler._before_threads_end()

    run_ranks(2, body)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("rank 1 of 2: recv on lane-")
    assert "which sent float64[4]" in line
