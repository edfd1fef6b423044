"""CUDA tensors on a GPU: DLPack, PyTorch's streams, training over NCCL with one rank."""

import contextlib
import io
import warnings

import pytest
import torch
from support.device_ranks import HostOnly, over
from support.torch_training import (
    QADAM,
    batch,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    through_a_file,
    train_step,
)
from torch import nn

import bagua_torch
from bagua_comm import ByteGrad, Communicator, Exact, LowPrecisionDecentralized, Quantized
from bagua_comm.execution.cuda import current_address, use_device
from bagua_comm.execution.lane import StreamLane
from bagua_comm.transports import LocalTransport
from bagua_torch import DistributedDataParallel, as_array, as_tensor, torch_stream

pytestmark = pytest.mark.gpu

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def comm():
    """A rank alone, over NCCL all the same."""
    use_device(0)
    host = HostOnly(LocalTransport())
    with Communicator([host, over("nccl", host)], device=0) as comm:
        yield comm


@contextlib.contextmanager
def no_waiting():
    """PyTorch raises where it would wait for the device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is a prototype, and does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def busy(stream, value):
    """A tensor of `value` that `stream` comes to only after a good while."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        return torch.full((1000,), value, device=CUDA)


# Tensors and arrays


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_and_its_array_are_the_same_memory(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype, device=CUDA)
    array = as_array(tensor)
    again = as_tensor(array)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert (array.data.ptr, again.data_ptr()) == (tensor.data_ptr(), tensor.data_ptr())
    assert (again.dtype, again.device, again.shape) == (dtype, CUDA, (2, 3))
    array[1, 2] = 1
    assert tensor[1, 2].item() == 1


def test_conversions_keep_the_order_of_streams_and_make_nobody_wait():
    import cupy

    theirs, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with no_waiting(), torch.cuda.stream(theirs), ours:
        array = as_array(busy(theirs, 7.0)).copy()  # on CuPy's stream
        tensor = as_tensor(array) + 1  # on PyTorch's
    theirs.synchronize()
    assert tensor.tolist() == [8.0] * 1000


def test_in_torch_stream_cupy_works_on_pytorchs_stream():
    import cupy

    stream = torch.cuda.Stream()
    for current in (stream, torch.cuda.default_stream()):
        with torch.cuda.stream(current), torch_stream(CUDA):
            assert cupy.cuda.get_current_stream().ptr == current.cuda_stream
    assert current_address() == 0


# Training


def gradients(model):
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def test_a_training_step_on_a_stream_of_its_own_waits_for_nobody(comm):
    plain, model = make_model().to(CUDA), make_model().to(CUDA)
    stream, x = torch.cuda.Stream(), batch(0, 0).to(CUDA)
    loss_of(plain, x).backward()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        wrapped = DistributedDataParallel(model, sgd(model.parameters()), ByteGrad(), comm=comm, bucket_bytes=64)
        for _ in range(2):
            with no_waiting():
                wrapped.optimizers[0].zero_grad()
                late = busy(stream, 0.0)[0]  # the gradients come later than the host
                (loss_of(wrapped, x) + late).backward()
        actual = gradients(model).clone()
    stream.synchronize()

    assert type(wrapped.engine._lane) is StreamLane
    torch.testing.assert_close(actual, gradients(plain))
    for bucket in wrapped.engine.buckets:
        assert bucket.flat.data.ptr in {flat.data_ptr() for flat in wrapped._steps.memory.flats["grad"]}
    wrapped.close()


def test_buffers_and_tensors_on_both_sides_are_broadcast(comm):
    tensors = [torch.ones(3, device=CUDA), torch.ones(3), torch.ones(2, dtype=torch.bfloat16, device=CUDA)]
    bagua_torch.broadcast_tensors(comm, tensors)
    assert [tensor.tolist() for tensor in tensors] == [[1] * 3, [1] * 3, [1] * 2]


@pytest.mark.parametrize("algorithm", [QADAM, LowPrecisionDecentralized()], ids=repr)
def test_a_checkpoint_goes_through_a_file_and_the_host(comm, algorithm):
    model = make_model().to(CUDA)
    optimizer = optimizer_for(algorithm, model.parameters())
    wrapped = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=64)
    for step in range(4):
        train_step(wrapped, optimizer, batch(0, step).to(CUDA))
    state = through_a_file(wrapped.state_dict())
    kept = [tensor for saved in state["_extra_state"]["tensors"].values() for tensor in saved.values()]
    assert {t.device for t in kept if isinstance(t, torch.Tensor)} == {CUDA}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    moved = torch.load(file, map_location="cpu", weights_only=True)
    wrapped.load_state_dict(moved)
    again = through_a_file(wrapped.state_dict())
    torch.testing.assert_close(again["_extra_state"]["tensors"], state["_extra_state"]["tensors"], rtol=0, atol=0)
    wrapped.close()


def test_the_timeline_has_the_device_beside_the_host(comm):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(12))).to(CUDA)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=1 << 22)
    x = torch.ones(512, 1024, device=CUDA)
    for _ in range(5):
        wrapped(x).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
    rows = {row: [] for row in ("backward", wrapped.engine._lane.name)}
    on_host = [span for span in comm.tracer.spans() if span.name == "backward"]
    for row, spans in rows.items():
        spans += [span for span in comm.tracer.spans() if span.thread == f"device: {row}"]
    stages = {name: [s for s in comm.tracer.spans() if s.name == name] for name in ("forward", "optimizer")}
    wrapped.close()

    for name, spans in stages.items():
        assert [s.thread for s in spans].count(f"device: {name}") == len(spans) // 2 == 5
    passes, exchanges = rows.values()
    assert (len(passes), len(exchanges)) == (5, 5 * len(wrapped.engine.buckets))
    for host, device in zip([s for s in on_host if not s.thread.startswith("device")], passes, strict=True):
        assert host.start_ns - 1e6 < device.start_ns < host.end_ns + 50e6  # one axis of time
    last, first = passes[-1], exchanges[-len(wrapped.engine.buckets)]
    assert last.start_ns < first.start_ns < last.end_ns  # it left while the backward pass went on


# PyTorch's own DistributedDataParallel


@pytest.mark.parametrize("average", [Exact(), Quantized()], ids=repr)
def test_a_comm_hook_completes_in_the_order_of_streams(comm, average):
    from torch import distributed

    distributed.init_process_group("nccl", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        plain, model, x = make_model().to(CUDA), make_model().to(CUDA), batch(0, 0).to(CUDA)
        theirs = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
        theirs.register_comm_hook(None, bagua_torch.comm_hook(average, comm))
        for _ in range(3):
            plain.zero_grad()
            model.zero_grad()
            loss_of(plain, x).backward()
            (loss_of(theirs, x) + busy(torch.cuda.current_stream(), 0.0)[0]).backward()
        torch.testing.assert_close(gradients(model), gradients(plain))
    finally:
        distributed.destroy_process_group()
