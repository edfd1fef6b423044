"""The callback for Transformers' Trainer. Without Transformers, which imports slowly; an example uses it."""

import sys
import types

import pytest
from torch import nn

import bagua_torch.transformers
from bagua_comm import ArrayError, ByteGrad, ErrorFeedback, Quantized, UnsupportedError
from bagua_torch.transformers import BaguaCallback


class TrainerCallback:
    """Stands for that of Transformers: Trainer calls every event of it."""

    def on_step_end(self, args, state, control, **kwargs):
        pass


class Wrapper(nn.parallel.DistributedDataParallel):
    """Stands for PyTorch's wrapper, which needs a process group."""

    def __init__(self, module):
        nn.Module.__init__(self)
        self.module, self.hooks = module, []

    def register_comm_hook(self, state, hook):
        assert not self.hooks, "as in PyTorch, once for a wrapper"
        self.hooks.append((state, hook))


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    module = types.ModuleType("transformers")
    module.TrainerCallback = TrainerCallback
    monkeypatch.setitem(sys.modules, "transformers", module)
    monkeypatch.setattr(bagua_torch.transformers, "comm_hook", lambda *given, weight: ("hook", *given, weight))


def trainer_of(model):
    return types.SimpleNamespace(model_wrapped=model)


def begin(callback, ranks=2):
    callback.on_train_begin(types.SimpleNamespace(world_size=ranks), None, None, model=None, optimizer=None)


@pytest.mark.parametrize(("average", "sent"), [(None, Quantized()), (ErrorFeedback(), ErrorFeedback())])
def test_gradients_of_the_wrapped_model_are_averaged(average, sent):
    wrapper = Wrapper(nn.Linear(2, 1))
    callback = BaguaCallback(trainer_of(wrapper), average, comm="ranks", weight=print)
    assert isinstance(callback, TrainerCallback)
    assert isinstance(callback, BaguaCallback)
    callback.on_step_end(None, None, None)
    assert not wrapper.hooks
    begin(callback)
    begin(callback)  # `train` is called again
    assert wrapper.hooks == [(None, ("hook", sent, "ranks", print))]


def test_a_new_wrapper_gets_a_hook_of_its_own():
    trainer = trainer_of(Wrapper(nn.Linear(2, 1)))
    callback = BaguaCallback(trainer)
    begin(callback)
    trainer.model_wrapped = Wrapper(nn.Linear(2, 1))  # as after `model_init`
    begin(callback)
    assert len(trainer.model_wrapped.hooks) == 1


def test_the_wrapper_is_found_in_another_module():
    wrapper = Wrapper(nn.Linear(2, 1))
    begin(BaguaCallback(trainer_of(nn.Sequential(wrapper))))  # as torch.compile's is around the wrapper
    assert len(wrapper.hooks) == 1


def test_one_rank_averages_nothing():
    begin(BaguaCallback(trainer_of(nn.Linear(2, 1))), ranks=1)


def test_what_is_wrapped_otherwise_is_refused():
    with pytest.raises(UnsupportedError, match="runs the model in DataParallel, expected PyTorch's Distributed"):
        begin(BaguaCallback(trainer_of(nn.DataParallel(nn.Linear(2, 1)))))


def test_an_algorithm_is_no_average():
    with pytest.raises(ArrayError, match=r"BaguaCallback: average is .*, expected an Average such as"):
        BaguaCallback(trainer_of(None), ByteGrad())


def test_without_transformers_the_error_says_what_brings_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match="pip install transformers"):
        BaguaCallback(trainer_of(None))
