"""Reductions in any order over MPI: MPI's own, with the checks and the endings of other calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI
from random_calls import SMALL_SIZES, RandomCalls, shrink_thresholds

import bagua_comm
from bagua_comm import ArrayError, BootstrapError, CommMismatch, CommTimeout
from bagua_comm.testing import sample
from bagua_comm.transports.mpi import shared_window as shared_memory
from bagua_comm.transports.mpi.native import Native

pytestmark = pytest.mark.mpi

COUNTS = (1, 500, 40_000)


@contextmanager
def in_any_order(*, shared):
    """A communicator in any order, with or without memory that ranks share."""
    with pytest.MonkeyPatch.context() as patch:
        if not shared:
            patch.setattr(shared_memory, "_map", lambda *place: None)
        with bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, op_order="any") as comm:
            yield comm


@pytest.fixture(scope="module", params=[True, False], ids=["shared memory", "messages"])
def world(request):
    with in_any_order(shared=request.param) as comm:
        yield comm


@pytest.fixture
def asked(monkeypatch):
    """The names of the reductions that MPI was asked for."""
    names = []
    for name in ("allreduce", "reduce", "reduce_scatter"):
        whole = getattr(Native, name)

        def noted(self, *arguments, name=name, whole=whole):
            names.append(name)
            whole(self, *arguments)

        monkeypatch.setattr(Native, name, noted)
    return names


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    ("dtype", "op"), [("float32", "sum"), ("float32", "avg"), ("int64", "avg"), ("complex128", "avg")]
)
def test_sums_are_those_of_rank_order_but_for_rounding(comm, world, dtype, op, count):
    p, x = comm.size, sample(comm.rank, (comm.size * count,), dtype)
    expected = comm.allreduce(x, op=op)
    mine = expected[comm.rank * count : (comm.rank + 1) * count]
    agrees = np.testing.assert_array_equal
    if x.dtype.kind in "fc":
        rtol = 4 * p * np.finfo(x.dtype).eps
        scale = comm.allreduce(np.abs(x)).max() / (p if op == "avg" else 1)

        def agrees(actual, expected):
            np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol * scale)

    result = world.allreduce(x, op=op)
    agrees(result, expected)
    world.check_consistency(result)  # with Open MPI
    agrees(world.reduce_scatter(x, op=op), mine)
    for root in {0, p - 1}:
        total = world.reduce(x, root=root, op=op)
        agrees(total, expected) if world.rank == root else None
    own = x.copy()
    agrees(world.allreduce(own, own if world.rank % 2 else None, op=op), expected)  # some in place, some not
    own = x.copy()
    agrees(world.reduce(own, own, root=0, op=op), expected) if world.rank == 0 else world.reduce(x, root=0, op=op)
    own = x.copy()
    agrees(world.reduce_scatter(own, own[comm.rank * count : (comm.rank + 1) * count], op=op), mine)


def test_mpi_is_used_only_for_reductions_that_it_supports(world, asked):
    if world.size == 1:
        return  # there is nothing to reduce
    shown = world.transports[0]._endpoint.window is not None
    large, small = np.ones(world.size * (40_000 if shown else 1000)), np.ones(world.size)
    for x in (large, small, large.astype("int32"), large.astype("complex64")):
        for op in ("sum", "avg") if x.dtype.kind == "f" else ("sum",):
            world.allreduce(x, op=op)
            world.reduce(x, root=0, op=op)
            world.reduce_scatter(x, op=op)
            reduces = [] if shown else ["reduce"]  # larger arrays it does not
            natively = ["allreduce", *reduces, "reduce_scatter"]
            assert asked == ([] if x is small else natively)
            asked.clear()
    for dtype, op in (("float16", "sum"), ("int32", "avg"), ("int8", "sum"), ("complex64", "prod")):
        world.allreduce(large.astype(dtype), op=op)
    if shown:  # else integers of middle size are MPI's in any case
        assert not asked


def test_a_call_that_was_made_before_follows_the_order(comm, asked):
    if comm.size == 1:
        return  # there is nothing to reduce
    x = np.ones(40_000)
    with comm.dup() as other:
        for order in ("rank", "any", "rank"):
            other.op_order = order
            asked.clear()
            np.testing.assert_array_equal(other.allreduce(x), other.allreduce(x))
            assert asked == ["allreduce"] * (2 * (order == "any"))


def test_nan_wins_in_any_order(world):
    x = np.ones(5000)
    x[world.rank] = np.nan
    for op in ("sum", "prod", "min", "max", "avg"):
        result = world.allreduce(x, op=op)
        assert np.isnan(result[: world.size]).all()
        assert not np.isnan(result[world.size :]).any()


def test_communicators_that_are_made_from_one_have_its_order(comm, world):
    nodes = world.by_node()
    with world.dup() as dup, world.split(0) as group, world.lane() as lane:
        made = [dup, group, lane.comm, *nodes]
        assert [each.op_order for each in made] == ["any"] * 5
        rank_order = [each.transports[0].adds_in_rank_order for each in made]
        assert not any(rank_order)
    assert comm.op_order == "rank"
    assert comm.transports[0].adds_in_rank_order


@pytest.mark.parametrize("count", [1, 40_000])
def test_calls_that_differ_are_found_and_the_next_is_right(world, count):
    if world.size == 1:
        return  # nobody to differ from
    if world.transports[0]._endpoint.window is None:
        count = max(count, 500)  # smaller ones may end the communicator, in rank order as well
    odd, x = world.rank == world.size - 1, np.ones(world.size * count)
    for call in (
        lambda: world.allreduce(x[: len(x) - odd]),
        lambda: world.allreduce(x.astype("float32" if odd else "float64")),
        lambda: world.allreduce(x, op="prod" if odd else "sum"),
        lambda: world.reduce(x, root=int(odd)),
        lambda: world.reduce_scatter(x) if odd else world.allreduce(x),
        lambda: world.alltoall(x) if odd else world.allreduce(x),
    ):
        with pytest.raises(CommMismatch):
            call()
        np.testing.assert_array_equal(world.allreduce(x), world.size)


def test_a_rank_that_never_enters_mpis_reduction_ends_all(world, monkeypatch):
    if world.size == 1:
        return  # nobody to wait for
    with world.dup() as other:
        transport = other.transports[0]
        if world.rank == world.size - 1:
            never = SimpleNamespace(Test=lambda: False)
            endpoint, native = transport._endpoint, transport._routes._native
            monkeypatch.setattr(native, "allreduce", lambda *_: endpoint.complete(lambda: never, None))
        with pytest.raises(CommTimeout):
            other.allreduce(np.ones(40_000), timeout_s=0.3)


def test_op_orders_that_differ_between_ranks_raise(comm):
    order = "any" if comm.rank == 0 else "rank"
    if comm.size == 1:
        return  # nobody to differ from
    with pytest.raises(BootstrapError, match=r"ranks \[0\] give 'any'; ranks \[1.*\] give 'rank'"):
        bagua_comm.connect(comm=MPI.COMM_WORLD, timeout_s=30, op_order=order)
    with comm.dup() as other:
        other.op_order = order
        with pytest.raises(CommMismatch, match="in any order"):
            other.allreduce(np.ones(40_000))


def test_an_order_that_is_none_is_refused(comm):
    with pytest.raises(BootstrapError, match="op_order is 'tree', expected one of rank, any"):
        bagua_comm.connect(comm=MPI.COMM_WORLD, op_order="tree")
    with comm.dup() as other, pytest.raises(ArrayError, match="op_order is None"):
        other.op_order = None


@pytest.mark.parametrize("shared", [True, False])
def test_random_calls_in_any_order(monkeypatch, shared):
    shrink_thresholds(monkeypatch.setattr)
    with in_any_order(shared=shared) as small, RandomCalls(small, seed=30, sizes=SMALL_SIZES) as calls:
        calls.run(range(50))
