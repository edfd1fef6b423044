"""The attributes and methods of PyTorch's wrapper: each works, or raises an error that says what to use."""

import copy
import functools

import pytest
import torch
from support.torch_training import batch, gradients, loss_of, make_model, train_step, wrapped
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp

import bagua_comm
from bagua_comm import ArrayError, ByteGrad, DiLoCo, GradientAllReduce, Hierarchical, MinMaxUInt8, Quantized
from bagua_comm.testing import run_ranks
from bagua_torch import DistributedDataParallel
from bagua_torch.ddp.torch_names import INSTEAD
from bagua_torch.errors import MissingError

PyTorchs = nn.parallel.DistributedDataParallel


@pytest.fixture
def pytorchs(gloo):
    """PyTorch's own wrapper of a module with a buffer, after a step, in a group of one rank."""
    wrapper = PyTorchs(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), static_graph=True)
    wrapper(torch.ones(3, 2)).sum().backward()
    return wrapper


@pytest.fixture
def ours():
    def made(comm):
        return DistributedDataParallel(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), comm=comm)

    (wrapper,) = run_ranks(1, lambda comm: (made(comm),))[0]
    return wrapper


def own_names(wrapper):
    """The attributes of PyTorch's wrapper that a plain module does not have, but for that of its `Join`."""
    plain = {*dir(nn.Module), *vars(nn.Module()), "_join_config"}
    return [name for name in {*dir(wrapper), *vars(wrapper)} if name not in plain and not name.startswith("__")]


SAME = [
    *("batched_grad_copy", "broadcast_buffers", "bucket_bytes_cap_list", "device", "device_ids", "device_type"),
    *("dim", "find_unused_parameters", "forward_sync_buffers", "is_multi_device_module", "mixed_precision"),
    *("output_device", "parameters_to_ignore", "process_group", "require_backward_grad_sync"),
    *("require_forward_param_sync", "skip_all_reduce_unused_params"),
]
"""Attributes that have the same value here."""


def test_each_name_of_pytorchs_wrapper_works_or_says_what_to_use(pytorchs, ours):
    """A new version of PyTorch that adds a name fails here."""
    names = own_names(pytorchs)
    assert len(names) > 80
    assert "reducer" in names
    for name in names:
        if hasattr(ours, name):
            assert name in dir(type(ours)) or name in {*vars(ours), "module"}, name
            continue
        with pytest.raises(MissingError, match=f"no attribute '{name}'; PyTorch's has one: here, .{{9}}"):
            getattr(ours, name)
        with pytest.raises(MissingError, match=f"'{name}' cannot be set; .{{9}}"):
            setattr(ours, name, object())
    assert [name for name in INSTEAD if not name.startswith("_") and hasattr(ours, name)] == ["process_group"]
    for name in SAME:
        assert getattr(ours, name) == getattr(pytorchs, name), name
    assert list(ours.named_module_buffers) == list(pytorchs.named_module_buffers)
    assert len(ours.modules_buffers) == len(pytorchs.modules_buffers) == 3
    assert ours.will_sync_module_buffers() == pytorchs.will_sync_module_buffers()


def test_an_attribute_that_would_have_no_effect_is_not_set_in_silence(pytorchs, ours):
    settable = {"require_backward_grad_sync", "find_unused_parameters", "static_graph", "broadcast_buffers"}
    for name, value in vars(pytorchs).items():
        if name not in own_names(pytorchs) or name in {*settable, "forward_sync_buffers"}:
            continue
        if hasattr(ours, name) and (value is None or isinstance(value, bool | int | str | torch.device)):
            setattr(ours, name, getattr(ours, name))  # as frameworks restore it
        with pytest.raises(MissingError, match=f"'{name}' cannot be set; "):
            setattr(ours, name, object())
    ours.process_group = ours.process_group  # as subclasses set it
    for name in settable:
        setattr(ours, name, not getattr(ours, name))
    assert not ours.forward_sync_buffers
    assert ours.find_unused_parameters
    for name, way in {
        "algorithm": "switch",
        "bucket_bytes": "replan",
        "optimizers": "wrap",
        "comm": "wrap",
    }.items():
        with pytest.raises(MissingError, match=f"'{name}' cannot be set; .*{way}"):
            setattr(ours, name, None)


def test_attributes_of_the_user_stay_on_the_wrapper(ours):
    ours.foo = 1
    ours.extra = nn.Linear(1, 1)
    assert ours.foo == 1
    assert not hasattr(ours.module, "foo")
    assert "extra.weight" in dict(ours.named_parameters())
    ours.module.bar = 2
    assert ours.bar == 2
    message = (
        "'DistributedDataParallel' object has no attribute 'missing', and neither has its module, a Sequential"
    )
    with pytest.raises(AttributeError, match=message):
        _ = ours.missing
    assert getattr(ours, "logger", None) is None


def test_settings_are_reported_by_pytorchs_names(pytorchs, ours):
    theirs, mine = pytorchs._get_ddp_logging_data(), ours._get_ddp_logging_data()
    assert mine.keys() <= {*theirs, "comm_hook"}
    ours_alone = {"bucket_cap_bytes", "bucket_sizes", "dtypes", "comm_hook", "gradient_as_bucket_view"}
    for name in mine.keys() - ours_alone:
        assert mine[name] == theirs[name], name


def test_pytorchs_functions_name_what_to_ignore():
    def body(comm):
        model = make_model()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["4.bias"])
        ddp = DistributedDataParallel(model, comm=comm)
        ddp._set_static_graph()
        ddp._check_reducer_finalized()
        assert ddp.static_graph
        assert ddp.parameters_to_ignore == {"4.bias"}
        assert len(list(DistributedDataParallel._get_data_parallel_params(model))) == 5
        ddp.close()

    run_ranks(1, body)


# Frameworks ask isinstance(model, torch.nn.parallel.DistributedDataParallel) ------------------------------


def test_it_counts_as_pytorchs_wrapper(ours):
    assert isinstance(ours, PyTorchs)
    assert issubclass(DistributedDataParallel, PyTorchs)
    assert not isinstance(ours.module, PyTorchs)


@pytest.mark.parametrize("algorithm", [None, DiLoCo(2)], ids=repr)
def test_checkpoints_of_pytorch_have_the_names_of_the_plain_module(algorithm):
    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        train_step(ddp, optimizer, batch(comm.rank, 0))
        state, of_optimizer = dcp.get_state_dict(ddp, optimizer)
        assert [name for name in state if name != "_extra_state"] == list(model.state_dict())
        assert list(of_optimizer["state"]) == list(model.state_dict())
        with torch.no_grad():
            changed = {n: v if n == "_extra_state" else v + 1 for n, v in copy.deepcopy(state).items()}
        dcp.set_model_state_dict(ddp, dict(changed))
        for name, value in model.state_dict().items():
            assert torch.equal(value, changed[name])
        dcp.set_optimizer_state_dict(ddp, optimizer, of_optimizer)
        ddp.close()

    run_ranks(2, body, timeout_s=10)


def test_a_checkpoint_of_pytorch_counts_no_step_before_the_first():
    """It makes a step at rate 0, so that the optimizer has its state."""

    def body(comm):
        model, optimizer, ddp = wrapped(comm, DiLoCo(2))
        dcp.get_optimizer_state_dict(ddp, optimizer)
        for step in range(2):
            train_step(ddp, optimizer, batch(comm.rank, step))
        assert ddp.engine.step == 2
        ddp.engine.settle()
        comm.check_consistency(gradients(model).numpy() * 0 + ddp.engine.counter.calls)
        assert ddp.engine.counter.calls == len(ddp.engine.buckets)  # one outer step
        ddp.close()

    run_ranks(2, body, timeout_s=10)


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("algorithm", [GradientAllReduce(), DiLoCo(2)], ids=repr)
def test_accelerate_unwraps_it_and_averages_a_pass_that_it_triggers(algorithm):
    from accelerate import Accelerator
    from accelerate.utils import extract_model_from_parallel

    accelerator = Accelerator(cpu=True)

    def body(comm):
        model, optimizer, ddp = wrapped(comm, algorithm)
        assert extract_model_from_parallel(ddp) is model
        with ddp.no_sync():
            losses = [loss_of(ddp, batch(comm.rank, part)) for part in range(2)]
        losses[0].backward()
        with accelerator.trigger_sync_in_backward(ddp):
            losses[1].backward()
        assert ddp.require_backward_grad_sync
        mine = gradients(model)
        optimizer.step()
        assert ddp.engine.step == 1
        ddp.close()
        return mine

    plains = [make_model() for _ in range(2)]
    for rank, plain in enumerate(plains):
        for part in range(2):
            loss_of(plain, batch(rank, part)).backward()
    each = torch.stack([gradients(plain) for plain in plains])
    expected = each if algorithm.payload == "weight" else each.mean(0).expand_as(each)
    torch.testing.assert_close(torch.stack(run_ranks(2, body, timeout_s=10)), expected)


# Classes in place of objects ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: bagua_comm.every(2, DiLoCo), r"DiLoCo\(\)"),
        (lambda: bagua_comm.after(2, ByteGrad(), functools.partial(DiLoCo, 4)), r"DiLoCo\(4\)"),
        (lambda: GradientAllReduce(Quantized), r"Quantized\(\)"),
        (lambda: GradientAllReduce(MinMaxUInt8), r"Quantized\(MinMaxUInt8\(\)\)"),
        (lambda: GradientAllReduce(bagua_comm.TopK), r"TopK\(\)"),
        (lambda: DiLoCo(2, average=functools.partial(Quantized, min_bytes=0)), r"Quantized\(min_bytes=0\)"),
        (lambda: Hierarchical(Quantized), r"Quantized\(\)"),
        (lambda: Hierarchical(inside=Quantized), r"Quantized\(\)"),
        (lambda: bagua_comm.ErrorFeedback(Quantized), r"Quantized\(\)"),
        (lambda: bagua_comm.ErrorFeedback(residual_codec=MinMaxUInt8), r"MinMaxUInt8\(\)"),
        (lambda: Quantized(MinMaxUInt8), r"MinMaxUInt8\(\)"),
        (lambda: Quantized(functools.partial(MinMaxUInt8, block=64)), r"MinMaxUInt8\(block=64\)"),
    ],
)
def test_a_class_or_a_partial_in_place_of_an_object_is_refused_with_what_to_write(make, write):
    with pytest.raises(ArrayError, match=f": write {write}$"):
        make()


def test_a_class_is_refused_by_the_methods_of_a_wrapper(ours):
    for call in (ours.switch, lambda a: ours.replan(algorithm=a)):
        with pytest.raises(ArrayError, match=r"DiLoCo is a class: write DiLoCo\(\)$"):
            call(DiLoCo)
    for hook in (Quantized, functools.partial(Quantized)):
        with pytest.raises(ArrayError, match=r"register_comm_hook: hook is .*: write Quantized\(\)$"):
            ours.register_comm_hook(None, hook)
