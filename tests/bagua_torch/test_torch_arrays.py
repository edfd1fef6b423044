"""Tensors as arrays and back: the same memory."""

import types

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from bagua_comm import (
    ErrorFeedback,
    Exact,
    Hierarchical,
    Quantized,
    UnsupportedError,
    arrays,
    quantized_allreduce,
)
from bagua_comm.testing import run_ranks
from bagua_torch import as_array, as_tensor
from bagua_torch.arrays import cupy_stream

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_and_its_array_share_memory(dtype):
    tensor = torch.zeros(2, 3, dtype=dtype)
    array = as_array(tensor)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert array.__array_interface__["data"][0] == tensor.data_ptr()

    array[1, 2] = 1
    assert tensor[1, 2] == 1
    assert as_array(AsyncCollectiveTensor(tensor)[1]).tolist() == array[1].tolist()

    again = as_tensor(array)
    assert (again.dtype, again.data_ptr()) == (tensor.dtype, tensor.data_ptr())


def test_strides_are_kept():
    tensor = torch.arange(12.0).reshape(3, 4).T
    assert as_array(tensor).tolist() == tensor.tolist()
    assert np.shares_memory(as_array(tensor), as_array(tensor.T))


def test_parameters_are_viewed_without_their_history():
    parameter = torch.nn.Parameter(torch.zeros(2))
    as_array(parameter)[0] = 5
    assert parameter.tolist() == [5, 0]


def test_collectives_take_cpu_tensors_as_they_are():
    def body(comm):
        x = torch.full((3,), float(comm.rank + 1))
        assert comm.allreduce(x, out=x) is x
        return x

    assert [t.tolist() for t in run_ranks(2, body)] == [[3, 3, 3], [3, 3, 3]]


CALLS = {
    "allreduce": lambda comm, x, **out: comm.allreduce(x, op="avg", **out),
    "reduce": lambda comm, x, **out: comm.reduce(x, root=0, **out),
    "allgather": lambda comm, x, **out: comm.allgather(x, **out),
    "gather": lambda comm, x, **out: comm.gather(x, root=0, **out),
    "gather by counts": lambda comm, x, **out: comm.gather(x, counts=[8, 8], root=0, **out),
    "reduce_scatter": lambda comm, x, **out: comm.reduce_scatter(x, op="max", **out),
    "reduce_scatter of counts": lambda comm, x, **out: comm.reduce_scatter(x, counts=[3, 5], **out),
    "alltoall": lambda comm, x, **out: comm.alltoall(x, **out),
    "scan": lambda comm, x, **out: comm.scan(x, **out),
    "exscan": lambda comm, x, **out: comm.exscan(x, **out),
    "quantized_allreduce": lambda comm, x, **out: quantized_allreduce(comm, x, **out),
    "allreduce_many": lambda comm, x, **out: comm.allreduce_many([x], [out["out"]] if out else None)[0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tensors_in_tensors_out(call, dtype):
    """With the values that arrays give; with `out`, that tensor itself, whatever its layout."""

    def body(comm):
        x = torch.arange(8.0).mul(comm.rank + 1).reshape(4, 2).to(dtype)
        result, expected = call(comm, x), call(comm, as_array(x))
        if expected is None:
            assert result is None
            return call(comm, x, out=None)
        assert type(result) is torch.Tensor
        assert (result.dtype, tuple(result.shape)) == (dtype, expected.shape)
        assert result.tolist() == expected.tolist()

        strided = torch.zeros(*expected.shape, 2, dtype=dtype)[..., 0]
        assert call(comm, x, out=strided) is strided
        assert strided.tolist() == expected.tolist()
        return None

    run_ranks(2, body)


def test_tensors_travel_between_two_ranks_and_from_one_to_all():
    def body(comm):
        peer, x = 1 - comm.rank, torch.full((3,), comm.rank, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        assert comm.sendrecv(x, out, dest=peer, source=peer) is out
        assert comm.broadcast(x, root=1) is x
        many = comm.broadcast_many([torch.full((2,), comm.rank)], root=1)
        row = comm.scatter(
            torch.arange(4).reshape(2, 2) if comm.rank == 0 else None, torch.empty(2).long(), root=0
        )
        whole = comm.allgather(x, torch.empty(6, dtype=x.dtype), counts=[3, 3])
        swapped = comm.alltoall(x[:2], torch.empty(2, dtype=x.dtype), counts=[1, 1], out_counts=[1, 1])
        comm.check_consistency(whole)
        return [t.tolist() for t in (out, x, many[0], row, whole, swapped)]

    first, second = run_ranks(2, body)
    assert first == [[1] * 3, [1] * 3, [1] * 2, [0, 1], [1] * 6, [1, 1]]
    assert second == [[0] * 3, [1] * 3, [1] * 2, [2, 3], [1] * 6, [1, 1]]


def test_averages_take_tensors_in_place():
    def body(comm):
        for average in (Exact(), Quantized(min_bytes=0), ErrorFeedback(), Hierarchical()):
            x = torch.tensor([0.0, 255.0]) * comm.rank
            assert average.bind(comm)(x) is x
            assert x.tolist() == [0, 127.5]
        residual = torch.zeros(2)
        mean = quantized_allreduce(comm, torch.tensor([0.3, 255.0]), op="avg", residual=residual)
        assert mean.add(residual).tolist() == pytest.approx([0.3, 255.0])
        return True

    assert all(run_ranks(2, body))


def test_a_parameter_without_a_gradient_comes_back_as_a_tensor():
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    (result,) = run_ranks(1, lambda comm: comm.allreduce(parameter))
    assert type(result) is torch.Tensor


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2).to(torch.float8_e5m2), "float8_e5m2"),
    ],
)
def test_tensors_that_cannot_be_viewed_are_refused(tensor, message):
    with pytest.raises(UnsupportedError, match=message):
        as_array(tensor)


def test_a_tensor_on_a_device_without_transport_is_refused_on_every_rank():
    def body(comm):
        with pytest.raises(UnsupportedError, match="allreduce: x: "):
            comm.allreduce(torch.zeros(2, device="meta"))
        with pytest.raises(UnsupportedError, match=r"requires? grad"):
            comm.allreduce(torch.zeros(2, requires_grad=True))
        return comm.allreduce(arrays.as_array(torch.ones(1))).item()

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
def test_pytorchs_stream_of_cupys_default_stream_is_its_default_stream(device, monkeypatch):
    """And no stream of PyTorch's pool, as `ExternalStream(0)` would be."""
    import cupy

    on_gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: (address, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    assert cupy_stream(on_gpu) == ("default", on_gpu)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert cupy_stream(on_gpu) == (stream.ptr, on_gpu)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=1))
    assert cupy_stream(on_gpu) == ("default", on_gpu)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: types.SimpleNamespace(ptr=2))
    with pytest.raises(UnsupportedError, match="CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1"):
        cupy_stream(on_gpu)
