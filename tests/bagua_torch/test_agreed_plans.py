"""Plans of calls over gloo: no message before a call, and an error on all ranks if one makes another call."""

import gc
import itertools
import re
import threading
import time
from collections import Counter

import numpy as np
import pytest
from support.gloo import run_threads
from support.launch import torchrun
from support.planned_calls import CALLS, make
from support.waiting import until

from bagua_comm import CommAborted, CommMismatch, Communicator, NanWatch, RankFailed
from bagua_comm.comm.prepared import begin_if_known
from bagua_comm.execution.lane import ThreadLane
from bagua_comm.flight import diagnose
from bagua_comm.flight.entries import RankRecord
from bagua_torch.process_group.wire import FramedTransport

MIB, AT_ONCE_S = 1 << 20, 5.0

FOLLOWED = {
    "allreduce": lambda comm, x: comm.allreduce(x),
    "allreduce, avg, in place": lambda comm, x: comm.allreduce(x, op="avg", out=x),
    "allgather": lambda comm, x: comm.allgather(x),
    "alltoall": lambda comm, x: comm.alltoall(x),
    "alltoall, in place": lambda comm, x: comm.alltoall(x, out=x),
    "reduce_scatter": lambda comm, x: comm.reduce_scatter(x),
    "reduce_scatter, in place, avg": lambda comm, x: comm.reduce_scatter(
        x, op="avg", out=x[comm.rank : comm.rank + 1]
    ),
}
"""Calls that no frame precedes once they have repeated; the array has a mebibyte for each of three ranks."""


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_planned_call_sends_no_frame_and_has_the_same_bytes(name, monkeypatch):
    barrier, frames, counts, send = threading.Barrier(3), [], [], FramedTransport._send_frame
    monkeypatch.setattr(FramedTransport, "_send_frame", lambda *of: frames.append(1) or send(*of))

    def body(transport):
        comm, results, sent = Communicator([transport]), [], []
        drawn = np.random.default_rng(comm.rank).normal(size=(3, MIB // 4)).astype("f4")
        for _ in range(4):
            before = transport.sent_bytes
            results.append(FOLLOWED[name](comm, drawn.copy()))
            sent.append(transport.sent_bytes - before)
            if barrier.wait() == 0:
                counts.append(len(frames))
            barrier.wait()
        assert len({x.tobytes() for x in results}) == len(set(sent)) == 1
        assert transport.plan.in_force

    run_threads(3, body)
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 3


@pytest.fixture
def frames(monkeypatch):
    """How many each rank has sent."""
    found, send = Counter(), FramedTransport._send_frame

    def counted(self, *of):
        found[self.rank] += 1
        send(self, *of)

    monkeypatch.setattr(FramedTransport, "_send_frame", counted)
    return found


def test_a_planned_sum_of_two_ranks_sends_no_frame_and_has_the_same_bits(frames):
    """It is too small for gloo without a plan. All ranks may leave the plan for another size, and return."""

    def body(transport):
        comm, sums, counts = Communicator([transport]), {}, []
        for size in [50_000] * 4 + [60_000] * 3 + [50_000] * 2:
            x = np.random.default_rng([comm.rank, size]).normal(size=size).astype("f4")
            sums.setdefault(size, set()).add(comm.allreduce(x, op="avg").tobytes())
            counts.append(frames[comm.rank])
        return {size: len(found) for size, found in sums.items()}, np.diff([0, *counts]).tolist()

    assert run_threads(2, body) == [({50_000: 1, 60_000: 1}, [1, 1, 0, 0, 1, 1, 0, 1, 0])] * 2


EVEN, UNEVEN = [[2, 2, 2]] * 3, [[2, 2, 2], [2, 5, 1], [2, 0, 4]]
"""Elements from each rank, by row, to each. Rank 0 cannot tell the two."""


def exchange(comm, sizes, expected=None):
    counts, out_counts = sizes[comm.rank], [row[comm.rank] for row in expected or sizes]
    return comm.alltoall(np.full(sum(counts), 1.0 + comm.rank), counts=counts, out_counts=out_counts)


@pytest.mark.parametrize("scale", [1, 50_000])
def test_a_plan_of_equal_parts_sends_no_frame_and_ends_with_other_parts(scale, frames):
    """Then some ranks follow the plan, others do not, and all make the same call."""

    def body(transport):
        comm, counts = Communicator([transport]), []
        for sizes in [EVEN] * 3 + [UNEVEN] + [EVEN] * 3 + [UNEVEN] * 2:
            sizes = [[scale * n for n in row] for row in sizes]
            found = exchange(comm, sizes)
            assert np.array_equal(found, np.repeat([1.0, 2.0, 3.0], [row[comm.rank] for row in sizes]))
            counts.append(frames[comm.rank])
        return np.diff([0, *counts]).tolist()

    assert run_threads(3, body) == [[2, 2, 0, 2, 2, 2, 0, 2, 2]] * 3


def test_a_plan_is_kept_if_the_parts_of_one_rank_are_equal_by_chance():
    def body(transport):
        comm, other, in_force = Communicator([transport]), [[1, 2, 3], [3, 1, 2], [2, 3, 1]], []
        for sizes in [other, other, UNEVEN, other, UNEVEN]:
            exchange(comm, sizes)
            in_force.append(transport.plan.in_force)
        return in_force

    assert run_threads(3, body) == [[False, True, True, True, True]] * 3


def test_sizes_that_differ_within_a_plan_of_equal_parts_are_named_on_all_ranks():
    def body(transport):
        comm = Communicator([transport])
        for _ in range(4):
            exchange(comm, EVEN)
        assert transport.plan.in_force
        with pytest.raises(CommMismatch, match="rank 2 sends 0 bytes to rank 1, which expects 16") as caught:
            exchange(comm, [*EVEN[:2], UNEVEN[2]] if comm.rank == 2 else EVEN)
        with pytest.raises(CommAborted):
            comm.barrier()
        return re.search("rank 2 sends .* 16", str(caught.value))[0]

    assert len(set(run_threads(3, body))) == 1


# Deviations -------------------------------------------------------------------------------------------------

RANKS = 4

MOMENTS = ["learning", "early", "late", "random", "twice", "killed"]


def try_deviation(odd, position, moment):
    """Train; at a drawn call, the odd ranks make another one. In one case a rank dies in the same call."""
    random, names = np.random.default_rng([*odd, position, MOMENTS.index(moment)]), list(CALLS)
    step = {"learning": 1, "early": 2, "late": 4, "twice": 5}.get(moment, int(random.integers(2, 5)))
    last, others = step * len(CALLS) + position, [name for name in names if name != names[position]]
    calls = dict.fromkeys(range(RANKS), names[position])
    calls.update(zip(odd, random.choice(others, len(odd)), strict=True))
    dead = int(random.integers(RANKS)) if moment == "killed" else None

    def body(transport):
        comm = Communicator([transport])
        for number in range(last):
            if moment == "twice" and number == 14:  # all leave the plan, which is no error
                comm.barrier()
            make(comm, CALLS[names[number % len(CALLS)]], number)
        assert transport.plan.in_force == (moment != "learning")
        if comm.rank == dead:
            return transport.abort()
        start_s = time.monotonic()
        with pytest.raises((CommMismatch, RankFailed), match=r"rank \d") as caught:
            make(comm, CALLS[calls[comm.rank]], last)
        assert time.monotonic() - start_s < AT_ONCE_S
        return str(caught.value)

    texts = run_threads(RANKS, body, timeout_s=60.0)
    if dead is None:
        assert len({re.search("ranks made .* bytes[)]", text)[0] for text in texts}) == 1
        (_, one), (_, other) = named = re.findall(r"rank (\d) called (\w+)", texts[0])
        assert one != other or len({calls[int(rank)] for rank, _ in named}) == 2
        assert all(calls[int(rank)] in (name, "small", "middle") for rank, name in named)


SUBSETS = [odd for size in range(1, RANKS) for odd in itertools.combinations(range(RANKS), size)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_leaves_the_plan_is_an_error_on_all(moment):
    number = MOMENTS.index(moment)
    try_deviation(SUBSETS[5 * number % len(SUBSETS)], number, moment)


@pytest.mark.slow
@pytest.mark.parametrize("odd", SUBSETS[::2])
def test_seeded_deviations_of_many_subsets_of_ranks(odd):
    """One for each call of the step, each at another moment."""
    for position in range(len(CALLS)):
        try_deviation(odd, position, MOMENTS[(position + SUBSETS.index(odd)) % len(MOMENTS)])


# Calls that begin ahead -------------------------------------------------------------------------------------

SIZES = [100_000, 70_000, 80_000, 70_000, 100_000]
"""Of the sums of a step; each begins while those before it are under way."""


class Step:
    """The sums of a step on a lane, as those of PyTorch's wrapper are."""

    def __init__(self, transport):
        self.lane = ThreadLane(Communicator([transport]))
        self.comm, self.begun = self.lane.comm, []

    def submit(self, x):
        def begin():
            self.begun.append(begin_if_known(self.comm, x, "sum"))
            return self.begun[-1]

        return self.lane.submit_begun(begin, self.comm.allreduce, x, out=x)

    def arrays(self, number):
        return [np.full(size, 10.0 * number + self.comm.rank) for size in SIZES]

    def expected(self, number):
        return sum(10.0 * number + rank for rank in range(self.comm.size))


def test_planned_sums_begin_while_others_are_under_way():
    def body(transport):
        step = Step(transport)
        for number in range(5):
            xs = step.arrays(number)
            for x, future in [(x, step.submit(x)) for x in xs]:
                np.testing.assert_array_equal(future.result(), step.expected(number))
                assert future.result() is x
            step.comm.barrier()
        assert transport.plan.in_force
        step.lane.close()
        return step.begun

    assert [sum(begun) for begun in run_threads(3, body)] == [3 * len(SIZES)] * 3  # two steps are learned


@pytest.mark.parametrize(
    ("odd", "position"), [((0,), 0), ((3,), 1), ((1, 2), 2), ((0, 1, 3), 3), ((2,), len(SIZES) - 1)]
)
def test_a_rank_that_leaves_the_plan_ends_the_sums_that_have_begun(odd, position):
    """Those before its call end with the right sum, and none of the others ends."""

    def body(transport):
        step = Step(transport)
        for number in range(3):
            for future in [step.submit(x) for x in step.arrays(number)]:
                future.result()
        xs = step.arrays(3)
        calls = [step.submit(x) for x in xs[:position]]
        if step.comm.rank in odd:
            calls.append(step.lane.submit(step.comm.allreduce, np.ones(3)))
        else:
            calls += [step.submit(x) for x in xs[position:]]
            assert all(step.begun[-len(SIZES) :])
        for call in calls[:position]:
            np.testing.assert_array_equal(call.result(), step.expected(3))
        start_s = time.monotonic()
        with pytest.raises(CommMismatch, match=r"rank \d called allreduce.*rank \d called allreduce"):
            calls[position].result()
        assert time.monotonic() - start_s < AT_ONCE_S
        for call in calls[position + 1 :]:
            assert isinstance(call.exception(), CommAborted)
        step.lane.abort()

    run_threads(4, body, timeout_s=60.0)


def test_a_rank_that_dies_ends_the_sums_that_have_begun():
    def body(transport):
        step = Step(transport)
        for number in range(3):
            for future in [step.submit(x) for x in step.arrays(number)]:
                future.result()
        if step.comm.rank == 1:
            return transport.abort()
        calls = [step.submit(x) for x in step.arrays(3)]
        assert {type(call.exception()) for call in calls} == {RankFailed}
        return step.lane.abort()

    run_threads(3, body, timeout_s=60.0)


def test_a_call_that_a_hook_makes_before_one_that_has_begun_is_an_error_and_no_wrong_sum():
    def body(transport):
        step, tasks = Step(transport), threading.Event()
        for number in range(3):
            for future in [step.submit(x) for x in step.arrays(number)]:
                future.result()
        blocked = step.lane.submit_begun(lambda: True, tasks.wait)  # as if it waited for the others
        call = step.submit(step.arrays(3)[0])
        assert step.begun[-1]
        step.comm.on(before=NanWatch())
        tasks.set()
        assert blocked.result()
        with pytest.raises(CommAborted, match="but has begun"):
            call.result()
        step.lane.abort()

    run_threads(3, body)


def test_a_diagnosis_shows_how_far_each_rank_is_in_its_plan():
    def body(transport):
        with Communicator([transport]).dup() as comm:
            for _ in range(5):
                [comm.allreduce(np.ones(count)) for count in (1, 2)]
            comm.allreduce(np.ones(1))
            return comm.flight.record()

    found = diagnose([RankRecord.from_json(record.to_json()) for record in run_threads(2, body)])
    assert all("at call 1 of 2 of the plan of world.1" in text for text in found.ranks)


def test_plans_of_closed_communicators_are_not_kept():
    def body(transport):
        comm = Communicator([transport])
        for _ in range(4):
            comm.dup().close()
        until(lambda: gc.collect() >= 0 and len(comm.flight.plans) <= 1)  # the transport keeps the last one

    run_threads(2, body)


@pytest.mark.slow
def test_ddp_rebuilds_its_buckets_after_a_step_and_all_ranks_leave_the_plan(tmp_path):
    """The buckets of the first step have one size, so that a plan is in force before they change."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = torchrun(3, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left True and follow True") == 3


PROGRAM = """
import sys, torch, bagua_torch
import torch.distributed as dist
from bagua_comm.transports.plan import Plan

left, end = [], Plan.end
Plan.end = lambda self: (left.append(self.in_force), end(self))[1]
dist.init_process_group("bagua")
module = torch.nn.ModuleList([torch.nn.Linear(512, m, bias=False) for m in [512] * 6 + [700]])
module.forward = lambda x: [x := module[i](x) for i in [0, 2, 4, 1, 3, 5, 6]][-1]
ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
for step in range(6):
    ddp.zero_grad()
    ddp(torch.full((2, 512), float(dist.get_rank() + step))).sum().backward()
    means = torch.cat([each.grad.flatten() for each in module.parameters()])
    dist.all_reduce(largest := means.clone(), op=dist.ReduceOp.MAX)
    assert torch.equal(largest, means)
group = dist.group.WORLD
plan = (group if hasattr(group, "comm") else group._get_backend(torch.device("cpu"))).comm.host.plan
sys.stdout.write(f"left {any(left)} and follow {plan.in_force}\\n")
dist.destroy_process_group()
"""
