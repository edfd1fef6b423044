"""Tensors as arrays and back: the same memory."""

import numpy as np
import pytest
import torch

from bagua_comm import UnsupportedError, arrays
from bagua_comm.testing import run_ranks
from bagua_torch import as_array, as_tensor

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
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


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(2, device="meta"), "on meta"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2).to(torch.float8_e5m2), "float8_e5m2"),
    ],
)
def test_what_cannot_be_viewed_is_refused(tensor, message):
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
