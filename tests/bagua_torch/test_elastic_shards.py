"""Sharded models (`fully_shard`) under `elastic.run`: survivors go on from the slabs in their memory."""

import pytest
import torch
from support import thread_groups
from torch import nn
from torch.distributed.fsdp import fully_shard

from bagua_comm import Reproducible
from bagua_comm.elastic import State, run, share
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import fsdp

STEPS, MICROBATCHES = 5, 12
REDUCE = Reproducible(addends=MICROBATCHES)
INPUTS = torch.linspace(-1, 1, STEPS * MICROBATCHES * 5).reshape(-1, 5)


@pytest.fixture(autouse=True)
def groups():
    thread_groups.install()
    yield
    thread_groups.uninstall()


class Net(nn.Module):
    """Rows that do not divide by the number of ranks, fewer rows than ranks, and statistics of a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def make():
    with thread_groups.LOCK:
        torch.manual_seed(0)
        return Net()


def whole(comm, tensors):
    """The bytes of whole tensors, from those of all ranks."""
    rows = comm.allgather_object([each.to_local().detach().clone() for each in tensors])
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


def training(job, deaths=(), *, reduce=REDUCE, seen=None):
    """A program; process n dies in step s, after its commit, for every (n, s)."""
    due = set(deaths)

    def body(fleet):
        state = State(step=0)

        @run(state, fleet=fleet)
        def train(comm):
            thread_groups.renew(comm)
            model = make()
            fully_shard(model.first)
            fully_shard(model)
            fsdp.attach(model, reduce, comm=comm)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
            state.register(model=model, optimizer=optimizer)
            if seen is not None:
                seen[fleet.me].append((state.step, whole(comm, model.parameters()), moments(comm, optimizer)))
            while state.step < STEPS:
                optimizer.zero_grad()
                for number in share(MICROBATCHES, comm):
                    batch = INPUTS[state.step * MICROBATCHES + number].reshape(1, 5)
                    model(batch).square().mean().backward()
                optimizer.step()
                state.step += 1
                state.commit()
                if seen is not None:
                    facts = state.step, whole(comm, model.parameters()), moments(comm, optimizer)
                    seen[fleet.me].append(facts)
                if (fleet.me, state.step) in due:
                    job.kill(fleet.me)
            return comm.size, whole(comm, model.parameters())

        return train

    return body


def moments(comm, optimizer):
    states = [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]
    return whole(comm, [each[key] for each in states if each for key in ("exp_avg", "exp_avg_sq")])


def results(outcomes):
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return [outcome["result"] for outcome in outcomes if outcome.get("result")]


def equal(first, second):
    return len(first) == len(second) and all(map(torch.equal, first, second))


def test_three_of_four_ranks_go_on_with_the_bits_of_the_commit_and_end_as_undisturbed():
    job = ThreadJob(4)
    undisturbed = results(run_fleet(job, training(job)))
    job, seen = ThreadJob(4), [[] for _ in range(4)]
    ended = results(run_fleet(job, training(job, [(2, 2)], seen=seen)))
    assert [size for size, _ in ended] == [3, 3, 3]
    restored = [facts for facts in seen[0] if facts[0] == 2]
    assert len(restored) == 2, "the end of step 2, and the begin of the next entry"
    assert all(equal(*pair) for pair in zip(restored[0][1:], restored[1][1:], strict=True))
    assert all(equal(weights, undisturbed[0][1]) for _, weights in ended)
