"""Optimizers that step within the backward pass are found, whatever makes them do so."""

import pytest
import torch
from support.torch_training import batch, loss_of, make_model, sgd
from torch import nn

from bagua_comm import CommError, Decentralized, GradientAllReduce, UnsupportedError
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.training.unaveraged import WeightVersions


def step_in_hooks(model):
    """An optimizer for each parameter, which steps as soon as its gradient is accumulated."""
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())


def step_in_nodes(model):
    """The same by hooks of the graph's nodes, without an optimizer of PyTorch's."""
    nodes = []
    for parameter in model.parameters():
        node = parameter.view_as(parameter).grad_fn.next_functions[0][0]

        def step(*_, parameter=parameter):
            with torch.no_grad():
                parameter.sub_(parameter.grad)

        node.register_hook(step)
        nodes.append(node)
    model.nodes = nodes


def step_the_last(model):
    weight = list(model.parameters())[-1]
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())


@pytest.mark.covering(1)
@pytest.mark.parametrize("by", [step_in_hooks, step_in_nodes, step_the_last])
@pytest.mark.parametrize("first", ["wrapped", "hooked"])
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), Decentralized()], ids=repr)
def test_an_optimizer_that_steps_within_the_backward_pass_is_refused_on_all_ranks(by, first, algorithm):
    def body(comm):
        model = make_model()
        if first == "hooked":
            by(model)
        ddp = DistributedDataParallel(model, sgd(model.parameters()), algorithm, comm=comm)
        if first == "wrapped":
            by(model)
        loss = loss_of(ddp, batch(comm.rank, 0))
        with pytest.raises(UnsupportedError, match=r"stepped within the backward pass, .* after backward"):
            loss.backward()
        ddp.close()

    run_ranks(2, body, timeout_s=5)


def test_one_rank_that_steps_within_the_backward_pass_leaves_no_other_waiting():
    def body(comm):
        model = make_model()
        ddp = DistributedDataParallel(model, comm=comm)
        if comm.rank == 1:
            step_in_hooks(model)
        for step in range(2):
            loss_of(ddp, batch(comm.rank, step)).backward()

    with pytest.raises((UnsupportedError, CommError), match="stepped within the backward pass"):
        run_ranks(2, body, timeout_s=60)  # no rank waits that long


def test_optimizers_of_single_parameters_that_are_given_are_refused_in_the_hook():
    def body(comm):
        model = make_model()
        optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        ddp = DistributedDataParallel(model, optimizers, comm=comm)
        for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
            parameter.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
        loss = loss_of(ddp, batch(comm.rank, 0))
        with pytest.raises(UnsupportedError, match="within the backward pass"):
            loss.backward()
        ddp._steps.detach()

    run_ranks(2, body, timeout_s=5)


def test_hooks_that_step_nothing_are_taken():
    def body(comm):
        model, seen = make_model(), []
        ddp = DistributedDataParallel(model, comm=comm)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm()))
        loss_of(ddp, batch(comm.rank, 0)).backward()
        ddp.close()
        return len(seen)

    assert run_ranks(2, body, timeout_s=5) == [6, 6]


def test_a_parameter_that_is_changed_is_named():
    module = nn.Linear(2, 1)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    versions = WeightVersions(dict(module.named_parameters()))
    versions.begin([["bias", "weight"]])
    assert versions.changed() is None
    versions.begin([["bias", "weight"]])
    with torch.no_grad():
        module.bias.add_(1)
    assert versions.changed() == "bias"
    assert versions.changed() is None
