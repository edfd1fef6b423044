"""The calls of a process group of the backend "bagua", on ranks that are threads."""

import contextlib
import sys
import time
import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.device_ranks import run_on_devices
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.distributed_c10d import BackendConfig

import bagua_torch
from bagua_comm import (
    ArrayError,
    Average,
    BootstrapError,
    CommError,
    CommMismatch,
    CommTimeout,
    ErrorFeedback,
    Hierarchical,
    MinMaxUInt8,
    Quantized,
    Reproducible,
    UnsupportedError,
)
from bagua_comm.execution.lane import InlineLane
from bagua_comm.testing import run_ranks
from bagua_torch import BackendOptions
from bagua_torch.backend.alone import warn_if_alone
from bagua_torch.backend.arguments import Options
from bagua_torch.backend.averaging import GroupAverage
from bagua_torch.backend.group import BaguaGroup
from bagua_torch.backend.start import lane_of, wait_for_ranks
from bagua_torch.process_group.serving import serve

RANKS = 3
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]
MOVED = [*DTYPES, torch.uint16, torch.bool, torch.complex64, torch.float8_e4m3fn]


def on_groups(body, ranks=RANKS, *, options=None, timeout_s=20.0, end=BaguaGroup.shutdown):
    """Run `body(group)` on ranks that are threads; returns their results."""

    def run(comm):
        group = BaguaGroup(lane_of(comm.dup(), timeout_s), comm, options=options)
        result = body(group)
        end(group)
        return result

    return run_ranks(ranks, run)


def with_op(options, op=None, root=None):
    made = options()
    if op is not None:
        made.reduceOp = op
    if root is not None:
        made.rootRank = root
    return made


def values(rank, dtype=torch.float32, shape=(2, 5), seed=0):
    """The tensor of a rank, of small integers."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def equal(x, y):
    assert x.dtype == y.dtype
    assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


REDUCE = {
    "SUM": lambda xs: xs.sum(0),
    "PRODUCT": lambda xs: xs.prod(0),
    "MIN": lambda xs: xs.amin(0),
    "MAX": lambda xs: xs.amax(0),
    "AVG": lambda xs: xs.sum(0) / RANKS if xs.is_floating_point() else xs.sum(0) // RANKS,
}


@pytest.mark.parametrize("name", REDUCE)
def test_reductions_of_all_dtypes(name):
    op = getattr(dist.ReduceOp, name)

    def body(group):
        for dtype in DTYPES:
            every = torch.stack([values(rank, dtype) for rank in range(RANKS)])
            wide = every.double() if dtype.is_floating_point else every.long()
            expected = REDUCE[name](wide).to(dtype)
            x = values(group.rank(), dtype)
            group.allreduce([x], with_op(dist.AllreduceOptions, op)).wait()
            equal(x, expected)
            x = values(group.rank(), dtype).t()  # not contiguous
            group.reduce([x], with_op(dist.ReduceOptions, op, 1)).wait()
            if group.rank() == 1:
                equal(x, expected.t())
            out = torch.empty(5, dtype=dtype)
            flat = [values(rank, dtype, (RANKS * 5,), 1) for rank in range(RANKS)]
            expected = REDUCE[name](torch.stack(flat).to(wide.dtype)).to(dtype).view(RANKS, 5)[group.rank()]
            group.reduce_scatter_single(out, flat[group.rank()], with_op(dist.ReduceScatterOptions, op)).wait()
            equal(out, expected)
            parts = list(flat[group.rank()].split(5))
            group.reduce_scatter([out.zero_()], [parts], with_op(dist.ReduceScatterOptions, op)).wait()
            equal(out, expected)

    on_groups(body)


def test_bitwise_reductions_and_bools():
    def body(group):
        every = [values(rank, torch.int32) for rank in range(RANKS)]
        expected = every[0] ^ every[1] ^ every[2]
        x = every[group.rank()].clone()
        group.allreduce([x], with_op(dist.AllreduceOptions, dist.ReduceOp.BXOR)).wait()
        equal(x, expected)
        for op, whole in [(dist.ReduceOp.SUM, True), (dist.ReduceOp.PRODUCT, False), (dist.ReduceOp.BAND, False)]:
            x = torch.tensor([group.rank() == 1, True])
            group.allreduce([x], with_op(dist.AllreduceOptions, op)).wait()
            assert x.tolist() == [whole, True]

    on_groups(body)


@pytest.mark.parametrize("dtype", MOVED)
def test_calls_that_move_elements(dtype):
    def body(group):
        rank, size = group.rank(), group.size()
        every = [values(each, dtype) for each in range(size)]
        x = every[rank].clone()
        group.broadcast([x], with_op(dist.BroadcastOptions, root=2)).wait()
        equal(x, every[2])
        outs = [torch.empty_like(x) for _ in range(size)]
        group.allgather([outs], [every[rank]]).wait()
        equal(torch.cat(outs), torch.cat(every))
        out = torch.empty((2 * size, 5), dtype=dtype)
        group.all_gather_single(out, every[rank]).wait()
        equal(out, torch.cat(every))
        outs = [torch.empty_like(x) for _ in range(size)]
        group.gather([outs] if rank == 1 else [], [every[rank]], with_op(dist.GatherOptions, root=1)).wait()
        if rank == 1:
            equal(torch.cat(outs), torch.cat(every))
        group.scatter([x], [every] if rank == 0 else [], with_op(dist.ScatterOptions, root=0)).wait()
        equal(x, every[rank])
        sends = [values(rank, dtype, (to + 1, 2), to) for to in range(size)]
        expected = torch.cat([values(source, dtype, (rank + 1, 2), rank) for source in range(size)])
        out = torch.empty_like(expected)
        counts = [1, 2, 3]
        group.all_to_all_single(out, torch.cat(sends), [rank + 1] * size, counts).wait()
        equal(out, expected)
        outs = list(torch.empty_like(expected).split(rank + 1))
        group.alltoall(outs, sends).wait()
        equal(torch.cat(outs), expected)

    on_groups(body)


def test_lists_of_different_sizes_and_coalesced_calls():
    def body(group):
        rank, size = group.rank(), group.size()
        outs = [torch.empty(each) for each in range(size)]
        group.allgather([outs], [torch.full((rank,), float(rank))]).wait()
        assert [out.tolist() for out in outs] == [[], [1.0], [2.0, 2.0]]
        xs = [torch.ones(2), torch.full((3,), 2.0)]
        group.allreduce_coalesced(xs, with_op(dist.AllreduceOptions, dist.ReduceOp.SUM)).wait()
        assert [x.tolist() for x in xs] == [[3.0] * 2, [6.0] * 3]
        wide = [torch.empty(size * 2), torch.empty(size)]
        group.all_gather_single_coalesced(wide, [torch.full((2,), rank * 1.0), torch.tensor([rank * 1.0])]).wait()
        assert wide[1].tolist() == [0.0, 1.0, 2.0]
        outs = [torch.empty(1), torch.empty(2)]
        xs = [torch.arange(3.0), torch.arange(6.0)]
        options = with_op(dist.ReduceScatterOptions, dist.ReduceOp.SUM)
        group.reduce_scatter_single_coalesced(outs, xs, options).wait()
        assert outs[1].tolist() == [6.0 * rank, 6.0 * rank + 3]

    on_groups(body)


def test_messages_by_tag_in_any_order_of_their_waits():
    def body(group):
        rank, size = group.rank(), group.size()
        right, left = (rank + 1) % size, (rank - 1) % size
        big = torch.full((200_000,), float(rank))
        sends = [
            group.send([big], right, 0),
            group.send([big[:3] + 10], right, 7),
            group.send([big[:2]], right, 0),
        ]
        first, second, tagged = torch.empty(200_000), torch.empty(2), torch.empty(3, 2)[:, 0]
        receives = [group.recv([tagged], left, 7), group.recv([first], left, 0), group.recv([second], left, 0)]
        for work in (*receives, *sends):
            assert work.wait()
        assert tagged.tolist() == [left + 10.0] * 3
        assert (first == left).all()
        assert (second == left).all()
        assert receives[0].source_rank() == left

    on_groups(body)


def test_a_message_of_any_rank_says_whose_it_is():
    def body(group):
        if group.rank() > 0:
            return group.send([torch.full((2,), float(group.rank()))], 0, 3).wait()
        xs = torch.empty(2, RANKS - 1).t()  # not contiguous
        works = [group.recv_anysource([x], 3) for x in xs]
        assert all(work.wait() for work in works)
        return {work.source_rank(): x.tolist() for work, x in zip(works, xs, strict=True)}

    assert on_groups(body)[0] == {1: [1, 1], 2: [2, 2]}


def test_messages_of_many_tags_come_in_any_order():
    def body(group):
        x, peer = torch.empty(40, 3), 1 - group.rank()
        receives = [group.recv([x[tag]], peer, tag) for tag in range(40)]
        for tag in reversed(range(40)):
            group.send([torch.full((3,), float(tag))], peer, tag).wait()
        for receive in receives:
            receive.wait()
        group._messages.drain(20.0)
        return x[:, 0].tolist()

    assert on_groups(body, 2) == [list(range(40))] * 2


def test_messages_to_this_rank_itself():
    def body(group):
        rank, (early, late) = group.rank(), torch.zeros(2, 2)
        work = group.recv([early], rank, 4)
        group.send([torch.tensor([1.0, 2.0])], rank, 4).wait()
        group.send([torch.tensor([3.0, 4.0])], rank, 4).wait()
        group.recv([late], rank, 4).wait()
        assert work.wait()
        assert (early.tolist(), late.tolist()) == ([1.0, 2.0], [3.0, 4.0])
        group.send([torch.ones(3)], rank, 4).wait()
        with pytest.raises(
            CommMismatch, match=r"expected uint8\[8\] with tag 4 from rank \d, which sent uint8\[12\]"
        ):
            group.recv([late], rank, 4).wait()
        with pytest.raises(CommTimeout):
            group.recv([late], rank, 4).wait()

    on_groups(body, 2, timeout_s=0.2)


def test_callbacks_of_futures_may_call_and_wait():
    def body(group):
        def again(future):
            return group.allreduce(future.value()).get_future().then(lambda inner: inner.value()[0] + 1).wait()

        futures = [group.allreduce([torch.full((2,), float(i))]).get_future() for i in range(3)]
        results = [future.then(again) for future in futures]
        assert [result.wait().tolist() for result in results] == [[4.0 * i + 1] * 2 for i in range(3)]

    on_groups(body, 2)


def test_a_future_has_the_tensors_and_calls_run_beside_the_caller():
    def body(group):
        xs = [torch.ones(4) for _ in range(5)]
        works = [group.allreduce([x]) for x in xs]
        doubled = works[-1].get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [2.0 * RANKS] * 4
        assert works[0].result()[0].tolist() == [RANKS] * 4
        assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)

    on_groups(body)


def test_another_order_of_calls_is_an_error_on_all_ranks():
    def body(group):
        x = torch.ones(2)
        work = group.allreduce([x]) if group.rank() else group.all_gather_single(torch.empty(4), x)
        with pytest.raises(CommMismatch, match="called"):
            work.wait()
        with pytest.raises(CommError):
            group.barrier().wait()

    on_groups(body, 2, end=BaguaGroup.abort)


def test_time_limits_of_the_group_of_a_call_and_of_a_wait():
    def body(group):
        if group.rank() == 0:
            group.recv([torch.empty(1)], 1, 0)  # before the time is over
            with pytest.raises(CommTimeout, match="wait"):
                group.recv([torch.empty(1)], 1, 3).wait(timedelta(milliseconds=1))
            with pytest.raises(CommError, match="rank 1"):
                group.monitored_barrier(timedelta(milliseconds=50))

    begin = time.monotonic()
    on_groups(body, 2, timeout_s=0.3, end=abort_of_rank_0)
    assert time.monotonic() - begin < 10


def abort_of_rank_0(group):
    if group.rank() == 0:
        group.abort()


def test_a_new_time_limit_of_the_group_holds_for_later_calls():
    def body(group):
        if group.rank() == 0:
            group.set_timeout(timedelta(milliseconds=50))
            with pytest.raises(CommTimeout, match=r"0\.05 s"):
                group.barrier().wait()

    on_groups(body, 2, end=abort_of_rank_0)


ONE, TWO, SPREAD = torch.ones(1), torch.ones(2), torch.ones(1).expand(4)
TO_ONE = with_op(dist.ReduceOptions, root=1)
BAD_CALLS = {
    "premul": (UnsupportedError, "PREMUL_SUM", lambda g: g.allreduce([TWO], premul())),
    "sparse": (UnsupportedError, "layout", lambda g: g.allreduce([torch.eye(2).to_sparse()])),
    "meta": (UnsupportedError, "meta", lambda g: g.allreduce([torch.ones(2, device="meta")])),
    "no memory": (UnsupportedError, "has no memory", lambda g: g.allreduce([torch._efficientzerotensor(2)])),
    "band": (UnsupportedError, "band", lambda g: g.allreduce([TWO], dist.ReduceOp.BAND)),
    "float8": (UnsupportedError, "float8", lambda g: g.allreduce([TWO.to(torch.float8_e5m2)])),
    "empty": (ArrayError, "empty", lambda g: g.allreduce_coalesced([])),
    "two of a rank": (UnsupportedError, "2 tensors of this rank", lambda g: g.allreduce([TWO] * 2)),
    "root": (ArrayError, "root is rank 5", lambda g: g.reduce([TWO], with_op(dist.ReduceOptions, root=5))),
    "lengths": (ArrayError, "2 tensors, expected 3", lambda g: g.allgather([[ONE] * 2], [ONE])),
    "too many": (ArrayError, "2 outputs, expected 1", lambda g: g.allgather_coalesced([[ONE] * 2] * 3, [ONE])),
    "size": (ArrayError, "4 elements, expected 6", lambda g: g.all_gather_single(torch.ones(4), TWO)),
    "scattered": (ArrayError, "5 elements", lambda g: g.reduce_scatter_single(TWO, torch.ones(5))),
    "dtypes": (ArrayError, "dtypes differ", lambda g: g.all_gather_single(torch.ones(6).half(), TWO)),
    "splits": (ArrayError, "input_split", lambda g: g.all_to_all_single(*[torch.ones(3)] * 2, [], [1, 1, 2])),
    "rows": (ArrayError, "divisible", lambda g: g.all_to_all_single(torch.ones(4), torch.ones(4))),
    "outside": (ArrayError, "peer is rank 3", lambda g: g.recv([TWO], 3, 0)),
    "tag": (ArrayError, "tag is -1", lambda g: g.send([TWO], (g.rank() + 1) % 3, -1)),
    "large tag": (ArrayError, "from 0 to", lambda g: g.send([TWO], (g.rank() + 1) % 3, 2**31)),
    "expanded": (ArrayError, "one place", lambda g: g.allreduce([SPREAD])),
    "expanded, reduced": (ArrayError, "one place", lambda g: g.reduce([SPREAD], TO_ONE)),
    "expanded, in a list": (ArrayError, "one place", lambda g: g.allgather([[SPREAD] * 3], [torch.ones(4)])),
    "several": (UnsupportedError, "2 tensors of this rank", lambda g: g.send([TWO] * 2, 0, 0)),
}


def premul():
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0) if hasattr(dist, "_make_nccl_premul_sum") else Premul()
    return options


class Premul:
    name = "PREMUL_SUM"


def test_bad_calls_are_refused_before_anything_is_sent():
    def body(group):
        for error, text, call in BAD_CALLS.values():
            with pytest.raises(error, match=text):
                call(group)
        x = torch.ones(2)
        group.allreduce([x]).wait()  # the group still works
        assert x.tolist() == [RANKS] * 2

    on_groups(body)


def test_the_result_of_a_functional_collective_is_waited_for():
    def body(group):
        x = torch.ones(4)
        group.allreduce([AsyncCollectiveTensor(x)[1:3]]).wait()
        assert x.tolist() == [1, RANKS, RANKS, 1]

    on_groups(body)


def test_tensors_that_are_only_read_may_share_memory_between_elements():
    def body(group):
        x, root = torch.full((1,), float(group.rank())), RANKS - 1
        tensor = x.expand(2) if group.rank() == root else torch.empty(2)
        group.broadcast([tensor], with_op(dist.BroadcastOptions, root=root)).wait()
        rows = [[torch.empty(2) for _ in range(RANKS)]] if group.rank() == root else []
        group.gather(rows, [x.expand(2)], with_op(dist.GatherOptions, root=root)).wait()
        return tensor.tolist(), [row.tolist() for row in rows[0]] if rows else None

    *others, (tensor, rows) = on_groups(body)
    assert [found for found, _ in others] == [tensor] * (RANKS - 1) == [[RANKS - 1.0] * 2] * (RANKS - 1)
    assert rows == [[float(rank)] * 2 for rank in range(RANKS)]


def test_the_future_of_a_call_that_fails_has_its_error_which_does_not_come_back_at_the_end():
    """And no value: DistributedDataParallel would read an exception as tensors."""

    def body(group):
        work = group.allreduce([torch.ones(2 + group.rank())])
        with pytest.raises(RuntimeError, match="CommMismatch"):
            work.get_future().wait()
        with pytest.raises(CommMismatch):
            work.wait()
        with pytest.raises(RuntimeError, match="CommMismatch"):
            work.get_future().value()

    on_groups(body, 2)


def test_a_group_that_was_destroyed_refuses_calls():
    def body(group):
        group.shutdown()
        with pytest.raises(CommError, match="destroyed"):
            group.allreduce([torch.ones(1)])
        with pytest.raises(CommError, match="destroyed"):
            group.send([torch.ones(1)], 1 - group.rank(), 0)

    on_groups(body, 2)


def test_sums_of_float64_are_reproducible_and_those_of_integers_have_one_result_without():
    average = GroupAverage(BackendOptions(Reproducible()), comm=None)
    for dtype in (np.float32, np.float64, np.complex128):
        assert average.takes("sum", [np.ones(2, dtype)])
    assert not average.takes("sum", [np.ones(2, np.int64)])


@pytest.mark.parametrize(
    "average",
    [Reproducible(), Quantized(MinMaxUInt8(), min_bytes=0), Hierarchical(Quantized(MinMaxUInt8(), min_bytes=0))],
    ids=["exact", "coded", "by node"],
)
def test_an_average_of_the_options_adds_floats(average):
    def body(group):
        x = torch.rand(3, 50, generator=torch.Generator().manual_seed(group.rank())).t()
        whole, mean, number = x.clone(), x.clone().bfloat16(), torch.tensor([group.rank()])
        group.allreduce([whole]).wait()
        group.allreduce([mean], with_op(dist.AllreduceOptions, dist.ReduceOp.AVG)).wait()
        group.allreduce([number]).wait()  # exactly
        assert number.item() == 3
        shards, before = torch.empty(4, 50), x.clone()
        group.reduce_scatter_single(shards[0], x).wait()
        group.reduce_scatter_single(shards[1], x, with_op(dist.ReduceScatterOptions, dist.ReduceOp.AVG)).wait()
        group.reduce_scatter([shards[2]], [list(x.reshape(RANKS, 50).unbind())]).wait()
        group.reduce_scatter_single_coalesced([shards.t()[:, 3]], [x]).wait()  # not contiguous
        assert torch.equal(x, before)
        assert torch.equal(shards[2], shards[0])
        assert torch.equal(shards[3], shards[0])
        assert torch.allclose(shards[1], shards[0] / RANKS, atol=0.01)
        number = torch.arange(RANKS)
        group.reduce_scatter_single(number[:1], number.clone()).wait()
        assert number[0].item() == RANKS * group.rank()
        return x, whole, mean, shards[0]

    xs, wholes, means, shards = zip(*on_groups(body, options=BackendOptions(average=average)), strict=True)
    exact = torch.stack(xs).sum(0)
    summed = torch.stack(shards).reshape(exact.shape)
    assert torch.allclose(summed, exact, atol=0.02)
    assert not torch.equal(summed, exact)
    for whole, mean in zip(wholes, means, strict=True):
        assert torch.equal(whole, wholes[0])
        assert torch.allclose(whole, exact, atol=0.02)
        assert torch.allclose(mean.float(), exact / RANKS, atol=0.02)
    assert not torch.equal(wholes[0], exact)


class OwnMean(Average):
    """An average of a user, which says nothing of dtypes."""

    def bind(self, comm, like=None):
        return lambda x: comm.allreduce(x, out=x, op="avg")


def test_integers_and_bools_are_added_exactly_by_a_group_with_an_average_of_ones_own():
    def body(group):
        found = []
        for dtype in (torch.int64, torch.uint8, torch.bool, torch.float32):
            x, shard = torch.tensor([group.rank() == 0, True]).to(dtype), torch.empty(1, dtype=dtype)
            group.allreduce([x]).wait()
            group.reduce_scatter_single(shard, torch.ones(RANKS, dtype=dtype)).wait()
            found.append([*x.tolist(), shard.item()])
        assert found == [[1, 3, 3], [1, 3, 3], [True, True, True], [1, 3, 3]]

    on_groups(body, options=BackendOptions(average=OwnMean()))


@pytest.mark.parametrize(("average", "error"), [(None, 1e-6), (Quantized(MinMaxUInt8(), min_bytes=0), 0.02)])
def test_ranks_with_unequal_weights_have_the_mean_of_all_tokens(average, error):
    tokens, xs = [1, 0, 9], torch.randn(RANKS, 60, generator=torch.Generator().manual_seed(1))
    expected = (xs[0] + 9 * xs[2]) / 10
    xs[1] = torch.nan

    def body(comm):
        weight = iter([tokens[comm.rank]] * 3 + [None, -comm.rank])
        options = BackendOptions(average, weight=lambda: next(weight))
        group = BaguaGroup(lane_of(comm.dup(), 20.0), comm, options=options)
        mean, total, shard = xs[comm.rank].clone(), xs[comm.rank] / RANKS, torch.empty(20)
        group.allreduce([mean], with_op(dist.AllreduceOptions, dist.ReduceOp.AVG)).wait()
        group.allreduce([total]).wait()  # as PyTorch's wrapper averages
        group.reduce_scatter_single(
            shard, xs[comm.rank], with_op(dist.ReduceScatterOptions, dist.ReduceOp.AVG)
        ).wait()
        for found, wanted in ((mean, expected), (total, expected), (shard, expected.chunk(RANKS)[comm.rank])):
            assert (found - wanted).norm() <= error * wanted.norm()
        plain = torch.full((2,), float(comm.rank))
        group.allreduce([plain], with_op(dist.AllreduceOptions, dist.ReduceOp.AVG)).wait()
        assert torch.allclose(plain, torch.ones(2), atol=0.02)
        with pytest.raises(ArrayError, match=r"rank 1 has -1.0, expected a finite number"):
            group.allreduce([plain]).wait()
        group.shutdown()

    run_ranks(RANKS, body)


def test_options_must_be_an_average():
    with pytest.raises(ArrayError, match="weight is 5, expected a function"):
        BackendOptions(weight=5)
    with pytest.raises(ArrayError, match="expected an Average"):
        BackendOptions(average=MinMaxUInt8())
    for average in (ErrorFeedback(), Hierarchical(ErrorFeedback())):
        with pytest.raises(ArrayError, match="residual of one array"):
            BackendOptions(average=average)


def test_a_missing_rank_is_named_when_a_group_is_made_and_waits_print_nothing(capfd):
    """Waits of the store with a short timeout made PyTorch print warnings, from C++."""
    store = serve("127.0.0.1", timeout_s=20)
    with pytest.raises(BootstrapError, match=r"ranks \[7\] to make the group of ranks \[5, 7\]"):
        wait_for_ranks(store, "x", 0, [5, 7], 0.2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("average", [None, Reproducible()])
def test_a_tensor_twice_in_a_coalesced_call_is_reduced_once(average):
    def body(group):
        x, y = torch.tensor([1.0, group.rank()]), torch.ones(1)
        group.allreduce_coalesced([x, y, x] if group.rank() else [x, y, x.clone()]).wait()
        assert (x.tolist(), y.tolist()) == ([3.0, 3.0], [3.0])

    on_groups(body, options=BackendOptions(average=average))


def test_bools_and_floats_in_a_coalesced_call_are_reduced_each_by_its_own_operation():
    def body(group):
        outs = [torch.empty(1), torch.empty(1, dtype=torch.bool)]
        group.reduce_scatter_single_coalesced(outs, [torch.ones(3), torch.ones(3, dtype=torch.bool)]).wait()
        assert [out.tolist() for out in outs] == [[3.0], [True]]

    on_groups(body)


@pytest.mark.parametrize("hook", [None, fp16_compress_hook])
def test_an_error_in_the_backward_pass_of_pytorchs_wrapper_keeps_its_type(hook):
    """It came as RuntimeError, so that `except RankFailed` did not catch it."""

    def body(group):
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=group)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        for _ in range(2):
            ddp(torch.ones(2, 4)).sum().backward()  # the first pass rebuilds the buckets
        loss = ddp(torch.ones(2, 4)).sum()
        with pytest.raises(CommMismatch, match="float32"):
            group.allreduce([torch.ones(3)]).wait() if group.rank() else loss.backward()

    on_groups(body, 2, end=BaguaGroup.abort)


def test_the_backend_is_for_the_devices_of_this_machine():
    """ShardedTensor.gather took a CUDA device where there is none."""
    devices = BackendConfig(dist.Backend("bagua")).get_device_backend_map()
    assert set(devices) == ({"cpu", "cuda"} if torch.cuda.device_count() else {"cpu"})


@pytest.mark.parametrize("at_once", [True, False])
def test_a_process_alone_may_connect_and_then_make_the_group(at_once):
    with bagua_torch.connect(process_group="bagua" if at_once else False) as comm:
        if not at_once:
            dist.init_process_group("bagua")
        assert (dist.get_backend(), dist.get_world_size()) == ("bagua", 1)
        assert dist.group.WORLD.parent is comm
        if not at_once:
            dist.destroy_process_group()
    assert not dist.is_initialized()


def test_process_group_must_be_a_backend_that_connect_makes():
    with pytest.raises(BootstrapError, match="'gloo', expected True, False or 'bagua'"):
        bagua_torch.connect(process_group="gloo")
    with bagua_torch.connect(process_group=True), pytest.raises(BootstrapError, match="exists, of gloo"):
        bagua_torch.connect(process_group="bagua")


MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}


OF_RANK_1 = MPI | {"OMPI_COMM_WORLD_RANK": "1"}


def trains_with_a_warning(monkeypatch, variables, connects=False):
    """The warnings of two steps of an optimizer, in a process with these variables."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    hook = warn_if_alone()
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    world = bagua_torch.connect(alone=True) if connects else contextlib.nullcontext()
    with warnings.catch_warnings(record=True) as found, world:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    if hook is not None:
        hook.remove()
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("variables", "connects", "warned"),
    [(MPI, False, True), ({}, False, False), (MPI, True, False), (OF_RANK_1, False, False)],
    ids=["one of many", "alone", "connected", "another rank"],
)
def test_one_of_many_that_has_connected_to_none_is_warned(monkeypatch, variables, connects, warned):
    texts = trains_with_a_warning(monkeypatch, variables, connects)
    started = "4 processes were started, but this one, rank 0, trains alone"
    assert [text[: len(started)] for text in texts] == [started] * warned


@pytest.mark.parametrize("device", ["lazy"], indirect=True)
def test_any_stream_waits_for_a_call_of_a_group_without_a_thread(device):
    import cupy

    def body(comm):
        x, streams = cupy.zeros(4), [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        cupy.cuda.get_current_stream().synchronize()
        group = BaguaGroup(InlineLane(comm.dup()), comm)
        with streams[0]:
            work = group._submit("fill", Options(), [], lambda timeout_s: x.fill(1))
        with streams[1]:
            work.wait()
            assert x.get().tolist() == [1] * 4
        group.shutdown()

    run_on_devices(device, 1, "local", body)
