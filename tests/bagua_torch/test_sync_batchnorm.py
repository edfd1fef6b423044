"""SyncBatchNorm on threads as ranks, beside PyTorch's BatchNorm on the concatenated batch."""

import copy
import pickle

import pytest
import torch
from support.torch_training import filled
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_comm import ArrayError, CommError, CommMismatch, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, SyncBatchNorm
from bagua_torch.errors import MisuseError
from bagua_torch.sync_batchnorm import convert, revert

PLAIN = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
CHANNELS = 3


def numbers(*shape, seed=0, dtype=torch.float64):
    return (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype) * 3 + 5
    )


def inputs(sizes, rest, dtype=torch.float64, seed=0):
    """The batches of all ranks, and the weights of the loss."""
    whole = numbers(sum(sizes), CHANNELS, *rest, seed=seed, dtype=dtype)
    of_loss = numbers(*whole.shape, seed=seed + 100, dtype=dtype)
    return whole, of_loss, list(whole.split(sizes)), list(of_loss.split(sizes))


def passed(layer, x, of_loss):
    """Output and gradient of the input after one pass each way."""
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = layer(x)
    (y * of_loss).sum().backward()
    return y.detach(), x.grad


def statistics(layer):
    return {name: value.clone() for name, value in layer.state_dict().items()}


@pytest.mark.covering(1)
@pytest.mark.parametrize("sizes", [[4, 4], [1, 6], [5, 0], [3, 0, 2], [1, 1, 1]], ids=str)
@pytest.mark.parametrize("rest", [(), (5,), (2, 3), (2, 1, 3)], ids=str)
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.7}],
    ids=str,
)
def test_it_is_batchnorm_of_the_concatenated_batch(sizes, rest, settings):
    plain = filled(PLAIN[2 + len(rest)](CHANNELS, dtype=torch.float64, **settings))
    steps = [inputs(sizes, rest, seed=seed) for seed in range(3)]

    def body(comm):
        layer = filled(SyncBatchNorm(CHANNELS, dtype=torch.float64, comm=comm, **settings))
        out = [passed(layer, xs[comm.rank], losses[comm.rank]) for _, _, xs, losses in steps]
        gradients = [p.grad for p in layer.parameters()]
        layer.eval()
        return out, gradients, statistics(layer), layer(steps[0][0])

    ranks = run_ranks(len(sizes), body)
    for step, (whole, of_loss, _, _) in enumerate(steps):
        y, dx = passed(plain, whole, of_loss)
        torch.testing.assert_close(torch.cat([out[step][0] for out, *_ in ranks]), y, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(torch.cat([out[step][1] for out, *_ in ranks]), dx, rtol=1e-9, atol=1e-10)
    for number, p in enumerate(plain.parameters()):  # each rank has its own share, which averages would scale
        total = sum(gradients[number] for _, gradients, *_ in ranks)
        torch.testing.assert_close(total, p.grad, rtol=1e-10, atol=1e-10)
    plain.eval()
    for _, _, state, evaluated in ranks:
        torch.testing.assert_close(state, statistics(plain), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(evaluated, plain(steps[0][0]), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_inputs_of_less_precision_keep_their_dtype(dtype):
    whole, of_loss, xs, losses = inputs([3, 5], (4,), dtype)
    y, dx = passed(nn.BatchNorm1d(CHANNELS, dtype=torch.float64), whole.double(), of_loss.double())
    eps = torch.finfo(dtype).eps

    def body(comm):
        return passed(SyncBatchNorm(CHANNELS, comm=comm), xs[comm.rank], losses[comm.rank])

    ranks = run_ranks(2, body)
    for number, wanted in enumerate((y, dx)):
        actual = torch.cat([out[number] for out in ranks])
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), wanted, rtol=4 * eps, atol=32 * eps)


def test_large_means_lose_nothing():
    """The sum of squares would: 1e4 squared leaves no bits of float32 for a deviation of 0.01."""
    whole = (numbers(64, CHANNELS, seed=1) * 0.01 + 1e4).float()
    wanted = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)(whole.double())

    def body(comm):
        return SyncBatchNorm(CHANNELS, comm=comm)(whole.split([20, 44])[comm.rank]).detach()

    actual = torch.cat(run_ranks(2, body))
    torch.testing.assert_close(actual.double(), wanted.detach(), rtol=0.05, atol=0.15)  # eps matters, 1e-5


def test_its_gradients_are_differences_of_the_loss_of_all_ranks():
    """Central differences in float64, for each element of each rank's input."""
    sizes, h = [2, 3], 1e-5
    whole, of_loss, _, _ = inputs(sizes, (2,))

    def losses(comm, layer, xs):
        y = layer(xs.split(sizes)[comm.rank])
        own = (y * y * of_loss.split(sizes)[comm.rank]).sum()
        return own, sum(comm.allgather_object(own.item()))

    def body(comm):
        layer = filled(SyncBatchNorm(CHANNELS, dtype=torch.float64, comm=comm))
        x = whole.clone().requires_grad_()
        own, _ = losses(comm, layer, x)
        own.backward()
        differences = torch.zeros_like(whole)
        for i in range(whole.numel()):
            step = torch.zeros_like(whole)
            step.view(-1)[i] = h
            with torch.no_grad():
                more, less = losses(comm, layer, whole + step)[1], losses(comm, layer, whole - step)[1]
            differences.view(-1)[i] = (more - less) / (2 * h)
        return x.grad, differences

    ranks = run_ranks(2, body)
    torch.testing.assert_close(sum(grad for grad, _ in ranks), ranks[0][1], rtol=1e-6, atol=1e-5)


def test_all_ranks_get_the_same_bytes_for_their_statistics():
    _, _, xs, losses = inputs([2, 7, 3], (), torch.float32)

    def body(comm):
        layer = SyncBatchNorm(CHANNELS, comm=comm)
        passed(layer, xs[comm.rank], losses[comm.rank])
        return layer.running_mean.numpy().tobytes() + layer.running_var.numpy().tobytes()

    assert len(set(run_ranks(3, body))) == 1


def test_a_group_is_normalized_by_itself():
    _, _, xs, losses = inputs([2, 3, 4], ())

    def body(comm):
        group = comm.split(0 if comm.rank < 2 else 1)
        layer = SyncBatchNorm(CHANNELS, dtype=torch.float64, comm=group)
        return passed(layer, xs[comm.rank], losses[comm.rank])

    ranks = run_ranks(3, body)
    for mine in (slice(0, 2), slice(2, 3)):
        y, dx = passed(
            nn.BatchNorm1d(CHANNELS, dtype=torch.float64), torch.cat(xs[mine]), torch.cat(losses[mine])
        )
        torch.testing.assert_close(torch.cat([out[0] for out in ranks[mine]]), y)
        torch.testing.assert_close(torch.cat([out[1] for out in ranks[mine]]), dx)


def test_channels_last_stays_channels_last():
    whole, of_loss, xs, losses = inputs([2, 3], (4, 5))
    y, dx = passed(nn.BatchNorm2d(CHANNELS, dtype=torch.float64), whole, of_loss)

    def body(comm):
        x = xs[comm.rank].contiguous(memory_format=torch.channels_last)
        out = passed(SyncBatchNorm(CHANNELS, dtype=torch.float64, comm=comm), x, losses[comm.rank])
        return *out, all(t.is_contiguous(memory_format=torch.channels_last) for t in out)

    ranks = run_ranks(2, body)
    torch.testing.assert_close(torch.cat([out[0] for out in ranks]), y)
    torch.testing.assert_close(torch.cat([out[1] for out in ranks]), dx)
    assert [out[2] for out in ranks] == [True, True]


def test_batches_that_are_all_empty_change_nothing():
    def body(comm):
        layer = SyncBatchNorm(CHANNELS, comm=comm)
        y, dx = passed(layer, torch.zeros(0, CHANNELS, 2), torch.zeros(0, CHANNELS, 2))
        assert y.shape == dx.shape == (0, CHANNELS, 2)
        assert torch.equal(layer.weight.grad, torch.zeros(CHANNELS))
        return layer.running_mean.tolist(), layer.running_var.tolist()

    for ranks in (1, 2):
        assert run_ranks(ranks, body) == [([0.0] * CHANNELS, [1.0] * CHANNELS)] * ranks


# Models ----------------------------------------------------------------------------------------------------


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3), nn.BatchNorm1d(3)
    ).double()


def trained(model, optimizer, xs):
    """Train on the sum of squares over the batch, times a share."""
    for x, share in xs:
        optimizer.zero_grad()
        (model(x).sub(1).square().sum() * share).backward()
        optimizer.step()


@pytest.mark.parametrize("recomputed", [False, True], ids=["plain", "checkpoints"])
def test_in_distributed_data_parallel_training_is_that_of_one_process(recomputed):
    sizes, steps = [2, 5, 1], 4
    wholes = [numbers(sum(sizes), 2, 5, 5, seed=seed) / 5 for seed in range(steps)]
    plain = make_model()
    trained(plain, torch.optim.SGD(plain.parameters(), lr=0.02), [(whole, 1 / sum(sizes)) for whole in wholes])

    class Recomputed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if recomputed else self.inner(x)

    models = [make_model() for _ in sizes]

    def body(comm):
        model = convert(models[comm.rank], comm)
        if recomputed:  # the second pass would count in the running statistics, as it does in PyTorch's
            for layer in (model[1], model[5]):
                layer.momentum = 0.0
        ddp = DistributedDataParallel(Recomputed(model), comm=comm, bucket_bytes=200)
        xs = [(whole.split(sizes)[comm.rank], comm.size / sum(sizes)) for whole in wholes]
        trained(ddp, torch.optim.SGD(model.parameters(), lr=0.02), xs)
        ddp.close()
        return revert(model).state_dict()

    for state in run_ranks(len(sizes), body):
        for name, value in plain.state_dict().items():
            if not (recomputed and ("running" in name or "num_batches" in name)):
                torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10)


def test_convert_and_back_keeps_everything():
    model = make_model()
    shared = nn.BatchNorm1d(3).half()
    model.extend([shared, nn.Identity(), shared])
    model[1].weight.requires_grad_(False)
    model[5].eval()
    called = []
    model[5].register_forward_hook(lambda *_: called.append(1))
    before, tensors = str(model), {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}

    def body(comm):
        own = convert(model, comm)
        assert own is model
        assert [type(own[i]) for i in (1, 5, 6)] == [SyncBatchNorm] * 3
        assert own[6] is own[8]
        assert {name: id(t) for name, t in own.state_dict(keep_vars=True).items()} == tensors
        assert (own[1].weight.requires_grad, own[5].training, own[1].training) == (False, False, True)
        assert convert(own, comm)[1] is own[1]
        own[5](torch.ones(1, 3).double())
        back = revert(own)
        assert str(back) == before
        assert {name: id(t) for name, t in back.state_dict(keep_vars=True).items()} == tensors
        assert not any(name in vars(back[1]) for name in ("_ranks", "_plain"))

    run_ranks(1, body)
    assert called == [1]


def test_a_layer_comes_back_as_the_class_that_it_had_or_as_that_for_its_inputs():
    def body(comm):
        layer, made = convert(nn.BatchNorm1d(3), comm), SyncBatchNorm(2, comm=comm)
        theirs = convert(nn.SyncBatchNorm(3), comm)
        theirs(torch.ones(2, 3, 1))
        with pytest.raises(UnsupportedError, match="has seen no input"):
            revert(made)
        made(torch.randn(3, 2, 4, 4))
        assert (type(layer), type(theirs)) == (SyncBatchNorm, SyncBatchNorm)
        return [type(revert(each)) for each in (layer, theirs, made)]

    assert run_ranks(2, body) == [[nn.BatchNorm1d, nn.SyncBatchNorm, nn.BatchNorm2d]] * 2


def test_copies_share_the_ranks_and_a_pickle_has_none():
    def body(comm):
        layer = SyncBatchNorm(CHANNELS, comm=comm)
        x = numbers(2 + comm.rank, CHANNELS, seed=comm.rank).float()
        expected = copy.deepcopy(layer)(x)
        assert torch.equal(layer(x), expected)
        loaded = pickle.loads(pickle.dumps(layer))
        assert "ranks=none" in repr(loaded)
        with pytest.raises(CommError, match="from a pickle, which holds no communicator; give it one with"):
            loaded(x)
        evaluated = loaded.eval()(x)
        assert torch.equal(evaluated, layer.eval()(x))
        return torch.equal(convert(loaded.train(), comm)(x), expected)

    assert run_ranks(2, body) == [True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # threads share what PyTorch hides
def test_compiled_around_it_the_results_are_the_same():
    xs = [numbers(4, 2, 5, 5, seed=rank) for rank in range(2)]

    def body(comm):
        model = convert(copy.deepcopy(models[comm.rank]), comm)
        compiled = torch.compile(model[1], backend="eager") if comm.rank == 0 else model[1]
        y = compiled(model[0](xs[comm.rank]))
        y.square().sum().backward()
        return y.detach(), model[0].weight.grad

    models = [make_model() for _ in xs]
    ranks = run_ranks(2, body)
    plain = make_model()
    y = plain[1](plain[0](torch.cat(xs)))
    y.square().sum().backward()
    torch.testing.assert_close(torch.cat([y for y, _ in ranks]), y.detach())
    torch.testing.assert_close(sum(grad for _, grad in ranks), plain[0].weight.grad, atol=1e-10, rtol=1e-8)


# Mistakes of users -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(2, CHANNELS + 1), r"shape \(2, 4\), expected 2 or 3 or 4 or 5 dimensions, the second of 3"),
        (torch.zeros(CHANNELS), r"shape \(3,\)"),
        (torch.zeros(2, CHANNELS, dtype=torch.int64), "int64, expected floating-point"),
    ],
    ids=["channels", "dimensions", "dtype"],
)
def test_an_input_that_does_not_fit_is_refused_on_all_ranks(wrong, message):
    def body(comm):
        layer = SyncBatchNorm(CHANNELS, comm=comm)
        text = message if comm.rank == 1 else "rank 1 has an input that does not fit its layer"
        with pytest.raises(ArrayError, match=text):
            layer(wrong if comm.rank == 1 else torch.randn(2, CHANNELS))
        return layer(torch.randn(2, CHANNELS)).shape  # it goes on

    assert run_ranks(3, body) == [(2, CHANNELS)] * 3


def test_dimensions_and_single_values_are_refused_on_all_ranks():
    def body(comm):
        layer = convert(nn.BatchNorm2d(CHANNELS), comm)
        for mode in (True, False):
            with pytest.raises(ValueError, match="expected 4 dimensions"):
                layer.train(mode)(torch.zeros(2, CHANNELS))
        with pytest.raises(ValueError, match="one value per channel"):
            SyncBatchNorm(CHANNELS, comm=comm)(torch.zeros(1 - comm.rank, CHANNELS))

    run_ranks(2, body)


class Mine(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("part", "message"), [(nn.LazyBatchNorm2d(), "is lazy; run"), (Mine(3), "'2', a Mine, is of a subclass")]
)
def test_a_batchnorm_that_convert_would_break_is_named(part, message):
    model = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3), part)

    def body(comm):
        with pytest.raises(UnsupportedError, match=message):
            convert(model, comm)

    run_ranks(1, body)
    assert type(model[1]) is nn.BatchNorm2d


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda layers, rank: layers[rank](torch.ones(2, 3)), "rank 0 calls layer 1 .*, but rank 1 layer 2"),
        (
            lambda layers, rank: layers[0].requires_grad_(False)(torch.ones(2, 3, requires_grad=rank == 1)),
            "rank 1 needs a gradient, but rank 0 does not",
        ),
    ],
    ids=["order", "gradient"],
)
def test_passes_that_differ_raise_on_all_ranks(wrong, message):
    def body(comm):
        layers = [SyncBatchNorm(3, comm=comm) for _ in range(2)]
        with pytest.raises(CommMismatch, match=message):
            wrong(layers, comm.rank)

    run_ranks(2, body)


def test_a_rank_that_skips_a_pass_is_named():
    def body(comm):
        layer = SyncBatchNorm(CHANNELS, comm=comm)
        if comm.rank == 0:
            with pytest.raises(CommError, match=r"rank 1|gave up"):
                layer(torch.randn(2, CHANNELS))

    run_ranks(2, body, timeout_s=1)


def test_pytorchs_own_layer_is_refused_where_each_rank_would_normalize_alone():
    """It falls back to the batch of its rank, without a word, where there is no process group."""

    def body(comm):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if comm.size > 1:
            with pytest.raises(MisuseError, match=r"1 is a torch\.nn\.SyncBatchNorm.*sync_batchnorm\.convert\("):
                DistributedDataParallel(model, comm=comm)
        DistributedDataParallel(convert(model, comm), comm=comm).close()

    run_ranks(2, body)
    run_ranks(1, body)
