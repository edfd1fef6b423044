"""DistributedDataParallel over MPI processes, beside PyTorch's own. Run by tests/test_mpirun.py."""

import pytest
import torch
from torch import nn

import bagua_comm
from bagua_torch import DistributedDataParallel, as_array

pytestmark = pytest.mark.mpi


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )


def train(model, comm, steps=20):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        x, y = torch.randn(8, 1, 8, 8, generator=data), torch.randint(0, 3, (8,), generator=data)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_exact_averaging_trains_as_torch_does(comm, gloo):
    ours, theirs = make_model(), make_model()
    ddp = DistributedDataParallel(ours, comm=comm, bucket_bytes=4096)

    train(ddp, comm)
    train(nn.parallel.DistributedDataParallel(theirs), comm)

    assert len(ddp.engine.buckets) > 1
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    ddp.close()


def test_bytegrad_keeps_ranks_equal_and_stays_near_exact_averaging(comm):
    def trained(algorithm):
        model = make_model()
        ddp = DistributedDataParallel(model, algorithm=algorithm, comm=comm)
        train(ddp, comm)
        ddp.close()
        for parameter in model.parameters():
            comm.check_consistency(as_array(parameter))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    start = nn.utils.parameters_to_vector(make_model().parameters()).detach()
    exact = trained(bagua_comm.GradientAllReduce())
    quantized = trained(bagua_comm.ByteGrad())

    assert 0 < torch.linalg.norm(quantized - exact) < 0.25 * torch.linalg.norm(exact - start)
