"""The exit of a rank: no other rank waits for it, and one message says why all end."""

import os
import re
import signal
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.waiting import until

from bagua_comm.bootstrap.job import entries
from bagua_comm.bootstrap.rank_exit import ExitHandler
from bagua_comm.bootstrap.rendezvous import JoinLog
from bagua_comm.flight import FlightRecorder, diagnose, read_folder
from bagua_comm.launch.verdict import judge
from bagua_comm.system.processes import ProcessId, state_of


def test_an_exception_in_one_rank_ends_all_with_its_traceback(ended):
    program = """
        import bagua_comm, numpy as np
        comm = bagua_comm.connect(timeout_s=60)
        if comm.rank == 1:
            raise RuntimeError("rank one has a bad day")
        comm.allreduce(np.ones(100_000))
        """
    result = ended(2, program, code=1)
    assert "RuntimeError: rank one has a bad day" in result.stderr
    assert "rank 1 of 2:" in result.stderr


@pytest.mark.slow
def test_a_rank_that_exits_in_the_middle_ends_all_with_its_code(ended):
    program = """
        import bagua_comm, numpy as np, sys
        with bagua_comm.connect(timeout_s=60) as comm:
            if comm.rank == 1:
                sys.exit(7)
            comm.allreduce(np.ones(100_000))
        """
    result = ended(2, program, code=7)
    assert "rank 1 of 2 called sys.exit(7), which ends all ranks" in result.stderr
    assert "has died" not in result.stderr


@pytest.mark.slow
def test_a_rank_that_hangs_outside_of_calls_is_shown_with_its_line_and_the_error_comes_last(ended):
    program = """
        import bagua_comm, numpy as np, time
        comm = bagua_comm.connect(timeout_s=1)
        def load():
            time.sleep(60)
        comm.barrier()
        if comm.rank == 1:
            load()
        comm.allreduce(np.ones(5))
        """
    result = ended(2, program, code=1)
    lines = result.stderr.rstrip("\n\0").splitlines()
    assert "rank 1 has not come to allreduce #2, where rank 0 waits; its last call was barrier #1" in lines[2]
    assert lines[-3] == "  rank 1: in no call; the last was barrier #1"
    assert re.fullmatch(r"    at \S+/script.py:5, in load: time.sleep\(60\)", lines[-2])
    assert "BAGUA_TRACEBACK" in lines[-1]
    assert result.stderr.count("allreduce(float64[5]") == 1
    assert "CommTimeout: allreduce(float64[5], op=sum) #2: rank 0 of 2 waited 1 s" in result.stderr
    assert "before it: barrier #1" in result.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_after_fewer_batches_is_named_so_in_the_error_and_by_diagnose(ended, tmp_path):
    program = f"""
        import bagua_comm
        from bagua_comm import Engine, GradientAllReduce, Plan, Point, TensorSpec
        comm = bagua_comm.connect(timeout_s=30, record={str(tmp_path / "records")!r})
        plan = Plan.pack([TensorSpec("a", (4,), "float32")])
        with Engine(comm, GradientAllReduce(), plan, plan.allocate()) as engine:
            for _ in range(5 if comm.rank == 0 else 8):
                engine.at(Point.FORWARD)
                engine.ready("a")
                engine.at(Point.BACKWARD)
                engine.at(Point.STEP)
        comm.close()
        """
    result = ended(2, program, code=1, flags=["-v"])
    text = "rank 0 made 5 steps and left; rank 1 waits in its 6th step: fewer batches? use `with ddp.join():`"
    assert f"CommMismatch: allreduce(float32[4], op=avg) #7 of world.1: {text}" in result.stderr
    assert result.stderr.count(text) == 1
    assert "MPI_ABORT was invoked" in result.stderr  # with -v alone
    (job,) = (tmp_path / "records").iterdir()
    diagnosis = str(diagnose(read_folder(job)))
    assert diagnosis.startswith(f"* {text}")
    for words in (result.stderr, diagnosis):
        assert "left: its program ended, or it closed its communicator" in words
        assert "no record" not in words


@pytest.mark.slow
def test_different_sizes_never_write_beyond_our_arrays(ended):
    program = """
        import bagua_comm, numpy as np
        for count in (4, 100_000):
            with bagua_comm.connect(timeout_s=1) as comm:
                guarded = np.full(count + comm.rank + 64, 7.0)
                try:
                    comm.allreduce(np.ones(count + comm.rank), out=guarded[32:-32])
                except bagua_comm.CommError as error:
                    print(type(error).__name__, flush=True)
                assert (guarded[:32] == 7).all() and (guarded[-32:] == 7).all()
        """
    result = ended(2, program)
    assert "CommMismatch" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 5])
def test_survivors_of_a_killed_rank_shrink_continue_and_end(ended, exit_code):
    program = f"""
        import bagua_comm, numpy as np, os, signal, sys
        comm = bagua_comm.connect(timeout_s=30)
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.allreduce(np.ones(200_000))  # through shared memory
        except bagua_comm.RankFailed as error:
            print("failed:", error.ranks)
        except bagua_comm.CommAborted:
            pass
        comm = comm.shrink()
        assert bagua_comm.default() is comm
        print(f"rank {{comm.rank}} of {{comm.size}}: sum {{comm.allreduce(np.array(1.0))}}", flush=True)
        sys.exit({exit_code} if comm.rank == 1 else 0)
        """
    result = ended(4, program, code=exit_code, flags=["--ulfm"], timeout_s=80)
    assert "failed: (2,)" in result.stdout
    for rank in range(3):
        assert f"rank {rank} of 3: sum 3.0" in result.stdout


@pytest.mark.slow
def test_a_death_in_a_reduction_of_mpi_ends_the_other_ranks_in_any_order(ended):
    program = """
        import bagua_comm, numpy as np, os, signal
        comm = bagua_comm.connect(timeout_s=30, op_order="any")
        from bagua_comm.transports.mpi.native import Native
        if comm.rank == 1:  # once the ranks have agreed on the call
            Native.allreduce = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.allreduce(np.ones(200_000))
        except bagua_comm.RankFailed as error:
            print("failed:", error.ranks)
        comm = comm.shrink()
        assert not comm.transports[0].adds_in_rank_order
        total = comm.allreduce(np.ones(70_000))[-1]
        print(f"rank {comm.rank} of {comm.size}, {comm.op_order}: {total}", flush=True)
        """
    result = ended(3, program, flags=["--ulfm"], timeout_s=80)
    assert "failed: (1,)" in result.stdout
    for rank in range(2):
        assert f"rank {rank} of 2, any: 2.0" in result.stdout


@pytest.mark.slow
def test_less_than_thread_multiple_works_without_overlap_and_says_so(ended):
    program = """
        import mpi4py
        mpi4py.rc.thread_level = "funneled"
        import bagua_comm, numpy as np
        with bagua_comm.connect(timeout_s=30) as comm, comm.lane() as lane:
            x = np.ones(3)
            lane.submit(lane.comm.allreduce, x, out=x)
            lane.wait()
            print(type(lane).__name__, x.tolist(), flush=True)
        """
    result = ended(2, program)
    assert result.stdout.count("InlineLane [2.0, 2.0, 2.0]") == 2
    assert "MPI grants less than MPI_THREAD_MULTIPLE" in result.stderr


@pytest.mark.parametrize(
    "start",
    [
        "mpi4py.rc.finalize = False; from mpi4py import MPI",
        pytest.param("mpi4py.rc.finalize = False", marks=pytest.mark.slow),
        pytest.param("mpi4py.rc.initialize = False; from mpi4py import MPI", marks=pytest.mark.slow),
    ],
    ids=["it is imported first", "connect imports it", "connect starts MPI"],
)
@pytest.mark.parametrize("end", ["pass", pytest.param("MPI.Finalize()", marks=pytest.mark.slow)])
def test_mpi_is_finalized_where_mpi4py_does_not_do_so(ended, start, end):
    """Without it, mpirun ends with exit code 1, and says that a rank exited improperly."""
    program = f"""
        import mpi4py
        {start}
        import bagua_comm, numpy as np
        with bagua_comm.connect(timeout_s=30) as comm:
            print(comm.allreduce(np.ones(3)).tolist(), flush=True)
        from mpi4py import MPI
        {end}
        """
    result = ended(2, program)
    assert "improperly" not in result.stderr
    assert result.stdout.count("[2.0, 2.0, 2.0]") == 2


@pytest.mark.slow
def test_an_error_of_ours_is_one_short_message_with_the_line_of_the_program(ended):
    program = """
        import bagua_comm, numpy as np, time
        comm = bagua_comm.connect(timeout_s=1)
        def train():
            comm.allreduce(np.ones(5))
        if comm.rank == 0:
            time.sleep(60)
        train()
        """
    result = ended(3, program, code=1)
    assert result.stderr.count("CommTimeout: allreduce(float64[5], op=sum) #1") == 1
    assert re.search(r"rank [12] of 3 on .*: CommTimeout: ", result.stderr)
    assert re.search(r"script.py:5, in train: comm.allreduce\(np.ones\(5\)\)", result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_whole_traceback_of_an_error_of_ours_is_shown_where_it_is_asked_for(ended):
    program = """
        import bagua_comm, numpy as np
        comm = bagua_comm.connect(timeout_s=60)
        comm.allreduce(np.ones(5), op="median" if comm.rank == 1 else "sum")
        """
    result = ended(2, program, code=1, env={**os.environ, "BAGUA_TRACEBACK": "1"})
    assert "rank 1 of 2:" in result.stderr
    assert "Traceback (most recent call last)" in result.stderr
    assert "bagua_comm/comm/" in result.stderr


@pytest.mark.slow
def test_an_exception_in_a_thread_that_communicates_ends_all_ranks_and_in_another_does_not(ended):
    program = """
        import bagua_comm, numpy as np, threading, time
        comm = bagua_comm.connect(timeout_s=60)

        def log():
            raise OSError("the disk is full")

        def average():
            if comm.rank == 1:
                raise RuntimeError("a thread has a bad day")

        def run(task):
            thread = threading.Thread(target=task, daemon=True)
            thread.start()
            thread.join()

        run(log)
        comm.barrier()
        print("still here", flush=True)
        comm.barrier()
        run(average)
        comm.allreduce(np.ones(5)) if comm.rank == 0 else time.sleep(60)
        """
    result = ended(2, program, code=1)
    assert result.stdout.count("still here") == 2
    assert re.search(r"rank 1 of 2:\n.*RuntimeError: a thread has a bad day", result.stderr, re.DOTALL)


@pytest.mark.slow
def test_an_exception_in_a_thread_that_is_no_daemon_ends_all_ranks(ended):
    program = """
        import bagua_comm, threading, time
        comm = bagua_comm.connect(timeout_s=60)

        def load():
            raise RuntimeError("no more data")

        if comm.rank == 1:
            threading.Thread(target=load).start()
            time.sleep(60)
        comm.barrier()
        """
    result = ended(2, program, code=1)
    assert "RuntimeError: no more data" in result.stderr


@pytest.mark.slow
def test_an_exception_ends_all_ranks_though_the_program_has_its_own_hook(ended):
    program = """
        import bagua_comm, numpy as np, sys
        comm = bagua_comm.connect(timeout_s=60)
        sys.excepthook = lambda kind, error, trace: print("caught by the program:", error, flush=True)
        if comm.rank == 1:
            raise RuntimeError("rank one has a bad day")
        comm.allreduce(np.ones(100_000))
        """
    result = ended(2, program, code=1)
    assert "caught by the program: rank one has a bad day" in result.stdout
    assert "rank 1 of 2 ended with RuntimeError, and all ranks with it" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        "with comm: (sys.exit(0) if comm.rank == 1 else comm.allreduce(x))",
        "with comm: (comm.allreduce(x) if comm.rank == 0 else None)",
        "comm.allreduce(x) if comm.rank == 0 else sys.exit(0)",
    ],
)
def test_a_rank_that_leaves_in_the_middle_is_not_waited_for(ended, body):
    program = f"""
        import bagua_comm, numpy as np, sys
        comm, x = bagua_comm.connect(timeout_s=60), np.ones(100_000)
        {body}
        """
    result = ended(2, program, code=1)
    assert "rank 0 of 2 on " in result.stderr
    assert "allreduce(float64[100000], op=sum)" in result.stderr


@pytest.mark.slow
def test_a_call_outlives_the_world_that_its_communicator_was_derived_from(ended):
    program = """
        import bagua_comm, numpy as np, threading, time
        comm = bagua_comm.connect(timeout_s=2)
        dup = comm.dup()

        def receive():
            try:
                dup.recv(np.zeros(3), source=1 - comm.rank)
            except bagua_comm.CommTimeout:
                print("in vain", flush=True)

        thread = threading.Thread(target=receive)
        thread.start()
        time.sleep(0.2)
        comm.close()
        thread.join()
        """
    assert ended(2, program).stdout == "in vain\n" * 2


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_so_are_the_records_of_the_others(ended):
    program = """
        import bagua_comm, numpy as np, os, signal
        comm = bagua_comm.connect(timeout_s=60)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.allreduce(np.ones(5))
        """
    result = ended(3, program, code=None, mpirun=["--oversubscribe"])
    said = re.findall(r"(rank \d of 3) on \S+ \(process \d+\) has died", result.stderr)
    assert said == ["rank 1 of 3"]  # by one rank alone
    folder = Path(re.search(r"diagnose (\S+)", result.stderr)[1])
    (finding, *_) = diagnose(read_folder(folder)).findings
    assert (finding.kind, finding.ranks) == ("died", (1,))


def test_ranks_that_mpirun_ended_have_a_record_and_did_not_die(tmp_path, capfd):
    log = JoinLog({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})
    log.dead = lambda: {1: 4001, 2: 4002}
    handler = ExitHandler()
    handler.abort.prepare(None, log)
    flight = FlightRecorder(0, 4, folder=tmp_path)
    FlightRecorder(2, 4, folder=tmp_path).write()  # mpirun ended it after rank 1
    handler._worlds.append(SimpleNamespace(flight=flight))
    died = handler._died_without_record()
    assert list(died) == [1]
    flight.died(died)
    flight.write()
    handler._report_deaths(died)
    text = capfd.readouterr().err
    assert f"rank 1 of 4 on {socket.gethostname()} (process 4001) has died" in text
    assert f"diagnose {tmp_path}" in text
    assert [f.ranks for f in diagnose(read_folder(tmp_path)).findings if f.kind == "died"] == [(1,)]


def test_processes_that_have_checked_in_and_ended_are_dead(tmp_path):
    variables = {"OMPI_COMM_WORLD_SIZE": "3", "PMIX_NAMESPACE": "job", "PMIX_SERVER_TMPDIR": str(tmp_path)}
    tmp_path.chmod(0o700)
    logs = [JoinLog({**variables, "OMPI_COMM_WORLD_RANK": str(rank)}) for rank in range(3)]
    for log in logs[:2]:
        log.check_in()
    assert logs[0].dead() == {}
    mine = ProcessId.mine()
    (file,) = tmp_path.glob("*-1")
    file.write_text(f"{ProcessId(mine.namespace, mine.pid, mine.start + 1).text()}\n")  # an earlier process
    assert logs[0].dead() == {1: mine.pid}


def test_sigterm_to_one_rank_ends_all_ranks_and_their_children(ended):
    program = """
        import bagua_comm, numpy as np, os, signal, subprocess, time
        comm = bagua_comm.connect(timeout_s=60)
        child = subprocess.Popen(["sleep", "60"])  # holds the rank's output open
        print("child", child.pid, flush=True)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        comm.allreduce(np.ones(5))
        """
    result = ended(2, program, code=128 + signal.SIGTERM)
    children = [int(pid) for pid in re.findall(r"child (\d+)", result.stdout)]
    assert len(children) == 2
    until(lambda: "running" not in map(state_of, children), limit_s=10)


@pytest.mark.slow
def test_a_forked_child_ends_with_its_own_exit_code_and_leaves_the_ranks_alone(ended):
    program = """
        import bagua_comm, numpy as np, os, sys
        comm = bagua_comm.connect(timeout_s=30)

        def fork(task):
            child = os.fork()
            if child == 0:
                task()
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        tasks = [lambda: sys.exit(3), lambda: 1 / 0, lambda: sys.exit(comm.close()), bagua_comm.connect]
        codes = [fork(task) for task in tasks]
        print(codes, comm.allreduce(np.ones(1)), flush=True)
        """
    result = ended(2, program)
    assert result.stdout.count("[3, 1, 0, 1] [2.]") == 2
    assert "cannot be a rank: start ranks with mpirun" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "flags"), [("pass", []), ("import mpi4py.MPI", []), ("pass", ["--ulfm"])], ids=["", "MPI", "ULFM"]
)
def test_a_program_that_ends_with_an_open_receive_names_it_and_fails(ended, start, flags):
    program = f"""
        {start}
        import atexit
        atexit.register(print, "at exit", flush=True)
        import bagua_comm, numpy as np
        comm = bagua_comm.connect(timeout_s=30)
        if comm.rank == 1:
            comm.isend(np.ones(500_000), dest=0)  # it ends, and is no error
            request = comm.irecv(np.ones(3), source=0, tag="x")
        else:
            comm.recv(np.ones(500_000), source=1)
        """
    result = ended(2, program, code=1, flags=flags)
    assert (
        "rank 1 of 2: world ends before irecv(source=0, tag=x): wait for the results of requests" in result.stderr
    )
    assert result.stdout.count("at exit") == 2


@pytest.mark.slow
def test_ranks_that_end_long_after_the_others_are_waited_for(ended):
    program = """
        import bagua_comm, time
        comm = bagua_comm.connect(timeout_s=1)
        if comm.rank == 1:
            time.sleep(5)
            print("evaluated", flush=True)
        """
    result = ended(2, program)
    assert "evaluated" in result.stdout
    assert re.search(
        r"rank 0 of 2 .* has waited 1 s .*it continues to wait.* rank 1 \(process \d+, running\)", result.stderr
    )


def test_an_exception_of_any_thread_completes_saves_before_all_ranks_end(monkeypatch):
    handler, order = ExitHandler(), []
    monkeypatch.setattr(handler, "_report", lambda *_: order.append("report"))
    monkeypatch.setattr(handler.abort, "end_all", lambda *_: order.append("end"))
    handler.add(SimpleNamespace(leave_first=lambda error: order.append(f"complete after {error}")))
    handler._on_exception(ValueError, ValueError("main"), None)
    thread = threading.Thread(name="loader")
    handler._on_thread_exception(threading.ExceptHookArgs([ValueError, ValueError("thread"), None, thread]))
    assert order == ["report", "complete after main", "end", "report", "complete after thread", "end"]


@pytest.mark.parametrize("attempt", ["0", "1"])
def test_ranks_that_are_late_after_a_restart_are_no_failure_of_the_program(tmp_path, monkeypatch, attempt):
    """Under `run --restarts`: the machine is busy, since they have connected before."""
    for name, value in {"BAGUA_JOB": "job", "BAGUA_JOB_FOLDER": str(tmp_path), "BAGUA_ATTEMPT": attempt}.items():
        monkeypatch.setenv(name, value)
    handler, over = ExitHandler(), threading.Event()
    monkeypatch.setattr(handler.abort, "with_message", lambda message: over.set())
    text = "connect: rank 1 of 2 waited 15 s for the other ranks: rank 0 runs, but has not called connect"
    handler.limit(SimpleNamespace(complaint=lambda: text, ended=[], rank=1), lambda: over.wait(30))
    record = tmp_path / "record"
    found = list(entries(record.read_text().splitlines())) if record.exists() else []
    assert [each["text"] for each in found] == ([text] if attempt == "1" else [])
    assert judge(found, 1).outcome == ("lost" if attempt == "1" else "failed")
