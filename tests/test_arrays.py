"""Arrays of NumPy, CuPy and whatever speaks DLPack; contiguity, overlap, scratch."""

import sys
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import sliding_window_view

from bagua_comm import arrays
from bagua_comm.arrays import FLOATS, INTEGERS, Scratch, as_array, check_reduction, dtype_named
from bagua_comm.errors import UnsupportedError


class Stranger:
    """An array of an unknown library."""


class OnDevice:
    """Something with DLPack in memory of some device type."""

    def __init__(self, device_type):
        self.device_type = device_type

    def __dlpack_device__(self):
        return self.device_type, 0

    def __dlpack__(self, **_):
        raise BufferError("not today")


# Libraries


def test_library_of_a_numpy_array():
    assert arrays.library(np.zeros(3)) == "numpy"
    assert arrays.namespace(np.zeros(3)) is np


def test_library_of_a_cupy_array_once_cupy_is_imported(monkeypatch):
    cupy = SimpleNamespace(ndarray=Stranger)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = Stranger()
    assert arrays.library(x) == "cupy"
    assert arrays.namespace(x) is cupy
    assert as_array(x) is x


# as_array


def test_numpy_arrays_are_taken_as_they_are():
    x = np.zeros((3, 4))[:, ::2]
    assert as_array(x) is x


def test_numpy_scalars_become_0d_arrays():
    value = as_array(np.float32(2.5))
    assert (value.shape, value.dtype, float(value)) == ((), np.float32, 2.5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
def test_a_torch_tensor_shares_memory(dtype):
    tensor = torch.ones(2, 3, dtype=getattr(torch, dtype))
    value = as_array(tensor)
    assert (value.shape, value.dtype.name) == ((2, 3), dtype)
    value[1, 2] = 0
    assert tensor.tolist() == np.array([[1, 1, 1], [1, 1, 0]], dtype).tolist()


def test_a_strided_torch_tensor_keeps_its_strides():
    tensor = torch.arange(6.0).reshape(2, 3).T
    value = as_array(tensor)
    assert value.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not arrays.is_contiguous(value)
    value[0, 1] = -1
    assert tensor[0, 1] == -1


def test_a_bfloat16_tensor_shares_memory():
    tensor = torch.ones(3, 2, dtype=torch.bfloat16).T
    value = as_array(tensor)
    assert (value.shape, value.dtype) == ((2, 3), arrays.bfloat16())
    value[1, 2] = 3
    assert tensor.tolist() == [[1, 1, 1], [1, 1, 3]]


def test_a_numpy_array_behind_dlpack_is_viewed():
    x = np.arange(3.0)
    wrapped = SimpleNamespace(__dlpack__=x.__dlpack__, __dlpack_device__=x.__dlpack_device__)
    value = as_array(wrapped)
    assert value.tolist() == [0, 1, 2]
    assert np.shares_memory(x, value)


REFUSED = [
    *(
        (arrays.library, x, f"expected a NumPy or CuPy array, got .*{type(x).__name__}$")
        for x in ([1.0], 1.0, None)
    ),
    (arrays.library, Stranger(), r"got \S*Stranger$"),
    (arrays.library, torch.zeros(2), "expected a NumPy or CuPy array, got torch.Tensor$"),
    *(
        (as_array, x, f"got builtins.{type(x).__name__}; wrap it with numpy.asarray$")
        for x in ([1.0], (1, 2), 3, 4.0)
    ),
    (as_array, Stranger(), r"or something with __dlpack__, got \S*Stranger$"),
    (as_array, OnDevice(10), r"memory of DLPack device type 10; expected host \(1\) or CUDA \(2\)$"),
    (as_array, OnDevice(1), "OnDevice through DLPack: not today$"),
    (as_array, torch.zeros(2, requires_grad=True), "(?i)this torch.Tensor.*grad"),
    (as_array, torch.zeros(2, device="meta"), "(?i)this torch.Tensor.*meta"),
    (as_array, torch.zeros(2, dtype=torch.float8_e5m2), "(?i)this torch.Tensor.*float8_e5m2"),
    (as_array, torch.eye(2).to_sparse(), "(?i)this torch.Tensor.*(sparse|layout)"),
]


@pytest.mark.parametrize(("call", "x", "words"), REFUSED, ids=lambda value: type(value).__name__)
def test_what_is_no_array_is_refused_by_name_with_the_reason(call, x, words):
    with pytest.raises(UnsupportedError, match=words) as caught:
        call(x)
    assert (caught.value.__cause__ is not None) == (words.startswith("(?i)") or "not today" in words)


# Contiguity


def test_contiguous_copies_only_arrays_that_are_not():
    x = np.arange(12.0).reshape(3, 4)
    for view in (x, x[1:], x[1, 1:3], x[:0], np.array(1.0)):
        assert arrays.contiguous(view) is view
        assert arrays.is_contiguous(view)
    for view in (x.T, x[:, ::2], x[:, 1:3], x[::-1]):
        assert not arrays.is_contiguous(view)
        copy = arrays.contiguous(view)
        assert view.tolist() == copy.tolist()
        assert arrays.is_contiguous(copy)
        assert not np.shares_memory(view, copy)


@pytest.mark.parametrize("shape", [(), (1,), (5, 2)])
@pytest.mark.parametrize("dtype", ["int16", "float32", "bfloat16", "complex128"])
def test_contiguous_copies_unaligned_arrays(shape, dtype):
    values = np.ones(shape, arrays.dtype_named(dtype))
    odd = np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1).reshape(shape)
    assert not arrays.is_contiguous(odd)
    copy = arrays.contiguous(odd)
    assert arrays.is_contiguous(copy)
    assert (copy.shape, copy.dtype, copy.tobytes()) == (shape, values.dtype, values.tobytes())


def test_empty_has_the_shape_and_dtype_asked_for():
    x = arrays.empty((2, 3), "float16", like=np.zeros(1))
    assert (type(x), x.shape, x.dtype) == (np.ndarray, (2, 3), np.float16)


def test_rows_are_views():
    x = np.arange(6)
    rows = arrays.rows(x, 3)
    rows[2, 1] = -1
    assert x.tolist() == [0, 1, 2, 3, 4, -1]
    assert rows.tolist() == [[0, 1], [2, 3], [4, -1]]


# Memory


def test_overlap_goes_by_bounds():
    x = np.zeros(10)
    assert arrays.overlap(x, x)
    assert arrays.overlap(x[:5], x[4:])
    assert arrays.overlap(x[::2], x[1::2])  # no common element, but interleaved
    assert not arrays.overlap(x[:5], x[5:])
    assert not arrays.overlap(x, x.copy())
    empty = np.zeros(0)
    assert not arrays.overlap(empty, empty)


def test_arrays_of_two_libraries_do_not_overlap(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Stranger))
    assert not arrays.overlap(np.zeros(3), Stranger())


def test_same_memory_is_one_address_and_one_size():
    x = np.zeros(10, np.float32)
    assert arrays.same_memory(x, x)
    assert arrays.same_memory(x, x.reshape(2, 5))
    assert arrays.same_memory(x, x.view(np.uint8))
    assert not arrays.same_memory(x, x[:9])
    assert not arrays.same_memory(x[:5], x[5:])
    assert not arrays.same_memory(x, x.copy())


def test_address_moves_with_the_view():
    x = np.zeros(10, np.float32)
    assert arrays.address(x[3:]) - arrays.address(x) == 12


def test_elements_in_one_place_are_seen():
    def repeats(x):
        return arrays.repeats(x.shape, x.strides, x.itemsize)

    for together in (np.broadcast_to(np.zeros(3), (2, 3)), sliding_window_view(np.zeros(4), 3)[::-1]):
        assert repeats(together)
    cube = np.zeros((3, 3, 3))
    parts = (cube.T[::-1], cube[::2, :, 1:], cube.diagonal(0, 0, 2), sliding_window_view(np.zeros(6), 2)[::2])
    for apart in (*parts, np.zeros((1, 3))[:, ::2], np.broadcast_to(0.0, (0, 3)), np.array(1)):
        assert not repeats(apart)


# Dtypes


def test_the_type_of_op_names_the_reductions():
    assert get_args(arrays.Op) == arrays.ARITHMETIC_OPS + arrays.BITWISE_OPS


def test_dtype_named_knows_bfloat16_and_numpys_names():
    assert dtype_named("bfloat16") == arrays.bfloat16()
    assert (dtype_named("bfloat16").name, dtype_named("bfloat16").itemsize) == ("bfloat16", 2)
    for name in arrays.MOVABLE:
        assert dtype_named(name).name == name


@pytest.mark.parametrize("name", sorted(arrays.MOVABLE))
def test_reductions_of_each_dtype(name):
    allowed = []
    for op in arrays.ARITHMETIC_OPS + arrays.BITWISE_OPS:
        try:
            check_reduction("allreduce", op, dtype_named(name))
        except UnsupportedError as exc:
            assert str(exc).startswith(f"allreduce: there is no op={op!r} for {name}")  # noqa: PT017
        else:
            allowed.append(op)
    arithmetic = ["sum", "avg", "prod", "min", "max"]
    bitwise = ["band", "bor", "bxor"]
    expected = arithmetic * (name in INTEGERS | FLOATS) + bitwise * (name in INTEGERS)
    if name in arrays.COMPLEX:  # which have no order
        expected = ["sum", "avg", "prod"]
    assert expected == allowed


# Scratch


def test_scratch_gives_the_same_memory_again():
    scratch, like = Scratch(), np.empty(0)
    first = scratch.take("wire", (4, 8), np.uint8, like=like)
    for shape, dtype in (((4, 8), np.uint8), ((8,), np.float32), ((2, 2), np.float64), ((), np.int16)):
        again = scratch.take("wire", shape, dtype, like=like)
        assert (shape, dtype) == (again.shape, again.dtype)
        assert arrays.address(first) == arrays.address(again)


def test_scratch_grows_and_does_not_shrink():
    scratch, like = Scratch(), np.empty(0)
    small = scratch.take("wire", (8,), np.uint8, like=like)
    large = scratch.take("wire", (1000,), np.uint8, like=like)
    assert not np.shares_memory(small, large)
    assert np.shares_memory(large, scratch.take("wire", (8,), np.uint8, like=like))
    assert np.shares_memory(large, scratch.take("wire", (125,), np.float64, like=like))


def test_scratch_of_different_keys_is_apart():
    scratch, like = Scratch(), np.empty(0)
    a = scratch.take("a", (8,), np.uint8, like=like)
    b = scratch.take("b", (8,), np.uint8, like=like)
    assert not np.shares_memory(a, b)


def test_scratch_takes_every_dtype_and_no_elements():
    scratch = Scratch()
    for name in sorted(arrays.MOVABLE):
        x = scratch.take("x", (3, 2), dtype_named(name), like=np.empty(0))
        assert ((3, 2), name, True) == (x.shape, x.dtype.name, x.flags.c_contiguous)
    assert scratch.take("empty", (0, 4), np.float32, like=np.empty(0)).shape == (0, 4)
