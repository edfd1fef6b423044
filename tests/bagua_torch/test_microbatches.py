"""DistributedDataParallel with reproducible means: the same weights on any number of ranks."""

import contextlib
import copy

import pytest
import torch
from support.engine_steps import give_times
from torch import nn
from torch.nn.functional import cross_entropy

from bagua_comm import ArrayError, GradientAllReduce, Reproducible, elastic
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel

MICROBATCHES, STEPS = 24, 2


with torch.random.fork_rng():
    torch.manual_seed(0)
    AT_FIRST = nn.Sequential(nn.Linear(10, 20), nn.LayerNorm(20), nn.Tanh(), nn.Linear(20, 4))


def network():
    """The same weights in all threads, which share PyTorch's random numbers."""
    return copy.deepcopy(AT_FIRST)


def data(step, i):
    random = torch.Generator().manual_seed(100 * step + i)
    return torch.randn(2, 10, generator=random), torch.randint(4, (2,), generator=random)


def trained(comm, *, bucket_bytes=None):
    """The bytes of the weights after some steps."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    algorithm = GradientAllReduce(Reproducible(addends=MICROBATCHES))
    ddp = DistributedDataParallel(model, [optimizer], algorithm, comm=comm, bucket_bytes=bucket_bytes)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in ddp.microbatches():
            inputs, labels = data(step, i)
            cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    ddp.close()
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def in_one_process():
    """The weights that PyTorch alone reaches, with the mean of all microbatches."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for i in range(MICROBATCHES):
            inputs, labels = data(step, i)
            (cross_entropy(model(inputs), labels) / MICROBATCHES).backward()
        optimizer.step()
    return list(model.parameters())


@pytest.fixture(scope="module")
def on_three():
    """The weights on 3 ranks, of 8 microbatches each."""
    return run_ranks(3, trained)[0]


@pytest.mark.parametrize(
    ("ranks", "nbytes"),
    [(4, 500), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, None), (3, 500), (5, 500)))],
)
def test_the_number_of_ranks_and_the_size_of_buckets_do_not_show_in_the_weights(on_three, ranks, nbytes):
    found = run_ranks(ranks, lambda comm: trained(comm, bucket_bytes=nbytes))
    assert [weights == on_three for weights in found] == [True] * ranks


@pytest.mark.slow
def test_the_weights_are_near_those_of_one_process(on_three):
    for found, expected in zip(on_three, in_one_process(), strict=True):
        actual = torch.frombuffer(bytearray(found), dtype=torch.float32).reshape(expected.shape)
        torch.testing.assert_close(actual, expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), GradientAllReduce(Reproducible(addends=6))])
def test_microbatches_move_from_a_slow_rank_and_the_weights_are_the_same(algorithm):
    def body(comm, *, shift):
        model, numbers = network(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, [optimizer], algorithm, comm=comm)
        give_times(ddp.engine, lambda step: (100 + 200 * comm.rank) * numbers[-1])
        for step in range(22):
            optimizer.zero_grad()
            numbers.append(0)
            for i, parts, context in passes(ddp, shift=shift):
                with context:
                    (cross_entropy(ddp(data(step, i)[0]), data(step, i)[1]) / parts).backward()
                numbers[-1] += 1
            optimizer.step()
        ddp.close()
        return [numbers[0], numbers[-1]], nn.utils.parameters_to_vector(model.parameters()).detach()

    def passes(ddp, *, shift):
        if algorithm.addends:
            for i in ddp.microbatches(shift=shift):
                yield i, 1, contextlib.nullcontext()
            return
        mine = elastic.share(6, ddp.comm, shift=shift)
        ddp.weight = len(mine)
        for i in mine:
            yield i, len(mine), contextlib.nullcontext() if i == mine[-1] else ddp.no_sync()

    (fast, expected), (slow, _) = run_ranks(2, lambda comm: body(comm, shift=False))
    assert (fast, slow) == ([3, 3], [3, 3])
    (fast, weights), (slow, others) = run_ranks(2, lambda comm: body(comm, shift=True))
    assert (fast, slow) == ([3, 5], [3, 1])
    assert torch.equal(weights, others)
    if algorithm.addends:
        assert torch.equal(weights, expected)
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)


def test_a_parameter_without_a_gradient_in_some_microbatches_adds_zeros():
    """Also where its memory holds a gradient of the step before."""

    def body(comm):
        model = nn.ModuleDict({"always": nn.Linear(1, 1), "sometimes": nn.Linear(1, 1)})
        ddp = DistributedDataParallel(Switch(model), [], GradientAllReduce(Reproducible(addends=4)), comm=comm)
        found = []
        for _ in range(2):
            model.zero_grad()
            for i in ddp.microbatches():
                ddp(torch.ones(1), "sometimes" if i == 0 else "always").sum().backward()
            found.append([model[name].bias.grad.item() for name in ("always", "sometimes")])
        ddp.close()
        return found

    assert run_ranks(2, body) == [[[0.75, 0.25]] * 2] * 2


class Switch(nn.Module):
    """A module that runs the part that its argument names."""

    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x, name):
        return self.parts[name](x)


def test_other_algorithms_have_no_microbatches():
    def body(comm):
        ddp = DistributedDataParallel(network(), [], GradientAllReduce(Reproducible()), comm=comm)
        with pytest.raises(ArrayError, match=r"expected GradientAllReduce\(Reproducible\(addends=M\)\)"):
            next(ddp.microbatches())
        ddp.close()

    run_ranks(1, body)


def test_a_loop_that_holds_nothing_raises_with_what_to_do():
    def body(comm):
        ddp = DistributedDataParallel(network(), [], GradientAllReduce(Reproducible(addends=2)), comm=comm)
        with pytest.raises(ArrayError, match="rank 0 of 1 has 2 of 2 addends, but has 1; distribute"):
            cross_entropy(ddp(torch.ones(2, 10)), torch.zeros(2, dtype=torch.long)).backward()
        ddp.close()

    run_ranks(1, body)
