"""Tensors and optimizers that become those of one rank."""

import pytest
import torch
from torch import nn

from bagua_comm import CommMismatch
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, QAdamOptimizer, broadcast_optimizer, broadcast_tensors
from bagua_torch.tensors.broadcast import map_leaves

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool]


@pytest.mark.parametrize("root", [0, 2])
def test_tensors_become_those_of_the_root_in_place(root):
    def body(comm):
        tensors = [torch.full((2, 3), comm.rank, dtype=dtype) for dtype in DTYPES]
        addresses = [tensor.data_ptr() for tensor in tensors]
        broadcast_tensors(comm, tensors, root=root)
        assert [tensor.data_ptr() for tensor in tensors] == addresses
        return [(tensor.dtype, tensor.tolist()) for tensor in tensors]

    expected = [(dtype, torch.full((2, 3), root, dtype=dtype).tolist()) for dtype in DTYPES]
    assert run_ranks(3, body) == [expected] * 3


def test_one_message_carries_all_tensors_of_a_dtype():
    def body(comm):
        before = comm.counters["broadcast"].calls
        tensors = [torch.zeros(size, dtype=dtype) for size in range(5) for dtype in (torch.float32, torch.int64)]
        broadcast_tensors(comm, tensors)
        return comm.counters["broadcast"].calls - before

    assert run_ranks(2, body) == [2, 2]


def test_tensors_of_any_shape_and_layout_in_memory():
    """Also views that are not contiguous, of no dimension, or empty; and parameters."""

    def body(comm):
        base = torch.arange(24.0).reshape(4, 6) * (comm.rank + 1)
        parameter = nn.Parameter(torch.full((3,), float(comm.rank)))
        tensors = [base.t()[1:, ::2], torch.tensor(float(comm.rank)), torch.zeros(0, 5), parameter]
        broadcast_tensors(comm, tensors, root=1)
        assert parameter.requires_grad
        return [tensor.tolist() for tensor in tensors], base.tolist()

    one, other = run_ranks(2, body)
    assert one[0] == other[0]
    assert one[0][1:] == [1.0, [], [1.0] * 3]
    untouched = [[(row * 6 + column) * 1.0 for column in range(6)] for row in (1, 3)]
    assert one[1][1::2] == untouched  # rank 0's rows between those of the view


def test_nothing_is_sent_without_tensors_or_without_other_ranks():
    def body(comm):
        calls = comm.counters.total().calls
        broadcast_tensors(comm, [])
        if comm.size == 1:
            broadcast_tensors(comm, [torch.zeros(2)])
        return comm.counters.total().calls - calls

    assert run_ranks(1, body) == [0]
    assert run_ranks(2, body) == [0, 0]


# Optimizers -----------------------------------------------------------------------------------------------


def stepped(optimizer, times):
    for _ in range(times):
        for group in optimizer.param_groups:
            for number, parameter in enumerate(group["params"]):
                parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
    return optimizer


def state_of(optimizer):
    """The state of an optimizer as lists, with its settings."""
    return map_leaves(optimizer.state_dict(), lambda leaf: getattr(leaf, "tolist", lambda: leaf)())


MAKE = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "QAdam": lambda p, lr: QAdamOptimizer(p, lr=lr),
}


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
@pytest.mark.parametrize("root", [0, 1])
def test_the_state_of_an_optimizer_and_its_settings_become_those_of_the_root(make, root):
    def body(comm):
        parameters = [nn.Parameter(torch.full((2,), float(comm.rank))), nn.Parameter(torch.zeros(3, 1))]
        optimizer = stepped(make(parameters, 0.1 * (comm.rank + 1)), comm.rank * 2)
        before = state_of(optimizer)
        broadcast_optimizer(comm, optimizer, root=root)
        stepped(optimizer, 1)  # it goes on
        return before, state_of(optimizer)

    ranks = run_ranks(2, body)
    (befores, afters) = zip(*ranks, strict=True)
    assert befores[0] != befores[1]
    assert afters[0] == afters[1]
    assert afters[0]["param_groups"] == befores[root]["param_groups"]


def test_an_optimizer_that_did_not_step_gets_a_state():
    def body(comm):
        parameter = nn.Parameter(torch.ones(2))
        optimizer = stepped(torch.optim.Adam([parameter]), 3 if comm.rank == 0 else 0)
        broadcast_optimizer(comm, optimizer)
        return state_of(optimizer)["state"][0]

    first, second = run_ranks(2, body)
    assert first == second
    assert first["step"] == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rank, p: MAKE["SGD" if rank else "Adam"](p, 0.1), r"Adam.*SGD|SGD.*Adam"),
        (lambda rank, p: MAKE["SGD"](p[rank:], 0.1), r"groups of \[2\].*\[1\]|groups of \[1\].*\[2\]"),
    ],
)
def test_optimizers_that_differ_are_refused_on_all_ranks(make, message):
    def body(comm):
        optimizer = make(comm.rank, [nn.Parameter(torch.ones(1)) for _ in range(2)])
        before = state_of(optimizer)
        with pytest.raises(CommMismatch, match=message):
            broadcast_optimizer(comm, optimizer)
        assert state_of(optimizer) == before

    run_ranks(2, body)


def test_leaves_are_mapped_through_dicts_lists_and_tuples():
    given = {"a": [1, {"b": (2, "x")}], "c": (), "d": None}
    assert map_leaves(given, lambda leaf: (leaf,)) == {"a": [(1,), {"b": ((2,), ("x",))}], "c": (), "d": (None,)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_of_any_dtype_comes_to_a_rank_that_has_none_yet(dtype):
    def body(comm):
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        if comm.rank == 0:
            optimizer.state[parameter] = {"kept": torch.ones(3, dtype=dtype)}
        broadcast_optimizer(comm, optimizer)
        return optimizer.state[parameter]["kept"]

    assert [kept.double().tolist() for kept in run_ranks(2, body)] == [[1.0] * 3] * 2


# Buffers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "buffer", "message"),
    [
        ("a", torch.zeros(1, 2), r"'a' is torch.float32 of shape \(1, 2\), and was torch.float32 of .*\(2,\)"),
        ("a", torch.zeros(4), r"'a' is torch.float32 of shape \(4,\), and was torch.float32 of shape \(2,\)"),
        ("b", torch.zeros(3).double(), r"'b' is torch.float64 of shape \(3,\), and was torch.float32 of shape"),
        ("b", None, r"'b' is none, and was torch.float32 of shape \(3,\)"),
        ("c", torch.zeros(1), r"'c' is torch.float32 of shape \(1,\), and was none when the module was wrapped"),
    ],
)
def test_a_buffer_of_another_size_than_the_roots_is_named(name, buffer, message):
    def body(comm):
        module = nn.Linear(2, 1)
        for known, size in (("a", 2), ("b", 3)):
            module.register_buffer(known, torch.zeros(size))
        ddp = DistributedDataParallel(module, comm=comm)
        ddp(torch.ones(1, 2)).sum().backward()
        if comm.rank == 0:  # its message has gone when rank 1 finds that it does not fit
            ddp(torch.ones(1, 2)).sum().backward()
            return
        module.register_buffer(name, buffer)
        with pytest.raises(CommMismatch, match=message):
            ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(2, body)
