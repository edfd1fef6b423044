"""DistributedDataParallel over MPI processes, beside PyTorch's own. Run by tests/test_mpirun.py."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

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


def test_a_backward_pass_of_the_plain_module_on_one_rank_alone_stays_there(comm):
    def trained(on_one_rank):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        if on_one_rank and comm.rank == comm.size - 1:
            model(torch.ones(2, 1, 8, 8)).sum().backward()
        else:
            assert all(parameter.grad is None for parameter in model.parameters())
        model.zero_grad()
        train(ddp, comm, steps=2)
        ddp.close()
        for parameter in model.parameters():
            comm.check_consistency(as_array(parameter))
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    torch.testing.assert_close(trained(True), trained(False))


def test_wrapping_again_and_dropping_leaves_one_exchange_a_step(comm):
    """Ranks drop theirs at different times, and none waits for another."""
    model, engines, kept = make_model(), [], []
    for fit in range(4):
        ddp = DistributedDataParallel(model, comm=comm)
        engines.append(ddp.engine)
        train(ddp, comm, steps=3)
        if fit % 2 or comm.rank:
            kept.append(ddp)
    assert [engine.counter.calls for engine in engines] == [3 if comm.size > 1 else 0] * 4
    for parameter in model.parameters():
        comm.check_consistency(as_array(parameter))
    ddp.close()


def test_a_hook_of_pytorchs_own_averages_over_processes(comm, gloo):
    ours, theirs = make_model(), make_model()
    models = DistributedDataParallel(ours, comm=comm), nn.parallel.DistributedDataParallel(theirs)
    for model in models:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        train(model, comm, steps=5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        comm.check_consistency(as_array(a))
    models[0].close()


@pytest.mark.parametrize("throws", [False, True])
def test_join_gives_back_gradients_or_raises_on_all_ranks(comm, throws):
    model = make_model()
    ddp = DistributedDataParallel(model, comm=comm)
    for _ in range(2):
        try:
            with ddp.join(throw_on_early_termination=throws):
                train(ddp, comm, steps=1 + comm.rank)
                model.zero_grad()
            raised = False
        except RuntimeError:
            raised = True
        assert raised == (throws and comm.size > 1)
        if not raised:
            assert all(parameter.grad is None for parameter in model.parameters())
        model.zero_grad()
    for parameter in model.parameters():
        comm.check_consistency(as_array(parameter))
    ddp.close()
