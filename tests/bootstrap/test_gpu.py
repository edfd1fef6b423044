"""The device of each rank, and the transport for device arrays."""

import re
import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support import device_ranks
from support.device_ranks import HostOnly

import bagua_comm
from bagua_comm.bootstrap.gpu import GpuFacts, describe_gpu, nccl_obstacle
from bagua_comm.transports import LocalTransport
from bagua_comm.transports.local import Hub


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


def test_ranks_that_share_a_gpu_use_host_memory_and_the_reason_is_logged(device):
    with pytest.warns(RuntimeWarning, match="NCCL_HOSTID .*NCCL_MULTI_RANK_GPU_ENABLE=1.*gpu='staged'") as caught:
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


def test_ranks_may_share_a_gpu_if_nccl_allows_it(device, monkeypatch):
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


def test_without_nccl_the_reason_says_what_to_install(device, monkeypatch):
    from cupy.cuda import nccl

    monkeypatch.setattr(nccl, "available", False)
    device.count = 2
    with pytest.warns(RuntimeWarning, match=r"rank 0 cannot load NCCL \(.*bagua-comm\[cuda13\]"):
        assert connect_all(2) == [(["recording", "staged"], 0), (["recording", "staged"], 1)]


@pytest.mark.parametrize("gpu", ["nccl", "staged"])
def test_settings_for_devices_are_refused_without_one(device, gpu):
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
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.stdout == "False\n", result.stderr
    assert result.returncode == 0, result.stderr


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
        ([OLD, OLD_SLICE], "ranks [0, 1] have slices (MIG) of the GPU 00:01 of a"),
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
def test_the_ranks_that_can_use_nccl(gpus, obstacle):
    found = nccl_obstacle(gpus)
    assert found is None if obstacle is None else found.startswith(obstacle)


def test_a_default_stream_for_each_thread_is_warned_of(device, monkeypatch):
    import cupy

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=2))
    with pytest.warns(RuntimeWarning, match=r"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1\), .* unset that"):
        bagua_comm.connect().close()


def test_nccl_hostid_is_the_machine_that_nccl_sees(device, monkeypatch):
    assert describe_gpu(0) == GpuFacts(socket.gethostname(), "0000:00:00.0", "ff" * 15 + "00", 23203, "", False)
    monkeypatch.setenv("NCCL_HOSTID", "rank-7")
    assert describe_gpu(0).machine == "rank-7"
