"""Fused optimizers beside plain ones: the same bytes, whatever happens in between."""

import copy
import itertools
import pickle

import pytest
import torch
from support.torch_training import batch, loss_of, make_model, optimizer_for, through_a_file, train_step, weights
from torch import nn

from bagua_comm import ArrayError, ByteGrad, GradientAllReduce, LowPrecisionDecentralized, QAdam, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, QAdamOptimizer, fuse

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, foreach=False),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=False),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, maximize=True, weight_decay=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, foreach=False),
    "qadam": lambda p: QAdamOptimizer(p, lr=0.01, warmup_steps=3, weight_decay=0.1),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
BY_DEFAULT = ("nesterov", "amsgrad", "qadam")
some_optimizers = pytest.mark.parametrize(
    "make", [pytest.param(MAKERS[n], id=n, marks=() if n in BY_DEFAULT else pytest.mark.slow) for n in MAKERS]
)


def parameters(count=30, dtype=torch.float32, seed=0):
    """Small tensors of many shapes, one of them channels_last, one empty and some without dimensions."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 7), (5,), (), (1, 4, 1), (2, 3, 2, 2), (1,)]
    made = [torch.randn(shapes[i % 6], generator=generator).to(dtype) for i in range(count)]
    made[4] = made[4].contiguous(memory_format=torch.channels_last)
    return [nn.Parameter(p) for p in [*made, torch.zeros(0, 3, dtype=dtype)]]


def give_gradients(ps, step, missing=()):
    """Accumulate a gradient into each parameter, as a backward pass does; none for those that are missing."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(ps):
        g = torch.randn(p.shape, generator=generator).to(p.dtype)
        if i not in missing:
            p.grad = torch.empty_like(p).copy_(g) if p.grad is None else p.grad.add_(g)


def same_bytes(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return a == b


def assert_same(plain, fused, step=""):
    """Parameters and state dicts are equal to the bit."""
    mine, theirs = fused.state_dict(), plain.state_dict()
    assert mine["param_groups"] == theirs["param_groups"], step
    assert mine["state"].keys() == theirs["state"].keys(), step
    for number, entry in theirs["state"].items():
        assert mine["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert same_bytes(mine["state"][number][key], value), (step, number, key)
    for group, other in zip(plain.param_groups, fused.param_groups, strict=True):
        for i, (p, q) in enumerate(zip(group["params"], other["params"], strict=True)):
            assert torch.equal(p.detach(), q.detach()), (step, i)


def both(make, **settings):
    ps, qs = parameters(**settings), parameters(**settings)
    return (ps, make(ps)), (qs, fuse(make(qs)))


def advance(pairs, steps, *, missing=lambda step: (), zero=lambda step: True):
    for step in steps:
        for ps, optimizer in pairs:
            optimizer.zero_grad(set_to_none=zero(step))
            give_gradients(ps, step, missing(step))
            optimizer.step()
        assert_same(pairs[0][1], pairs[1][1], step)


# Bytes ------------------------------------------------------------------------------------------------------


@every_optimizer
def test_fused_it_is_the_plain_one_to_the_bit(make):
    pairs = both(make)
    advance(pairs, range(5), zero=lambda step: step % 3 == 0)
    fused = pairs[1][1]
    assert isinstance(fused, type(pairs[0][1]))
    assert fused.units == 2  # one for the empty parameter


@some_optimizers
def test_a_parameter_without_a_gradient_is_skipped_as_always(make):
    pairs = both(make)
    advance(pairs, range(8), missing=lambda step: {0: (2,), 3: (4, 5, 9), 4: (5,), 6: range(100)}.get(step, ()))


@pytest.mark.parametrize("make", [MAKERS["adam"], MAKERS["sgd"]], ids=["adam", "sgd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes_are_equal_or_refused(make, dtype):
    ps = parameters(dtype=dtype)
    if dtype is torch.bfloat16 and make is MAKERS["sgd"]:
        with pytest.raises(UnsupportedError, match=r"in torch.bfloat16, SGD .* rounds .* give exact=False"):
            fuse(make(ps))
        fused = fuse(make(ps), exact=False)
        plain = copy.deepcopy(ps)
        optimizer = make(plain)
        for p in (ps, plain):
            give_gradients(p, 0)
        fused.step()
        optimizer.step()
        for p, q in zip(plain, ps, strict=True):
            torch.testing.assert_close(p, q)
    else:
        advance(both(make, dtype=dtype), range(4))


def test_groups_schedules_and_a_group_added_later():
    def make(ps):
        half = len(ps) // 2
        ps[0].data = ps[0].data.double()
        return torch.optim.AdamW([{"params": ps[:half], "lr": 0.1}, {"params": ps[half:], "weight_decay": 0.0}])

    pairs = both(make)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=20) for _, o in pairs]
    for step in range(6):
        advance(pairs, [step])
        for schedule in schedules:
            schedule.step()
    for (ps, optimizer), seed in zip(pairs, (7, 7), strict=True):
        ps += parameters(seed=seed)
        optimizer.add_param_group({"params": ps[31:], "lr": 0.3, "amsgrad": True})
    advance(pairs, range(6, 10))


def test_many_small_tensors_take_one_step():
    ps = [nn.Parameter(torch.ones(3)) for _ in range(200)]
    fused, called = fuse(torch.optim.Adam(ps)), []
    fused.register_step_post_hook(lambda *_: called.append(1))
    give_gradients(ps, 0)
    fused.step()
    assert fused.units == 1
    assert [p.data_ptr() - ps[0].data_ptr() for p in ps] == [12 * i for i in range(len(ps))]
    assert {p.untyped_storage().nbytes() for p in ps} == {12}
    assert len({fused.state[p]["exp_avg"].untyped_storage().data_ptr() for p in ps}) == 1
    assert called == [1]


def test_gradients_that_stay_are_accumulated_where_they_are_stepped():
    ps = parameters()
    fused = fuse(torch.optim.SGD(ps, lr=0.1))
    for step in range(3):
        fused.zero_grad(set_to_none=False)
        assert all(p.grad is None or not p.grad.any() for p in ps)
        give_gradients(ps, step)
        fused.step()
    places = [(p.grad.data_ptr(), p.grad.nbytes) for p in ps if p.numel()]
    assert all(a + size == b for (a, size), (b, _) in itertools.pairwise(places))


def test_a_closure_is_called_once_with_gradients():
    pairs = both(MAKERS["adam"])

    def closure(ps, optimizer):
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p * p).sum() for p in ps)
        loss.backward()
        return loss

    losses = [optimizer.step(lambda ps=ps, o=optimizer: closure(ps, o)) for ps, optimizer in pairs]
    assert losses[0] == losses[1]
    assert_same(pairs[0][1], pairs[1][1])


# Checkpoints and copies -------------------------------------------------------------------------------------


@some_optimizers
def test_checkpoints_go_both_ways(make):
    (ps, plain), (qs, fused) = both(make)
    advance([(ps, plain), (qs, fused)], range(4), missing=lambda step: (1,) if step == 1 else ())
    saved = [through_a_file(optimizer.state_dict()) for optimizer in (plain, fused)]
    plain.load_state_dict(saved[1])
    fused.load_state_dict(saved[0])
    advance([(ps, plain), (qs, fused)], range(4, 7))


def test_a_state_that_was_loaded_is_its_own():
    (ps, one), (qs, _) = both(MAKERS["adam"])
    other = fuse(MAKERS["adam"](qs))
    first = fuse(one)
    give_gradients(ps, 0)
    first.step()
    other.load_state_dict(first.state_dict())
    before = [first.state[p]["exp_avg"].clone() for p in ps]
    give_gradients(qs, 1)
    other.step()
    assert all(torch.equal(first.state[p]["exp_avg"], b) for p, b in zip(ps, before, strict=True))


@pytest.mark.parametrize(
    "through", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"]
)
def test_copies_continue(through):
    pairs = both(MAKERS["qadam"])
    advance(pairs, range(3))
    other = through(pairs[1])
    advance([pairs[0], other], range(3, 6))
    assert isinstance(other[1], QAdamOptimizer)
    assert not {p.data_ptr() for p in other[0] if p.numel()} & {p.data_ptr() for p in pairs[1][0]}


# Behind our back --------------------------------------------------------------------------------------------


def to_double(ps, optimizer):
    ps[6].data = ps[6].data.double()
    optimizer.state[ps[6]] = {}
    ps[6].grad = None


REPLACED = {
    "in place elsewhere": lambda ps, optimizer: setattr(ps[3], "data", ps[3].data.clone() + 1),
    "another layout": lambda ps, optimizer: setattr(ps[0], "data", (ps[0].data * 2).t().contiguous().t()),
    "loaded into the model": lambda ps, optimizer: [p.data.copy_(torch.ones_like(p)) for p in ps],
    "state replaced": lambda ps, optimizer: optimizer.state[ps[2]].update(exp_avg=torch.full_like(ps[2], 0.5)),
    "state forgotten": lambda ps, optimizer: optimizer.state.pop(ps[7]),
    "all state forgotten": lambda ps, optimizer: optimizer.state.clear(),
    "step counted": lambda ps, optimizer: optimizer.state[ps[5]].update(step=torch.tensor(9.0)),
    "gradient moved": lambda ps, optimizer: [setattr(p.grad, "data", p.grad.data.clone()) for p in ps],
    "to double": to_double,
}


@pytest.mark.parametrize("change", REPLACED.values(), ids=REPLACED)
@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", [True, False], ids=["none", "zeros"])
def test_tensors_that_were_replaced_are_found(change, zero):
    pairs = both(MAKERS["adam"])
    advance(pairs, range(2), zero=lambda step: zero)
    for ps, optimizer in pairs:
        change(ps, optimizer)
    advance(pairs, range(2, 5), zero=lambda step: zero)


def test_autograd_notices_that_parameters_change():
    ps = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    fused = fuse(torch.optim.SGD(ps, lr=0.1))
    give_gradients(ps, 0)
    fused.step()
    loss = (ps[1] * ps[1]).sum()
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("infinite", [False, True])
@pytest.mark.parametrize("inner", [False, True], ids=["scaler", "optimizer"])
def test_a_grad_scaler_unscales_and_skips(infinite, inner):
    """With `fused=True` PyTorch's optimizers unscale gradients themselves, by the factors of the scaler."""
    ps, qs = parameters(), parameters()
    pairs = [(ps, torch.optim.Adam(ps, lr=0.01, foreach=False, fused=inner))]
    pairs.append((qs, fuse(torch.optim.Adam(qs, lr=0.01, foreach=False, fused=inner), exact=not inner)))
    for mine, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in mine)
            scaler.scale(loss * (float("inf") if infinite and step == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
    if inner:
        for p, q in zip(ps, qs, strict=True):
            torch.testing.assert_close(p, q)
        assert {float(entry["step"]) for entry in pairs[1][1].state.values()} == {3.0 - infinite}
    else:
        assert_same(pairs[0][1], pairs[1][1])
    assert not {"found_inf", "grad_scale"} & vars(pairs[1][1]._inner).keys()


# With DistributedDataParallel -------------------------------------------------------------------------------


CASES = [
    (GradientAllReduce(), "adam"),
    (GradientAllReduce(), "nesterov"),
    (ByteGrad(), "rmsprop"),
    (QAdam(warmup_steps=3), None),
    (LowPrecisionDecentralized(), "adagrad"),
    (LowPrecisionDecentralized(), "amsgrad"),
]


def trained(comm, algorithm, make, fusing, bucket_bytes=200):
    model = make_model()
    optimizer = make(model.parameters()) if make else optimizer_for(algorithm, model.parameters())
    optimizer = fuse(optimizer) if fusing else optimizer
    ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, bucket_bytes=bucket_bytes)
    seen = []
    for step in range(6):
        train_step(ddp, optimizer, batch(comm.rank, step))
        seen.append(weights(model))
        if step == 3:
            ddp.replan(bucket_bytes=2000)
        if step == 5 and fusing and ddp.engine.payload == "grad":
            units = [unit for group in optimizer._flat_groups for unit in group]
            assert all(unit.copies is None or unit.gradient is not unit.copies for unit in units)
    saved = through_a_file(optimizer.state_dict())
    ddp.close()
    train_step(model, optimizer, batch(comm.rank, 9))
    return seen, weights(model), saved, getattr(optimizer, "units", None)


@pytest.mark.covering(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("algorithm", "name"), CASES, ids=str)
def test_in_distributed_data_parallel_it_is_the_plain_one_to_the_bit(ranks, algorithm, name):
    if ranks == 3 and isinstance(algorithm, LowPrecisionDecentralized):
        algorithm = LowPrecisionDecentralized()

    def body(comm):
        return [trained(comm, algorithm, MAKERS.get(name), fusing) for fusing in (False, True)]

    for (seen, last, saved, _), (mine, own_last, own_saved, _) in run_ranks(ranks, body):
        for step, (a, b) in enumerate(zip(seen, mine, strict=True)):
            assert torch.equal(a, b), step
        assert torch.equal(last, own_last)
        for number, entry in saved["state"].items():
            assert all(same_bytes(own_saved["state"][number][key], value) for key, value in entry.items())


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), LowPrecisionDecentralized()], ids=str)
def test_what_is_averaged_is_stepped_in_its_buckets(algorithm):
    def body(comm):
        model = make_model()
        optimizer = fuse(torch.optim.Adam(model.parameters()))
        for step in range(2):  # in separate flat tensors
            train_step(model, optimizer, batch(comm.rank, step))
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm)
        for step in range(2):
            train_step(ddp, optimizer, batch(comm.rank, step))
        ((unit,),) = optimizer._flat_groups
        (flat,) = ddp._steps.memory.flats[algorithm.payload]
        mine = unit.gradient if algorithm.payload == "grad" else unit.flat
        inside = mine.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        ddp.close()
        return optimizer.units, inside

    assert run_ranks(2, body) == [(1, True)] * 2


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), LowPrecisionDecentralized()], ids=str)
def test_parameters_lie_in_the_same_places_from_the_first_forward_pass_on(algorithm):
    """Matrix products round by the addresses of weights: a rank that joins must have them as the others do."""

    def made(comm, **settings):
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
        optimizer = fuse(torch.optim.Adam(model.parameters()))
        return DistributedDataParallel(model, optimizer, algorithm, comm=comm, **settings), optimizer

    def trained(ddp, optimizer):
        addresses = []
        for _ in range(2):
            assert all(p.grad is None for p in ddp.module.parameters())
            addresses.append([p.data_ptr() for p in ddp.module.parameters()])
            ddp(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert addresses[0] == addresses[1]
        return [address % 64 for address in addresses[0]]

    def body(comm):
        ddp, optimizer = made(comm)
        trained(ddp, optimizer)
        ddp.replan(bucket_bytes=16)
        stayed = trained(ddp, optimizer)
        ddp.close()

        ddp, optimizer = made(comm, bucket_bytes=16)
        joined = trained(ddp, optimizer)
        ddp.close()
        return stayed == joined

    assert run_ranks(1, body) == [True]


def test_unused_parameters_and_accumulation():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = make_model(), make_model(1)

        def forward(self, x, step):
            return self.first(x) if step % 3 else self.first(x) + self.second(x)

    def run(comm, fusing):
        model = Halves()
        optimizer = MAKERS["adam"](model.parameters())
        optimizer = fuse(optimizer) if fusing else optimizer
        ddp = DistributedDataParallel(model, optimizer, comm=comm, find_unused_parameters=True)
        for step in range(7):
            optimizer.zero_grad(set_to_none=step != 4)
            with ddp.no_sync():
                ddp(batch(comm.rank, step), step).square().mean().backward()
            ddp(batch(comm.rank, 100 + step), step).square().mean().backward()
            optimizer.step()
        ddp.close()
        return weights(model)

    def body(comm):
        return run(comm, False), run(comm, True)

    for plain, fused in run_ranks(2, body):
        assert torch.equal(plain, fused)


# Errors -----------------------------------------------------------------------------------------------------


class LARS(torch.optim.SGD):
    """Scales each tensor's step by the ratio of its norms."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (p.norm() / p.grad.norm()), alpha=group["lr"])


class LAMB(torch.optim.Adam):
    """Adam, and then a trust ratio for each tensor, only for large ones."""

    @torch.no_grad()
    def step(self, closure=None):
        before = [p.clone() for group in self.param_groups for p in group["params"]]
        super().step()
        for p, b in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
            change = p - b
            p.copy_(b + change * (b.norm() / change.norm()))


class NoisySGD(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class Listed(torch.optim.SGD):
    """Keeps its parameters in another list."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.mine = self.param_groups[0]["params"]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.mine:
            p.sub_(p.grad, alpha=0.1)


def matrices():
    return [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]


NOT_FUSED = {
    "lamb": (lambda p: LAMB(p, lr=0.1), "LAMB does not work element by element"),
    "lamb in warm-up": (lambda p: LAMB(p, lr=0.0), "LAMB does not work element by element"),
    "lars": (lambda p: LARS(p, lr=0.1), "LARS does not work element by element"),
    "noisy": (lambda p: NoisySGD(p, lr=0.1), "NoisySGD does not work element by element"),
    "listed": (lambda p: Listed(p, lr=0.1), "Listed "),
    "adafactor": (torch.optim.Adafactor, "Adafactor does not work element by element"),
    "muon": (torch.optim.Muon, r"Muon cannot be fused.* must be a 2D matrix"),
    "lbfgs": (torch.optim.LBFGS, r"LBFGS cannot be fused.*closure"),
    "sparse": (torch.optim.SparseAdam, r"SparseAdam cannot be fused.*does not support dense gradients"),
    "differentiable": (lambda p: torch.optim.SGD(p, differentiable=True), "differentiable=True"),
    "fused": (lambda p: torch.optim.SGD(p, momentum=0.9, fused=True), "SGD as it is set rounds .* fused=True"),
}


@pytest.mark.parametrize(("make", "message"), NOT_FUSED.values(), ids=NOT_FUSED)
def test_optimizers_that_cannot_be_fused_are_refused_by_name(make, message):
    ps = matrices()
    optimizer = make(ps)
    before = [p.detach().clone() for p in ps]
    random = torch.random.get_rng_state()
    with pytest.raises(UnsupportedError, match=message):
        fuse(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not optimizer.state or type(optimizer) is torch.optim.LBFGS


def plain_sgd(*hooks):
    """An optimizer after these were called with it."""
    optimizer = torch.optim.SGD(matrices(), lr=0.1)
    for hook in hooks:
        hook(optimizer)
    return optimizer


def of(*tensors):
    return torch.optim.SGD([nn.Parameter(tensor) for tensor in tensors], lr=0.1)


WHOLE = torch.zeros(4)
HOOKED = "this SGD has hooks or a wrapped step already"
WRONG_FOR_FUSE = {
    "scheduled": (lambda: plain_sgd(lambda o: torch.optim.lr_scheduler.StepLR(o, 1)), ArrayError, HOOKED),
    "hooked": (lambda: plain_sgd(lambda o: o.register_step_pre_hook(lambda *_: None)), ArrayError, HOOKED),
    "no optimizer": (lambda: nn.Linear(1, 1), ArrayError, "expected an optimizer"),
    "fused already": (lambda: fuse(plain_sgd()), ArrayError, "fused already"),
    "overlap": (lambda: of(WHOLE, WHOLE[1:3]), UnsupportedError, "shares memory with another one"),
    "gaps": (lambda: of(torch.zeros(4, 4)[:, :2]), UnsupportedError, "parameter 0 of group 0, .* has gaps"),
    "repeats": (lambda: of(torch.zeros(1).expand(3)), UnsupportedError, "has gaps or repeats"),
    "lazy": (lambda: torch.optim.SGD([nn.LazyLinear(2).weight], lr=0.1), UnsupportedError, "is lazy"),
    "meta": (lambda: of(torch.zeros(2, device="meta")), UnsupportedError, "on meta"),
}


@pytest.mark.parametrize(("make", "error", "message"), WRONG_FOR_FUSE.values(), ids=WRONG_FOR_FUSE)
def test_what_cannot_be_fused_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        fuse(make())


def test_what_a_fused_optimizer_cannot_step_is_refused():
    layer = nn.Embedding(10, 2, sparse=True)
    sparse, fused = fuse(torch.optim.SGD(layer.parameters(), lr=0.1)), fuse(plain := plain_sgd())
    layer(torch.tensor([1, 2])).sum().backward()
    group = {"params": matrices(), "momentum": 0.9, "fused": True}
    for call, error, message in [
        (sparse.step, UnsupportedError, r"fused SGD: a gradient of shape \(10, 2\) has layout"),
        (plain.step, ArrayError, "step the one that fuse returned"),
        (lambda: fused.add_param_group(group), UnsupportedError, "rounds"),
    ]:
        with pytest.raises(error, match=message):
            call()
    assert len(fused.param_groups) == 1


def test_clipped_gradients_of_tied_weights_are_stepped_alike():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_model()
            self.again = nn.Linear(8, 8)
            self.again.weight = self.body[2].weight

        def forward(self, x):
            return self.body(x) + self.body[4](self.again(self.body[0](x)))

    def run(fusing):
        torch.manual_seed(0)
        model = Tied()
        optimizer = MAKERS["adamw"](model.parameters())
        optimizer = fuse(optimizer) if fusing else optimizer
        for step in range(5):
            optimizer.zero_grad()
            loss_of(model, batch(0, step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return weights(model)

    assert torch.equal(run(False), run(True))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimizer_that_copies_would_slow_down_steps_as_it_is_and_says_so(kind):
    make = MAKERS[kind]
    sizes, random = (40_000, 30_000, 50_000), torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=random) for size in sizes]
    models = [[nn.Parameter(each.clone()) for each in start] for _ in range(2)]
    plain, fused = make(models[0]), fuse(make(models[1]))

    def step():
        for each in zip(*models, strict=True):
            gradient = torch.randn(each[0].shape, generator=random)
            for p in each:
                p.grad = gradient.clone()
        for optimizer in (plain, fused):
            optimizer.step()

    step(), step()
    assert fused.units == 1
    with pytest.warns(UserWarning, match="new tensors in each step, so it now steps .*fused=True"):
        step()
    step()
    assert fused.units == 0
    for a, b in zip(*models, strict=True):
        assert torch.equal(a, b)
    assert str(plain.state_dict()) == str(fused.state_dict())
    fused.zero_grad(set_to_none=False)
    assert all((p.grad == 0).all() for p in models[1])


def test_many_small_gradients_that_are_new_in_each_step_are_copied_without_a_word():
    ps = [nn.Parameter(torch.ones(8)) for _ in range(5)]
    fused = fuse(torch.optim.SGD(ps, lr=1.0, momentum=0.5))
    for _ in range(5):
        for p in ps:
            p.grad = torch.ones(8)
        fused.step()
    assert fused.units == 1
