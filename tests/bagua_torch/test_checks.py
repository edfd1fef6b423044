"""The checks of a wrapper, one by one: their errors and results, and that they change nothing."""

from functools import partial

import pytest
import torch
from torch import nn

from bagua_comm import (
    ArrayError,
    ByteGrad,
    CommError,
    CommMismatch,
    Decentralized,
    DiLoCo,
    Float16,
    GradientAllReduce,
    MinMaxUInt8,
    QAdam,
    Quantized,
    UnsupportedError,
    after,
    every,
)
from bagua_comm.testing import run_ranks
from bagua_torch import QAdamOptimizer
from bagua_torch.tensors import checks
from bagua_torch.tensors.model_state import ModelState


class Elsewhere(torch.Tensor):
    device = torch.device("cuda", 1)


def contents_of(module, *ignored):
    return ModelState(module, set(ignored))


def trained():
    return dict(nn.Linear(2, 1).named_parameters())


def sgd(parameters):
    return [torch.optim.SGD(parameters.values(), lr=0.1)]


# Names to ignore ------------------------------------------------------------------------------------------


def test_the_names_to_ignore_are_those_given_and_those_listed_for_pytorch():
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    assert checks.names_to_ignore(module, ()) == set()
    assert checks.names_to_ignore(module, ["0.bias", "1.running_mean"]) == {"0.bias", "1.running_mean"}
    module._ddp_params_and_buffers_to_ignore = ["1.weight"]
    assert checks.names_to_ignore(module, ["0.bias"]) == {"0.bias", "1.weight"}


@pytest.mark.parametrize(("names", "message"), [("weight", "is 'weight'"), (["bais"], "there is no 'bais'")])
def test_names_to_ignore_that_are_no_names_are_refused(names, message):
    with pytest.raises(ArrayError, match=message):
        checks.names_to_ignore(nn.Linear(1, 1), names)


# The module -----------------------------------------------------------------------------------------------


def test_the_device_of_a_module_is_returned():
    def body(comm):
        return checks.check_module(comm, contents_of(nn.Linear(2, 1)))

    assert run_ranks(2, body) == [torch.device("cpu")] * 2


def frozen(module):
    return module.requires_grad_(False)


MODULES = {
    "frozen": (lambda: frozen(nn.Linear(1, 1)), RuntimeError, "no parameter to train"),
    "empty": (nn.Tanh, ArrayError, "no parameter to train"),
    "only buffers": (lambda: nn.BatchNorm1d(2, affine=False), ArrayError, "no parameter to train"),
    "lazy": (lambda: nn.Sequential(nn.Linear(1, 1), nn.LazyLinear(1)), RuntimeError, "'1.weight' is lazy; run"),
    "sparse": (lambda: with_buffer(torch.eye(2).to_sparse()), UnsupportedError, "'given'.*layout"),
    "quantized": (lambda: with_buffer(torch.zeros(2).to(torch.float8_e4m3fn)), UnsupportedError, "float8"),
    "meta": (lambda: nn.Linear(1, 1, device="meta"), UnsupportedError, "'weight'.*on meta"),
    "elsewhere": (lambda: with_buffer(elsewhere()), UnsupportedError, "'given' is on cuda:1, .* no device"),
}


def elsewhere():
    return torch.zeros(1).as_subclass(Elsewhere)


def with_buffer(tensor):
    module = nn.Linear(1, 1)
    module.register_buffer("given", tensor)
    return module


@pytest.mark.parametrize(("make", "error", "message"), MODULES.values(), ids=MODULES)
def test_modules_that_cannot_be_trained_are_refused(make, error, message):
    def body(comm):
        with pytest.raises(error, match=message):
            checks.check_module(comm, contents_of(make()))

    run_ranks(1, body)


def test_ignored_parameters_are_not_checked():
    def body(comm):
        return checks.check_module(comm, contents_of(with_buffer(torch.eye(2).to_sparse()), "given"))

    assert run_ranks(1, body) == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (None, "'w' is on cuda:1, but this communicator has no device"),
        (0, r"'w' is on cuda:1, but this rank's .* cuda:0; move the module there, or call .*set_device\(0\)"),
    ],
)
def test_a_tensor_on_another_device_is_refused(mine, message):
    checks.check_device(1, "w", elsewhere())
    checks.check_device(mine, "w", torch.zeros(1))
    with pytest.raises(UnsupportedError, match=message):
        checks.check_device(mine, "w", elsewhere())


# Optimizers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [GradientAllReduce(), ByteGrad()], ids=repr)
def test_gradients_need_no_optimizer(algorithm):
    parameters = trained()
    checks.check_optimizers([], parameters, algorithm)
    checks.check_optimizers(sgd(parameters), parameters, algorithm)


@pytest.mark.parametrize(
    "algorithm",
    [Decentralized(), every(2, GradientAllReduce()), after(2, GradientAllReduce(), ByteGrad())],
    ids=repr,
)
def test_algorithms_that_count_steps_need_optimizers(algorithm):
    parameters = trained()
    checks.check_optimizers(sgd(parameters), parameters, algorithm)
    with pytest.raises(ArrayError, match="depends on steps: give the optimizers"):
        checks.check_optimizers([], parameters, algorithm)


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda mine: ["cuda"], r"optimizers is \['cuda'\].*by name"),
        (lambda mine: sgd(trained()), r"optimizer 0 \(SGD\) has none of the parameters that are averaged"),
        (lambda mine: sgd({"weight": mine["weight"]}), "no optimizer given steps 'bias'; give all"),
    ],
)
def test_optimizers_of_other_parameters_are_refused(optimizers, message):
    parameters = trained()
    with pytest.raises(ArrayError, match=message):
        checks.check_optimizers(optimizers(parameters), parameters, GradientAllReduce())


@pytest.mark.algorithms("all")
@pytest.mark.parametrize(
    ("algorithm", "how"),
    [
        (None, "$"),
        (DiLoCo, r"; DiLoCo is a class: write DiLoCo\(\)$"),
        (ByteGrad, r"; ByteGrad is a function: write ByteGrad\(\)$"),
        (partial(DiLoCo, 4, outer_lr=0.5), r"; a functools.partial makes .*: write DiLoCo\(4, outer_lr=0.5\)$"),
        (lambda: ByteGrad(), "; call it$"),
        (Quantized, r"; Quantized is a class: write GradientAllReduce\(Quantized\(\)\)$"),
        (MinMaxUInt8, r"; MinMaxUInt8 is a class: write GradientAllReduce\(Quantized\(MinMaxUInt8\(\)\)\)$"),
        ("bytegrad", r"; bagua_comm.algorithms.from_name\('bytegrad'\) makes one"),
        (Quantized(), r"; an average becomes one by GradientAllReduce\(Quantized\(\)\)"),
        (Quantized(Float16()), r"; an average becomes one by GradientAllReduce\(Quantized\(...\)\)"),
        (MinMaxUInt8(), r"; a codec becomes one by GradientAllReduce\(Quantized\(MinMaxUInt8\(\)\)\)"),
    ],
)
def test_what_is_no_algorithm_is_refused_with_the_way_to_make_one(algorithm, how):
    with pytest.raises(ArrayError, match=f"expected an algorithm such as ByteGrad\\(\\){how}"):
        checks.check_optimizers([], trained(), algorithm)


def test_no_optimizers_may_be_none_and_what_is_no_list_of_them_is_refused():
    assert checks.listed(None) == checks.listed(()) == []
    (optimizer,) = sgd(trained())
    assert checks.listed(optimizer) == [optimizer]
    with pytest.raises(ArrayError, match=r"optimizers is 7, expected an optimizer .*, or a list of them$"):
        checks.listed(7)
    with pytest.raises(ArrayError, match=r"give an algorithm as algorithm=..., after the optimizers"):
        checks.listed(ByteGrad())


@pytest.mark.parametrize(
    ("optimizers", "message"),
    [
        (lambda p: [], r"QAdam\(.*needs .*QAdamOptimizer: give it"),
        (lambda p: sgd(p), r"QAdam .*QAdamOptimizer, but the optimizer is SGD"),
        (lambda p: [QAdamOptimizer(p.values(), warmup_steps=7)], r"warmup_steps=7 and .*, but QAdam\(.* has 5"),
        (
            lambda p: [QAdamOptimizer([p["weight"]], warmup_steps=5), *sgd({"": p["bias"]})],
            "the optimizer is SGD",
        ),
    ],
)
def test_an_algorithm_that_shares_state_needs_optimizers_that_share_it(optimizers, message):
    parameters = trained()
    algorithm = QAdam(warmup_steps=5)
    checks.check_optimizers([QAdamOptimizer(parameters.values(), warmup_steps=5)], parameters, algorithm)
    for each in (algorithm, after(3, GradientAllReduce(), algorithm)):
        if each is not algorithm and not optimizers(parameters):
            continue  # it depends on steps, which is reported first
        with pytest.raises(ArrayError, match=message):
            checks.check_optimizers(optimizers(parameters), parameters, each)


# Ranks ----------------------------------------------------------------------------------------------------


MODULES_BY_RANK = {
    "shape": (
        lambda rank: nn.Linear(1 + rank, 1),
        "'weight' is float32[1, 1], trained, contiguous on rank 0, and float32[1, 2], trained",
    ),
    "parameter": (
        lambda rank: nn.Linear(1, 1, bias=rank == 0),
        "rank 0 has 'bias' where rank 1 has nothing more",
    ),
    "name": (
        lambda rank: nn.ModuleDict({"ab"[rank]: nn.Linear(1, 1)}),
        "rank 0 has 'a.weight' where rank 1 has 'b.weight'",
    ),
    "dtype": (
        lambda rank: nn.Linear(1, 1).to(torch.float64 if rank else None),
        "'weight' is float32[1, 1], trained, contiguous on rank 0, and float64[1, 1], trained",
    ),
    "frozen": (
        lambda rank: nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(rank == 0)),
        "'1.weight' is float32[1, 1], trained, contiguous on rank 0, and float32[1, 1], not trained on rank 1",
    ),
    "buffer": (
        lambda rank: nn.BatchNorm1d(1, track_running_stats=rank == 0),
        "rank 0 has 'running_mean' where rank 1 has nothing more",
    ),
}


@pytest.mark.parametrize(("make", "words"), MODULES_BY_RANK.values(), ids=MODULES_BY_RANK)
def test_modules_that_differ_raise_in_words_on_all_ranks(make, words):
    assert_different(words, make=make)


def test_numbers_of_optimizers_and_tuners_that_differ_raise_in_words_on_all_ranks():
    words = "the number of optimizers is 0 on rank 0, and 1 on rank 1; give the same on all ranks"
    assert_different(words, optimizers=lambda rank: rank)
    words = "the tuner is given on rank 0, and not given on rank 1; give the same on all ranks"
    assert_different(words, tuned=lambda rank: rank == 0)


def assert_different(
    words, *, make=lambda rank: nn.Linear(1, 1), optimizers=lambda rank: 1, tuned=lambda rank: False
):
    def body(comm):
        contents = contents_of(make(comm.rank))
        mine = sgd(contents.trained) * optimizers(comm.rank)
        with pytest.raises(CommMismatch) as caught:
            checks.check_ranks(comm, contents, mine, tuned=tuned(comm.rank))
        assert isinstance(caught.value, RuntimeError)
        return str(caught.value)

    first, second = run_ranks(2, body)
    assert first == second
    assert first.startswith(f"DistributedDataParallel: ranks differ: {words}")


def test_ranks_that_are_alike_pass():
    def body(comm):
        module = nn.Linear(1, 1)
        if comm.rank:
            module.register_buffer("mine", torch.zeros(3))
        checks.check_ranks(comm, contents_of(module, "mine"), [], tuned=False)

    run_ranks(2, body)


# In the course of training --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("more", nn.Parameter(torch.ones(1)), ArrayError, "'more' was added after the module was wrapped"),
        ("weight", nn.Parameter(torch.ones(1, 2)), ArrayError, "'weight' is another parameter than when"),
        ("weight._in_backward_optimizers", [], UnsupportedError, "'weight' has an optimizer that steps within"),
    ],
)
def test_a_module_that_was_changed_is_refused(name, value, error, message):
    module = nn.Linear(2, 1)
    contents = contents_of(module)
    checks.check_unchanged(contents)
    owner, _, name = name.rpartition(".")
    setattr(getattr(module, owner) if owner else module, name, value)
    with pytest.raises(error, match=message):
        checks.check_unchanged(contents)


def freeze(module):
    module.bias.requires_grad_(False)


def unfreeze(module):
    module.bias.requires_grad_(True)


def test_a_parameter_that_was_frozen_before_is_found_when_it_is_unfrozen():
    module = nn.Linear(2, 1)
    contents = contents_of(module)
    for change in (freeze, unfreeze, freeze):
        change(module)
        assert checks.check_unchanged(contents) == {}
    contents = contents_of(module)
    unfreeze(module)
    assert checks.check_unchanged(contents) == {"bias": module.bias}
    contents.train({"bias": module.bias})
    assert list(contents.trained) == ["weight", "bias"]
    assert checks.check_unchanged(contents) == {}


def test_a_parameter_that_is_ignored_may_change():
    module = nn.Linear(2, 1)
    freeze(module)
    contents = contents_of(module, "bias")
    unfreeze(module)
    assert checks.check_unchanged(contents) == {}


def test_the_end_of_a_wrapper_and_of_a_backward_pass():
    checks.check_open(closed=False)
    checks.check_backward_ended(unfinished=False)
    with pytest.raises(CommError, match="closed, or its module was wrapped again"):
        checks.check_open(closed=True)
    with pytest.raises(CommError, match="the last backward pass did not end"):
        checks.check_backward_ended(unfinished=True)


# Agreement of ranks ---------------------------------------------------------------------------------------


def test_a_tied_parameter_is_ignored_only_under_all_its_names():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    names = ["0.weight", "0.bias", "1.bias"]
    assert list(contents_of(module).trained) == names
    assert list(contents_of(module, "0.weight").trained) == names
    assert list(contents_of(module, "0.weight", "1.weight").trained) == names[1:]


def test_frozen_parameters_and_buffers_are_common_and_not_trained():
    module = nn.Sequential(frozen(nn.Linear(1, 1)), nn.BatchNorm1d(1))
    contents = contents_of(module, "1.running_var")
    assert list(contents.trained) == ["1.weight", "1.bias"]
    assert list(contents.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert list(contents.buffers()) == ["1.running_mean", "1.num_batches_tracked"]
    assert list(contents.tensors()) == [*contents.parameters, *contents.buffers()]
