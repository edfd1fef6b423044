"""DistributedDataParallel on threads, against models trained side by side in a plain loop."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bagua_comm
from bagua_comm import ArrayError, CommError, GradientAllReduce, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, as_array


class Everything(nn.Module):
    """Parameters at the root, tied, frozen, unused, of two dtypes, and buffers."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.scale = nn.Parameter(torch.empty(3))
        self.inner = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.square = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3, bias=False)
        self.tied.weight = self.square.weight
        self.frozen = nn.Linear(4, 3)
        self.frozen.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.wide = nn.Linear(3, 2).double()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x):
        y = self.square(torch.tanh(self.norm(self.inner(x))))
        y = self.tied(torch.tanh(y)) * self.scale + self.frozen(x)
        return self.wide(torch.tanh(y).double())


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator)


def loss_of(model, x):
    return model(x).square().sum()


def train_side_by_side(ranks, steps):
    """The reference: the ranks' models in one loop, their gradients averaged as plain tensors."""
    models = [Everything() for _ in range(ranks)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, batch(rank, step)).backward()
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            if parameters[0].grad is not None:
                mean = torch.stack([p.grad for p in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        for buffers in zip(*(m.buffers() for m in models), strict=True):
            for buffer in buffers[1:]:
                buffer.copy_(buffers[0])
    return [{n: t.detach().clone() for n, t in m.state_dict().items()} for m in models]


@pytest.mark.parametrize(
    ("ranks", "bucket_bytes", "zero_grad"),
    [
        (1, 64, "none before"),
        (2, 1, "none between"),
        (2, 10**6, "zeros"),
        (3, 1, "zeros"),
        (3, 10**6, "none before"),
        (5, 64, "none between"),
    ],
)
def test_trains_as_models_side_by_side(ranks, bucket_bytes, zero_grad):
    expected = train_side_by_side(ranks, steps=4)

    def body(comm):
        model = Everything(seed=comm.rank)  # rank 0's weights go to all
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        ddp = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=bucket_bytes)
        for step in range(4):
            if zero_grad != "none between":
                optimizer.zero_grad(set_to_none=zero_grad == "none before")
            loss = loss_of(ddp, batch(comm.rank, step))
            if zero_grad == "none between":
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        ddp.close()
        return model.state_dict()

    for rank, actual in enumerate(run_ranks(ranks, body)):
        for name, value in expected[rank].items():
            torch.testing.assert_close(actual[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_live_in_the_buckets():
    def body(comm):
        model = Everything()
        ddp = DistributedDataParallel(model, comm=comm)
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            loss_of(ddp, batch(0, 0)).backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    bucket = next(b for b in ddp.engine.buckets if name in b.views)
                    assert np.shares_memory(as_array(parameter.grad), bucket.flat)
                    address = bucket.views[name].__array_interface__["data"][0]
                    assert address == parameter.grad.data_ptr()
        ddp.close()

    run_ranks(2, body)


def test_autograd_accumulates_into_the_bucket_without_a_copy():
    """No copy_ operation runs in a backward pass, whatever zero_grad did."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Operations(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def body(comm):
        model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
        ddp = DistributedDataParallel(model, comm=comm)
        for set_to_none in (True, False):
            model.zero_grad(set_to_none=set_to_none)
            loss = ddp(torch.ones(3, 4)).sum()
            with Operations() as operations:
                loss.backward()
            assert "aten.add_.Tensor" in operations.seen
            assert not any("copy_" in name or "clone" in name for name in operations.seen)
        ddp.close()

    run_ranks(1, body)


def test_the_first_bucket_leaves_before_the_backward_pass_ends():
    def body(comm):
        model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters())
        ddp = DistributedDataParallel(model, optimizer, comm=comm, bucket_bytes=200_000)
        for _ in range(3):
            ddp(torch.ones(64, 200)).sum().backward()
            optimizer.step()
        spans = comm.tracer.spans()
        ddp.close()
        return (
            [s for s in spans if s.name == "backward"],
            [[s for s in spans if s.name == "exchange" and s.args["step"] == step] for step in range(3)],
        )

    for passes, steps in run_ranks(2, body):
        for exchanges in steps:
            assert [span.args["bucket"] for span in exchanges] == list(range(len(exchanges)))
            assert len(exchanges) > 4
            assert exchanges[0].thread != passes[0].thread
        # In some steps the lane's thread gets a core only later.
        assert any(p.start_ns < e[0].start_ns < p.end_ns for p, e in zip(passes, steps, strict=True))


class Layers(nn.ModuleList):
    """Scalar layers; a call says which of them to use."""

    def __init__(self, count=2):
        super().__init__(nn.Linear(1, 1, bias=False) for _ in range(count))

    def forward(self, x, *used):
        for index in used:
            x = self[index](x)
        return x


def test_gradients_accumulated_before_are_kept_for_parameters_unused_later():
    def body(comm):
        model = Layers()
        ddp = DistributedDataParallel(model, comm=comm)
        ddp(torch.full((1, 1), 1.0 + comm.rank), 0).sum().backward()
        ddp(torch.full((1, 1), 3.0 + comm.rank), 1).sum().backward()
        ddp.close()
        return [layer.weight.grad.item() for layer in model]

    assert run_ranks(2, body) == [[1.5, 3.5], [1.5, 3.5]]


def test_a_rank_whose_loss_reaches_no_parameter_does_not_hang_the_others():
    def body(comm):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(1)
        ddp = DistributedDataParallel(model, [optimizer], comm=comm)
        loss = ddp(torch.ones(1, 1)).sum() if comm.rank == 0 else (ddp(torch.ones(1, 1)) * 0).detach().sum()
        if comm.rank == 0:
            loss.backward()
        optimizer.step()
        ddp.close()
        return model.weight.item()

    with pytest.warns(UserWarning, match="SGD steps on rank 1 after a forward pass without a backward pass"):
        assert run_ranks(2, body) == [0.5, 0.5]


def test_a_forward_pass_after_backward_does_not_disturb_the_step():
    def body(comm):
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.fill_(1)
        ddp = DistributedDataParallel(model, [optimizer], comm=comm)
        ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1))
        optimizer.step()
        ddp.close()
        return model.weight.item()

    assert run_ranks(2, body) == [0.0, 0.0]


def test_double_backward_keeps_gradients_in_the_bucket():
    def body(comm):
        model = nn.Linear(1, 1, bias=False)
        ddp = DistributedDataParallel(model, comm=comm)
        with pytest.warns(UserWarning, match="create_graph"):
            ddp(torch.full((1, 1), 1.0 + comm.rank)).square().sum().backward(create_graph=True)
        bucket = ddp.engine.buckets[0]
        assert np.shares_memory(as_array(model.weight.grad), bucket.flat)
        ddp.close()
        return model.weight.grad.item() / model.weight.item()

    assert run_ranks(1, body) == [2.0]


def test_gradients_of_inputs_do_not_disturb_the_next_pass():
    def body(comm):
        model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=1)
        x = torch.full((3, 2), 1.0 + comm.rank, requires_grad=True)
        (gradient,) = torch.autograd.grad(ddp(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()  # reaches all parameters but the last bias
        assert ddp.engine.counter.calls == 4
        for parameter in model.parameters():
            comm.check_consistency(as_array(parameter.grad))
        assert model[0].weight.grad.abs().sum() > 0
        ddp.close()

    run_ranks(2, body)


def test_autograd_grad_of_parameters_is_refused():
    def body(comm):
        ddp = DistributedDataParallel(nn.Linear(1, 1), comm=comm)
        with pytest.raises(RuntimeError, match="not supported"):
            torch.autograd.grad(ddp(torch.ones(1, 1)).sum(), list(ddp.parameters()))
        ddp.close()

    run_ranks(1, body)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_checkpointed_layers(reentrant, last):
    """A reentrant checkpoint runs a backward pass inside the backward pass."""

    def gradients(comm, checkpointed):
        torch_layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)]
        for i, layer in enumerate(torch_layers):
            nn.init.constant_(layer.weight, 0.1 * (i + 1))
            nn.init.constant_(layer.bias, 0.1)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(torch_layers)

            def forward(self, x):
                for i, layer in enumerate(self.layers):
                    block = nn.Sequential(layer, nn.Tanh())
                    if checkpointed and i == (2 if last else 1):
                        x = checkpoint(block, x, use_reentrant=reentrant)
                    else:
                        x = block(x)
                return x

        model = Model()
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=1)
        ddp(torch.full((2, 3), 1.0 + comm.rank)).square().sum().backward()
        result = [parameter.grad.clone() for parameter in model.parameters()]
        # Where the inner pass comes first it looks like a separate one: averaged twice, to the same values.
        times = 2 if checkpointed and reentrant and last else 1
        assert ddp.engine.counter.calls == 6 * times
        ddp.close()
        return result

    expected = run_ranks(2, lambda comm: gradients(comm, False))[0]
    for actual in run_ranks(2, lambda comm: gradients(comm, True)):
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
            assert a.abs().sum() > 0


@pytest.mark.parametrize("last", [0, 1, 2])
def test_reentrant_checkpoints_with_unused_parameters_are_averaged(last):
    """Layer 3 is never used; the outer pass computes a gradient before the inner one, behind it, or neither."""

    def body(comm):
        class Checkpointed(Layers):
            def forward(self, x):
                for number in range(last + 1):
                    layer = self[number]
                    x = checkpoint(layer, x, use_reentrant=True) if number == 1 else layer(x)
                return x

        model = Checkpointed(4)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        ddp = DistributedDataParallel(model, optimizer, comm=comm, find_unused_parameters=True)
        for _ in range(2):
            optimizer.zero_grad()
            ddp(torch.full((1, 1), 1.0 + comm.rank)).sum().backward()
            expected = [2.0**last * 1.5 if number <= last else None for number in range(4)]
            assert [None if p.grad is None else p.grad.item() for p in model.parameters()] == expected
        optimizer.step()
        ddp.close()

    run_ranks(2, body)


def test_reentrant_checkpoints_of_all_layers_are_averaged():
    """Each is a backward pass inside one that computes the last gradients or none."""

    class Model(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first, self.layers = first, Layers(3)
            for parameter in self.parameters():
                nn.init.constant_(parameter, 0.5)

        def forward(self, x, reentrant=True):
            x = self.first(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=True) if reentrant else layer(x)
            return x

    def body(comm, first):
        model, plain = Model(first()), Model(first())
        ddp = DistributedDataParallel(model, comm=comm, bucket_bytes=1)
        for _ in range(2):
            model.zero_grad()
            ddp(torch.full((1, 1), 1.0 + comm.rank, requires_grad=True)).sum().backward()
        ddp.close()
        sum(plain(torch.full((1, 1), 1.0 + rank), reentrant=False).sum() / 2 for rank in range(2)).backward()
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad)

    for first in (nn.Identity, lambda: nn.Linear(1, 1)):
        run_ranks(2, lambda comm, first=first: body(comm, first))


# Averaging of backward passes through forward passes of the wrapper ---------------------------------------


def averaged_calls(body, ranks=2):
    """`body(comm, ddp)` with a model of one weight; its results on all ranks."""

    def with_model(comm):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), comm=comm)
        result = body(comm, ddp)
        ddp.close()
        return result

    return run_ranks(ranks, with_model, timeout_s=5)


def mine(comm):
    return torch.full((1, 1), 1.0 + comm.rank)


def test_weights_are_averaged_in_one_message_but_for_large_ones():
    def body(comm):
        net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)), nn.Linear(4, 2**17, bias=False))
        ddp = DistributedDataParallel(net, comm=comm)
        with torch.no_grad():
            for number, weight in enumerate(net.parameters()):
                weight.fill_(number + comm.rank)
        before = comm.counters.as_dict()
        ddp.average_weights()
        made = {name: value - before.get(name, 0) for name, value in comm.counters.as_dict().items()}
        ddp.close()
        assert (made["allreduce_many/calls"], made["allreduce/calls"]) == (1, 1)
        return [weight.detach().unique().tolist() for weight in net.parameters()]

    assert run_ranks(2, body) == [[[number + 0.5] for number in range(21)]] * 2


def test_a_backward_pass_of_the_plain_module_stays_on_its_rank():
    """On one rank alone, before and after steps of all."""

    def body(comm, ddp):
        seen = []
        for _ in range(2):
            ddp.module.zero_grad()
            if comm.rank == 1:
                ddp.module(mine(comm)).sum().backward()
            seen.append(None if ddp.module.weight.grad is None else ddp.module.weight.grad.item())
            ddp.module.zero_grad()
            ddp(mine(comm)).sum().backward()
            seen.append(ddp.module.weight.grad.item())
        return seen, ddp.engine.counter.calls

    assert averaged_calls(body) == [([None, 1.5] * 2, 2), ([2.0, 1.5] * 2, 2)]


def test_every_backward_pass_through_one_graph_is_averaged():
    def body(comm, ddp):
        loss = ddp(mine(comm)).sum()
        loss.backward(retain_graph=True)
        ddp.module.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        return ddp.module.weight.grad.item(), ddp.engine.counter.calls

    assert averaged_calls(body) == [(3.0, 3)] * 2


@pytest.mark.parametrize("wrap", [lambda y: y, lambda y: {"loss": (y,)}, lambda y: Output(y, [y])])
def test_every_one_of_several_forward_passes_has_its_backward_pass_averaged(wrap):
    def body(comm, ddp):
        ddp.module.register_forward_hook(lambda module, args, output: wrap(output))
        outputs = [next(_flat(ddp(mine(comm)))) for _ in range(3)]
        for number, output in enumerate(outputs):
            (number * output).sum().backward()
        return ddp.module.weight.grad.item(), ddp.engine.counter.calls

    assert averaged_calls(body) == [(4.5, 3)] * 2


def test_several_forward_passes_may_have_one_backward_pass():
    def body(comm, ddp):
        (ddp(mine(comm)) + 2 * ddp(mine(comm)) + 4 * ddp.module(mine(comm))).sum().backward()
        averaged = ddp.module.weight.grad.item()
        ddp.module(mine(comm)).sum().backward()
        return averaged, ddp.module.weight.grad.item(), ddp.engine.counter.calls

    assert averaged_calls(body) == [(10.5, 11.5, 1), (10.5, 12.5, 1)]


def test_a_forward_pass_in_no_sync_is_not_averaged_whenever_its_backward_pass_comes():
    def body(comm, ddp):
        ddp(mine(comm))  # without a backward pass
        with ddp.no_sync():
            local = ddp(mine(comm)).sum()
        local.backward()
        kept = ddp.module.weight.grad.item()
        shared = ddp(mine(comm)).sum()
        with ddp.no_sync():
            ddp(mine(comm))
            shared.backward()  # what counts is where the forward pass was
        return kept, ddp.module.weight.grad.item(), ddp.engine.counter.calls

    assert averaged_calls(body) == [(1.0, 3.0, 1), (2.0, 3.0, 1)]


def test_a_forward_pass_that_returns_its_input_or_a_parameter_leaves_no_hook():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return x, self.weight, None

    def body(comm):
        model = Odd()
        ddp = DistributedDataParallel(model, comm=comm)
        hooks = len(model.weight._backward_hooks)
        for _ in range(3):
            x, weight, _ = ddp(mine(comm))
            (x * weight).sum().backward()
        assert len(model.weight._backward_hooks) == hooks
        ddp.close()
        return model.weight.grad.item(), ddp.engine.counter.calls

    assert run_ranks(2, body) == [(4.5, 3)] * 2


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    states: list


def _flat(output):
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield output["loss"][0]
    else:
        yield output.loss


class NoGradient(torch.autograd.Function):
    """Multiplies by a weight; says nothing of its gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0], None


@pytest.mark.parametrize(("find_unused", "accumulated"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0,)], ids=str)
def test_a_function_that_returns_no_gradient_for_a_parameter(order, find_unused, accumulated):
    """Parameter 0 gets none: as if it were unused. The first, the last or the only one of the pass."""

    class Model(Layers):
        def forward(self, x):
            for index in order:
                x = self[index](x) if index else NoGradient.apply(x, self[0].weight)
            return x

    def body(comm):
        model = Model()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 2.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ddp = DistributedDataParallel(
            model, optimizer, comm=comm, bucket_bytes=1, find_unused_parameters=find_unused
        )
        for _ in range(2):
            optimizer.zero_grad()
            if accumulated:
                for layer in model:
                    layer.weight.grad = mine(comm)
            ddp(mine(comm).requires_grad_()).sum().backward()
            optimizer.step()
        ddp.close()
        return [None if layer.weight.grad is None else layer.weight.grad.item() for layer in model]

    absent = 1.5 if accumulated else None if find_unused else 0.0
    made = 3.0 + (1.5 if accumulated else 0.0)
    assert run_ranks(2, body, timeout_s=5) == [[absent, made if 1 in order else absent]] * 2


def test_two_forward_passes_before_one_backward_pass_with_batch_norm():
    def body(comm):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        ddp = DistributedDataParallel(model, comm=comm)
        (ddp(torch.randn(4, 2)) * ddp(torch.randn(4, 2))).sum().backward()
        comm.check_consistency(as_array(model[0].weight.grad))
        ddp.close()

    run_ranks(2, body)


def test_parameters_that_would_not_be_averaged_are_refused():
    def body(comm):
        model = nn.Sequential(nn.Linear(2, 2))
        ddp = DistributedDataParallel(model, comm=comm)
        model.append(nn.Linear(2, 2))
        with pytest.raises(ArrayError, match=r"'1.weight' was added"):
            ddp(torch.ones(1, 2))
        ddp.close()
        with pytest.raises(CommError, match="closed"):
            ddp(torch.ones(1, 2))

    run_ranks(2, body)


# torch.func.functional_call: other weights for one call ---------------------------------------------------


def test_weights_of_functional_call_get_the_gradients():
    """On this rank alone, as with PyTorch's own: only the module's parameters are averaged."""

    def body(comm, ddp):
        lent = {"module.weight": torch.full((1, 1), 2.0, requires_grad=True)}
        output = torch.func.functional_call(ddp, lent, (mine(comm),))
        output.sum().backward()
        assert ddp.module.weight.grad is None
        ddp(mine(comm)).sum().backward()
        return output.item(), lent["module.weight"].grad.item(), ddp.module.weight.grad.item()

    assert averaged_calls(body) == [(2.0, 1.0, 1.5), (4.0, 2.0, 1.5)]


def test_weights_of_functional_call_made_of_the_parameters_have_gradients_averaged():
    def body(comm, ddp):
        lent = {name: 3 * parameter for name, parameter in ddp.named_parameters()}
        torch.func.functional_call(ddp, lent, (mine(comm),)).sum().backward()
        return ddp.module.weight.grad.item()

    assert averaged_calls(body) == [4.5, 4.5]


@pytest.mark.parametrize("lend", [dict, lambda named: {n: p.detach() for n, p in named}], ids=["own", "copies"])
def test_gradients_of_a_function_of_the_weights(lend):
    def body(comm, ddp):
        def loss(weights):
            return torch.func.functional_call(ddp, weights, (mine(comm),)).sum()

        return [g.item() for g in torch.func.grad(loss)(lend(ddp.named_parameters())).values()]

    assert averaged_calls(body) == [[1.0], [2.0]]


def test_parameters_of_another_module_in_functional_call_are_refused_with_what_to_do():
    def body(comm, ddp):
        lent = {"module.weight": nn.Parameter(torch.ones(1, 1))}
        with pytest.raises(ArrayError, match=r"functional_call tensors that are not nn.Parameter"):
            torch.func.functional_call(ddp, lent, (mine(comm),))

    averaged_calls(body)


def test_evaluation_communicates_nothing():
    def body(comm):
        ddp = DistributedDataParallel(nn.BatchNorm1d(2), comm=comm)
        before = comm.counters.total().calls
        ddp.eval()
        ddp(torch.zeros(4, 2))
        ddp.train()
        with torch.no_grad():
            ddp(torch.zeros(4, 2))
        assert comm.counters.total().calls == before
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), bagua_comm.ByteGrad()], ids=["exact", "bytegrad"])
def test_reduced_precision_parameters(dtype, algorithm):
    def body(comm):
        model = nn.Linear(4, 2).to(dtype)
        ddp = DistributedDataParallel(model, algorithm=algorithm, comm=comm)
        ddp(torch.full((3, 4), 1.0 + comm.rank, dtype=dtype)).sum().backward()
        comm.check_consistency(as_array(model.weight.grad))
        ddp.close()
        return model.weight.grad.float()

    for gradient in run_ranks(2, body):
        torch.testing.assert_close(gradient, torch.full((2, 4), 4.5), rtol=0.01, atol=0)


def test_without_a_communicator_the_default_one_is_used():
    with bagua_comm.connect() as comm:
        ddp = DistributedDataParallel(nn.Linear(1, 1))
        assert ddp.comm is comm
        ddp.close()


# Refusals: a clear error on every rank, before the first step ---------------------------------------------


def test_a_dtype_the_codec_does_not_take_is_refused_on_every_rank():
    def body(comm):
        with pytest.raises(UnsupportedError, match=r"'bias'.*float64"):
            DistributedDataParallel(nn.Linear(1, 1).double(), algorithm=bagua_comm.ByteGrad(), comm=comm)
        assert comm.allreduce(np.array(1)) == comm.size

    run_ranks(2, body)


def test_closing_removes_every_hook():
    model = nn.Linear(1, 1)
    before = threading.active_count()

    def body(comm):
        ddp = DistributedDataParallel(model, comm=comm)
        ddp.close()
        model(torch.ones(1, 1)).sum().backward()
        assert ddp.engine.counter.calls == 0

    run_ranks(1, body)
    assert not model.weight._post_accumulate_grad_hooks
    assert threading.active_count() <= before + 1
