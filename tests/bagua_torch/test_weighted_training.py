"""Ranks with unequal numbers of tokens train as one process with all of them."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from bagua_comm import (
    ArrayError,
    ByteGrad,
    DiLoCo,
    ErrorFeedback,
    GradientAllReduce,
    Quantized,
    Reproducible,
)
from bagua_comm.testing import run_ranks
from bagua_torch import Checkpoints, DistributedDataParallel

TOKENS = [1, 7, 0, 513]

with torch.random.fork_rng():
    torch.manual_seed(0)
    AT_FIRST = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 4))


def data(source, count, step=0):
    random = torch.Generator().manual_seed(100 * step + source)
    return torch.randn(count, 10, generator=random), torch.randint(4, (count,), generator=random)


def gradients(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def one_process(counts, step=0):
    """The gradient of one process with the joined batch."""
    model = copy.deepcopy(AT_FIRST).double()
    inputs, labels = map(torch.cat, zip(*(data(r, n, step) for r, n in enumerate(counts)), strict=True))
    cross_entropy(model(inputs.double()), labels).backward()
    return gradients(model)


def wrapped(comm, algorithm=None, **settings):
    model = copy.deepcopy(AT_FIRST)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return DistributedDataParallel(model, [optimizer], algorithm, comm=comm, **settings), optimizer


def nan_if_empty(ddp, count, step):
    """The loss of a user: the mean over this rank's tokens, which is NaN where there are none. Collective."""
    inputs, labels = data(ddp.comm.rank, count, step)
    return cross_entropy(ddp(inputs), labels)


ALGORITHMS = {
    GradientAllReduce(): 1e-6,
    GradientAllReduce(Reproducible()): 1e-6,
    ByteGrad(): 0.02,
    GradientAllReduce(ErrorFeedback(Quantized(min_bytes=0))): 0.05,
}


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("algorithm", "empty"), [*((each, "nan") for each in ALGORITHMS), (GradientAllReduce(), "none")], ids=str
)
def test_gradients_are_those_of_one_process_with_the_joined_batch(algorithm, empty):
    def body(comm):
        ddp, optimizer = wrapped(comm, algorithm)
        found = []
        for step in range(2):
            count = (TOKENS if step else TOKENS[::-1])[comm.rank]
            optimizer.zero_grad()
            ddp.weight = count
            if count == 0 and empty == "none":
                ddp.expect_backward()
                ddp.end_backward()
            else:
                nan_if_empty(ddp, count, step).backward()
            found.append(gradients(ddp.module).double())
            assert ddp.weight == count
            for p in ddp.module.parameters():
                p.grad.zero_()
            optimizer.step()
            assert ddp.weight is None
        ddp.close()
        return found

    for found in run_ranks(4, body, nodes=["a", "a", "a", "b"]):
        for step, gradient in enumerate(found):
            expected = one_process(TOKENS if step else TOKENS[::-1], step)
            assert (gradient - expected).norm() <= ALGORITHMS[algorithm] * expected.norm()


@pytest.mark.parametrize("averages", ["last", "each"])
def test_accumulated_gradients_have_the_weight_of_the_whole_step(averages):
    counts = [[3, 5], [40, 1]]

    def body(comm):
        ddp, _ = wrapped(comm)
        mine, total = counts[comm.rank], sum(counts[comm.rank])
        ddp.weight = total
        with ddp.no_sync() if averages == "last" else nullcontext():
            (nan_if_empty(ddp, mine[0], 0) * mine[0] / total).backward()
        (nan_if_empty(ddp, mine[1], 1) * mine[1] / total).backward()
        ddp.close()
        return gradients(ddp.module)

    (found, _) = run_ranks(2, body)
    parts = [(sum(column), one_process(column, step)) for step, column in enumerate(zip(*counts, strict=True))]
    expected = sum(count * gradient for count, gradient in parts) / sum(count for count, _ in parts)
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_microbatches_of_unequal_tokens_give_the_same_bits_on_any_number_of_ranks():
    tokens = [9, 1, 0, 33]

    def body(comm):
        ddp, optimizer = wrapped(comm, GradientAllReduce(Reproducible(addends=4)))
        for step in range(2):
            optimizer.zero_grad()
            for i in ddp.microbatches():
                inputs, labels = data(i, tokens[i], step)
                ddp.weight = tokens[i]
                cross_entropy(ddp(inputs), labels).backward()
            if step == 0:
                first = gradients(ddp.module)
            optimizer.step()
        ddp.close()
        return first, torch.cat([p.detach().flatten() for p in ddp.module.parameters()])

    found = [each for ranks in (1, 2, 4) for each in run_ranks(ranks, body)]
    assert all(torch.equal(each[1], found[0][1]) for each in found)
    assert torch.allclose(found[0][0].double(), one_process(tokens), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "batches", [[[5, 2, 30], [4], [7, 1]], [[5, 2, 30], [], [7, 1]]], ids=["end", "never_begin"]
)
def test_ranks_that_have_ended_in_join_have_weight_zero(batches):
    def body(comm, join, divide=True):
        ddp, optimizer = wrapped(comm)
        mine = batches[comm.rank]
        with ddp.join(enable=join, divide_by_initial_size=divide):
            for step in range(len(mine) if join else 3):
                optimizer.zero_grad()
                if step < len(mine):
                    ddp.weight = mine[step]
                    nan_if_empty(ddp, mine[step], step).backward()
                else:
                    ddp.weight = 0
                    ddp.expect_backward()
                optimizer.step()
        ddp.close()
        return torch.cat([p.detach().flatten() for p in ddp.module.parameters()])

    expected = run_ranks(3, lambda comm: body(comm, join=False))
    for divide in (True, False):
        joined = run_ranks(3, lambda comm, divide=divide: body(comm, join=True, divide=divide))
        assert all(torch.equal(each, expected[0]) for each in (*joined, *expected))


def skipping_steps(comm, algorithm, counts, *, way, skipped, optimizers=True):
    """Steps with the weights `counts`, of which some are not made; the gradients of each. Collective."""
    ddp, optimizer = wrapped(comm, algorithm)
    if not optimizers:
        ddp.close()
        ddp = DistributedDataParallel(ddp.module, algorithm=algorithm, comm=comm)
    scaler, found = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "scaler"), []
    for step, mine in enumerate(counts):
        if way != "late":
            optimizer.zero_grad(set_to_none=way != "in_place")
        if mine is not None:
            ddp.weight = mine
        loss = nan_if_empty(ddp, 5 if mine is None else mine, step)
        if way == "late":
            optimizer.zero_grad()
        overflow = float("inf") if way == "scaler" and step in skipped else 1.0
        scaler.scale(loss * overflow).backward()
        found.append(gradients(ddp.module) / scaler.get_scale())
        if way == "scaler" or step not in skipped:
            scaler.step(optimizer)
            scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        ddp.eval()(torch.zeros(1, 10))  # ends a step that was not made, and writes back what was exchanged
    parameters = torch.cat([p.detach().flatten() for p in ddp.module.parameters()])
    ddp.close()
    return found, parameters


WAYS = ["scaler", "left_out", "in_place", "late"]


@pytest.mark.parametrize(
    ("way", "optimizers"), [*((way, True) for way in WAYS), ("in_place", False), ("late", False)]
)
def test_after_a_step_that_is_not_made_another_has_its_own_weight(way, optimizers):
    counts = [[3, 1, 2], [4, 9, 7]]

    def body(comm, mine):
        return skipping_steps(comm, None, mine, way=way, skipped={0}, optimizers=optimizers)

    for found, _ in run_ranks(2, lambda comm: body(comm, counts[comm.rank])):
        expected = one_process([1, 9], 1)
        assert (found[1].double() - expected).norm() <= 1e-5 * expected.norm()

    def raises(comm):
        with pytest.raises(ArrayError, match="weight: rank 1 has none, and other ranks have one"):
            body(comm, counts[comm.rank] if comm.rank == 0 else [4, None, 7])

    run_ranks(2, raises)
    with pytest.warns(UserWarning, match="weight: no rank has set one"):
        run_ranks(2, lambda comm: body(comm, [3 + comm.rank, None, 7]))


@pytest.mark.parametrize(("way", "step"), [*zip(WAYS, [0, 1, 0, 1], strict=True)])
def test_a_step_that_one_rank_does_not_make_counts_nothing_in_its_outer_step(way, step):
    counts = [[4, 6], [5, 50]]

    def body(comm, local_steps):
        algorithm = DiLoCo(local_steps, outer_lr=1, outer_momentum=0)
        return skipping_steps(comm, algorithm, counts[comm.rank], way=way, skipped={step} if comm.rank else ())[1]

    local, averaged = (run_ranks(2, lambda comm, n=n: body(comm, n)) for n in (3, 2))
    own = counts[1][1 - step]
    for each in averaged:
        torch.testing.assert_close(each, (10 * local[0] + own * local[1]) / (10 + own))


def test_the_weight_of_the_next_step_is_kept_by_switch_and_one_of_a_lost_step_is_not():
    def body(comm):
        ddp, optimizer = wrapped(comm, ByteGrad())
        ddp.weight = [5, 9][comm.rank]
        ddp.switch(GradientAllReduce())
        nan_if_empty(ddp, [5, 9][comm.rank], 0).backward()
        found, saved = gradients(ddp.module), copy.deepcopy(ddp.state_dict())
        optimizer.step()
        ddp.weight = 3
        loss = nan_if_empty(ddp, 4, 0)
        ddp.module[0].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        ddp.load_state_dict(saved)
        ddp.weight = 4
        ddp.close()
        return found

    for found in run_ranks(2, body):
        assert torch.allclose(found.double(), one_process([5, 9]), rtol=1e-5, atol=1e-7)


def set_within(comm):
    ddp, _ = wrapped(comm)
    ddp.module[2].bias.register_hook(lambda _: setattr(ddp, "weight", 4))
    nan_if_empty(ddp, 2, 0).backward()


def set_to_several(comm):
    ddp, _ = wrapped(comm)
    loss = nan_if_empty(ddp, 2, 0)
    ddp.weight = torch.tensor([3.0, 4.0]) if comm.rank else 3
    loss.backward()


def set_after(comm):
    ddp, optimizer = wrapped(comm)
    nan_if_empty(ddp, 2, 0).backward()
    ddp.weight = 4
    optimizer.step()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (set_within, "weight: the backward pass has begun"),
        (set_after, "weight: it was set after the backward pass"),
        (set_to_several, "weight: rank 1 has set something that is no number"),
    ],
)
def test_a_weight_that_is_late_or_no_number_is_an_error_on_all_ranks(body, text):
    def raises(comm):
        with pytest.raises(ArrayError, match=text):
            body(comm)

    run_ranks(2, raises)


def test_the_backward_pass_hides_the_exchange_of_weights():
    def body(comm):
        ddp, _ = wrapped(comm, bucket_bytes=64)
        ddp.weight = 1 + comm.rank
        nan_if_empty(ddp, 3, 0).backward()
        ddp.close()
        return comm.tracer.spans()

    for spans in run_ranks(2, body):
        (weights,), exchanges, (wait, *_) = (
            [span for span in spans if span.name == name]
            for name in ("weights of ranks", "exchange", "wait for exchanges")
        )
        assert weights.thread != wait.thread  # training goes on beside it
        assert len(exchanges) > 1
        assert weights.end_ns <= min(span.start_ns for span in exchanges)


with torch.random.fork_rng():
    torch.manual_seed(0)
    CONVOLUTION = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 4))
    CONVOLUTION.to(memory_format=torch.channels_last)


def test_weights_since_the_last_outer_step_are_in_checkpoints(tmp_path):
    def train(comm, steps, load=None):
        model = copy.deepcopy(CONVOLUTION)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ddp = DistributedDataParallel(model, [optimizer], DiLoCo(4), comm=comm)
        with Checkpoints(tmp_path, comm) as checkpoints:
            if load is not None:
                checkpoints.load(load, ddp=ddp, optimizer=optimizer)
            for step in steps:
                random = torch.Generator().manual_seed(10 * step + comm.rank)
                optimizer.zero_grad()
                ddp.weight = [1, 7, 0, 513][(comm.rank + step) % 4]
                ddp(torch.randn(2, 2, 3, 3, generator=random)).square().mean().backward()
                optimizer.step()
            checkpoints.save(steps[-1] + 1, ddp=ddp, optimizer=optimizer, wait=True)
        ddp.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    expected = run_ranks(2, lambda comm: train(comm, range(8)))
    run_ranks(2, lambda comm: train(comm, range(3)))
    found = run_ranks(2, lambda comm: train(comm, range(3, 8), load=3))
    assert all(map(torch.equal, found, expected))


TEXT = "".join(nn.Transformer.__doc__.split()) + nn.Module.__doc__
LETTERS = sorted(set(TEXT))


class Characters(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(len(LETTERS), 16), nn.Embedding(96, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, len(LETTERS))

    def forward(self, packed):
        """The sum of the losses of all characters of some sequences."""
        total = torch.zeros(())
        for sequence in packed:
            x = (self.embed(sequence[:-1]) + self.place(torch.arange(len(sequence) - 1)))[None]
            hidden = self.layer(
                x, src_mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True
            )
            total = total + cross_entropy(self.head(hidden)[0], sequence[1:], reduction="sum")
        return total


def packed(seed, step, rank):
    """Sequences of one rank and step: few and short ones, or many and long ones, of other parts of the text."""
    random = torch.Generator().manual_seed(1000 * seed + 10 * step + rank)
    longest, count = (6, 12, 40, 90)[rank], 1 + rank % 2
    starts = torch.randint(700 * rank, 700 * (rank + 1) - 100, (count,), generator=random).tolist()
    lengths = torch.randint(longest // 2, longest, (count,), generator=random).tolist()
    texts = [TEXT[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    return [torch.tensor([LETTERS.index(letter) for letter in text]) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_character_transformer_ends_at_the_loss_of_one_process(seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        at_first, steps = Characters(), 12

    def evaluate(model):
        with torch.no_grad():
            everything = [each for step in range(5) for rank in range(4) for each in packed(seed, step, rank)]
            return float(model(everything) / sum(len(each) - 1 for each in everything))

    def trained(comm, weighted):
        model = copy.deepcopy(at_first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        ddp = DistributedDataParallel(model, [optimizer], comm=comm)
        for step in range(steps):
            sequences = packed(seed, step, comm.rank)
            tokens = sum(len(each) - 1 for each in sequences)
            optimizer.zero_grad()
            if weighted:
                ddp.weight = tokens
            (ddp(sequences) / tokens).backward()
            optimizer.step()
        ddp.close()
        return evaluate(model)

    model = copy.deepcopy(at_first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        joined = [each for rank in range(4) for each in packed(seed, step, rank)]
        optimizer.zero_grad()
        (model(joined) / sum(len(each) - 1 for each in joined)).backward()
        optimizer.step()
    expected = evaluate(model)
    weighted, plain = (run_ranks(4, lambda comm, w=w: trained(comm, w))[0] for w in (True, False))
    assert abs(weighted - expected) < 1e-4
    assert abs(plain - expected) > 20 * abs(weighted - expected) + 0.02
