"""Memory formats and complex numbers: parameters of any layout train as in one process."""

import copy
import itertools

import pytest
import torch
from support.memory_formats import (
    EXACT,
    LAYOUTS,
    OPTIMIZERS,
    QUANTIZED,
    REAL,
    WEIGHTS,
    Parts,
    channels_last,
    contiguous,
    expected_of,
    random_tensor,
    steps,
)
from support.torch_training import filled, weights
from torch import nn

from bagua_comm import (
    ArrayError,
    CommMismatch,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Hierarchical,
    LowPrecisionDecentralized,
    QAdam,
    UnsupportedError,
)
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel, QAdamOptimizer, fuse


def cases():
    """Each layout with each optimizer, by one of the exchanges in turn. Every sixth stays in the default run."""
    exchanges = {"exact": EXACT, "bytegrad": QUANTIZED, "weights": WEIGHTS}
    # Complex numbers have an exact mean only, and PyTorch's fused kernels do not take them.
    every = [
        (layout, optimizer, [*exchanges][(i + j) % 3] if layout in REAL else "exact")
        for (i, layout), (j, optimizer) in itertools.product(enumerate(LAYOUTS), enumerate(OPTIMIZERS))
        if layout in REAL or not optimizer.startswith("fused")
    ]
    for number, case in enumerate(every):
        marks = [] if number % 6 == 0 else pytest.mark.slow
        yield pytest.param(*case[:2], exchanges[case[2]], id="-".join(case), marks=marks)


@pytest.mark.parametrize(("layout", "optimizer", "exchange"), list(cases()))
def test_a_parameter_of_any_memory_format_trains_as_in_one_process(layout, optimizer, exchange):
    names = [layout, "contiguous", layout]
    expected = expected_of(Parts(*names), optimizer, range(0, 4000, 1000))

    def body(comm):
        module = Parts(*names)
        before = [p.stride() for p in module.parameters()]
        ours = OPTIMIZERS[optimizer](list(module.parameters()))
        ddp = DistributedDataParallel(module, ours, exchange, comm=comm, bucket_bytes=200)
        rank = 100 * comm.rank
        steps(ddp, ours, [seed + rank for seed in range(0, 4000, 1000)])
        ddp.average_weights()
        ddp.close()
        assert [p.stride() for p in module.parameters()] == before
        if exchange is not WEIGHTS:
            assert [p.grad.stride() for p in module.parameters()] == before
        return [p.detach().clone() for p in module.parameters()]

    if exchange is WEIGHTS and "sgd" not in optimizer:  # not linear: only each rank's own elements are compared
        expected = None
    for actual in run_ranks(2, body):
        for a, e in zip(actual, expected or actual, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=0.03 if exchange is QUANTIZED else 1e-5)


@pytest.mark.parametrize("optimizer", ["fused adam", "our adam"])
def test_where_weights_are_exchanged_the_memory_format_changes_nothing(optimizer):
    def body(comm):
        results = []
        for make in (Parts, lambda *names: contiguous(Parts(*names))):
            module = make(*REAL)
            ours = OPTIMIZERS[optimizer](list(module.parameters()))
            ddp = DistributedDataParallel(module, ours, DiLoCo(local_steps=2), comm=comm)
            steps(ddp, ours, [seed + comm.rank for seed in range(6)])
            ddp.replan(bucket_bytes=64)
            steps(ddp, ours, [seed + comm.rank for seed in range(6, 9)])
            ddp.switch(EXACT)
            steps(ddp, ours, [seed + comm.rank for seed in range(9, 11)])
            ddp.close()
            results.append(weights(module))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)

    run_ranks(2, body)


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 3, stride=2)
        self.last = nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.first(x))).mean((2, 3)))


@pytest.mark.parametrize(
    ("formats", "own"),
    [
        pytest.param(formats, own, marks=[] if formats == "first" and not own else pytest.mark.slow)
        for formats in ("first", "second", "both")
        for own in (False, True)
    ],
)
def test_gradients_have_the_strides_of_their_parameters_and_the_values_of_one_process(formats, own):
    """Several steps with convolutions in mixed memory formats, which PyTorch's own wrapper supports."""

    def made():
        model = filled(Convolutions())
        for name in ("first", "second"):
            if formats in (name, "both"):
                getattr(model, name).to(memory_format=torch.channels_last)
        return model

    xs = [random_tensor(2, 3, 8, 8, seed=seed) for seed in range(4)]
    local = made()
    optimizer = torch.optim.SGD(local.parameters(), lr=0.1)

    def body(comm):
        model = made()
        ours = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, ours, comm=comm, bucket_bytes=400, gradient_as_bucket_view=not own)
        seen = []
        for step in range(2):
            ours.zero_grad()
            ddp(channels_last(xs[2 * step + comm.rank])).square().mean().backward()
            ours.step()
            for p in model.parameters():
                assert p.grad.stride() == p.stride()
            seen.append([p.grad.clone() for p in model.parameters()])
        ddp.close()
        return seen

    ranks = run_ranks(2, body)
    for step in range(2):
        optimizer.zero_grad()
        for x in xs[2 * step : 2 * step + 2]:
            (local(x).square().mean() / 2).backward()
        optimizer.step()
        for seen in ranks:
            for actual, p in zip(seen[step], local.parameters(), strict=True):
                torch.testing.assert_close(actual, p.grad, rtol=1e-4, atol=1e-6)


def test_a_parameter_with_gaps_gets_a_contiguous_gradient():
    def body(comm):
        module = Parts("gaps", make={"gaps": lambda: random_tensor(4, 6)[:, ::2]})
        ddp = DistributedDataParallel(module, comm=comm)
        ddp(comm.rank).backward()
        (p,) = module.parameters()
        assert (p.stride(), p.grad.stride()) == ((6, 2), (3, 1))
        mean = sum(2 * (p - random_tensor(4, 3, seed=seed)) for seed in (0, 1)) / 2
        torch.testing.assert_close(p.grad, mean.detach())
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("first", "second", "error", "words"),
    [
        *(
            (first, random_tensor(1, 4).expand(4, 4), UnsupportedError, "'weight'.*share memory")
            for first in (random_tensor(1, 4).expand(4, 4), random_tensor(4, 4))
        ),
        (random_tensor(4, 4), random_tensor(4, 4).t(), CommMismatch, r"'weight'.*in the order \(1, 0\)"),
    ],
)
def test_expanded_parameters_and_other_orders_of_dimensions_are_refused_on_all(first, second, error, words):
    def body(comm):
        module = nn.Module()
        module.weight = nn.Parameter(first if comm.rank == 0 else second)
        with pytest.raises(error, match=words):
            DistributedDataParallel(module, comm=comm)

    run_ranks(2, body)


def test_extents_of_one_may_have_any_stride():
    def body(comm):
        module = nn.Module()
        module.weight = nn.Parameter(random_tensor(3, 1, 2).as_strided((3, 1, 2), (2, 2 + comm.rank, 1)))
        DistributedDataParallel(module, comm=comm).close()

    run_ranks(2, body)


def test_a_memory_format_that_changes_after_wrapping_is_refused():
    def body(comm):
        model = filled(Convolutions())
        ddp = DistributedDataParallel(model, comm=comm)
        model.to(memory_format=torch.channels_last)
        with pytest.raises(ArrayError, match=r"weight' has strides .* of shape \(.* convert it back"):
            ddp(random_tensor(1, 3, 8, 8))
        model.to(memory_format=torch.contiguous_format)
        ddp(random_tensor(1, 3, 8, 8)).sum().backward()
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [GradientAllReduce(ErrorFeedback()), DiLoCo(local_steps=2)], ids=str)
def test_the_state_of_an_algorithm_is_saved_in_the_order_of_indices(algorithm, tmp_path):
    """A checkpoint of a channels_last model loads into a contiguous one."""

    def body(comm):
        def made(module):
            optimizer = OPTIMIZERS["sgd"](list(module.parameters()))
            return module, optimizer, DistributedDataParallel(module, optimizer, algorithm, comm=comm)

        module, optimizer, ddp = made(Parts("channels_last", "transposed"))
        steps(ddp, optimizer, [comm.rank, 7 + comm.rank, 14 + comm.rank])
        saved = ddp.engine.state_tensors()["tensors"]
        with Checkpoints(tmp_path, comm) as checkpoints:
            checkpoints.save(3, wait=True, model=ddp, optimizer=optimizer)
            ddp.close()
            other, other_optimizer, other_ddp = made(contiguous(Parts("channels_last", "transposed")))
            checkpoints.load(model=other_ddp, optimizer=other_optimizer)
        loaded = other_ddp.engine.state_tensors()["tensors"]
        for name, entry in saved.items():
            for path, value in entry.items():
                assert not isinstance(value, torch.Tensor) or torch.equal(value, loaded[name][path])
        piece = other_ddp.engine.plan.cut([b.flat for b in other_ddp.engine.buckets])["parts.0"]
        if algorithm.payload == "weight":
            assert torch.equal(torch.from_numpy(piece), module.parts[0])
        assert torch.equal(weights(module), weights(other))
        other_ddp.close()

    run_ranks(2, body)


def test_a_borrowed_momentum_lies_as_its_parameter():
    def body(comm):
        results = []
        for change in (lambda module: module, contiguous):
            for fusing in (False, True):
                module = change(Parts("channels_last", "transposed"))
                optimizer = QAdamOptimizer(list(module.parameters()), lr=0.05, warmup_steps=2)
                optimizer = fuse(optimizer) if fusing else optimizer
                ddp = DistributedDataParallel(module, optimizer, QAdam(2, average=EXACT.average), comm=comm)
                steps(ddp, optimizer, [seed + comm.rank for seed in range(5)])
                ddp.close()
                results.append(weights(module))
        for result in results[1:]:
            torch.testing.assert_close(result, results[0])

    run_ranks(2, body)


# Complex numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [QUANTIZED, WEIGHTS, DiLoCo(), LowPrecisionDecentralized()], ids=str)
def test_algorithms_without_an_exact_mean_refuse_complex_parameters_by_name(algorithm):
    def body(comm):
        module = Parts("contiguous", "complex64")
        optimizer = OPTIMIZERS["sgd"](list(module.parameters()))
        with pytest.raises(UnsupportedError, match=r"'parts.1'.*complex64"):
            DistributedDataParallel(module, optimizer, algorithm, comm=comm)

    run_ranks(2, body)


@pytest.mark.parametrize("saved_in", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("loaded_in", [torch.channels_last, torch.contiguous_format], ids=str)
def test_a_residual_of_a_whole_bucket_loads_only_into_the_same_memory_format(saved_in, loaded_in):
    algorithm = GradientAllReduce(Hierarchical(ErrorFeedback()))

    def wrapped_in(comm, memory_format):
        model = filled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
        model = model.to(memory_format=memory_format)
        return DistributedDataParallel(model, algorithm=algorithm, comm=comm)

    def body(comm):
        ddp = wrapped_in(comm, saved_in)
        ddp(torch.ones(2, 3, 3, 3) * (comm.rank + 1)).square().sum().backward()
        saved = copy.deepcopy(ddp.state_dict())
        ddp.replan(bucket_bytes=ddp.bucket_bytes)
        ddp.close()
        other = wrapped_in(comm, loaded_in)
        if loaded_in == saved_in:
            other.load_state_dict(saved)
            kept = [state["_extra_state"]["tensors"] for state in (saved, other.state_dict())]
            assert str(kept[0]) == str(kept[1])
        else:
            with pytest.raises(ArrayError, match="belongs to its bucket as a whole"):
                other.load_state_dict(saved)
        other.close()

    run_ranks(4, body, nodes=["a", "a", "b", "b"], timeout_s=10)
