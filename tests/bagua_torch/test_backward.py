"""Watching backward passes: what is called back, in which order, and when a pass has ended."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bagua_torch.errors import MisuseError
from bagua_torch.training.backward import BackwardWatch, watches_of


class Heard:
    """The callbacks of a watch, in order."""

    def __init__(self, module, groups=None, **raises):
        self.calls, self.raises, self.parameters = [], raises, dict(module.named_parameters())
        self.names = list(self.parameters)
        self.watch = BackwardWatch(
            self.parameters,
            [[name] for name in self.parameters] if groups is None else groups,
            began=lambda: self.hear("began"),
            before=lambda name: self.hear("before", name),
            after=self.after,
            ended=lambda names, inner: self.hear("ended", *sorted(names), *["inner"] * inner),
        )
        self.watch.armed = True
        self.complete_after = {}

    def hear(self, *call):
        self.calls.append(" ".join(call))
        if call[0] in self.raises:
            raise self.raises[call[0]]

    def after(self, index):
        name = self.names[index]
        self.complete_after[name] = self.parameters[name].grad.clone()
        self.hear("after", name)

    def take(self):
        calls, self.calls = self.calls, []
        return calls


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 1, bias=False))


X = torch.ones(4, 2)
ONE_PASS = ["began", "after 1.weight", "after 0.weight"]
BOTH = "ended 0.weight 1.weight"


def test_a_pass_is_reported_from_its_beginning_to_its_end():
    module = two_layers()
    heard = Heard(module)
    module(X).sum().backward()
    assert heard.take() == [*ONE_PASS, BOTH]
    assert {name: g.tolist() for name, g in heard.complete_after.items()} == {
        name: p.grad.tolist() for name, p in module.named_parameters()
    }
    assert not heard.watch.armed
    assert not heard.watch.unfinished


def test_gradients_are_the_same_as_without_a_watch_and_the_very_tensors():
    module, plain = two_layers(), two_layers()
    Heard(module)
    given = []
    for each in (module, plain):
        each[0].weight.register_hook(lambda gradient: given.append(gradient.clone()))
        each(X).square().sum().backward()
    assert torch.equal(given[0], given[1])  # a hook of the user's, behind those that hide the gradient
    for mine, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_group_is_reported_when_its_last_gradient_is_there():
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    heard = Heard(module, [["1.bias", "0.bias"], ["0.weight", "1.weight"]])
    heard.names = ["biases", "weights"]
    heard.parameters |= {"biases": module[0].bias, "weights": module[0].weight}
    module(X).sum().backward()
    told = heard.take()
    assert sorted(told[1:-1]) == ["after biases", "after weights"]
    assert told[-1] == "ended 0.bias 0.weight 1.bias 1.weight"
    heard.watch.regroup([["0.weight"], ["1.weight", "0.bias", "1.bias"]])
    heard.names, heard.watch.armed = ["0.weight", "others"], True
    heard.parameters["others"] = module[0].bias
    module(X).sum().backward()
    assert sorted(heard.take()[1:-1]) == ["after 0.weight", "after others"]


def test_a_group_that_lacks_a_gradient_is_not_reported():
    module = two_layers()
    heard = Heard(module, [["0.weight", "1.weight"]])
    for _ in range(2):  # the next pass starts its count again
        heard.watch.armed = True
        module[1](torch.ones(4, 3)).sum().backward()
        assert heard.take() == ["began", "ended 1.weight"]


def test_gradients_that_are_not_accumulated_are_refused():
    module = two_layers()
    heard = Heard(module)
    loss = module(X).sum()
    with pytest.raises(MisuseError, match=r"autograd\.grad of parameters"):
        torch.autograd.grad(loss, list(module.parameters()), retain_graph=True)
    assert heard.take() == ["began"]
    loss.backward()
    assert heard.take() == [*ONE_PASS, BOTH]


def with_an_inner_pass(module, x):
    """`x`, whose backward pass runs a whole pass of the module."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                module(X).sum().backward()
            return gradient

    return Inner.apply(x)


def test_two_gradients_of_a_parameter_in_one_pass_are_refused():
    """The inner pass computes both, when the outer one has computed one of them."""
    module = two_layers()
    Heard(module)

    with pytest.raises(MisuseError, match=r"'1\.weight' got two gradients"):
        module[1](with_an_inner_pass(module, module[0](X))).sum().backward()


def test_a_pass_that_fails_before_its_first_gradient_leaves_no_trace():
    module = two_layers()
    heard = Heard(module)
    fails = [True]

    def fail(_):
        if fails:
            raise ValueError("not yet")

    module[1].weight.register_hook(fail)
    with pytest.raises(ValueError, match="not yet"):
        module(X).sum().backward()
    assert heard.take() == ["began"]
    assert not heard.watch.unfinished
    fails.clear()
    module[1](torch.ones(4, 3)).sum().backward()  # its end is found, too
    assert heard.take() == ["after 1.weight", "ended 1.weight"]


def test_a_pass_that_fails_does_not_affect_the_reports_of_the_next():
    module = two_layers()
    heard = Heard(module)

    def fail(_):
        raise ValueError("not yet")

    failing = module[1].weight.register_hook(fail)
    with pytest.raises(ValueError, match="not yet"):
        module(X).sum().backward()
    failing.remove()
    NoGradient.apply(torch.ones(4, 1, requires_grad=True), module[0].weight).sum().backward()
    assert heard.take() == ["began", "ended"]


def test_a_watch_that_is_not_armed_follows_no_pass():
    module = two_layers()
    heard = Heard(module)
    heard.watch.armed = False
    module(X).sum().backward()
    assert heard.take() == ["before 1.weight", "before 0.weight"]
    assert not heard.watch.unfinished


def test_it_is_armed_for_one_pass():
    """As for `no_sync`: the first pass is not followed, the second is, the third is not again."""
    module = two_layers()
    heard = Heard(module)
    told = []
    for armed in (False, True, None):
        if armed is not None:
            heard.watch.armed = armed
        module(X).sum().backward()
        told.append("began" in heard.take())
    assert told == [False, True, False]


def test_parameters_that_take_no_part_are_not_waited_for():
    module = two_layers()
    heard = Heard(module)
    module[1](torch.ones(4, 3)).sum().backward()
    assert heard.take() == ["began", "after 1.weight", "ended 1.weight"]
    heard.watch.armed = True
    module(X).sum().backward()
    assert heard.take() == [*ONE_PASS, BOTH]


def test_a_pass_that_reaches_no_parameter_is_ended_by_its_caller():
    module = two_layers()
    heard = Heard(module)
    torch.ones(2, requires_grad=True).sum().backward()
    assert heard.take() == []
    heard.watch.end()
    assert heard.take() == ["ended"]
    assert not heard.watch.armed


def test_two_forward_passes_make_one_pass():
    module = two_layers()
    heard = Heard(module)
    (module(X).sum() + module(2 * X).sum()).backward()
    assert heard.take() == [*ONE_PASS, BOTH]


def test_two_passes_through_one_graph_are_two():
    module = two_layers()
    heard = Heard(module)
    loss = module(X).sum()
    loss.backward(retain_graph=True)
    heard.watch.armed = True
    loss.backward()
    assert heard.take() == [*ONE_PASS, BOTH] * 2


@pytest.fixture
def always_warned():
    """PyTorch warns once in a process, which is left to the test that is about it."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


def test_a_graph_of_the_gradients_may_be_made(always_warned):
    module = two_layers()
    heard = Heard(module)
    with pytest.warns(UserWarning, match="create_graph"):
        module(X).sum().backward(create_graph=True)
    assert heard.take() == [*ONE_PASS, BOTH]


def test_a_frozen_input_and_a_tied_parameter():
    module = two_layers()
    heard = Heard(module)
    (module[1](module[0](X)) + module[1](torch.ones(4, 3))).sum().backward()
    assert heard.take() == [*ONE_PASS, BOTH]


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_a_gradient_that_is_not_computed_is_not_reported():
    module = two_layers()
    heard = Heard(module)
    NoGradient.apply(module[1](torch.ones(4, 3)), module[0].weight).sum().backward()
    assert heard.take() == ["began", "after 1.weight", "ended 1.weight"]


def test_sparse_gradients_are_reported_and_arrive():
    module = nn.Embedding(5, 2, sparse=True)
    heard = Heard(module)
    module(torch.tensor([1, 3])).sum().backward()
    assert heard.take() == ["began", "after weight", "ended weight"]
    assert module.weight.grad.to_dense().sum(1).tolist() == [0, 2, 0, 2, 0]


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("in the middle")


def test_a_pass_that_fails_is_unfinished_until_it_is_forgotten():
    module = two_layers()
    heard = Heard(module)
    with pytest.raises(ValueError, match="in the middle"):
        module[1](Failing.apply(module[0](X))).sum().backward()
    assert heard.take() == ["began", "after 1.weight"]
    assert heard.watch.unfinished
    heard.watch.reset()
    assert not heard.watch.unfinished
    heard.watch.armed = True
    module(X).sum().backward()
    assert heard.take() == [*ONE_PASS, BOTH]


@pytest.mark.parametrize("call", ["began", "after", "ended"])
def test_an_error_of_a_callback_is_raised_by_the_backward_pass(call):
    module = two_layers()
    heard = Heard(module, **{call: ValueError("no")})
    with pytest.raises(ValueError, match="no"):
        module(X).sum().backward()
    assert heard.calls[-1].startswith(call)


def test_an_error_at_the_end_of_a_pass_with_unused_parameters_is_raised_by_the_backward_pass():
    module = two_layers()
    heard = Heard(module, ended=ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        module[1](torch.ones(4, 3)).sum().backward()
    assert not heard.watch.unfinished


def test_a_checkpoint_is_part_of_the_pass_and_a_reentrant_one_is_a_pass_inside_it():
    module = two_layers()
    heard = Heard(module)
    told = {}
    for reentrant in (False, True):
        heard.watch.armed = True
        x = checkpoint(module[0], X.clone().requires_grad_(), use_reentrant=reentrant)
        checkpoint(module[1], x, use_reentrant=reentrant).sum().backward()
        told[reentrant] = heard.take()
    assert told[False] == [*ONE_PASS, BOTH]
    assert told[True] == [*ONE_PASS[:2], "ended 1.weight inner", "began", *ONE_PASS[2:], "ended 0.weight inner"]


def test_a_pass_inside_another_one_ends_and_the_outer_one_continues():
    module = two_layers()
    heard = Heard(module)

    with_an_inner_pass(module, module(X)).sum().backward()
    assert heard.take() == [*ONE_PASS, f"{BOTH} inner", *ONE_PASS, BOTH]
    assert not heard.watch.armed


@pytest.mark.parametrize(
    "wrap", [lambda y: y, lambda y: [y], lambda y: {"y": (y, None)}, lambda y: (3, {"z": y})]
)
def test_it_is_armed_when_a_pass_comes_by_an_output(wrap):
    module = two_layers()
    heard = Heard(module)
    y = module(X)
    heard.watch.arm_at(wrap(y))
    module(X).sum().backward()  # another pass comes first
    assert heard.take() == [*ONE_PASS, BOTH]
    assert not heard.watch.armed
    for _ in range(2):
        y.sum().backward(retain_graph=True)
        assert heard.take() == [*ONE_PASS, BOTH]
        assert not heard.watch.armed


def test_a_watch_whose_hooks_are_removed_calls_back_no_more():
    module = two_layers()
    heard = Heard(module)
    assert all(watches_of(p) == [heard.watch] for p in module.parameters())
    heard.watch.remove()
    module(X).sum().backward()
    assert heard.take() == []
    for parameter in module.parameters():
        assert watches_of(parameter) == []
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_several_watches_of_one_module():
    module = two_layers()
    first, second = Heard(module), Heard(module)
    second.watch.armed = False
    module(X).sum().backward()
    assert first.take() == [*ONE_PASS, BOTH]
    assert second.take() == ["before 1.weight", "before 0.weight"]


def test_methods_are_held_weakly():
    class Owner:
        calls = 0

        def __init__(self, module):
            self.watch = BackwardWatch(
                dict(module.named_parameters()),
                [[name] for name, _ in module.named_parameters()],
                began=self.count,
                before=self.count,
                after=self.count,
                ended=self.count,
            )
            self.watch.armed = True

        def count(self, *_):
            Owner.calls += 1

    module = two_layers()
    owner = Owner(module)
    assert all(watch.owner is owner for p in module.parameters() for watch in watches_of(p))
    module(X).sum().backward()
    assert Owner.calls == 4
    gc.disable()
    try:
        watch, dropped = owner.watch, weakref.ref(owner)
        del owner
        assert dropped() is None
    finally:
        gc.enable()
    assert watch.owner is None
    watch.armed = True
    module(X).sum().backward()
    assert Owner.calls == 4
