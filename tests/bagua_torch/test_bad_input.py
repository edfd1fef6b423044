"""Wrong arguments are refused on every rank before the first step; values that are not finite stay visible."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from support.torch_training import (
    GRADIENT_ALGORITHMS,
    QADAM,
    WEIGHT_ALGORITHMS,
    assert_same_on_all_ranks,
    batch,
    filled,
    final_weights,
    gradients,
    loss_of,
    make_model,
    optimizer_for,
    sgd,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn

from bagua_comm import (
    ArrayError,
    AsyncModelAverage,
    ByteGrad,
    CommMismatch,
    Decentralized,
    DiLoCo,
    GradientAllReduce,
    QAdam,
    StreamingDiLoCo,
    UnsupportedError,
    after,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, QAdamOptimizer, comm_hook


def adam(model, rank):
    return torch.optim.Adam(model.parameters())


def none(model, rank):
    return ()


def qadam(**settings):
    return lambda model, rank: QAdamOptimizer(model.parameters(), **settings)


def in_groups(model, rank):
    return sgd([{"params": [p]} for p in model.parameters()] if rank else model.parameters())


SHIFT_ONE = Decentralized("shift_one")
WITHOUT_LAST = lambda model, rank: sgd(list(model.parameters())[:-1])  # noqa: E731
REFUSALS = [
    # optimizers of a rank, algorithm (or one for each rank), error, words
    (none, Decentralized(), ArrayError, "give the optimizers"),
    (none, AsyncModelAverage(warmup_steps=5), ArrayError, "give the optimizers"),
    (none, after(2, GradientAllReduce(), ByteGrad()), ArrayError, "give the optimizers"),
    (none, every(2, GradientAllReduce()), ArrayError, "give the optimizers"),
    (none, QADAM, ArrayError, r"bagua_torch\.QAdamOptimizer"),
    (adam, QADAM, ArrayError, "bagua_torch.QAdamOptimizer, but the optimizer is Adam"),
    (adam, after(5, GradientAllReduce(), QADAM), ArrayError, "the optimizer is Adam"),
    (qadam(warmup_steps=4), QADAM, ArrayError, r"warmup_steps=4 and betas\[0\]=0.9, but QAdam\(.* has 3 and 0.9"),
    (qadam(warmup_steps=3, betas=(0.8, 0.999)), QADAM, ArrayError, r"betas\[0\]=0.8, but QAdam\(.* 0.9"),
    (lambda model, rank: adam(make_model(), rank), GradientAllReduce(), ArrayError, "optimizer 0 .* has none"),
    (WITHOUT_LAST, GradientAllReduce(), ArrayError, "no optimizer .* '4.bias'"),
    (WITHOUT_LAST, DiLoCo(), ArrayError, "no optimizer .* '4.bias'"),
    (adam, "bytegrad", ArrayError, "expected an algorithm"),
    (adam, QAdam, ArrayError, "expected an algorithm"),
    (adam, 3, ArrayError, "expected an algorithm"),
    (lambda model, rank: [sgd, torch.optim.Adam][rank](model.parameters()), None, CommMismatch, "different"),
    (lambda model, rank: [] if rank else sgd(model.parameters()), None, CommMismatch, "is 1 on rank 0, and 0"),
    (in_groups, None, CommMismatch, "different"),
    (adam, [ByteGrad(), GradientAllReduce()], CommMismatch, "different algorithms"),
    (adam, [DiLoCo(2), DiLoCo(3)], CommMismatch, "different algorithms"),
]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: f"{row[1]!r}, {row[3]}")
def test_optimizers_and_algorithms_that_do_not_fit_are_refused_on_every_rank(row):
    refused(*row)


def refused(make_optimizers, algorithm, error, match, *, ranks=2):
    """Wrapping raises on every rank, and the communicator can still be used."""

    def body(comm):
        model = make_model()
        before = weights(model)
        mine = algorithm[comm.rank] if isinstance(algorithm, list) else algorithm
        with pytest.raises(error, match=match):
            DistributedDataParallel(model, make_optimizers(model, comm.rank), mine, comm=comm)
        assert torch.equal(weights(model), before)
        model(torch.ones(2, 4)).sum().backward()  # trains by itself: no hooks are left
        assert comm.allreduce(np.array(1)) == comm.size

    run_ranks(ranks, body, timeout_s=3)


# Algorithm and optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "algorithm"),
    [
        *((ranks, algorithm) for algorithm in (SHIFT_ONE, every(2, SHIFT_ONE)) for ranks in (1, 3)),
        (3, after(2, GradientAllReduce(), SHIFT_ONE)),  # before the steps that come first
    ],
    ids=repr,
)
def test_shift_one_on_an_odd_number_of_ranks(ranks, algorithm):
    refused(adam, algorithm, ArrayError, "even number", ranks=ranks)


def test_frozen_parameters_need_no_optimizer():
    def body(comm):
        model = make_model()
        model[4].requires_grad_(False)
        frozen = weights(model[4])
        optimizer = sgd([p for p in model.parameters() if p.requires_grad])
        ddp = DistributedDataParallel(model, optimizer, DiLoCo(local_steps=2), comm=comm)
        train(comm, ddp, optimizer, range(4))
        ddp.close()
        assert torch.equal(weights(model[4]), frozen)

    run_ranks(2, body)


# Modules --------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """An embedding with sparse gradients, and a layer with dense ones."""

    def __init__(self, sparse=True):
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=sparse)
        self.layer = nn.Linear(4, 2)
        filled(self)

    def forward(self, words):
        return self.layer(self.table(words).mean(1))


def words(rank, step):
    return torch.randint(0, 10, (3, 2), generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulated", [False, True])
def test_sparse_gradients_are_made_dense_and_averaged(ranks, accumulated):
    plain = Lookup(sparse=False)
    optimizer = sgd(plain.parameters())
    for step in range(5):
        optimizer.zero_grad()
        for part in range(1 + accumulated):
            sum(loss_of(plain, words(rank, step + 50 * part)) / ranks for rank in range(ranks)).backward()
        optimizer.step()

    def body(comm):
        model, optimizer, ddp = wrapped(comm, model=Lookup())
        for step in range(5):
            optimizer.zero_grad()
            if accumulated:
                with ddp.no_sync():
                    loss_of(ddp, words(comm.rank, step + 50)).backward()
            loss_of(ddp, words(comm.rank, step)).backward()
            assert model.table.weight.grad.layout is torch.strided
            optimizer.step()
        return final_weights(ddp)

    for actual in run_ranks(ranks, body):
        torch.testing.assert_close(actual, weights(plain), rtol=1e-4, atol=1e-6)


def test_an_optimizer_that_takes_sparse_gradients_alone_is_refused_where_they_are_made_dense():
    def body(comm):
        model = Lookup()
        rest = [parameter for parameter in model.parameters() if parameter is not model.table.weight]
        optimizers = [torch.optim.SGD(rest, lr=0.1), torch.optim.SparseAdam([model.table.weight])]
        for algorithm in (ByteGrad(), after(1, Decentralized(), ByteGrad())):
            with pytest.raises(UnsupportedError, match=r"optimizer 1 \(SparseAdam\) takes only sparse gradients"):
                DistributedDataParallel(model, optimizers, algorithm, comm=comm)
        ddp = DistributedDataParallel(model, optimizers, Decentralized(), comm=comm)
        ddp(words(comm.rank, 0)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("algorithm", [Decentralized(), DiLoCo(local_steps=2)], ids=repr)
def test_sparse_gradients_stay_sparse_where_weights_are_exchanged(algorithm):
    """They reach the optimizer as they are; the result is that of dense ones."""

    def trained(sparse):
        def body(comm):
            model, optimizer, ddp = wrapped(comm, algorithm, model=Lookup(sparse), lr=0.05)
            for step in range(5):
                train_step(ddp, optimizer, words(comm.rank, step))
                assert model.table.weight.grad.is_sparse == sparse
            return final_weights(ddp)

        return run_ranks(2, body)

    for actual, expected in zip(trained(sparse=True), trained(sparse=False), strict=True):
        torch.testing.assert_close(actual, expected)


class Shapes(nn.Module):
    """Parameters that are empty, transposed, of no dimension, and in another memory format."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0))
        self.transposed = nn.Parameter(torch.empty(3, 4).t())
        self.scalar = nn.Parameter(torch.tensor(0.0))
        self.images = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        filled(self)

    def forward(self, x):
        seen = self.images(x.new_ones(1, 2, 4, 4)).mean()
        return (x @ self.transposed) * self.scalar + self.empty.sum() + seen


@pytest.mark.algorithms("sample")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("algorithm", [*GRADIENT_ALGORITHMS, QADAM, *WEIGHT_ALGORITHMS], ids=repr)
def test_unusual_shapes_and_layouts(algorithm):
    plain = Shapes()
    optimizer = optimizer_for(algorithm, plain.parameters())
    for step in range(5):
        train_step(plain, optimizer, batch(0, step))

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm, model=Shapes())
        for step in range(5):
            train_step(ddp, optimizer, batch(0, step))
        ddp.switch(GradientAllReduce())
        assert_same_on_all_ranks(comm, model)
        return final_weights(ddp)

    for actual in run_ranks(2, body):
        if not isinstance(algorithm, (DiLoCo, StreamingDiLoCo)):  # which makes separate outer steps
            torch.testing.assert_close(actual, weights(plain), rtol=0.1, atol=0.02)


# Values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [*GRADIENT_ALGORITHMS, QADAM], ids=repr)
@pytest.mark.parametrize(("value", "step_of_it"), [(float("nan"), 0), (float("inf"), 4)])
def test_gradients_that_are_not_finite_are_seen_on_every_rank(algorithm, value, step_of_it):
    """Quantized as well: no code hides them. With QAdam past its warm-up they are in the momentum instead."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        for step in range(step_of_it + 1):
            optimizer.zero_grad()
            factor = value if step == step_of_it and comm.rank == 1 else 1.0
            (loss_of(ddp, batch(comm.rank, step)) * factor).backward()
            seen = gradients(model).isfinite()
            before = weights(model)
            optimizer.step()
        ddp.close()
        assert before.isfinite().all()
        return bool(seen.all()), bool(weights(model).isfinite().any())

    for rank, (gradients_finite, any_weight_finite) in enumerate(run_ranks(2, body)):
        local = algorithm is QADAM and step_of_it >= algorithm.warmup_steps
        assert gradients_finite == (local and rank == 0)
        assert not any_weight_finite


@pytest.mark.parametrize("average", ["mean", None, ByteGrad()], ids=repr)
def test_a_hook_with_an_object_that_is_no_average(average):
    def body(comm):
        with pytest.raises(ArrayError, match="expected an Average"):
            comm_hook(average, comm)

    run_ranks(1, body)


def test_without_pytorch_the_import_error_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import bagua_torch"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: bagua_torch needs PyTorch: pip install 'bagua-comm[torch]', or ")
