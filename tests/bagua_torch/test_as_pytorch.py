"""The methods, attributes and errors that programs written for PyTorch's own DistributedDataParallel use."""

import collections

import pytest
import torch
import torch.distributed as dist
from support.torch_training import (
    QADAM,
    assert_same_on_all_ranks,
    batch,
    final_weights,
    loss_of,
    make_model,
    optimizer_for,
    train,
    train_step,
    weights,
    wrapped,
)
from torch import nn
from torch.distributed import GradBucket

import bagua_torch
from bagua_comm import (
    ArrayError,
    ByteGrad,
    DiLoCo,
    GradientAllReduce,
    MinMaxUInt8,
    Quantized,
    UnsupportedError,
)
from bagua_comm.errors import BaguaError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel, as_array, comm_hook
from bagua_torch.ddp.torch_arguments import device_of_inputs, moved

# Arguments ------------------------------------------------------------------------------------------------


def test_a_process_group_of_all_ranks_is_taken_whatever_made_it(gloo):
    with bagua_torch.connect() as comm:
        model = DistributedDataParallel(nn.Linear(2, 1), comm=comm, process_group=dist.new_group([0]))
        model(torch.ones(3, 2)).sum().backward()
        model.close()
    assert model.module.bias.grad.tolist() == [3.0]


def test_a_call_of_pytorchs_own_works_unchanged():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(
            model,
            device_ids=None,
            output_device=None,
            dim=0,
            broadcast_buffers=True,
            process_group=None,
            bucket_cap_mb=0.0001,
            find_unused_parameters=False,
            check_reduction=False,
            gradient_as_bucket_view=True,
            static_graph=True,
            mixed_precision=None,
            device_mesh=None,
            skip_all_reduce_unused_params=False,
            comm=comm,
        )
        for step in range(2):
            loss_of(ddp, batch(comm.rank, step)).backward()
        for parameter in model.parameters():
            comm.check_consistency(as_array(parameter.grad))
        buckets = len(ddp.engine.buckets)
        ddp.close()
        return buckets, ddp.bucket_bytes

    assert run_ranks(2, body) == [(3, 104)] * 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # by the import
@pytest.mark.parametrize("wrapped_first", [False, True])
def test_an_optimizer_that_steps_within_the_backward_pass_is_refused(wrapped_first):
    """It would step by the gradient of its own rank, before it is averaged."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    def body(comm):
        model = make_model()
        if not wrapped_first:
            _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        ddp = DistributedDataParallel(model, comm=comm)
        if wrapped_first:
            _apply_optimizer_in_backward(torch.optim.SGD, list(model.parameters()), {"lr": 0.1})
        message = r"'0.weight' has an optimizer that steps .*; call optimizer.step\(\) after"
        with pytest.raises(UnsupportedError, match=message):
            loss_of(ddp, batch(comm.rank, 0))
        ddp.eval()
        loss_of(ddp, batch(comm.rank, 0))
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"mixed_precision": object()}, UnsupportedError, "mixed_precision is not supported; use torch.autocast"),
        ({"device_mesh": object()}, UnsupportedError, "device_mesh is not supported; give comm"),
        ({"bucket_cap_mb_list": [1, 2]}, UnsupportedError, "bucket_cap_mb_list is not .*; give bucket_bytes"),
        ({"process_group": object()}, UnsupportedError, "process_group is not the group of all ranks; give comm"),
        ({"device_ids": [0]}, ArrayError, r"device_ids is \[0\], but the module is on cpu"),
        ({"output_device": 0}, ArrayError, "output_device is 0, but the module is on cpu"),
        ({"bucket_byte": 25}, TypeError, "there is no argument 'bucket_byte'; did you mean 'bucket_bytes'"),
        ({"bucket_bytes": -1}, ArrayError, "DistributedDataParallel: bucket_bytes is -1, expected a positive"),
        ({"bucket_bytes": 25.0}, ArrayError, "bucket_bytes is 25.0, expected a number of bytes"),
        ({"bucket_cap_mb": 0}, ArrayError, "bucket_cap_mb is 0, expected a positive number"),
        ({"bucket_cap_mb": 1, "bucket_bytes": 1}, ArrayError, "not both"),
        ({"optimizers": [0]}, ArrayError, r"optimizers is \[0\].*by name"),
        ({"params_and_buffers_to_ignore": ["0.wait"]}, ArrayError, "there is no '0.wait'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honoured_are_refused_with_what_to_do(arguments, error, message):
    def body(comm):
        with pytest.raises(error, match=message):
            DistributedDataParallel(make_model(), comm=comm, **arguments)

    run_ranks(1, body)


def test_inputs_are_moved_to_the_device_given_however_they_are_nested():
    pair = collections.namedtuple("Pair", "first second")
    meta = torch.device("meta")

    (args, kwargs) = moved(((pair(torch.ones(1), 2), [torch.ones(2)]), {"x": torch.ones(3), "y": "z"}), meta)

    assert isinstance(args[0], pair)
    assert {args[0].first.device, args[1][0].device, kwargs["x"].device} == {meta}
    assert (args[0].second, kwargs["y"]) == (2, "z")
    assert device_of_inputs([1], torch.device("cuda", 1)) == torch.device("cuda", 1)
    assert device_of_inputs([], meta) is device_of_inputs(None, meta) is None
    for wrong in ([0], [0, 1]):
        with pytest.raises(ArrayError, match="the module is on cuda:1"):
            device_of_inputs(wrong, torch.device("cuda", 1))


def test_without_init_sync_every_rank_keeps_its_weights():
    def body(comm):
        model = make_model(seed=comm.rank)
        before = weights(model)
        ddp = DistributedDataParallel(model, comm=comm, init_sync=False)
        same = torch.equal(weights(model), before)
        loss_of(ddp, batch(comm.rank, 0)).backward()
        ddp.close()
        return same

    assert run_ranks(2, body) == [True, True]


# Errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "make"),
    [(1, lambda rank: nn.ReLU()), (1, lambda rank: nn.LazyLinear(1)), (2, lambda rank: nn.Linear(2, 1 + rank))],
    ids=["nothing to train", "lazy", "different"],
)
def test_modules_that_cannot_be_wrapped_raise_the_errors_of_pytorchs_class(ranks, make):
    def body(comm):
        for error in (RuntimeError, BaguaError):
            with pytest.raises(error):
                DistributedDataParallel(make(comm.rank), comm=comm)

    run_ranks(ranks, body)


# Parameters and buffers to ignore -------------------------------------------------------------------------


class WithOwn(nn.Module):
    """A layer that all ranks share, and one whose shape differs between ranks."""

    def __init__(self, rank):
        super().__init__()
        self.common = make_model()
        self.own = nn.Linear(4, 2 + rank)
        self.norm = nn.BatchNorm1d(4)
        with torch.no_grad():
            self.own.weight.fill_(1.0 + rank)

    def forward(self, x):
        return self.common(self.norm(x)) + self.own(x).sum(1, keepdim=True)


OWN = ["own.weight", "own.bias", "norm.running_mean"]


@pytest.mark.parametrize(
    ("algorithm", "by"),
    [*zip([GradientAllReduce(), ByteGrad(), DiLoCo(2), QADAM], ["argument", "attribute"] * 2, strict=True)],
    ids=str,
)
def test_ignored_parameters_stay_different_on_each_rank(algorithm, by):
    def body(comm):
        model = WithOwn(comm.rank)
        names = OWN if by == "argument" else []
        if by == "attribute":
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*OWN, "gone"])
        optimizer = optimizer_for(algorithm, model.parameters())
        train_step(model, optimizer, batch(comm.rank, 9))  # there is a state to keep
        moment = optimizer.state[model.own.weight]
        before = model.own.weight.detach().clone()
        ddp = DistributedDataParallel(model, optimizer, algorithm, comm=comm, params_and_buffers_to_ignore=names)
        assert optimizer.state[model.own.weight] is moment
        assert torch.equal(model.own.weight, before)
        with ddp.join():
            train(comm, ddp, optimizer, range(4 + comm.rank))
        assert optimizer.state[model.own.weight] is moment
        assert all(name not in OWN for bucket in ddp.engine.buckets for name in bucket.views)
        means = comm.allgather(as_array(model.norm.running_mean.clone()))
        assert (means[0] != means[1]).any()
        ddp.switch(GradientAllReduce()) if algorithm is not QADAM else None
        assert_same_on_all_ranks(comm, model.common)
        ddp.close()
        return model.own.weight.detach().clone()

    first, second = run_ranks(2, body)
    assert first.shape != second.shape


def test_a_tied_parameter_is_ignored_if_all_its_names_are():
    def body(comm, names):
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        ddp = DistributedDataParallel(model, comm=comm, params_and_buffers_to_ignore=names)
        averaged = [name for bucket in ddp.engine.buckets for name in bucket.views]
        ddp.close()
        return averaged

    assert run_ranks(1, lambda comm: body(comm, ["b.weight"])) == [["b.bias", "a.weight"]]
    assert run_ranks(1, lambda comm: body(comm, ["a.weight", "b.weight"])) == [["b.bias"]]


# A static graph -------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = make_model(), make_model()

    def forward(self, x, both=False):
        return self.used(x) + (self.unused(x) if both else 0)


@pytest.mark.parametrize("batches", [(3, 3), (0, 3), (4, 1)], ids=str)
@pytest.mark.parametrize("find_unused_parameters", [False, True])
def test_ranks_agree_on_unused_parameters_once_where_the_graph_is_static(batches, find_unused_parameters):
    def body(comm):
        model, optimizer, ddp = wrapped(
            comm, model=Branches(), static_graph=True, find_unused_parameters=find_unused_parameters
        )
        calls = []
        with ddp.join():
            for step in range(batches[comm.rank]):
                before = comm.counters.total().calls
                train_step(ddp, optimizer, batch(comm.rank, step))
                calls.append(comm.counters.total().calls - before)
                assert all(p.grad is None for p in model.unused.parameters())
                assert all(p.grad is not None for p in model.used.parameters())
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return calls

    for calls in run_ranks(2, body):
        assert calls == [2, *[1] * (len(calls) - 1)][: len(calls)]


@pytest.mark.parametrize("first", [True, False])
def test_a_graph_that_is_said_to_be_static_and_changes_is_an_error(first):
    def body(comm):
        ddp = DistributedDataParallel(Branches(), comm=comm, static_graph=True)
        for _ in range(2):
            ddp(batch(comm.rank, 0), both=first).sum().backward()
        with pytest.raises(RuntimeError, match=rf"'unused.*got {'no' if first else 'a'} gradient in this step"):
            ddp(batch(comm.rank, 0), both=not first).sum().backward()
        ddp.close()

    run_ranks(2, body)


# Communication hooks --------------------------------------------------------------------------------------


def summed_by(other):
    """A hook that sums over the ranks of another communicator, without overlap."""

    def hook(state, bucket):
        state.append((bucket.index(), bucket.is_last(), [tuple(p.shape) for p in bucket.parameters()]))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
        assert all(g.data_ptr() >= bucket.buffer().data_ptr() for g in bucket.gradients())
        total = torch.from_numpy(other.allreduce(as_array(bucket.buffer()))) / other.size
        bucket.set_buffer(total)
        assert bucket.gradients()[0].data_ptr() == total.data_ptr()
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    return hook


@pytest.mark.parametrize("batches", [(4, 4), (4, 1)], ids=str)
def test_a_hook_averages_the_gradients(batches):
    def body(comm, hooked):
        model, optimizer, ddp = wrapped(comm, bucket_bytes=100)
        other, seen = comm.dup(), []
        if hooked:
            ddp.register_comm_hook(seen, summed_by(other))
        with ddp.join():
            train(comm, ddp, optimizer, range(batches[comm.rank]))
        if hooked:
            buckets = len(ddp.engine.buckets)
            assert [index for index, _, _ in seen] == list(range(buckets)) * 4
            assert [last for _, last, _ in seen] == ([False] * (buckets - 1) + [True]) * 4
            shapes = [shape for _, _, each in seen[:buckets] for shape in each]
            assert shapes == [tuple(p.shape) for p in reversed(list(model.parameters()))]
            assert list(ddp.state_dict()) == [f"module.{name}" for name in model.state_dict()]
            ddp.replan(bucket_bytes=10**6)
            loss_of(ddp, batch(comm.rank, 9)).backward()
            assert seen[-1][:2] == (0, True)
        ddp.close()
        other.close()
        return weights(model)

    for plain, hooked in zip(
        run_ranks(2, lambda comm: body(comm, False)), run_ranks(2, lambda comm: body(comm, True)), strict=True
    ):
        torch.testing.assert_close(hooked, plain)


def test_a_hook_may_be_an_average_or_made_of_one():
    def body(comm, how):
        model, optimizer, ddp = wrapped(comm, ByteGrad() if how == "algorithm" else None, bucket_bytes=100)
        if how == "average":
            ddp.register_comm_hook(None, Quantized(MinMaxUInt8()))
        elif how == "hook":
            ddp.register_comm_hook(None, comm_hook(Quantized(MinMaxUInt8()), comm))
        train(comm, ddp, optimizer, range(4))
        assert_same_on_all_ranks(comm, model)
        return final_weights(ddp)

    algorithm, average, hook = (
        run_ranks(2, lambda comm, how=how: body(comm, how))[0] for how in ("algorithm", "average", "hook")
    )
    assert torch.equal(average, algorithm)
    torch.testing.assert_close(hook, algorithm, rtol=0.05, atol=0.01)


def resolved(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_hook_may_return_a_list_of_one_tensor_or_its_input():
    def body(comm):
        _, _, ddp = wrapped(comm)
        ddp.register_comm_hook(None, lambda state, bucket: resolved([bucket.buffer()]))
        loss_of(ddp, batch(comm.rank, 0)).backward()
        plain = make_model()
        loss_of(plain, batch(comm.rank, 0)).backward()
        for actual, expected in zip(ddp.module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad)
        ddp.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        (lambda bucket: bucket.buffer(), UnsupportedError, "returned a Tensor, expected a torch.futures.Future"),
        (lambda bucket: resolved(None), ArrayError, "gave a NoneType, expected a tensor of 3 elements"),
        (lambda bucket: resolved(torch.ones(2)), ArrayError, "gave a tensor of 2, expected .* of 3 elements"),
    ],
)
def test_a_hook_that_gives_something_else_is_an_error(result, error, message):
    def body(comm):
        ddp = DistributedDataParallel(nn.Linear(2, 1), comm=comm)
        ddp.register_comm_hook(None, lambda state, bucket: result(bucket))
        with pytest.raises(error, match=message):
            ddp(torch.ones(1, 2)).sum().backward()

    run_ranks(1, body)


def annotated_bucket(state, bucket: int):
    return bucket


def annotated_return(state, bucket: GradBucket) -> int:
    return bucket


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (3, TypeError, "hook is 3, expected an Average or a function"),
        (Quantized, ArrayError, "expected an Average"),
        (lambda state: None, ValueError, r"hook takes \(state\), expected \(state, bucket\)"),
        (annotated_bucket, ValueError, "bucket annotation is <class 'int'>, expected .*GradBucket"),
        (annotated_return, ValueError, r"return annotation is <class 'int'>, expected torch.futures.Future"),
    ],
)
def test_an_object_that_is_no_hook_is_refused_and_the_model_trains_as_before(hook, error, message):
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        with pytest.raises(error, match=message):
            ddp.register_comm_hook(None, hook)
        train(comm, ddp, optimizer, range(2))
        assert_same_on_all_ranks(comm, model)
        ddp.close()

    run_ranks(2, body)


def test_a_hook_is_registered_once_and_before_the_first_backward_pass():
    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        ddp.register_comm_hook(None, Quantized())
        with pytest.raises(RuntimeError, match="only once"):
            ddp.register_comm_hook(None, Quantized())
        ddp.close()
        _, optimizer, ddp = wrapped(comm)
        train(comm, ddp, optimizer, range(1))
        with pytest.raises(RuntimeError, match="before the first backward pass"):
            ddp.register_comm_hook(None, Quantized())
        ddp.close()
        _, _, ddp = wrapped(comm, DiLoCo())
        with pytest.raises(ArrayError, match=r"the algorithm is DiLoCo.*which a hook cannot replace"):
            ddp.register_comm_hook(None, Quantized())
        ddp.close()

    run_ranks(1, body)


# join -----------------------------------------------------------------------------------------------------


def test_join_that_is_not_enabled_does_nothing():
    def body(comm):
        _, optimizer, ddp = wrapped(comm)
        before = comm.counters.total().calls
        with ddp.join(enable=False):
            train(comm, ddp, optimizer, range(2))
        calls = comm.counters.total().calls - before
        ddp.close()
        return calls

    assert run_ranks(2, body) == [0, 0]


@pytest.mark.parametrize("batches", [(1, 3), (3, 0), (2, 2, 1), (2, 2)], ids=str)
def test_all_ranks_stop_where_one_has_ended_and_train_on_afterwards(batches):
    def body(comm):
        model, optimizer, ddp = wrapped(comm)
        steps = 0

        def epoch():
            nonlocal steps
            with ddp.join(throw_on_early_termination=True):
                for step in range(batches[comm.rank]):
                    train_step(ddp, optimizer, batch(comm.rank, step))
                    steps += 1

        for _ in range(2):
            if len(set(batches)) > 1:
                with pytest.raises(RuntimeError, match=r"rank \d has no more batches"):
                    epoch()
            else:
                epoch()
        train(comm, ddp, optimizer, range(10, 12))
        assert_same_on_all_ranks(comm, model)
        ddp.close()
        return steps

    assert run_ranks(len(batches), body, timeout_s=5) == [2 * min(batches)] * len(batches)


def test_join_takes_pytorchs_name_of_the_divisor():
    def body(comm):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False), comm=comm)
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(comm.rank):
                ddp(torch.ones(1, 1)).sum().backward()
                seen = ddp.module.weight.grad.item()
        ddp.close()
        return seen if comm.rank else None

    assert run_ranks(2, body) == [None, 1.0]
