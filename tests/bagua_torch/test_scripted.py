"""Modules of torch.jit.script, which take no hooks."""

import threading

import pytest
import torch
from support.torch_training import batch, filled, weights, wrapped
from torch import nn

from bagua_comm import Decentralized, DiLoCo, GradientAllReduce, LowPrecisionDecentralized
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


ONE_AT_A_TIME = threading.Lock()


def script(model):
    with ONE_AT_A_TIME:  # the compiler takes one thread
        return torch.jit.script(model)


def make_model(*, scripted):
    model = filled(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    return script(model) if scripted else model


def train(comm, algorithm, *, scripted):
    """The weights, buffers and outputs after each step, as they are saved and seen by evaluation."""
    model, optimizer, ddp = wrapped(comm, algorithm, model=make_model(scripted=scripted))
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(batch(comm.rank, 10 + step)).square().mean().backward()
        ddp(batch(comm.rank, step)).square().mean().backward()
        optimizer.step()
        saved = {name: value.clone() for name, value in ddp.state_dict().items() if name.startswith("module.")}
        ddp.eval()
        with torch.no_grad():
            seen.append([ddp(batch(9, 9)), *saved.values()])
        ddp.train()
    ddp.load_state_dict(ddp.state_dict())
    ddp.average_weights()
    seen.append([weights(model)])
    ddp.close()
    return seen


@pytest.mark.parametrize(
    "algorithm",
    [
        GradientAllReduce(),
        LowPrecisionDecentralized(),
        pytest.param(Decentralized(), marks=pytest.mark.slow),
        pytest.param(DiLoCo(local_steps=2), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_a_scripted_module_trains_as_a_plain_one(algorithm):
    scripted, plain = (
        run_ranks(2, lambda comm, s=s: train(comm, algorithm, scripted=s), timeout_s=10) for s in (True, False)
    )
    for mine, theirs in zip(scripted, plain, strict=True):
        for step, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=lambda m, s=step: f"{s}: {m}")


def test_a_scripted_module_is_wrapped_again_and_two_losses_are_averaged():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x).sum(), self.b(x).sum()

    def body(comm):
        model = script(filled(Two()))
        for _ in range(2):
            ddp = DistributedDataParallel(model, comm=comm)
            model.zero_grad()
            a, b = ddp(batch(comm.rank, 0))
            a.backward()
            b.backward()
        ddp.close()
        return [parameter.grad for parameter in model.parameters()]

    first, second = run_ranks(2, body, timeout_s=5)
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first[0], first[2])


def test_a_module_of_which_a_part_is_scripted_can_be_wrapped():
    def body(comm):
        model = nn.Sequential(script(filled(nn.Linear(4, 4))), nn.Linear(4, 1))
        ddp = DistributedDataParallel(model, comm=comm)
        ddp(batch(comm.rank, 0)).sum().backward()
        model.load_state_dict(model.state_dict())
        ddp.close()
        return all(parameter.grad.any() for parameter in model.parameters())

    assert all(run_ranks(2, body))
