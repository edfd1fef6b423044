"""The averages of bagua_comm in PyTorch's own DistributedDataParallel. Run by tests/test_mpirun.py."""

import pytest
import torch
from support.torch_training import batch, loss_of, make_model, sgd, weights
from torch import nn

from bagua_comm import BFloat16, ErrorFeedback, Exact, Hierarchical, MinMaxUInt8, Quantized, UnsupportedError
from bagua_torch import as_array, comm_hook

pytestmark = pytest.mark.mpi

STEPS = 10


def wrapped(model, average, comm):
    """PyTorch's wrapper with buckets so small that it forms others after the first step."""
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.0005)
    if average is not None:
        ddp.register_comm_hook(None, comm_hook(average, comm))
    return ddp


def trained(average, comm, *, accumulated=1):
    """The gradients of each step, and the weights in the end."""
    model, steps = make_model(), []
    optimizer, ddp = sgd(model.parameters()), wrapped(model, average, comm)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(accumulated - 1):
            with ddp.no_sync():
                loss_of(ddp, batch(comm.rank, 100 * part + step)).backward()
        loss_of(ddp, batch(comm.rank, step)).backward()
        steps.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]))
        comm.check_consistency(as_array(steps[-1]))
        optimizer.step()
    return steps, weights(model)


@pytest.mark.covering(1)
@pytest.mark.parametrize("average", [Exact(), Hierarchical()], ids=repr)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_exact_averages_train_as_without_a_hook(average, accumulated, comm, gloo):
    steps, after = trained(average, comm, accumulated=accumulated)
    expected_steps, expected = trained(None, comm, accumulated=accumulated)

    for actual, gradient in zip(steps, expected_steps, strict=True):
        torch.testing.assert_close(actual, gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "average",
    [
        pytest.param(Quantized(MinMaxUInt8()), marks=pytest.mark.slow),
        pytest.param(Quantized(BFloat16()), marks=pytest.mark.slow),
        ErrorFeedback(Quantized(MinMaxUInt8())),
        pytest.param(Hierarchical(Quantized(MinMaxUInt8())), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_quantized_averages_are_the_same_on_all_ranks_and_near_the_exact_ones(average, comm, gloo):
    _, quantized = trained(average, comm)
    _, exact = trained(None, comm)

    comm.check_consistency(as_array(quantized))
    change = torch.linalg.norm(exact - weights(make_model()))
    assert torch.linalg.norm(quantized - exact) < 0.1 * change


class Product(nn.Module):
    """Its gradient is its input."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(100)) for _ in range(4)])

    def forward(self, x):
        return sum((layer * x).sum() for layer in self.layers)


@pytest.mark.parametrize(
    "average",
    [
        ErrorFeedback(),
        pytest.param(ErrorFeedback(reset_every=5, residual_codec=MinMaxUInt8(4)), marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_error_feedback_keeps_its_residuals_when_pytorch_forms_other_buckets(average, comm, gloo):
    """The quantization errors of the first step are added in the next ones, which have zero gradients."""
    model = Product()
    ddp, gradients, places = wrapped(model, average, comm), [], []
    x = torch.full((100,), 0.1 * (comm.rank + 1))
    x[0] = 100.0  # one code stands for 0.4
    for step in range(4):
        model.zero_grad()
        ddp(x if step == 0 else torch.zeros(100)).backward()
        gradients.append(torch.stack([layer.grad.clone() for layer in model.layers]))
        places.append([layer.grad.data_ptr() for layer in model.layers])

    assert places[0] != places[1]  # the buckets were formed anew
    mean = torch.from_numpy(comm.allreduce(x.numpy(), op="avg")).expand(4, 100)
    torch.testing.assert_close(sum(gradients), mean, rtol=0, atol=1e-3)
    assert (gradients[0] - mean).abs().max() > 0.04


def test_a_dtype_the_codec_does_not_take_is_refused_in_the_first_backward_pass(comm, gloo):
    model = make_model().double()
    ddp = wrapped(model, Quantized(), comm)
    loss = loss_of(ddp, batch(comm.rank, 0).double())

    with pytest.raises((UnsupportedError, RuntimeError), match="float64"):
        loss.backward()
