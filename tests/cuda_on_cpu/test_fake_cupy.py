"""The model of a device must catch mistakes: here is each kind, next to the same code without the mistake."""

import ctypes
import functools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cuda_on_cpu import build, fake_cupyx, machine
from cuda_on_cpu import fake_cuda as cuda
from cuda_on_cpu import fake_cupy as cupy
from cuda_on_cpu import fake_nccl as nccl
from cuda_on_cpu.machine import CUDARuntimeError, Hang, Machine

KERNELS = """
extern "C" __global__ void increase(float* x, double by, long long count) {
    long long i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] += by;
}
extern "C" __global__ void show(double* out, long long a, double b, float c, bool d) {
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}
"""


def results(program):
    """The results of a program under each policy."""
    found = []
    for policy in machine.POLICIES:
        machine.use(Machine(policy, timeout_s=5))
        found.append(program())
    return found


def needs_its_wait(program):
    """The test that a program computes ones under each policy with its wait, and not without it."""

    @pytest.mark.parametrize("wait", [True, False])
    def test(wait):
        assert wait == (results(lambda: program(wait)) == [[1.0, 1.0]] * 3)

    return test


def ranks(count, body, **settings):
    """Run `body` on a thread and a device for each rank; returns the results."""
    current = machine.running()
    current.count, current.timeout_s = count, 5
    vars(current).update(settings)
    unique_id = nccl.get_unique_id()

    def run(rank):
        threading.current_thread().name = f"rank {rank}"
        cuda.Device(rank if not current.nccl_allows_sharing else 0).use()
        return body(nccl.NcclCommunicator(count, unique_id, rank))

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def allreduce(comm, x, out=None, *, op=nccl.NCCL_SUM, dtype=nccl.NCCL_FLOAT32):
    stream = cuda.get_current_stream().ptr
    comm.allReduce(x.data.ptr, (x if out is None else out).data.ptr, x.size, dtype, op, stream)


@pytest.mark.needs("cupy")
def test_the_fake_has_nothing_that_cupy_has_not():
    found = subprocess.run(
        [sys.executable, "-m", "cuda_on_cpu.compare"],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (found.returncode, found.stdout) == (0, "\n"), found.stderr


def test_modules_are_found_in_every_way(device):
    import cupy as top
    import cupy.cuda.nccl
    import cupyx
    from cupy.cuda import nccl as from_cuda

    assert (nccl, nccl) == (cupy.cuda.nccl, from_cuda)
    assert (cuda, cupy.cuda.runtime) == (top.cuda, sys.modules["cupy.cuda.runtime"])
    assert fake_cupyx is cupyx


# Streams


@needs_its_wait
def test_a_side_stream_that_does_not_wait_for_its_input_is_caught(wait):
    side, x, y = cuda.Stream(non_blocking=True), cupy.full(2, 1.0), cupy.zeros(2)
    if wait:
        side.wait_event(cuda.get_current_stream().record())
    with side:
        y[...] = x
    cuda.get_current_stream().wait_event(side.record())
    return y.get().tolist()


@needs_its_wait
def test_a_result_of_a_side_stream_that_is_not_waited_for_is_caught(wait):
    side, x = cuda.Stream(non_blocking=True), cupy.zeros(2)
    side.wait_event(cuda.get_current_stream().record())
    with side:
        x[...] = 1
    if wait:
        cuda.get_current_stream().wait_event(side.record())
    return x.get().tolist()


@needs_its_wait
def test_memory_freed_while_another_stream_uses_it_is_caught(wait):
    side, x, y = cuda.Stream(non_blocking=True), cupy.full(2, 1.0), cupy.empty(2)
    side.wait_event(cuda.get_current_stream().record())
    with side:
        y[...] = x
    if wait:
        cuda.get_current_stream().wait_event(side.record())
    del x
    cupy.empty(1)
    side.synchronize()
    return y.get().tolist()


def test_the_default_stream_takes_turns_with_streams_that_are_blocking():
    def program():
        side, x = cuda.Stream(), cupy.zeros(2)
        with side:
            x[...] = 1
        return x.get().tolist()

    assert results(program) == [[1.0, 1.0]] * 3


def test_a_new_array_holds_poison(device):
    assert np.isnan(cupy.empty(3, np.float32).get()).all()


def test_polling_makes_lazy_streams_continue(device):
    x = cupy.zeros(1)
    x[...] = 1
    event = cuda.get_current_stream().record()
    for polls in range(1, 10):  # noqa: B007
        if event.done:
            break
    assert {"lazy": 3, "main-first": 1, "side-first": 3}[policy(device)] == polls
    assert device.host_syncs == []


def policy(device):
    return next(name for name, kinds in machine.POLICIES.items() if kinds == (device.main, device.side))


def test_elapsed_time_is_known_once_events_are_done(device):
    first, last = cuda.Event(), cuda.Event()
    first.record()
    cupy.zeros(10)
    last.record()
    if policy(device) != "main-first":
        with pytest.raises(CUDARuntimeError, match="NotReady"):
            cuda.get_elapsed_time(first, last)
    last.synchronize()
    assert cuda.get_elapsed_time(first, last) >= 0
    untimed = cuda.Event(disable_timing=True)
    untimed.record()
    with pytest.raises(CUDARuntimeError, match="InvalidResourceHandle"):
        cuda.get_elapsed_time(first, untimed)


def test_current_streams_are_those_of_a_thread_and_a_device(device):
    device.count = 2
    stream = cuda.Stream(non_blocking=True)
    with stream:
        inside = cuda.get_current_stream()
        with ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(cuda.get_current_stream).result()
        cuda.Device(1).use()
        on_another = cuda.get_current_stream()
        with pytest.raises(RuntimeError, match="does not match with the current device"), stream:
            pass
        cuda.Device(0).use()
    assert [stream, cuda.Stream.null, cuda.Stream.null] == [inside, elsewhere, on_another]
    assert cuda.Stream.null == cuda.get_current_stream()


def test_streams_of_other_libraries(device):
    class TorchStream:
        def __cuda_stream__(self):
            return 0, ptr

    ptr = device.new_stream().ptr
    with cuda.Stream.from_external(TorchStream()):
        x = cupy.zeros(1)
    assert [ptr] == [entry.stream for entry in device.log]
    with pytest.warns(DeprecationWarning, match="from_external"), cuda.ExternalStream(ptr):
        x.fill(1)
    with pytest.raises(AssertionError, match="no stream at 0x7"):
        cuda.Stream.from_external(TorchStream())._at(7, None).synchronize()


# The host


SYNCS = {
    "Stream.synchronize": lambda x: cuda.get_current_stream().synchronize(),
    "Event.synchronize": lambda x: cuda.get_current_stream().record().synchronize(),
    "Device.synchronize": lambda x: cuda.Device().synchronize(),
    "ndarray.get": lambda x: x.get(),
    "to pageable memory": lambda x: x.get(out=np.empty(1), blocking=False),
    "from pageable memory": lambda x: x.set(np.zeros(1)),
    "asnumpy": cupy.asnumpy,
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "bool": bool,
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
}


@pytest.mark.parametrize("call", SYNCS)
def test_host_synchronisation_is_caught(device, call):
    x = cupy.zeros(1)
    with device.forbid_host_sync(), pytest.raises(AssertionError, match=call):
        SYNCS[call](x)
    SYNCS[call](x)
    assert len(device.host_syncs) == 1


def test_host_synchronisation_on_other_threads_is_caught_unless_allowed(device):
    x = cupy.zeros(1)
    with ThreadPoolExecutor(1) as pool:
        with device.forbid_host_sync(this_thread=True):
            assert pool.submit(x.get).result().tolist() == [0.0]
        with device.forbid_host_sync(), pytest.raises(AssertionError, match="makes the host wait"):
            pool.submit(x.get).result()


@needs_its_wait
def test_pinned_memory_written_before_its_copy_has_run_is_caught(wait):
    pinned, x = fake_cupyx.empty_pinned(2), cupy.empty(2)
    pinned[...] = 1
    x.set(pinned)
    if wait:
        cuda.get_current_stream().synchronize()
    pinned[...] = 2
    return x.get().tolist()


@needs_its_wait
def test_pinned_memory_read_before_its_copy_has_run_is_caught(wait):
    pinned, x = fake_cupyx.empty_pinned((2,)), cupy.full(2, 1.0)
    x.get(out=pinned, blocking=False)
    if wait:
        cuda.get_current_stream().record().synchronize()
    return pinned.tolist()


@needs_its_wait
def test_pinned_memory_freed_before_its_copy_has_run_is_caught(wait):
    pinned, x = fake_cupyx.empty_pinned(2), cupy.empty(2)
    pinned[...] = 1
    cuda.runtime.memcpyAsync(x.data.ptr, pinned[:1].ctypes.data, 16, cuda.runtime.memcpyHostToDevice, 0)
    if wait:
        cuda.get_current_stream().synchronize()
    del pinned
    return x.get().tolist()


# Arrays and kernels


def test_views_and_copies(device):
    x = cupy.asarray(np.arange(6, dtype=np.float32))
    table = x.reshape(2, 3)
    column = table[:, 1]
    copy = cupy.ascontiguousarray(column)
    column[...] = 9
    table[0, 0] = 8
    assert (column.flags.c_contiguous, copy.flags.c_contiguous) == (False, True)
    assert x.data.ptr + 4 == column.data.ptr
    assert (cupy.may_share_memory(x, column), cupy.may_share_memory(x, copy)) == (True, False)
    assert x.get().tolist() == [8, 9, 2, 3, 9, 5]
    assert copy.get().tolist() == [1, 4]
    assert x[0].reshape(1).get().tolist() == [8]
    assert np.float32(9).tobytes() == x.view(np.uint8)[4:8].get().tobytes()


def test_foreign_arrays_are_shared(device):
    host = np.arange(6.0).reshape(2, 3)
    x = cupy.from_dlpack(host)
    x[1] = 7
    cuda.get_current_stream().synchronize()
    assert host.ctypes.data == x.data.ptr
    assert host.tolist() == [[0, 1, 2], [7, 7, 7]]


def test_arrays_are_shared_with_others(device):
    x = cupy.full(3, 2.0)
    host = np.from_dlpack(x)
    assert (x.data.ptr, [2.0] * 3, []) == (host.ctypes.data, host.tolist(), device.host_syncs)


@pytest.fixture
def kernel(tmp_path):
    """Kernels by name."""
    binary, _ = cuda.compiler.compile_using_nvrtc(KERNELS, ("-fmad=false",))
    path = tmp_path / "kernels.cubin"
    path.write_bytes(binary + b"\0")
    return cupy.RawModule(path=str(path)).get_function


def test_later_runs_find_compiled_kernels_unless_they_are_old_or_of_another_compiler(tmp_path, monkeypatch):
    compiled = []

    def compiler(command, code):
        if "-o" in command:
            compiled.append(command)
            Path(command[command.index("-o") + 1]).touch()
        return ""

    def library():
        return build._compiled.__wrapped__(KERNELS, ())  # as another process does, which remembers nothing

    monkeypatch.setenv(build.KERNELS, "elsewhere")
    monkeypatch.setattr(build, "_run", compiler)
    monkeypatch.setattr(build, "precompiled", lambda: ("header", "grid"))
    monkeypatch.setattr(build, "_compiler", lambda: "g++ 12")
    build.keep_in(tmp_path)
    first = library()
    assert (library(), first.parent, len(compiled)) == (first, tmp_path, 1)
    monkeypatch.setattr(build, "_compiler", lambda: "g++ 13")
    assert (library() != first, len(compiled)) == (True, 2)
    os.utime(first, (0, 0))
    build.keep_in(tmp_path)
    assert [*tmp_path.iterdir()] == [library()]


def test_kernels_run_in_their_stream_with_cupys_arguments(device, kernel):
    x, out = cupy.zeros(100, np.float32), cupy.empty(4)
    kernel("increase")((4,), (32,), (x, 1.5, x.size))
    kernel("show")((1,), (1,), (out, 2**40, 0.1, np.float32(0.5), True))
    assert device.launches == ["increase", "show"]
    assert x.get().tolist() == [1.5] * 100
    assert out.get().tolist() == [2.0**40, 0.1, 0.5, 1.0]


def test_a_kernel_that_writes_past_the_end_is_caught(device, kernel):
    x = cupy.zeros(8, np.float32)
    with pytest.raises(AssertionError, match="kernel increase: written past the end of an array"):
        [kernel("increase")((1,), (32,), (x, 1e30, 9)), cuda.get_current_stream().synchronize()]


@pytest.mark.parametrize("block", [(1025,), (1, 1, 65)])
def test_a_block_that_no_device_has_is_refused(device, kernel, block):
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        kernel("increase")((1,), block, (cupy.zeros(1, np.float32), 1.0, 1))


def test_work_of_one_device_on_arrays_of_another_is_caught(device):
    device.count = 2
    x = cupy.zeros(1)
    cuda.Device(1).use()
    with pytest.raises(AssertionError, match="an array of device 0 is used on stream 0 of device 1"):
        x[...] = 1
    with pytest.raises(CUDARuntimeError, match="invalid device ordinal"):
        cuda.Device(2).use()


# Graphs


def test_a_captured_graph_is_replayed(device, kernel):
    x, stream, side = cupy.zeros(2), cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
    y = cupy.zeros(2)
    cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        kernel("increase")((1,), (1,), (x.view(np.float32), 1.0, 1))
        side.wait_event(stream.record())
        with side:
            y[...] = x
        stream.wait_event(side.record())
        capturing = stream.is_capturing(), side.is_capturing()
        graph = stream.end_capture()
    before = x.get().view(np.float32)[0]
    stream.wait_event(cuda.get_current_stream().record())
    for _ in range(3):
        graph.launch(stream)
    stream.synchronize()
    assert (capturing, before) == ((True, True), 0.0)
    assert [array.get().view(np.float32)[0] for array in (x, y)] == [3.0, 3.0]
    assert [stream.is_capturing(), side.is_capturing()] == [False, False]


@needs_its_wait
def test_a_missing_wait_inside_a_graph_is_caught(wait):
    x, y, side = cupy.zeros(2), cupy.zeros(2), cuda.Stream(non_blocking=True)
    stream = cuda.Stream()
    with stream:
        stream.begin_capture()
        side.wait_event(stream.record())
        x[...] = 1
        if wait:
            side.wait_event(stream.record())
        with side:
            y[...] = x
        stream.wait_event(side.record())
        stream.end_capture().launch()
    return y.get().tolist()


def test_operations_that_break_a_capture(device):
    x, stream, side = cupy.zeros(1), cuda.Stream(non_blocking=True), cuda.Stream(non_blocking=True)
    event = cuda.get_current_stream().record()
    with pytest.raises(RuntimeError, match="legacy"):
        cuda.Stream.null.begin_capture()
    with stream:
        stream.begin_capture()
        x.fill(1)
        for code, call in {900: lambda: stream.synchronize(), 905: lambda: stream.wait_event(event)}.items():
            with pytest.raises(CUDARuntimeError) as caught:
                call()
            assert code == caught.value.status
        captured = stream.record()
        assert (cuda.runtime.eventQuery(captured.ptr), captured.done) == (907, False)
        side.wait_event(stream.record())
        with side:
            x.fill(2)
        with pytest.raises(CUDARuntimeError, match="Unjoined"):
            stream.end_capture()
    assert x.get().tolist() == [0.0]


def test_a_graph_over_memory_that_was_freed_is_caught(device):
    x, stream = cupy.zeros(1), cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        x.fill(1)
        graph = stream.end_capture()
        del x
        with pytest.raises(AssertionError, match="freed since it was captured"):
            graph.launch()


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_query_during_a_capture_breaks_it_unless_its_mode_allows_that(device, mode):
    event, stream = cuda.get_current_stream().record(), cuda.Stream(non_blocking=True)
    found = {}

    def ask(who):
        found[who] = cuda.runtime.eventQuery(event.ptr)

    def relax():
        wanted = ctypes.c_int(2)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(wanted))
        assert wanted.value == 0

    stream.begin_capture(getattr(cuda.runtime, f"streamCaptureMode{mode}"))
    for who in ("another", "relaxed"):
        thread = threading.Thread(target=lambda who=who: (who == "relaxed" and relax(), ask(who)))
        thread.start()
        thread.join()
    allowed = mode != "Global"
    assert found == {"another": 0 if allowed else 900, "relaxed": 0}
    if mode == "ThreadLocal":
        ask("its own")
        assert found["its own"] == 900
    if mode == "Relaxed":
        stream.end_capture()
    else:
        with pytest.raises(CUDARuntimeError, match="Invalidated"):
            stream.end_capture()


def test_the_pool_keeps_freed_memory_for_its_stream(device):
    pool, side = cupy.get_default_memory_pool(), cuda.Stream(non_blocking=True)
    x = cupy.zeros(100, np.uint8)
    with side:
        y = cupy.zeros(10, np.uint8)
    assert pool.total_bytes() == 110
    del x, y
    assert pool.total_bytes() == 110
    pool.free_all_blocks(side)
    assert pool.total_bytes() == 100
    assert device.host_syncs == ["MemoryPool.free_all_blocks"]
    x = cupy.zeros(30, np.uint8)
    assert pool.total_bytes() == 100
    pool.free_all_blocks()
    assert pool.total_bytes() == x.nbytes


# A device that has met an error


def test_every_call_on_a_broken_device_gives_its_error_but_done_is_only_false(device):
    device.count = 2
    x, stream = cupy.zeros(1), cuda.get_current_stream()
    event = stream.record()
    device.break_device(0)
    for call in (
        stream.record,
        stream.synchronize,
        stream.is_capturing,
        lambda: x.fill(1),
        lambda: x.get(),
        lambda: stream.wait_event(event),
    ):
        with pytest.raises(CUDARuntimeError, match="cudaErrorIllegalAddress: an illegal memory access") as caught:
            call()
        assert caught.value.status == 700
    assert (event.done, stream.done, cuda.runtime.eventQuery(event.ptr)) == (False, False, 700)
    with cuda.Device(1):
        assert cupy.zeros(1).item() == 0


def test_a_thread_that_waits_for_a_device_that_breaks_is_woken(device):
    def body(comm):
        x = cupy.zeros(1, np.float32)
        if comm.rank_id() == 0:
            allreduce(comm, x)
            threading.Timer(0.05, device.break_device, [0]).start()
            with pytest.raises(CUDARuntimeError, match="IllegalAddress"):
                x.get()
            with pytest.raises(nccl.NcclError, match="unhandled cuda error"):
                allreduce(comm, x)

    ranks(2, body, nccl_connects=False)


def test_a_kernel_runs_only_on_devices_of_the_architecture_that_it_was_compiled_for(device, tmp_path):
    device.count, device.architectures = 3, {0: "80", 1: "86", 2: "90"}
    path = tmp_path / "kernel.cubin"
    binary, _ = cuda.compiler.compile_using_nvrtc('extern "C" __global__ void nothing() {}')
    path.write_bytes(binary)
    kernel = cupy.RawModule(path=str(path)).get_function("nothing")
    for index in (0, 1):
        with cuda.Device(index):
            kernel((1,), (1,), ())
    with cuda.Device(2), pytest.raises(cuda.driver.CUDADriverError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        kernel((1,), (1,), ())


# NCCL


def chunks(rank, p, dtype="float32"):
    return np.arange(1, 2 * p + 1).astype(dtype) * (rank + 1)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_collectives(device, p):
    def body(comm):
        rank, stream = comm.rank_id(), cuda.get_current_stream().ptr
        x = cupy.asarray(chunks(rank, p))
        total, gathered = cupy.zeros(2 * p, np.float32), cupy.zeros(2 * p * p, np.float32)
        part, shown, rooted = cupy.zeros(2, np.float32), x.copy(), cupy.zeros(2 * p, np.float32)
        allreduce(comm, x, total)
        comm.allGather(x.data.ptr, gathered.data.ptr, 2 * p, nccl.NCCL_FLOAT32, stream)
        comm.reduceScatter(x.data.ptr, part.data.ptr, 2, nccl.NCCL_FLOAT32, nccl.NCCL_MAX, stream)
        comm.broadcast(shown.data.ptr, shown.data.ptr, 2 * p, nccl.NCCL_FLOAT32, p - 1, stream)
        comm.reduce(x.data.ptr, rooted.data.ptr, 2 * p, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0, stream)
        return [array.get() for array in (total, gathered, part, shown, rooted)]

    inputs = np.stack([chunks(rank, p) for rank in range(p)])
    for rank, (total, gathered, part, shown, rooted) in enumerate(ranks(p, body)):
        assert inputs.sum(0).tolist() == total.tolist()
        assert inputs.ravel().tolist() == gathered.tolist()
        assert inputs.max(0)[2 * rank : 2 * rank + 2].tolist() == part.tolist()
        assert inputs[p - 1].tolist() == shown.tolist()
        assert (inputs.sum(0) if rank == 0 else np.zeros(2 * p)).tolist() == rooted.tolist()
    assert 5 * p == sum(name.startswith("nccl ") for name in device.names())


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_alltoall_as_one_group(device, p):
    def body(comm):
        x, out = cupy.asarray(chunks(comm.rank_id(), p)), cupy.empty(2 * p, np.float32)
        nccl.groupStart()
        for peer in range(p):
            comm.send(x[2 * peer :].data.ptr, 8, nccl.NCCL_UINT8, peer, 0)
            comm.recv(out[2 * peer :].data.ptr, 8, nccl.NCCL_UINT8, peer, 0)
        nccl.groupEnd()
        return out.get().reshape(p, 2).tolist()

    inputs = np.stack([chunks(rank, p) for rank in range(p)]).reshape(p, p, 2)
    assert inputs.transpose(1, 0, 2).tolist() == ranks(p, body)
    assert ["nccl send+recv"] * p == [name for name in device.names() if name.startswith("nccl")]


def test_a_root_may_receive_from_a_rank_that_first_serves_another(device):
    def body(comm):
        rank, x = comm.rank_id(), cupy.zeros(3, np.uint8)
        message = functools.partial(lambda call, at, peer: call(x[at:].data.ptr, 1, nccl.NCCL_UINT8, peer, 0))
        if rank == 0:
            nccl.groupStart()
            message(comm.recv, 1, 1)
            message(comm.recv, 2, 2)
            nccl.groupEnd()
        else:
            x.fill(rank)
            message(comm.send, 0, 0) if rank == 1 else message(comm.recv, 1, 1)
            message(comm.send, 0, 2 if rank == 1 else 0)
        return x.get().tolist()

    assert ranks(3, body) == [[0, 1, 2], [1, 1, 1], [2, 1, 2]]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "int32"])
def test_averages_as_nccl_makes_them(device, name):
    dtype = np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def body(comm):
        x = cupy.asarray(np.array([comm.rank_id() * 10 + 1, -7], dtype))
        allreduce(comm, x, op=nccl.NCCL_AVG, dtype=getattr(nccl, f"NCCL_{name.upper()}"))
        return x.get().tolist()

    third = dtype.type(1 / 3) if dtype.kind != "i" else None
    expected = (
        [11, -7]
        if third is None
        else [float(sum((dtype.type(v) * third for v in vs), dtype.type(0))) for vs in ((1, 11, 21), (-7,) * 3)]
    )
    assert [expected] * 3 == ranks(3, body)


def test_collectives_run_in_the_order_of_streams(device):
    def body(comm):
        side, x = cuda.Stream(non_blocking=True), cupy.full(2, 1.0, np.float32)
        side.wait_event(cuda.get_current_stream().record())
        with device.forbid_host_sync(this_thread=True):
            with side:
                for _ in range(3):
                    allreduce(comm, x)
            cuda.get_current_stream().wait_event(side.record())
        return x.get().tolist()

    assert ranks(3, body) == [[27.0, 27.0]] * 3


def test_collectives_in_graphs(device):
    def body(comm):
        x, stream = cupy.full(1, 1.0, np.float32), cuda.Stream(non_blocking=True)
        stream.wait_event(cuda.get_current_stream().record())
        with stream:
            stream.begin_capture()
            allreduce(comm, x)
            allreduce(comm, x)
            graph = stream.end_capture()
            graph.launch()
            graph.launch()
            return x.get().tolist()

    assert ranks(2, body) == [[16.0]] * 2


@pytest.mark.parametrize(
    "other",
    [
        lambda comm, x: comm.allReduce(x.data.ptr, x.data.ptr, 3, 7, nccl.NCCL_SUM, 0),
        lambda comm, x: comm.allReduce(x.data.ptr, x.data.ptr, 4, 7, nccl.NCCL_MAX, 0),
        lambda comm, x: comm.allReduce(x.data.ptr, x.data.ptr, 4, 2, nccl.NCCL_SUM, 0),
        lambda comm, x: comm.broadcast(x.data.ptr, x.data.ptr, 4, 7, 0, 0),
    ],
)
def test_calls_that_do_not_match_are_caught(device, other):
    def body(comm):
        x = cupy.zeros(4, np.float32)
        other(comm, x) if comm.rank_id() else allreduce(comm, x)
        x.get()

    with pytest.raises(AssertionError, match=r"do not match: rank \d has \w+\('.*, rank \d has \w+\("):
        ranks(2, body)


def test_messages_that_do_not_match_are_caught(device):
    def body(comm):
        x = cupy.zeros(4, np.uint8)
        call, count = (comm.recv, 3) if comm.rank_id() else (comm.send, 4)
        call(x.data.ptr, count, nccl.NCCL_UINT8, 1 - comm.rank_id(), 0)
        x.get()

    with pytest.raises(AssertionError, match="do not match"):
        ranks(2, body)


def test_a_message_to_oneself_needs_both_ends_in_one_group(device):
    def body(comm):
        x = cupy.zeros(4, np.uint8)
        with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
            comm.send(x.data.ptr, 4, nccl.NCCL_UINT8, 0, 0)

    ranks(1, body)


def test_buffers_that_overlap_are_caught_unless_they_are_in_place(device):
    def body(comm):
        x = cupy.zeros(4, np.float32)
        comm.allGather(x[2 * comm.rank_id() :].data.ptr, x.data.ptr, 2, nccl.NCCL_FLOAT32, 0)
        with pytest.raises(AssertionError, match="allReduce: buffers overlap"):
            comm.allReduce(x.data.ptr, x[1:].data.ptr, 2, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, 0)

    ranks(2, body)


def test_a_count_beyond_the_array_is_caught(device):
    with pytest.raises(AssertionError, match="no allocation of device or pinned memory has the 20 bytes"):
        ranks(1, lambda comm: comm.allReduce(*[cupy.zeros(4, np.float32).data.ptr] * 2, 5, 7, 0, 0))


def test_two_ranks_on_one_device_are_refused_as_nccl_does(device):
    current, unique_id = device, nccl.get_unique_id()
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(nccl.NcclCommunicator, 2, unique_id, rank) for rank in range(2)]
    assert [future.exception().status for future in made] == [5, 5]

    def body(comm):
        with cuda.Stream(non_blocking=True):
            x = cupy.full(1, 1.0, np.float32)
            allreduce(comm, x)
            return x.get().tolist()

    assert ranks(2, body, nccl_allows_sharing=True) == [[2.0]] * 2
    assert current is machine.running()


@pytest.mark.parametrize("connects", [True, False])
def test_a_peer_that_never_calls_holds_up_the_stream_until_abort(device, connects):
    abortable = threading.Event()

    def body(comm):
        x, after = cupy.zeros(1, np.float32), cupy.zeros(1)
        if comm.rank_id():
            abortable.wait(5)
            comm.abort()
            return None
        threading.Timer(0.2, comm.abort).start() if connects else None
        if connects:
            with pytest.raises(nccl.NcclError, match="INTERNAL_ERROR"):
                allreduce(comm, x)
        else:
            allreduce(comm, x)
            event = cuda.get_current_stream().record()
            assert not any(event.done for _ in range(5))
            comm.abort()
        after.fill(1)
        abortable.set()
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            allreduce(comm, x)
        return np.isnan(x.get()).tolist(), after.get().tolist()

    assert ranks(2, body, nccl_connects=connects)[0] == ([True], [1.0])


def test_a_wait_for_a_missing_rank_names_it(device):
    def body(comm):
        x = cupy.zeros(1, np.float32)
        if comm.rank_id() == 0:
            device.timeout_s = 0.2
            allreduce(comm, x)
            x.get()

    with pytest.raises(Hang, match=r"rank 0 waited .* allReduce on stream 0 .* where \[1\] of \[0, 1\]"):
        ranks(2, body, nccl_connects=False)


def test_communicators_are_split(device):
    def body(comm):
        x, part = (
            cupy.full(1, comm.rank_id() + 1.0, np.float32),
            comm.commSplit(comm.rank_id() % 2, -comm.rank_id()),
        )
        assert comm.commSplit(-1 if comm.rank_id() == 0 else 0, 0) is None or comm.rank_id() > 0
        allreduce(part, x)
        found = part.size(), part.rank_id(), part.device_id(), x.item()
        part.destroy()
        return found

    assert ranks(3, body) == [(2, 1, 0, 4.0), (1, 0, 1, 2.0), (2, 0, 2, 4.0)]


def test_two_ranks_on_one_stream_wait_for_each_other_for_ever(device):
    def body(comm):
        x = cupy.zeros(1, np.float32)
        allreduce(comm, x)
        device.timeout_s = 0.2
        x.get()

    with pytest.raises(Hang, match=r"nccl allReduce on stream 0 .* which waits for itself"):
        ranks(2, body, nccl_allows_sharing=True)


def test_a_split_while_work_is_in_flight_is_caught(device):
    def body(comm):
        x, stream = cupy.zeros(1, np.float32), cuda.Stream(non_blocking=True)
        with stream:
            allreduce(comm, x)
            comm.commSplit(0, 0)

    device.main = device.side = "lazy"
    with pytest.raises(AssertionError, match="commSplit while there is work"):
        ranks(1, body)


def test_errors_of_nccl(device):
    def body(comm):
        device.nccl_async_error = 6
        with pytest.raises(nccl.NcclError, match="REMOTE_ERROR"):
            comm.check_async_error()
        device.nccl_async_error = 8
        with pytest.raises(KeyError):
            comm.check_async_error()
        comm.destroy()
        return comm.comm

    assert ranks(1, body) == [0]
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()
