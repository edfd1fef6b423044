"""Averages of device arrays equal those of the same arrays on the host."""

import contextlib
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support.device_ranks import run_on_devices, run_over_nccl, up, values

import bagua_comm
from bagua_comm import (
    ArrayError,
    BFloat16,
    ErrorFeedback,
    Exact,
    Float16,
    Hierarchical,
    Int4,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    quantized_allgather,
    quantized_allreduce,
    quantized_reduce_scatter,
    reproducible_sum,
)
from bagua_comm.arrays import dtype_named
from bagua_comm.testing import run_ranks
from bagua_comm.topology import place, share

pytestmark = pytest.mark.parametrize(
    "device", ["lazy"], indirect=True
)  # one stream a rank: no order to get wrong


def on_host(ranks, size, dtype, average, times=1):
    """The bytes that `average` leaves on each rank."""

    def body(comm):
        mean, x = average.bind(comm), values(comm.rank, size, dtype)
        return [mean(x).tobytes() for _ in range(times)]

    return run_ranks(ranks, body)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("kind", "ranks", "codec", "dtype"),
    [
        ("local", 2, MinMaxUInt8(), "float32"),
        ("local", 3, MinMaxUInt8(), "float16"),
        ("nccl", 1, MinMaxUInt8(), "float32"),
        ("nccl", 2, MinMaxUInt8(), "float32"),
        ("nccl", 3, MinMaxUInt8(), "bfloat16"),
        ("nccl", 4, MinMaxUInt8(), "float32"),
        ("nccl", 2, MinMaxUInt8.bagua(), "float16"),
        ("nccl", 2, Int4(), "float32"),
        ("nccl", 2, Float16(), "float32"),
        ("nccl", 2, BFloat16(), "float32"),
        ("staged", 2, MinMaxUInt8(), "float32"),
        ("staged", 3, MinMaxUInt8(), "bfloat16"),
    ],
)
def test_quantized_gives_the_bytes_of_the_host(device, kind, ranks, codec, dtype):
    average = Quantized(codec)
    expected = on_host(ranks, 1001, dtype, average)

    def body(comm):
        x = up(values(comm.rank, 1001, dtype))
        return [average.bind(comm)(x).get().tobytes()]

    assert expected == run_on_devices(device, ranks, kind, body)


def shards(comm, place, dtype, codec):
    """The bytes of reduce-scatters and allgathers, with carried errors, in equal and unequal chunks."""
    x, found = place(values(comm.rank, 300 * comm.size, dtype)), []
    for counts in (None, [600, *[300] * (comm.size - 2), 0] if comm.size > 1 else [300]):
        residual, reference = place(np.zeros(x.shape, x.dtype)), None
        for _ in range(2):
            chunk = quantized_reduce_scatter(comm, x, codec=codec, residual=residual, counts=counts)
            out = quantized_allgather(comm, chunk, codec=codec, reference=reference, counts=counts)
            reference = out
            found += [chunk, residual, out]
    return [(array if isinstance(array, np.ndarray) else array.get()).tobytes() for array in found]


@pytest.mark.parametrize(
    ("kind", "ranks", "codec", "dtype"),
    [
        ("local", 2, MinMaxUInt8(), "float32"),
        ("nccl", 1, MinMaxUInt8(), "float32"),
        ("nccl", 2, MinMaxUInt8(), "float32"),
        ("nccl", 3, MinMaxUInt8(), "bfloat16"),
        ("nccl", 2, Float16(), "float32"),
        ("staged", 2, MinMaxUInt8.bagua(), "float16"),
    ],
)
def test_quantized_shards_have_the_bytes_of_the_host(device, kind, ranks, codec, dtype):
    expected = run_ranks(ranks, lambda comm: shards(comm, np.copy, dtype, codec))
    assert expected == run_on_devices(device, ranks, kind, lambda comm: shards(comm, up, dtype, codec))


def test_each_half_of_a_quantized_allreduce_is_few_kernels_and_one_exchange(device):
    def body(comm):
        x, out = up(values(comm.rank, 4096)), up(values(comm.rank, 2048))
        whole = up(values(comm.rank, 4096))
        mine, names = f"rank {comm.rank}", []
        for waits in (True, False):
            before = len(device.names(thread=mine))
            with contextlib.nullcontext() if waits else device.forbid_host_sync(this_thread=True):
                quantized_reduce_scatter(comm, x, out, op="avg")
                middle = len(device.names(thread=mine))
                quantized_allgather(comm, out, whole)
            names = device.names(thread=mine)
        return names[before:middle], names[middle:]

    for scatter, gather in run_on_devices(device, 2, "nccl", body):
        assert [name for name in scatter if name.startswith("kernel")] == [
            "kernel encode",
            "kernel decode",
            "kernel reduce_avg",
        ]
        assert [name for name in gather if name.startswith("kernel")] == ["kernel encode", "kernel decode"]
        for names in (scatter, gather):
            assert sum(name.startswith("nccl") for name in names) == 1
            assert all(name.startswith(("kernel", "nccl")) for name in names)


@pytest.mark.parametrize(
    ("kind", "average"),
    [
        ("nccl", ErrorFeedback()),
        ("staged", ErrorFeedback()),
        ("nccl", ErrorFeedback(Quantized(), 0.8, 2, MinMaxUInt8(64))),
    ],
    ids=str,
)
def test_error_feedback_gives_the_bytes_of_the_host(device, kind, average):
    expected = on_host(2, 1000, "float32", average, times=3)

    def body(comm):
        mean, x, found = average.bind(comm), up(values(comm.rank, 1000)), []
        for _ in range(3):
            found.append(mean(x).get().tobytes())
        return found

    assert expected == run_on_devices(device, 2, kind, body)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize(
    ("kind", "ranks"), [("local", 3), ("nccl", 1), ("nccl", 2), ("nccl", 3), ("nccl", 4), ("staged", 2)]
)
def test_reproducible_gives_the_bytes_of_the_host(device, kind, ranks, dtype):
    average = Reproducible()
    expected = on_host(ranks, 1001, dtype, average, times=2)

    def body(comm):
        mean, x = average.bind(comm), up(values(comm.rank, 1001, dtype))
        return [mean(x).get().tobytes() for _ in range(2)]

    assert expected == run_on_devices(device, ranks, kind, body)


def test_reproducible_means_of_several_dtypes_are_an_error_on_every_rank(device):
    def body(comm):
        x = up(values(0, 300, ("float32", "float64")[comm.rank]))
        with pytest.raises(ArrayError, match=r"rank 0 has .* of float32, but rank 1 has .* of float64"):
            Reproducible().bind(comm)(x)

    run_on_devices(device, 2, "nccl", body, timeout_s=20.0)


@pytest.mark.parametrize("kind", ["nccl", "staged"])
def test_the_sum_of_all_elements_is_that_of_the_host(device, kind):
    xs = [values(rank, 1001, "float64") for rank in range(2)]

    def body(comm):
        total = reproducible_sum(comm, up(xs[comm.rank]))
        return total.get().tobytes(), total.shape

    expected = run_ranks(2, lambda comm: reproducible_sum(comm, xs[comm.rank]).tobytes())
    assert run_on_devices(device, 2, kind, body) == [(x, ()) for x in expected]


def test_reproducible_means_of_microbatches_do_not_make_the_host_wait_for_the_device(device):
    average = Reproducible(addends=4)
    everything = [values(i, 300) for i in range(4)]

    def means(comm, place):
        mean, mine, found = average.bind(comm), share(4, comm.rank, comm.size), []
        for waits in (True, False):  # first, memory is allocated and kernels are compiled
            xs = [place(everything[i]) for i in mine]
            with contextlib.nullcontext() if waits else device.forbid_host_sync(this_thread=True):
                for x in xs[:-1]:
                    mean.hold(x)
                mean(xs[-1])
            found.append(xs[-1])
        return found

    def on_device(comm):
        return [x.get().tobytes() for x in means(comm, up)]

    (expected,) = run_ranks(1, lambda comm: [x.tobytes() for x in means(comm, np.copy)])
    assert run_on_devices(device, 2, "nccl", on_device) == [expected] * 2


@pytest.mark.parametrize("before", [False, True], ids=["at first", "after a good mean"])
def test_a_wrong_number_of_addends_is_an_error_on_every_rank(device, before):
    rounds = [*[(2, 2)][:before], (2, 1), (3, 2), (2, 2)]

    def body(comm):
        mean, found = Reproducible(addends=6).bind(comm), []
        for held in rounds:
            for _ in range(held[comm.rank]):
                with contextlib.suppress(ArrayError):
                    mean.hold(up(values(0, 300)))
            try:
                mean(up(values(0, 300)))
                found.append("")
            except ArrayError as exc:
                found.append(str(exc))
        return found

    found = run_on_devices(device, 2, "nccl", body, timeout_s=20.0)

    assert found[0] == found[1]
    assert found[0][-1] == "" == found[0][0] * before
    assert "rank 1 of 2 has 3 of 6 addends, but has 2;" in found[0][-3]
    assert "rank 0 of 2 has 3 of 6 addends, but has 4;" in found[0][-2]


@pytest.mark.covering(2)
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 0, 0, 1]], ids=["equal", "unequal"])
@pytest.mark.parametrize("inner", [Exact(), Quantized()], ids=repr)
@pytest.mark.parametrize("inside", [Exact(), Quantized(MinMaxUInt8(block=64))], ids=["exact", "coded inside"])
def test_hierarchical_gives_the_mean_over_nodes(device, nodes, inner, inside):
    average = Hierarchical(inner, inside=inside)
    exact = np.mean([values(rank, 1003) for rank in range(4)], axis=0)

    def body(comm):
        x = up(values(comm.rank, 1003))
        comm._labels = nodes  # as `connect(node=)` would find
        comm.node, comm.local_rank, comm.local_size = place(comm.rank, nodes)
        average.bind(comm)(x)
        return x.get()

    results = run_on_devices(device, 4, "nccl", body)

    assert len({result.tobytes() for result in results}) == 1
    np.testing.assert_allclose(results[0], exact, atol=1e-6 if inner == inside == Exact() else 0.04)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1], [0, 1, 1, 1]], ids=["equal", "unequal"])
def test_shards_in_two_levels_have_the_bits_of_the_host(device, nodes):
    average = Hierarchical(Quantized(MinMaxUInt8(block=32)), inside=Quantized(MinMaxUInt8(block=64)))

    def both(comm, asarray):
        x, m = asarray(values(comm.rank, 400)), 100
        shard, whole = (asarray(np.zeros(size, np.float32)) for size in (m, 4 * m))
        average.bind_shards(comm)(x, shard, "avg")
        return average.bind_gather(comm)(shard, whole)

    def on_device(comm):
        comm._labels = nodes
        comm.node, comm.local_rank, comm.local_size = place(comm.rank, nodes)
        return both(comm, up).get()

    expected = run_ranks(4, lambda comm: both(comm, np.asarray), nodes=nodes)
    for found in run_on_devices(device, 4, "nccl", on_device):
        assert found.tobytes() == expected[0].tobytes()


def test_shards_of_complex_numbers_are_weighted_by_nodes_on_a_device_too(device):
    def body(comm):
        comm._labels = nodes = [0, 1, 1]
        comm.node, comm.local_rank, comm.local_size = place(comm.rank, nodes)
        x, shard = up(np.arange(6).astype(np.complex64) * (1 + comm.rank) * 1j), up(np.zeros(2, np.complex64))
        Hierarchical().bind_shards(comm)(x, shard, "avg")
        return shard.get().tolist()

    found = run_on_devices(device, 3, "nccl", body)
    assert np.concatenate(found) == pytest.approx(2j * np.arange(6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_reproducible_shards_have_the_bits_of_the_host(device, dtype):
    tensors = [(7, 33), (100, 3)]

    def reduced(comm, asarray):
        total = Reproducible(addends=4).bind_shards(comm, tensors)
        out = asarray(np.zeros(total.size // comm.size, dtype_named(dtype)))
        for index in range(2):
            total(asarray(values(2 * comm.rank + index, total.size).astype(out.dtype)), out, "avg")
        return out

    expected = run_ranks(2, lambda comm: reduced(comm, np.asarray))
    found = run_on_devices(device, 2, "nccl", lambda comm: reduced(comm, up).get())
    assert [x.tobytes() for x in found] == [x.tobytes() for x in expected]


@pytest.mark.parametrize("codec", [MinMaxUInt8(), Int4()], ids=repr)
def test_a_quantized_allreduce_is_three_kernels_and_two_collectives_and_nothing_else(device, codec):
    def body(comm):
        x = up(values(comm.rank, 4096))
        quantized_allreduce(comm, x, out=x, op="avg", codec=codec)
        mine = f"rank {comm.rank}"
        before = len(device.names(thread=mine))
        with device.forbid_host_sync(this_thread=True):
            quantized_allreduce(comm, x, out=x, op="avg", codec=codec)
        return device.names(thread=mine)[before:]

    for names in run_on_devices(device, 2, "nccl", body):
        kernels = [name for name in names if name.startswith("kernel")]
        nccl = [name for name in names if name.startswith("nccl")]
        assert kernels == ["kernel encode", "kernel combine", "kernel decode"]
        assert len(nccl) == 2
        assert sorted(names) == sorted(kernels + nccl)


@pytest.mark.parametrize("average", [Exact(), Quantized()], ids=repr)
@pytest.mark.parametrize("kind", ["local", "nccl"])
def test_one_rank_copies_no_array_onto_itself(device, kind, average):
    def body(comm):
        mean, x = average.bind(comm), up(values(0, 100))
        before = len(device.log)
        assert mean(x).get().tobytes() == values(0, 100).tobytes()
        return [entry.name for entry in device.log[before:]]

    (names,) = run_on_devices(device, 1, kind, body)
    assert "copy" not in names


@pytest.mark.parametrize(
    "codec",
    [MinMaxUInt8(None), *(pytest.param(each, marks=pytest.mark.slow) for each in (MinMaxUInt8(), Float16()))],
    ids=repr,
)
def test_a_quantized_allreduce_can_be_captured_and_replayed(device, codec):
    first, second = ([values(10 * k + rank, 20000) for rank in range(2)] for k in (1, 2))
    expected = [
        run_ranks(2, lambda comm, x=x: quantized_allreduce(comm, x[comm.rank], codec=codec).tobytes())
        for x in (first, second)
    ]

    def body(comm):
        import cupy

        x, out = up(first[comm.rank]), up(np.zeros(20000, np.float32))
        stream = cupy.cuda.Stream(non_blocking=True)
        quantized_allreduce(comm, x, out, codec=codec)  # allocates and compiles
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            quantized_allreduce(comm, x, out, codec=codec)
            graph = stream.end_capture()
            found = []
            for data in (first, second):
                x.set(data[comm.rank])
                graph.launch(stream)
                found.append(out.get().tobytes())
            larger = up(values(comm.rank, 90000))
            quantized_allreduce(comm, larger, out=larger, codec=codec)  # other memory than the graph's
            graph.launch(stream)
            found.append(out.get().tobytes())
            stream.synchronize()
        return found

    for rank, found in enumerate(run_on_devices(device, 2, "nccl", body)):
        assert [expected[0][rank], expected[1][rank], expected[1][rank]] == found


def test_an_array_of_another_device_is_refused_by_name_before_anything_is_sent(device):
    def body(comm):
        import cupy

        other, x = cupy.cuda.Device(1 - comm.rank), up(values(comm.rank, 64))
        with other:
            far = up(values(comm.rank, 64))
        wire, settings = MinMaxUInt8().encode(x[None]), (0.1, 0.9)
        calls = {
            "allreduce: x": lambda: comm.allreduce(far),
            "allreduce: out": lambda: comm.allreduce(x, out=far),
            "quantized_allreduce: out": lambda: quantized_allreduce(comm, x, out=far),
            "quantized_allreduce: residual": lambda: quantized_allreduce(comm, x, out=x, residual=far),
            "encode: chunks": lambda: MinMaxUInt8().encode(far[None]),
            "decode: out": lambda: MinMaxUInt8().decode(wire, far[None]),
            "sgd_step: an array": lambda: bagua_comm.optim.SGD(*settings).step(
                x, far, bagua_comm.optim.SGD(*settings).init(x)
            ),
        }
        for argument, call in calls.items():
            expected = f"{argument} is on CUDA device {1 - comm.rank}, expected device {comm.rank}"
            with pytest.raises(ArrayError, match=f"^{expected}"):
                call()
        with other, pytest.raises(ArrayError, match="the current CUDA device of this thread is"):
            comm.allreduce(x)
        return comm.allreduce(x, out=x).get().tobytes()

    expected = run_ranks(2, lambda comm: comm.allreduce(values(comm.rank, 64)).tobytes())
    assert run_on_devices(device, 2, "nccl", body) == expected


def test_check_consistency_of_device_arrays(device):
    from bagua_comm import CommMismatch

    def body(comm):
        comm.check_consistency(up(np.arange(5.0)))
        with pytest.raises(CommMismatch):
            comm.check_consistency(up(np.full(5, comm.rank)))

    run_on_devices(device, 2, "nccl", body)


MOST_CALLS = 92
"""Of our own functions, in a quantized_allreduce; each takes the host a fraction of a microsecond."""


def test_a_quantized_allreduce_over_nccl_calls_few_functions_of_ours_from_the_second_time_on(device):
    ours, calls = str(Path(bagua_comm.__file__).parent), []

    def count(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls.append((threading.get_ident(), frame.f_code.co_name))

    def body(comm):
        x = up(values(comm.rank, 1 << 14))
        quantized_allreduce(comm, x, out=x, op="avg")
        comm.barrier()
        sys.setprofile(count)
        try:
            quantized_allreduce(comm, x, out=x, op="avg")
        finally:
            sys.setprofile(None)
        return threading.get_ident()

    for thread in run_over_nccl(device, 2, body=body):
        made = [name for caller, name in calls if caller == thread]
        assert 10 < len(made) <= MOST_CALLS, "\n".join(made)
