"""A quantized allreduce of device arrays at known addresses: it replays the steps of an earlier one."""

import gc
import threading
import weakref

import numpy as np
import pytest
from cuda_on_cpu.machine import running
from support.device_ranks import run_over_nccl

from bagua_comm import Int4, MinMaxUInt8, Quantized, arrays, kernels, quantized_allreduce
from bagua_comm.execution import recording
from bagua_comm.testing import run_ranks

RANKS, SIZE = 2, 2048

pytestmark = pytest.mark.parametrize("device", ["lazy", "side-first"], indirect=True)


@pytest.fixture
def replays(monkeypatch):
    """One entry for each replay."""
    found = []
    replay = recording.Recording.replay
    monkeypatch.setattr(recording.Recording, "replay", lambda steps: (found.append(1), replay(steps)))
    return found


def values(rank, step=0, size=SIZE):
    return np.random.default_rng(10 * step + rank).standard_normal(size).astype(np.float32)


def on_host(step, size=SIZE):
    """The bytes of the mean of step `step`."""
    return run_ranks(RANKS, lambda c: quantized_allreduce(c, values(c.rank, step, size), op="avg").tobytes())[0]


def put(x):
    import cupy

    array = cupy.empty(x.shape, x.dtype)
    array.set(x)
    return array


def test_replays_give_the_bytes_of_the_host(device, replays):
    expected = [on_host(step) for step in range(4)]

    def body(comm):
        mean, x = Quantized().bind(comm), put(values(comm.rank))
        found, launched = [], []
        for step in range(4):
            x.set(values(comm.rank, step))
            with kernels.of(x).before_launch(launched.append):
                found.append(mean(x).get().tobytes())
        counter = comm.counters.by_operation["quantized_allreduce"]
        assert launched == ["encode", "combine", "decode"] * 4
        assert (counter.calls, counter.wire_bytes) == (4, comm.transports[1].sent_bytes)
        return found

    assert run_over_nccl(device, RANKS, body=body) == [expected] * RANKS
    assert len(replays) == RANKS * 3


def test_calls_with_int4_are_replayed(device, replays):
    def body(comm):
        x = put(values(comm.rank))
        for step in range(3):
            x.set(values(comm.rank, step))
            quantized_allreduce(comm, x, x, codec=Int4(), op="avg")
        return x.get().tobytes()

    def on_the_host(comm):
        for step in range(3):
            mean = quantized_allreduce(comm, values(comm.rank, step), codec=Int4(), op="avg")
        return mean.tobytes()

    assert run_over_nccl(device, RANKS, body=body) == run_ranks(RANKS, on_the_host)
    assert len(replays) == RANKS * 2


def test_replays_on_another_stream_come_after_earlier_calls(device, replays):
    import cupy

    expected = [on_host(step) for step in range(3)]

    def body(comm):
        xs = [put(values(comm.rank, step)) for step in range(3)]
        for x in xs:
            quantized_allreduce(comm, x, x, op="avg")
        for step, x in enumerate(xs):
            x.set(values(comm.rank, step))
        cupy.cuda.get_current_stream().synchronize()
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in xs]
        for x, stream in zip(xs, streams, strict=True):
            with stream:
                quantized_allreduce(comm, x, x, op="avg")
        return [x.get(stream).tobytes() for x, stream in zip(xs, streams, strict=True)]

    run_over_nccl(device, RANKS, body=lambda comm: body(comm) == expected or pytest.fail("other bytes"))
    assert len(replays) == RANKS * 3


def test_a_thread_that_has_made_no_call_of_cuda_replays(device, replays):
    expected = on_host(1)

    def body(comm):
        import cupy

        x = put(values(comm.rank))
        quantized_allreduce(comm, x, x, op="avg")
        x.set(values(comm.rank, 1))
        cupy.cuda.get_current_stream().synchronize()
        errors = []

        def again():
            running().device = comm.device  # as in a process with one GPU
            try:
                quantized_allreduce(comm, x, x, op="avg")
            except Exception as exc:
                errors.append(exc)

        thread = threading.Thread(target=again)
        thread.start()
        thread.join()
        assert not errors
        return x.get().tobytes()

    assert run_over_nccl(device, RANKS, body=body) == [expected] * RANKS
    assert len(replays) == RANKS


def test_memory_of_calls_that_has_moved_is_not_used_again(device, replays):
    expected, larger = on_host(1), on_host(0, 8 * SIZE)

    def body(comm):
        x, y = put(values(comm.rank)), put(values(comm.rank, size=8 * SIZE))
        quantized_allreduce(comm, x, x, op="avg")
        quantized_allreduce(comm, y, y, op="avg")  # takes more memory between kernels
        x.set(values(comm.rank, 1))
        quantized_allreduce(comm, x, x, op="avg")
        return [x.get().tobytes(), y.get().tobytes()]

    assert run_over_nccl(device, RANKS, body=body) == [[expected, larger]] * RANKS
    assert not replays


def test_another_view_at_the_same_address_is_a_call_of_its_own(device, replays):
    def body(comm):
        x, out = put(values(comm.rank, size=2 * SIZE)), put(np.zeros(SIZE, np.float32))
        found = [quantized_allreduce(comm, part, out, op="avg").get() for part in (x[:SIZE], x[::2])]
        table = quantized_allreduce(comm, x[:SIZE].reshape(2, -1), out.reshape(2, -1), op="avg")
        return [*found, table.get().reshape(-1)]

    def wanted(comm):
        x = values(comm.rank, size=2 * SIZE)
        return [quantized_allreduce(comm, part, op="avg") for part in (x[:SIZE], x[::2], x[:SIZE])]

    np.testing.assert_array_equal(run_over_nccl(device, RANKS, body=body), run_ranks(RANKS, wanted))
    assert not replays


def test_a_recording_keeps_no_array_alive(device):
    def body(comm):
        x = put(values(comm.rank))
        for _ in range(2):
            quantized_allreduce(comm, x, x, op="avg")
        x.get()
        alive = weakref.ref(x)
        del x
        gc.collect()
        assert alive() is None

    run_over_nccl(device, RANKS, body=body)


def test_calls_that_do_more_than_launch_kernels_are_not_replayed(device, replays):
    sizes = {"padded": 1001, "in two passes": 1 << 16}

    def body(comm):
        for name, size in sizes.items():
            x = put(values(comm.rank, size=size))
            codec = MinMaxUInt8.bagua() if name == "in two passes" else MinMaxUInt8()
            for _ in range(3):
                quantized_allreduce(comm, x, x, op="avg", codec=codec)

    run_over_nccl(device, RANKS, body=body)
    assert not replays


def test_work_of_hooks_is_not_recorded(device, replays):
    expected = [on_host(step) for step in range(2)]

    def body(comm):
        x, y = put(values(comm.rank)), put(np.ones(SIZE, np.float32))

        found = []
        comm.on(before=lambda call: kernels.of(y).scale(y, 2.0))
        for step in range(2):
            x.set(values(comm.rank, step))
            found.append(quantized_allreduce(comm, x, x, op="avg").get().tobytes())
        assert y.get().tolist() == [4.0] * SIZE
        return found

    assert run_over_nccl(device, RANKS, body=body) == [expected] * RANKS
    assert len(replays) == RANKS


def test_kernels_that_an_observer_launches_are_launched_once_a_call(device):
    def body(comm):
        x, y = put(values(comm.rank)), put(np.ones(SIZE, np.float32))

        def double(kernel):
            if kernel == "encode":
                kernels.of(y).scale(y, 2.0)

        with kernels.of(x).before_launch(double):
            for _ in range(3):
                quantized_allreduce(comm, x, x, op="avg")
        assert y.get().tolist() == [8.0] * SIZE

    run_over_nccl(device, RANKS, body=body)


class ReplacedStep(MinMaxUInt8):
    def steps(self, count, like):
        given = super().steps(count, like)

        def encode(chunks, wire):
            chunks.fill(0.5)
            given.encode(chunks, wire)

        return given._replace(encode=encode)


class OwnEncode(MinMaxUInt8):
    def _encode(self, chunks, wire):
        chunks.fill(0.5)
        super()._encode(chunks, wire)


@pytest.mark.parametrize("codec", [ReplacedStep(), OwnEncode()], ids=lambda codec: type(codec).__name__)
def test_steps_of_a_users_codec_are_made_in_every_call(device, replays, codec):
    def body(comm):
        x, found = put(values(comm.rank)), []
        for step in range(3):
            x.set(values(comm.rank, step))
            found.append(quantized_allreduce(comm, x, x, op="avg", codec=codec).get())
        return found

    np.testing.assert_array_equal(run_over_nccl(device, RANKS, body=body), np.full((RANKS, 3, SIZE), 0.5))
    assert not replays


class Unhashable(MinMaxUInt8):
    __hash__ = None


def test_calls_that_no_later_one_can_repeat_are_not_recorded(device, monkeypatch):
    kept = []
    monkeypatch.setattr(arrays.Scratch, "keep", lambda scratch, *entry: kept.append(entry))

    def body(comm):
        x = put(values(comm.rank))
        quantized_allreduce(comm, x, op="avg")
        quantized_allreduce(comm, x, x, op="avg", codec=Unhashable())

    run_over_nccl(device, RANKS, body=body)
    assert not kept


@pytest.mark.slow
def test_hundreds_of_arrays_are_replayed(device, replays):
    def body(comm):
        xs = [put(values(comm.rank, size=64)) for _ in range(300)]
        for _ in range(2):
            for x in xs:
                quantized_allreduce(comm, x, x, op="avg")

    run_over_nccl(device, RANKS, body=body)
    assert len(replays) == RANKS * 300
