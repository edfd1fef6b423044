"""The mean of the largest elements of device arrays: the bytes of the host, and no waiting."""

import numpy as np
import pytest
from support.device_ranks import run_on_devices, up, values

from bagua_comm import ArrayError, ErrorFeedback, Hierarchical, MinMaxUInt8, TopK, UnsupportedError
from bagua_comm.testing import run_ranks

pytestmark = pytest.mark.parametrize("device", ["lazy"], indirect=True)  # one stream: no order to get wrong
SMALL = TopK(64, 6)
slow = pytest.mark.slow


def means(comm, place, average, dtype, size=400, times=3):
    """The bytes of some means, and of the residual after each."""
    mean, x, found = average.bind(comm), place(values(comm.rank, size, dtype)), []
    for _ in range(times):
        assert mean(x) is x
        found += [x.copy(), getattr(mean, "residual", None)]
    return [
        (each if isinstance(each, np.ndarray) else each.get()).tobytes() for each in found if each is not None
    ]


@pytest.mark.parametrize(
    ("kind", "ranks", "average", "dtype"),
    [
        ("nccl", 3, SMALL, "float32"),
        ("nccl", 1, ErrorFeedback(SMALL), "float32"),
        ("nccl", 2, ErrorFeedback(SMALL, retain=0.9), "float32"),
        ("local", 2, ErrorFeedback(SMALL, 0.8, 2, MinMaxUInt8(64)), "float32"),
        ("staged", 2, ErrorFeedback(SMALL), "float32"),
        pytest.param("nccl", 2, ErrorFeedback(TopK(64, 6, 16)), "bfloat16", marks=slow),
        pytest.param("nccl", 2, ErrorFeedback(TopK(64, 6, 32)), "float16", marks=slow),
    ],
    ids=str,
)
def test_the_bytes_of_the_host(device, kind, ranks, average, dtype):
    expected = run_ranks(ranks, lambda comm: means(comm, np.copy, average, dtype))
    assert expected == run_on_devices(device, ranks, kind, lambda comm: means(comm, up, average, dtype))


@pytest.mark.parametrize("nodes", ["aabb", "aaab"])
def test_between_nodes(device, nodes):
    average = Hierarchical(ErrorFeedback(SMALL))
    expected = run_ranks(4, lambda comm: means(comm, np.copy, average, "float32"), nodes=nodes)
    on_device = run_on_devices(device, 4, "nccl", lambda comm: means(comm, up, average, "float32"), nodes=nodes)
    assert expected == on_device


def test_a_mean_is_kernels_and_one_collective_for_which_the_host_does_not_wait(device):
    def body(comm):
        mean, x, mine = ErrorFeedback(SMALL).bind(comm), up(values(comm.rank, 400)), f"rank {comm.rank}"
        mean(x)
        before = len(device.names(thread=mine))
        with device.forbid_host_sync(this_thread=True):
            mean(x)
        return device.names(thread=mine)[before:]

    encode = ["choose", "average", "spread", "codes"]
    for names in run_on_devices(device, 2, "nccl", body):
        kernels = [f"kernel {name}" for name in ("add", *encode, "subtract", "sum")]
        assert [name for name in names if not name.startswith("nccl")] == kernels
        assert len(names) == len(kernels) + 1


def test_a_mean_can_be_captured_and_replayed(device):
    first, second = ([values(10 * k + rank, 400) for rank in range(2)] for k in (1, 2))
    expected = [
        run_ranks(2, lambda comm, xs=xs: SMALL.bind(comm)(xs[comm.rank].copy()).tobytes())
        for xs in (first, second)
    ]

    def body(comm):
        import cupy

        mean, x = SMALL.bind(comm), up(first[comm.rank])
        stream = cupy.cuda.Stream(non_blocking=True)
        mean(x)  # allocates and compiles
        cupy.cuda.get_current_stream().synchronize()
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeThreadLocal)
            mean(x)
            graph = stream.end_capture()
            found = []
            for data in (first, second):
                mean(up(values(comm.rank, 9000)))  # other memory than the graph's
                x.set(data[comm.rank])
                graph.launch(stream)
                found.append(x.get().tobytes())
            stream.synchronize()
        return found

    for found in run_on_devices(device, 2, "nccl", body):
        assert found == [each[0] for each in expected]


def test_bad_arrays_are_refused(device):
    def body(comm):
        import cupy

        room = cupy.empty(41, np.uint8)
        x = room[1:].view(np.float32)
        for average in (SMALL, ErrorFeedback(SMALL)):
            with pytest.raises(ArrayError, match="x begins at an address that is not a multiple of 4"):
                average.bind(comm)(x)
            with pytest.raises(UnsupportedError, match="cannot average float64"):
                average.bind(comm)(up(np.zeros(3)))
            with pytest.raises(ArrayError, match="residual is float32"):
                SMALL.bind(comm)(up(np.zeros(3, np.float32)), up(np.zeros(4, np.float32)))

    run_on_devices(device, 2, "nccl", body)
