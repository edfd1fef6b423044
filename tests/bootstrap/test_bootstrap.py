"""connect(), and what happens when a rank fails: always an end within seconds, and a reason."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support import device_ranks
from support.device_ranks import HostOnly
from support.launch import run_python
from support.waiting import until

import bagua_comm
from bagua_comm import BootstrapError
from bagua_comm.bootstrap.environment import torchrun_local_rank, under_torchrun
from bagua_comm.bootstrap.gpu import GpuFacts, describe_gpu, nccl_obstacle
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


NO_TIMEOUTS = [0, -1, math.nan, math.inf, -math.inf, 1e10, True, "3", None, 2j]


@pytest.mark.parametrize("timeout_s", NO_TIMEOUTS, ids=str)
@pytest.mark.parametrize("make", [bagua_comm.connect, LocalTransport])
def test_a_timeout_that_is_no_positive_number_of_seconds_is_refused(make, timeout_s):
    with pytest.raises(BootstrapError, match=f"timeout_s is {re.escape(repr(timeout_s))}, expected seconds"):
        make(timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [1, 0.5, np.float32(2.5), np.int64(3), 1e9])
def test_any_positive_number_is_a_timeout(timeout_s):
    with bagua_comm.connect(timeout_s=timeout_s) as comm:
        assert comm.timeout_s == timeout_s


def test_torchrun_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert under_torchrun()
    with pytest.raises(BootstrapError, match=r"call bagua_torch.connect\(\).*mpirun.*python -m bagua_comm run"):
        bagua_comm.connect()


def test_mpiruns_own_numbers_in_torchruns_names_are_not_torchrun(monkeypatch):
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert not under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "4")  # another world than mpirun's
    assert under_torchrun()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")  # mpirun has started torchrun
    assert under_torchrun()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("WORLD_SIZE", "abc"),
        ("WORLD_SIZE", "0"),
        ("WORLD_SIZE", ""),
        ("RANK", "abc"),
        ("RANK", "2"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "first"),
    ],
)
def test_a_variable_of_torchrun_that_is_no_such_number_is_named(monkeypatch, name, text):
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", name: text}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(BootstrapError, match=f"connect: the environment variable {name} is '{text}', expected "):
        torchrun_local_rank() if name == "LOCAL_RANK" else bagua_comm.connect()


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


def test_an_order_of_reductions_is_taken_by_every_transport():
    with bagua_comm.connect(transport=LocalTransport(), op_order="any") as comm:
        assert comm.op_order == "any"
        assert comm.dup().op_order == "any"
        assert comm.transports[0].adds_in_rank_order  # threads have no other


def test_ranks_that_give_different_orders_are_named():
    def body(transport):
        order = "any" if transport.rank == 1 else "rank"
        with pytest.raises(BootstrapError, match=r"ranks \[0, 2\] give 'rank'; ranks \[1\] give 'any'"):
            bagua_comm.connect(transport=transport, op_order=order)

    hub = Hub(3)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(body, [LocalTransport(hub, rank) for rank in range(3)]))


def test_an_order_must_be_one_of_two():
    with pytest.raises(BootstrapError, match="op_order is None, expected one of rank, any"):
        bagua_comm.connect(op_order=None)


# The device side ---------------------------------------------------------------------------------------


def names_of(comm):
    return [transport.name for transport in comm.transports], comm.device


def connect_all(ranks, body=names_of, **options):
    return device_ranks.connect_all(ranks, body, timeout_s=5.0, **options)


def total(comm):
    import cupy

    assert cupy.cuda.Device().id == comm.device
    return comm.allreduce(cupy.asarray(np.array([comm.rank + 1.0]))).get().tolist()


def test_ranks_with_a_gpu_each_have_nccl(device):
    device.count = 2
    assert connect_all(2) == [(["recording", "nccl"], 0), (["recording", "nccl"], 1)]
    assert connect_all(2, total) == [[3.0], [3.0]]


def test_devices_are_dealt_by_machine_whatever_nodes_are_emulated(device):
    device.count = 2
    assert connect_all(2, lambda comm: (comm.device, comm.local_size), node="same") == [(0, 2), (1, 2)]
    hub = Hub(2)

    def run(rank):
        with bagua_comm.connect(transport=HostOnly(LocalTransport(hub, rank)), node=rank) as comm:
            return comm.device, comm.local_rank, comm.transports[1].name

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [(0, 0, "nccl"), (1, 0, "nccl")]


def test_ranks_that_share_a_gpu_go_through_host_memory_and_are_told_why(device):
    with pytest.warns(
        RuntimeWarning, match="NCCL_HOSTID of its own.*NCCL_MULTI_RANK_GPU_ENABLE=1.*gpu='staged'"
    ) as caught:
        results = connect_all(3)
    assert results == [(["recording", "staged"], 0)] * 3
    (warning,) = caught
    assert f"ranks [0, 1, 2] share the GPU 0000:00:00.0 of {socket.gethostname()}" in str(warning.message)


def test_staged_is_taken_without_a_word_where_it_is_asked_for(device):
    assert connect_all(2, total, gpu="staged") == [[3.0], [3.0]]
    device.count = 2
    assert connect_all(2, gpu="staged") == [(["recording", "staged"], 0), (["recording", "staged"], 1)]


def test_nccl_that_cannot_be_is_the_same_error_everywhere(device):
    first, second = connect_all(2, gpu="nccl")
    assert first == second
    assert first.startswith("connect: gpu is 'nccl', but ranks [0, 1] share the GPU")


def test_ranks_may_share_a_gpu_if_nccl_was_told_so(device, monkeypatch):
    device.nccl_allows_sharing = True
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert connect_all(2) == [(["recording", "nccl"], 0)] * 2


@pytest.mark.parametrize("gpu", ["auto", "nccl"])
def test_nccl_that_fails_though_it_should_not(device, monkeypatch, gpu):
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")  # but this NCCL does not listen
    if gpu == "nccl":
        first, second = connect_all(2, gpu=gpu)
        assert first == second
        assert "rank 0 of 2: NCCL failed: " in first
        return
    with pytest.warns(RuntimeWarning, match="NCCL failed: .*invalid usage"):
        assert connect_all(2) == [(["recording", "staged"], 0)] * 2


def test_without_nccl_the_reason_says_what_brings_it(device, monkeypatch):
    from cupy.cuda import nccl

    monkeypatch.setattr(nccl, "available", False)
    device.count = 2
    with pytest.warns(RuntimeWarning, match=r"rank 0 cannot load NCCL \(.*bagua-comm\[cuda13\]"):
        assert connect_all(2) == [(["recording", "staged"], 0), (["recording", "staged"], 1)]


@pytest.mark.parametrize("gpu", ["nccl", "staged"])
def test_what_needs_a_device_is_refused_without_one(device, gpu):
    device.count = 0
    assert connect_all(2) == [(["recording"], None)] * 2
    assert connect_all(2, gpu=gpu) == [f"connect: gpu is '{gpu}', but ranks [0, 1] have no CUDA device"] * 2


@pytest.mark.parametrize(
    ("gpu", "where"), [*((gpu, "Device") for gpu in ("auto", "nccl", "staged")), ("staged", "Stream")]
)
def test_a_gpu_that_one_rank_cannot_use_is_the_same_error_on_all(device, monkeypatch, gpu, where):
    import cupy

    device.count = 3
    cls, name = (cupy.cuda.Device, "use") if where == "Device" else (cupy.cuda.Stream, "__init__")
    function = getattr(cls, name)

    def fail_on_rank_1(its, *arguments, **options):
        if (its.id if where == "Device" else device.device) == 1:
            raise cupy.cuda.runtime.CUDARuntimeError(46)
        return function(its, *arguments, **options)

    monkeypatch.setattr(cls, name, fail_on_rank_1)
    first, second, third = connect_all(3, gpu=gpu)
    assert first == second == third
    assert re.match(r"connect: rank 1 cannot use its GPU: .*are busy or unavailable; free it, hide it by", first)


def test_gpu_none_leaves_devices_alone(device):
    assert connect_all(2, gpu="none") == [(["recording"], None)] * 2
    code = "import sys, bagua_comm; bagua_comm.connect(gpu='none').close(); print('cupy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "False\n", result.stderr


def test_gpu_must_be_one_of_four():
    with pytest.raises(BootstrapError, match="gpu is 'cuda', expected one of auto, nccl, staged, none"):
        bagua_comm.connect(gpu="cuda")


@pytest.mark.parametrize("gpu", ["auto", "nccl", "staged"])
def test_one_rank_needs_nothing_beside_its_own_transport(device, gpu):
    with bagua_comm.connect(gpu=gpu) as comm:
        assert names_of(comm) == (["local"], 0)
        assert total(comm) == [1.0]


A = GpuFacts("a", "00:01", "5a", 23203, "", False)
SLICE = A._replace(uuid="5b")
OLD, OLD_SLICE = A._replace(nccl=22907), SLICE._replace(nccl=22907)


@pytest.mark.parametrize(
    ("gpus", "obstacle"),
    [
        ([A], None),
        ([A, A._replace(bus_id="00:02"), A._replace(machine="b")], None),  # another slot, another machine
        ([A, A._replace(bus_id="00:02"), A], "ranks [0, 2] share the GPU 00:01 of a"),
        ([A, SLICE], None),
        ([A, SLICE, SLICE], "ranks [1, 2] share the GPU 00:01 of a"),
        (
            [OLD, OLD_SLICE],
            "ranks [0, 1] have slices (MIG) of the GPU 00:01 of a, which NCCL tells apart from version",
        ),
        ([OLD, OLD], "ranks [0, 1] share the GPU 00:01 of a"),
        ([OLD, OLD._replace(bus_id="00:02")], None),
        ([A._replace(shares=True)] * 2, None),
        ([A._replace(shares=True), A], "ranks [0, 1] share"),
        ([A._replace(shares=True, nccl=22907)] * 2, "ranks [0, 1] share"),
        ([A, A._replace(machine="b", nccl=22907)], "rank 0 has version 23203 of NCCL, but rank 1 has 22907"),
        ([A, A._replace(machine="b", nccl=0, problem="no libnccl")], "rank 1 cannot load NCCL (no libnccl)"),
        ([A, A._replace(bus_id=None, broken="device 1: busy")], "rank 1 cannot use its GPU (device 1: busy)"),
    ],
)
def test_whom_nccl_serves(gpus, obstacle):
    found = nccl_obstacle(gpus)
    assert found is None if obstacle is None else found.startswith(obstacle)


def test_a_default_stream_for_each_thread_is_warned_of(device, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=2))
    with pytest.warns(
        RuntimeWarning, match=r"connect: .* \(CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1\), .* unset that"
    ):
        bagua_comm.connect().close()


def test_nccl_hostid_is_the_machine_that_nccl_sees(device, monkeypatch):
    assert describe_gpu(0) == GpuFacts(socket.gethostname(), "0000:00:00.0", "ff" * 15 + "00", 23203, "", False)
    monkeypatch.setenv("NCCL_HOSTID", "rank-7")
    assert describe_gpu(0).machine == "rank-7"


# Failure ------------------------------------------------------------------------------------------------


SOON_S = 55
"""Less than the 60 s for which ranks would wait, or sleep."""


def launch(tmp_path, ranks, script, **options):
    start = time.monotonic()
    result = run_python(ranks, script=(tmp_path / "script.py", script), **options)
    return result, time.monotonic() - start


def test_an_exception_in_one_rank_ends_all_with_its_traceback(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
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
    assert "rank 1 of 2:" in result.stderr
    assert seconds < SOON_S


@pytest.mark.slow
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
    assert seconds < SOON_S


@pytest.mark.slow
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
    assert seconds < SOON_S


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("exit_code", [0, 5])
def test_survivors_of_a_killed_rank_shrink_go_on_and_end(tmp_path, exit_code):
    result, seconds = launch(
        tmp_path,
        4,
        f"""
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
        """,
        flags=["--ulfm"],
        timeout_s=80,
    )
    assert result.returncode == exit_code, result.stderr
    assert "failed: (2,)" in result.stdout
    for rank in range(3):
        assert f"rank {rank} of 3: sum 3.0" in result.stdout
    assert seconds < SOON_S


@pytest.mark.slow
def test_a_rank_that_dies_in_a_reduction_of_mpis_own_ends_the_others_who_go_on_in_any_order(tmp_path):
    result, _ = launch(
        tmp_path,
        3,
        """
        import bagua_comm, numpy as np, os, signal
        comm = bagua_comm.connect(timeout_s=30, op_order="any")
        if comm.rank == 1:  # once the ranks have agreed on the call
            comm.transports[0]._allreduce_natively = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        try:
            comm.allreduce(np.ones(200_000))
        except bagua_comm.RankFailed as error:
            print("failed:", error.ranks)
        comm = comm.shrink()
        assert not comm.transports[0].adds_in_rank_order
        total = comm.allreduce(np.ones(70_000))[-1]
        print(f"rank {comm.rank} of {comm.size}, {comm.op_order}: {total}", flush=True)
        """,
        flags=["--ulfm"],
        timeout_s=80,
    )
    assert result.returncode == 0, result.stderr
    assert "failed: (1,)" in result.stdout
    for rank in range(2):
        assert f"rank {rank} of 2, any: 2.0" in result.stdout


@pytest.mark.slow
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


# Ranks that don't come -----------------------------------------------------------------------------------


def reason(result):
    """The one line in which `connect` gave up."""
    (line,) = [line for line in result.stderr.splitlines() if "connect: rank" in line]
    return line


@pytest.mark.slow
def test_connect_names_the_ranks_that_are_stopped_or_have_ended(tmp_path):
    result, seconds = launch(
        tmp_path,
        4,
        """
        import os, signal, sys, time
        rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 2:
            sys.exit(0)
        time.sleep(0.5)  # mpirun sees that rank 2 ends, where others have begun to start MPI
        import bagua_comm
        bagua_comm.connect(timeout_s=2)
        """,
        timeout_s=80,
    )
    assert result.returncode == 1
    message = reason(result)
    assert re.search(r"connect: rank [03] of 4 on .* waited \d+ s for the other ranks: ", message)
    assert re.search(r"rank 1 \(process \d+\) is stopped", message)
    assert "rank 2 ended without calling connect" in message
    assert seconds < SOON_S


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow) for first in ("pass", "from mpi4py import MPI")],
    ids=["", "MPI already runs"],
)
def test_connect_names_a_rank_that_runs_but_does_not_come(tmp_path, first):
    result, seconds = launch(
        tmp_path,
        2,
        f"""
        import bagua_comm, os, time
        {first}
        if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
            time.sleep(60)
        bagua_comm.connect(timeout_s=1)
        """,
        timeout_s=80,
    )
    assert result.returncode == 1
    assert re.search(r"connect: rank 1 of 2 .*rank 0 \(process \d+\) runs, but has not called", reason(result))
    assert "Traceback" not in result.stderr
    assert seconds < SOON_S


@pytest.mark.slow
def test_connect_names_a_rank_that_died_while_mpi_started(tmp_path):
    """MPI starts on the others. (A rank that is killed inside of MPI_Init may end them by MPI's own abort.)"""
    result, seconds = launch(
        tmp_path,
        3,
        """
        import bagua_comm, os, signal, time
        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        bagua_comm.connect(timeout_s=2)
        """,
        flags=["--ulfm"],  # without it mpirun ends the others at once
        timeout_s=80,
    )
    assert result.returncode == 1
    assert re.search(r"rank 1 (\(process \d+\) has ended|ended without)", reason(result))
    assert seconds < SOON_S


# The end of a rank ---------------------------------------------------------------------------------------


def test_an_error_of_ours_is_one_short_message_with_the_line_of_the_program(tmp_path):
    result, _ = launch(
        tmp_path,
        3,
        """
        import bagua_comm, numpy as np, time
        comm = bagua_comm.connect(timeout_s=1)
        def train():
            comm.allreduce(np.ones(5))
        if comm.rank == 0:
            time.sleep(60)
        train()
        """,
    )
    assert result.returncode == 1
    assert result.stderr.count("CommTimeout: allreduce(float64[5], op=sum) #1") == 1
    assert re.search(r"rank [12] of 3 on .*: CommTimeout: ", result.stderr)
    assert re.search(r"script.py:5, in train: comm.allreduce\(np.ones\(5\)\)", result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_the_whole_traceback_of_an_error_of_ours_is_shown_where_it_is_asked_for(tmp_path):
    result, _ = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np
        comm = bagua_comm.connect(timeout_s=60)
        comm.allreduce(np.ones(5), op="median" if comm.rank == 1 else "sum")
        """,
        env={**os.environ, "BAGUA_TRACEBACK": "1"},
    )
    assert result.returncode == 1
    assert "rank 1 of 2:" in result.stderr
    assert "Traceback (most recent call last)" in result.stderr
    assert "bagua_comm/comm/" in result.stderr


@pytest.mark.slow
def test_an_exception_in_a_thread_that_communicates_ends_all_ranks_and_in_another_does_not(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
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
        """,
    )
    assert result.returncode == 1
    assert result.stdout.count("still here") == 2
    assert re.search(r"rank 1 of 2:\n.*RuntimeError: a thread has a bad day", result.stderr, re.DOTALL)
    assert seconds < SOON_S


@pytest.mark.slow
def test_an_exception_in_a_thread_that_is_no_daemon_ends_all_ranks(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
        import bagua_comm, threading, time
        comm = bagua_comm.connect(timeout_s=60)

        def load():
            raise RuntimeError("no more data")

        if comm.rank == 1:
            threading.Thread(target=load).start()
            time.sleep(60)
        comm.barrier()
        """,
    )
    assert result.returncode == 1
    assert "RuntimeError: no more data" in result.stderr
    assert seconds < SOON_S


@pytest.mark.slow
def test_an_exception_ends_all_ranks_though_the_program_has_its_own_hook(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np, sys
        comm = bagua_comm.connect(timeout_s=60)
        sys.excepthook = lambda kind, error, trace: print("caught by the program:", error, flush=True)
        if comm.rank == 1:
            raise RuntimeError("rank one has a bad day")
        comm.allreduce(np.ones(100_000))
        """,
    )
    assert result.returncode == 1
    assert "caught by the program: rank one has a bad day" in result.stdout
    assert "rank 1 of 2 ended with RuntimeError, and all ranks with it" in result.stderr
    assert seconds < SOON_S


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            "with comm: (sys.exit(0) if comm.rank == 1 else comm.allreduce(x))",
            marks=pytest.mark.slow,
            id="sys.exit in with",
        ),
        pytest.param(
            "with comm: (comm.allreduce(x) if comm.rank == 0 else None)",
            marks=pytest.mark.slow,
            id="early end of with",
        ),
        pytest.param(
            "comm.allreduce(x) if comm.rank == 0 else sys.exit(0)", marks=pytest.mark.slow, id="sys.exit"
        ),
    ],
)
def test_a_rank_that_leaves_in_the_middle_is_not_waited_for(tmp_path, body):
    result, seconds = launch(
        tmp_path,
        2,
        f"""
        import bagua_comm, numpy as np, sys
        comm, x = bagua_comm.connect(timeout_s=60), np.ones(100_000)
        {body}
        """,
    )
    assert result.returncode == 1
    assert "rank 0 of 2 on " in result.stderr
    assert "allreduce(float64[100000], op=sum)" in result.stderr
    assert seconds < SOON_S


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_sigterm_to_one_rank_ends_all_ranks_and_their_children(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
        import bagua_comm, numpy as np, os, signal, subprocess, time
        comm = bagua_comm.connect(timeout_s=60)
        child = subprocess.Popen(["sleep", "60"])  # holds the rank's output open
        print("child", child.pid, flush=True)
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        comm.allreduce(np.ones(5))
        """,
    )
    assert result.returncode == 128 + signal.SIGTERM
    children = [int(pid) for pid in re.findall(r"child (\d+)", result.stdout)]
    assert len(children) == 2
    until(lambda: not any(map(runs, children)), limit_s=10)
    assert seconds < SOON_S


@pytest.mark.slow
def test_a_forked_child_ends_with_its_own_exit_code_and_leaves_the_ranks_alone(tmp_path):
    result, seconds = launch(
        tmp_path,
        2,
        """
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
        """,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("[3, 1, 0, 1] [2.]") == 2
    assert "cannot be a rank: start ranks with mpirun" in result.stderr
    assert seconds < SOON_S


@pytest.mark.slow
def test_ranks_that_end_long_after_the_others_are_waited_for(tmp_path):
    result, _ = launch(
        tmp_path,
        2,
        """
        import bagua_comm, time
        comm = bagua_comm.connect(timeout_s=1)
        if comm.rank == 1:
            time.sleep(5)
            print("evaluated", flush=True)
        """,
    )
    assert result.returncode == 0, result.stderr
    assert "evaluated" in result.stdout
    assert re.search(
        r"rank 0 of 2 .* has waited 1 s .*it continues to wait.* rank 1 \(process \d+, running\)", result.stderr
    )
