"""connect(), and what happens when a rank fails: always an end within seconds, and a reason."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from launch import run_python

import bagua_comm
from bagua_comm import BootstrapError, bootstrap
from bagua_comm.transports import LocalTransport
from bagua_comm.transports.local import Hub


def test_without_mpirun_the_world_is_one_rank():
    with bagua_comm.connect() as comm:
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node) == (0, 1, 0, 1, 0)
        assert comm.transports[0].name == "local"
        assert comm.allreduce(np.arange(3.0)).tolist() == [0, 1, 2]


def test_one_rank_starts_no_mpi():
    code = "import sys, bagua_comm; bagua_comm.connect().close(); print('mpi4py.MPI' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_default_is_what_connect_made_last_until_it_is_closed():
    with bagua_comm.connect() as comm:
        assert bagua_comm.default() is comm
    other = bagua_comm.default()
    assert other is not comm
    other.close()


def test_timeout_must_be_positive():
    with pytest.raises(BootstrapError, match="timeout_s is 0"):
        bagua_comm.connect(timeout_s=0)


def test_torchrun_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bootstrap.under_torchrun()
    with pytest.raises(BootstrapError, match=r"call bagua_torch.connect\(\).*mpirun.*python -m bagua_comm run"):
        bagua_comm.connect()


def test_a_world_of_one_rank_under_torchrun_needs_nothing(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with bagua_comm.connect() as comm:
        assert comm.size == 1


def test_any_transport_can_be_the_world():
    def body(transport):
        with bagua_comm.connect(transport=transport, check=True) as comm:
            return comm.local_rank, comm.local_size, int(comm.allreduce(np.array(1)))

    hub = Hub(2)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(body, [LocalTransport(hub, rank) for rank in range(2)]))
    assert results == [(0, 2, 2), (1, 2, 2)]


def test_nodes_of_a_given_transport_can_be_labelled():
    with bagua_comm.connect(transport=LocalTransport(), node="here") as comm:
        assert (comm.node, comm.local_rank, comm.local_size) == (0, 0, 1)
        assert bagua_comm.default() is comm


def launch(tmp_path, ranks, script, **options):
    start = time.monotonic()
    result = run_python(ranks, script=(tmp_path / "script.py", script), **options)
    return result, time.monotonic() - start


def test_an_exception_in_one_rank_ends_all_with_its_traceback(tmp_path):
    result, seconds = launch(
        tmp_path,
        3,
        """
        import bagua_comm, numpy as np
        comm = bagua_comm.connect(timeout_s=60)
        if comm.rank == 1:
            raise RuntimeError("rank one has a bad day")
        comm.allreduce(np.ones(100_000))
        """,
    )
    assert result.returncode == 1
    assert "RuntimeError: rank one has a bad day" in result.stderr
    assert "rank 1 of 3:" in result.stderr
    assert seconds < 30


def test_a_rank_that_exits_in_the_middle_ends_all_with_its_code(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np, sys
        with bagua_comm.connect(timeout_s=60) as comm:
            if comm.rank == 1:
                sys.exit(7)
            comm.allreduce(np.ones(100_000))
        """,
    )
    assert result.returncode == 7
    assert seconds < 30


def test_a_rank_that_never_comes_is_a_timeout_that_names_the_call(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np, time
        comm = bagua_comm.connect(timeout_s=1)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(60)
        comm.allreduce(np.ones(5))
        """,
    )
    assert result.returncode == 1
    assert "CommTimeout: allreduce(float64[5], op=sum) #2: rank 0 of 2 waited 1 s" in result.stderr
    assert "before it: barrier #1" in result.stderr
    assert seconds < 30


def test_different_sizes_never_write_beyond_our_arrays(tmp_path):
    result, _ = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np
        for count in (4, 100_000):
            with bagua_comm.connect(timeout_s=1) as comm:
                guarded = np.full(count + comm.rank + 64, 7.0)
                try:
                    comm.allreduce(np.ones(count + comm.rank), out=guarded[32:-32])
                except bagua_comm.CommError as error:
                    print(type(error).__name__, flush=True)
                assert (guarded[:32] == 7).all() and (guarded[-32:] == 7).all()
        """,
    )
    assert result.returncode == 0, result.stderr
    assert "CommMismatch" in result.stdout


def test_survivors_of_a_killed_rank_shrink_and_go_on(tmp_path):
    result, seconds = launch(
        tmp_path,
        4,
        """
        import bagua_comm, numpy as np, os, signal
        comm = bagua_comm.connect(timeout_s=30)
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            while True:
                comm.allreduce(np.ones(100_000))
        except bagua_comm.RankFailed as error:
            print("failed:", error.ranks)
        except bagua_comm.CommAborted:
            pass
        comm = comm.shrink()
        print(f"rank {comm.rank} of {comm.size}: sum {comm.allreduce(np.array(1.0))}", flush=True)
        """,
        mpirun=("--with-ft", "ulfm"),
    )
    assert "failed: (2,)" in result.stdout, result.stderr
    for rank in range(3):
        assert f"rank {rank} of 3: sum 3.0" in result.stdout
    assert seconds < 60


def test_less_than_thread_multiple_works_without_overlap_and_says_so(tmp_path):
    result, _ = launch(
        tmp_path,
        2,
        """
        import mpi4py
        mpi4py.rc.thread_level = "funneled"
        import bagua_comm, numpy as np
        with bagua_comm.connect(timeout_s=30) as comm, comm.lane() as lane:
            x = np.ones(3)
            lane.submit(lane.comm.allreduce, x, out=x)
            lane.wait()
            print(type(lane).__name__, x.tolist(), flush=True)
        """,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("InlineLane [2.0, 2.0, 2.0]") == 2
    assert "MPI grants less than MPI_THREAD_MULTIPLE" in result.stderr
