"""Transformers' Trainer with the averages of bagua_comm.

    trainer = Trainer(model, arguments, ...)
    trainer.add_callback(BaguaCallback(trainer, Quantized()))
    trainer.train()

Trainer wraps its model in PyTorch's DistributedDataParallel. The callback registers a communication hook on it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from bagua_comm import Average, Communicator, Quantized, UnsupportedError
from bagua_comm.averages.base import check_average_argument
from bagua_comm.comm.weights import check_weight_argument

from .bases import with_base
from .ddp.comm_hook import comm_hook

if TYPE_CHECKING:
    from transformers import TrainerCallback as _Base
else:
    _Base = object

__all__ = ["BaguaCallback"]


class BaguaCallback(_Base):  # type: ignore[misc]
    """A callback of Transformers' Trainer: gradients are averaged by an average of bagua_comm.

    Start the program by mpirun, torchrun or `bagua run`. All else is Trainer's own: accumulation, clipping, mixed
    precision, checkpoints. With one rank nothing is averaged. An average with a state, `ErrorFeedback`, starts
    anew when `trainer.train` resumes from a checkpoint.

    Args:
        trainer: The Trainer. A callback belongs to it alone: `trainer.add_callback(BaguaCallback(trainer))`.
        average: What is sent, as for `bagua_torch.comm_hook`; `Quantized()`, eight bits, if None.
        comm: The ranks; if None, the default communicator, for which `bagua_torch.connect` is called if needed.
        weight: A function that returns the number of this rank's tokens in a step, for means by tokens; see
            `bagua_torch.comm_hook`. Give it with `average_tokens_across_devices=False`: else Trainer has
            multiplied the losses already, and waits for the numbers of all ranks in each step.

    Raises:
        ArrayError: `average` is not an Average, or `weight` no function.
        UnsupportedError: Transformers is not installed. When training begins: Trainer has not wrapped the model
            in PyTorch's DistributedDataParallel (FSDP, DeepSpeed, or several devices in one process).
    """

    def __new__(cls, *_: object, **__: object) -> BaguaCallback:  # noqa: D102
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as exc:
            raise UnsupportedError(
                f"{cls.__name__}: transformers cannot be imported ({exc}); pip install transformers"
            ) from exc
        own: type = cls
        made: BaguaCallback = object.__new__(with_base(own, transformers.TrainerCallback))
        return made

    def __init__(
        self,
        trainer: Any,
        average: Average | None = None,
        comm: Communicator | None = None,
        *,
        weight: Callable[[], float | None] | None = None,
    ) -> None:
        self._average = Quantized() if average is None else average
        check_average_argument(type(self).__name__, self._average)
        check_weight_argument(type(self).__name__, weight)
        self._trainer, self._comm, self._weight = trainer, comm, weight
        self._hooked: DistributedDataParallel | None = None

    def on_train_begin(self, args: Any, state: object, control: object, **_: object) -> None:
        """Register the hook on the model that Trainer has wrapped. Collective."""
        if args.world_size == 1:
            return
        wrapped = self._trainer.model_wrapped
        parts = wrapped.modules()  # torch.compile puts a module around the wrapper
        wrapper = next((part for part in parts if isinstance(part, DistributedDataParallel)), None)
        if wrapper is None:
            raise UnsupportedError(
                f"{type(self).__name__}: Trainer runs the model in {type(wrapped).__name__}, expected PyTorch's "
                "DistributedDataParallel: leave out FSDP and DeepSpeed, and start one process a device"
            )
        if wrapper is not self._hooked:  # `train` may be called again, with the same wrapper
            wrapper.register_comm_hook(None, comm_hook(self._average, self._comm, weight=self._weight))
            self._hooked = wrapper
