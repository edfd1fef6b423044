"""DistributedDataParallel under `elastic.run`: nothing but the five lines of the guide."""

import threading

import pytest
import torch
from torch import nn

import bagua_comm
from bagua_comm.elastic import State, run
from bagua_comm.testing.fleets import ThreadJob, run_fleet
from bagua_torch import DistributedDataParallel

STEPS = 5
INPUTS = torch.linspace(-1, 1, 48 * 5).reshape(48, 5)
SHARED = threading.Lock()


def training(algorithm, *, job=None, deaths=()):
    """A program with a model, an optimizer and a scheduler; process n dies in step s, for every (n, s)."""
    due = set(deaths)

    def body(fleet):
        with SHARED:  # PyTorch's generator is one for all threads
            torch.manual_seed(fleet.me)
            model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        state = State(model=model, optimizer=optimizer, schedule=schedule, step=0)

        @run(state, fleet=fleet)
        def train(comm):
            ddp = DistributedDataParallel(model, [optimizer], algorithm, comm=comm, bucket_bytes=64)
            while state.step < STEPS:
                batch = INPUTS[(state.step * 8) :][comm.rank : 8 : comm.size]
                optimizer.zero_grad()
                loss = (ddp(batch) - batch.sum(1, keepdim=True)).square().mean()
                if (fleet.me, state.step) in due:
                    due.discard((fleet.me, state.step))
                    job.kill(fleet.me)
                loss.backward()
                optimizer.step()
                schedule.step()
                state.step += 1
                state.commit()
            ddp.close()
            hooks = [model._forward_pre_hooks, model._state_dict_pre_hooks, model._load_state_dict_pre_hooks]
            assert not any(hooks)
            return comm.rank, {name: value.clone() for name, value in model.state_dict().items()}

        return train

    return body


def by_rank(outcomes):
    for outcome in outcomes:
        if "error" in outcome:
            raise outcome["error"]
    return dict(outcome["result"] for outcome in outcomes if outcome.get("result"))


ALGORITHMS = [
    bagua_comm.GradientAllReduce(),
    bagua_comm.ByteGrad(),
    bagua_comm.GradientAllReduce(bagua_comm.ErrorFeedback(bagua_comm.Quantized())),
    bagua_comm.Decentralized("all"),
    bagua_comm.LowPrecisionDecentralized(),
    bagua_comm.DiLoCo(local_steps=2),
]


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_with_a_spare_the_model_is_that_of_an_undisturbed_training(algorithm):
    expected = by_rank(run_fleet(ThreadJob(3), training(algorithm)))
    job = ThreadJob(4, wanted=3)
    got = by_rank(run_fleet(job, training(algorithm, job=job, deaths=[(1, 3)])))
    assert got.keys() == {0, 1, 2}
    for rank, values in expected.items():
        for name, value in values.items():
            assert torch.equal(value, got[rank][name]), f"rank {rank}: {name}"


@pytest.mark.algorithms("sample")
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_without_a_spare_training_continues_with_fewer(algorithm):
    job = ThreadJob(3)
    got = by_rank(run_fleet(job, training(algorithm, job=job, deaths=[(0, 2)])))
    assert got.keys() == {0, 1}
    assert all(value.isfinite().all() for values in got.values() for value in values.values())
