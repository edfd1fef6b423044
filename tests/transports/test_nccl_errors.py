"""NCCL: exceptions in the middle of calls, and devices that cannot be used. All ranks learn the reason soon."""

import contextlib
import threading
import types

import pytest
from support.device_ranks import over, run_over_nccl
from support.interrupts import interrupted_everywhere
from transports.test_nccl import call_once_it_fails, call_until_it_fails, in_time, run_hosts

from bagua_comm import CommAborted, CommError, UnsupportedError, kernels, quantized_allreduce

one_policy = pytest.mark.parametrize("device", ["lazy"], indirect=True)


@one_policy
@pytest.mark.parametrize("error", [OverflowError("int too large"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["in NCCL", "before it"])
def test_an_exception_in_the_middle_of_a_call_reaches_all_ranks_at_once(device, monkeypatch, error, where):
    """And not that a call, which was never made, is not done when its time is over."""
    import cupy
    from cupy.cuda import nccl

    device.nccl_connects = False
    all_reduce = nccl.NcclCommunicator.allReduce

    def fail(*arguments):
        raise error

    def body(comm):
        x = cupy.zeros(3)
        comm.transports[0].barrier()
        watch = comm.transports[1].watch
        if comm.rank == 0:
            begin = watch.begin
            with monkeypatch.context() as patch:
                if where == "in NCCL":
                    on_rank_0 = threading.get_ident()
                    patch.setattr(
                        nccl.NcclCommunicator,
                        "allReduce",
                        lambda *given: fail() if threading.get_ident() == on_rank_0 else all_reduce(*given),
                    )
                else:
                    patch.setattr(watch, "begin", lambda *arguments: fail(begin(*arguments)))
                with pytest.raises(type(error)):
                    comm.allreduce(x)
            with pytest.raises(CommError, match=f"^[^;]*rank 0 of 2: allreduce: {type(error).__name__}"):
                comm.allreduce(x)
            comm.close()
        else:
            comm.allreduce(x)
            with pytest.raises(CommAborted, match=f"rank 0 aborted after CommError: .*{type(error).__name__}"):
                call_once_it_fails(comm)
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
@pytest.mark.parametrize("error", [MemoryError("no memory"), UnsupportedError("no such step")], ids=repr)
def test_an_exception_between_two_calls_of_nccl_is_what_all_ranks_learn_at_once(device, error):
    import cupy

    device.nccl_connects = False
    name = type(error).__name__

    def fail_to_combine(kernel):
        if kernel == "combine":
            raise error

    def body(comm):
        x = cupy.zeros(5000, "float32")
        observer = fail_to_combine if comm.rank == 0 else str
        with kernels.of(x).before_launch(observer):
            if comm.rank == 0:
                with pytest.raises(type(error)):
                    quantized_allreduce(comm, x)
                with pytest.raises(CommError, match=f"a call was interrupted by {name}"):
                    comm.allreduce(x)
            else:
                with contextlib.suppress(CommAborted):  # it may have learned already
                    quantized_allreduce(comm, x)
                with pytest.raises(CommAborted, match=f"rank 0 aborted after CommError: .*{name}: no"):
                    call_once_it_fails(comm)
        comm.transports[0].barrier()

    in_time(lambda: run_over_nccl(device, 2, body=body))


@one_policy
def test_a_call_on_the_default_stream_beside_a_capture_that_forbids_it_says_so(device):
    import cupy

    def body(comm):
        x = cupy.zeros(3)
        stream = cupy.cuda.Stream()  # takes turns with the default stream
        stream.begin_capture()
        with pytest.raises(CommError, match=r"allreduce: CUDA failed: .*default stream .*non_blocking"):
            comm.allreduce(x, out=x)
        stream.end_capture()

    run_over_nccl(device, 1, body=body)


@one_policy
def test_a_communicator_that_two_threads_end_at_once_is_forgotten_once(device):
    from bagua_comm.transports.nccl.watchdog import Watch, Watchdog

    dog, done = Watchdog(0, 1.0), lambda *_: None
    watch = Watch("rank 0", dog, check=done, destroy=done, abort=done, notify=done, listen=done)
    dog.discard(watch)  # as `abandon` of another thread, between two steps of `close`
    watch.close(1.0)


@one_policy
def test_a_watchdog_whose_thread_cannot_work_fails_its_communicators(device, monkeypatch):
    import cupy
    from cupy.cuda import nccl

    def body(comm):
        monkeypatch.setattr(nccl.NcclCommunicator, "check_async_error", lambda _: 1 / 0)
        with pytest.raises(CommError, match="rank 0 of 1: nobody watches this communicator: ZeroDivisionError"):
            call_until_it_fails(comm, cupy.zeros(3))
        monkeypatch.undo()

    in_time(lambda: run_over_nccl(device, 1, body=body))


@pytest.mark.parametrize("guilty", [0, 1])
def test_a_device_that_one_rank_cannot_use_is_an_error_of_all_that_names_both(device, monkeypatch, guilty):
    """Rank 0 gets no address of NCCL, or no other thread of rank 1 can use its device: no rank waits in NCCL."""
    import cupy
    from cupy.cuda import nccl

    device.count, main, use = 3, set(), cupy.cuda.Device.use

    def fail(*arguments):
        raise cupy.cuda.runtime.CUDARuntimeError(46)

    def use_on_main_threads(its):
        if its.id == 1 and threading.get_ident() not in main:
            fail()
        use(its)

    if guilty == 0:
        monkeypatch.setattr(nccl, "get_unique_id", fail)
    else:
        monkeypatch.setattr(cupy.cuda.Device, "use", use_on_main_threads)

    def connect(host):
        main.add(threading.get_ident())
        cupy.cuda.Device(host.rank).use()
        return over("nccl", host)

    for result in in_time(lambda: run_hosts(3, connect)):
        assert type(result) is CommError  # and no CommTimeout
        assert f"rank {guilty} of 3: CUDA failed: " in str(result)
        assert "all CUDA-capable devices are busy" in str(result)


@one_policy
def test_a_call_that_is_interrupted_anywhere_is_over_for_the_thread_that_ends_a_communicator(device, monkeypatch):
    from bagua_comm.transports.nccl import transport, watchdog

    dog, done, inside = watchdog.Watchdog(0, 1.0), lambda *_: None, []
    watch = watchdog.Watch("rank 0", dog, check=done, destroy=done, abort=done, notify=done, listen=done)
    capturing = types.SimpleNamespace(is_capturing=lambda: True, ptr=1)
    current = types.SimpleNamespace(get_current_stream=lambda: capturing)
    monkeypatch.setattr(transport, "cupy", types.SimpleNamespace(cuda=current))
    rank = types.SimpleNamespace(watch=watch, _abort_after=lambda *_: None, sent_bytes=0)

    def call():
        transport.NcclTransport._enqueue(rank, "allreduce", 4, 0, lambda _: inside.append(watch.inside))

    def check():
        assert not watch.inside

    assert interrupted_everywhere(call, check) > 3
    assert inside[-1]
    watch.close(1.0)
