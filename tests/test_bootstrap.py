"""connect(), and what happens when a rank fails: always an end within seconds, and a reason."""

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from device_ranks import HostOnly
from launch import run_python

import bagua_comm
from bagua_comm import BootstrapError, bootstrap
from bagua_comm.bootstrap import GpuFacts, nccl_obstacle
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


# The device side ---------------------------------------------------------------------------------------


def names_of(comm):
    return [transport.name for transport in comm.transports], comm.device


def connect_all(ranks, body=names_of, **options):
    """`body(comm)` of each rank of a world of threads, whose host transport is one like MPI."""
    hub = Hub(ranks)

    def run(rank):
        transport = HostOnly(LocalTransport(hub, rank, timeout_s=5.0))
        try:
            with bagua_comm.connect(transport=transport, **options) as comm:
                return body(comm)
        except BootstrapError as exc:
            return str(exc)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


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
        RuntimeWarning, match="NCCL_HOSTID each.*NCCL_MULTI_RANK_GPU_ENABLE=1.*gpu='staged'"
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


A = GpuFacts("a", "00:01", 23203, "", False)


@pytest.mark.parametrize(
    ("gpus", "obstacle"),
    [
        ([A], None),
        ([A, A._replace(bus_id="00:02"), A._replace(machine="b")], None),  # another slot, another machine
        ([A, A._replace(bus_id="00:02"), A], "ranks [0, 2] share the GPU 00:01 of a"),
        ([A._replace(shares=True)] * 2, None),
        ([A._replace(shares=True), A], "ranks [0, 1] share"),
        ([A._replace(shares=True, nccl=22907)] * 2, "ranks [0, 1] share"),
        ([A, A._replace(machine="b", nccl=22907)], "rank 0 has version 23203 of NCCL, but rank 1 has 22907"),
        ([A, A._replace(machine="b", nccl=0, problem="no libnccl")], "rank 1 cannot load NCCL (no libnccl)"),
    ],
)
def test_whom_nccl_serves(gpus, obstacle):
    found = nccl_obstacle(gpus)
    assert found is None if obstacle is None else found.startswith(obstacle)


def test_nccl_hostid_is_the_machine_that_nccl_sees(device, monkeypatch):
    assert bootstrap.my_gpu(0) == GpuFacts(socket.gethostname(), "0000:00:00.0", 23203, "", False)
    monkeypatch.setenv("NCCL_HOSTID", "rank-7")
    assert bootstrap.my_gpu(0).machine == "rank-7"


# Failure ------------------------------------------------------------------------------------------------


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
    script = """
        import bagua_comm, numpy as np, os, signal
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
        print(f"rank {comm.rank} of {comm.size}: sum {comm.allreduce(np.array(1.0))}", flush=True)
        """
    try:
        result, _ = launch(tmp_path, 4, script, mpirun=("--with-ft", "ulfm"), timeout_s=50)
        output = result.stdout
    except subprocess.TimeoutExpired as exc:  # mpirun itself does not always end after a rank was killed
        output = exc.stdout.decode()
    assert "failed: (2,)" in output
    for rank in range(3):
        assert f"rank {rank} of 3: sum 3.0" in output


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
