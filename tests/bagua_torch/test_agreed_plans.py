"""Plans of calls over gloo: no message before a call, and an error on all ranks if one makes another call."""

import itertools
import re
import threading
import time

import numpy as np
import pytest
from support.gloo import run_threads
from support.launch import torchrun

from bagua_comm import CommMismatch, Communicator, RankFailed
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


@pytest.fixture
def frames(monkeypatch):
    """The ranks that have sent frames, in order."""
    found, send = [], FramedTransport._send_frame

    def note(self, *arguments):
        found.append(self.rank)
        send(self, *arguments)

    monkeypatch.setattr(FramedTransport, "_send_frame", note)
    return found


@pytest.mark.parametrize("name", FOLLOWED)
def test_a_planned_call_sends_no_frame_and_has_the_same_bytes(name, frames):
    barrier = threading.Barrier(3)

    def body(transport):
        comm, results, sent = Communicator([transport]), [], []
        for _ in range(4):
            x = np.random.default_rng(comm.rank).normal(size=(3, MIB // 4)).astype("f4")
            before = transport.sent_bytes
            results.append(FOLLOWED[name](comm, x))
            sent.append(transport.sent_bytes - before)
            if barrier.wait() == 0:
                counts.append(len(frames))
            barrier.wait()
        for x in results:
            np.testing.assert_array_equal(x, results[0])
        assert len(set(sent)) == 1
        assert transport.plan.in_force

    counts = []
    run_threads(3, body)
    assert counts[0] > 0
    assert counts[1:] == [counts[1]] * 3


# Deviations -------------------------------------------------------------------------------------------------

RANKS = 4

CALLS = {
    "allreduce": (lambda comm, x: comm.allreduce(x), lambda rank, total: total.reshape(-1)),
    "allreduce of others": (
        lambda comm, x: comm.allreduce(x[:, :-1]),
        lambda rank, total: total[:, :-1].reshape(-1),
    ),
    "allgather": (lambda comm, x: comm.allgather(x).sum(0), lambda rank, total: total.reshape(-1)),
    "alltoall": (lambda comm, x: comm.alltoall(x).sum(0), lambda rank, total: total[rank]),
    "reduce_scatter": (lambda comm, x: comm.reduce_scatter(x), lambda rank, total: total[rank]),
    "small": (lambda comm, x: comm.allreduce(x[:, :5]), lambda rank, total: total[:, :5].reshape(-1)),
}
"""The calls of a step, and the result that is right: a part of the sum of all ranks' arrays, (p, m)."""

MOMENTS = ["learning", "early", "late", "random", "twice", "killed"]


class Trial:
    """Ranks that train and, at a drawn call, some make another one; in one case a rank dies in the same call."""

    def __init__(self, odd, position, moment):
        self.random = np.random.default_rng([*odd, position, MOMENTS.index(moment)])
        self.odd, self.moment, self.names = odd, moment, [*CALLS]
        step = {"learning": 1, "early": 2, "late": 4, "twice": 5}.get(moment, int(self.random.integers(2, 5)))
        self.last = step * len(CALLS) + position
        others = [name for name in CALLS if name != self.names[position]]
        self.another = dict(zip(odd, self.random.choice(others, len(odd)), strict=True))
        self.dead = int(self.random.integers(RANKS)) if moment == "killed" else None

    def call(self, comm, name, number):
        """Make a call; no call returns anything else than the sum of what all ranks give in it."""
        make, expected = CALLS[name]
        arrays = [np.full((RANKS, 30_000), 10 * number + rank, "f4") for rank in range(RANKS)]
        got = make(comm, arrays[comm.rank])
        np.testing.assert_array_equal(
            got.reshape(-1), expected(comm.rank, sum(arrays)), err_msg=f"{name} {number}"
        )

    def body(self, transport):
        comm = Communicator([transport])
        for number in range(self.last):
            if self.moment == "twice" and number == 14:  # all leave the plan, which is no error
                comm.barrier()
            self.call(comm, self.names[number % len(CALLS)], number)
        assert transport.plan.in_force == (self.moment != "learning")
        if comm.rank == self.dead:
            return transport.abort()
        start_s = time.monotonic()
        with pytest.raises((CommMismatch, RankFailed)) as caught:
            self.call(comm, self.another.get(comm.rank, self.names[self.last % len(CALLS)]), self.last)
        assert time.monotonic() - start_s < AT_ONCE_S
        return caught.value

    def check(self):
        """Run it; all ranks must raise, and name ranks and calls."""
        errors = [error for error in run_threads(RANKS, self.body, timeout_s=60.0) if error is not None]
        assert len(errors) == RANKS - (self.dead is not None)
        assert all(re.search(r"rank \d", str(error)) for error in errors)
        if self.dead is None:
            assert len({re.search("ranks made .* bytes[)]|$", str(error))[0] for error in errors}) == 1
            named = re.findall(r"rank (\d) called (\w+)", str(errors[0]))
            calls = {
                str(rank): self.another.get(rank, self.names[self.last % len(CALLS)]) for rank in range(RANKS)
            }
            assert len(named) == 2
            for rank, name in named:
                assert name == calls[rank].split()[0].replace("small", "allreduce")


SUBSETS = [odd for size in range(1, RANKS) for odd in itertools.combinations(range(RANKS), size)]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_leaves_the_plan_is_an_error_on_all(moment):
    number = MOMENTS.index(moment)
    Trial(SUBSETS[5 * number % len(SUBSETS)], number, moment).check()


@pytest.mark.slow
@pytest.mark.parametrize("odd", SUBSETS)
def test_seeded_deviations_of_all_subsets_of_ranks(odd):
    """One for each call of the step, each at another moment."""
    for position in range(len(CALLS)):
        Trial(odd, position, MOMENTS[(position + SUBSETS.index(odd)) % len(MOMENTS)]).check()


@pytest.mark.parametrize("another", ["barrier", "plan ended by one rank"])
def test_no_error_if_all_ranks_leave_the_plan_or_one_ends_it_alone(another, frames):
    def body(transport):
        comm = Communicator([transport])
        for number in range(12):
            if number == 5 and another == "barrier":
                comm.barrier()
            elif number == 5 and comm.rank == 1:
                assert transport.plan.in_force
                transport.plan.end()
            np.testing.assert_array_equal(comm.allreduce(np.full(MIB, number, "f4")), 3 * number)
        assert transport.plan.in_force

    run_threads(3, body)


def test_a_diagnosis_shows_how_far_each_rank_is_in_its_plan():
    def body(transport):
        with Communicator([transport]).dup() as comm:
            for _ in range(5):
                comm.allreduce(np.ones(1))
                comm.allreduce(np.ones(2))
            comm.allreduce(np.ones(1))
            return comm.flight.record()

    found = diagnose([RankRecord.from_json(record.to_json()) for record in run_threads(2, body)])
    assert all("at call 1 of 2 of the plan of world.1" in text for text in found.ranks)


@pytest.mark.slow
def test_ddp_rebuilds_its_buckets_after_a_step_and_all_ranks_leave_the_plan(tmp_path):
    """The buckets of the first step have one size, so that a plan is in force before they change."""
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    done = torchrun(3, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("left True and follow True") == 3


PROGRAM = """
import torch, bagua_torch
import torch.distributed as dist
from bagua_comm.transports.plan import Plan

left, end = [], Plan.end
Plan.end = lambda self: (left.append(self.in_force), end(self))[1]
dist.init_process_group("bagua")
torch.manual_seed(0)
layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(6)]
order = [0, 2, 4, 1, 3, 5]
module = torch.nn.ModuleList([*layers, torch.nn.Linear(512, 700, bias=False)])
module.forward = lambda x: [x := module[i](x) for i in [*order, 6]][-1]
ddp = torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=1)
for step in range(6):
    ddp.zero_grad()
    ddp(torch.full((2, 512), float(dist.get_rank() + step))).sum().backward()
    for parameter in module.parameters():
        everyones = [torch.empty_like(parameter.grad) for _ in range(3)]
        dist.all_gather(everyones, parameter.grad)
        assert all(torch.equal(each, everyones[0]) for each in everyones)
group = dist.group.WORLD
plan = (group if hasattr(group, "comm") else group._get_backend(torch.device("cpu"))).comm.host.plan
print("left", any(left), "and follow", plan.in_force, flush=True)
dist.destroy_process_group()
"""
