"""Arrays of other libraries: the types of results, and errors that say what to pass instead."""

import sys
from types import ModuleType, SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.lib.stride_tricks import as_strided

from bagua_comm import ArrayError, UnsupportedError
from bagua_comm.testing import run_ranks


class Immutable:
    """Like a jax.Array on the CPU: DLPack exports its memory read-only."""

    def __init__(self, values):
        self.values = np.array(values)
        self.values.flags.writeable = False
        self.dtype = self.values.dtype

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()

    def __array__(self, dtype=None, copy=None):
        return self.values

    def __array_namespace__(self):
        return SimpleNamespace(from_dlpack=lambda x: Immutable(np.from_dlpack(x)), asarray=Immutable)


class Frame:
    """Like a table of pandas."""

    def to_numpy(self):
        return np.zeros(2)


class Eager:
    """Like a tensor of TensorFlow without DLPack."""

    def numpy(self):
        return np.zeros(2)


class Elsewhere:
    """An array in memory that is neither the host's nor CUDA's."""

    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **_):
        raise AssertionError("nobody asks for it")


class Tracer:
    """Like the tracer of an array in a traced function of JAX."""

    def __dlpack__(self, **_):
        raise ValueError("no memory")


class Sparse:
    """A sparse matrix of SciPy or CuPy."""

    nnz = 1

    def toarray(self):
        return np.eye(2)


def tensor(**options):
    return torch.zeros(2, **options)


REFUSED = {
    "list": ([1.0], "wrap it with numpy.asarray"),
    "number": (1.5, "wrap it with numpy.asarray"),
    "none": (None, "got builtins.NoneType"),
    "memoryview": (memoryview(b"ab"), r"numpy.frombuffer\(x, numpy.uint8\)"),
    "text": ("ab", "comm.broadcast_object"),
    "dict": ({}, "comm.broadcast_object"),
    "frame": (Frame(), r"pass x.to_numpy\(\)"),
    "eager": (Eager(), r"pass x.numpy\(\)"),
    "elsewhere": (Elsewhere(), r"pass a copy on the host: .* device type 8; expected host \(1\) or CUDA \(2\)"),
    "sparse": (Sparse(), r"pass x.toarray\(\), or its arrays one by one"),
    "traced": (Tracer(), r"Tracer stands for .*; call this outside of traced functions"),
    "masked": (np.ma.array([1.0], mask=[True]), "pass its data and its mask separately"),
    "object": (np.array([None]), r"has dtype object.*pass x.astype\(float\)"),
    "datetime": (np.zeros(1, "M8[s]"), r"pass x.view\(numpy.int64\)"),
    "timedelta": (np.zeros(1, "m8[s]"), r"pass x.view\(numpy.int64\)"),
    "structured": (np.zeros(1, "i4,f4"), r"pass its fields one by one, x\[name\]"),
    "texts": (np.array(["a"]), "comm.broadcast_object"),
    "swapped": (np.zeros(1, np.dtype("f4").newbyteorder()), r'pass x.astype\(x.dtype.newbyteorder\("="\)\)'),
    "longdouble": (np.zeros(1, np.longdouble), r"pass x.astype\(numpy.float64\)"),
    "clongdouble": (np.zeros(1, np.clongdouble), r"pass x.astype\(numpy.complex128\)"),
    "float8": (np.zeros(1, ml_dtypes.float8_e5m2), r"pass its bytes, x.view\(numpy.uint8\)"),
    "grad": (tensor(requires_grad=True), r"pass x.detach\(\), .* or call bagua_torch.functional"),
    "grad of bfloat16": (tensor(requires_grad=True, dtype=torch.bfloat16), r"pass x.detach\(\)"),
    "meta": (tensor(device="meta"), r"on meta, .*torch.empty_like"),
    "meta of bfloat16": (tensor(device="meta", dtype=torch.bfloat16), r"on meta, .*torch.empty_like"),
    "conjugate": (tensor(dtype=torch.complex64).conj(), r"pass x.resolve_conj\(\)"),
    "negative": (tensor(dtype=torch.complex64).conj().imag, r"pass x.resolve_neg\(\)"),
    "sparse tensor": (torch.eye(2).to_sparse(), r"sparse .*pass x.to_dense\(\)"),
    "mkldnn": (tensor().to_mkldnn(), r"_mkldnn; pass x.to_dense\(\)"),
    "tensor of float8": (tensor(dtype=torch.float8_e5m2), r"float8_e5m2.*pass its bytes, x.view\(torch.uint8\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_objects_that_cannot_be_sent_are_refused_with_what_to_pass_instead(name):
    x, remedy = REFUSED[name]

    def body(comm):
        for call, argument in (
            (lambda: comm.allreduce(x), "x"),
            (lambda: comm.allreduce_many([np.ones(1), x]), r"xs\[1\]"),
            (lambda: comm.broadcast(x, root=0), "x"),
            (lambda: comm.send(x, dest=1 - comm.rank), "x"),
        ):
            with pytest.raises(UnsupportedError, match=rf"^\w+: {argument}:? .*{remedy}"):
                call()
        return comm.allreduce(np.array(1)).item()  # nothing was sent

    assert run_ranks(2, body) == [2, 2]


def test_a_mapping_of_arrays_is_refused_where_a_list_is_expected():
    def body(comm):
        for call in (comm.allreduce_many, lambda xs: comm.broadcast_many(xs, root=0)):
            with pytest.raises(ArrayError, match=r"xs is a dict, expected a list of arrays: .*xs.values"):
                call({"a": np.ones(1)})
        return comm.allreduce(np.array(1)).item()

    assert run_ranks(2, body) == [2, 2]


REPEATED = "several elements in one place of memory; pass a copy"
NO_TARGETS = {
    "read-only": (lambda: np.frombuffer(b"01234567"), "out is read-only; pass a writable array"),
    "scalar": (lambda: np.float64(0), "NumPy scalar, which cannot be written to; use a 0-d array"),
    "immutable": (
        lambda: Immutable([0.0]),
        r"out is a read-only \S*Immutable; pass a writable NumPy array, numpy.array\(x\), or no out",
    ),
    "expanded": (lambda: torch.zeros(1).double().expand(2), REPEATED),
    "repeated": (lambda: as_strided(np.zeros(1), (2,), (0,)), REPEATED),
    "windows": (lambda: as_strided(np.zeros(4), (3, 2), (8, 8)), REPEATED),
}


@pytest.mark.parametrize("name", NO_TARGETS)
def test_objects_that_cannot_be_written_to_are_refused_with_what_to_pass_instead(name):
    make, message = NO_TARGETS[name]

    def body(comm):
        out = make()
        x = np.ones(np.shape(out.values if isinstance(out, Immutable) else out))
        for call in (
            lambda: comm.allreduce(x, out=out),
            lambda: comm.recv(out, source=1 - comm.rank),
            lambda: comm.sendrecv(x, out, dest=1 - comm.rank, source=1 - comm.rank),
        ):
            with pytest.raises(ArrayError, match=message.replace("out is", r"\w+ is")):
                call()
        return comm.allreduce(np.array(1)).item()

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.parametrize("x", [Immutable([1.0]), np.float32(1)], ids=["immutable", "scalar"])
def test_an_object_that_no_rank_can_receive_into_is_refused_on_the_root_too(x):
    def body(comm):
        for call in (lambda: comm.broadcast(x, root=0), lambda: comm.broadcast_many([x], root=0)):
            with pytest.raises(ArrayError, match=r"cannot be written to|read-only"):
                call()
        return True

    assert all(run_ranks(2, body))


def test_the_root_may_send_read_only_arrays():
    def body(comm):
        x = np.frombuffer(b"01234567") if comm.rank == 0 else np.empty(1)
        return comm.broadcast(x, root=0).tobytes()

    assert run_ranks(2, body) == [b"01234567"] * 2


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_an_immutable_array_goes_in_and_one_of_its_library_comes_back(dtype):
    def body(comm):
        x = Immutable(np.full(2, comm.rank + 1, dtype))
        total, rows, out = comm.allreduce(x), comm.allgather(x), np.empty(2, dtype)
        assert comm.allreduce(x, out=out) is out
        assert (type(total), total.values.dtype) == (Immutable, dtype)
        return total.values.tolist(), rows.values.tolist(), out.tolist(), x.values.tolist()

    for rank, results in enumerate(run_ranks(2, body)):
        assert results == ([3, 3], [[1, 1], [2, 2]], [3, 3], [rank + 1] * 2)


def test_a_scalar_goes_in_and_a_scalar_comes_back():
    def body(comm):
        total, rows = comm.allreduce(np.float32(comm.rank + 1)), comm.allgather(np.int64(comm.rank))
        return type(total), float(total), rows.tolist()

    assert run_ranks(2, body) == [(np.float32, 3.0, [0, 1])] * 2


def test_a_subclass_of_an_array_goes_in_and_a_plain_array_comes_back():
    def body(comm):
        matrix = np.ones((2, 2)).view(np.matrix)
        assert comm.allreduce(matrix, out=matrix) is matrix
        return comm.allreduce(matrix)

    for result in run_ranks(2, body):
        assert type(result) is np.ndarray
        assert result.tolist() == [[4, 4], [4, 4]]


def test_an_array_of_a_library_without_a_namespace_comes_back_as_a_numpy_array():
    inner = np.ones(2)
    x = SimpleNamespace(__dlpack__=inner.__dlpack__, __dlpack_device__=inner.__dlpack_device__)
    (result,) = run_ranks(1, lambda comm: comm.allreduce(x))
    assert type(result) is np.ndarray


def test_a_module_called_torch_without_tensors_is_in_nobodys_way(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    (result,) = run_ranks(1, lambda comm: comm.allreduce(Immutable([1.0])))
    assert result.values.tolist() == [1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_arrays_of_jax(dtype):
    jax = pytest.importorskip("jax", reason="JAX is not installed; Immutable stands in for its arrays above")
    jnp = jax.numpy

    def body(comm):
        x = jnp.ones((2, 2), dtype)
        rows = comm.allgather(x)
        assert isinstance(rows, jax.Array)
        assert (rows.shape, rows.dtype) == ((2, 2, 2), x.dtype)
        with pytest.raises(ArrayError, match=r"out is a .*, which is read-only; pass a NumPy array"):
            comm.allgather(x, out=rows)
        with pytest.raises(ArrayError, match="read-only"):
            comm.broadcast(x, root=0)
        return np.asarray(rows).astype(float).sum()

    assert run_ranks(2, body) == [8, 8]
